"""Transport over MPI in simulated time: one lane of all ranks, on which collectives carry state down and sums up.

Nonblocking and in a fixed order, polled so that nobody's waiting slows another. (`hpcfl.realtime` has the lanes of
real time.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np

from hpcfl.base.device_copy import on_device
from hpcfl.base.errors import Stopped, ended
from hpcfl.base.lazy import MPI, torch
from hpcfl.base.types import Floats, Ints, State
from hpcfl.mpi.channel import in_pieces
from hpcfl.mpi.placement import Chunk
from hpcfl.mpi.transport import Like, Personal, Saved, Transport, arrays
from hpcfl.mpi.waiting import doze, idle, wait
from hpcfl.sums.message import ExactSums
from hpcfl.sums.packing import Bytes, Packing, as_bytes

Phase = Callable[[str], AbstractContextManager[None]]


class Collective(Transport):
    """One lane of all ranks; `comm` is duplicated, so that no other traffic is mixed with it.

    Where several ranks are on each of several `hosts`, what goes down or up crosses from host to host once: between the
    first ranks of hosts, and beside that within each host.
    Where a `phase` measures, all ranks wait until all have come before each collective, so that waiting can be told
    from moving and summing: the one is the phase "waiting", the other "broadcast" or "reduction". While this rank waits
    for others it calls `rest`.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        phase: Phase | None = None,
        rest: Callable[[], None] = idle,
        hosts: Sequence[str] = (),
    ) -> None:
        super().__init__(comm.Get_size())
        self.comm, self.rank, self.phase, self.rest = comm.Dup(), comm.Get_rank(), phase, rest
        self.levels: list[MPI.Comm] = [self.comm]  # those of this rank, the server's first
        if 1 < len({*hosts}) < self.size:
            first = hosts.index(hosts[self.rank])
            between = comm.Split(0 if first == self.rank else MPI.UNDEFINED, self.rank)
            self.levels = [each for each in (between, comm.Split(first, self.rank)) if each != MPI.COMM_NULL]

    @contextmanager
    def _met(self, name: str) -> Iterator[None]:
        if self.phase is None:
            yield
            return
        with self.phase("waiting"):
            wait([self.comm.Ibarrier()], self.rest)
        with self.phase(name):
            yield

    def invite(self, shared: State) -> State:
        """Broadcast the shared state."""
        with self._met("broadcast"):
            packing = Packing(shared)
            buffer = torch.empty(0) if self.serves else packing.zeros()
            self._tell(packing.sent(shared) if self.serves else packing.received(buffer))
            if self.serves:
                return shared
            return {name: on_device(value, shared[name].device) for name, value in packing.views(buffer).items()}

    def close(self, sums: ExactSums) -> ExactSums:
        """Reduce each group of blocks in the order in which backpropagation finishes them.

        Large blocks travel as whole numbers. With them ranks tell the server where these do not suffice; it tells
        everybody, and there the bins follow.
        """
        with self._met("reduction"):
            self._sum(sums.settled().buffers)
            if len(sums.wide):
                self._tell([sums.wide])
                self._sum(sums.uppers())
            return sums

    def _tell(self, buffers: Sequence[Bytes | Floats | Ints]) -> None:
        """Give every rank the server's, in the place of its own."""
        for comm in self.levels:
            wait([comm.Ibcast(piece, root=0) for buffer in buffers for piece in in_pieces(buffer)], self.rest)
            self._count(comm, buffers, up=False)

    def _sum(self, buffers: Sequence[Floats | Ints]) -> None:
        """Sum each buffer over ranks, for the server, in its place; other ranks' are of no use afterwards."""
        for comm in reversed(self.levels):
            pieces = [piece for buffer in buffers for piece in in_pieces(buffer)]
            ends = [(piece, None) if comm.Get_rank() else (MPI.IN_PLACE, piece) for piece in pieces]
            wait([comm.Ireduce(send, receive, MPI.SUM, root=0) for send, receive in ends], self.rest)
            self._count(comm, buffers, up=True)

    def share(self, sums: ExactSums) -> ExactSums:
        """Sum each group of blocks over ranks, and tell everybody.

        Over one level by Iallreduce, unlike `agree`: all ranks go on at once with what they hear, and the blocks may be
        large, where a library has better than to carry all of them through the server.
        """
        with self._met("reduction"):
            self._share(sums.settled().buffers)
            self._share(sums.uppers())
            return sums

    def _share(self, buffers: Sequence[Floats | Ints]) -> None:
        if self.levels != [self.comm]:
            self._sum(buffers)
            self._tell(buffers)
            return
        pieces = [piece for buffer in buffers for piece in in_pieces(buffer)]
        wait([self.comm.Iallreduce(MPI.IN_PLACE, piece, MPI.SUM) for piece in pieces], self.rest)
        for up in (True, False):
            self._count(self.comm, buffers, up)

    def reduce(self, values: Floats) -> Floats:
        """Sum over ranks; exact where each element is non-zero on one rank only, or a whole number."""
        with self._met("reduction"):
            total = np.array(values, order="C")
            self._sum([total])
            return total

    def agree(self, values: Floats) -> Floats:
        """Sum over ranks, as `reduce` does, and tell everybody.

        Not an Iallreduce: there a rank's every step waits until its partner wakes from polling. Here the server sends
        and goes on, and the others hear of it where they would wait for its next state anyway.
        """
        with self.phase("reduction") if self.phase else nullcontext():  # whose waiting is that of `reduce`
            total = self.reduce(values)
            self._tell([total])
            return total

    def collect(self, chunks: Sequence[Chunk], personal: Personal, like: Like) -> Iterator[Saved]:
        """Send the chunks' states to the server one by one, so that it holds a single one in memory."""
        for chunk in chunks:
            if chunk.rank == self.rank and self.serves:
                yield chunk.clients, arrays(personal[chunk.number])
            elif chunk.rank == self.rank:
                state = personal[chunk.number]
                packed = as_bytes(Packing(state).packed(state))
                wait([self.comm.Isend(piece, dest=0) for piece in in_pieces(packed)], self.rest)
            elif self.serves:
                likes = like(int(chunk.clients[0])).items()
                packing = Packing({name: each.expand(len(chunk.clients), *each.shape) for name, each in likes})
                buffer = packing.zeros()
                wait([self.comm.Irecv(piece, source=chunk.rank) for piece in in_pieces(as_bytes(buffer))], self.rest)
                yield chunk.clients, arrays(packing.views(buffer))

    def leave(self, stopped: Stopped | None = None) -> Stopped | None:
        """Hear the server's last word, asleep, and meet at a polled barrier: MPI_Finalize spins while it waits."""
        word = np.array([0, 0] if stopped is None else [stopped.round, stopped.code], dtype=np.int64)
        doze([self.comm.Ibcast(word, root=0)], self.rest)
        wait([self.comm.Ibarrier()], self.rest)
        if self.levels != [self.comm]:
            for comm in self.levels:
                comm.Free()
        self.comm.Free()
        return (stopped or ended(*word.tolist())) if word[1] else None  # by itself: not to all that is known

    def _count(self, comm: MPI.Comm, buffers: Sequence[Bytes | Floats | Ints], up: bool) -> None:
        """Count a copy for each rank but the first, which has all of them; in truth MPI lets others pass some on."""
        first, copies = comm.Get_rank() == 0, comm.Get_size() - 1
        nbytes = sum(buffer.nbytes for buffer in buffers) * (copies if first else 1)
        if up == first:
            self.received += nbytes
        else:
            self.sent += nbytes
