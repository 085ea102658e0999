"""Starting a job on its hosts and keeping it going: the agent and the store it meets others in."""
