"""What failures mean for the job: it is restarted at once, later, or not again, with the reason.

Rules
- A failure (`causes.FAILURES`) is the script's or the world's; the loss of a host is its machine's,
  and counts against that host only (`flapping`).
- The first restart comes at once. Failures in a row, after none of which anything newer was
  protected, are each followed by a pause: 1 s, 2 s, 4 s, ... A newer snapshot ends the row.
- The job is given up, in this order: what was protected is lost (twice); the script refuses what it
  was told (a ConfigError before anything was restored); it fails twice before anything was
  restored; it fails `same_step_max` times in a row at the same step; `max_restarts` failures within
  `window_s` have each been followed by a restart already, and here is one more.
- When a failure was is what the clock of the host says that wrote it down. Clocks that are wrong
  change how many failures are within the window, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from jaxft.group.causes import FAILURES, error_in
from jaxft.group.ending import gone_with_memory
from jaxft.group.records import Fault, JobEnd, View

PAUSE_S_MAX = 30.0
EARLIER_MAX = 1000
_REFUSAL = "jaxft.errors.ConfigError"


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How patient the job is.

    `max_restarts`: so many failures within `window_s` (0: in the whole run) are followed by a
    restart, at most `EARLIER_MAX`. `same_step_max`: failures in a row without a newer snapshot that
    end the job. `early_s`: a script that fails sooner than this, twice in a row and before anything
    was restored, fails always. `steady_s`: a generation that ran longer was no failure in vain.
    `flap_s`: what a host waits that was lost twice within the window (`flapping`); 0: none does.
    """

    max_restarts: int = 30
    window_s: float = 3600.0
    same_step_max: int = 3
    early_s: float = 60.0
    steady_s: float = 600.0
    flap_s: float = 30.0

    def is_within(self, at_s: float, now_s: float) -> bool:
        """Does this moment lie in the window that ends `now_s`?"""
        return self.window_s == 0 or now_s - at_s <= self.window_s


def remembering(fault: Fault, view: View, policy: RestartPolicy) -> Fault:
    """The fault, with when the failures before it were: records of old ones go."""
    before = [number for number in view.faults if number < fault.generation]
    if not before:
        return fault
    last = view.faults[max(before)]
    earlier = (*last.earlier_s, last.at_s) if last.kind in FAILURES else last.earlier_s
    kept = earlier[len(earlier) - min(len(earlier), policy.max_restarts) :]
    return msgspec.structs.replace(fault, earlier_s=kept)


def failures_in_vain(view: View, policy: RestartPolicy) -> list[Fault]:
    """The newest failures, newest first, after which nothing newer had been protected.

    Losses of hosts between them neither count nor end the row.
    """
    found: list[Fault] = []
    for number in sorted(view.faults, reverse=True):
        fault = view.faults[number]
        if fault.kind not in FAILURES:
            continue
        if fault.lived_s > policy.steady_s or _got_further(view, number):
            break
        found.append(fault)
    return found


def hangs_in_vain(view: View, policy: RestartPolicy) -> int:
    """How many of them were hangs, or were taken for hangs."""
    return sum(fault.kind == "hung" for fault in failures_in_vain(view, policy))


def pause_s(view: View, policy: RestartPolicy) -> tuple[float, str]:
    """How long to wait before the next try, and why: nothing after the first failure, then 1 s,
    2 s, ..."""
    count = len(failures_in_vain(view, policy))
    if count < 2:
        return 0.0, ""
    seconds = min(PAUSE_S_MAX, 2.0 ** (count - 2))
    return seconds, f"a pause of {seconds:g} s: {count} failures in a row without a newer snapshot"


