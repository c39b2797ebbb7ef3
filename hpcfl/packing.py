"""Many tensors in one buffer, for the wire."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcfl.message import State

ALIGNED = 64  # bytes; torch's own allocations begin at such multiples, and the last bits of a product depend on it


class Packing:
    """Where tensors of given names, shapes and types lie in a buffer of bytes.

    Attributes
    ----------
    nbytes : int
        Size of the buffer.
    """

    def __init__(self, like: State) -> None:
        self.like = {name: (tuple(value.shape), value.dtype) for name, value in like.items()}
        self.starts: dict[str, int] = {}
        self.nbytes = 0
        for name, (shape, dtype) in self.like.items():
            self.starts[name] = self.nbytes
            self.nbytes += -(-prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED

    def empty(self, pinned: bool = False) -> Tensor:
        """Return a buffer, uint8 ``[nbytes]``."""
        return torch.zeros(self.nbytes, dtype=torch.uint8, pin_memory=pinned)

    def views(self, buffer: Tensor) -> State:
        """Return the tensors that lie in the buffer: views, not copies."""
        return {
            name: buffer[self.starts[name] : self.starts[name] + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (shape, dtype) in self.like.items()
        }

    def write(self, buffer: Tensor, state: State) -> None:
        """Copy the tensors into the buffer."""
        for name, place in self.views(buffer).items():
            place.copy_(state[name])


def public(shared: State) -> State:
    """Return the part of the shared state that leaves the server."""
    return {name: value for name, value in shared.items() if not name.startswith("server.")}


def as_bytes(buffer: Tensor) -> NDArray[np.uint8]:
    """Return the buffer as MPI takes it."""
    array: NDArray[np.uint8] = buffer.numpy()
    return array
