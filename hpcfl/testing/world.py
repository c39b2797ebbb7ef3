"""The ranks that run the tests."""

from __future__ import annotations

from typing import Any

from hpcfl.mpi.launcher import launched

RESULTS = "HPCFL_TEST_RESULTS"  # folder for rank-<n>.json where a launching test wants to read them


class World:
    """The ranks that run this test: one without a launcher, or where it is to be alone."""

    def __init__(self, alone: bool = False) -> None:
        self.comm: Any = None
        self.rank, self.size = 0, 1
        if launched() and not alone:
            from mpi4py import MPI

            self.comm = MPI.COMM_WORLD
            self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()

    def told(self, text: str) -> str:
        """Return rank 0's text on all ranks."""
        if self.comm is None:
            return text
        from hpcfl.mpi.waiting import tell

        return tell(self.comm, text)

    def meet(self) -> None:
        """Wait for all ranks without spinning."""
        if self.comm is not None:
            from hpcfl.mpi.waiting import wait

            wait([self.comm.Ibarrier()])