def give_up(view: View, policy: RestartPolicy) -> JobEnd | None:
    """The end of a job whose restarts bring nothing, or are too many."""
    newest = view.fault
    if newest is None:
        return None
    vain = failures_in_vain(view, policy)
    fault = vain[0] if vain else newest
    lost = [_nothing_recoverable(one) for one in vain[:2]] == [True, True]
    why = _in_vain(view, vain, lost, policy) or _too_often(newest, policy)
    if not why:
        return None
    gone = "" if lost else gone_with_memory(view)
    return JobEnd(
        kind="world" if lost or fault.kind in ("smp_report", "unreachable") else "script",
        reason=f"{fault.detail} (generation {fault.generation}); {why}{gone}",
        generation=fault.generation,
        host=fault.host,
        rank=fault.rank,
        tail=fault.tail,
        failures=tuple(
            msgspec.structs.replace(view.faults[number], tail="") for number in sorted(view.faults)
        ),
    )


def _in_vain(view: View, vain: Sequence[Fault], lost: bool, policy: RestartPolicy) -> str:
    """Why no restart would help; "" where one may."""
    if not vain:
        return ""
    early = [
        one.kind == "rank_exited"
        and one.lived_s < policy.early_s
        and one.generation not in view.progress
        for one in vain[:2]
    ]
    if lost:
        return (
            "what was protected is lost: twice in a row nothing could give it back "
            "(NothingRecoverable)"
        )
    if _refuses(view, vain[0]):
        return "the script refuses what it was told, which no restart changes"
    if early == [True, True]:
        return (
            "twice in a row before anything was restored: the script fails whenever it is started"
        )
    # A network that is away is no fault of a step, and comes back: only `max_restarts` ends that.
    vain = [one for one in vain if one.kind != "unreachable"]
    if len(vain) < policy.same_step_max:
        return ""
    steps = [view.progress[one.generation].step for one in vain if one.generation in view.progress]
    step = max(steps, default=-1)
    where = f"no snapshot newer than step {step}" if step >= 0 else "no snapshot at all"
    if len(vain) == 1:
        return f"1 failure brought {where}"
    return f"{len(vain)} failures in a row brought {where}{_alike(vain)}"


def _alike(vain: Sequence[Fault]) -> str:
    """What the failures of a row have in common, and the first of them where they differ."""
    hosts = {one.host for one in vain}
    ranks = {one.rank for one in vain}
    if len(hosts) == 1 and len(ranks) == 1:
        return f": always {_whom(vain[-1])}" if vain[-1].rank >= 0 else f": always {vain[-1].host}"
    return f": {', '.join(_whom(one) for one in reversed(vain))}; the first was: {vain[-1].detail}"


def _whom(fault: Fault) -> str:
    return f"rank {fault.rank} on {fault.host}" if fault.rank >= 0 else fault.host


def _too_often(newest: Fault, policy: RestartPolicy) -> str:
    """Has the job been restarted as often as it may be?"""
    if newest.kind not in FAILURES:
        return ""
    count = sum(policy.is_within(at_s, newest.at_s) for at_s in newest.earlier_s)
    if count < policy.max_restarts:
        return ""
    times = "once" if count == 1 else f"{count} times"
    when = f" within {policy.window_s:g} s" if policy.window_s else ""
    return (
        f"the job has been restarted {times}{when} already, as often as --max-restarts "
        f"{policy.max_restarts} allows"
    )


def _got_further(view: View, number: int) -> bool:
    """Has a generation protected what no failed one before it had? One that begins anew where
    another did, as with a script that does not restore, has not while it only comes as far."""
    progress = view.progress.get(number)
    if progress is None or progress.step <= progress.base:
        return False
    before = [
        view.progress[one]
        for one, fault in view.faults.items()
        if one < number and fault.kind in FAILURES and one in view.progress
    ]
    return not any(one.base >= progress.base and one.step >= progress.step for one in before)


def _nothing_recoverable(fault: Fault) -> bool:
    """Did the rank end by this error of `restore`?"""
    return fault.kind == "rank_exited" and "NothingRecoverable" in fault.tail


def _refuses(view: View, fault: Fault) -> bool:
    """Did a rank say that an option of its script cannot be, before this run had got anywhere?"""
    settled = any(number > view.number for number in view.progress)
    error = fault.error or error_in(fault.tail)
    return not settled and fault.kind == "rank_exited" and error.startswith(_REFUSAL)
