"""Sources: what a part is copied from, once the training goes on."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np

from jaxft.device.copying import Bytes
from jaxft.device.layout import Owned, Run
from jaxft.device.leaves import SUB_BYTE_BITS, show
from jaxft.device.pieces import piece_on
from jaxft.errors import ConfigError, JaxftError, StagingError
from jaxft.group.manifest import Leaf

# What comes of asking for an array that JAX cannot give, and of asking a struct.
UNREACHABLE = (RuntimeError, ValueError, MemoryError, AttributeError, TypeError)


class Held:
    """The source of one owned range: an array of it, or of its shard, of which `rows` are owned;
    the first dimensions of the array, `lead` of them, are 1 and not the shard's."""

    __slots__ = ("_bytes", "_data", "_lead", "_leaf", "_rows", "nbytes", "offset")

    def __init__(
        self,
        owned: Owned,
        leaves: tuple[Leaf, ...],
        data: Any,
        rows: tuple[int, int] | None,
        lead: int = 0,
    ) -> None:
        self._lead = lead
        self.offset = owned.range.offset
        self.nbytes = owned.range.nbytes
        self._leaf = leaves[owned.range.leaf]
        self._data = data
        self._rows = rows
        self._bytes: Bytes | None = None

    def bytes(self) -> Bytes:
        """The range's canonical bytes; a view where the array is contiguous."""
        if self._bytes is None:
            array = np.asarray(jax.device_get(self._data))
            array = array.reshape(array.shape[self._lead :])
            if self._rows is not None:
                array = array[slice(*self._rows)]
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            dtype = self._leaf.dtype
            self._bytes = data & _mask(dtype) if dtype in SUB_BYTE_BITS else data
        return self._bytes

    def failed(self, error: BaseException) -> StagingError:
        return staging_error(self._leaf, error)


class GatheredRun:
    """The source of a run: those rows of a gathered batch that are owned."""

    def __init__(self, run: Run, leaves: tuple[Leaf, ...], gathered: jax.Array) -> None:
        self.offset = run.offset
        self.nbytes = run.nbytes
        self._leaf = leaves[run.leaves[0]]
        self._run = run
        self._gathered = gathered
        self._bytes: Bytes | None = None

    def bytes(self) -> Bytes:
        if self._bytes is None:
            device = self._run.piece.device
            assert device is not None, "what is gathered is on devices"
            rows = np.asarray(jax.device_get(piece_on(device, self._gathered)))
            if len(self._run.members) < len(rows):
                rows = rows[list(self._run.members)]
            self._bytes = rows.reshape(-1).view(np.uint8)[: self.nbytes]
        return self._bytes

    def failed(self, error: BaseException) -> StagingError:
        return staging_error(self._leaf, error)


class Coded:
    """The source of some of the parity that a device has made."""

    __slots__ = ("_bytes", "_data", "nbytes", "offset")

    def __init__(self, offset: int, nbytes: int, data: jax.Array) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self._data = data
        self._bytes: Bytes | None = None

    def bytes(self) -> Bytes:
        if self._bytes is None:
            self._bytes = np.asarray(jax.device_get(self._data)).reshape(-1).view(np.uint8)
        return self._bytes

    def failed(self, error: BaseException) -> StagingError:
        (device,) = self._data.devices()
        return StagingError(
            f"parity made by {device} could not be copied: {type(error).__name__}: {error}"
        )


_SAID_AGAIN = re.compile(r"(\b\w[^:\n]*: )\1+")


def _mask(dtype: str) -> np.uint8:
    return np.uint8((1 << SUB_BYTE_BITS[dtype]) - 1)


def unreachable(leaf: Leaf, value: Any, error: Exception) -> JaxftError:
    """The error that says why a leaf's bytes could not be held."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return ConfigError(
            f"leaf {show(leaf.path)} is a ShapeDtypeStruct, which has no bytes to save; save the "
            "arrays themselves"
        )
    return staging_error(leaf, error)


def staging_error(leaf: Leaf, error: BaseException) -> StagingError:
    # XLA says so once more for each array that an error has passed through.
    words = _SAID_AGAIN.sub(r"\1", str(error))
    return StagingError(
        f"leaf {show(leaf.path)} ({leaf.dtype}{list(leaf.shape)}) could not be copied: "
        f"{type(error).__name__}: {words}"
    )
