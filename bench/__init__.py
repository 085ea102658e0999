"""Measurements of jaxft beside its peers and the limits of the machine: `python -m bench`.

Rules
- A figure, its peer and its limit are taken in turn, round by round, in one run, and their medians
  are compared: a shared machine changes its speed from minute to minute.
- The product is used through its public interface, in the processes that production has.
- Peers are used as their documentation says, on the same bytes, and are warmed up as we are.
- A subject runs in a process of its own, so that what one leaves behind does not slow the next.
"""
