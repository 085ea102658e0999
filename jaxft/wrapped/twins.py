"""Twins: the second versions of one step, and when there is one.

The rules:
- The twin (`device.twin`) is built at the first due call whose arguments look like those of a call
  before: shardings have settled then. The calls until then are watched for what they give.
- It is a program with collectives in it, so either all ranks run it in a call or none does: they
  ask each other (`device.agreement`), and a rank that does not answer says no. All that can go
  wrong on one rank comes before that. Whether JAX takes the arguments shows only when it runs; so
  after its first run ranks ask once more, and a rank on which it alone was not taken ends.
- Wherever the twin cannot be, the bytes are staged before the step, as `save` does it. If that is
  so for good, one warning says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from typing import Any, NamedTuple

from jaxft.device.agreement import Agreement
from jaxft.device.calls import Call
from jaxft.device.cuts import places_of
from jaxft.device.executables import Executables, found, key_of
from jaxft.device.kept_step import bring_back
from jaxft.device.memory import missing_bytes
from jaxft.device.shards import SMALL_BYTES, Plan
from jaxft.device.transfer import StagedLeaves
from jaxft.device.twin import Beside, LoweredTwin, NotTaken, Outputs, Twin
from jaxft.errors import JaxftError, StagingError
from jaxft.group.manifest import SnapshotId
from jaxft.snapshotter import Snapshotter
from jaxft.watched import long_phase

_log = logging.getLogger(__name__)

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


class Ready(NamedTuple):
    """A twin for a call, and what is held of the state beside it."""

    twin: Twin
    beside: Beside


class Twins:
    """The twins of one step, and when there is one."""

    def __init__(self, snapshotter: Snapshotter, executables: Executables) -> None:
        env = snapshotter.env
        self._staging = snapshotter.staging
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

    def find(self, identity: SnapshotId, call: Call, plan: Plan, values: list[Any]) -> Ready | None:
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
        if twin is None:
            outputs = self._seen.get(signature)
            has_room = len(self._twins) < TWINS_MAX
            if outputs is not None and not has_room:
                self._warn_full()
            if not self._all_say("build", identity, outputs is not None and has_room):
                return None
            assert outputs is not None, "this rank has said so"
            twin = self._build(identity, call, outputs, plan, values)
            if twin is None:
                return None
            self._twins[key] = twin
        try:
            beside = twin.hold(values, self._staging)
        except StagingError as error:  # of which the receipt says so, if `save`'s way fails too
            _log.info("%s has no twin on any rank: %s", identity, error)
            beside = None
        is_ready = self._all_say("run", identity, beside is not None)
        return None if beside is None or not is_ready else Ready(twin, beside)

    def run(
        self, identity: SnapshotId, call: Call, ready: Ready
    ) -> tuple[StagedLeaves, Any] | None:
        """The state's bytes and the step's outputs; None: JAX takes the arguments on no rank, and
        nothing was run on any.

        Raises:
            JaxftError: on this rank alone. Whatever it ran now, the others would wait for it.
        """
        twin, beside = ready
        is_first = not twin.has_run
        try:
            ran = twin.run(call, beside)
        except NotTaken as error:
            if not self._agreement.all_say("not taken", identity.seq, True, AGREE_S):
                raise JaxftError(
                    "the step's second version does not take this rank's arguments, and other "
                    f"ranks run it: {error}. Start again from the last snapshot; arguments that "
                    "differ in kind from rank to rank are a way to this"
                ) from error
            self.refuse(str(error))
            return None
        if is_first:
            self._agreement.all_say("not taken", identity.seq, False, AGREE_S)
        return ran

    def _all_say(self, question: str, identity: SnapshotId, yes: bool) -> bool:
        """Asks the others. (Ranks that have the twin and ranks that have not are asked other
        questions, to which not all answer.)"""
        if self._agreement.all_say(question, identity.seq, yes, AGREE_S):
            self._tries = 0
            return True
        self._tries += yes
        if self._tries >= TRIES_MAX:
            self.refuse("the other ranks do not run it, or come to their calls much later")
        return False

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
            lowered, reason = None, brief(error)
        is_kept = self._agreement.all_say("kept", identity.seq, twin is not None, BUILD_S)
        if lowered is not None and not is_kept:
            before = found()
            try:
                with long_phase("compiling the step's second version"):
                    compiled = lowered.compile()
                twin = lowered.twin(compiled)
            except Exception as error:  # noqa: BLE001 - as above, or there is no memory for it
                twin, reason = None, brief(error)
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


def brief(error: BaseException) -> str:
    """An error's kind, and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
