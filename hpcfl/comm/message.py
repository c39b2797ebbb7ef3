"""Messages: masked weighted sums of named blocks, formed so that the order of summation cannot matter.

A visit's message is ``{block: (value, weight)}``; a missing block has weight zero. The server gets, per block,
``Σ weight·value`` and ``Σ weight``.

Addition of floating-point numbers is not associative, so a sum over ranks depends on who holds what. Here every
partial sum (float64, formed within one chunk, always the same chunk) is split on fixed grids: multiples of 2^-12,
then of 2^-46, then of 2^-80, each with a bin of its own. Sums of such multiples are exact while the totals stay below
2^41 (2^7, 2^-27 for the second and third grid: room for 2^20 chunks), and exact sums have no order. float32 blocks use
two grids, float64 blocks three. The pre-rounding idea is that of Demmel & Nguyen (2013), with grids fixed in advance so
that no extra reduction is needed. Beyond those ranges (a run that diverges) sums are still sums, but no longer
the same to the bit on any number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from hpcfl.base.transfer import on_device, on_host
from hpcfl.base.types import Floats, State
from hpcfl.comm.packing import Packing
from hpcfl.comm.pool import BufferPool

Message = Mapping[str, tuple[Tensor, Tensor]]
"""What a client generator yields: ``{block: (value [k, …], weight [k])}`` for the first k rows of its chunk."""

GRIDS = (2.0**12, 2.0**46, 2.0**80)
ROUNDER = 1.5 * 2.0**52
POOL = BufferPool()
PIECE = 65_536  # entries that are worked on at a time: they stay in the caches


@dataclass(frozen=True)
class Block:
    """Shape and type of one block, known to every rank before anything is sent.

    A visit may fill one of several `places` of equal size, each client its own: the sum then holds all values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    places: int = 1

    @property
    def bins(self) -> int:
        """How many grids a sum of this block needs."""
        return 2 if self.dtype == torch.float32 else 3

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def numbers(self) -> int:
        """How many numbers one visit tells."""
        return self.size // self.places

    @property
    def bytes(self) -> int:
        """Size of one visit's value on the wire, in bytes."""
        return self.size * self.dtype.itemsize


Layout = tuple[dict[str, Block], ...]
"""The groups of blocks that leave together, in the order in which they leave."""


def add_to_bins(total: Floats, bins: Floats, scratch: Floats) -> None:
    """Add `total` [n] to the bins [2 or 3, n], split into multiples of the grids; `total` is used up.

    `scratch`, at least n numbers, is room to work in: fresh memory for every message cost more than the arithmetic.
    """
    part = scratch[: len(total)]
    for grid, row in zip(GRIDS, bins):
        # adding and subtracting 1.5 * 2^52 grid steps rounds to a multiple of the step
        np.add(total, ROUNDER / grid, out=part)
        part -= ROUNDER / grid
        row += part
        total -= part


class Sums(ABC):
    """Weighted sums of blocks over the visits that counted: what the server's step is given.

    Attributes
    ----------
    miss_probability : float64 [L]
        Chance that nobody's layer l counts, as the speed model has it.
    iterated : State
        What the iterated reduction over the messages that counted has found (`hpcfl.engine.iterated`).
    """

    def __init__(self, layout: Layout, invited: int = 0, miss_probability: Floats | None = None) -> None:
        self.layout = layout
        self.invited = invited  # visits
        self.miss_probability = np.zeros(0) if miss_probability is None else miss_probability
        self.iterated: State = {}

    @abstractmethod
    def total(self, name: str) -> Tensor:
        """Return ``Σ weight·value``, float64, of the block's shape."""

    @abstractmethod
    def weight(self, name: str) -> float:
        """Return ``Σ weight``."""

    def mean(self, name: str) -> Tensor:
        """Return the weighted mean, float64; zero where nothing was sent."""
        return self.over(name, self.weight(name))

    def over(self, name: str, denominator: float) -> Tensor:
        """Return ``Σ weight·value / denominator``, float64; zero where nothing was sent."""
        total = self.total(name)
        return total.div_(denominator) if self.weight(name) else total.zero_()

    def __iter__(self) -> Iterator[str]:
        return (name for group in self.layout for name in group)

    def __contains__(self, name: str) -> bool:
        return any(name in group for group in self.layout)


