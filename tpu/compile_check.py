"""Compiles kernels of device parity and a step's twin for TPUs and GPUs that need not be there.

    python tpu/compile_check.py [v5e] [v6e] [h200] [--quick] [--only kernels|twin]
    python tpu/compile_check.py --platform cpu --quick       # to see that it runs

What it requires of the kernels, for every code k+m up to 8+4, for decoding, and for lengths on and
off tiles:
- the portable kernel is one fusion (no more than one operation), without temporary memory;
- the Pallas kernel of the platform is accepted by its compiler (Mosaic; Triton), and takes no
  temporary memory where the length is whole rows of 128 words;
- packing leaves into words and unpacking them takes no more temporary memory than a few times
  what the words take (they are moved into rows, and from rows).

What it requires of the twin (`jaxft.wrap`) of a step of two transformer blocks with AdamW, whose
state is in float32, first moments in bfloat16, and is donated, replicated or sharded over four
hosts of one device (3+1) or two hosts of four (1+1), without parity and with that of the devices:
- every fusion of the step is one of the twin's, but for names, the place in the memory on the
  chip or beside it, and the collective that is under way at the time;
- what it gives, the owned bytes of a device and their parity, goes to the host's memory;
- the twin takes no more temporary memory than the step, what it gives, and for parity MOST_BUCKETS
  of the buckets that are worked on one after the other; and it donates as much as the step;
- beside the step's collectives there are k x m permutations a bucket, and nothing else.

It prints a line for each kind of check, every miss, and last what was checked. Exit status: 0 if
all holds, 1 if not, 2 if a package is missing. For the CPU, whose compiler makes a loop for each
output and whose memory is the host's, neither one operation nor outputs in the host's are required.
Packages: `pip install 'jax[tpu]'` (1.4 GB) for TPUs; for GPUs
`pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12` in the version of
jax (0.6 GB, compiles and cannot run). For the twin also optax. A GPU that is not there does not say
which memory it has, and JAX then leaves out of a program what is to be in the host's: so the twin
is made on devices of the CPU, for CUDA, and given to the compiler in the way that JAX does it
(which is private to JAX).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from program_text import PERMUTE, collectives, fusions

from jaxft.device.calls import Call
from jaxft.device.lanes import Rings, find_rings
from jaxft.device.leaves import describe
from jaxft.device.parity import Kernel, combine, exchange, lay_out, pack, unpack
from jaxft.device.shards import Plan, Processes, make_plan
from jaxft.device.twin import LoweredTwin, Outputs
from jaxft.group.codec import decode_matrix, encode_rows
from jaxft.group.placement import form_groups
from jaxft.group.world import Code

WORDS = 1 << 20
# Whole rows of lanes but no whole blocks, shorter than a block, and neither.
OTHER_WORDS = (128 * 8195, 128 * 3, 1_000_003, 5)
# A program's own bookkeeping.
SLACK_BYTES = 4096

# What XLA wants to know of a GPU that is not there (its GpuTargetConfigProto).
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 } device_description_str: "NVIDIA H200"
"""

# Pallas wants to know as well, from jax 0.12 on.
GPU = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")


@dataclass(frozen=True)
class World:
    """Hosts, how many devices each has, and the code between them."""

    hosts: int
    each: int
    code: Code


WORLDS = (
    World(4, 1, Code(data=3, parity=1)),
    World(2, 4, Code(data=1, parity=1)),
)


@dataclass(frozen=True)
class Program:
    """A compiled program: its text, what it takes of memory, how long it took."""

    text: str
    memory: Any
    compile_s: float


@dataclass(frozen=True)
class Target:
    """What is compiled for: the devices of a world, the platform if programs are not made on these
    but on the CPU's, its Pallas kernel if it has one, and what to install for it."""

    describe: Callable[[World], Sequence[Any]]
    pallas: Kernel | None
    install: str
    platform: str | None = None

    @property
    def is_accelerator(self) -> bool:
        return self.pallas is not None

    def made_on(self, world: World) -> Sequence[Any]:
        """The devices that a program of several is made on."""
        found = self.describe(world)
        return found if self.platform is None else jax.devices()[: len(found)]

    def compile(self, lowered: Any, world: World) -> Program:
        start_s = time.monotonic()
        if self.platform is None:
            made = lowered.compile()
            text, memory = made.as_text(), made.memory_analysis()
        else:
            made = _compile_beside(lowered, self.describe(world))
            text, memory = made.hlo_modules()[0].to_string(), made.get_compiled_memory_stats()
        return Program(text, memory, time.monotonic() - start_s)


