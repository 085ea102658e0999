"""What keeps a job from being protected as it was asked to be, each in one line for a person."""

from __future__ import annotations

from collections.abc import Iterator

from jaxft.status import report as r


def problems(report: r.JobReport, asked_parity: int) -> tuple[str, ...]:
    """All of them; none of a job that is protected.

    Args:
        report: all but its problems.
        asked_parity: how many hosts of any group were to be expendable.
    """
    if report.ended:
        return (f"the job is over: {report.ended}",)
    found = [
        *_of_the_world(report),
        *_of_hosts(report),
        *_of_groups(report),
        *_of_losses(report, asked_parity),
    ]
    if report.held is not None:
        found.append(f"snapshots are held: {report.held.reason}")
    if report.storage.failed:
        found.append(f"the last persist failed: {report.storage.failed}")
    if report.store.problem:
        found.append(f"the store does not answer, this is what hosts know: {report.store.problem}")
    return tuple(found)


def _of_the_world(report: r.JobReport) -> Iterator[str]:
    world = report.world
    if world is None and (_answers(report) or (report.store.url and not report.store.problem)):
        yield "no world has been formed yet"
    elif world is None:
        yield "nobody says which world there is"
    elif world.phase == "failed":
        yield f"generation {world.generation} has ended, and no new one has been formed yet"
    elif world.phase == "restoring":
        yield f"generation {world.generation} has not settled yet: it starts, or restores"
    elif world.phase == "exporting":
        yield f"nobody trains in generation {world.generation}: {world.reason}"


def _answers(report: r.JobReport) -> bool:
    return any(host.smp != "silent" for host in report.hosts)


def _of_hosts(report: r.JobReport) -> Iterator[str]:
    has_settled = report.world is not None and report.world.phase == "running"
    for host in report.hosts:
        if host.role in ("spare", "left"):
            continue
        if host.role == "holder" and host.smp == "silent" and has_settled:
            continue  # What it lent has been restored.
        if host.smp == "silent":
            yield f"{host.host}: its snapshot process is silent: {host.why or 'nothing is known'}"
        elif host.unheard_s is not None:
            yield f"{host.host}: the root has not heard it for {host.unheard_s:.0f} s"
        elif report.world is not None and host.generation != report.world.generation:
            yield f"{host.host}: is still in generation {host.generation}"
        if host.agent == "gone":
            yield f"{host.host}: its agent is gone"
        if host.agent == "lapsed":
            yield (
                f"{host.host}: its agent is there without a lease: it hangs, or does not reach the "
                "store"
            )
        if host.role == "holder":
            yield f"{host.host}: is no member any more, only its memory is used"
        elif host.ranks is not None and host.ranks < host.ranks_expected:
            yield f"{host.host}: {host.ranks} of {host.ranks_expected} ranks are connected"
        yield from (f"{host.host}: {one}" for one in host.hanging)
        if host.leaving:
            yield f"{host.host}: was told to end"


def _of_groups(report: r.JobReport) -> Iterator[str]:
    # Where all hosts are in one domain no choice of groups helps, and its loss ends the job anyhow.
    members = [host for host in report.hosts if host.role == "member"]
    is_one = len({host.domain for host in members}) == 1
    for group in report.groups:
        if group.less_than_asked:
            asked = report.world.code if report.world is not None else ""
            yield (
                f"group {group.group} ({', '.join(group.hosts)}) has code {group.code}, less than "
                f"asked for ({asked}): it has too few hosts"
            )
        for one in group.domains:
            if one.fatal and not is_one:
                yield (
                    f"group {group.group}: {', '.join(one.hosts)} share domain {one.domain}, and "
                    f"their loss at once is more than code {group.code} survives"
                )


def _of_losses(report: r.JobReport, asked_parity: int) -> Iterator[str]:
    losses = report.losses
    if not _answers(report):
        yield "no snapshot process answers: what memory holds is not known"
        # Of the others it has been said.
        others = (host for host in report.hosts if host.role in ("spare", "left") and host.why)
        yield from (f"{host.host}: {host.why}" for host in others)
        return
    if losses.lost is not None:
        step = "" if report.newest is None or report.newest.step is None else report.newest.step
        there = f"step {losses.step} is what is left" if losses.snapshot else "nothing is left"
        yield f"snapshot {losses.lost} (step {step or '?'}) cannot be rebuilt: {there} in memory"
        yield from losses.reasons
    elif losses.snapshot is None:
        yield "nothing is in memory yet: no snapshot has been committed"
    if losses.snapshot is None:
        return
    too_few_hosts = any(group.less_than_asked for group in report.groups)
    for group in losses.groups:
        as_good_as_can_be = too_few_hosts and group.more == group.parity
        if group.more < asked_parity and not as_good_as_can_be:
            gone = f" ({', '.join(group.missing)} missing)" if group.missing else ""
            yield (
                f"group {group.group} of step {losses.step} can lose "
                f"{f'{group.more} more' if group.more > 0 else 'no'} host"
                f"{'s' if group.more > 1 else ''}{gone}, asked for are {asked_parity}"
            )
