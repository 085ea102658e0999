"""What the SMP does with what its own host's processes say.

The agent is always let in. A rank or helper is let in when the SMP has entered its generation; one
that comes earlier waits, one of another generation is refused.

An agent that dies takes the ranks that it started with it: there must be no second world. A rank
that has only attached is nobody's world but its own, and goes on: no slot is granted to another
generation before this rank is dead or has left, so no two ever write.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import msgspec

from jaxft.errors import JaxftError, ReadCancelled
from jaxft.group import events as e
from jaxft.group.account import Account
from jaxft.group.messages import PersistState, RankOptions
from jaxft.host import protocol as p
from jaxft.host.accountant import ANSWER_S, account_of, read_account
from jaxft.host.client import ADVICE
from jaxft.host.clients import Client, Clients
from jaxft.host.driver import Driver, describe_slot
from jaxft.host.memory import Arena
from jaxft.host.recall import Fetched, bulk_address

_log = logging.getLogger(__name__)


class Desk:
    """Serves the local clients of one SMP."""

    def __init__(self, driver: Driver, clients: Clients) -> None:
        self.driver = driver
        self.clients = clients
        self.stopping = False
        self.agent_seen = False
        self._agent_pid = 0
        self._fetched: dict[tuple[int, int], Arena] = {}
        self._early: list[tuple[Client, p.WantManifests | p.Fetch]] = []

    def serve(self, client: Client) -> None:
        """Handles the messages that have arrived on this connection."""
        try:
            for payload, fds in client.channel.drain():
                for fd in fds:
                    client.keep_pulse(fd)
                self._take(client, p.decode_client(payload))
        except (JaxftError, msgspec.MsgspecError) as error:
            _log.warning("pid %d is sent away: %s", client.channel.peer_pid, error)
            client.tell(p.Refused(reason=str(error)))
            client.channel.close()

    def attend_waiting(self) -> None:
        """Lets in whoever waited for the generation that has been entered by now, and answers what
        was asked before the plan was known (by ranks of an SMP that was started again)."""
        for client in self.clients.waiting():
            self._seat(client)
        if self._early and self.driver.plan_known:
            early, self._early = self._early, []
            for client, message in early:
                if not client.channel.ended:
                    self._from_rank(client, message)

    def left(self, client: Client) -> None:
        """A client's connection ended. When it was the agent, the ranks that it has started must
        not go on alone."""
        for key in [key for key in self._fetched if key[0] == id(client)]:
            self._fetched.pop(key).close()
        if client.role == "rank" and client.seated and not client.left and self._is_attached:
            self.driver.diary.note("rank_gone", f"process {client.channel.peer_pid} has ended")
        if client.role == "agent" and client.seated and not self.stopping:
            _log.warning("the agent (pid %d) is gone", client.channel.peer_pid)
            if not self._is_attached:
                self.clients.kill_writers()

    # -------------------------------------------------------------------- who it is

    def _take(self, client: Client, message: p.ClientMessage) -> None:
        if isinstance(message, p.Hello):
            client.hello = message
            self._seat(client)
        elif isinstance(message, p.Inspect):
            client.tell(self._inspect())
        elif isinstance(message, p.InspectPeer):
            self._inspect_peer(client, message.host)
        elif not client.seated:
            raise JaxftError("said something before it was let in")
        elif client.role == "agent":
            self._from_agent(client, message)
        else:
            self._from_rank(client, message)

    def _seat(self, client: Client) -> None:
        hello = client.hello
        assert hello is not None
        if hello.role != "agent" and not self._belongs(client, hello):
            return
        client.seated = True
        shares = self.driver.shares
        fds = [arena.fd for arena in shares.arenas]
        writers = tuple(self.clients.living_writers()) if hello.role == "agent" else ()
        client.tell(self._welcome(writers), fds)
        if hello.role == "agent":
            self.agent_seen = True
        elif hello.role == "rank":
            self.clients.watch_writer(client.channel.peer_pid)
            self.driver.happen(e.RankJoined(hello.rank, hello.options or RankOptions()))
        else:
            order = self.driver.core.keeper.directive.persist
            if order is not None:
                client.tell(self.driver.persist_message(order))

    def _belongs(self, client: Client, hello: p.Hello) -> bool:
        """Whether its generation is the one entered; a later one is waited for."""
        keeper = self.driver.core.keeper
        generation = keeper.generation if keeper.frozen else None
        known = self.driver.ledger.generation
        if generation is not None and (generation.number, generation.nonce) == (
            hello.generation,
            hello.nonce,
        ):
            return True
        if hello.generation < known or (generation is not None and hello.generation == known):
            reason = (
                f"this process belongs to generation {hello.generation}, host "
                f"{self.driver.host} is in generation {known}"
            )
            if self._is_attached:
                reason += f": its place, or its memory, is another one's by now. {ADVICE}"
            client.tell(p.Refused(reason=reason))
            client.channel.close()
        return False

    @property
    def _is_attached(self) -> bool:
        """Was this generation's rank not started by the agent?"""
        generation = self.driver.core.keeper.generation
        return generation is not None and generation.attached

    def _agent_is(self, pid: int) -> None:
        """Another agent has come to a generation that is going on: the helper of a persist died
        with the one before it, or was never started."""
        before, self._agent_pid = self._agent_pid, pid
        order = self.driver.core.keeper.directive.persist
        if before in (0, pid) or not self._is_attached or order is None:
            return
        if order.wanted and not order.result:
            detail = "the agent that had started its helper has died"
            state = PersistState(number=order.number, state="failed", detail=detail)
            self.driver.happen(e.PersistProgressed(state))

    def _stop(self) -> None:
        self.stopping = True
        reason = (
            f"the snapshot process of host {self.driver.host} was told to end, and the snapshots "
            "in its memory are gone"
        )
        if self._is_attached:
            reason += f". {ADVICE}"
        self.clients.tell(p.Ended(reason=reason), "rank", "helper")

    def _welcome(self, writers: tuple[int, ...]) -> p.Welcome:
        driver = self.driver
        ledger = driver.ledger
        sizes = [slot.size_bytes for slot in driver.shares.slots]
        held = [slot.id for slot in ledger.slots if slot.readable and slot.id is not None]
        generation = driver.core.keeper.generation
        return p.Welcome(
            host=driver.host,
            pid=os.getpid(),
            arena=ledger.arena,
            address=driver.address,
            generation=ledger.generation,
            fds=("ledger", "slot0", "slot1"),
            slot_sizes=(sizes[0], sizes[1]),
            newest=max(held, default=None),
            options=next(iter(driver.core.keeper.options.values()), None),
            code=driver.group_code(),
            writers=writers,
            trust=driver.trust,
            groups=() if generation is None else generation.groups,
            ranks=() if generation is None else tuple([one.ranks for one in generation.hosts]),
        )

    # -------------------------------------------------------------------- what it wants

    def _from_agent(self, client: Client, message: p.ClientMessage) -> None:
        match message:
            case p.Enter():
                self.driver.happen(e.EnterWanted(message.generation))
                self._agent_is(client.channel.peer_pid)
            case p.SnapshotNow():
                self.driver.happen(e.TurnWanted(message.reason))
            case p.Stop():
                self._stop()
            case p.HelperState():
                self._helper_state(message)
            case _:
                raise JaxftError(f"an agent does not say {type(message).__name__}")

    def _from_rank(self, client: Client, message: p.ClientMessage) -> None:
        assert client.hello is not None
        rank = client.hello.rank
        happen = self.driver.happen
        match message:
            case p.Restored():
                happen(e.RankRestored(rank, message.attempt, message.how))
            case p.RestoreFailed():
                happen(e.RankFailed(rank, message.attempt, message.reason, message.damaged))
            case p.Bye():
                client.left = True
                self.clients.forget_writer(client.channel.peer_pid)
                if self._is_attached:
                    self.clients.tell(p.RankLeft(pid=client.channel.peer_pid), "agent")
                client.channel.close()
            case p.Reserve():
                client.tell(p.Reserved(error=self.driver.reserve(message.nbytes)))
            case p.WantSlot():
                happen(
                    e.SlotWanted(
                        rank,
                        message.seq,
                        message.step,
                        message.plan,
                        message.nbytes,
                        message.step_s,
                        message.call,
                        message.measured,
                        message.given,
                    )
                )
            case p.Staged():
                self.driver.part_staged(rank, message)
            case p.StagingFailed():
                happen(e.StagingFailed(rank, message.seq, message.reason))
            case p.Missed():
                seq, step, call = message.seq, message.step, message.call
                happen(e.SnapshotMissed(rank, seq, step, message.reason, call))
            case p.LastCall():
                happen(e.TurnAnswered(rank, message.number, message.call))
            case p.WantManifests():
                self._manifests(client, message)
            case p.Fetch():
                self._fetch(client, message)
            case p.Release():
                arena = self._fetched.pop((id(client), message.number), None)
                if arena is not None:
                    arena.close()
            case p.HelperState():
                self._helper_state(message)
            case p.Wrote():
                self.driver.wrote(message.step)
            case _:
                raise JaxftError(f"a rank does not say {type(message).__name__}")

    def _helper_state(self, message: p.HelperState) -> None:
        state = PersistState(
            number=message.number,
            state=message.state,
            coordinator=message.coordinator,
            detail=message.detail,
        )
        self.driver.happen(e.PersistProgressed(state))

    def _unknown(self, client: Client, message: p.WantManifests | p.Fetch) -> bool:
        """Is it about a snapshot that this SMP will only hear of? Then it is answered later. When
        it is about that of an earlier plan, the rank is being told the newer one."""
        if self.driver.knows(message.id):
            return False
        if not self.driver.plan_known:
            self._early = [one for one in self._early if not one[0].channel.ended]
            self._early.append((client, message))
        return True

    def _manifests(self, client: Client, message: p.WantManifests) -> None:
        if self._unknown(client, message):
            return
        recall = self.driver.recall_for(message.id)

        def work(cancel: threading.Event) -> tuple[bytes, ...]:
            recall.cancel = cancel
            manifests = recall.manifests()
            return tuple(msgspec.msgpack.encode(manifests[host]) for host in sorted(manifests))

        def done(result: Any, error: BaseException | None) -> None:
            if isinstance(error, ReadCancelled):
                return
            if error is not None:
                damaged = tuple(sorted(getattr(error, "damaged", ())))
                client.tell(p.ManifestsTold(id=message.id, damaged=damaged, error=str(error)))
            else:
                client.tell(p.ManifestsTold(id=message.id, manifests=result))

        self.driver.jobs.start("manifests", work, done)

    def _fetch(self, client: Client, message: p.Fetch) -> None:
        if self._unknown(client, message):
            return
        recall = self.driver.recall_for(message.id)

        def work(cancel: threading.Event) -> Fetched:
            recall.cancel = cancel
            return recall.fetch(message.extents)

        def done(result: Any, error: BaseException | None) -> None:
            number = message.number
            if isinstance(error, ReadCancelled):
                return
            if error is not None:
                damaged = tuple(sorted(getattr(error, "damaged", ())))
                client.tell(p.Fetched(number=number, damaged=damaged, error=str(error)))
                return
            arena, offsets, made_at = result
            if client.channel.ended:
                arena.close()
                return
            self._fetched[id(client), number] = arena
            told = p.Fetched(
                number=number, offsets=offsets, made_at=made_at, size_bytes=arena.size_bytes
            )
            client.tell(told, [arena.fd])

        self.driver.jobs.start("fetch", work, done)

    def _inspect_peer(self, client: Client, host: str) -> None:
        generation = self.driver.core.keeper.generation
        everyone = () if generation is None else (*generation.hosts, *generation.holders)
        address = next((one.address for one in everyone if one.host == host), "")
        if not address:
            why = f"host {self.driver.host} takes part in no generation with it"
            client.tell(p.PeerInspection(host=host, why=why))
            return
        reader = self.driver.network.reader()

        def work(cancel: threading.Event) -> Account:
            return read_account(reader, bulk_address(address), ANSWER_S, cancel)

        def done(account: Account | None, error: BaseException | None) -> None:
            why = "" if error is None else str(error) or repr(error)
            client.tell(p.PeerInspection(host=host, account=account, why=why))

        self.driver.jobs.start("inspect", work, done, low=True)

    def _inspect(self) -> p.Inspection:
        driver = self.driver
        ledger = driver.ledger
        keeper = driver.core.keeper
        return p.Inspection(
            values={
                "job": driver.job,
                "host": driver.host,
                "pid": os.getpid(),
                "arena": ledger.arena,
                "boots": ledger.boots,
                "address": driver.address,
                "generation": ledger.generation,
                "settled": int(ledger.settled and keeper.frozen),
                "committed": str(ledger.committed) if ledger.committed is not None else "",
                "root": int(driver.core.root is not None),
                "slots": [describe_slot(slot) for slot in ledger.slots],
            },
            account=account_of(driver, self.clients),
        )
