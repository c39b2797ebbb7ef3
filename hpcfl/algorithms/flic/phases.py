"""The phases of a visit with FLIC, for a chunk of clients (Algorithms 1 and S2)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hpcfl.algorithms.flic.config import FACTORS, MEANS, FlicKeys
from hpcfl.algorithms.flic.objective import Terms
from hpcfl.base.types import State
from hpcfl.learning.batches import Visits
from hpcfl.learning.optim import Adam, Optimizer, ParamGroup, Sgd, train
from hpcfl.learning.task import Task

SHARED, LOCAL, ANCHORING, PRETRAINING, REALIGNING = range(5)
"""The phases of a visit: each has batches and random numbers of its own."""


@dataclass(frozen=True)
class Learner:
    """A chunk's parameters and how they learn, in place: φ, α, β and the anchors, with a leading client axis."""

    keys: FlicKeys
    task: Task
    visits: Visits
    terms: Terms
    params: State
    offset: int = 0
    """Added to the number of a phase: FINE_TUNING before a test."""

    def pretrain(self, first: State) -> None:
        """Align embeddings that never learned to the first anchors."""
        flags = self.params.get("pretrained")
        if flags is None or not self.keys.pretrain:
            return
        rows = torch.nonzero(flags.flatten() == 0).flatten()
        if len(rows):
            part = {name: value[rows] for name, value in self.params.items()}
            part |= {name: value.expand(len(rows), *value.shape) for name, value in first.items()}
            self._of(rows, part)._align(self.keys.pretrain, self.keys.pretrain_batch, PRETRAINING)
            for name in self.terms.parts.embedding:
                self.params[name][rows] = part[name]
            flags[rows] = 1.0

    def realign(self) -> None:
        """Align the embeddings to the anchors as they are now."""
        if self.keys.realign:
            self._align(self.keys.realign, self.keys.batch, REALIGNING)

    def local(self, epochs: int, above: Collection[str], embedding: bool = True) -> Tensor:
        """Let embedding and what is above it take steps in turns; return the mean loss, ``[c]``."""
        names = self.terms.parts.embedding if embedding else ()
        entry = self.task.layers[self.terms.parts.above].tensors if self.terms.lambda2 else ()
        # samples of the anchors enter at the latent space: from there on nothing is computed once and for all
        upper = self.task.freeze_below(self.params, self.visits, {*names, *above, *entry})
        terms = replace(self.terms, task=upper)
        batches = upper.batches(self.visits, self.keys.batch, epochs, phase=self.offset + LOCAL)
        groups = [ParamGroup(names, self.optimiser(), terms.embedding), ParamGroup(above, self.classifier, terms.above)]
        return train(upper, self.params, batches, groups)

    def shared(self, names: Collection[str]) -> Tensor:
        """Let the shared part learn; return the mean loss, ``[c]``."""
        batches = self.task.batches(self.visits, self.keys.batch, epochs=1, phase=self.offset + SHARED)
        return train(self.task, self.params, batches, [ParamGroup(names, self.classifier, self.terms.above)])

    def anchors(self) -> None:
        """Let the anchors take one step, on all that a client has."""
        objective = self.terms.released if self.keys.anchor_loss == "means" else self.terms.anchoring
        if objective == self.terms.anchoring and not (self.terms.lambda1 or self.terms.lambda2):
            return
        names = [MEANS, *([FACTORS] if self.keys.covariances != "fixed" else [])]
        batches = self.task.batches(self.visits, 0, steps=1, phase=self.offset + ANCHORING)
        train(self.task, self.params, batches, [ParamGroup(names, self.optimiser(self.keys.anchor_lr), objective)])

    def optimiser(self, lr: float | None = None, decay: float = 0.0) -> Optimizer:
        """Return a fresh optimiser: nothing of it outlasts a phase."""
        kind = Adam if self.keys.optimizer == "adam" else Sgd
        return kind(lr or self.keys.lr, decay=decay)

    @property
    def classifier(self) -> Optimizer:
        return self.optimiser(decay=self.keys.weight_decay)

    def _align(self, epochs: int, batch: int, phase: int) -> None:
        batches = self.task.batches(self.visits, batch, epochs, phase=self.offset + phase)
        group = ParamGroup(self.terms.parts.embedding, self.optimiser(), self.terms.alignment)
        train(self.task, self.params, batches, [group])

    def _of(self, rows: Tensor, params: State) -> Learner:
        visits = replace(self.visits, clients=self.visits.clients[rows.cpu().numpy()])
        terms = replace(self.terms, anchors=self.terms.anchors.of(rows))
        return replace(self, visits=visits, terms=terms, params=params)
