"""`wrap`: a train step that takes the snapshots itself.

    train_step = jaxft.wrap(train_step, snapshotter)
    ...
    state, loss = train_step(state, batch)          # instead of `save`

    a call that is not due     the step itself, nothing else
    a call that is due         as `save`: the snapshot before is decided, then one program that is
                               the step and gives the bytes of the state that it was called with

A snapshot is of the state as it goes *into* that call, and carries that state's number. What is
behind this is in `wrapped`: which arguments are the state, its number, and the second versions of
the step, the twins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxft.device import calls
from jaxft.device.executables import Executables
from jaxft.errors import ConfigError
from jaxft.receipt import Receipt
from jaxft.snapshotter import Snapshotter
from jaxft.wrapped.arguments import Doubt, Place, places, tree_of
from jaxft.wrapped.numbers import Numbers
from jaxft.wrapped.run import Run
from jaxft.wrapped.twins import Twins, brief

_log = logging.getLogger(__name__)


def wrap(
    train_step: Callable[..., Any],
    snapshotter: Snapshotter,
    *,
    state: int | str | Sequence[int | str] = (0,),
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    step: Callable[..., int] | None = None,
    extras: Callable[..., Any] | None = None,
    cache_dir: str | Path | None = None,
) -> WrappedStep:
    """Gives a train step that takes snapshots: it is called, and returns, as the step does.

    In calls that are due, a second compiled version of the step runs, which computes the same and
    also gives this rank's bytes of the state in pinned host memory. The state may be donated.

    What is saved is the state that a call is *given*: the argument that `state` names, or the tuple
    of them where it names several, for example `(params, opt_state)`; of `flax.nnx` objects, their
    `nnx.state`. `restore` wants the same tree. The state after the last step is not saved by any
    call; `snapshotter.save` does that.

    The number of that state is, in this order,
    1. the keyword `jaxft_step` of the call, which the step itself does not get;
    2. what `step(*args, **kwargs)` gives for the call's arguments;
    3. the `step` of a state that has one, such as Flax's `TrainState`. It is read where the state
       is not the one that the last call gave; else the number is one more than in the last call;
    4. the number of calls, of all wrapped steps of the snapshotter together, going on from what
       was restored or saved last, from 0 otherwise. So it is, with a warning, where a state that
       was restored says less than that: its `step` does not grow in each call.
    Likewise, what is saved beside it is the keyword `jaxft_extras`, or what
    `extras(*args, **kwargs)` gives in a call that is due, or None.

    Args:
        train_step: a function made by `jax.jit` or `flax.nnx.jit`, or a plain one that they can
            make something of: it is jitted here, so what it does beside computing happens only
            when it is traced.
        snapshotter: takes the snapshots. `restore` comes before the first call.
        state: the arguments that are the state, by position or by name.
        donate_argnums, static_argnums, static_argnames: as for `jax.jit`, of a plain function; a
            jitted one has its own.
        step, extras: see above.
        cache_dir: where compiled programs are kept for the next start, up to 32 files for
            each rank; private to the user. By default beside the host's socket, for as long as the
            job runs.

    A step that cannot be within another program (compiled ahead of time, with `compiler_options`,
    a plain function that looks at values), or whose state has more than LEAVES_MAX leaves, is
    called as it is, and the state is staged before, as `save` does it. A warning says why, once.

    What the step closes over (a NumPy array, say) must not change once it is traced: its bytes are
    constants of its programs then, and the second version is made later.

    Raises:
        ConfigError: options that cannot work. The first call raises it where nothing of `state` is
            among what the step gives back and the step holds arrays or nnx modules itself
            (`functools.partial`, `nnx.cached_partial`): the state is in there then, and would not
            be saved. Any call does within jit, vmap or the like, where nothing can be saved.
    """
    names: tuple[Any, ...] = (state,)
    if isinstance(state, Sequence) and not isinstance(state, str):
        names = tuple(state)
    are_names = bool(names) and all(isinstance(name, int | str) for name in names)
    if not are_names or len(set(names)) < len(names):
        raise ConfigError(
            f"wrap(state={state!r}): expected positions or names of arguments, each once"
        )
    for option, given in (("step", step), ("extras", extras)):
        if given is not None and not callable(given):
            raise ConfigError(f"wrap({option}={given!r}): expected a function of the arguments")
    if not callable(train_step):
        raise ConfigError(f"wrap({train_step!r}): expected a function")
    if isinstance(train_step, WrappedStep):
        raise ConfigError("wrap(step): it is wrapped already; wrap the step itself, once")
    if not isinstance(snapshotter, Snapshotter):
        raise ConfigError(f"wrap(step, {snapshotter!r}): expected a Snapshotter")
    jitting = {
        "donate_argnums": donate_argnums,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
    }
    jitting = {name: value for name, value in jitting.items() if value is not None}
    called, *_ = calls.opened(train_step)
    is_compiled = calls.is_compiled(called)
    is_plain = not (calls.is_jitted(called) or calls.is_of_nnx(called) or is_compiled)
    if jitting and not is_plain:
        raise ConfigError(
            f"wrap({', '.join(jitting)}): the step is jitted already; say it where it is jitted"
        )
    env = snapshotter.env
    where = Path(env.smp).parent / "executables" if cache_dir is None else cache_dir
    twins = Twins(snapshotter, Executables(Path(where), f"{env.job}/{env.rank}"))
    if is_compiled:
        twins.refuse("it is compiled ahead of time, so nothing can be added to it")
    elif not calls.are_known():
        twins.refuse("this version of JAX does not say how a function is jitted")
    return WrappedStep(
        train_step,
        snapshotter,
        twins,
        places(train_step, names),
        Doubt(train_step, names),
        Numbers(snapshotter, step),
        extras,
        jitting if is_plain else None,
    )


class WrappedStep:
    """What `wrap` gives: call it as the step.

    Attributes:
        receipt: of the last call; None before the first. Its `stall_s` is what the call took beside
            the step.
        has_twin: whether the last call was one of the second version.
    """

    def __init__(
        self,
        step: Any,
        snapshotter: Snapshotter,
        twins: Twins,
        state: tuple[Place, ...],
        doubt: Doubt,
        numbers: Numbers,
        extras: Callable[..., Any] | None,
        jitting: dict[str, Any] | None,
    ) -> None:
        self.receipt: Receipt | None = None
        self.has_twin = False
        self._step = step
        self._snapshotter = snapshotter
        self._twins = twins
        self._state = state
        self._doubt: Doubt | None = doubt
        self._numbers = numbers
        self._extras = extras
        self._jitting = jitting

    def __call__(
        self, *args: Any, jaxft_step: int | None = None, jaxft_extras: Any = None, **kwargs: Any
    ) -> Any:
        """The step's outputs; what it raises comes through."""
        if calls.is_traced():
            raise ConfigError(
                "the wrapped step was called within jit (or grad, scan, eval_shape, ...), where it "
                "would be run once and never again: call it as it is, or trace the step itself"
            )
        state = [place.of(args, kwargs) for place in self._state]
        if self._jitting is not None:
            self._jit(self._jitting, args, kwargs)

        def extras() -> Any:
            if jaxft_extras is None and self._extras is not None:
                return self._extras(*args, **kwargs)
            return jaxft_extras

        check = None if self._doubt is None else self._doubt.about(state)
        run = Run(self._step, self._twins, args, kwargs, check)
        number = self._numbers.of(state, args, kwargs, jaxft_step)
        self.receipt = self._snapshotter.save_within(
            number, lambda: tree_of(state), extras, run.within
        )
        outputs = run.finish()
        self._doubt = None
        self.has_twin = run.is_twin
        self.receipt.stall_s = max(0.0, self.receipt.stall_s - run.within_s)
        self._numbers.gave(self.receipt.step, outputs)
        return outputs

    def _jit(self, options: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Jits a plain function, now that it is known what it is called with; if that can be."""
        self._jitting = None
        if self._doubt is not None and self._doubt.is_holder:
            # Tracing it, where it changes them, would leave them in pieces.
            self._twins.refuse("it is a plain function, and holds nnx modules: jit it yourself")
            return
        if calls.has_nnx((args, kwargs)):
            from flax import nnx

            jitted: Any = nnx.jit(self._step, **options)
        else:
            jitted = jax.jit(self._step, **options)
        try:
            jitted.lower(*args, **kwargs)
            if "donate_argnums" not in options and not calls.is_of_nnx(jitted):
                self._mind_donation(jitted, args, kwargs)
        # Whatever is wrong, the function itself says it now, in its own way, if it is wrong there.
        except Exception as error:  # noqa: BLE001
            self._twins.refuse(f"it cannot be jitted: {brief(error)}")
        else:
            self._step = jitted

    def _mind_donation(self, jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A plain function does not say what it donates, and what it calls cannot any more."""
        if calls.donates_within(jitted, args, kwargs):
            _log.warning(
                "jaxft.wrap: the step is a plain function that calls one which donates; within the "
                "step's program nothing is donated, and its state takes twice its memory: say "
                "wrap(..., donate_argnums=...), or wrap the jitted function itself"
            )
