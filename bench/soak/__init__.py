"""Training for a long time, while everything fails that may: `python -m bench soak`.

plan      what is to go wrong when: drawn from a seed, and pure
strikes   how each failure is done, and undone
hosts     the machines: what a scheduler does for them, and which processes they have
record    what agents and ranks have said, read as it is written
judge     whether that may be: pure
leaks     what grows
soak      all of it, one failure after the other
command   the command line, the log, the table
"""