def _compile_beside(lowered: Any, devices: Sequence[Any]) -> Any:
    """Compiles for other devices than the program was made on. All its inputs and outputs say where
    they are."""
    from jax._src.compiler import get_compile_options
    from jaxlib.xla_client import DeviceList

    numbers = np.arange(len(devices))[np.newaxis]
    options = get_compile_options(1, len(devices), device_assignment=numbers)
    where = DeviceList(tuple(devices))
    module = lowered.compiler_ir("stablehlo")
    return devices[0].client.compile(module, executable_devices=where, compile_options=options)


def _tpu(kind: str) -> Target:
    def describe(world: World) -> Sequence[Any]:
        """A host has one chip of the topology, or four."""
        shape = f"{kind}:2x{world.hosts * world.each // 2}"
        bounds = (1, 1, 1) if world.each == 1 else (2, 2, 1)
        get = topologies.get_topology_desc
        devices = get(platform="tpu", topology_name=shape, chips_per_host_bounds=bounds).devices
        return sorted(devices, key=lambda device: (device.process_index, device.id))

    return Target(describe, "pallas_tpu", "pip install 'jax[tpu]'")


def _gpu(config: str) -> Target:
    def describe(world: World) -> Sequence[Any]:
        return topologies.get_topology_desc(
            platform="cuda",
            topology_name="hosts",
            topology=f"1x{world.hosts}x{world.each}",
            target_config=config,
        ).devices

    packages = "jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12"
    return Target(describe, "pallas_gpu", f"pip install --no-deps {packages}", "cuda")


def _cpu() -> Target:
    return Target(lambda world: jax.devices("cpu")[: world.hosts * world.each], None, "")


TARGETS = {"v5e": _tpu("v5e"), "v6e": _tpu("v6e"), "h200": _gpu(H200)}


@dataclass(frozen=True)
class Compiled:
    """A program's operations that do something, and its temporary memory."""

    operations: tuple[str, ...]
    temp_bytes: int


def compiled(function: Callable[..., Any], arguments: Any) -> Compiled:
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=GPU)):
        program = jax.jit(function).trace(*arguments).lower().compile()
    text = program.as_text()
    entry = text[text.index("\nENTRY ") :]
    found = re.findall(r"^ +(?:ROOT )?%?[\w.-]+ = .*? ([a-z][\w-]*)\(", entry, re.MULTILINE)
    memory = program.memory_analysis()
    return Compiled(tuple(one for one in found if one not in IDLE), memory.temp_size_in_bytes)


