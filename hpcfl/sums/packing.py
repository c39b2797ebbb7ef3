"""Many tensors in one buffer, for the wire: state, personal state and sums, under either clock."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.types import State
from hpcfl.sums.pool import ALIGNED

Bytes = NDArray[np.uint8]
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
