"""How a group of blocks travels: one array that MPI can sum over the ranks of a lane.

``[sent, seconds, weights, values]``. Each client rank of the lane has a seat, and writes its flag, its seconds and
its weights at that seat only: after a sum over ranks they can still be told apart. A rank alone on its lane sends
values as they are, and the server multiplies them by their weights in float64, as in simulated time. Ranks that share
a lane send ``weight·value``, since MPI adds them up on the way; there the sum is rounded at the blocks' precision.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcfl.message import Block, Layout
from hpcfl.plan import Floats

Array = NDArray[np.generic]


class Group:
    """The wire format of one group on a lane of `width` client ranks."""

    def __init__(self, blocks: dict[str, Block], width: int) -> None:
        self.blocks, self.width = blocks, width
        double = any(block.dtype == torch.float64 for block in blocks.values())
        self.dtype = torch.float64 if double else torch.float32
        self.starts: dict[str, int] = {}
        size = 2 * width * (1 + len(blocks))
        for name, block in blocks.items():
            self.starts[name] = size
            size += prod(block.shape)
        self.size = size

    def empty(self, pinned: bool = False) -> Tensor:
        """Return zeros: what a rank sends that has not come so far."""
        return torch.zeros(self.size, dtype=self.dtype, pin_memory=pinned)

    def clear(self, data: Tensor) -> None:
        """Take flags, seconds and weights out of an array that was sent before."""
        data[: 2 * self.width * (1 + len(self.blocks))] = 0.0

    def clear_values(self, data: Tensor, names: Iterable[str]) -> None:
        """Take the values of some blocks out of it."""
        for name in names:
            self.value(data, name).zero_()

    def sign(self, data: Tensor, seat: int, seconds: float) -> None:
        """Mark the array as sent by `seat`, `seconds` after its visit began."""
        data[seat] = 1.0
        data[self.width + seat] = seconds

    def write(self, data: Tensor, seat: int, name: str, value: Tensor, weight: float) -> None:
        """Put one block of one visit into its place; `value` may lie on a GPU."""
        start = self._weights(name)[seat]
        high = np.float32(weight)
        data[start] = float(high)  # a weight in two parts: 48 bits are enough for numbers of samples
        data[start + self.width] = weight - float(high)
        sent, place = value.detach().flatten(), self.value(data, name)
        if self.width == 1:
            place.copy_(sent, non_blocking=True)
        elif sent.is_cuda:
            place.copy_(sent * weight, non_blocking=True)
        else:
            torch.mul(sent, weight, out=place)  # without a copy in between

    def sent(self, data: Tensor) -> NDArray[np.bool_]:
        """Return which seats have sent this group, bool [width]."""
        flags: NDArray[np.bool_] = data[: self.width].numpy() > 0
        return flags

    def seconds(self, data: Tensor) -> Floats:
        """Return the seconds that each seat's visit had taken, float64 [width]."""
        seconds: Floats = data[self.width : 2 * self.width].double().numpy()
        return seconds

    def weights(self, data: Tensor, name: str) -> Floats:
        """Return each seat's weight of a block, float64 [width]."""
        start = self._weights(name)[0]
        parts: Floats = data[start : start + 2 * self.width].double().numpy()
        return parts[: self.width] + parts[self.width :]

    def value(self, data: Tensor, name: str) -> Tensor:
        """Return a block as it was sent, a flat view; on a lane of several ranks the weighted sum."""
        return data[self.starts[name] : self.starts[name] + prod(self.blocks[name].shape)]

    def _weights(self, name: str) -> range:
        first = 2 * self.width * (1 + list(self.blocks).index(name))
        return range(first, first + self.width)


def wire(layout: Layout, width: int) -> list[Group]:
    """Return the formats of a layout's groups, in the order in which they leave."""
    return [Group(blocks, width) for blocks in layout]