class Checks:
    """All checks of the kernels, for one target."""

    def __init__(self, name: str, target: Target, quick: bool) -> None:
        self.name = name
        self.target = target
        self.quick = quick
        self.programs = 0
        self.sharding = jax.sharding.SingleDeviceSharding(target.describe(WORLDS[0])[0])
        self.misses: list[str] = []

    def run(self) -> None:
        self._kernel("xla", True)
        if self.target.pallas is not None:
            self._kernel(self.target.pallas, False)
        self._packing()

    def _kernel(self, kernel: Kernel, alone: bool) -> None:
        """`alone`: whether no other operation may be there, whatever the length."""
        most_bytes = 0
        counts = set()
        done = 0
        for what, matrix, words in self._cases():
            where = f"{self.name}, {kernel}, {what}, {words} words"
            fragments = [self._struct((words,), jnp.uint32)] * matrix.shape[1]
            try:
                # As arguments of a function of their own, fragments are a list.
                found = compiled(lambda *all, by=matrix: combine(by, all, kernel=kernel), fragments)
            except Exception as error:  # noqa: BLE001 - whatever a compiler says is the result
                self.misses.append(f"{where}: {type(error).__name__}: {str(error)[:400]}")
                continue
            done += 1
            counts.add(len(found.operations))
            whole = alone or words % 128 == 0
            if whole:
                most_bytes = max(most_bytes, found.temp_bytes)
            is_one = len(found.operations) <= 1 or not self.target.is_accelerator
            if whole and (not is_one or found.temp_bytes > SLACK_BYTES):
                self.misses.append(f"{where}: {found}")
        print(
            f"{self.name} {kernel}: {done} programs compiled, {sorted(counts)} operations each, "
            f"at most {most_bytes} bytes of temporary memory for whole rows",
            flush=True,
        )
        self.programs += done

    def _cases(self) -> Iterator[tuple[str, np.ndarray, int]]:
        """What is combined: its name, the matrix, and the length."""
        codes = [(6, 2), (8, 4)] if self.quick else CODES
        for k, m in codes:
            yield f"encode {k}+{m}", encode_rows(k, m), WORDS
        for k, m in [(1, 1), (6, 2), (8, 4)]:
            lost = tuple(range(min(k, m)))
            left = [fragment for fragment in range(k + m) if fragment not in lost][:k]
            yield f"decode {k}+{m}", decode_matrix(k, m, left, lost), WORDS
        for words in OTHER_WORDS[: 1 if self.quick else None]:
            for k, m in [(3, 1), (8, 4)]:
                yield f"encode {k}+{m}", encode_rows(k, m), words

    def _packing(self) -> None:
        """Of a leaf that is larger than a TPU's memory on the chip."""
        for dtype in ("float32",) if self.quick else PACKED:
            leaf = self._struct((16384, 4000), jnp.dtype(dtype))
            packing = lay_out([describe((("k", dtype),), leaf)])
            words = [self._struct((b - a,), jnp.uint32) for a, b in packing.buckets()]
            there = self._temp(lambda *all, by=packing: pack(by, all), [leaf])
            back = self._temp(lambda *all, by=packing: unpack(by, all), words)
            print(
                f"{self.name} {dtype}: {packing.words * 4} bytes of words; temporary memory "
                f"{there} to pack, {back} to unpack",
                flush=True,
            )
            if max(there, back) > TEMP_FACTOR * 4 * packing.words + SLACK_BYTES:
                self.misses.append(f"{self.name}, {dtype}: too much temporary memory")

    def _temp(self, function: Callable[..., Any], arguments: Sequence[Any]) -> int:
        self.programs += 1
        return compiled(function, arguments).temp_bytes

    def _struct(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)


# What moves nothing, or moves words as they are: an output that is an input (1+m), or what a TPU
# takes into its memory on the chip before the program needs it.
IDLE = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant"}
IDLE |= {"copy", "copy-start", "copy-done"}
PACKED = ("float32", "bfloat16", "uint8", "bool")
TEMP_FACTOR = 6
CODES = [(k, m) for k in range(1, 9) for m in range(1, 5)]


# ------------------------------------------------------------------------------ the twin

HEADS = 8
# A batch's sequences for each device, their length, and the width of the blocks.
SHAPE = (1, 128, 1536)
QUICK_SHAPE = (1, 64, 512)
LAYERS = 2
# There are the own words of a bucket in device memory, those that are sent, those that have come,
# and what packing takes; but some of what is given has gone by then.
MOST_BUCKETS = 2
# When it goes is a matter of the schedule, and so is what the step takes, whose memory it is set
# against.
NEARLY = 1.05


