"""Checks and measures jaxft on this machine's accelerators: GPUs or TPUs, one or several.

    python gpu/check.py [--gib 2] [--json FILE]       # a few minutes, without a network
    python gpu/check.py --platform cpu --gib 0.03     # to see that it runs

It needs jax and jaxft and nothing else. What it does, each part a few rows of the table at the end:
- bytes: every kernel of device parity gives the bytes of the hosts' code, encoding and decoding;
- kernels: their rate, against the rate at which this device's memory is copied;
- saves: for each staging, what `save` costs the training thread, how long until the bytes are in
  host memory, and the rate of that against a plain copy to pinned host memory;
- steps: what a wrapped step costs beside the bare one, in calls that take a snapshot;
- twins: a training step that a snapshot is taken in gives the same bits as the bare step;
- donation: the step right after `save` overwrites the state, and what is restored is still that
  state, bit for bit.

How to read it: `save` is what the call costs the training thread, `staged` the rate at which the
bytes then come to the host. `wrapped_step` is a whole step that takes a snapshot, beside a bare
one, and `[call]` what the call of it takes before it returns. The kernel's rate is required on GPU
and TPU only, of the kernel that is used there. If another kernel is faster here, the last lines say
so, and how to have it: JAXFT_PARITY_KERNEL. Exit status: 0 if all that is required holds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

ROUNDS = 7
WAIT_S = 300.0
RATE_CODE = (6, 2)
CODES = ((1, 1), (3, 1), (2, 2), (6, 2), (8, 4))
# Of the time in which as many bytes are copied within device memory.
RATE_MIN = 0.7
# A kernel that is less than this ahead of the one that is used is no reason to change anything.
FASTER = 1.05


@dataclass(frozen=True)
class Row:
    """A line of the table; `holds` is None where nothing is required."""

    name: str
    figure: float
    unit: str
    ratio: float | None = None
    against: str = ""
    holds: bool | None = None


class Crash(Exception):
    """Ends a script as a failing one, whose snapshots stay in memory."""


def main() -> int:
    options = _options()
    if options.platform:
        os.environ["JAX_PLATFORMS"] = options.platform
    import jax

    devices = jax.devices()
    print(f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}", flush=True)
    nbytes = int(options.gib * 2**30)
    rows: list[Row] = []
    parts = (check_bytes, measure_kernels, measure_saves, measure_steps, check_twin, check_donation)
    for part in parts:
        print(f"{(part.__doc__ or '').splitlines()[0]}", flush=True)
        rows += part(nbytes)
    _print(rows)
    kernel = advise({row.name: row.figure for row in rows if row.name.startswith("kernel[")})
    print(kernel["advice"])
    missed = [row.name for row in rows if row.holds is False]
    print(f"NOT as required: {', '.join(missed)}" if missed else "all that is required holds")
    if options.json:
        device = {"kind": devices[0].device_kind, "count": len(devices), "jax": jax.__version__}
        with open(options.json, "w") as file:
            found = {"rows": [asdict(row) for row in rows], "machine": device, "kernel": kernel}
            json.dump(found, file, indent=1)
    return 1 if missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platform", default="", help="cuda, tpu or cpu; JAX's choice if not said")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state")
    parser.add_argument("--json", default="", help="file to write the rows to")
    return parser.parse_args()


def _print(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("row", "figure", "unit", "ratio", "against", "holds", box=None)
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
        holds = {None: "", True: "yes", False: "NO"}[row.holds]
        table.add_row(escape(row.name), f"{row.figure:.4g}", row.unit, ratio, row.against, holds)
    Console(width=110).print(table)


# ------------------------------------------------------------------------------ kernels


def check_bytes(nbytes: int) -> Iterator[Row]:
    """Parity and what it gives back, of random bytes, by each kernel of this platform."""
    import jax
    import numpy as np

    from jaxft.device.parity import combine
    from jaxft.group.codec import backend, decode_matrix, encode_rows

    random = np.random.default_rng(0)
    reference = backend()
    for kernel in _kernels():
        wrong = 0
        for k, m in CODES:
            data = [random.integers(0, 2**32, 40_003, np.uint32) for _ in range(k)]
            arrays = [jax.device_put(one) for one in data]
            parity = combine(encode_rows(k, m), arrays, kernel=kernel)
            wanted = [np.empty(data[0].nbytes, np.uint8) for _ in range(m)]
            reference.combine(encode_rows(k, m), [one.view(np.uint8) for one in data], wanted)
            pairs = list(zip(parity, (one.view(np.uint32) for one in wanted), strict=True))
            # The first data fragments are lost, as many as can be.
            lost = tuple(range(min(k, m)))
            have = tuple(range(len(lost), k + len(lost)))
            left = [(arrays + parity)[index] for index in have]
            again = combine(decode_matrix(k, m, have, lost), left, kernel=kernel)
            pairs += zip(again, data, strict=False)
            wrong += sum(not np.array_equal(np.asarray(found), want) for found, want in pairs)
        against = f"the hosts' {reference.name.partition(' (')[0]}"
        yield Row(f"bytes[{kernel}]", wrong, "wrong fragments", None, against, wrong == 0)


def measure_kernels(nbytes: int) -> Iterator[Row]:
    """The rate of one device, fragments in and parity out, beside a copy in its memory."""
    import jax
    import jax.numpy as jnp

    from jaxft.device.parity import combine, kernel_for
    from jaxft.group.codec import encode_rows

    k, m = RATE_CODE
    device = jax.devices()[0]
    words = max(1024, min(nbytes, 2**30) // 4 // (k + m) // 1024 * 1024)
    data = [jax.device_put(jnp.full(words, 7 * i + 3, jnp.uint32), device) for i in range(k)]
    moved = (k + m) * words * 4
    copied = jax.device_put(jnp.zeros(moved // 8, jnp.uint32), device)
    copy = jax.jit(lambda x: x ^ jnp.uint32(1))
    chosen = kernel_for(device.platform, words)
    for kernel in _kernels():
        encode = jax.jit(lambda *xs, one=kernel: combine(encode_rows(k, m), xs, kernel=one))
        kernel_s, copy_s = _alternately(lambda e=encode: e(*data), lambda: copy(copied))
        ratio = copy_s / kernel_s
        holds = ratio >= RATE_MIN if kernel == chosen and device.platform != "cpu" else None
        name = f"kernel[{kernel},{k}+{m}]"
        yield Row(name, moved / kernel_s / 1e9, "GB/s", ratio, "copy in device memory", holds)


def advise(rates: dict[str, float]) -> dict[str, str]:
    """Which kernel the devices here should compute parity with.

    Args:
        rates: of each, by the name of its row.
    """
    import jax

    from jaxft.device.parity import kernel_for

    by_kernel = {name[len("kernel[") :].partition(",")[0]: rate for name, rate in rates.items()}
    used = str(kernel_for(jax.default_backend(), 1024))
    fastest = max(by_kernel, key=by_kernel.__getitem__)
    ratio = by_kernel[fastest] / by_kernel[used]
    if ratio < FASTER:
        advice = f"device parity uses the kernel {used} here, and none is faster"
    else:
        advice = (
            f"device parity uses the kernel {used} here, and {fastest} is {ratio:.2f} times as "
            f"fast: start the ranks with JAXFT_PARITY_KERNEL={fastest}"
        )
    return {"used": used, "fastest": fastest, "advice": advice}


def _kernels() -> tuple[Any, ...]:
    import jax

    return {"gpu": ("xla", "pallas_gpu"), "tpu": ("xla", "pallas_tpu")}.get(
        jax.default_backend(), ("xla",)
    )


# ------------------------------------------------------------------------------ saving


def measure_saves(nbytes: int) -> Iterator[Row]:
    """Stall, and time until the bytes are in host memory, of each staging."""
    import jax

    import jaxft

    state = _state(nbytes)
    pinned = state["sharded"].sharding.with_memory_kind("pinned_host")
    for staging in ("pinned_host", "device", "view"):
        if staging == "view" and jax.default_backend() != "cpu":
            continue
        stalls, staged, copies = [], [], []
        with jaxft.Snapshotter(every=1, staging=staging, job=_job(), fresh=True) as snapshotter:
            for step in range(ROUNDS + 2):
                state = jax.block_until_ready(_step()(state))
                began_s = time.perf_counter()
                receipt = snapshotter.save(step, state)
                stalls.append(time.perf_counter() - began_s)
                receipt.staged.result(WAIT_S)
                staged.append(time.perf_counter() - began_s)
                receipt.protected.result(WAIT_S)
                half = state["sharded"]
                copies.append(2 * _seconds(lambda x=half: jax.device_put(x, pinned)))
        # The first ones make the memory exist and compile what is needed.
        stall_s, staged_s, copy_s = (statistics.median(v[2:]) for v in (stalls, staged, copies))
        yield Row(f"save[{staging}]", 1e3 * stall_s, "ms")
        rate = nbytes / staged_s / 1e9
        yield Row(f"staged[{staging}]", rate, "GB/s", copy_s / staged_s, "copy to pinned memory")


def measure_steps(nbytes: int) -> Iterator[Row]:
    """A call of a wrapped step that takes a snapshot, beside the bare step."""
    import jax

    import jaxft

    state = jax.block_until_ready(_state(nbytes))
    bare = _step()
    with jaxft.Snapshotter(every=1, job=_job(), fresh=True) as snapshotter:
        wrapped = jaxft.wrap(bare, snapshotter)
        wrapped_s, bare_s, stall_s = [], [], []
        for _ in range(ROUNDS + 3):
            began_s = time.perf_counter()
            state = wrapped(state)
            stall_s.append(time.perf_counter() - began_s)
            state = jax.block_until_ready(state)
            wrapped_s.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            state = jax.block_until_ready(bare(state))
            bare_s.append(time.perf_counter() - began_s)
    # The first ones compile.
    step_s, plain_s, call_s = (statistics.median(v[3:]) for v in (wrapped_s, bare_s, stall_s))
    yield Row("wrapped_step", 1e3 * step_s, "ms", step_s / plain_s, "bare step")
    yield Row("wrapped_step[call]", 1e3 * call_s, "ms")


def check_twin(nbytes: int) -> Iterator[Row]:
    """What a wrapped step gives, where rounding shows, against the bare step, bit for bit."""
    import jax
    import numpy as np

    import jaxft

    wrong = twins = 0
    with jaxft.Snapshotter(every=1, job=_job(), fresh=True) as snapshotter:
        wrapped = jaxft.wrap(_training(), snapshotter)
        bare = _training()
        state, batch = _network(nbytes)
        other, _ = _network(nbytes)
        for _ in range(ROUNDS):
            state, loss = wrapped(state, batch)
            other, expected = bare(other, batch)
            pairs = zip(
                jax.tree.leaves((state, loss)), jax.tree.leaves((other, expected)), strict=True
            )
            wrong += sum(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs)
            wrapped.receipt.protected.result(WAIT_S)
            twins += wrapped.has_twin
    yield Row("twin[bits]", wrong, "wrong leaves", None, "the bare step", wrong == 0)
    yield Row("twin[calls]", twins, f"of {ROUNDS} calls", None, "", twins == ROUNDS - 1)


def check_donation(nbytes: int) -> Iterator[Row]:
    """What is restored after the state was donated right behind `save`, bit for bit."""
    import jax
    import numpy as np

    import jaxft

    nbytes = min(nbytes, 2**28)
    last = 3
    for staging in ("pinned_host", "device", "view", "wrapped"):
        if staging == "view" and jax.default_backend() != "cpu":
            continue
        job = _job()
        _crash_after(last, nbytes, staging, job)
        wanted = _state(nbytes)
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), wanted
        )
        for _ in range(last):
            wanted = _step()(wanted)
        with jaxft.Snapshotter(every=1, job=job) as snapshotter:
            restored = snapshotter.restore(like)
        wrong = -1
        if restored is not None and restored.step == last:
            pairs = zip(jax.tree.leaves(restored.state), jax.tree.leaves(wanted), strict=True)
            wrong = sum(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs)
        yield Row(f"donation[{staging}]", wrong, "wrong leaves", None, "the state", wrong == 0)


def _crash_after(last: int, nbytes: int, staging: str, job: str) -> None:
    """A script that takes a snapshot before each of its steps, and fails after the last one."""
    import jaxft

    kind = None if staging == "wrapped" else staging
    state, step = _state(nbytes), _step()
    with (
        contextlib.suppress(Crash),
        jaxft.Snapshotter(every=1, staging=kind, job=job, fresh=True) as snapshotter,
    ):
        wrapped = jaxft.wrap(step, snapshotter)
        for number in range(last + 1):
            if staging == "wrapped":
                state = wrapped(state)
            else:
                receipt = snapshotter.save(number, state)
                state = step(state)
                receipt.protected.result(WAIT_S)
        _until(lambda: snapshotter.latest == last)
        raise Crash


def _state(nbytes: int) -> dict[str, Any]:
    """Two leaves of half of it each, one sharded over all devices and one that each of them has."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import jaxft

    mesh = jaxft.make_mesh({"data": -1})
    width = 1024
    count = len(jax.devices())
    rows = max(count, nbytes // 2 // 4 // width // count * count)
    shardings = {
        "sharded": NamedSharding(mesh, PartitionSpec("data")),
        "replicated": NamedSharding(mesh, PartitionSpec()),
    }

    def create() -> dict[str, Any]:
        values = jnp.arange(rows * width, dtype=jnp.float32).reshape(rows, width)
        return {"sharded": values, "replicated": values + 0.5}

    return jax.jit(create, out_shardings=shardings)()


def _step() -> Callable[[Any], Any]:
    """A step that takes the state over and changes every byte's place in it."""
    import jax

    return jax.jit(lambda state: jax.tree.map(lambda x: x * 1.0001 + 1.0, state), donate_argnums=0)


def _network(nbytes: int) -> tuple[dict[str, Any], Any]:
    """Two layers and Adam's moments of them, sharded over all devices, and a batch."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import jaxft

    mesh = jaxft.make_mesh({"data": -1})
    rows = NamedSharding(mesh, PartitionSpec("data"))
    count = len(jax.devices())
    # Both layers and their moments, 4 bytes an element each; 64 MiB at most.
    side = int((min(nbytes, 2**26) / (4 * 6)) ** 0.5) // (8 * count) * 8 * count

    def create() -> tuple[dict[str, Any], Any]:
        first, second, data = (
            jax.random.normal(jax.random.key(number), shape) / side**0.5
            for number, shape in enumerate([(side, side), (side, side), (8 * count, side)])
        )
        layers = [first, second]
        zeros = [jnp.zeros_like(layer) for layer in layers]
        return {"layers": layers, "mean": zeros, "square": zeros}, data

    return jax.jit(create, out_shardings=rows)()


def _training() -> Callable[[Any, Any], Any]:
    """A donating step of Adam, with products of matrices, sums over rows and roots."""
    import jax
    import jax.numpy as jnp

    def loss_of(layers: list[Any], batch: Any) -> Any:
        hidden = jax.nn.softmax(jnp.tanh(batch @ layers[0]) * 3, axis=-1)
        return jnp.mean(jnp.square(hidden @ layers[1] - batch))

    def update(state: dict[str, Any], batch: Any) -> Any:
        loss, slopes = jax.value_and_grad(loss_of)(state["layers"], batch)
        mean = [0.9 * m + 0.1 * g for m, g in zip(state["mean"], slopes, strict=True)]
        square = [0.99 * v + 0.01 * g * g for v, g in zip(state["square"], slopes, strict=True)]
        layers = [
            layer - 1e-2 * m / (jnp.sqrt(v) + 1e-8)
            for layer, m, v in zip(state["layers"], mean, square, strict=True)
        ]
        return {"layers": layers, "mean": mean, "square": square}, loss

    return jax.jit(update, donate_argnums=0)


def _job() -> str:
    return f"check-{secrets.token_hex(4)}"


def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError("the last snapshot was not protected in time")
        time.sleep(0.01)


def _alternately(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[float, float]:
    """Median seconds of both, after each has been called twice."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS + 2):
        taken[0].append(_seconds(first))
        taken[1].append(_seconds(second))
    return statistics.median(taken[0][2:]), statistics.median(taken[1][2:])


def _seconds(call: Callable[[], Any]) -> float:
    import jax

    began_s = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began_s


if __name__ == "__main__":
    sys.exit(main())
