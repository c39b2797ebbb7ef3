"""Many tensors in one buffer, for the wire."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcfl.base.types import State
from hpcfl.comm.pool import ALIGNED

ALONE = 2**20  # bytes; tensors of this size travel from where they are, smaller ones are put together
Bytes = NDArray[np.uint8]


class Packing:
    """Where tensors of given names, shapes and types lie in a buffer of bytes, and in which parts they travel.

    Attributes
    ----------
    nbytes : int
        Size of the buffer.
    parts : list of list of str
        Names that travel together: neighbours in the buffer. A large tensor is a part by itself.
    """

    def __init__(self, like: State) -> None:
        self.like = {name: (tuple(value.shape), value.dtype) for name, value in like.items()}
        self.starts: dict[str, int] = {}
        self.parts: list[list[str]] = []
        self.nbytes = 0
        apart = True
        for name, (shape, dtype) in self.like.items():
            self.starts[name] = self.nbytes
            size = prod(shape) * dtype.itemsize
            self.nbytes += -(-size // ALIGNED) * ALIGNED
            if apart or size >= ALONE:
                self.parts.append([])
            self.parts[-1].append(name)
            apart = size >= ALONE

    def empty(self, pinned: bool = False) -> Tensor:
        """Return a buffer, uint8 ``[nbytes]``."""
        return torch.zeros(self.nbytes, dtype=torch.uint8, pin_memory=pinned)

    def views(self, buffer: Tensor) -> State:
        """Return the tensors that lie in the buffer: views, not copies."""
        return {
            name: buffer[slice(*self._extent(name))].view(dtype).view(shape)
            for name, (shape, dtype) in self.like.items()
        }

    def write(self, buffer: Tensor, state: State) -> None:
        """Copy the tensors into the buffer."""
        for name, place in self.views(buffer).items():
            place.copy_(state[name])

    def sent(self, state: State) -> list[Bytes]:
        """Return the parts as they are sent: large tensors' own memory where they are on a CPU, else copies."""
        return [_memory(state[names[0]]) if len(names) == 1 else self._together(names, state) for names in self.parts]

    def received(self, buffer: Tensor) -> list[Bytes]:
        """Return the places in a buffer into which the parts are received."""
        return [as_bytes(buffer[self.starts[names[0]] : self._extent(names[-1])[1]]) for names in self.parts]

    def _extent(self, name: str) -> tuple[int, int]:
        """Return where a tensor begins and ends."""
        shape, dtype = self.like[name]
        start = self.starts[name]
        return start, start + prod(shape) * dtype.itemsize

    def _together(self, names: list[str], state: State) -> Bytes:
        first = self.starts[names[0]]
        data = torch.zeros(self._extent(names[-1])[1] - first, dtype=torch.uint8)
        for name in names:
            start, stop = self._extent(name)
            value = state[name].detach()
            data[start - first : stop - first].view(value.dtype).view(value.shape).copy_(value)
        return as_bytes(data)


def as_bytes(buffer: Tensor) -> Bytes:
    """Return the buffer as MPI takes it."""
    array: Bytes = buffer.numpy()
    return array


def _memory(value: Tensor) -> Bytes:
    return as_bytes(value.detach().cpu().contiguous().flatten().view(torch.uint8))
