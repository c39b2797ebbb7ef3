"""The phases of a visit with FLIC, for a chunk of clients (Algorithms 1 and S2).

Which tensors are whose, and what is minimised over each of the parts (section 3, eq. 4).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from hpcfl.algorithms.base import Batch, State, Task, Visits
from hpcfl.algorithms.flic.anchors import Anchors, TargetAnchors
from hpcfl.algorithms.flic.config import FACTORS, MEANS, FlicKeys
from hpcfl.base.errors import refusal
from hpcfl.base.lazy import Tensor, torch
from hpcfl.learning.batches import PHASE_STEPS, Batches
from hpcfl.learning.optim import Adam, Optimizer, ParamGroup, Sgd, train

SHARED, LOCAL, ANCHORING, PRETRAINING, REALIGNING, REALIGNING_AGAIN, MOVING = range(7)
"""The phases of a visit: each has batches and random numbers of its own, each step on one batch from `MOVING` on."""
MEMORY = "memory "
"""What begins the names of what a client keeps of the anchors' optimiser."""
OWN = "own."
"""What begins the names of personal copies of shared tensors (L2GD)."""
_KINDS: dict[str, type[Optimizer]] = {"adam": Adam, "sgd": Sgd}


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
            raise refusal("task.embedding", "the submodule that embeds, since the model is no chain of layers", None)
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
            visits = replace(self.visits, clients=self.visits.clients[rows.cpu().numpy()])
            terms = replace(self.terms, anchors=self.terms.anchors.of(rows))
            some = replace(self, visits=visits, terms=terms, params=part)
            some._align(self.keys.pretrain, self.keys.pretrain_batch, PRETRAINING)
            for name in self.terms.parts.embedding:
                self.params[name][rows] = part[name]
            flags[rows] = 1.0

    def realign(self, phase: int = REALIGNING) -> None:
        """Align the embeddings to the anchors as they are now."""
        if self.keys.realign:
            self._align(self.keys.realign, self.keys.batch, phase)

    def local(self, epochs: int, above: Collection[str], embedding: bool = True, moving: bool = False) -> Tensor:
        """Let embedding and what is above it learn, and the anchors if `moving`; return the mean loss, ``[c]``."""
        names = self.terms.parts.embedding if embedding else ()
        entry = self.terms.parts.entry if self.terms.lambda2 else ()
        # samples of the anchors enter at the latent space: from there on nothing is computed once and for all
        upper = self.task.freeze_below(self.params, self.visits, {*names, *above, *entry})
        terms = replace(self.terms, task=upper)
        batches = upper.batches(self.visits, self.keys.batch, epochs, phase=self.offset + LOCAL)
        steps = self._anchored(batches, terms) if moving else batches
        groups = [ParamGroup(names, self.optimiser(), terms.embedding), ParamGroup(above, self.classifier, terms.above)]
        if self.keys.local_step == "joint":
            both = replace(self.classifier, decayed=frozenset(above))
            groups = [ParamGroup((*names, *above), both, terms.joint if names else terms.above)]
        return train(upper, self.params, steps, groups)

    def shared(self, names: Collection[str]) -> Tensor:
        """Let the shared part learn, and the anchors; return the mean loss, ``[c]``."""
        batches = self.task.batches(self.visits, self.keys.batch, epochs=1, phase=self.offset + SHARED)
        group = ParamGroup(names, self.classifier, self.terms.above)
        return train(self.task, self.params, self._anchored(batches, self.terms), [group])

    def anchors(self) -> None:
        """Let the anchors take the steps of a visit's end; from now on they are where they have come to."""
        if self.keys.anchor_every == "visit":
            steps = self.keys.anchor_steps
            for batch in self.task.batches(self.visits, 0, steps=steps, phase=self.offset + ANCHORING):
                self._move(batch, self.terms)
        self.params.update(self._moving)

    def _anchored(self, batches: Batches, terms: Terms) -> Iterator[Batch]:
        """Let the anchors take their steps on each batch, after what is done with it."""
        for batch in batches.padded():
            yield batch
            for number in range(self.keys.anchor_steps if self.keys.anchor_every == "batch" else 0):
                # the step on the batch has drawn by its key; theirs differ from all of SHARED and LOCAL, 0 and 1
                key = batch.key._replace(step=batch.key.step + PHASE_STEPS * (MOVING + 2 * number))
                self._move(replace(batch, key=key), terms)

    def _move(self, batch: Batch, terms: Terms) -> None:
        """Let the anchors take a step on a batch."""
        if self._moving:
            objective = terms.released if self.keys.anchor_loss == "means" else terms.anchoring
            params = self.params | self._moving
            self._mover.step(terms.task, params, self._moving, self._memory, batch, objective)

    @cached_property
    def _moving(self) -> State:
        """Copies of the anchors that learn: until the visit ends all else sees them as they were served."""
        if self.keys.anchor_loss == "held" and not (self.terms.lambda1 or self.terms.lambda2):
            return {}
        return {name: self.params[name].clone() for name in (MEANS, FACTORS) if name in self.params}

    @cached_property
    def _memory(self) -> State:
        """What the anchors' optimiser remembers: a client's own, in `params`, where it outlasts the visit."""
        kept = {name.removeprefix(MEMORY): value for name, value in self.params.items() if name.startswith(MEMORY)}
        return kept | {"steps": kept["steps"].squeeze(1)} if kept else self._mover.init(self._moving)

    @property
    def _mover(self) -> Optimizer:
        return _KINDS[self.keys.moves_by](self.keys.anchor_lr or self.keys.lr)

    def optimiser(self, decay: float = 0.0) -> Optimizer:
        """Return a fresh optimiser: nothing of it outlasts a phase."""
        return _KINDS[self.keys.optimizer](self.keys.lr, decay=decay)

    @property
    def classifier(self) -> Optimizer:
        return self.optimiser(decay=self.keys.weight_decay)

    def _align(self, epochs: int, batch: int, phase: int) -> None:
        batches = self.task.batches(self.visits, batch, epochs, phase=self.offset + phase)
        group = ParamGroup(self.terms.parts.embedding, self.optimiser(), self.terms.alignment)
        train(self.task, self.params, batches, [group])


def first_memory(anchors: State) -> State:
    """Return what a client remembers of the anchors' Adam before its first visit."""
    found = Adam(1.0).init({name: value.unsqueeze(0) for name, value in anchors.items()})
    return {MEMORY + name: value if name == "steps" else value.squeeze(0) for name, value in found.items()}
