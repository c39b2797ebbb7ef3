"""SALF some of whose clients end their process, as ``kill -9`` would, or suspend it, in the middle of a visit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from mpi4py import MPI

from hpcfl.algorithms.salf import Salf


class Mortal(Salf):
    """SALF with deaths.

    Attributes
    ----------
    deaths : tuple of (int, int)
        Clients, and the round from which on their next visit is their last.
    marks : str
        Folder in which each death leaves a file; who has died once is spared after a resumption.
    signal : int
        What the process sends to itself.
    """

    deaths: tuple[tuple[int, int], ...] = ()
    marks: str = ""
    signal: int = signal.SIGKILL

    def client(self, task, shared, personal, visits):
        work = super().client(task, shared, personal, visits)
        try:
            first = next(work)
        except StopIteration as stopped:  # before its first layer: its round is over
            return stopped.value
        yield first
        for client, round_ in self.deaths:
            if client in visits.clients and visits.round >= round_:
                self.die(client)
        return (yield from work)

    def die(self, client: int) -> None:
        mark = Path(self.marks) / str(client)
        if not mark.exists() and MPI.COMM_WORLD.Get_rank():  # the server tries one visit before the run begins
            mark.touch()
            os.kill(os.getpid(), self.signal)
