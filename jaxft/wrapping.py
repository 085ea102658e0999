"""`wrap`: a train step that takes the snapshots itself.

    train_step = jaxft.wrap(train_step, snapshotter)
    ...
    state, loss = train_step(state, batch)          # instead of `save`

    a call that is not due     the step itself, nothing else
    a call that is due         as `save`: the snapshot before is decided, then one program that is
                               the step and gives the bytes of the state that it was called with

The rules:
- A snapshot is of the state as it goes *into* that call, and carries that state's number.
- The twin (`device.twin`) is built at the first due call whose arguments look like those of a call
  before: shardings have settled then. The calls until then are watched for what they give.
- It is a program with collectives in it, so either all ranks run it in a call or none does: they
  ask each other (`device.agreement`), and a rank that does not answer says no.
- Wherever the twin cannot be, the bytes are staged before the step, as `save` does it. If that is
  so for good, one warning says why.
"""

from __future__ import annotations

import inspect
import logging
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxft.device import calls
from jaxft.device.agreement import Agreement
from jaxft.device.calls import Call
from jaxft.device.cuts import places_of
from jaxft.device.executables import Executables, found, key_of
from jaxft.device.kept_step import bring_back
from jaxft.device.memory import missing_bytes
from jaxft.device.shards import SMALL_BYTES, Plan
from jaxft.device.transfer import StagedLeaves
from jaxft.device.twin import LoweredTwin, NotTaken, Outputs, Twin
from jaxft.errors import ConfigError
from jaxft.group.manifest import SnapshotId
from jaxft.receipt import Receipt
from jaxft.snapshotter import Snapshotter
from jaxft.watched import long_phase

_log = logging.getLogger(__name__)

_EITHER_WAY = inspect.Parameter.POSITIONAL_OR_KEYWORD

# Compiling a twin takes 30 to 40 s for 3,000 leaves, where the step takes 4.
LEAVES_MAX = 1000

# Kinds of calls (shapes, static arguments, shardings) that are remembered, and that have a twin.
SEEN_MAX = 256
TWINS_MAX = 4