class TwinChecks:
    """A step and its twin, for one target."""

    def __init__(self, name: str, target: Target, quick: bool) -> None:
        self.name = name
        self.target = target
        self.shape = QUICK_SHAPE if quick else SHAPE
        self.worlds = WORLDS[:1] if quick else WORLDS
        self.programs = 0
        self.misses: list[str] = []
        target.describe(WORLDS[0])

    def run(self) -> None:
        for world in self.worlds:
            for what, spec in [("replicated", P()), ("sharded", P("data"))]:
                self.compare(world, what, spec)

    def compare(self, world: World, what: str, spec: P) -> None:
        """Compiles the step with a state of this sharding, and its twins."""
        devices = self.target.made_on(world)
        step, state, batch = self._step(Mesh(np.array(devices), ("data",)), spec)
        platforms = None if self.target.platform is None else (self.target.platform,)
        lowered = step.trace(state, batch).lower(lowering_platforms=platforms)
        bare = self.target.compile(lowered, world)
        shardings = jax.tree.map(lambda one: one.sharding, state), batch.sharding.update(spec=P())
        given = jax.tree.map(_placed, jax.eval_shape(step, state, batch), shardings)
        for rings in (None, _rings(world, devices)):
            processes = Processes(index=0, count=world.hosts, of=_process_of(world, devices))
            plan = make_plan(state, processes, rings)
            call = Call(step, (state, batch), {})
            twin = LoweredTwin(
                call,
                Outputs.of(given),
                plan,
                jax.tree.leaves(state),
                platform=self.target.platform,
            )
            coded = "no parity" if twin.lanes is None else str(world.code)
            where = f"{self.name}, twin, {len(devices)} devices, {what}, {coded}"
            self._judge(where, bare, self.target.compile(twin.lowered, world), plan)

    def _judge(self, where: str, bare: Program, twin: Program, plan: Plan) -> None:
        of_step, of_twin = fusions(bare.text), fusions(twin.text)
        gone = (of_step - of_twin).total()
        given_bytes = _owned_bytes(plan)
        bucket_bytes, rounds = 0, 0
        if plan.lanes is not None:
            geometry = plan.lanes.geometry
            buckets = exchange.buckets(geometry)
            given_bytes += geometry.parity_bytes
            bucket_bytes = geometry.k * (buckets[0][1] - buckets[0][0])
            rounds = geometry.k * geometry.m * len(buckets)
        self.programs += 1
        before, after = bare.memory, twin.memory
        temp_bytes = after.temp_size_in_bytes - before.temp_size_in_bytes
        host_bytes = after.host_output_size_in_bytes
        mine, other = collectives(bare.text), collectives(twin.text)
        permuted = sum(other[one] - mine[one] for one in other if one[0] == PERMUTE)
        beside = sorted({one for one in other.keys() - mine.keys() if one[0] != PERMUTE})
        print(
            f"{where}: {gone} of the step's {of_step.total()} fusions are not among the twin's "
            f"{of_twin.total()}; it gives {given_bytes} bytes a device, {host_bytes} to the host; "
            f"{temp_bytes} bytes of temporary memory beyond the step's "
            f"{before.temp_size_in_bytes}, a bucket has {bucket_bytes}; {permuted} permutations; "
            f"compiled in {twin.compile_s:.0f} s, the step in {bare.compile_s:.0f} s",
            flush=True,
        )
        if gone:
            self.misses.append(f"{where}: {gone} fusions of the step are not the twin's")
        most_bytes = NEARLY * given_bytes + MOST_BUCKETS * bucket_bytes
        if temp_bytes > most_bytes + SLACK_BYTES:
            self.misses.append(f"{where}: {temp_bytes} bytes more of temporary memory")
        if host_bytes < given_bytes and self.target.is_accelerator:
            self.misses.append(f"{where}: only {host_bytes} bytes are given to the host")
        if not after.alias_size_in_bytes == before.alias_size_in_bytes > 0:
            self.misses.append(f"{where}: the twin does not donate what the step does")
        if permuted != rounds:
            self.misses.append(f"{where}: {permuted} permutations, expected {rounds}")
        if beside:
            self.misses.append(f"{where}: collectives that are not the step's: {beside}")

    def _step(self, mesh: Mesh, spec: P) -> tuple[Any, Any, Any]:
        """A jitted step, and what stands for its state and its batch."""
        import optax

        optimizer = optax.adamw(1e-3, mu_dtype=jnp.bfloat16)
        sequences, length, width = self.shape

        def begin() -> dict[str, Any]:
            weights = [
                {name: jnp.zeros(sizes) for name, sizes in block_sizes(width).items()}
                for _ in range(LAYERS)
            ]
            return {"weights": weights, "optimizer": optimizer.init(weights), "step": jnp.int32(0)}

        def place(looks: Any) -> Any:
            return _placed(looks, NamedSharding(mesh, spec if looks.shape else P()))

        state = jax.tree.map(place, jax.eval_shape(begin))
        places = jax.tree.map(lambda one: one.sharding, state)

        def update(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
            loss, slopes = jax.value_and_grad(loss_of)(state["weights"], batch)
            changes, moments = optimizer.update(slopes, state["optimizer"], state["weights"])
            weights = optax.apply_updates(state["weights"], changes)
            return {"weights": weights, "optimizer": moments, "step": state["step"] + 1}, loss

        sizes = (sequences * mesh.size, length, width)
        batch = jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
        batch = _placed(batch, NamedSharding(mesh, P("data")))
        outputs = (places, NamedSharding(mesh, P()))
        return jax.jit(update, donate_argnums=0, out_shardings=outputs), state, batch


def _process_of(world: World, devices: Sequence[Any]) -> Callable[[Any], int]:
    """Which host a device is of: they follow each other."""
    places = {device: number // world.each for number, device in enumerate(devices)}
    return places.__getitem__


def _rings(world: World, devices: Sequence[Any]) -> Rings:
    groups = form_groups(world.hosts, world.code)
    return find_rings(groups, [1] * world.hosts, devices, _process_of(world, devices), 0)


def _owned_bytes(plan: Plan) -> int:
    """How much of the state a device owns."""
    owned: Counter[Any] = Counter()
    for one in plan.owned:
        owned[one.device] += one.range.nbytes
    return max(owned.values())


def _placed(looks: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(looks.shape, looks.dtype, sharding=sharding)


def block_sizes(width: int) -> dict[str, tuple[int, ...]]:
    """The weights of a transformer block."""
    return {
        "scale_in": (width,),
        "query_key_value": (width, 3 * width),
        "out": (width, width),
        "scale_mid": (width,),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }


def loss_of(weights: list[dict[str, jax.Array]], batch: jax.Array) -> jax.Array:
    """That of blocks which compute in bfloat16 with weights in float32."""
    x = batch
    for block in weights:
        half = {name: value.astype(jnp.bfloat16) for name, value in block.items()}
        joined = normalized(x) * half["scale_in"] @ half["query_key_value"]
        heads = joined.reshape(*x.shape[:2], HEADS, 3, -1)
        query, key, value = (heads[..., number, :] for number in range(3))
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + mixed.reshape(x.shape) @ half["out"]
        x = x + jax.nn.gelu(normalized(x) * half["scale_mid"] @ half["up"]) @ half["down"]
    return jnp.mean(jnp.square((x - batch).astype(jnp.float32)))


def normalized(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


CHECKS: dict[str, Any] = {"kernels": Checks, "twin": TwinChecks}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiles kernels and twins without a device.")
    parser.add_argument("targets", nargs="*", help=f"some of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="two codes, a small step")
    parser.add_argument("--only", choices=CHECKS, help="default: all")
    parser.add_argument("--platform", choices=["cpu"], help="compile for this machine's processor")
    arguments = parser.parse_args()
    targets = {"cpu": _cpu()} if arguments.platform else TARGETS
    misses: list[str] = []
    done = 0
    began_s = time.monotonic()
    jax.config.update("jax_num_cpu_devices", max(world.hosts * world.each for world in WORLDS))
    names = arguments.targets or list(targets)
    for name in names:
        if name not in targets:
            parser.error(f"{name}: expected some of {', '.join(targets)}")
        target = targets[name]
        kinds = [arguments.only] if arguments.only else list(CHECKS)
        try:
            checks = [CHECKS[kind](name, target, arguments.quick) for kind in kinds]
        # What JAX raises where a platform's package is missing, or is of another version.
        except (RuntimeError, NotImplementedError, KeyError) as error:
            print(f"{name}: no compiler for it here ({error}); {target.install}", file=sys.stderr)
            return 2
        for one in checks:
            one.run()
            misses += one.misses
            done += one.programs
    for miss in misses:
        print(f"MISSED {miss}")
    print(
        f"{', '.join(names)}: {done} programs compiled and judged in "
        f"{(time.monotonic() - began_s) / 60:.0f} min, "
        + (f"{len(misses)} misses" if misses else "all that is required holds")
    )
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
