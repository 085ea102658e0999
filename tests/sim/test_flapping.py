"""A host that is lost again and again, among production cores and agents: the others train on.

Each time it is back it is lost again, as its whole machine, as its memory or as its agent alone,
soon after. From the second loss on it waits, so it costs fewer restarts than it has losses; what is
protected grows meanwhile; and it is taken in again once it stays.
"""

from __future__ import annotations

from random import Random

import msgspec

from jaxft.group.world import Code
from tests.sim.checker import Violation
from tests.sim.simulator import Setup, Simulator
from tests.sim.store import Store

LOSSES = 12
FLAP_S = 3.0
GENERATIONS_MAX = 11
COMMITS_MIN = 20
SEEDS = 15


def flap(sim: Simulator, random: Random) -> None:
    """Lost and back, LOSSES times."""
    machine = sim.machines[2]
    at_s = 2.0
    for _ in range(LOSSES):
        lose = random.choice((machine.lose, machine.lose_agent_and_smp, machine.kill_agent))
        sim.at(at_s, lose)
        at_s += random.uniform(0.3, 2.0)
        sim.at(at_s, lambda: machine.boot() if not machine.up else machine.start_agent())
        at_s += random.uniform(0.5, 2.5)
    sim.run(at_s)


def test_the_world_goes_on_without_a_host_that_flaps_and_takes_it_back() -> None:
    for seed in range(SEEDS):
        setup = Setup(
            hosts=4, hosts_max=4, hosts_min=3, code=Code(data=2, parity=1), calm=False, agents=True
        )
        sim = Simulator(setup, seed)
        try:
            run(sim, Random(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}\n{sim.story()}")
            raise


def run(sim: Simulator, random: Random) -> None:
    """Raises Violation."""
    store = sim.oracle
    assert isinstance(store, Store)
    restarts = msgspec.structs.replace(store.rules.restarts, flap_s=FLAP_S)
    store.rules = msgspec.structs.replace(store.rules, restarts=restarts)
    sim.start()
    flap(sim, random)
    # Each loss of a member costs a generation, and so does each time that it is taken in.
    if store.generation is None or store.generation.number > GENERATIONS_MAX:
        raise Violation("flapping", f"{store.generation}")
    commits = len(sim.checker.told_commits)
    if commits < COMMITS_MIN:
        raise Violation("flapping", f"{commits} snapshots in {sim.now:.0f} s")

    def is_back() -> bool:
        return store.generation is not None and len(store.generation.hosts) == 4

    def is_protected() -> bool:
        return len(sim.checker.told_commits) >= commits + 2

    if not sim.run(sim.now + 60, is_back):
        raise Violation("progress", "it is never taken in again")
    commits = len(sim.checker.told_commits)
    if not sim.run(sim.now + 20, is_protected):
        raise Violation("progress", "no snapshot once it is back")
