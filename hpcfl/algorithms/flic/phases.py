"""The phases of a visit with FLIC, for a chunk of clients (Algorithms 1 and S2)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcfl.algorithms.flic.anchors import FACTORS, MEANS
from hpcfl.algorithms.flic.objective import Terms
from hpcfl.base.types import State
from hpcfl.learning.batches import Visits
from hpcfl.learning.optim import FINE_TUNING, Adam, Optimizer, ParamGroup, Sgd, train
from hpcfl.learning.task import Task

if TYPE_CHECKING:
    from hpcfl.algorithms.flic.algorithm import Flic

SHARED, LOCAL, ANCHORING, PRETRAINING, REALIGNING = range(5)
"""The phases of a visit: each has batches and random numbers of its own. Those before a test begin at FINE_TUNING."""


@dataclass(frozen=True)
class Learner:
    """A chunk's parameters and how they learn, in place.

    Attributes
    ----------
    params : State
        φ, α, β, the anchors as they were served, each with a leading client axis.
    after : int
        What is added to the number of a phase: FINE_TUNING before a test.
    """

    keys: Flic
    task: Task
    visits: Visits
    terms: Terms
    params: State
    after: int = 0

    def pretrain(self) -> None:
        """Align embeddings that never learned to the first anchors, which are random."""
        keys, flags = self.keys, self.params.get("pretrained")
        if flags is None or not keys.pretrain:
            return
        rows = torch.nonzero(flags.flatten() == 0).flatten()
        if len(rows):
            first = keys.anchored(self.task)
            part = {name: value[rows] for name, value in self.params.items()}
            part |= {name: value.expand(len(rows), *value.shape) for name, value in first.items()}
            own = self._of(rows, part)
            own._align(keys.pretrain, keys.pretrain_batch, PRETRAINING)
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
        entry = self.task.layers[self.terms.parts.first].tensors if self.terms.lambda2 else ()
        # samples of the anchors enter at the latent space: from there on nothing is computed once and for all
        upper = self.task.freeze_below(self.params, self.visits, {*names, *above, *entry})
        terms = replace(self.terms, task=upper)
        batches = upper.batches(self.visits, self.keys.batch, epochs, phase=self.after + LOCAL)
        turns = [ParamGroup(names, self.optimiser(), terms.embedding), ParamGroup(above, self.classifier, terms.above)]
        return train(upper, self.params, batches, turns)

    def shared(self, names: Collection[str]) -> Tensor:
        """Let the shared part learn; return the mean loss, ``[c]``."""
        batches = self.task.batches(self.visits, self.keys.batch, self.keys.shared_epochs, phase=self.after + SHARED)
        return train(self.task, self.params, batches, [ParamGroup(names, self.classifier, self.terms.above)])

    def anchors(self) -> None:
        """Let the anchors take one step, on all that a client has."""
        objective = self.terms.own_classes if self.keys.anchor_loss == "means" else self.terms.anchoring
        if objective == self.terms.anchoring and not (self.terms.lambda1 or self.terms.lambda2):
            return
        names = [MEANS, *([FACTORS] if self.keys.factors else [])]
        batches = self.task.batches(self.visits, 0, steps=1, phase=self.after + ANCHORING)
        train(self.task, self.params, batches, [ParamGroup(names, self.optimiser(self.keys.anchor_lr), objective)])

    def optimiser(self, lr: float | None = None, decay: float = 0.0) -> Optimizer:
        """Return a fresh optimiser: nothing of it outlasts a phase."""
        kind = Adam if self.keys.optimizer == "adam" else Sgd
        return kind(lr or self.keys.lr, decay=decay)

    @property
    def classifier(self) -> Optimizer:
        """The optimiser of all that is above the latent space."""
        return self.optimiser(decay=self.keys.weight_decay)

    def _align(self, epochs: int, batch: int, phase: int) -> None:
        batches = self.task.batches(self.visits, batch, epochs, phase=self.after + phase)
        turn = ParamGroup(self.terms.parts.embedding, self.optimiser(), self.terms.alignment)
        train(self.task, self.params, batches, [turn])

    def _of(self, rows: Tensor, params: State) -> Learner:
        """Return the learner of some of the clients."""
        picked = rows.cpu().numpy()
        visits = replace(self.visits, clients=self.visits.clients[picked])
        terms = replace(self.terms, anchors=self.terms.anchors.of(rows))
        return replace(self, visits=visits, terms=terms, params=params)


def tuning(learner: Learner) -> Learner:
    """Return the learner of what comes before a test."""
    return replace(learner, after=FINE_TUNING)
