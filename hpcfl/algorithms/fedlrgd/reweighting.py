"""Samples that stand in for others: weights, coordinate by coordinate, under which their gradients add up to theirs.

A loss that is smooth in its data has partial derivatives ``g_i(x; θ)`` that are nearly of low rank: those of any sample
are nearly linear combinations of those of r samples, with weights that do not depend on θ (Jadbabaie, Makur & Shah,
Section III-B). Gradients are vectors here, all p coordinates of a model one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hpcfl.base.types import State
    from hpcfl.learning.batches import Batch
    from hpcfl.learning.task import Task

COPIES = 4
"""What a pass needs with its gradients, in their own size."""
PARTS = 16
"""In so many parts are the matrices decomposed that are held."""
FACTORS = 8
"""What a decomposition needs beside its part, in the part's own size."""


def flat(state: State, lead: int = 0) -> Tensor:
    """Return all coordinates one after the other, ``[…, p]``, behind `lead` axes of another meaning."""
    return torch.cat([value.flatten(lead) for value in state.values()], lead)


def shaped(vector: Tensor, like: State) -> State:
    """Return coordinates ``[…, p]`` as named tensors ``{name: […, *shape]}`` of the shapes of `like`."""
    parts = torch.split(vector, [value.numel() for value in like.values()], -1)
    return {name: part.reshape(*part.shape[:-1], *like[name].shape) for name, part in zip(like, parts)}


