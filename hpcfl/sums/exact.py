"""Sums of float64 numbers that are exact, so that the order of summation cannot matter.

Addition of floating-point numbers is not associative, so a sum over ranks depends on who holds what. Here every number
is rounded to a fixed grid before it is added; sums of multiples of a grid's step are exact while they stay in range,
and exact sums have no order. The pre-rounding idea is that of Demmel & Nguyen (2013), with grids fixed in advance so
that no extra reduction is needed.

There are two ways to hold such sums. Bins are float64 numbers, one for each of two or three grids: multiples of 2^-12,
then of 2^-46, then of 2^-80, whose totals may come to 2^41 (2^7, 2^-27 for the second and third grid: room for 2^20
numbers). A `FixedSum` has the first two grids in one whole number of 64 bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from threading import Lock, local
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.types import Floats, Ints

GRIDS = (2.0**12, 2.0**46, 2.0**80)
ROUNDER = 1.5 * 2.0**52  # adding and subtracting it rounds float64 numbers below 2^51 to whole numbers
ROUNDER_BITS = np.float64(ROUNDER).view(np.int64)
STEPS = 2.0**46  # of a `FixedSum`, in 1
BIAS = ROUNDER / STEPS  # rounds to multiples of these steps
BIAS_BITS = np.float64(BIAS).view(np.int64)
SMALL = 2.0**5  # what that is done for must be smaller
COARSE_BITS = 34
COARSE = 2.0**COARSE_BITS  # steps in one of the first grid
RANGE = 2.0**62  # steps: no sum over all ranks may become larger, which leaves one bit of 64 for what is rounded up
FEW = 4096  # entries of so many clients are added up in one call
PIECE = 131_072  # entries that are worked on at a time: few calls, most of which stay in the caches


class _Room(local):
    """What a thread works in, a piece each: fresh memory for every message cost more than the arithmetic."""

    total: Tensor
    scratch: Tensor
    result: Tensor
    whole: Ints
    biases: tuple[Tensor, ...]
    _wide: Tensor

    def __getattr__(self, name: str) -> Any:
        """Make it when it is first asked for: torch need not be there before."""
        if name not in _Room.__annotations__:
            raise AttributeError(name)
        self.total, self.scratch, self.result, whole = torch.empty(4, PIECE, dtype=torch.float64)
        self.whole = whole.view(torch.int64).numpy()
        self.biases = torch.tensor([[BIAS], [-BIAS]], dtype=torch.float64).unbind()
        self._wide = torch.empty(0, dtype=torch.float64)
        return getattr(self, name)

    def wide(self, size: int) -> Tensor:
        """Return room for several pieces, which is not that of the others."""
        if len(self._wide) < size:
            self._wide = torch.empty(size, dtype=torch.float64)
        return self._wide[:size]


ROOM, MAKING = _Room(), Lock()
pool = cache(partial(ThreadPoolExecutor, thread_name_prefix="sums"))


def pieces(size: int, most: int = PIECE) -> list[slice]:
    """Return slices of at most so many entries, one after the other."""
    return [slice(start, min(size, start + most)) for start in range(0, size, most)]


def each_piece(size: int, work: Callable[[slice], None]) -> None:
    """Let `work` see to each of the `pieces`, on as many threads as torch has: NumPy and torch let others compute."""
    rest = iter(pieces(size))  # gives each piece once, whichever thread asks

    def share() -> None:
        for piece in rest:
            work(piece)

    others = min(torch.get_num_threads(), size // PIECE) - 1
    helpers = [pool(others).submit(share) for _ in range(others)]
    try:
        share()
    finally:
        for helper in helpers:
            helper.result()


def sum_small(values: Sequence[tuple[NDArray[np.floating], float]], out: Floats) -> int:
    """Write ``Σ factor·value`` over the first float32 values [n ≤ PIECE] to `out`, rounded to one grid each.

    Returns how many of them are together so small that one grid suffices, and are added up.
    """
    term, tensor, bound, count = out, torch.from_numpy(out), 0.0, 0
    scratch = ROOM.scratch[: len(out)]
    for value, factor in values:
        np.copyto(term, value)
        bound += abs(factor) * _most(value)  # which is in the caches by now
        if not bound < SMALL:  # NaN is not smaller either
            break
        _weigh(term, tensor, factor, count % 2)  # of two terms in turn what rounds them cancels
        if count:
            out += term
        else:
            term, tensor = scratch.numpy(), scratch
        count += 1
    if count % 2:
        out -= BIAS
    return count


def _weigh(term: Floats, tensor: Tensor, factor: float, turn: int) -> None:
    """Multiply float32 numbers, in a float64 `tensor`, and round them to multiples of the steps: ``± BIAS`` is left.

    `term` is the same memory.
    """
    if factor != 1.0 and factor == float(np.float32(factor)):  # products are exact: only the sum is rounded
        torch.add(ROOM.biases[turn], tensor, alpha=factor, out=tensor)
        return
    if factor != 1.0:
        term *= factor
    term += -BIAS if turn else BIAS


def _most(values: NDArray[np.floating]) -> float:
    """Return the size of the largest value; NaN among NaN."""
    return max(float(np.maximum.reduce(values)), -float(np.minimum.reduce(values)))


class ExactSum(ABC):
    """Sums of n float64 numbers each, formed exactly.

    Attributes
    ----------
    scale : float
        What numbers are multiplied by before they are added.
    """

    scale: ClassVar[float] = 1.0

    def add_rows(self, rows: Tensor, factors: list[float]) -> None:
        """Add ``Σ factor·row`` of rows [k, n] on the CPU, itself formed in float64.

        By NumPy where it can: its calls cost less than torch's, and convert what they add on the way. A single row by
        `each_piece`, since torch would do all but one pass in one thread. Others by torch where it has several threads
        or NumPy cannot: a piece for each thread at a time, which stays in the caches.
        """
        if not factors:
            return
        few = rows.shape[1] <= FEW
        # a float32 times a count of samples is exact in float64, whatever adds it
        if few and rows.dtype == torch.float32:
            terms = np.multiply(rows.numpy(), np.array(factors)[:, None] * self.scale, dtype=np.float64)
            self.add(np.add.reduce(terms, out=ROOM.total.numpy()[: rows.shape[1]]), slice(0, rows.shape[1]))
            return
        if few and self.scale == 1.0 and factors.count(1.0) == len(factors):
            self.add(np.add.accumulate(rows.numpy())[-1], slice(0, rows.shape[1]))  # row after row, as below
            return
        if len(factors) == 1:
            each_piece(rows.shape[1], partial(self._add_row, rows[0], factors[0]))
            return
        exact = rows.dtype == torch.float32 and all(factor == float(np.float32(factor)) for factor in factors)
        if exact and torch.get_num_threads() == 1:
            scaled, values = np.array(factors) * self.scale, rows.numpy()
            for piece in pieces(rows.shape[1]):
                total = ROOM.total.numpy()[: piece.stop - piece.start]
                np.einsum("k,kn->n", scaled, values[:, piece], out=total, dtype=np.float64)  # row after row
                self.add(total, piece)
            return
        for part in pieces(rows.shape[1], PIECE * torch.get_num_threads()):
            wide = ROOM.wide(part.stop - part.start).copy_(rows[0, part]).mul_(factors[0] * self.scale)
            for row, factor in zip(rows[1:], factors[1:]):
                wide.add_(row[part], alpha=factor * self.scale)  # by torch: it rounds once
            for piece in pieces(len(wide)):
                self.add(wide[piece].numpy(), slice(part.start + piece.start, part.start + piece.stop))

    def _add_row(self, row: Tensor, factor: float, piece: slice) -> None:
        total = ROOM.total[: piece.stop - piece.start].copy_(row[piece])
        self.add(total.mul_(factor * self.scale).numpy(), piece)

    @abstractmethod
    def add(self, total: Floats, piece: slice) -> None:
        """Add to a piece of the sums a scaled `total`, float64, which is used up."""

    def add_all(self, other: ExactSum, size: int) -> None:
        """Add all of other sums, of so many numbers as these."""
        each_piece(size, lambda piece: self.add_sums(other, piece, piece))

    @abstractmethod
    def add_sums(self, other: ExactSum, piece: slice, at: slice) -> None:
        """Add a piece of other sums to these sums' entries `at`, a piece of theirs; both begin with one of `pieces`."""

    @abstractmethod
    def start(self, other: ExactSum | None, piece: slice) -> None:
        """Begin with what another has at a piece, None: with nothing."""

    @abstractmethod
    def part(self, piece: slice, out: Floats) -> None:
        """Write a piece of the sums to float64 `out`, which may be the memory of this piece of a `FixedSum`."""

    def total(self, out: Floats) -> None:
        """Write the sums to float64 `out` [n]."""
        each_piece(len(out), lambda piece: self.part(piece, out[piece]))


