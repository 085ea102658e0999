"""Extras: small host values that belong to a step, for example a data iterator's position.

They come back as they were, or are refused before anything is saved: None, bool, int, float, str,
bytes, and lists and dicts (with keys of str or int) of these. Encoded as MessagePack.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jaxft.errors import ConfigError

_SCALARS = (type(None), bool, int, float, str, bytes)


def encode_extras(extras: Any) -> bytes:
    """The bytes that are kept.

    Raises:
        ConfigError: a value that would not come back the same; says which.
    """
    _check(extras, "extras")
    try:
        return msgspec.msgpack.encode(extras)
    except (OverflowError, ValueError) as error:
        raise ConfigError(f"extras cannot be kept: {error}") from error


def decode_extras(encoded: bytes) -> Any:
    """What was encoded; None where nothing was."""
    return msgspec.msgpack.decode(encoded) if encoded else None


def _check(value: Any, place: str) -> None:
    """Exact types: a NumPy scalar, a tuple or an enum would come back as something else."""
    if type(value) in _SCALARS:
        return
    if type(value) is list:
        for index, item in enumerate(value):
            _check(item, f"{place}[{index}]")
        return
    if type(value) is dict:
        for key, item in value.items():
            if type(key) not in (str, int):
                raise _refusal(f"the key {key!r} of {place}", key)
            _check(item, f"{place}[{key!r}]")
        return
    raise _refusal(place, value)


def _refusal(what: str, value: Any) -> ConfigError:
    return ConfigError(
        f"{what} is a {type(value).__module__}.{type(value).__qualname__}, which would not come "
        "back the same: use None, bool, int, float, str, bytes, and lists and dicts of these (a "
        "tuple as a list, a NumPy scalar by .item()), or put arrays into the state"
    )
