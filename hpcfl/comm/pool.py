"""Room in large pages, for tensors that travel.

MPI copies from process to process page by page. torch asks for large pages from 2 MB on; a state of eight layers of
1.25 MB took 1.6 times as long to be read by its clients.
"""

from __future__ import annotations

import mmap
import weakref

import numpy as np
import torch
from torch import Tensor

CHUNK_BYTES = 2**24
LARGE_BYTES = 2**21  # from here on torch does it, and gaps in the chunks would be large
ALIGNED = 64  # bytes; torch's own allocations begin at such multiples, and the last bits of a product depend on it


class BufferPool:
    """Chunks of memory that are filled with tensors one after the other, and again when all of those are gone."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty_like(self, like: Tensor) -> Tensor:
        """Return an uninitialised contiguous tensor; large ones are torch's own."""
        size = -(-like.nbytes // ALIGNED) * ALIGNED
        if size >= LARGE_BYTES:
            return torch.empty_like(like, memory_format=torch.contiguous_format)
        if len(self._rest) < size:
            self._rest = self._chunk()
        part, self._rest = self._rest[: like.nbytes], self._rest[size:]
        return part.view(like.dtype).view(like.shape)

    def _chunk(self) -> Tensor:
        if self._free:
            chunk = self._free.pop()
        else:
            chunk = mmap.mmap(-1, CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                chunk.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(chunk, dtype=np.uint8)
        weakref.finalize(whole, self._free.append, chunk)  # tensors keep the array alive, and nothing else does
        return torch.from_numpy(whole)
