"""A training script as people have it, for Orbax: nothing in it knows of jaxft."""

import sys

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

STEPS = 160


def make_state():
    params = {"w": jnp.zeros((8, 4)), "b": jnp.zeros(4)}
    return {"params": params, "opt": optimizer.init(params), "step": 0}


def loss_of(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


@jax.jit
def train_step(params, opt, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    updates, opt = optimizer.update(grads, opt)
    return optax.apply_updates(params, updates), opt, loss


def batch_of(step):
    x = jax.random.normal(jax.random.key(step), (16, 8))
    return x, x[:, :4] * 2.0 + 1.0


optimizer = optax.adam(1e-2)
options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=100)
manager = ocp.CheckpointManager(sys.argv[1], options=options)

state = make_state()
latest = manager.latest_step()
if latest is not None:
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    state = manager.restore(latest, args=ocp.args.StandardRestore(target))
print(
    "from", state["step"], "on storage", sorted(ocp.utils.checkpoint_steps(sys.argv[1])), flush=True
)

params, opt = state["params"], state["opt"]
for step in range(state["step"] + 1, STEPS + 1):
    params, opt, loss = train_step(params, opt, batch_of(step))
    manager.save(step, args=ocp.args.StandardSave({"params": params, "opt": opt, "step": step}))
    print("step", step, flush=True)
if manager.latest_step() != STEPS:
    state = {"params": params, "opt": opt, "step": STEPS}
    manager.save(STEPS, args=ocp.args.StandardSave(state), force=True)
manager.close()
loss = loss_of(params, batch_of(STEPS))
print("loss", float(loss).hex(), "sum", float(params["w"].sum()).hex(), flush=True)
