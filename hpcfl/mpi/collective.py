"""Transport over MPI in simulated time: one lane of all ranks, on which collectives carry state down and sums up.

Nonblocking and in a fixed order, polled so that nobody's waiting slows another. (`hpcfl.realtime` has the lanes of
real time.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from hpcfl.base.device_copy import on_device
from hpcfl.base.errors import Stopped, ended
from hpcfl.base.lazy import MPI, torch
from hpcfl.base.types import Floats, Ints, State
from hpcfl.mpi.channel import in_pieces
from hpcfl.mpi.placement import Chunk
from hpcfl.mpi.transport import Like, Personal, Saved, Transport, arrays, idle
from hpcfl.mpi.waiting import doze, wait
from hpcfl.sums.message import ExactSums
from hpcfl.sums.packing import Bytes, Packing, as_bytes


class Collective(Transport):
    """One lane of all ranks; `comm` is duplicated, so that no other traffic is mixed with it."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm.Dup()
        self.rank, self.size = comm.Get_rank(), comm.Get_size()

    def invite(self, shared: State) -> State:
        """Broadcast the shared state."""
        packing = Packing(shared)
        buffer = torch.empty(0) if self.serves else packing.zeros()
        parts = packing.sent(shared) if self.serves else packing.received(buffer)
        self._tell(parts)
        if self.serves:
            return shared
        return {name: on_device(value, shared[name].device) for name, value in packing.views(buffer).items()}

    def close(self, sums: ExactSums) -> ExactSums:
        """Reduce each group of blocks in the order in which backpropagation finishes them.

        Large blocks travel as whole numbers. With them ranks tell the server where these do not suffice; it tells
        everybody, and there the bins follow.
        """
        self._sum(sums.settled().buffers)
        if len(sums.wide):
            self._tell([sums.wide])
            self._sum(sums.uppers())
        return sums

    def _tell(self, buffers: Sequence[Bytes | Floats]) -> None:
        """Give every rank the server's, in the place of its own."""
        wait([self.comm.Ibcast(piece, root=0) for buffer in buffers for piece in in_pieces(buffer)])
        self._count(sum(buffer.nbytes for buffer in buffers), up=False)

    def _sum(self, buffers: Sequence[Floats | Ints]) -> None:
        """Sum each buffer over ranks, for the server, in its place."""
        pieces = [piece for buffer in buffers for piece in in_pieces(buffer)]
        ends = [(MPI.IN_PLACE, piece) if self.serves else (piece, None) for piece in pieces]
        wait([self.comm.Ireduce(send, receive, MPI.SUM, root=0) for send, receive in ends])
        self._count(sum(buffer.nbytes for buffer in buffers), up=True)

    def share(self, sums: ExactSums) -> ExactSums:
        """Sum each group of blocks over ranks, and tell everybody.

        By Iallreduce, unlike `agree`: all ranks go on at once with what they hear, and the blocks may be large, where
        a library has better than to carry all of them through the server.
        """
        self._share(sums.settled().buffers)
        self._share(sums.uppers())
        return sums

    def _share(self, buffers: Sequence[Floats | Ints]) -> None:
        pieces = [piece for buffer in buffers for piece in in_pieces(buffer)]
        wait([self.comm.Iallreduce(MPI.IN_PLACE, piece, MPI.SUM) for piece in pieces])
        for up in (True, False):
            self._count(sum(buffer.nbytes for buffer in buffers), up)

    def reduce(self, values: Floats) -> Floats:
        """Sum over ranks; exact where each element is non-zero on one rank only, or a whole number."""
        total = np.array(values, order="C")
        self._sum([total])
        return total

    def agree(self, values: Floats) -> Floats:
        """Sum over ranks, as `reduce` does, and tell everybody.

        Not an Iallreduce: there a rank's every step waits until its partner wakes from polling. Here the server sends
        and goes on, and the others hear of it where they would wait for its next state anyway.
        """
        total = self.reduce(values)
        self._tell([total])
        return total

    def collect(self, chunks: Sequence[Chunk], personal: Personal, like: Like) -> Iterator[Saved]:
        """Send the chunks' states to the server one by one, so that it holds a single one in memory."""
        for chunk in chunks:
            if chunk.rank == self.rank and not self.serves:
                state = personal[chunk.number]
                packed = as_bytes(Packing(state).packed(state))
                wait([self.comm.Isend(piece, dest=0) for piece in in_pieces(packed)])
            if self.serves:
                state = personal[chunk.number] if chunk.rank == 0 else self._taken(chunk, like(int(chunk.clients[0])))
                yield chunk.clients, arrays(state)

    def _taken(self, chunk: Chunk, like: State) -> State:
        packing = Packing({name: value.expand(len(chunk.clients), *value.shape) for name, value in like.items()})
        buffer = packing.zeros()
        wait([self.comm.Irecv(piece, source=chunk.rank) for piece in in_pieces(as_bytes(buffer))])
        return packing.views(buffer)

    def leave(self, stopped: Stopped | None = None, rest: Callable[[], None] = idle) -> Stopped | None:
        """Hear the server's last word, asleep, and meet at a polled barrier: MPI_Finalize spins while it waits."""
        word = np.array([0, 0] if stopped is None else [stopped.round, stopped.code], dtype=np.int64)
        doze([self.comm.Ibcast(word, root=0)], rest)
        wait([self.comm.Ibarrier()])
        self.comm.Free()
        return stopped or ended(*word.tolist())

    def _count(self, nbytes: int, up: bool) -> None:
        nbytes *= self.size > 1
        if up == self.serves:
            self.received += nbytes
        else:
            self.sent += nbytes


class Profiled(Collective):
    """Waits until all ranks have come before each collective, so that waiting can be told from moving and summing.

    `phase` measures both: the one as "waiting", the other as "broadcast" or "reduction".
    """

    def __init__(self, comm: MPI.Intracomm, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        super().__init__(comm)
        self.phase = phase

    @contextmanager
    def _met(self, name: str) -> Iterator[None]:
        with self.phase("waiting"):
            wait([self.comm.Ibarrier()])
        with self.phase(name):
            yield

    def invite(self, shared: State) -> State:
        with self._met("broadcast"):
            return super().invite(shared)

    def close(self, sums: ExactSums) -> ExactSums:
        with self._met("reduction"):
            return super().close(sums)

    def share(self, sums: ExactSums) -> ExactSums:
        with self._met("reduction"):
            return super().share(sums)

    def reduce(self, values: Floats) -> Floats:
        with self._met("reduction"):
            return super().reduce(values)

    def agree(self, values: Floats) -> Floats:
        with self.phase("reduction"):  # whose waiting is that of `reduce`, the first half of it
            return super().agree(values)
