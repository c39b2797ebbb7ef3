"""FLIC's anchors ``μ_c = N(v_c, L_c L_cᵀ)``: who holds which, how far samples are from them, samples of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from hpcfl.algorithms.base import Batch, Ints, State, Task
from hpcfl.algorithms.flic.config import FACTORS, MEANS
from hpcfl.base.device_copy import on_device
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.rng import StepKey
from hpcfl.math import gaussian


@dataclass(frozen=True)
class Drawn:
    """Samples of anchors: points ``[c, s, k]``, the anchor of each ``[c, s]``, its weight in the loss ``[c, s]``."""

    points: Tensor
    anchors: Tensor
    weights: Tensor
    counts: list[int]
    """How many are each client's own; the rest fills up."""


@dataclass(frozen=True)
class Anchors:
    """Anchors of classes, or of groups of classes, as the clients of a chunk see them."""

    slots: Tensor
    """The anchors that each client holds samples of, Y_i, int64 [c, h]; −1 where it has fewer than others."""
    groups: Tensor
    """The anchor of each class, int64 [classes]."""
    dimension: int
    distance: Literal["closed", "samples"] = "closed"
    deviation: float = 1.0
    """σ of covariances σ²I that do not learn."""

    @cached_property
    def real(self) -> Tensor:
        """True where a slot has an anchor, bool ``[c, h]``."""
        return self.slots >= 0

    @cached_property
    def numbers(self) -> list[int]:
        """How many anchors each client holds samples of, ``[c]``."""
        return self.real.sum(1).tolist()

    def of(self, rows: Tensor) -> Anchors:
        return replace(self, slots=self.slots[rows])

    def distances(self, params: State, z: Tensor, batch: Batch) -> Tensor:
        """Return ``Σ_c W2²(μ_c, ν̂_c)`` over the classes in the batch, ``[c]``, of embedded samples z ``[c, B, k]``."""
        points, mask = gathered(z, self.groups[batch.y], batch.valid, self.slots)
        empirical = gaussian.moments(points, mask)
        means, factor = self._laws(params)
        if self.distance == "samples":
            # mean and factor of the moments of as many samples as the mask has rows
            counts = mask.sum(-1).amax(-1).tolist()
            noise = _times(self._noise(batch.key, counts, "samples of anchors").to(means.dtype), factor)
            drawn = gaussian.moments(noise, mask)
            spread = (drawn.count - self._ddof).clamp(min=1).to(noise.dtype).rsqrt()[..., None, None]
            means, factor = means + drawn.mean, (drawn.centred * spread).mT
        covariance = gaussian.bures_factor_squared(factor, empirical.centred, empirical.count, self._ddof)
        each = (means - empirical.mean).square().sum(-1) + covariance
        return torch.where(empirical.count > 0, each, 0.0).sum(1)

    def drawn(self, params: State, key: StepKey, count: int) -> Drawn:
        """Return `count` samples of each anchor that a client holds, ``Z = v + L ξ``."""
        means, factor = self._laws(params)
        noise = self._noise(key, [count] * len(self.slots)).to(means.dtype)
        points = means.unsqueeze(2) + _times(noise, factor)
        labels = self.slots.clamp(min=0).unsqueeze(2).expand(noise.shape[:3])
        weights = (self.real.to(points.dtype) / count).unsqueeze(2).expand(noise.shape[:3])
        counts = [count * number for number in self.numbers]
        return Drawn(points.flatten(1, 2), labels.flatten(1), weights.flatten(1), counts)

    def losses(self, outputs: Tensor, drawn: Drawn) -> Tensor:
        """Return ``Σ_c 1/J Σ_j ℓ(c, g(Z))``, ``[c]``, from ``outputs [c, s, classes]``; ℓ of a group's probability."""
        chances = torch.nn.functional.log_softmax(outputs, -1)
        inside = self.groups == drawn.anchors.unsqueeze(-1)
        # the chance of a group of one class is that class's, to the last bit
        each = torch.logsumexp(chances.masked_fill(~inside, -torch.inf), -1)
        return -(each * drawn.weights).sum(1)

    @property
    def _ddof(self) -> int:
        return int(self.distance == "samples")

    def _laws(self, params: State) -> tuple[Tensor, Tensor | float]:
        """Return the mean and the factor of each slot's anchor, ``[c, h, k]`` and ``[c, h, k, k]``, or σ."""
        places = torch.arange(len(self.slots), device=self.slots.device)[:, None], self.slots.clamp(min=0)
        return params[MEANS][places], params[FACTORS][places] if FACTORS in params else self.deviation

    def _noise(self, key: StepKey, counts: list[int], purpose: str = "draws of anchors") -> Tensor:
        """Return standard normal numbers ``[c, h, n, k]``, a function of seed, round, client and step.

        Each client has as many as it needs, whoever else is in the chunk; the rest is zero.
        """
        noise = np.zeros((*self.slots.shape, max(counts), self.dimension), dtype=np.float32)
        for row, rng, slots, count in zip(noise, key.generators(purpose), self.numbers, counts):
            shape = slots, count, self.dimension
            row[:slots, :count] = rng.standard_normal(shape, dtype="float32")
        return on_device(torch.from_numpy(noise), self.slots.device)


