"""FLIC's anchors for regression: ``μ_y = N(y a + (1 − y) b, I)`` between two vectors a, b (section 3)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hpcfl.algorithms.flic.anchors import MEANS, Drawn
from hpcfl.base.rng import StepKey
from hpcfl.base.types import State
from hpcfl.learning.batches import Batch


@dataclass(frozen=True)
class Targets:
    """Anchors between two vectors, one for each target; every client holds both vectors.

    No two samples need have the same target: each is a distribution by itself, and the distances are averaged.

    Attributes
    ----------
    count : int
        Clients of the chunk, c.
    dimension : int
        k.
    """

    count: int
    dimension: int

    @property
    def slots(self) -> Tensor:
        """Both vectors, for every client, ``[c, 2]``."""
        return torch.arange(2).expand(self.count, 2)

    def of(self, rows: Tensor) -> Targets:
        """Return them for some of the clients."""
        return replace(self, count=len(rows))

    def apart(self, params: State, z: Tensor, batch: Batch) -> Tensor:
        """Return the mean of ``W2²(μ_y, δ_z) = |y a + (1 − y) b − z|² + k`` over the samples, ``[c]``."""
        each = (self._means(params, batch.y) - z).double().square().sum(-1) + self.dimension
        if batch.valid is None:
            return each.mean(1).to(z.dtype)
        return ((each * batch.valid).sum(1) / batch.valid.sum(1).clamp(min=1)).to(z.dtype)

    def drawn(self, params: State, key: StepKey, count: int) -> Drawn:
        """Return `count` samples of anchors whose targets are uniform on [0, 1]."""
        found = key.generators("draws of anchors")
        y = torch.stack([torch.from_numpy(rng.random(count, dtype="float32")) for rng in found])
        noise = [torch.from_numpy(rng.standard_normal((count, self.dimension), dtype="float32")) for rng in found]
        y, xi = y.to(params[MEANS].device), torch.stack(noise).to(params[MEANS].device)
        return Drawn(self._means(params, y) + xi, y, torch.full_like(y, 1 / count))

    def misread(self, outputs: Tensor, drawn: Drawn) -> Tensor:
        """Return the mean squared error, ``[c]``, from ``outputs [c, s, 1]``."""
        return ((outputs.squeeze(-1) - drawn.anchors).square() * drawn.weights).sum(1)

    @staticmethod
    def _means(params: State, y: Tensor) -> Tensor:
        """Return ``y a + (1 − y) b``, ``[c, s, k]``."""
        a, b = params[MEANS].unbind(1)
        return y.unsqueeze(-1) * a.unsqueeze(1) + (1 - y.unsqueeze(-1)) * b.unsqueeze(1)
