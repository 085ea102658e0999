"""The protocol: pure values and decisions, no clock, socket, thread or JAX.

`world` says who takes part, `placement` who protects whom and where each byte's parity lies,
`codec` turns data into parity and back, `manifest` describes one host's bytes of one snapshot,
`messages` is what hosts tell each other, and `share`, `commit`, `recovery` and `membership` decide.
"""