class ExactSums(Sums):
    """Sums that grow message by message, exactly, on the device that computes; its totals are there too.

    Where that is not the CPU, they are in the buffers once they are `settled`.
    """

    def __init__(
        self,
        layout: Layout,
        invited: int = 0,
        miss_probability: Floats | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(layout, invited, miss_probability)
        self.device = device or torch.device("cpu")
        self._far: dict[str, Tensor] = {}  # bins that are on the device
        self.buffers: list[Floats] = []  # one per group, as ranks add them up: each block's weight, then its bins
        self._own: dict[str, Floats] = {}
        for group in layout:
            sizes = {name: 1 + block.bins * block.size for name, block in group.items()}
            packing = Packing(
                {name: torch.empty(size, dtype=torch.float64, device="meta") for name, size in sizes.items()}
            )
            buffer = packing.zeros()
            self.buffers.append(buffer.view(torch.float64).numpy())
            self._own |= {name: view.numpy() for name, view in packing.views(buffer).items()}
        self._blocks = {name: block for group in layout for name, block in group.items()}
        self._scratch: Floats = np.empty(max((block.size for block in self._blocks.values()), default=0))

    def add(self, message: Message) -> None:
        """Add the rows of one chunk."""
        for name, (value, weight) in message.items():
            rows = on_device(value.detach(), self.device).reshape(len(weight), self._blocks[name].size)
            total = weighted_sum(rows, weight)
            if self.device.type == "cpu":
                self.add_total(name, total.numpy(), float(weight.sum()))
            else:
                self._own[name][0] += float(weight.sum())
                self._add_far(name, total)

    def _add_far(self, name: str, total: Tensor) -> None:
        """Do what `add_to_bins` does, on the device."""
        if name not in self._far:
            self._far[name] = total.new_zeros(self._blocks[name].bins, len(total))
        for grid, row in zip(GRIDS, self._far[name]):
            part = total.add(ROUNDER / grid).sub_(ROUNDER / grid)
            row += part
            total -= part

    def settled(self) -> ExactSums:
        """Bring what was summed on the device to the buffers, with one wait for it."""
        for name, bins in zip(self._far, on_host(list(self._far.values()))):
            self.bins(name)[:] = bins.numpy()
        self._far = {}
        return self

    def add_total(self, name: str, total: Floats, weight: float) -> None:
        """Add a sum that is already formed, float64 [n], which is used up."""
        self._own[name][0] += weight
        add_to_bins(total, self.bins(name), self._scratch)

    def add_bins(self, name: str, bins: Floats, weight: float) -> None:
        """Add what another sum has on the grids, float64 [2 or 3, n]."""
        self._own[name][0] += weight
        own = self.bins(name)
        own += bins

    def bins(self, name: str) -> Floats:
        """Return a block's sums on the grids, as they are in the buffers, a view, float64 [2 or 3, n]."""
        block = self._blocks[name]
        return self._own[name][1:].reshape(block.bins, block.size)

    def total(self, name: str) -> Tensor:
        shape = self._blocks[name].shape
        if name in self._far:
            first, *others = self._far[name].unbind(0)[::-1]  # smallest first
            return sum(others, start=first).reshape(shape)
        total = self.bins(name)[::-1].sum(0)
        return on_device(torch.from_numpy(total.reshape(shape)), self.device)

    def weight(self, name: str) -> float:
        return float(self._own[name][0])


def weighted_sum(rows: Tensor, weight: Tensor) -> Tensor:
    """Return ``Σ weight·row`` of rows ``[c, n]``, float64 [n], where the rows are."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for row, factor in zip(rows, weight.tolist()):
        total.add_(row, alpha=factor)  # converted on the way, in float64
    return total


def moved(value: Tensor, update: Tensor) -> Tensor:
    """Return ``value + update``, added in float64 and rounded once to value's type.

    On a CPU piece by piece: whole copies in float64 would cost more than the arithmetic.
    """
    update = on_device(update, value.device).expand_as(value)
    if value.device.type != "cpu" or value.numel() <= PIECE:
        return (value.double() + update).to(value.dtype)
    after = POOL.empty_like(value)
    for new, old, change in zip(*(torch.split(part.reshape(-1), PIECE) for part in (after, value, update))):
        new.copy_(old.double() + change)
    return after
