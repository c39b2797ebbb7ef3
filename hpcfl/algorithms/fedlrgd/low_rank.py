"""Low-rank interpolation of gradients: weights, coordinate by coordinate, under which those of r samples add up to all.

A loss that is smooth in its data has partial derivatives ``g_i(x; θ)`` that are nearly of low rank: those of any sample
are nearly linear combinations of those of r surrogate samples, with weights that do not depend on θ (Jadbabaie, Makur &
Shah, Section III-B). Gradients are vectors here, all p coordinates of a model one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hpcfl.algorithms.base import Batch, State, Task
from hpcfl.base.lazy import Tensor, torch
from hpcfl.learning import derivatives

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
    """How much is held at a time: matrices ``G^(i)``, one per coordinate, and samples' gradients."""

    coordinates: int
    samples: int

    @classmethod
    def of(cls, nbytes: int, p: int, r: int, itemsize: int) -> Bound:
        """Share `nbytes` out: up to a half for gradients of p numbers each, the rest for matrices and their factors."""
        each = COPIES * itemsize * p
        samples = min(r, max(1, nbytes // (2 * each)))
        matrices = (nbytes - samples * each) * PARTS // (PARTS + FACTORS)
        return cls(max(1, matrices // (8 * r * r)), samples)


Known = tuple[Tensor, Tensor]
"""Of q matrices: largest over smallest singular value, inf where that is 0; True where singular values were left out.
"""


def inverted(matrices: Tensor, truncation: float, damping: float) -> tuple[Tensor, Known]:
    """Return pseudo-inverses of ``[q, r, r]``, which may be singular, and what is known of them.

    By singular values ``s / (s² + (damping·s_1)²)``, without those ≤ ``truncation·s_1``.
    """
    left, s, right = torch.linalg.svd(matrices)
    top = s[:, :1]
    kept = s > truncation * top
    factors = torch.where(kept, s / (s.square() + (damping * top).square()), 0.0)
    values = right.mT @ (factors.unsqueeze(2) * left.mT)
    return values, (torch.where(s[:, -1] > 0, s[:, 0] / s[:, -1], torch.inf), ~kept.all(1))


def conditioning(parts: Sequence[Known]) -> dict[str, float]:
    """Return what is recorded of all coordinates' inverses, from what is known of some at a time."""
    condition, cut = (torch.cat(part) for part in zip(*parts))
    return {
        "condition": float(condition.median()),
        "worst_condition": float(condition.max()),
        "truncated": float(cut.sum()),
    }


def solved(inverse: Tensor, sums: Tensor) -> Tensor:
    """Return the weights under which samples add up to `sums`, both ``[…, r, p]``; `inverse` is ``[p, r, r]``."""
    return torch.einsum("ijk,...ki->...ji", inverse, sums)


@dataclass(frozen=True)
class Surrogates:
    """The surrogate samples: the first r = `rank` of those that the server holds, ``[1, n, …]``."""

    task: Task
    held: Batch
    rank: int
    bound: Bound

    @property
    def samples(self) -> Batch:
        """The surrogate samples, ``[1, r, …]``."""
        return self._some(slice(0, self.rank))

    def inverses(self, points: Tensor, truncation: float, damping: float) -> Iterator[tuple[slice, Tensor, Known]]:
        """Yield the pseudo-inverses of ``(G^(i))ᵀ`` at ϑ_1 … ϑ_r ``[r, p]``, some coordinates i at a time."""
        most = self.bound.coordinates
        for start in range(0, points.shape[1], most):
            held = self.matrices(points, slice(start, start + most))
            for part in torch.split(held, max(1, most // PARTS)):
                yield slice(start, start + len(part)), *inverted(part, truncation, damping)
                start += len(part)
            del held, part

    def solve(self, points: Tensor, sums: Tensor, truncation: float, damping: float) -> dict[str, float]:
        """Replace `sums`, float64 ``[r, p]``, by the weights under which the samples add up to them, in place."""
        parts = []
        for columns, inverse, known in self.inverses(points, truncation, damping):
            sums[:, columns] = solved(inverse, sums[:, columns])
            parts.append(known)
        return conditioning(parts)

    def matrices(self, points: Tensor, columns: slice) -> Tensor:
        """Return ``g_i(x_j; ϑ_k)`` for some coordinates i, float64 ``[i, k, j]``: the transposes of G^(i)."""
        like = self.task.initial()
        matrices = points.new_empty(len(range(points.shape[1])[columns]), len(points), self.rank, dtype=torch.float64)
        for k, point in enumerate(points):
            for where, part in self._pieces():
                gradients = derivatives.per_sample_gradients(self.task, shaped(point, like), part)
                matrices[:, k, where] = flat(gradients, 1)[:, columns].T.double()
        return matrices

    def gradient(self, at: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of the samples' gradients at θ ``[p]`` by `weights` float64 ``[r, p]`` (eq. 41)."""
        total, theta = torch.zeros_like(weights[0]), shaped(at, self.task.initial())
        for where, part in self._pieces():
            total += (flat(derivatives.per_sample_gradients(self.task, theta, part), 1) * weights[where]).sum(0)
        return total

    def rest(self, points: Tensor) -> Tensor:
        """Return the sums of the gradients of the server's other samples at each ϑ, float64 ``[r, p]``."""
        count = self.held.y.shape[1] - self.rank
        if not count:
            return torch.zeros_like(points, dtype=torch.float64)
        like, rest = self.task.initial(), self._some(slice(self.rank, None))
        gradients = [flat(self.task.gradients(shaped(point[None], like), rest)[0], 1) for point in points]
        return count * torch.cat(gradients).double()

    def _pieces(self) -> Iterator[tuple[slice, Batch]]:
        for start in range(0, self.rank, self.bound.samples):
            where = slice(start, min(start + self.bound.samples, self.rank))
            yield where, self._some(where)

    def _some(self, where: slice) -> Batch:
        return replace(self.held, x=self.held.x[:, where], y=self.held.y[:, where])
