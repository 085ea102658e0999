"""One call of a wrapped step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from jaxft.device import calls
from jaxft.device.calls import Call
from jaxft.device.shards import Plan
from jaxft.device.transfer import StagedLeaves
from jaxft.device.twin import NotTaken
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
            if is_bare:
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

    def _mind(self) -> None:
        if self._check is not None:
            self._check(self._outputs)
