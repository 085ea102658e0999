"""Parity, and what it gives back: the holder of a fragment pulls what it is made of.

`encode_share` computes the parity fragments of one host's share; `rebuild_segment` makes a lost
segment again from the shares that are left. Both pull pieces of a few chunks from several peers at
once, run the codec over them straight into its place, and then, while all of it is still in cache,
check what was read against its manifest and take or check the checksums of what came out.

What was read is checked after its use and not before: it may be a peer's own memory, mapped, which
is written to again once the peer knows that its snapshot has failed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple, Protocol

import numpy as np

from jaxft.errors import ChunkDamaged, CodecError, PeerUnreachable
from jaxft.faults import reach
from jaxft.group.codec import backend, decode_matrix, encode_rows
from jaxft.group.manifest import CHUNK, SnapshotId
from jaxft.group.messages import Damage
from jaxft.group.placement import LaneGeometry, clip
from jaxft.host.layout import (
    ChunkCheck,
    GroupLayout,
    digest,
    parity_check,
    read_key,
    segment_check,
    split,
)
from jaxft.host.memory import Bytes
from jaxft.host.pace import Pace
from jaxft.host.wire import BulkReader, ReadRequest, Refused

PIECE = 16 * CHUNK
PEER_S = 10.0
DEADLINE_S = 600.0


class DamagedFragments(ChunkDamaged):
    """Fragments that were read do not have their checksums."""

    def __init__(self, damaged: frozenset[Damage], message: str) -> None:
        super().__init__(message)
        self.damaged = damaged


@dataclass(frozen=True)
class Sources:
    """Whom to read from.

    Attributes:
        id: the snapshot.
        layout: the geometry of the group.
        addresses: of the bulk servers that hold the members' shares, by place.
        reader: reads from them.
        cancel: set to stop.
        names: host names by place, for messages.
        parity_checksums: of the members' parity, by place; needed to rebuild only.
        pace: what pulling has to keep to, if it has to.
    """

    id: SnapshotId
    layout: GroupLayout
    addresses: Mapping[int, str]
    reader: BulkReader
    cancel: threading.Event
    names: tuple[str, ...]
    parity_checksums: Mapping[int, bytes] = field(default_factory=dict)
    pace: Pace | None = None


class _Fragment(NamedTuple):
    """A fragment to read: whose, and where its bytes lie there.

    `start` is the offset in the segment, or, with `parity`, in the parity region; `nbytes` what
    really exists.
    """

    host: int
    start: int
    nbytes: int
    parity: bool


class _Task(NamedTuple):
    """One output fragment: the coefficients, what is read, and where the result goes.

    `start` is the output's offset in the segment, or in the parity region.
    """

    lane: int
    stripe: int
    matrix: Bytes
    fragments: tuple[_Fragment, ...]
    output: Bytes
    start: int


def encode_share(sources: Sources, host: int, parity: Bytes) -> bytes:
    """Computes the parity fragments of the share of `host` that its devices have not made into
    `parity`, its parity region; returns their checksums.

    Raises:
        DamagedFragments: a member's bytes are not those of its manifest.
        PeerUnreachable: a member does not answer, or no longer has the snapshot.
        ReadCancelled: stopped.
    """
    layout = sources.layout
    tasks = []
    for number, geometry in enumerate(layout.lanes):
        region = layout.parity(host, number)
        if region.in_segment:
            continue
        for stripe, j in geometry.stripes_of_parity(layout.position(host)):
            base = region.offset + j * geometry.fragment_bytes
            output = parity[base : base + geometry.fragment_bytes]
            tasks.append(_parity_task(layout, number, stripe, j, output, base))
    made = _NewParity(parity.size)
    _run(sources, tasks, host, made)
    return np.array(made.sums, "<u8").tobytes()


def _parity_task(
    layout: GroupLayout, number: int, stripe: int, j: int, output: Bytes, start: int
) -> _Task:
    """Parity j of a stripe."""
    geometry = layout.lanes[number]
    fragments = tuple(
        _data_fragment(layout, number, geometry, stripe, i) for i in range(geometry.k)
    )
    rows = encode_rows(geometry.k, geometry.m)
    return _Task(number, stripe, rows[j : j + 1], fragments, output, start)


def check_given(sources: Sources, host: int, segment: Bytes) -> None:
    """Makes one chunk again of the parity that the devices of `host` have made, and compares: a
    random one in each snapshot, so that devices that compute wrongly are found by and by. It takes
    k chunks of reading.

    Args:
        segment: the host's own.

    Raises:
        CodecError: it is not what the devices have made.
        DamagedFragments, PeerUnreachable, ReadCancelled: as `encode_share`.
    """
    layout = sources.layout
    given = [
        number for number in range(len(layout.lanes)) if layout.parity(host, number).in_segment
    ]
    if not given:
        return
    dice = random.Random(f"{sources.id} {host}")
    number = dice.choice(given)
    geometry = layout.lanes[number]
    stripe, j = dice.choice(geometry.stripes_of_parity(layout.position(host)))
    at = dice.randrange(0, geometry.fragment_bytes, CHUNK)
    output = np.empty(CHUNK, np.uint8)
    task = _parity_task(layout, number, stripe, j, output, 0)
    chunk = tuple(
        one._replace(start=one.start + at, nbytes=max(0, min(CHUNK, one.nbytes - at)))
        for one in task.fragments
    )
    _run(sources, [task._replace(fragments=chunk)], host, _NewParity(CHUNK))
    start = layout.parity(host, number).offset + j * geometry.fragment_bytes + at
    if not np.array_equal(output, segment[start : start + CHUNK]):
        raise CodecError(
            f"snapshot {sources.id}: the devices of {sources.names[host]} have made wrong parity "
            f"(lane {number}, stripe {stripe}, byte {at} of parity {j}); train with "
            'Snapshotter(parity="host"), and please report it'
        )


def rebuild_segment(
    sources: Sources,
    host: int,
    lost: frozenset[Damage],
    output: Bytes,
    made: Bytes,
    touch: Touch,
) -> None:
    """Makes the segment of `host` again into `output`.

    Args:
        lost: fragments that cannot be used; `Damage(host)` for a whole share. Fragments of `host`
            itself that are not among them are copied.
        made: a byte for each chunk of the segment, set to 1 once it is there and checked.
        touch: makes the memory of a range of `output` exist. It is asked to just before each piece
            is made, which then is in cache.

    Raises:
        DamagedFragments: more is damaged than was known; plan again with it.
        ChunkDamaged: what came out is not what the manifest says.
        PeerUnreachable, ReadCancelled: as above.
    """
    layout = sources.layout
    tasks = []
    for number, geometry in enumerate(layout.lanes):
        position = layout.position(host)
        start, length = layout.lane(host, number)
        for stripe in geometry.stripes_of_data(position):
            offset, nbytes = clip(geometry.data_range(position, stripe), length)
            if nbytes:
                place = output[start + offset : start + offset + nbytes]
                task = _rebuild_task(layout, number, geometry, stripe, host, lost, place)
                tasks.append(task._replace(start=start + offset))
    old = _OldSegment(segment_check(layout.manifests[host]), made)
    _run(sources, tasks, host, old, touch)
    if old.bad:
        raise ChunkDamaged(
            f"snapshot {sources.id}: the rebuilt segment of {sources.names[host]} does not have "
            f"its checksums at {len(old.bad)} chunks, the first at byte {min(old.bad)}"
        )


def _data_fragment(
    layout: GroupLayout, number: int, geometry: LaneGeometry, stripe: int, index: int
) -> _Fragment:
    """Data fragment `index` of the stripe, clipped to what its host's lane really holds."""
    position = geometry.holder(stripe, index)
    host = layout.group.hosts[position]
    start, length = layout.lane(host, number)
    offset, nbytes = clip(geometry.data_range(position, stripe), length)
    return _Fragment(host, start + offset, nbytes, parity=False)


