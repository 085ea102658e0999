"""For each rule of the design one scenario that fails when the rule is taken out.

Each file is a part of the design; the names of its tests are the rules, and the functions before
them are the scenarios.

    test_saving        slots and grants; what committed needs; one outcome; an SMP started again
    test_waiting       who is waited for: hosts with newer memory (`rejoin_s`), silent hosts and
                       holders, all ranks of a host, all ranks of a restore; the interval and the
                       lineage are known before they are needed
    test_held          snapshots while the SMPs do not hear each other
    test_out_of_turn   snapshots that somebody asks for
    test_entering      what has ended before a host says what it holds; nothing of an older
                       generation takes effect
    test_restoring     candidates, lineage, the finished coding, one decision, damage
    test_lost_memory   what was protected and is lost is never silently missing
    test_persisting    what is on its way to storage
    test_world         the store: its absence (`store_grace_s`), hosts that are cut off from it, no
                       second world (`cut_off_s`), lapsed leases (`agent_grace_s`), late looks
"""
