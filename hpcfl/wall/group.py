"""How a group of blocks travels: a head, and then each of its large blocks.

The head is ``[sent, seconds, weights, values of the small blocks]``. Each client rank of the lane has a seat, and
writes its flag, its seconds and its weights at that seat only: after a sum over ranks they can still be told apart.
Large blocks are sent from where they are. A rank alone on its lane sends values as they are, and the server multiplies
them by their weights in float64, as in simulated time. Ranks that share a lane send ``weight·value``, since MPI adds
them up on the way; there the sum is rounded at the blocks' precision.
"""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcfl.message import Block, Layout
from hpcfl.packing import ALONE, Packing
from hpcfl.plan import Floats

Array = NDArray[np.generic]
Parcel = list[Tensor]
"""One group: its head, then its large blocks, all of them flat."""


class Group:
    """The wire format of one group on a lane of `width` client ranks.

    Attributes
    ----------
    large : dict of str to int
        Where in a parcel each large block is.
    """

    def __init__(self, blocks: dict[str, Block], width: int) -> None:
        self.blocks, self.width = blocks, width
        large = [name for name, block in blocks.items() if block.bytes >= ALONE]
        self.large = {name: place for place, name in enumerate(large, start=1)}
        small = {name: block for name, block in blocks.items() if name not in self.large}
        double = any(block.dtype == torch.float64 for block in small.values())
        self.dtype = torch.float64 if double else torch.float32
        self.starts: dict[str, int] = {}
        self.size = 2 * width * (1 + len(blocks))
        for name, block in small.items():
            self.starts[name] = self.size
            self.size += prod(block.shape)

    def head(self, pinned: bool = False) -> Tensor:
        """Return a head that says that nothing was sent."""
        return torch.zeros(self.size, dtype=self.dtype, pin_memory=pinned)

    def empty(self) -> Parcel:
        """Return room for a parcel, full of zeros."""
        return [torch.zeros(size, dtype=dtype) for size, dtype in self.sizes()]

    def sizes(self) -> list[tuple[int, torch.dtype]]:
        """Return entries and type of each part of a parcel."""
        large = (self.blocks[name] for name in self.large)
        return [(self.size, self.dtype), *((prod(block.shape), block.dtype) for block in large)]

    def sign(self, parcel: Parcel, seat: int, seconds: float) -> None:
        """Mark the parcel as sent by `seat`, `seconds` after its visit began."""
        self.signs(parcel)[:, seat] = 1.0, seconds

    def weigh(self, parcel: Parcel, seat: int, name: str, weight: float) -> None:
        """Write down the weight of a block."""
        start = self._weights(name)[seat]
        high = np.float32(weight)
        # in two parts: 48 bits are enough for numbers of samples
        parcel[0].numpy()[[start, start + self.width]] = high, weight - float(high)

    def signs(self, parcel: Parcel) -> NDArray[np.floating]:
        """Return where seats sign: above 0 who has sent this group, then its visit's seconds by then, [2, width]."""
        signs: NDArray[np.floating] = parcel[0].numpy()[: 2 * self.width].reshape(2, self.width)
        return signs

    def weights(self, parcel: Parcel, name: str) -> Floats:
        """Return each seat's weight of a block, float64 [width]."""
        start = self._weights(name)[0]
        parts: Floats = parcel[0].numpy()[start : start + 2 * self.width].astype(np.float64)
        return parts[: self.width] + parts[self.width :]

    def value(self, parcel: Parcel, name: str) -> Tensor:
        """Return a block as it was sent, flat; on a lane of several ranks the weighted sum."""
        if name in self.large:
            return parcel[self.large[name]]
        return parcel[0][self.starts[name] : self.starts[name] + prod(self.blocks[name].shape)]

    def _weights(self, name: str) -> range:
        first = 2 * self.width * (1 + list(self.blocks).index(name))
        return range(first, first + self.width)


def wire(layout: Layout, width: int) -> list[Group]:
    """Return the formats of a layout's groups, in the order in which they leave."""
    return [Group(blocks, width) for blocks in layout]


def room(groups: list[Group]) -> list[Parcel]:
    """Return room for a parcel of each group, full of zeros, in one piece: large pieces lie in large pages."""
    sizes = [size for group in groups for size in group.sizes()]
    like = {str(place): torch.empty(size, dtype=kind, device="meta") for place, (size, kind) in enumerate(sizes)}
    packing = Packing(like)
    parts = iter(packing.views(packing.empty()).values())
    return [[next(parts) for _ in group.sizes()] for group in groups]
