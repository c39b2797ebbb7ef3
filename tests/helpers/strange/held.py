"""SALF with one client that cannot go on with any visit before its round has been told of."""

from __future__ import annotations

import time
from pathlib import Path

from hpcfl.algorithms.salf import Salf


class Held(Salf):
    """SALF with a client that is always too slow.

    Attributes
    ----------
    victim : int
        This client.
    gates : str
        The folder in which a file, named after its round, lets a visit go on. What is tried before the rounds goes on.
    """

    victim: int = 0
    gates: str = ""

    def client(self, task, shared, personal, visits):
        gate = Path(self.gates) / str(visits.round)
        while visits.closed is not None and self.victim in visits.clients and not gate.exists():
            time.sleep(0.01)
        return (yield from super().client(task, shared, personal, visits))
