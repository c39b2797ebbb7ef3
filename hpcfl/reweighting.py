"""Samples that stand in for others: weights, coordinate by coordinate, under which their gradients add up to theirs.

A loss that is smooth in its data has partial derivatives ``g_i(x; θ)`` that are nearly of low rank: those of any sample
are nearly linear combinations of those of r samples, with weights that do not depend on θ (Jadbabaie, Makur & Shah,
Section III-B). Gradients are vectors here, all p coordinates of a model one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hpcfl.message import State
    from hpcfl.task import Task
    from hpcfl.visits import Batch

COPIES = 4
"""What a decomposition needs beside its matrix, and a pass beside its gradients, in their own size."""


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
        Matrices ``G^(i)`` that are held and decomposed together.
    samples : int
        Samples whose gradients are held together.
    """

    coordinates: int
    samples: int

    @classmethod
    def of(cls, nbytes: int, p: int, r: int, itemsize: int) -> Bound:
        """Share `nbytes` out: one half for matrices and their factors, one for gradients of p numbers each."""
        half = nbytes // 2
        return cls(max(1, half // (COPIES * 8 * r * r)), max(1, half // (COPIES * itemsize * p)))


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
        return cls(values, torch.nan_to_num(s[:, 0] / s[:, -1], nan=torch.inf), ~kept.all(1))


def matrices(task: Task, points: Tensor, samples: Batch, columns: slice, rows: int) -> Tensor:
    """Return ``g_i(x_j; ϑ_k)`` for some coordinates i, float64 ``[i, k, j]``: the transposes of the paper's ``G^(i)``.

    Parameters
    ----------
    points : Tensor [r, p]
        ϑ_1 … ϑ_r.
    samples : Batch
        x_1 … x_r, ``[1, r, …]``.
    columns : slice
        The coordinates i.
    rows : int
        Samples at a time.
    """
    r, like = len(points), task.initial()
    found = points.new_empty(len(range(points.shape[1])[columns]), r, r, dtype=torch.float64)
    for k, point in enumerate(points):
        for where, part in pieces(samples, rows):
            found[:, k, where] = flat(task.each_gradient(shaped(point, like), part), 1)[:, columns].T.double()
    return found


def inexact(task: Task, at: Tensor, samples: Batch, weights: Tensor, rows: int) -> Tensor:
    """Return the weighted sum of the samples' gradients, coordinate by coordinate (eq. 41), float64 ``[p]``.

    Parameters
    ----------
    at : Tensor [p]
        θ.
    weights : float64 [r, p]
        Of sample k in coordinate i.
    """
    total, like = torch.zeros_like(weights[0]), task.initial()
    for where, part in pieces(samples, rows):
        total += (flat(task.each_gradient(shaped(at, like), part), 1) * weights[where]).sum(0)
    return total


def pieces(samples: Batch, rows: int) -> Iterator[tuple[slice, Batch]]:
    """Yield so many of the samples ``[1, n, …]`` at a time, and where they are."""
    for start in range(0, samples.y.shape[1], rows):
        where = slice(start, start + rows)
        yield where, replace(samples, x=samples.x[:, where], y=samples.y[:, where])
