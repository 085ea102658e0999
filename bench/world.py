"""A world under `jaxft run --local-hosts`, whose ranks do what the measurement says.

The launcher, agents, snapshot processes and ranks are those of production; only the training script
is ours (`bench.rank`), and waits for orders instead of training.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from bench.measure import cpu_of
from bench.processes import end_run
from jaxft.status.events import EventReader

ROOT = Path(__file__).parents[1]
FORM_S = 120.0
ANSWER_S = 150.0


class World:
    """Hosts and their ranks. Use it in a `with` statement.

    Args:
        count: how many hosts.
        code: "K+M".
        nbytes: of the state, for each host.
        environment: beside this process's own.
    """

    def __init__(
        self, count: int, code: str, nbytes: int, environment: Mapping[str, str] | None = None
    ) -> None:
        self.count = count
        self.directory = Path(tempfile.mkdtemp(prefix="jaxft-bench-"))
        self._pids: dict[tuple[str, str], int] = {}
        self._events = EventReader(self.directory / "events")
        self._ranks: list[tuple[socket.socket, TextIO]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.directory / "bench.sock"))
        self._listener.listen(count)
        self._log = (self.directory / "log").open("wb")
        command = [sys.executable, "-m", "jaxft", "run", "--local-hosts", str(count)]
        # Ranks that wait to follow are no part of what is measured.
        command += ["--code", code, "--job", "bench", "--quiet", "--settle-s", "0.5", "--no-warm"]
        command += ["--", sys.executable, "-m", "bench.rank"]
        command += [str(self.directory / "bench.sock"), str(nbytes)]
        self._process = subprocess.Popen(
            command,
            env={**self._environment(), **(environment or {})},
            stdout=self._log,
            stderr=self._log,
        )
        try:
            self.meet()
        except BaseException:
            self.close()
            raise

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("JAXFT_")}
        paths = (str(ROOT), os.environ.get("PYTHONPATH"))
        return kept | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "JAX_PLATFORMS": "cpu",
            "JAXFT_RUN_DIR": str(self.directory),
            "JAXFT_EVENTS": str(self.directory / "events"),
        }

    # -------------------------------------------------------------------- the ranks

    def meet(self) -> list[dict[str, Any]]:
        """Waits for the ranks of the newest generation; what they say first, in their order."""
        self._drop_ranks()
        self._listener.settimeout(FORM_S)
        arrived = []
        for _ in range(self.count):
            try:
                line, _ = self._listener.accept()
            except TimeoutError:
                raise RuntimeError(f"the ranks did not come:\n{self.log()}") from None
            line.settimeout(ANSWER_S)
            file = line.makefile("rw")
            arrived.append((json.loads(file.readline()), line, file))
        arrived.sort(key=lambda one: int(one[0]["rank"]))
        self._ranks = [(line, file) for _, line, file in arrived]
        return [hello for hello, _, _ in arrived]

    def all(self, what: str, **options: Any) -> list[Any]:
        """Has every rank do the same at once; their answers, in their order.

        Raises:
            RuntimeError: one has gone, or does not answer.
        """
        order = json.dumps({"do": what, **options}) + "\n"
        answers = []
        try:
            for _, file in self._ranks:
                file.write(order)
                file.flush()
            for _, file in self._ranks:
                answers.append(json.loads(file.readline()))
        except (OSError, ValueError) as error:
            raise RuntimeError(f"a rank does not {what}: {error!r}\n{self.log()}") from error
        return answers

    def protect_s(self) -> float:
        """Seconds of a snapshot, from the first call of `save` to the last "protected"."""
        return _span(self.all("save"))

    def orbax_s(self) -> float:
        """The same of a checkpoint of Orbax."""
        return _span(self.all("orbax"))

    # -------------------------------------------------------------------- the processes

    def pids(self, role: str) -> list[int]:
        """The processes of a role ("agent", "smp", "rank"), one a host, in the order of hosts."""
        self._look()
        return [self._pids[f"host{index}", role] for index in range(self.count)]

    def _look(self) -> None:
        names = {"agent_started": "agent", "rank_started": "rank"}
        names |= {f"smp_{how}": "smp" for how in ("started", "restarted", "adopted")}
        for event in self._events.poll():
            if event["event"] in names:
                self._pids[str(event["host"]), names[event["event"]]] = int(event["pid"])

    def cpu_s(self) -> float:
        """CPU seconds of all ranks and snapshot processes so far."""
        return cpu_of([*self.pids("rank"), *self.pids("smp")])

    def lose(self, host: int) -> None:
        """Kills everything of a host at once. The launcher starts its agent again, as a machine
        that comes back empty does."""
        roles = ("agent", "smp", "rank")
        pids = {role: self.pids(role)[host] for role in roles}
        # An agent that saw its processes die would say so; a dead machine says nothing.
        os.kill(pids["agent"], signal.SIGSTOP)
        for role in ("rank", "smp", "agent"):
            os.kill(pids[role], signal.SIGKILL)

    def log(self) -> str:
        """The end of what the launcher said, and the ranks before they were lost."""
        self._log.flush()
        files = [self.directory / "log", *sorted(self.directory.rglob("*.log"))]
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in files)

    # -------------------------------------------------------------------- the end

    def _drop_ranks(self) -> None:
        for line, file in self._ranks:
            file.close()
            line.close()
        self._ranks = []

    def close(self) -> None:
        """Ends all, and takes away what they left."""
        self._drop_ranks()
        end_run(self._process, self.directory)
        self._listener.close()
        self._log.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _span(answers: Sequence[Mapping[str, float]]) -> float:
    return max(one["protected"] for one in answers) - min(one["began"] for one in answers)
