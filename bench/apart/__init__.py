"""Hosts that are really apart, on one machine: for the tests and for the soak."""
