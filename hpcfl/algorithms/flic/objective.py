"""What FLIC minimises over each of its parts (eq. 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpcfl.algorithms.flic.anchors import MEANS, Anchors
from hpcfl.algorithms.flic.parts import Parts
from hpcfl.algorithms.flic.targets import Targets
from hpcfl.base.types import State
from hpcfl.learning.batches import Batch
from hpcfl.learning.task import Task


@dataclass(frozen=True)
class Terms:
    """The terms of ``F_i = f_i + λ1 Σ_c W2²(μ_c, ν̂_c) + λ2 Σ_c 1/J Σ_j ℓ(c, g(Z_c^(j)))``, each ``[c]``.

    Attributes
    ----------
    lambda1, lambda2 : float
    draws : int
        J.
    """

    task: Task
    parts: Parts
    anchors: Anchors | Targets
    lambda1: float
    lambda2: float
    draws: int

    def embedding(self, params: State, batch: Batch) -> Tensor:
        """Return loss and distance, what the embedding learns by."""
        params = self.parts.predicting(params)
        z = self.latent(params, batch)
        loss = batch.losses(self._outputs(params, z, batch))
        return loss + self.lambda1 * self.anchors.apart(params, z, batch) if self.lambda1 else loss

    def alignment(self, params: State, batch: Batch) -> Tensor:
        """Return the distance alone."""
        return self.anchors.apart(params, self.latent(params, batch), batch)

    def above(self, params: State, batch: Batch) -> Tensor:
        """Return loss and what samples of the anchors add to it: what all above the latent space learns by."""
        params = self.parts.predicting(params)
        loss = self.task.losses(params, batch)
        return loss + self.lambda2 * self._misread(params, batch) if self.lambda2 else loss

    def anchoring(self, params: State, batch: Batch) -> Tensor:
        """Return what the anchors learn by."""
        found = torch.zeros(len(batch.x), device=batch.x.device)
        if self.lambda1:
            with torch.no_grad():
                z = self.latent(params, batch)
            found = found + self.lambda1 * self.anchors.apart(params, z, batch)
        if self.lambda2:
            found = found + self.lambda2 * self._misread(self.parts.predicting(params), batch)
        return found

    def own_classes(self, params: State, batch: Batch) -> Tensor:
        """Return the distance and the loss of all anchors' means: what the released code moves the anchors by."""
        with torch.no_grad():
            z = self.latent(params, batch)
        outputs = self._outputs(self.parts.predicting(params), params[MEANS], batch)
        labels = torch.arange(outputs.shape[1], device=outputs.device).expand(outputs.shape[:2])
        return self.anchors.apart(params, z, batch) + Batch(params[MEANS], labels, None, batch.key).losses(outputs)

    def latent(self, params: State, batch: Batch) -> Tensor:
        """Return the embedded samples, ``[c, B, k]``."""
        return self.task.forward(params, batch.x, batch.key, last=self.parts.first).flatten(2)

    def _outputs(self, params: State, z: Tensor, batch: Batch) -> Tensor:
        return self.task.forward(params, z, batch.key, first=self.parts.first)

    def _misread(self, params: State, batch: Batch) -> Tensor:
        drawn = self.anchors.drawn(params, batch.key, self.draws)
        return self.anchors.misread(self._outputs(params, drawn.points, batch), drawn)
