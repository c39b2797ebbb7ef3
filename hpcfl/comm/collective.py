"""Transport over MPI in simulated time: one lane of everyone, a tree that carries state down and sums up.

Nonblocking collectives in a fixed order, polled so that nobody's waiting slows another. (`hpcfl.engine.wall` has the
lanes of real time.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from hpcfl.base.errors import Stopped, ended
from hpcfl.base.types import Floats, State
from hpcfl.comm.message import Deposits
from hpcfl.comm.mpi import doze, wait
from hpcfl.comm.placement import Chunk
from hpcfl.comm.transport import Like, Personal, Saved, Transport, idle

Bytes = NDArray[np.uint8]


def pack(state: State) -> Bytes:
    """Return the tensors' bytes, one after the other."""
    if not state:
        return np.zeros(0, dtype=np.uint8)
    return np.concatenate(
        [value.detach().cpu().contiguous().numpy().reshape(-1).view(np.uint8) for value in state.values()]
    )


def unpack(data: Bytes, like: State) -> State:
    """Return tensors of the names, shapes, types and devices of `like`, each with memory of its own.

    Own memory, not views: the alignment of views differs, and with it the last bits of a matrix product.
    """
    state, start = {}, 0
    for name, value in like.items():
        stop = start + value.nbytes
        flat = torch.frombuffer(bytearray(data[start:stop]), dtype=value.dtype) if stop > start else value.reshape(-1)
        state[name] = flat.reshape(value.shape).clone().to(value.device)
        start = stop
    return state


class Tree(Transport):
    """One lane of all ranks.

    Parameters
    ----------
    comm : MPI.Intracomm
        Duplicated, so that no other traffic is mixed with it.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm.Dup()
        self.rank, self.size = comm.Get_rank(), comm.Get_size()

    def invite(self, shared: State) -> State:
        """Broadcast the shared state."""
        data = pack(shared) if self.serves else np.empty(sum(v.nbytes for v in shared.values()), dtype=np.uint8)
        wait([self.comm.Ibcast(data, root=0)])
        if self.serves:
            self.sent += data.nbytes * (self.size > 1)
            return shared
        self.received += data.nbytes
        return unpack(data, shared)

    def close(self, sums: Deposits) -> Deposits:
        """Reduce each group of blocks in the order in which backpropagation finishes them."""
        received = [np.empty_like(buffer.data) if self.serves else None for buffer in sums.buffers]
        wait([self.comm.Ireduce(b.data, r, MPI.SUM, root=0) for b, r in zip(sums.buffers, received)])
        moved = sum(buffer.data.nbytes for buffer in sums.buffers) * (self.size > 1)
        for buffer, total in zip(sums.buffers, received):
            if total is not None:
                buffer.data = total
        self.received += moved * self.serves
        self.sent += moved * (not self.serves)
        return sums

    def share(self, sums: Deposits) -> Deposits:
        """Sum each group of blocks over ranks, and tell everybody.

        By Iallreduce, unlike `agree`: all ranks go on at once with what they hear, and the blocks may be large, where
        a library has better than to carry all of them through the server.
        """
        totals = [np.empty_like(buffer.data) for buffer in sums.buffers]
        wait([self.comm.Iallreduce(b.data, total, MPI.SUM) for b, total in zip(sums.buffers, totals)])
        for buffer, total in zip(sums.buffers, totals):
            buffer.data = total
        moved = sum(total.nbytes for total in totals) * (self.size > 1)
        self.sent += moved
        self.received += moved
        return sums

    def reduce(self, values: Floats) -> Floats:
        """Sum over ranks; exact where each element is non-zero on one rank only, or a whole number."""
        total = np.empty_like(values)
        wait([self.comm.Ireduce(values, total if self.serves else None, MPI.SUM, root=0)])
        self.received += values.nbytes * self.serves * (self.size > 1)
        self.sent += values.nbytes * (not self.serves)
        return total

    def agree(self, values: Floats) -> Floats:
        """Sum over ranks, as `reduce` does, and tell everybody.

        Not an Iallreduce: there a rank's every step waits until its partner wakes from polling. Here the server sends
        and goes on, and the others hear of it where they would wait for its next state anyway.
        """
        total = self.reduce(values)
        wait([self.comm.Ibcast(total, root=0)])
        self.sent += values.nbytes * self.serves * (self.size > 1)
        self.received += values.nbytes * (not self.serves)
        return total

    def collect(self, chunks: Sequence[Chunk], personal: Personal, like: Like) -> Iterator[Saved]:
        """Send the chunks' states to the server one by one, so that it holds a single one in memory."""
        for chunk in chunks:
            if chunk.rank == self.rank and not self.serves:
                wait([self.comm.Isend(pack(personal[chunk.number]), dest=0)])
            if self.serves:
                state = personal[chunk.number] if chunk.rank == 0 else self._taken(chunk, like(int(chunk.clients[0])))
                yield chunk.clients, {name: value.cpu().numpy() for name, value in state.items()}

    def _taken(self, chunk: Chunk, like: State) -> State:
        count = len(chunk.clients)
        whole = {name: value.new_empty(count, *value.shape) for name, value in like.items()}
        data = np.empty(sum(value.nbytes for value in whole.values()), dtype=np.uint8)
        wait([self.comm.Irecv(data, source=chunk.rank)])
        return unpack(data, whole)

    def leave(self, stopped: Stopped | None = None, rest: Callable[[], None] = idle) -> Stopped | None:
        """Hear the server's last word, asleep, and meet at a polled barrier: MPI_Finalize spins while it waits."""
        word = np.array([0, 0] if stopped is None else [stopped.round, stopped.code], dtype=np.int64)
        doze(self.comm.Ibcast(word, root=0), rest)
        wait([self.comm.Ibarrier()])
        self.comm.Free()
        return stopped or ended(*word.tolist())
