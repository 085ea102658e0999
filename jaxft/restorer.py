"""Restoring: from the plan that the root made to arrays on the mesh of now.

    the plan is told -> manifests -> what this process needs of which segment
        -> own slot (mapped; checked here, piece by piece before it is used) and peers (fetched and
           checked by the SMP)
        -> arrays -> verified -> everybody has verified -> the caller gets the tree

No rank returns before all have verified. Damage that one finds goes to the root, which plans again
for all.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from jaxft.device.assembly import Table, Targets, match, needs, reads
from jaxft.device.placing import assemble
from jaxft.errors import (
    ChunkDamaged,
    JaxftError,
    NothingRecoverable,
    RestoreTimeout,
    TreeMismatch,
)
from jaxft.extras import decode_extras
from jaxft.faults import reach
from jaxft.group.manifest import CHUNK, Manifest, SnapshotId
from jaxft.group.messages import Damage, Plan
from jaxft.host import protocol as p
from jaxft.host.checked import BadChunks, CheckedSegment, Making
from jaxft.host.client import SmpClient
from jaxft.host.layout import GroupLayout, decode_manifest
from jaxft.host.memory import Arena, Bytes

if TYPE_CHECKING:
    from jaxft.fallback import OrbaxFallback

_log = logging.getLogger(__name__)
_numbers = itertools.count(1)
REASON_MAX = 1000
T = TypeVar("T")
_EVERY_RANK = (
    "every rank has to make its Snapshotter and to call restore: see what the others print"
)


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """What `restore` gives.

    Attributes:
        state: the tree, on the shardings of the target.
        step: the step it was saved with.
        extras: what this rank saved with it (rank 0's, where this rank did not exist then).
        extras_by_rank: what every rank saved with it.
        source: "own" (every host still had its memory), "peer" (the bytes moved between hosts),
            "rebuilt" (a lost host's bytes were computed from parity) or "orbax" (storage).
        id: the snapshot's identity, None for a checkpoint that plain Orbax wrote.
        reasons: why newer snapshots were not taken.
        seconds: how long it took from the plan to the arrays.
    """

    state: Any
    step: int
    extras: Any
    extras_by_rank: dict[int, Any]
    source: str
    id: SnapshotId | None
    reasons: tuple[str, ...]
    seconds: float

    def __repr__(self) -> str:
        """Without the arrays, which may be thousands of lines."""
        shown = ("step", "source", "id", "reasons", "extras")
        facts = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"Restored({facts}, state=..., seconds={self.seconds:.3f})"


class _Damaged(ChunkDamaged):
    """Fragments that this rank found damaged."""

    def __init__(self, damaged: Sequence[Damage], message: str) -> None:
        super().__init__(message)
        self.damaged = tuple(damaged)


class SnapshotReader:
    """Reads one snapshot through this host's SMP.

    Args:
        client: the connection.
        identity: the snapshot.
        own: (slot, place) of this host's own share of it, None if there is none.
        attempt: of the plan that it is read for; a newer plan ends every wait. None: for no plan.
        timeout_s: for each thing that is waited for.
    """

    def __init__(
        self,
        client: SmpClient,
        identity: SnapshotId,
        own: tuple[int, int] | None,
        *,
        attempt: int | None,
        timeout_s: float,
    ) -> None:
        self.client = client
        self.id = identity
        self.own = own
        self.attempt = attempt
        self.timeout_s = timeout_s
        self.manifests = self._read_manifests()

    def _read_manifests(self) -> dict[int, Manifest]:
        """The manifests of all segments, by place."""
        key = str(self.id)
        self.client.manifests.pop(key, None)
        self.client.say(p.WantManifests(id=self.id), open_as="manifests")
        told = self.client.wait(
            lambda: self._unless_replanned(self.client.manifests.get(key)),
            self.timeout_s,
            f"the manifests of snapshot {self.id}",
        )
        self.client.close_open("manifests")
        if told.damaged:
            raise _Damaged(told.damaged, told.error)
        if told.error:
            raise JaxftError(told.error)
        manifests = [decode_manifest(one) for one in told.manifests]
        return {manifest.host: manifest for manifest in manifests}

    def _unless_replanned(self, found: Any) -> Any:
        """A new plan ends every wait for the old one."""
        told = self.client.plan
        stale = self.attempt is not None and told is not None and told.plan.attempt > self.attempt
        if found is None and stale:
            raise _Replanned
        return found

    def assemble(self, targets: Targets) -> Any:
        """The tree, from bytes that were all checked."""
        while True:
            try:
                return self._assemble(targets)
            except _MakerLost:
                continue

    def _assemble(self, targets: Targets) -> Any:
        pieces = needs(targets)
        views: dict[int, list[tuple[int, Bytes]]] = {}
        segments: dict[int, CheckedSegment] = {}

        def read(host: int, offset: int, nbytes: int) -> Bytes:
            if host in segments:
                return segments[host].read(offset, nbytes)
            return _find(views, host, offset, nbytes)

        with contextlib.ExitStack() as opened:
            try:
                own = opened.enter_context(self._own_segment(targets))
                if own is not None:
                    segments[own.host] = own
                    pieces.pop(own.host, None)
                for extents in self._asked_together(pieces):
                    arrivals = self.client.arrivals
                    told, arena = opened.enter_context(self._fetched(extents))
                    if told.made_at is None:
                        views.update(_views(extents, told, arena))
                    else:
                        host = extents[0].host
                        made = self._made_segment(targets, host, arena, told.made_at, arrivals)
                        segments[host] = opened.enter_context(made)
                return assemble(targets, read)
            except BadChunks as error:
                raise self._damaged(error) from error
            finally:
                views.clear()

    def _asked_together(self, pieces: dict[int, list[tuple[int, int]]]) -> list[list[p.Extent]]:
        """What is fetched: each segment that is rebuilt on this host on its own, since its memory
        is mapped, and before the others, which are waited for."""
        told = self.client.plan
        here = {
            one.host
            for one in (told.plan.segments if told is not None and self.attempt is not None else ())
            if one.rebuilt and one.address == self.client.welcome.address
        }
        extents = {
            host: [p.Extent(host, start, start + nbytes) for start, nbytes in spans]
            for host, spans in pieces.items()
        }
        others = [one for host in extents if host not in here for one in extents[host]]
        return [*(extents[host] for host in extents if host in here), *([others] if others else [])]

    @contextlib.contextmanager
    def _own_segment(self, targets: Targets) -> Iterator[CheckedSegment | None]:
        """This host's own segment, mapped, which is being checked in the order it is used in."""
        if self.own is None or self.own[1] not in self.manifests:
            yield None
            return
        slot, place = self.own
        manifest = self.manifests[place]
        arena = self.client.slot(slot, manifest.length)
        wanted = _of_host(targets, place)
        with CheckedSegment(arena, manifest, wanted, timeout_s=self.timeout_s) as own:
            yield own

    def _made_segment(
        self, targets: Targets, host: int, arena: Arena, made_at: int, arrivals: int
    ) -> CheckedSegment:
        """A segment that the SMP is rebuilding, mapped: each piece is taken as soon as it is there.

        Args:
            arrivals: the client's, from before it was asked for: the SMP that is started after
                this one died begins it anew, in other memory.
        """

        def look() -> None:
            self._unless_replanned(None)
            if self.client.failure is not None:
                raise self.client.failure
            if self.client.arrivals != arrivals:
                raise _MakerLost

        reach("restore.making", rank=self.client.hello.rank)
        manifest = self.manifests[host]
        made = arena.view(made_at, -(-manifest.length // CHUNK))
        return CheckedSegment(
            arena,
            manifest,
            _of_host(targets, host),
            timeout_s=self.timeout_s,
            making=Making(made, look),
        )

    def _damaged(self, error: BadChunks) -> _Damaged:
        """What was found damaged, as the root is to know it."""
        world = self.manifests[error.host].world
        layout = GroupLayout(world.group_of(error.host), self.manifests)
        damaged = {layout.damage_at(error.host, at) for at in error.offsets}
        return _Damaged(
            sorted(damaged),
            f"snapshot {self.id}: {len(error.offsets)} chunks of {world.hosts[error.host]}'s own "
            "memory do not have their checksums; they count as lost",
        )

    @contextlib.contextmanager
    def _fetched(self, extents: Sequence[p.Extent]) -> Iterator[tuple[p.Fetched, Arena]]:
        """Pieces of other segments, in memory that the SMP brings or makes them in."""
        number = next(_numbers)
        fetch = p.Fetch(number=number, id=self.id, extents=tuple(extents))
        self.client.say(fetch, open_as="fetch")
        told, arena = self.client.wait(
            lambda: self._unless_replanned(self.client.fetched.pop(number, None)),
            self.timeout_s,
            f"{len(extents)} pieces of snapshot {self.id}",
        )
        self.client.close_open("fetch")
        if told.damaged:
            raise _Damaged(told.damaged, told.error)
        if told.error or arena is None:
            raise JaxftError(told.error)
        try:
            yield told, arena
        finally:
            arena.close()
            self.client.say(p.Release(number=number))


def _of_host(targets: Targets, host: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of every piece of a segment, in the order they are used in."""
    return ((at, nbytes) for holder, at, nbytes in reads(targets) if holder == host)


def _views(
    extents: Sequence[p.Extent], told: p.Fetched, arena: Arena
) -> dict[int, list[tuple[int, Bytes]]]:
    """The extents where they lie, by host, each with its place in the segment."""
    views: dict[int, list[tuple[int, Bytes]]] = {}
    for extent, offset in zip(extents, told.offsets, strict=True):
        view = arena.view(offset, extent.stop - extent.start)
        views.setdefault(extent.host, []).append((extent.start, view))
    return views


class _MakerLost(Exception):
    """The SMP that was making a segment is gone; another will begin it anew."""


class _Replanned(Exception):
    """The root has made another plan meanwhile."""


def _find(views: dict[int, list[tuple[int, Bytes]]], host: int, offset: int, nbytes: int) -> Bytes:
    for start, view in views[host]:
        if start <= offset and offset + nbytes <= start + view.size:
            return view[offset - start : offset - start + nbytes]
    raise AssertionError(f"bytes {offset} to {offset + nbytes} of segment {host} were not fetched")


def restore(
    client: SmpClient,
    like: Any,
    *,
    rank: int,
    fallback: OrbaxFallback | None,
    strict: bool,
    timeout_s: float,
) -> Restored | None:
    """Restores what the root chose, and returns when every rank has.

    Raises:
        TreeMismatch: `like` is not the tree that was saved.
        NothingRecoverable: there was a committed snapshot and nothing can give it back.
        RestoreTimeout: the others did not come within `timeout_s`.
    """

    def follow(told: p.PlanTold) -> Restored | None:
        return _follow(client, told, like, rank, fallback, strict, timeout_s)

    return agree(client, follow, timeout_s)


def agree(client: SmpClient, follow: Callable[[p.PlanTold], T], timeout_s: float) -> T:
    """What `follow` makes of the plan that all ranks have followed, and so verified.

    Raises:
        RestoreTimeout: the others did not come within `timeout_s`.
    """
    attempt = 0
    while True:
        told = _next_plan(client, attempt, timeout_s)
        attempt = told.plan.attempt
        try:
            found = follow(told)
        except _Replanned:
            continue
        except _Damaged as error:
            _log.warning("%s", error)
            message = p.RestoreFailed(attempt=attempt, reason=str(error), damaged=error.damaged)
            client.say(message, open_as="restored")
            continue
        client.say(p.Restored(attempt=attempt, how="verified"), open_as="restored")
        if _settled(client, attempt, timeout_s):
            return found


def _next_plan(client: SmpClient, after: int, timeout_s: float) -> p.PlanTold:
    def newer() -> p.PlanTold | None:
        told = client.plan
        return told if told is not None and told.plan.attempt > after else None

    try:
        return client.wait(newer, timeout_s, "the decision which snapshot to restore")
    except JaxftError as error:
        raise RestoreTimeout(f"{error}; {_EVERY_RANK}") from error


def _settled(client: SmpClient, attempt: int, timeout_s: float) -> bool:
    """Waits until every rank has restored; False if another plan came instead."""

    def known() -> bool | None:
        if client.settled is not None:
            return True
        told = client.plan
        return False if told is not None and told.plan.attempt > attempt else None

    try:
        return client.wait(known, timeout_s, "the word that every rank has restored")
    except JaxftError as error:
        raise RestoreTimeout(f"{error}; {_EVERY_RANK}") from error


def _follow(
    client: SmpClient,
    told: p.PlanTold,
    like: Any,
    rank: int,
    fallback: OrbaxFallback | None,
    strict: bool,
    timeout_s: float,
) -> Restored | None:
    """Restores one plan here."""
    plan = told.plan
    began_s = time.monotonic()
    if plan.chosen is not None:
        reader = SnapshotReader(
            client, plan.chosen, told.own, attempt=plan.attempt, timeout_s=timeout_s
        )
        manifests = reader.manifests
        state = reader.assemble(match(like, Table.of(manifests.values(), rank), strict=strict))
        extras = _extras(manifests)
    elif plan.storage is not None:
        if fallback is None:
            raise NothingRecoverable("the plan names a checkpoint and no fallback is configured")
        try:
            state, extras = fallback.restore(plan.storage, like, strict=strict)
        except (TreeMismatch, NothingRecoverable):
            raise
        except Exception as error:
            _log.exception("checkpoint of step %d cannot be read", plan.step)
            what = f"checkpoint of step {plan.step} in {fallback.directory} cannot be read"
            reason = f"{what}: {type(error).__name__}: {error}".partition("\n")[0][:REASON_MAX]
            failed = p.RestoreFailed(attempt=plan.attempt, reason=reason)
            client.say(failed, open_as="restored")
            raise _Replanned from error
    else:
        _refuse_to_start_over(plan)
        return None
    return Restored(
        state=state,
        step=plan.step,
        extras=extras.get(rank, extras.get(0)),
        extras_by_rank=extras,
        source=plan.source,
        id=plan.base,
        reasons=plan.reasons,
        seconds=time.monotonic() - began_s,
    )


def _extras(manifests: dict[int, Manifest]) -> dict[int, Any]:
    return {
        part.rank: decode_extras(part.extras)
        for manifest in manifests.values()
        for part in manifest.parts
    }


def _refuse_to_start_over(plan: Plan) -> None:
    """A job that lost what it had does not silently begin anew."""
    reasons = "; ".join(plan.reasons)
    if plan.newest_known is None and plan.unreadable:
        raise NothingRecoverable(
            f"there are checkpoints, and none of them can be read: {reasons}. Mend or bring back "
            "one of them; or, to begin anew, move them away, or start with `jaxft run --fresh` or "
            "Snapshotter(fresh=True)"
        )
    if plan.newest_known is not None:
        raise NothingRecoverable(
            f"snapshot {plan.newest_known}, or a newer one, was committed and cannot be given "
            f"back: {reasons}. "
            "Bring back the hosts that had it, if they live (a run that has ended has let its "
            "memory go), or give an OrbaxFallback with a checkpoint, or start anew "
            "with `jaxft run --fresh` or Snapshotter(fresh=True)"
        )
