"""From a command to a running job on all ranks, and how it ends where something fails."""