def _rebuild_task(
    layout: GroupLayout,
    number: int,
    geometry: LaneGeometry,
    stripe: int,
    host: int,
    lost: frozenset[Damage],
    output: Bytes,
) -> _Task:
    def gone(index: int) -> bool:
        holder = layout.group.hosts[geometry.holder(stripe, index)]
        return Damage(holder) in lost or Damage(holder, number, stripe) in lost

    missing = frozenset(index for index in range(geometry.n) if gone(index))
    wanted = geometry.fragment_of(layout.position(host), stripe)
    if wanted not in missing:
        fragment = _data_fragment(layout, number, geometry, stripe, wanted)
        return _Task(number, stripe, np.ones((1, 1), np.uint8), (fragment,), output, 0)
    have = geometry.sources(missing)
    if have is None:
        raise ChunkDamaged(
            f"stripe {stripe} of lane {number}: {geometry.n - len(missing)} of {geometry.n} "
            f"fragments are left and {geometry.k} are needed"
        )
    matrix = decode_matrix(geometry.k, geometry.m, have, (wanted,))
    fragments = tuple(_any_fragment(layout, number, geometry, stripe, index) for index in have)
    return _Task(number, stripe, matrix, fragments, output, 0)


def _any_fragment(
    layout: GroupLayout, number: int, geometry: LaneGeometry, stripe: int, index: int
) -> _Fragment:
    if index < geometry.k:
        return _data_fragment(layout, number, geometry, stripe, index)
    position = geometry.holder(stripe, index)
    host = layout.group.hosts[position]
    offset, nbytes = geometry.parity_range(position, stripe)
    place = layout.parity(host, number)
    return _Fragment(host, place.offset + offset, nbytes, parity=not place.in_segment)


