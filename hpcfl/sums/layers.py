"""Which layer a block belongs to, and how far a visit has come when so many of its groups are there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from hpcfl.base.types import Ints
from hpcfl.sums.message import Layout


class Layers:
    """Layers 1 … L, first layer first, and the groups of blocks in which a visit sends them, last layer first.

    Parameters
    ----------
    tensors : sequence of sequence of str
        The names of each layer's tensors.

    Attributes
    ----------
    of : dict of str to int
        The layer (1 … L) of each tensor that is in one.
    of_groups : int64 [G]
        The lowest layer (1 … L) in each group of the layout; L for what is no layer's.
    reached : list of int [G + 1]
        The first layer (1 … L; L + 1: none) from which on all is there when so many groups have arrived.
    """

    def __init__(self, tensors: Sequence[Sequence[str]], layout: Layout) -> None:
        self.tensors, count = tensors, len(tensors)
        self.of = {name: number for number, names in enumerate(tensors, start=1) for name in names}
        self.of_groups = np.array([min((self.of.get(name, count) for name in g), default=count) for g in layout])
        self._blocks = {name: block for group in layout for name, block in group.items()}
        self.reached, lacking = list[int](), set(self._blocks)
        for group in ({}, *layout):
            lacking -= group.keys()
            late = [number for number, names in enumerate(tensors, start=1) if not lacking.isdisjoint(names)]
            self.reached.append(max(late, default=0) + 1)

    def of_state(self, name: str) -> int:
        """Return the layer with which a personal tensor advances: that of the block that it is named after.

        That is the block of its name, or of what follows a colon in it. Others advance with layer 1, when all is there.
        """
        return self.of.get(name, self.of.get(name.rpartition(":")[2], 1))

    @cached_property
    def numbers(self) -> Ints:
        """Numbers in one visit's layers as the method sends them, where it holds all of them, int64 [L]."""
        return np.array([sum(self._blocks[name].size for name in names) for names in self.tensors])

    def sent(self, part: int, bytes: bool = False) -> Ints:
        """Return numbers, or bytes, in the layers of a visit that holds this one of `Block.parts`, int64 [L]."""
        layers = [[self._blocks[name] for name in names] for names in self.tensors]
        return np.array(
            [sum(each.sent(part) * (each.dtype.itemsize if bytes else 1) for each in layer) for layer in layers]
        )

    def name(self, number: int) -> str:
        """Return the name of layer `number` (1 … L)."""
        tensors = self.tensors[number - 1]
        owner = tensors[0].rpartition(".")[0] if len(tensors) > 1 else ""
        return owner or tensors[0]

    @property
    def names(self) -> list[str]:
        return [self.name(number) for number in range(1, len(self.tensors) + 1)]
