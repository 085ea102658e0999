"""Becomes a command that dies with its parent: `python -I -S rank_exec.py PARENT COMMAND...`.

Run by its path, so that nothing else of jaxft is imported: what it becomes is another program. The
parent's death signal (prctl(2)) survives exec; a parent that died before it was set is noticed by
its changed number.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Sets the signal, checks the parent, and becomes the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"jaxft: error: prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit(f"jaxft: error: process {parent}, which started {command[0]}, is gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"jaxft: error: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
