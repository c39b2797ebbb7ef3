"""How a group of blocks travels: a head, and then each of its large blocks.

The head is ``[sent, seconds, gradients, weights, values of the small blocks]``. Each client rank of the lane has a
seat, and writes its flag, its seconds, its gradients and its weights at that seat only: after a sum over ranks they can
still be told apart.
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

from hpcfl.base.types import Floats
from hpcfl.comm.message import Block, Layout
from hpcfl.comm.packing import APART_BYTES, Packing

Array = NDArray[np.generic]
Parcel = list[Tensor]
"""One group: its head, then its large blocks, all of them flat."""
SENT, REJECTED = 1.0, -1.0
SIGNS = 4  # what a seat signs with: its flag, its seconds, and its gradients in two parts


class Group:
    """The wire format of one group on a lane of `width` client ranks.

    Attributes
    ----------
    large : dict of str to int
        Where in a parcel each large block is.
    """

    def __init__(self, blocks: dict[str, Block], width: int) -> None:
        self.blocks, self.width = blocks, width
        large = [name for name, block in blocks.items() if block.bytes >= APART_BYTES]
        self.large = {name: place for place, name in enumerate(large, start=1)}
        small = {name: block for name, block in blocks.items() if name not in self.large}
        double = any(block.dtype == torch.float64 for block in small.values())
        self.dtype = torch.float64 if double else torch.float32
        self.starts: dict[str, int] = {}
        self.size = width * (SIGNS + 2 * len(blocks))
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

    def sign(self, parcel: Parcel, seat: int, seconds: float, gradients: int = 0, flag: float = SENT) -> None:
        """Mark the parcel as sent by `seat`, `seconds` after its visit began, which has computed so many gradients."""
        self.signs(parcel)[:, seat] = flag, seconds, *_parts(gradients)

    def weigh(self, parcel: Parcel, seat: int, name: str, weight: float) -> None:
        """Write down the weight of a block."""
        start = self._weights(name)[seat]
        parcel[0].numpy()[[start, start + self.width]] = _parts(weight)

    def signs(self, parcel: Parcel) -> NDArray[np.floating]:
        """Return where seats sign, [4, width].

        `SENT` who has sent this group, `REJECTED` whose visit was rejected by it, 0 else; then the visit's seconds and
        gradients by then, the latter in two parts.
        """
        signs: NDArray[np.floating] = parcel[0].numpy()[: SIGNS * self.width].reshape(SIGNS, self.width)
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
        first = self.width * (SIGNS + 2 * list(self.blocks).index(name))
        return range(first, first + self.width)


def _parts(number: float) -> tuple[float, float]:
    """Return a number in two parts: as float32 they have 48 bits, enough for numbers of samples."""
    high = float(np.float32(number))
    return high, number - high


def computed(signs: NDArray[np.floating], seat: int) -> int:
    """Return how many gradients a seat has signed with."""
    return int(signs[2, seat]) + int(signs[3, seat])


def wire(layout: Layout, width: int) -> list[Group]:
    """Return the formats of a layout's groups, in the order in which they leave."""
    return [Group(blocks, width) for blocks in layout]


def room(groups: list[Group]) -> list[Parcel]:
    """Return room for a parcel of each group, full of zeros, in one piece: large pieces lie in large pages."""
    sizes = [size for group in groups for size in group.sizes()]
    like = {str(place): torch.empty(size, dtype=kind, device="meta") for place, (size, kind) in enumerate(sizes)}
    packing = Packing(like)
    parts = iter(packing.views(packing.zeros()).values())
    return [[next(parts) for _ in group.sizes()] for group in groups]
