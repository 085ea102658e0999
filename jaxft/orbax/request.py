"""One call of `restore`, as what it asks of a snapshot, item by item."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxft.orbax.items import DEFAULT, Contents, is_composite
from jaxft.orbax.targets import Asked, Unsupported, Want, ask


class Request:
    """What `args` ask of a snapshot with these contents.

    With `in_host_memory`, arrays come to the CPU where they need not be on devices: what is asked
    for is only to be written.

    Attributes:
        wants: the leaves that are wanted, by number.

    Raises:
        Unsupported: only storage can give it, if the step is there.
        TreeMismatch: a target that is not the tree that was saved.
        ValueError: `args` is not a Composite where the items have names, or is one where they have
            none.
    """

    def __init__(self, contents: Contents, args: Any, *, in_host_memory: bool = False) -> None:
        if args is not None and is_composite(args) == contents.is_default:
            raise ValueError(
                "args must be a Composite, with an entry for each item that is wanted: they were "
                "saved by name"
                if not contents.is_default
                else "args must not be a Composite: what was saved has no name"
            )
        self._contents = contents
        self._asked: dict[str, Asked | None] = {}
        for name, one in self._by_name(args).items():
            self._asked[name] = self._ask(name, one)
        self.wants: dict[int, Want | None] = {}
        for asked in self._asked.values():
            self.wants.update(asked.wants if asked is not None else {})
        if in_host_memory and jax.default_backend() != "cpu" and jax.process_count() == 1:
            self.wants = dict.fromkeys(self.wants)

    def _by_name(self, args: Any) -> dict[str, Any]:
        contents = self._contents
        if contents.is_default:
            return {DEFAULT: args}
        named = {} if args is None else dict(args.items())
        return named or dict.fromkeys((*contents.trees, *contents.texts))

    def _ask(self, name: str, args: Any) -> Asked | None:
        contents = self._contents
        if name in contents.trees:
            return ask(args, contents, name)
        if name not in contents.texts:
            raise Unsupported(f'item "{name}": the snapshot has {self._having()}')
        if args is not None and type(args) is not ocp.args.JsonRestore:
            raise Unsupported(f'item "{name}" as {type(args).__name__}: it was saved as JSON')
        return None

    def _having(self) -> str:
        return ", ".join((*self._contents.trees, *self._contents.texts))

    def build(self, values: Mapping[int, Any]) -> Any:
        """What `restore` returns, from the leaves' values by number."""
        contents = self._contents
        items = {
            name: json.loads(contents.texts[name])
            if asked is None
            else asked.build(contents.leaves, values)
            for name, asked in self._asked.items()
        }
        return items[DEFAULT] if contents.is_default else ocp.args.Composite(**items)
