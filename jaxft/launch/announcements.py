"""What happens in a world, in the words of an agent to a person."""

from __future__ import annotations

from collections.abc import Mapping

from jaxft.group.world import Generation

Facts = Mapping[str, str | int | float]

# What an SMP announces (`group.root`, `group.keeper`), by kind; reasons name their hosts.
_WORDS = {
    "aborted": "the snapshot of step {step} came to nothing: {reason}",
    "generation_floor": "storage holds a checkpoint of generation {number}: the world is formed "
    "again with a larger number",
    "held": "snapshots are held, training goes on: {reason}",
    "held_over": "snapshots are held no longer",
    "out_of_turn": "a snapshot out of turn is asked for: {reason}",
    "out_of_turn_dropped": "no snapshot out of turn: {reason}",
    "persist_failed": "storage did not get a checkpoint: {result}",
    "persisted": "step {step} is on storage",
    "plan_failed": "restoring failed and is planned again: {reason}",
    "waiting_for_memory": "the memory that is here cannot give back the newest snapshot known, "
    "{newest}: waits {rejoin_s:g} s for more",
}


def in_words(kind: str, facts: Facts, *, exports: bool = False) -> str:
    """What an SMP announced.

    Args:
        exports: nobody trains in this generation, which only brings a snapshot to storage.
    """
    if kind == "settled":
        # A checkpoint that plain Orbax wrote has a step and no identity.
        whence = f" (snapshot {facts['base']})" if facts["base"] else ""
        step = facts["step"]
        if exports:
            return f"step {step}{whence} goes to storage"
        return f"goes on from step {step}{whence}" if whence or step else "begins anew"
    if kind in _WORDS:
        return _WORDS[kind].format_map(facts)
    told = ", ".join(f"{key} {value}" for key, value in facts.items() if value != "")
    return f"{kind}{': ' if told else ''}{told}"


def code_of(generation: Generation) -> str:
    """The code in force, which in small groups is less than what was asked for."""
    codes = list(dict.fromkeys(f"{group.data}+{group.parity}" for group in generation.groups))
    said = f"code {codes[0]}" if len(codes) == 1 else f"groups {', '.join(codes)}"
    if not any(group.parity for group in generation.groups):
        lost = "the host" if len(generation.hosts) == 1 else "a host"
        said += f", so memory protects from the loss of processes only, not of {lost}"
    return said
