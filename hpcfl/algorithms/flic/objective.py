"""Which tensors are whose, and what FLIC minimises over each of its parts (section 3, eq. 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcfl.algorithms.base import Batch, State, Task
from hpcfl.algorithms.flic.anchors import Anchors, TargetAnchors
from hpcfl.algorithms.flic.config import MEANS
from hpcfl.base.errors import UsageError
from hpcfl.base.lazy import Tensor, torch

OWN = "own."
"""What begins the names of personal copies of shared tensors (L2GD)."""


@dataclass(frozen=True)
class Parts:
    """The names of a model's tensors by whose they are: φ_i (personal), α, β_i."""

    embedding: tuple[str, ...]
    shared: tuple[str, ...]
    personal: tuple[str, ...]
    above: int
    """Number of the first layer that sees the latent space."""
    dimension: int
    """Of the latent space, k."""
    entry: tuple[str, ...]
    """The tensors of that first layer."""
    mix: float | None = None
    """ω of ``θ_i = ω α + (1 − ω) β_i`` where α and β_i are the same layers."""

    @classmethod
    def of(cls, task: Task, inside: Literal["fedrep", "fedavg-ft", "l2gd"], mix: float) -> Parts:
        if (latent := task.latent) is None:
            raise UsageError(
                "task.embedding: expected the submodule that embeds, since the model is no chain of layers; got none"
            )
        if task.whole is not None:
            inner = f"{task.whole.embeds}."
            below = [names for names in task.whole.groups if names[0].startswith(inner)]
            rest = [names for names in task.whole.groups if not names[0].startswith(inner)]
        else:
            groups = [tuple(layer.tensors) for layer in task.layers]
            below, rest = groups[: latent[0]], groups[latent[0] :]
        embedding, hidden = (tuple(name for names in part for name in names) for part in (below, rest[:-1]))
        where = (*latent, rest[0])
        if inside == "fedrep":
            return cls(embedding, hidden, rest[-1], *where)
        if inside == "fedavg-ft":
            return cls(embedding, hidden + rest[-1], (), *where)
        return cls(embedding, hidden + rest[-1], tuple(OWN + name for name in hidden + rest[-1]), *where, mix)

    def mixed(self, params: State) -> State:
        """Return the parameters with those in place that the model predicts with."""
        if self.mix is None:
            return params
        return params | {name: self.mix * params[name] + (1 - self.mix) * params[OWN + name] for name in self.shared}

    def first(self, initial: State) -> State:
        """Return a client's first φ and β from the initial values of its model."""
        return {name: initial[name.removeprefix(OWN)].clone() for name in (*self.embedding, *self.personal)}


@dataclass(frozen=True)
class Terms:
    """The terms of ``F_i = f_i + λ1 Σ_c W2²(μ_c, ν̂_c) + λ2 Σ_c 1/J Σ_j ℓ(c, g(Z_c^(j)))``, each ``[c]``."""

    task: Task
    parts: Parts
    anchors: Anchors | TargetAnchors
    lambda1: float
    lambda2: float
    draws: int  # J

    def embedding(self, params: State, batch: Batch) -> Tensor:
        """Return loss and distance, what the embedding learns by."""
        params = self.parts.mixed(params)
        z = self.latent(params, batch)
        loss = self.task.loss.mean(self._outputs(params, z, batch), batch)
        return loss + self.lambda1 * self.anchors.distances(params, z, batch) if self.lambda1 else loss

    def alignment(self, params: State, batch: Batch) -> Tensor:
        """Return the distance alone."""
        return self.anchors.distances(params, self.latent(params, batch), batch)

    def joint(self, params: State, batch: Batch) -> Tensor:
        """Return loss and both terms, what embedding and classifier learn by where they step together."""
        return self._with_samples(self.embedding(params, batch), self.parts.mixed(params), batch)

    def above(self, params: State, batch: Batch) -> Tensor:
        """Return loss and what samples of the anchors add to it: what all above the latent space learns by."""
        params = self.parts.mixed(params)
        return self._with_samples(self.task.losses(params, batch), params, batch)

    def anchoring(self, params: State, batch: Batch) -> Tensor:
        """Return what the anchors learn by."""
        losses = torch.zeros(len(batch.x), device=batch.x.device)
        if self.lambda1:
            with torch.no_grad():
                z = self.latent(params, batch)
            losses = losses + self.lambda1 * self.anchors.distances(params, z, batch)
        return self._with_samples(losses, self.parts.mixed(params), batch)

    def released(self, params: State, batch: Batch) -> Tensor:
        """Return the distance and the loss of all anchors' means: what the released code moves the anchors by."""
        with torch.no_grad():
            z = self.latent(params, batch)
        outputs = self._outputs(self.parts.mixed(params), params[MEANS], batch)
        self.task.passed(batch, [outputs.shape[1]] * len(outputs))
        labels = torch.arange(outputs.shape[1], device=outputs.device).expand(outputs.shape[:2])
        means = Batch(params[MEANS], labels, None, batch.key)
        return self.anchors.distances(params, z, batch) + self.task.loss.mean(outputs, means)

    def latent(self, params: State, batch: Batch) -> Tensor:
        """Return the embedded samples, ``[c, B, k]``."""
        return self.task.forward(params, batch.x, batch.key, last=self.parts.above).flatten(2)

    def _outputs(self, params: State, z: Tensor, batch: Batch) -> Tensor:
        return self.task.forward(params, z, batch.key, first=self.parts.above)

    def _with_samples(self, losses: Tensor, params: State, batch: Batch) -> Tensor:
        """Return losses with what samples of the anchors add to them."""
        if not self.lambda2:
            return losses
        drawn = self.anchors.drawn(params, batch.key, self.draws)
        self.task.passed(batch, drawn.counts)
        return losses + self.lambda2 * self.anchors.losses(self._outputs(params, drawn.points, batch), drawn)