@dataclass(frozen=True)
class TargetAnchors:
    """Anchors ``μ_y = N(y a + (1 − y) b, I)`` of real labels, between two vectors that every client holds (section 3).

    No two samples need have the same label: each is a distribution by itself, and the distances are averaged.
    """

    count: int  # clients of the chunk, c
    dimension: int

    @property
    def slots(self) -> Tensor:
        """Both vectors, for every client, ``[c, 2]``."""
        return torch.arange(2).expand(self.count, 2)

    def of(self, rows: Tensor) -> TargetAnchors:
        return replace(self, count=len(rows))

    def distances(self, params: State, z: Tensor, batch: Batch) -> Tensor:
        """Return the mean of ``W2²(μ_y, δ_z) = |y a + (1 − y) b − z|² + k`` over the samples, ``[c]``."""
        each = (self._means(params, batch.y) - z).double().square().sum(-1) + self.dimension
        if batch.valid is None:
            return each.mean(1).to(z.dtype)
        return ((each * batch.valid).sum(1) / batch.valid.sum(1).clamp(min=1)).to(z.dtype)

    def drawn(self, params: State, key: StepKey, count: int) -> Drawn:
        """Return `count` samples of anchors whose targets are uniform on [0, 1]."""
        generators = key.generators("draws of anchors")
        y = torch.stack([torch.from_numpy(rng.random(count, dtype="float32")) for rng in generators])
        noise = [torch.from_numpy(rng.standard_normal((count, self.dimension), dtype="float32")) for rng in generators]
        y, xi = (on_device(part, params[MEANS].device).to(params[MEANS].dtype) for part in (y, torch.stack(noise)))
        return Drawn(self._means(params, y) + xi, y, torch.full_like(y, 1 / count), [count] * len(y))

    def losses(self, outputs: Tensor, drawn: Drawn) -> Tensor:
        """Return the mean squared error, ``[c]``, from ``outputs [c, s, 1]``."""
        return ((outputs.squeeze(-1) - drawn.anchors).square() * drawn.weights).sum(1)

    @staticmethod
    def _means(params: State, y: Tensor) -> Tensor:
        """Return ``y a + (1 − y) b``, ``[c, s, k]``."""
        a, b = params[MEANS].unbind(1)
        return y.unsqueeze(-1) * a.unsqueeze(1) + (1 - y.unsqueeze(-1)) * b.unsqueeze(1)


def held(task: Task, clients: Ints, groups: Tensor) -> Tensor:
    """Return the anchors of the clients' training labels, ascending, −1 where one has fewer, int64 ``[c, h]``."""
    anchors = [torch.unique(groups[task.samples(client).y]) for client in clients]
    return torch.nn.utils.rnn.pad_sequence(anchors, batch_first=True, padding_value=-1)


def gathered(z: Tensor, groups: Tensor, valid: Tensor | None, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the samples of each slot's anchor one after the other, ``[c, h, n, k]``, and which rows are real.

    A nuclear norm costs the cube of the number of rows: the other classes' are left out, not masked. Samples z are
    ``[c, B, k]``, their anchors `groups` int64 ``[c, B]``, which of them are real `valid` bool ``[c, B]`` (None: all).
    """
    mask = groups.unsqueeze(1) == slots.unsqueeze(2)
    if valid is not None:
        mask = mask & valid.unsqueeze(1)
    most = max(1, int(mask.sum(-1).max()))
    rows = mask.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[..., :most]
    return z[torch.arange(len(z), device=z.device)[:, None, None], rows], mask.gather(-1, rows)


def _times(noise: Tensor, factor: Tensor | float) -> Tensor:
    """Return ``L ξ`` for rows ξ."""
    return noise @ factor.mT if isinstance(factor, torch.Tensor) else noise * factor


def changes(params: State, served: State, weight: Tensor, holders: Tensor | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what clients send of their anchors: the changes of means and factors, anchor by anchor.

    `holders`, bool ``[c, C]``, says whose change of an anchor counts; None: everybody's.
    """
    message = {}
    for kind in (MEANS, FACTORS):
        for number in range(len(served[kind]) if kind in served else 0):
            counted = weight if holders is None else weight * holders[:, number]
            message[f"{kind}.{number}"] = params[kind][:, number] - served[kind][number], counted
    return message
