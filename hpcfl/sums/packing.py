"""Many tensors in one buffer, for the wire: state, personal state and sums, under either clock.

And room in large pages for tensors that travel. MPI copies from process to process page by page: a state of eight
layers of 1.25 MB took 1.6 times as long to be read by its clients where it lay in small ones. And a page that is new
costs more than to compute what is written there: what is large and wanted again in every round is kept.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Mapping, Sequence
from math import prod
from threading import Lock, local
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.types import State

Bytes = NDArray[np.uint8]
CHUNK_BYTES = 2**24
LARGE_BYTES = 2**21  # a large page; what is larger has a chunk to itself, since gaps in shared ones would be large
ALIGNED = 64  # bytes; torch's own allocations begin at such multiples, and the last bits of a product depend on it
APART_BYTES = 2**20  # tensors of this size travel from where they are, smaller ones are put together


class Packing:
    """Where tensors of given names, shapes and types lie in a buffer of bytes, and in which parts they travel.

    Attributes
    ----------
    nbytes : int
        Size of the buffer.
    parts : list of list of str
        Names that travel together: neighbours in the buffer. A large tensor is a part by itself.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self.like = {name: (tuple(value.shape), value.dtype) for name, value in like.items()}
        self.extents: dict[str, slice] = {}
        self.parts: list[list[str]] = []
        self.nbytes = 0
        apart = True
        for name, (shape, dtype) in self.like.items():
            size = prod(shape) * dtype.itemsize
            self.extents[name] = slice(self.nbytes, self.nbytes + size)
            self.nbytes += -(-size // ALIGNED) * ALIGNED
            if apart or size >= APART_BYTES:
                self.parts.append([])
            self.parts[-1].append(name)
            apart = size >= APART_BYTES

    def zeros(self, pinned: bool = False) -> Tensor:
        """Return a buffer, uint8 ``[nbytes]``; `pinned`: which a GPU can read by itself."""
        return torch.zeros(self.nbytes, dtype=torch.uint8, pin_memory=pinned)

    def views(self, buffer: Tensor) -> State:
        """Return the tensors that lie in the buffer: views, not copies."""
        return {name: buffer[self.extents[name]].view(dtype).view(shape) for name, (shape, dtype) in self.like.items()}

    def packed(self, state: State) -> Tensor:
        """Return a buffer with copies of the tensors."""
        buffer = self.zeros()
        for name, place in self.views(buffer).items():
            place.copy_(state[name].detach())
        return buffer

    def sent(self, state: State) -> list[Bytes]:
        """Return the parts as they are sent: large tensors' own memory where they are on a CPU, else copies."""
        found = []
        for names in self.parts:
            if len(names) == 1:
                memory = state[names[0]].detach().cpu().contiguous().flatten().view(torch.uint8)
            else:
                part = Packing({name: state[name] for name in names})
                memory = part.packed(state)[: part.extents[names[-1]].stop]
            found.append(as_bytes(memory))
        return found

    def received(self, buffer: Tensor) -> list[Bytes]:
        """Return the places in a buffer into which the parts are received."""
        return [as_bytes(buffer[self.extents[names[0]].start : self.extents[names[-1]].stop]) for names in self.parts]


def as_bytes(buffer: Tensor) -> Bytes:
    return buffer.numpy()


class BufferPool:
    """Chunks of memory that are filled with tensors one after the other, and again when all of those are gone."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}  # by size
        self._rest: Any = ()  # a tensor later
        self._lock = Lock()  # ranks compute in a thread of their own

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous tensor."""
        nbytes = prod(shape) * dtype.itemsize
        size = -(-nbytes // ALIGNED) * ALIGNED
        with self._lock:
            if size >= LARGE_BYTES:
                return self._chunk(size)[:nbytes].view(dtype).view(shape)
            if len(self._rest) < size:
                self._rest = self._chunk(CHUNK_BYTES)
            part: Tensor = self._rest[:nbytes]
            self._rest = self._rest[size:]
            return part.view(dtype).view(shape).data  # a change of one is none of its neighbours, as torch counts

    def zeros(self, nbytes: int) -> Tensor:
        """Return a buffer of zeros, uint8 ``[nbytes]``; one that fills no large page is torch's own."""
        if nbytes < LARGE_BYTES:
            return torch.zeros(nbytes, dtype=torch.uint8)
        return self.empty((nbytes,), torch.uint8).zero_()

    def _chunk(self, nbytes: int) -> Tensor:
        size = LARGE_BYTES - (-nbytes // LARGE_BYTES) * LARGE_BYTES  # one page more, to begin where one begins
        free = self._free.setdefault(size, [])
        chunk = free.pop() if free else _mapped(size)
        whole = np.frombuffer(chunk, dtype=np.uint8)
        weakref.finalize(whole, free.append, chunk)  # tensors keep the array alive, and nothing else does
        start = -whole.ctypes.data % LARGE_BYTES
        return torch.from_numpy(whole[start : start + nbytes])


class Spare(local):
    """Room for one tensor at a time, of the thread's largest size so far: totals of layers, one after the other."""

    def __init__(self) -> None:
        self._room = np.empty(0, dtype=np.uint8)
        self._user: Callable[[], object] = lambda: None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous tensor; torch's own while the last one is in use."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < LARGE_BYTES or self._user() is not None:
            return torch.empty(tuple(shape), dtype=dtype)
        if len(self._room) < nbytes:
            self._room = np.frombuffer(_mapped(nbytes), dtype=np.uint8)
        view = self._room[:nbytes]
        self._user = weakref.ref(view)  # tensors keep it alive, and nothing else does
        return torch.from_numpy(view).view(dtype).view(shape)


def _mapped(size: int) -> mmap.mmap:
    """Return fresh memory, in large pages where the system has them."""
    chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk


POOL, SPARE = BufferPool(), Spare()