# How long ranks wait for each other at a due call, and for each other's compilers; and how often in
# a row the others may say no before it is not asked any more.
AGREE_S = 10.0
BUILD_S = 1800.0
TRIES_MAX = 5


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
        cache_dir: where compiled programs are kept for the next start, a file for each rank;
            private to the user. By default beside the host's socket, for as long as the job runs.

    A step that cannot be within another program (compiled ahead of time, with `compiler_options`,
    a plain function that looks at values), or whose state has more than LEAVES_MAX leaves, is
    called as it is, and the state is staged before, as `save` does it. A warning says why, once.

    Raises:
        ConfigError: options that cannot work.
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
    where = Path(snapshotter.env.smp).parent / "executables" if cache_dir is None else cache_dir
    twins = _Twins(snapshotter, Executables(Path(where)))
    if is_compiled:
        twins.refuse("it is compiled ahead of time, so nothing can be added to it")
    elif not calls.are_known():
        twins.refuse("this version of JAX does not say how a function is jitted")
    return WrappedStep(
        train_step,
        snapshotter,
        twins,
        _places(train_step, names),
        _Numbers(snapshotter, step),
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
        twins: _Twins,
        state: tuple[_Place, ...],
        numbers: _Numbers,
        extras: Callable[..., Any] | None,
        jitting: dict[str, Any] | None,
    ) -> None:
        self.receipt: Receipt | None = None
        self.has_twin = False
        self._step = step
        self._snapshotter = snapshotter
        self._twins = twins
        self._state = state
        self._numbers = numbers
        self._extras = extras
        self._jitting = jitting

    def __call__(
        self, *args: Any, jaxft_step: int | None = None, jaxft_extras: Any = None, **kwargs: Any
    ) -> Any:
        """The step's outputs; what it raises comes through."""
        state = [place.of(args, kwargs) for place in self._state]
        if self.receipt is None and any(map(_is_traced, jax.tree_util.tree_leaves(state))):
            raise ConfigError(
                "the wrapped step was called within jit (or grad, scan, eval_shape, ...), where it "
                "would be run once and never again: call it as it is, or trace the step itself"
            )
        if self._jitting is not None:
            self._jit(self._jitting, args, kwargs)

        def extras() -> Any:
            if jaxft_extras is None and self._extras is not None:
                return self._extras(*args, **kwargs)
            return jaxft_extras

        run = _Run(self._step, self._twins, args, kwargs)
        number = self._numbers.of(state, args, kwargs, jaxft_step)
        self.receipt = self._snapshotter.save_within(
            number, lambda: _tree(state), extras, run.within
        )
        outputs = run.finish()
        self.has_twin = run.is_twin
        self.receipt.stall_s = max(0.0, self.receipt.stall_s - run.within_s)
        self._numbers.gave(self.receipt.step, outputs)
        return outputs

    def _jit(self, options: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Jits a plain function, now that it is known what it is called with; if that can be."""
        self._jitting = None
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
            self._twins.refuse(f"it cannot be jitted: {_brief(error)}")
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


class _Place(NamedTuple):
    """Where an argument is in a call: at its position, or under its name, as far as these are
    known."""

    position: int | None
    name: str | None

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.position is not None and self.position < len(args):
            return args[self.position]
        if self.name is not None and self.name in kwargs:
            return kwargs[self.name]
        asked = self.position if self.name is None else self.name
        raise ConfigError(
            f"wrap(state=...) names the argument {asked!r}; this call has {len(args)} positional "
            f"ones and {sorted(kwargs)}"
        )


def _places(step: Any, names: tuple[int | str, ...]) -> tuple[_Place, ...]:
    """Where those arguments of a step are; each may be given either way, as in any call.

    Raises:
        ConfigError: it has no such argument.
    """
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):  # it does not say
        return tuple(
            _Place(name, None) if isinstance(name, int) else _Place(None, name) for name in names
        )
    return tuple(_place(parameters, name) for name in names)


def _place(parameters: list[inspect.Parameter], name: int | str) -> _Place:
    kinds = {parameter.kind for parameter in parameters}
    in_order = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, _EITHER_WAY)]
    for position, one in enumerate(in_order):
        if name in (position, one.name):
            return _Place(position, one.name if one.kind == _EITHER_WAY else None)
    if isinstance(name, int):
        if name >= 0 and inspect.Parameter.VAR_POSITIONAL in kinds:
            return _Place(name, None)
    elif inspect.Parameter.VAR_KEYWORD in kinds or any(one.name == name for one in parameters):
        return _Place(None, name)
    has = ", ".join(str(one) for one in parameters)
    raise ConfigError(f"wrap(state={name!r}): the step has no such argument, it has ({has})")


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, jax.core.Tracer)


def _tree(state: list[Any]) -> Any:
    """What is saved of these arguments."""
    values = state[0] if len(state) == 1 else tuple(state)
    return calls.nnx_state(values) if calls.has_nnx(state) else values


def _brief(error: BaseException) -> str:
    """An error's kind, and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


class _Run:
    """One call: the step is run once, within the snapshot if there is one."""

    def __init__(
        self, step: Any, twins: _Twins, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.within_s = 0.0
        self.is_twin = False
        self._step = step
        self._twins = twins
        self._args = args
        self._kwargs = kwargs
        self._has_run = False
        self._outputs: Any = None
        self._staged: StagedLeaves | None = None
        self._error: BaseException | None = None

    def within(
        self,
        identity: SnapshotId,
        plan: Plan,
        values: list[Any],
        stage: Callable[[], StagedLeaves],
    ) -> StagedLeaves:
        """A snapshot begins: the step, or its twin, is run in it (see `snapshotter.RunStep`)."""
        twins = self._twins
        if twins.is_off or calls.is_debugged():
            return stage()

        def run(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = Call(fn, args, kwargs)
            twin = twins.find(identity, call, plan, values)
            began_s = time.monotonic()
            if twin is not None:
                try:
                    self._staged, outputs = twin.run(call, values, twins.staging)
                    self.is_twin = True
                    return outputs
                except NotTaken as error:
                    twins.refuse(str(error))
                finally:
                    self.within_s = time.monotonic() - began_s
            self._staged = stage()
            began_s = time.monotonic()
            try:
                return twins.watch(fn, args, kwargs)
            finally:
                self.within_s = time.monotonic() - began_s

        try:
            self._outputs = calls.around(self._step, self._args, self._kwargs, run)
        except BaseException as error:
            if self._staged is None:
                raise
            self._error = error  # of the step: what it was given is safe
        self._has_run = True
        assert self._staged is not None, "the step calls what it has jitted"
        return self._staged

    def finish(self) -> Any:
        """The step's outputs; it is run now if it was not."""
        if self._error is not None:
            raise self._error
        if self._has_run:
            return self._outputs
        if self._twins.is_watching and not calls.is_debugged():
            return calls.around(self._step, self._args, self._kwargs, self._twins.watch)
        return self._step(*self._args, **self._kwargs)


class _Twins:
    """The twins of one step, and when there is one."""

    def __init__(self, snapshotter: Snapshotter, executables: Executables) -> None:
        env = snapshotter.env
        self.staging = snapshotter.staging
        self._wants_parity = snapshotter.rings is not None
        self.is_off = False
        self.is_watching = True
        self._executables = executables
        # Ranks with another word on parity have other programs: they are not to agree.
        self._agreement = Agreement(f"{env.generation}-{env.nonce}-{snapshotter.parity}")
        self._seen: dict[Hashable, Outputs] = {}
        self._twins: dict[Hashable, Twin] = {}
        self._is_full = False
        self._tries = 0

    def refuse(self, reason: str) -> None:
        """There is no twin, from now on."""
        if self.is_off:
            return
        _log.warning(
            "jaxft.wrap: the state is staged before the step, as save does it; the step has no "
            "twin: %s",
            reason,
        )
        self.is_off = True
        self.is_watching = False
        self._twins.clear()

    def watch(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the jitted function itself, and remembers what its outputs look like."""
        signature = _signature(Call(fn, args, kwargs))
        keep = None
        if signature not in self._seen:
            keep = bring_back(self._executables, fn, args, kwargs)
        outputs = fn(*args, **kwargs)
        if keep is not None:
            keep()
        if signature in self._seen:
            self.is_watching = False
        elif signature is not None:
            self._seen[signature] = Outputs.of(outputs)
            if len(self._seen) > SEEN_MAX:
                del self._seen[next(iter(self._seen))]
        return outputs

    def find(self, identity: SnapshotId, call: Call, plan: Plan, values: list[Any]) -> Twin | None:
        """The twin for a call, which all ranks run in this call; None: none of them does."""
        if len(values) > LEAVES_MAX:
            self.refuse(
                f"compiling it would take long: the state has {len(values)} leaves, and "
                f"the limit is {LEAVES_MAX}"
            )
            return None
        signature = _signature(call)
        key = (signature, plan, places_of(call, values))
        twin = self._twins.get(key)
        outputs = self._seen.get(signature)
        has_room = twin is not None or len(self._twins) < TWINS_MAX
        if outputs is not None and not has_room:
            self._warn_full()
        may_be = outputs is not None and has_room
        if not self._agreement.all_say("run", identity.seq, may_be, AGREE_S):
            self._tries += may_be
            if self._tries >= TRIES_MAX:
                self.refuse("the other ranks do not run it, or come to their calls much later")
            return None
        self._tries = 0
        assert outputs is not None, "this rank has said so"
        if twin is None:
            twin = self._build(identity, call, outputs, plan, values)
            if twin is not None:
                self._twins[key] = twin
        return twin

    def _warn_full(self) -> None:
        if not self._is_full:
            self._is_full = True
            _log.warning(
                "jaxft.wrap: the step has been called in more than %d ways (shapes, static "
                "arguments, shardings): only the first ones have a twin, in calls of others the "
                "state is staged before the step, as save does it",
                TWINS_MAX,
            )

    def _build(
        self,
        identity: SnapshotId,
        call: Call,
        outputs: Outputs,
        plan: Plan,
        values: list[Any],
    ) -> Twin | None:
        """Loads or compiles a twin, on all ranks or on none: compilers may ask each other too."""
        began_s = time.monotonic()
        lowered: LoweredTwin | None = None
        twin: Twin | None = None
        key, reason = "", "another rank could not compile it"
        try:
            lowered = LoweredTwin(call, outputs, plan, values)
            key = key_of(lowered.text, lowered.devices)
            kept = self._executables.load(key, lowered.in_tree, lowered.out_tree, lowered.devices)
            twin = None if kept is None else lowered.twin(kept)
        # Whatever JAX raises for a step that it cannot take over into another program.
        except Exception as error:  # noqa: BLE001
            lowered, reason = None, _brief(error)
        is_kept = self._agreement.all_say("kept", identity.seq, twin is not None, BUILD_S)
        if lowered is not None and not is_kept:
            before = found()
            try:
                with long_phase("compiling the step's second version"):
                    compiled = lowered.compile()
                twin = lowered.twin(compiled)
            except Exception as error:  # noqa: BLE001 - as above, or there is no memory for it
                twin, reason = None, _brief(error)
            else:
                self._executables.keep(key, compiled, before)
        if twin is not None and (missing := missing_bytes(twin.compiled, twin.devices)):
            twin, reason = None, f"it wants {missing} bytes more of device memory than are free"
        if not self._agreement.all_say("built", identity.seq, twin is not None, BUILD_S):
            self.refuse(reason)
            return None
        if self._wants_parity and twin is not None and twin.lanes is None:
            why = (
                f"no leaf of more than {SMALL_BYTES >> 10} KiB a shard lies on all devices of the "
                "world in equal rows, with as many devices on each host"
            )
            if plan.lanes is not None:
                why = "some of the large leaves are no arguments of the step's program"
            _log.warning('parity="device": the hosts compute all parity of this state: %s', why)
        how = "loaded" if is_kept else "compiled"
        _log.info("the twin of the step was %s in %.1f s", how, time.monotonic() - began_s)
        return twin


def _signature(call: Call) -> Hashable | None:
    """A call's signature; None where a static argument has none, which JAX itself refuses."""
    try:
        hash(call.signature)
    except TypeError:
        return None
    return call.signature


# What the next call of any wrapped step is given, by the snapshotter.
_next_numbers: weakref.WeakKeyDictionary[Snapshotter, int] = weakref.WeakKeyDictionary()


class _Numbers:
    """The number of the state that each call is given."""

    def __init__(self, snapshotter: Snapshotter, asked: Callable[..., int] | None) -> None:
        self._snapshotter = snapshotter
        self._asked = asked
        self._is_first = True
        self._is_said = False  # by the state, of the last call
        self._last: Any = None

    def of(
        self, state: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], said: int | None
    ) -> int:
        number = said
        if number is None and self._asked is not None:
            number = self._asked(*args, **kwargs)
        if number is None:
            own = _own_step(state)
            self._is_said = own is not None
            if own is not None and own is not self._last:
                number = self._heed(int(own))
        return self._counted if number is None else number

    @property
    def _counted(self) -> int:
        """One more than the last call of a wrapped step, or what was saved or restored since."""
        return max(_next_numbers.get(self._snapshotter, 0), self._snapshotter.step or 0)

    def _heed(self, own: int) -> int:
        """What the state says of itself, unless it does not count the calls: what was restored was
        counted by them then."""
        counted = self._counted
        if not self._is_first or self._snapshotter.step is None or own == counted:
            return own
        if own < counted:
            _log.warning(
                "jaxft.wrap: the state says that it is of step %d, and the last one of this job "
                "was %d: it does not grow in each call, so calls are counted. Say "
                "wrap(..., step=...) if they are to have other numbers",
                own,
                counted,
            )
            return counted
        return own

    def gave(self, number: int, outputs: Any) -> None:
        """The step has given these: the next call is one step later if its state is among them."""
        self._is_first = False
        _next_numbers[self._snapshotter] = number + 1
        self._last = _step_among(outputs) if self._is_said else None


def _own_step(values: Sequence[Any]) -> Any:
    """The step that one of these says of itself; None if none does."""
    for value in values:
        own = getattr(value, "step", None)
        if isinstance(own, (jax.Array, np.ndarray, np.integer)):
            if own.shape == () and np.issubdtype(own.dtype, np.integer):
                return own
        elif type(own) is int:
            return own
    return None


def _step_among(outputs: Any) -> Any:
    """The same of a step's outputs, however deep in tuples, lists and dicts the state is."""
    own = _own_step([outputs])
    if own is None and isinstance(outputs, (tuple, list, dict)):
        within = outputs.values() if isinstance(outputs, dict) else outputs
        own = next((one for one in map(_step_among, within) if one is not None), None)
    return own
