"""The sums of a round in real time, formed from the messages that the server holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hpcfl.base.types import Floats
from hpcfl.comm.guard import Rejection
from hpcfl.comm.message import PIECE, Block, Deposits, Layout, Message, Sums, deposit
from hpcfl.engine.iterated import blank, keep

if TYPE_CHECKING:
    from hpcfl.engine.wall.slot import Slot


class Held(Sums):
    """Sums over the groups that counted, formed when they are asked for: one message per lane is all that is kept.

    Messages of single ranks are summed on fixed grids, as in simulated time, so a replay gives the same bits. What
    came from several ranks was summed on its way, at the blocks' precision and in an order of MPI's choosing.

    Parameters
    ----------
    kept : list of (Slot, int)
        Slots, and how many of their groups count.
    folded : Deposits
        Sums over slots that are not kept any more; None where there are none.
    copied : sequence of Message
        What of those slots is kept for further sums.

    Attributes
    ----------
    gradients : int
        The most gradients that a visit that counted has computed.
    rejected, norms
        As the round's outcome has them.
    """

    def __init__(
        self,
        layout: Layout,
        invited: int,
        miss_probability: Floats,
        kept: list[tuple[Slot, int]],
        folded: Deposits | None = None,
        copied: Sequence[Message] = (),
    ) -> None:
        super().__init__(layout, invited, miss_probability)
        self.kept, self.folded, self.copied = kept, folded, copied
        self.gradients = 0
        self.rejected: dict[int, Rejection] = {}
        self.norms: Floats = np.zeros((0, 0))
        self._group = {name: number for number, blocks in enumerate(layout) for name in blocks}

    def weight(self, name: str) -> float:
        """Return ``Σ weight``."""
        number = self._group[name]
        found = sum(float(slot.wire[number].weights(slot.data[number], name).sum()) for slot in self._with(number))
        return found + (self.folded.weight(name) if self.folded else 0.0)

    def total(self, name: str) -> Tensor:
        """Return ``Σ weight·value``, float64, of the block's shape."""
        number = self._group[name]
        block = self.layout[number][name]
        parts = [contribution(slot, number, name) for slot in self._with(number)]
        if len(parts) == 1 and parts[0][1] is None and not self.folded:
            return parts[0][0].double().view(block.shape)
        whole = self.folded.slabs(name) if self.folded else None
        out: Floats = np.empty(prod(block.shape))
        room = min(PIECE, len(out))
        slabs, product, scratch = np.empty((block.slabs, room)), np.empty(room), np.empty(room)
        for start in range(0, len(out), PIECE):
            piece = slice(start, start + PIECE)
            width = len(out[piece])
            own = slabs[:, :width]
            own[:] = 0.0 if whole is None else whole[:, piece]
            for value, weight in parts:
                deposit(scaled(value[piece], weight, product[:width]), own, scratch)
            np.add.reduce(own[::-1], out=out[piece])  # smallest first
        return torch.from_numpy(out).view(block.shape)

    def messages(self, blocks: Mapping[str, Block], device: torch.device) -> list[Message]:
        """Return what each visit that counted has sent of `blocks`, one by one, on a device."""
        return [*self.copied, *(message(slot, count, blocks, device) for slot, count in self.kept)]

    def _with(self, number: int) -> list[Slot]:
        """Return the slots whose group of this number counts."""
        return [slot for slot, count in self.kept if number < count]


def contribution(slot: Slot, number: int, name: str) -> tuple[Tensor, float | None]:
    """Return a block as it arrived, and what it is still to be multiplied by (None: nothing)."""
    group, data = slot.wire[number], slot.data[number]
    weight = float(group.weights(data, name)[0]) if group.width == 1 else None
    return group.value(data, name), weight


def message(slot: Slot, groups: int, blocks: Mapping[str, Block], device: torch.device) -> Message:
    """Return what a single rank's visit has sent of `blocks` within its first groups, in memory of its own."""
    kept = blank(blocks, 1, device)
    for group, data in zip(slot.wire[:groups], slot.data):
        for name in group.blocks.keys() & blocks.keys():
            keep({name: (group.value(data, name), torch.from_numpy(group.weights(data, name)))}, kept)
    return kept


def scaled(value: Tensor, weight: float | None, product: Floats) -> Floats:
    """Return ``weight·value`` in float64, written to `product`."""
    product[:] = value.numpy()
    if weight is not None and weight != 1.0:
        product *= weight
    return product


def fold(slot: Slot, sums: Deposits, groups: int | None = None) -> None:
    """Add the first groups of a slot (None: all) to exact running sums."""
    for number, group in enumerate(slot.wire[:groups]):
        for name in group.blocks:
            value, weight = contribution(slot, number, name)
            total = scaled(value, weight, np.empty(len(value)))
            sums.deposit(name, total, float(group.weights(slot.data[number], name).sum()))
