"""The snapshot management process (SMP) of a host, and what it stands on. Imports no JAX.

`memory` and `ledger` hold the bytes, `wire` talks to other SMPs, `local` and `protocol` to the
agent, ranks and helpers of this host, `driver` performs the effects of the cores, `coding` computes
parity and rebuilds, `smp` is the process.
"""
