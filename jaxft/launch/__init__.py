"""Launching: the agents, one a host, and the store in which they find each other."""