@dataclass(frozen=True)
class Bound:
    """How much is worked on at a time.

    Attributes
    ----------
    coordinates : int
        Matrices ``G^(i)`` that are held together.
    samples : int
        Samples whose gradients are held together.
    """

    coordinates: int
    samples: int

    @classmethod
    def of(cls, nbytes: int, p: int, r: int, itemsize: int) -> Bound:
        """Share `nbytes` out: up to a half for gradients of p numbers each, the rest for matrices and their factors."""
        each = COPIES * itemsize * p
        samples = min(r, max(1, nbytes // (2 * each)))
        matrices = (nbytes - samples * each) * PARTS // (PARTS + FACTORS)
        return cls(max(1, matrices // (8 * r * r)), samples)


@dataclass(frozen=True)
class Inverse:
    """Pseudo-inverses of square matrices that may be singular.

    Attributes
    ----------
    values : float64 [q, r, r]
    condition : float64 [q]
        Largest over smallest singular value; inf where that is 0.
    cut : bool [q]
        Whether singular values were left out.
    """

    values: Tensor
    condition: Tensor
    cut: Tensor

    @classmethod
    def of(cls, matrices: Tensor, truncation: float, damping: float) -> Inverse:
        """Invert by singular values s: ``s / (s² + (damping·s_1)²)``, those of at most ``truncation·s_1`` left out.

        Parameters
        ----------
        matrices : float64 [q, r, r]
        """
        left, s, right = torch.linalg.svd(matrices)
        top = s[:, :1]
        kept = s > truncation * top
        factors = torch.where(kept, s / (s.square() + (damping * top).square()), 0.0)
        values = right.mT @ (factors.unsqueeze(2) * left.mT)
        return cls(values, torch.where(s[:, -1] > 0, s[:, 0] / s[:, -1], torch.inf), ~kept.all(1))


@dataclass(frozen=True)
class Seen:
    """What is recorded of the inverses of all coordinates.

    Attributes
    ----------
    condition, worst_condition : float
        Median and largest condition number.
    truncated : int
        Coordinates in which singular values were left out.
    """

    condition: float
    worst_condition: float
    truncated: int

    @classmethod
    def of(cls, parts: Sequence[tuple[Tensor, Tensor]]) -> Seen:
        """Sum up condition numbers and where values were cut, some coordinates at a time."""
        condition = torch.cat([part for part, _ in parts])
        cut = sum(int(part.sum()) for _, part in parts)
        return cls(float(condition.median()), float(condition.max()), cut)


def solved(inverse: Tensor, sums: Tensor) -> Tensor:
    """Return the weights under which samples add up to `sums`, both ``[…, r, p]``; `inverse` is ``[p, r, r]``."""
    return torch.einsum("ijk,...ki->...ji", inverse, sums)


@dataclass(frozen=True)
class StandIns:
    """The samples that stand in for all others, r of those that the server holds.

    Attributes
    ----------
    task : Task
        Whose gradients are re-weighted.
    held : Batch
        All samples of the server, ``[1, n, …]``.
    rank : int
        How many of them stand in, the first ones, r.
    bound : Bound
    """

    task: Task
    held: Batch
    rank: int
    bound: Bound

    @property
    def standing(self) -> Batch:
        """The samples that stand in, ``[1, r, …]``."""
        return self._some(slice(0, self.rank))

    def inverses(self, points: Tensor, truncation: float, damping: float) -> Iterator[tuple[slice, Inverse]]:
        """Yield the pseudo-inverses of ``(G^(i))ᵀ`` for some coordinates i at a time, within the bound.

        Parameters
        ----------
        points : Tensor [r, p]
            ϑ_1 … ϑ_r.
        """
        most = self.bound.coordinates
        for start in range(0, points.shape[1], most):
            held = self.matrices(points, slice(start, start + most))
            for part in torch.split(held, max(1, most // PARTS)):
                yield slice(start, start + len(part)), Inverse.of(part, truncation, damping)
                start += len(part)
            del held, part

    def solve(self, points: Tensor, sums: Tensor, truncation: float, damping: float) -> Seen:
        """Replace `sums`, float64 ``[r, p]``, by the weights under which the samples add up to them, in place."""
        seen = []
        for columns, inverse in self.inverses(points, truncation, damping):
            sums[:, columns] = solved(inverse.values, sums[:, columns])
            seen.append((inverse.condition, inverse.cut))
        return Seen.of(seen)

    def matrices(self, points: Tensor, columns: slice) -> Tensor:
        """Return ``g_i(x_j; ϑ_k)`` for some coordinates i, float64 ``[i, k, j]``: the transposes of G^(i)."""
        like = self.task.initial()
        found = points.new_empty(len(range(points.shape[1])[columns]), len(points), self.rank, dtype=torch.float64)
        for k, point in enumerate(points):
            for where, part in self._pieces():
                gradients = self.task.per_sample_gradients(shaped(point, like), part)
                found[:, k, where] = flat(gradients, 1)[:, columns].T.double()
        return found

    def gradient(self, at: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the samples' gradients at θ, coordinate by coordinate (eq. 41), float64 ``[p]``.

        Parameters
        ----------
        at : Tensor [p]
            θ.
        weights : float64 [r, p]
            Of sample k in coordinate i.
        """
        total, theta = torch.zeros_like(weights[0]), shaped(at, self.task.initial())
        for where, part in self._pieces():
            total += (flat(self.task.per_sample_gradients(theta, part), 1) * weights[where]).sum(0)
        return total

    def rest(self, points: Tensor) -> Tensor:
        """Return the sums of the gradients of the server's other samples at each ϑ, float64 ``[r, p]``."""
        count = self.held.y.shape[1] - self.rank
        if not count:
            return torch.zeros_like(points, dtype=torch.float64)
        like, rest = self.task.initial(), self._some(slice(self.rank, None))
        found = [flat(self.task.gradients(shaped(point[None], like), rest)[0], 1) for point in points]
        return count * torch.cat(found).double()

    def _pieces(self) -> Iterator[tuple[slice, Batch]]:
        """Yield as many of the samples at a time as the bound allows, and where they are."""
        for start in range(0, self.rank, self.bound.samples):
            where = slice(start, min(start + self.bound.samples, self.rank))
            yield where, self._some(where)

    def _some(self, where: slice) -> Batch:
        return replace(self.held, x=self.held.x[:, where], y=self.held.y[:, where])