# ------------------------------------------------------------------------------ pieces


class _Tag(NamedTuple):
    task: int
    at: int
    column: int


class _Made(Protocol):
    """What becomes of that which is made, piece by piece; `start` is where a piece begins in the
    segment or the parity region."""

    def chunks(self, start: int, piece: Bytes) -> list[memoryview]:
        """What of the piece is to be digested, chunk by chunk."""

    def take(self, start: int, digests: list[int]) -> None:
        """Their digests, now that they are made."""


class _NewParity:
    """Keeps the checksums of parity, of `nbytes`, in `sums`."""

    def __init__(self, nbytes: int) -> None:
        self.sums = [0] * -(-nbytes // CHUNK)

    def chunks(self, start: int, piece: Bytes) -> list[memoryview]:
        return split(piece)

    def take(self, start: int, digests: list[int]) -> None:
        first = start // CHUNK
        self.sums[first : first + len(digests)] = digests


class _OldSegment:
    """Sees whether a segment is what it was: `bad` are the offsets of chunks that are not, the
    others are marked in `made`."""

    def __init__(self, check: ChunkCheck, made: Bytes) -> None:
        self.bad: list[int] = []
        self._check = check
        self._made = made

    def chunks(self, start: int, piece: Bytes) -> list[memoryview]:
        return self._check.chunks(start, piece)

    def take(self, start: int, digests: list[int]) -> None:
        bad = self._check.unlike(start, digests)
        self.bad += bad
        if not bad:
            first = start // CHUNK
            self._made[first : first + len(digests)] = 1


# Called with (offset there, number of bytes) before they are made.
Touch = Callable[[int, int], None]


class _Run:
    """Reads the pieces of all tasks and codes each as soon as all it needs is there."""

    def __init__(
        self, sources: Sources, tasks: list[_Task], made: _Made, touch: Touch | None
    ) -> None:
        self.sources = sources
        self.tasks = tasks
        self.made = made
        self.touch = touch
        self.codec = backend()
        self.keys: dict[_Fragment, bytes] = {}
        self.matrices: dict[tuple[int, tuple[int, ...]], Bytes] = {}
        self.segment_checks = {
            host: segment_check(manifest) for host, manifest in sources.layout.manifests.items()
        }
        self.parity_checks = {
            host: parity_check(sums) for host, sums in sources.parity_checksums.items()
        }
        self.waiting: dict[tuple[int, int], dict[int, memoryview]] = {}
        self.damaged: set[Damage] = set()

    def requests(self) -> Iterator[ReadRequest[_Tag]]:
        """Piece by piece over all tasks, every source of a piece after another."""
        pace = self.sources.pace
        for number, task in enumerate(self.tasks):
            for at in range(0, task.output.size, PIECE):
                columns = self._columns(task, at)
                if not columns:
                    self._make(number, at, columns, {})
                for column in columns:
                    request = self._request(number, task, at, column)
                    if pace is not None:
                        pace.wait(request.nbytes, self.sources.cancel)
                    yield request

    @property
    def nbytes(self) -> int:
        """How much there is to read."""
        return sum(fragment.nbytes for task in self.tasks for fragment in task.fragments)

    def _columns(self, task: _Task, at: int) -> tuple[int, ...]:
        """The sources that have any byte of this piece; the others are zeros there."""
        return tuple(c for c, fragment in enumerate(task.fragments) if fragment.nbytes > at)

    def _request(self, number: int, task: _Task, at: int, column: int) -> ReadRequest[_Tag]:
        fragment = task.fragments[column]
        key = self.keys.get(fragment)
        if key is None:
            kind = "parity" if fragment.parity else "segment"
            key = self.keys[fragment] = read_key(kind, self.sources.id, fragment.host)
        return ReadRequest(
            self.sources.addresses[fragment.host],
            key,
            fragment.start + at,
            min(PIECE, fragment.nbytes - at),
            _Tag(number, at, column),
        )

    def take(self, tag: _Tag, answer: memoryview | Refused) -> None:
        task = self.tasks[tag.task]
        fragment = task.fragments[tag.column]
        if isinstance(answer, Refused):
            raise PeerUnreachable(
                f"snapshot {self.sources.id}: {self.sources.names[fragment.host]} does not give "
                f"its bytes: {answer.reason}"
            )
        pieces = self.waiting.setdefault((tag.task, tag.at), {})
        pieces[tag.column] = answer
        columns = self._columns(task, tag.at)
        if len(pieces) == len(columns):
            del self.waiting[tag.task, tag.at]
            self._make(tag.task, tag.at, columns, pieces)

    def _make(
        self, number: int, at: int, columns: tuple[int, ...], pieces: dict[int, memoryview]
    ) -> None:
        """One piece of a task's output, of those of its sources."""
        task = self.tasks[number]
        output = task.output[at : at + PIECE]
        if self.touch is not None:
            self.touch(task.start + at, output.size)
        fragments = [task.fragments[column] for column in columns]
        data = [pieces[column] for column in columns]
        checks = [self._check(fragment) for fragment in fragments]
        # All is laid out before: a step is three calls into C, one after the other.
        chunks: list[list[memoryview]] = []
        wanted: list[list[int]] = []
        for fragment, check, piece in zip(fragments, checks, data, strict=True):
            chunks.append(check.chunks(fragment.start + at, piece))
            wanted.append(check.digests(fragment.start + at, len(chunks[-1])))
        own = self.made.chunks(task.start + at, output)
        per_step = list(zip_longest(own, *chunks, fillvalue=memoryview(b"")))
        found = [
            list(map(digest, per_step[step // CHUNK]))
            for step in self._code(self._matrix(number, columns), data, output)
        ]
        for column, (fragment, digests) in enumerate(zip(fragments, wanted, strict=True), 1):
            if [step[column] for step in found[: len(digests)]] != digests:
                self.damaged.add(Damage(fragment.host, task.lane, task.stripe))
        if not self.damaged:
            self.made.take(task.start + at, [step[0] for step in found[: len(own)]])

    def _code(self, matrix: Bytes, data: list[memoryview], output: Bytes) -> Iterable[int]:
        """Computes the output, chunk by chunk where it can; yields the offset of each. Once
        something is damaged nothing is computed any more: it only remains to see what else is."""
        lengths = {len(piece) for piece in data} | {output.size}
        if len(lengths) == 1 and not self.damaged:
            return self.codec.combine_by_steps(matrix, data, [output], CHUNK)
        if not self.damaged:
            self.codec.combine_clipped(matrix, data, [output])
        return range(0, max(lengths), CHUNK)

    def _check(self, fragment: _Fragment) -> ChunkCheck:
        """What tells whether chunks of a fragment are whole."""
        checks = self.parity_checks if fragment.parity else self.segment_checks
        return checks[fragment.host]

    def _matrix(self, number: int, columns: tuple[int, ...]) -> Bytes:
        """Those columns of the task's coefficients."""
        matrix = self.matrices.get((number, columns))
        if matrix is None:
            matrix = np.ascontiguousarray(self.tasks[number].matrix[:, columns])
            self.matrices[number, columns] = matrix
        return matrix


def _run(
    sources: Sources, tasks: list[_Task], host: int, made: _Made, touch: Touch | None = None
) -> None:
    """Does the tasks of the share of `host`."""
    run = _Run(sources, tasks, made, touch)
    deadline_s = DEADLINE_S
    if sources.pace is not None:
        deadline_s += sources.pace.lasts_s(run.nbytes)
    answers = sources.reader.read_many(
        run.requests(), peer_s=PEER_S, deadline_s=deadline_s, cancel=sources.cancel
    )
    for piece, (tag, answer) in enumerate(answers):
        run.take(tag, answer)
        reach(
            "smp.piece",
            host=sources.names[host],
            generation=sources.id.generation,
            seq=sources.id.seq,
            piece=piece,
        )
    if run.damaged:
        who = ", ".join(sorted({sources.names[damage.host] for damage in run.damaged}))
        raise DamagedFragments(
            frozenset(run.damaged),
            f"snapshot {sources.id}: {len(run.damaged)} fragments on {who} do not have their "
            "checksums; they count as lost",
        )
