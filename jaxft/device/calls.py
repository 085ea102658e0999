"""Calls: one call of a jitted step, taken apart into what it is compiled for and its arrays.

A step of `flax.nnx.jit` is one too: nnx takes the modules apart, calls a function of `jax.jit` that
it keeps as `jitted_fn`, and puts the modules together again. `around` puts something else into that
function's place for one call.

Methods, `functools.partial`s and objects with a `__call__` are opened: what they call may be
jitted, and gets arguments of theirs before the others. (A method has its function's attributes, and
would pass for a jitted function with an argument less.)
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Sharding

# Calls a jitted function with these arguments, or does something else that gives its outputs.
Runner = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Opened(NamedTuple):
    """What a step calls, and the arguments of its own that it calls it with: its positional ones
    come before those of the call, and named ones of the call replace its own."""

    fn: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def opened(step: Any) -> Opened:
    """A step that is no more than another function with some arguments, taken apart."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    while True:
        if isinstance(step, functools.partial):
            args, kwargs = (*step.args, *args), {**step.keywords, **kwargs}
            step = step.func
        elif isinstance(step, types.MethodType):
            args, step = (step.__self__, *args), step.__func__
        elif isinstance(call := getattr(step, "__call__", None), types.MethodType):  # noqa: B004
            if not is_jitted(call.__func__):
                return Opened(step, args, kwargs)
            step = call
        else:
            return Opened(step, args, kwargs)


def held_by(step: Any) -> tuple[Any, ...]:
    """What a step has beside the arguments of a call: bound to it, closed over by its function or
    by what that is made of (as of `nnx.cached_partial`), or global and named in these."""
    fn, args, kwargs = opened(step)
    held = [*args, *kwargs.values()]
    while fn is not None:
        try:
            found = inspect.getclosurevars(fn)
        except (TypeError, ValueError):  # no function of Python's, or one that is not complete
            pass
        else:
            held += [*found.nonlocals.values(), *found.globals.values()]
        fn = getattr(fn, "__wrapped__", None)
    return tuple([one for one in held if not isinstance(one, types.ModuleType | type)])


class Static(NamedTuple):
    """Which arguments of a jitted function are static: by position, by name."""

    argnums: tuple[int, ...] = ()
    argnames: tuple[str, ...] = ()


def is_jitted(step: Any) -> bool:
    """Whether this is what `jax.jit` makes."""
    has = functools.partial(hasattr, step)
    return callable(step) and has("trace") and has("lower") and not has("jitted_fn")


@functools.cache
def are_known() -> bool:
    """Whether this version of JAX says of a jitted function what `Call` asks. That is private."""
    jitted = jax.jit(operator.neg)
    return hasattr(jitted, "_jit_info") and hasattr(jitted.trace(1.0), "_params")


def donates_within(jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this calls a jitted function that is to take over arguments. Within another program
    it does not."""
    equations = jitted.trace(*args, **kwargs).jaxpr.eqns
    return any(any(one.params.get("donated_invars", ())) for one in equations)


# Whether nothing is being traced. That is private; where it is not found, it is not known.
_is_at_top = getattr(
    getattr(getattr(jax, "_src", None), "core", None), "trace_state_clean", lambda: True
)


def is_traced() -> bool:
    """Whether JAX is tracing here, and not computing: what is called now is within jit, vmap, scan
    or the like."""
    return not _is_at_top()


def is_debugged() -> bool:
    """Whether JAX is to run functions in another way than as compiled programs: operation by
    operation, or looking for NaNs and saying where they come from."""
    return any(
        getattr(jax.config, name, False)
        for name in ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs")
    )


def is_of_nnx(step: Any) -> bool:
    """Whether this is what `flax.nnx.jit` makes."""
    return type(step).__module__.startswith("flax.nnx") and is_jitted(
        getattr(step, "jitted_fn", None)
    )


def is_compiled(step: Any) -> bool:
    """Whether this was compiled ahead of time: nothing can be added to it any more."""
    return isinstance(step, jax.stages.Compiled) or (
        type(step).__module__.startswith("flax.nnx") and type(step).__name__.endswith("Compiled")
    )


def static_of(jitted: Any) -> Static:
    """The static arguments of what `jax.jit` made, which only JAX's own record of it says."""
    info = jitted._jit_info
    return Static(tuple(info.static_argnums or ()), tuple(info.static_argnames or ()))


def around(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], runner: Runner) -> Any:
    """Calls a step, with `runner` in place of the jitted function that it is or has within."""
    step, first, named = opened(step)
    args, kwargs = (*first, *args), {**named, **kwargs}
    if is_jitted(step):
        return runner(step, args, kwargs)
    jitted = step.jitted_fn
    step.jitted_fn = lambda *args, **kwargs: runner(jitted, args, kwargs)
    try:
        return step(*args, **kwargs)
    finally:
        step.jitted_fn = jitted


def has_nnx(tree: Any) -> bool:
    """Whether there is an nnx module, optimizer or the like in a tree. (There is none while nnx was
    not imported.)"""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and _has(tree, nnx.Pytree)


def has_array(tree: Any) -> bool:
    """Whether there is an array of JAX's in a tree."""
    return _has(tree, jax.Array)


