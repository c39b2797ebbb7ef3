"""FedAvg with one client that is stuck in its first visit: until others are in round 3, or for some seconds."""

from __future__ import annotations

import time
from pathlib import Path

from hpcfl.algorithms.fedavg import FedAvg


class Late(FedAvg):
    """FedAvg whose visits take their time.

    Attributes
    ----------
    victim : int
        The client that is stuck in round 0, in one operation that looks at nothing.
    gate : str
        The file that sets it free; the others make it in round 3.
    stall : float
        Seconds after which it is free in any case.
    pause : float
        Seconds that each of the others' visits takes, from round 1 on; in round 0 they wait then for the victim, which
        might not have begun when the round ends, and never be stuck. All are on ranks of their own.
    """

    victim: int = 0
    gate: str = ""
    stall: float = 0.0
    pause: float = 0.0

    def client(self, task, shared, personal, visits):
        if visits.closed is not None:  # not what is tried before the rounds
            self.linger(visits.round, int(visits.clients[0]))
        return (yield from super().client(task, shared, personal, visits))

    def linger(self, round_: int, client: int) -> None:
        begun = Path(f"{self.gate}-begun")
        if client == self.victim:
            begun.touch()
            end = time.monotonic() + self.stall * (round_ == 0)
            while time.monotonic() < end and not Path(self.gate).exists():
                time.sleep(0.01)
            return
        if round_ == 3:
            Path(self.gate).touch()
        while self.pause and not begun.exists():
            time.sleep(0.001)
        if round_:
            time.sleep(self.pause)
