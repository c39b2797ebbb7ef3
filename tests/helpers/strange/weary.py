"""FedAvg in real time with a client that is slow, one that gets stuck and one that dies, each between two steps."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from hpcfl.algorithms.fedavg import FedAvg

PATIENCE = 60.0  # seconds after which nobody waits for another one any more
PAUSE = 0.4  # seconds that each step of the slow client takes


class Weary(FedAvg):
    """FedAvg whose client 1 is slow, whose client 2 gets stuck in the third step of a visit, whose client 3 dies there.

    In simulated time nothing happens to them.

    Attributes
    ----------
    stuck_in, dies_in, free_in : int
        The round in which client 2 gets stuck, that in which client 3 dies, and that whose visits set client 2 free.
    marks : str
        Folder in which they leave files for each other.
    """

    stuck_in: int = 0
    dies_in: int = 0
    free_in: int = 0
    marks: str = ""

    def local_steps(self, task, visits, phase=0):
        for number, batch in enumerate(super().local_steps(task, visits, phase)):
            if visits.closed is not None:
                self.fall_behind(int(visits.clients[0]), visits.round, number)
            yield batch

    def fall_behind(self, client: int, round_: int, number: int) -> None:
        free = Path(self.marks) / "free"
        if client == 0 and round_ == self.free_in:
            free.touch()
        if client == 1:
            time.sleep(PAUSE)
        end = time.monotonic() + PATIENCE
        while client == 2 and (round_, number) == (self.stuck_in, 2) and not free.exists() and time.monotonic() < end:
            time.sleep(0.005)
        if client == 3 and round_ >= self.dies_in and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
