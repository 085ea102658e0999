"""The file that says that this host is to go, as a cloud's or a cluster's agent writes it.

Its presence is the notice, whatever it holds: it means what a SIGTERM to the agent does. `{host}`
in its name is this host's name. The agent's loop looks for it about once a second, so it should be
on a local file system.
"""

from __future__ import annotations

import os

LOOK_S = 1.0


class PreemptionNotice:
    """Of one host.

    Args:
        path: of the file; "": there never is a notice.
        host: this host's name.
    """

    def __init__(self, path: str, host: str) -> None:
        self.path = path.replace("{host}", host)

    @property
    def is_expected(self) -> bool:
        """Is there a file to look for?"""
        return bool(self.path)

    def is_there(self) -> bool:
        """Is this host to go?"""
        return bool(self.path) and os.path.lexists(self.path)

    def __str__(self) -> str:
        return f"the preemption file {self.path} is there"
