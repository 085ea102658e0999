"""Wrapped steps: what is behind `jaxft.wrap`.

arguments   which of a call's arguments are the state, and what is saved of them
numbers     the number of the state that a call is given
twins       the second versions of one step, and when there is one
run         one call: the step, or its twin, is run once, within the snapshot if there is one
"""