class BinnedSum(ExactSum):
    """Sums in `bins`, float64 [2 or 3, n]."""

    def __init__(self, bins: Floats) -> None:
        self.bins = bins

    def add(self, total: Floats, piece: slice) -> None:
        part, last = ROOM.scratch.numpy()[: len(total)], len(self.bins) - 1
        for number, (grid, row) in enumerate(zip(GRIDS, self.bins[:, piece])):
            np.add(total, ROUNDER / grid, out=part)
            part -= ROUNDER / grid
            row += part
            if number < last:
                total -= part

    def add_sums(self, other: ExactSum, piece: slice, at: slice) -> None:
        assert isinstance(other, BinnedSum)
        self.bins[:, at] += other.bins[:, piece]

    def start(self, other: ExactSum | None, piece: slice) -> None:
        self.bins[:] = other.bins[:, piece] if isinstance(other, BinnedSum) else 0.0

    def part(self, piece: slice, out: Floats) -> None:
        np.add.reduce(self.bins[::-1, piece], out=out)  # smallest first


class FixedSum(ExactSum):
    """Sums of n float64 numbers, each rounded to a multiple of 2^-46: whole numbers of such steps.

    Whole numbers of 64 bits leave room for totals of ±2^16 over all ranks. What would lead beyond is split as it is for
    bins: multiples of 2^-12 are added up apart, in float64, and the value is the same to the bit.

    Attributes
    ----------
    whole : int64 [n]
    upper : float64 [n] or None
        Steps, multiples of 2^34, that are not in `whole`; None: all are.
    """

    scale = STEPS

    def __init__(self, whole: Ints, ranks: int = 1) -> None:
        self.whole, self.limit = whole, RANGE / ranks
        self.upper: Floats | None = None
        self._bounds = np.zeros(len(pieces(len(whole))))  # nothing in a piece is larger

    def add(self, total: Floats, piece: slice) -> None:
        number, most = piece.start // PIECE, max(-float(total.min()), float(total.max()))
        if not self._bounds[number] + most < self.limit:  # NaN is not smaller either
            upper = np.add(total, ROUNDER * COARSE, out=ROOM.scratch.numpy()[: len(total)])
            upper -= ROUNDER * COARSE  # multiples of 2^34
            total -= upper
            np.clip(total, -COARSE, COARSE, out=total)  # larger only where numbers have no such digits any more
            self.wide()[piece] += upper
            most = COARSE
        self._bounds[number] += most
        if most < 2.0**51:
            total += ROUNDER
            steps = total.view(np.int64)  # their last bits are the whole numbers
            steps -= ROUNDER_BITS
        else:
            steps = ROOM.scratch.numpy()[: len(total)].view(np.int64)
            np.copyto(steps, np.rint(total, out=total), casting="unsafe")
        self.whole[piece] += steps

    def add_sums(self, other: ExactSum, piece: slice, at: slice) -> None:
        if isinstance(other, BinnedSum):
            for row in other.bins[:, piece]:
                self.add(np.multiply(row, STEPS, out=ROOM.total.numpy()[: len(row)]), at)
            return
        assert isinstance(other, FixedSum)
        whole, most, number = other.whole[piece], other._bounds[piece.start // PIECE], at.start // PIECE
        if not self._bounds[number] + most < self.limit:
            self.wide()[at] += (whole >> COARSE_BITS) * COARSE
            whole, most = whole & (2**COARSE_BITS - 1), COARSE
        self._bounds[number] += most
        self.whole[at] += whole
        if other.upper is not None:
            self.wide()[at] += other.upper[piece]

    @property
    def bound(self) -> float:
        """No whole number is larger."""
        return float(self._bounds.max(initial=0.0))

    @classmethod
    def received(cls, whole: Ints, upper: Floats | None, bound: float) -> FixedSum:
        """Return sums that were formed elsewhere, see `bound`."""
        sums = cls(whole)
        sums.upper = upper
        sums._bounds[:] = bound
        return sums

    def _add_row(self, row: Tensor, factor: float, piece: slice) -> None:
        steps = self._steps(row[piece].numpy(), factor, piece.start // PIECE)
        if steps is None:
            super()._add_row(row, factor, piece)
        else:
            steps -= BIAS_BITS
            self.whole[piece] += steps

    def add_values(self, values: Sequence[tuple[NDArray[np.floating], float]], begun: Floats | None = None) -> None:
        """Add ``Σ factor·value`` of float32 values of the sums' size n ≤ PIECE, after what `sum_small` has `begun`.

        That is used up. Of two values in turn one is added and the other one's opposite subtracted, and so are their
        ``BIAS_BITS``.
        """
        biased = begun is not None
        if begun is not None:
            begun += BIAS
            self.whole += begun.view(np.int64)
            self._bounds[0] += SMALL * STEPS
        for value, factor in values:
            steps = self._steps(value, -factor if biased else factor, 0)
            if steps is None:
                super()._add_row(torch.from_numpy(value), factor, slice(0, len(value)))
                continue
            (np.subtract if biased else np.add)(self.whole, steps, out=self.whole)
            biased = not biased
        if biased:
            self.whole -= BIAS_BITS

    def _steps(self, value: NDArray[np.floating], factor: float, number: int) -> Ints | None:
        """Return ``factor·value`` in steps, ``BIAS_BITS`` added to each; None where that is too large for a piece."""
        tensor = ROOM.scratch[: len(value)]
        term = tensor.numpy()
        np.copyto(term, value)
        most = abs(factor) * _most(value)
        fits = most < SMALL and self._bounds[number] + most * STEPS < self.limit
        if not fits or (factor != 1.0 and value.dtype != np.float32):
            return None
        self._bounds[number] += most * STEPS
        _weigh(term, tensor, factor, 0)
        return term.view(np.int64)

    def wide(self) -> Floats:
        """Return `upper`, made where there was none."""
        with MAKING:  # pieces are added in several threads
            if self.upper is None:
                self.upper = np.zeros(len(self.whole))
            return self.upper

    def start(self, other: ExactSum | None, piece: slice) -> None:
        self.whole[:], self.upper, self._bounds[:] = 0, None, 0.0
        if isinstance(other, FixedSum):
            self.whole[:], self._bounds[:] = other.whole[piece], other._bounds[piece.start // PIECE]
            self.upper = None if other.upper is None else other.upper[piece].copy()

    def part(self, piece: slice, out: Floats) -> None:
        """Write a piece of the sums, each rounded once."""
        whole, low = self.whole[piece], ROOM.scratch.numpy()[: len(out)]
        if self.upper is None:
            np.copyto(low, whole)
        else:
            np.copyto(low, whole & (2**COARSE_BITS - 1))
            low += (whole >> COARSE_BITS) * COARSE + self.upper[piece]
        np.multiply(low, 1 / STEPS, out=out)