def _has(tree: Any, kind: type) -> bool:
    def is_one(value: Any) -> bool:
        return isinstance(value, kind)

    try:
        return any(map(is_one, jax.tree_util.tree_leaves(tree, is_leaf=is_one)))
    except (TypeError, ValueError):  # no tree to JAX: a dict whose keys have no order
        return False


def nnx_state(values: Any) -> Any:
    """The arrays of an nnx module, or of a tuple of them, as a tree."""
    return sys.modules["flax.nnx"].state(values)


class Traced(NamedTuple):
    """What a jitted function computes, and what it asks of its program.

    Attributes:
        compute: from the call's leaves to a list of outputs. Within `jit`.
        out_tree: the structure of the outputs.
        computed: shape and dtype of each output; None of one that is an argument passed on.
        donated: the places of the leaves that it is given to keep.
        in_shardings, out_shardings: of each leaf, and output; None where JAX chooses.
    """

    compute: Callable[..., list[Any]]
    out_tree: Any
    computed: tuple[tuple[tuple[int, ...], Any] | None, ...]
    donated: tuple[int, ...]
    in_shardings: tuple[Sharding | None, ...]
    out_shardings: tuple[Sharding | None, ...]


class Call:
    """One call of a jitted function.

    Attributes:
        leaves: what is passed to the compiled program: arrays, and numbers that are not static.
        treedef: how these are the arguments.
    """

    def __init__(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._fn = fn
        self._args = args
        self._kwargs = kwargs
        static = static_of(fn)
        numbers = {number % len(args) for number in static.argnums if number < len(args)}
        dynamic = tuple([arg for number, arg in enumerate(args) if number not in numbers])
        named = {name: arg for name, arg in kwargs.items() if name not in static.argnames}
        self.leaves, self.treedef = jax.tree_util.tree_flatten((dynamic, named))
        self._static = (
            tuple([_static(number, args[number]) for number in sorted(numbers)]),
            tuple([_static(name, kwargs[name]) for name in kwargs if name not in named]),
        )

    @functools.cached_property
    def signature(self) -> Hashable:
        """All that the compiled program depends on."""
        looks = tuple(map(_look, self.leaves))
        return self._fn, self.treedef, self._static, looks, _surroundings()

    def trace(self) -> Traced:
        """Traces the function for this call, unless JAX has done so before.

        Raises:
            ValueError: what it is compiled with cannot be taken over into another program.
            Exception: whatever the function raises while it is traced.
        """
        traced = self._fn.trace(*self._args, **self._kwargs)
        given = traced._params
        if given["compiler_options_kvs"]:
            raise ValueError("it is jitted with compiler_options, which are for a whole program")
        if any(layout is not None for layout in (*given["in_layouts"], *given["out_layouts"])):
            raise ValueError("it is jitted with layouts of its own")
        if any(type(one).__name__.startswith("Ordered") for one in traced.jaxpr.effects):
            raise ValueError("it has ordered callbacks, which JAX cannot have beside such outputs")
        flat: Any = jax.tree_util.tree_flatten(
            traced.args_info, is_leaf=lambda info: isinstance(info, jax.stages.ArgInfo)
        )
        infos, treedef = flat
        if treedef != self.treedef:
            raise ValueError("it is not known which of the step's arguments are static")
        return Traced(
            compute=jaxpr_as_fun(traced.jaxpr),
            out_tree=traced.out_tree,
            computed=_computed(traced.jaxpr.jaxpr),
            donated=tuple([place for place, info in enumerate(infos) if info.donated]),
            in_shardings=tuple(map(_specified, given["in_shardings"])),
            out_shardings=tuple(map(_specified, given["out_shardings"])),
        )


def _computed(jaxpr: Any) -> tuple[tuple[tuple[int, ...], Any] | None, ...]:
    passed_on = set(map(id, jaxpr.invars))
    return tuple(
        [
            None if id(output) in passed_on else (output.aval.shape, output.aval.dtype)
            for output in jaxpr.outvars
        ]
    )


def _specified(sharding: Any) -> Sharding | None:
    """A sharding; None where none was asked for, for which JAX has a mark of its own."""
    return sharding if isinstance(sharding, Sharding) else None


def _surroundings() -> Hashable:
    """What else JAX goes by when it traces a function: the mesh that is set, the precision of
    products, and the like. It keeps that in a private place; where that is not found, one program
    is taken for all."""
    known = getattr(getattr(jax, "_src", None), "config", None)
    found: Hashable = getattr(known, "trace_context", lambda: None)()
    return found


def _static(where: int | str, value: Any) -> tuple[int | str, type, Any]:
    """JAX tells 1, 1.0 and True apart, which are equal."""
    return where, type(value), value


def _look(leaf: Any) -> Hashable:
    if isinstance(leaf, jax.Array):
        weak, committed = getattr(leaf, "weak_type", False), getattr(leaf, "committed", True)
        return leaf.shape, leaf.dtype, weak, leaf.sharding, committed
    if isinstance(leaf, (np.ndarray, np.generic)):
        return type(leaf), leaf.shape, leaf.dtype
    return (type(leaf),)
