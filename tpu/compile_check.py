"""Compiles the kernels of device parity for TPUs and GPUs that need not be there.

    python tpu/compile_check.py [v5e] [v6e] [h200] [--quick]

What it requires, for every code k+m up to 8+4, for decoding, and for lengths on and off tiles:
- the portable kernel is one fusion (no more than one operation), without temporary memory;
- the Pallas kernel of the platform is accepted by its compiler (Mosaic; Triton), and takes no
  temporary memory where the length is whole rows of 128 words;
- packing leaves into words and unpacking them takes no more temporary memory than a few times
  what the words take (they are moved into rows, and from rows).

It prints a line for each kind of check, and every miss. Exit status: 0 if all holds, 1 if not, 2
if a package is missing. Packages: `pip install 'jax[tpu]'` (1.4 GB) for TPUs; for GPUs
`pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12` in the version of
jax (0.6 GB, compiles and cannot run).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxft.device.leaves import describe
from jaxft.device.parity import Kernel, combine, lay_out, pack, unpack
from jaxft.group.codec import decode_matrix, encode_rows

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
class Target:
    """What is compiled for: where to get it, its Pallas kernel, and what to install for it."""

    describe: Callable[[], Any]
    pallas: Kernel
    install: str


def _tpu(topology: str) -> Target:
    get = partial(topologies.get_topology_desc, platform="tpu", topology_name=topology)
    return Target(get, "pallas_tpu", "pip install 'jax[tpu]'")


def _gpu(config: str) -> Target:
    get = partial(
        topologies.get_topology_desc,
        platform="cuda",
        topology_name="one",
        topology="1x1x1",
        target_config=config,
    )
    packages = "jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12"
    return Target(get, "pallas_gpu", f"pip install --no-deps {packages}")


TARGETS = {"v5e": _tpu("v5e:2x2"), "v6e": _tpu("v6e:2x2"), "h200": _gpu(H200)}


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
    """All checks of one target."""

    def __init__(self, name: str, target: Target, quick: bool) -> None:
        self.name = name
        self.pallas = target.pallas
        self.quick = quick
        self.sharding = jax.sharding.SingleDeviceSharding(target.describe().devices[0])
        self.misses: list[str] = []

    def run(self) -> None:
        self._kernel("xla", True)
        self._kernel(self.pallas, False)
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
            if whole and (len(found.operations) > 1 or found.temp_bytes > SLACK_BYTES):
                self.misses.append(f"{where}: {found}")
        print(
            f"{self.name} {kernel}: {done} programs compiled, {sorted(counts)} operations each, "
            f"at most {most_bytes} bytes of temporary memory for whole rows",
            flush=True,
        )

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


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiles the kernels without a device.")
    parser.add_argument("targets", nargs="*", help=f"some of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="two codes only")
    arguments = parser.parse_args()
    misses = []
    for name in arguments.targets or TARGETS:
        if name not in TARGETS:
            parser.error(f"{name}: expected some of {', '.join(TARGETS)}")
        target = TARGETS[name]
        try:
            checks = Checks(name, target, arguments.quick)
        except (RuntimeError, NotImplementedError, KeyError) as error:
            print(f"{name}: no compiler for it here ({error}); {target.install}", file=sys.stderr)
            return 2
        checks.run()
        misses += checks.misses
    for miss in misses:
        print(f"MISSED {miss}")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
