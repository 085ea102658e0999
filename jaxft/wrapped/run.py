"""One call of a wrapped step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxft.device import calls
from jaxft.device.calls import Call
from jaxft.device.shards import Plan
from jaxft.device.transfer import StagedLeaves
from jaxft.group.manifest import SnapshotId
from jaxft.wrapped.twins import Twins


class Run:
    """One call: the step is run once, within the snapshot if there is one.

    Args:
        check: is told what the first call gives, and raises if that makes no sense: what it was
            given then is no snapshot.
    """

    def __init__(
        self,
        step: Any,
        twins: Twins,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        check: Callable[[Any], None] | None,
    ) -> None:
        self.within_s = 0.0
        self.is_twin = False
        self._step = step
        self._twins = twins
        self._args = args
        self._kwargs = kwargs
        self._check = check
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
        is_bare = twins.is_off or calls.is_debugged()
        if is_bare:
            self._staged = stage()
            if self._check is None:
                return self._staged

        def run(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = Call(fn, args, kwargs)
            ready = twins.find(identity, call, plan, values)
            if ready is not None:
                with self._stepping():
                    ran = twins.run(identity, call, ready)
                if ran is not None:
                    self.is_twin = True
                    self._staged, outputs = ran
                    return outputs
            self._staged = stage()
            with self._stepping():
                return twins.watch(fn, args, kwargs)

        try:
            if is_bare:
                with self._stepping():
                    self._outputs = self._step(*self._args, **self._kwargs)
            else:
                self._outputs = calls.around(self._step, self._args, self._kwargs, run)
        except BaseException as error:
            if self._staged is None:
                raise
            self._error = error  # of the step: what it was given is safe
        else:
            self._mind()
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
            self._outputs = calls.around(self._step, self._args, self._kwargs, self._twins.watch)
        else:
            self._outputs = self._step(*self._args, **self._kwargs)
        self._mind()
        return self._outputs

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        """The time that the step, or its twin, takes within the snapshot."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.within_s = time.monotonic() - began_s

    def _mind(self) -> None:
        if self._check is not None:
            self._check(self._outputs)
