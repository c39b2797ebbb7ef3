"""Sums of rows formed on a device that is not the CPU: products are rounded one by one, so that no order matters.

There an operation costs its launch, whatever its size. So rows of all blocks that count by the same weights are worked
on as one, and what is added up are whole numbers of ``STEPS`` in 1. They come to the host once, 8 bytes a number.
Blocks of float64, and what is beyond the range of whole numbers, take the bins of `hpcfl.sums.exact` instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hpcfl.base.device_copy import on_device, on_host
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.types import Floats
from hpcfl.sums.exact import COARSE_BITS, GRIDS, ROUNDER, STEPS, BinnedSum, ExactSum, FixedSum

AT_ONCE = 2**29  # bytes of products that are rounded at a time, and of rows that are worked on as one


class DeviceSums:
    """Sums of named blocks, of which `bins` says how many grids each needs: with two, they are whole numbers.

    Attributes
    ----------
    limit : float
        What no sum of whole numbers may reach on this rank, in steps.
    """

    def __init__(self, bins: Mapping[str, int], limit: float) -> None:
        self.bins, self.limit = bins, limit
        self._bounds: dict[str, float] = {}  # no whole number of a block is larger
        self._waiting: dict[str, Tensor] = {}
        self._weight: list[float] = []
        self._whole: dict[tuple[str, ...], Tensor] = {}  # int64 [Σ n] of blocks that were formed together
        self._sizes: dict[str, int] = {}
        self._binned: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._sizes or name in self._binned

    def add(self, name: str, rows: Tensor, weight: list[float], norms: Floats) -> None:
        """Add ``Σ weight·row`` of rows [k, n]; no number of a row is larger than what `norms` [k] has of it."""
        bound = self._bounds.get(name, 0.0) + float(np.abs(np.array(weight)) @ norms) * STEPS
        if self.bins[name] > 2 or rows.dtype != torch.float32 or not bound < self.limit:
            if name not in self._binned:
                self._binned[name] = rows.new_zeros(self.bins[name], rows.shape[1], dtype=torch.float64)
            for rest in _products(rows, weight):  # so many launches, however many rows there are
                for grid, row in zip(GRIDS, self._binned[name]):
                    part = rest.add(ROUNDER / grid).sub_(ROUNDER / grid)
                    row += part.sum(0)  # of multiples of the grid's step: exact in any order
                    rest -= part
            return
        self._bounds[name] = bound
        held = sum(each.nbytes for each in self._waiting.values())
        if name in self._waiting or weight != self._weight or held + rows.nbytes > AT_ONCE:
            self._form()
            self._weight = weight
        self._waiting[name], self._sizes[name] = rows, rows.shape[1]

    def _form(self) -> None:
        """Add up what has come since the last time."""
        if not self._waiting:
            return
        names, rows = tuple(self._waiting), list(self._waiting.values())
        joined = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        self._waiting = {}
        for products in _products(joined, [each * STEPS for each in self._weight]):
            total = products.round_().to(torch.int64).sum(0)
            if names in self._whole:
                self._whole[names] += total
            else:
                self._whole[names] = total

    def total(self, name: str) -> Tensor | None:
        """Return a block's sums, float64 [n], where they are; None: what is whole and in bins the host adds up."""
        self._form()
        wholes = [each for names, whole in self._whole.items() for each in self._parts(names, whole, name)]
        if not wholes:
            first, *others = self._binned[name].unbind(0)[::-1]  # smallest first
            return sum(others, start=first)
        if name in self._binned:
            return None
        first, *others = wholes
        return sum(others, start=first).double().mul_(1 / STEPS)

    def _parts(self, names: Sequence[str], whole: Tensor, name: str) -> list[Tensor]:
        """Return what is one block's among whole numbers of several."""
        parts = zip(names, torch.split(whole, [self._sizes[each] for each in names]))
        return [part for own, part in parts if own == name]

    def hand_over(self, sums: Mapping[str, ExactSum]) -> None:
        """Add all of it to sums of the host, with one wait for the device."""
        self._form()
        came = iter(on_host([*self._whole.values(), *self._binned.values()]))
        for names in self._whole:
            whole = next(came)
            for name in names:
                for part in self._parts(names, whole, name):
                    found: ExactSum = FixedSum.received(part.numpy(), None, self._bounds[name])
                    if isinstance(sums[name], BinnedSum):
                        coarse, fine = part.numpy() >> COARSE_BITS, part.numpy() & (2**COARSE_BITS - 1)
                        found = BinnedSum(np.stack([coarse / GRIDS[0], fine / GRIDS[1]]))
                    sums[name].add_all(found, len(part))
        for name in self._binned:
            bins = next(came).numpy()
            sums[name].add_all(BinnedSum(bins), bins.shape[1])


def weighted_sum(rows: Tensor, weight: list[float]) -> Tensor:
    """Return ``Σ weight·row`` of rows ``[k, n]``, float64 [n], where the rows are."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for row, factor in zip(rows, weight):
        total.add_(row, alpha=factor)  # converted on the way, in float64
    return total


def _products(rows: Tensor, weight: list[float]) -> Iterator[Tensor]:
    """Yield ``weight·row`` in float64, of as many rows [k, n] at a time as have room."""
    column = on_device(torch.tensor(weight, dtype=torch.float64), rows.device)[:, None]
    few = max(1, AT_ONCE // (8 * rows.shape[1]))
    yield from map(torch.mul, torch.split(rows, few), torch.split(column, few))
