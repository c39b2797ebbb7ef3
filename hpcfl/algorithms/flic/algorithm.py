"""FLIC: clients with feature spaces of their own, aligned in a latent space (Rakotomamonjy et al., 2023).

Client i embeds its features by φ_i (personal, any input size) into a latent space in which shared Gaussian anchors
``μ_c = N(v_c, L_c L_cᵀ)`` stand for the classes; ``g_i = β_i ∘ α`` classifies there. With ``model.hidden = []`` this is
FLIC-Class, with one hidden layer FLIC-HL. A visit (Algorithms 1 and S2): M epochs in which φ_i takes steps by the loss
and ``λ1 Σ_c W2²(μ_c, ν̂_c)`` and β_i by the loss and ``λ2 Σ_c 1/J Σ_j ℓ(c, g(Z_c^(j)))``, in turns; then an epoch of α;
then one step of the anchors whose classes the client holds. All terms are means; Algorithm S2 as printed scales by n_i.

The defaults are the paper's text. In each choice in which the authors' released code differs there is a key for it; the
overlay ``flic-released`` sets them all, and ``flic-hl-released`` on top of it those of a shared layer. What still
differs: there λ2's samples are of the classes in a batch, here of those of the client; all that aligns has the same
batch size, here `pretrain_batch` and `batch`; and before their test clients align to the mean of all clients' anchors
after that last round, here to those that are served last.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from hpcfl.algorithms.base import Block, Client, Extras, IteratedReduction, Layout, ServerState, Sums, Task, Visits
from hpcfl.algorithms.flic.anchors import Anchors, TargetAnchors, changes, held
from hpcfl.algorithms.flic.barycenters import Barycenters
from hpcfl.algorithms.flic.config import FACTORS, MEANS, FlicKeys
from hpcfl.algorithms.flic.phases import OWN, REALIGNING, REALIGNING_AGAIN, Learner, Parts, Terms, first_memory
from hpcfl.base.device_copy import on_device
from hpcfl.base.lazy import torch
from hpcfl.base.rng import keyed
from hpcfl.base.types import State
from hpcfl.learning.optim import FINE_TUNING, stacked


class Flic(FlicKeys):
    """Personal embeddings into a latent space with shared Gaussian anchors."""

    name: Literal["flic"] = "flic"
    any_shape: ClassVar[bool] = True
    needs_all: ClassVar[str] = "trains embeddings and what is above them"
    needs_rounds: ClassVar[str] = "its anchors are barycenters of what clients learn of the same ones"
    metric_columns: ClassVar[dict[str, str]] = {"barycenter_iterations": "iterations of the barycenters of this round"}

    def parts(self, task: Task) -> Parts:
        return Parts.of(task, self.inside, self.mix)

    def size(self, task: Task) -> tuple[int, int]:
        """Return number C and dimension k of the anchors."""
        dimension = self.parts(task).dimension
        if task.federation.classes == 1:  # labels are real numbers
            return 2, dimension
        return (max(self.meta) + 1 if self.meta else task.federation.classes), dimension

    def layers(self, task: Task) -> tuple[tuple[str, ...], ...]:
        count, _ = self.size(task)
        kinds = (MEANS,) if self.covariances == "fixed" else (MEANS, FACTORS)
        anchors = [f"{kind}.{number}" for kind in kinds for number in range(count)]
        return ((*self.parts(task).shared, *anchors),)

    def layout(self, task: Task) -> Layout:
        _, dimension = self.size(task)
        initial, blocks = task.initial(), {}
        for name in self.layers(task)[0]:
            square = name.startswith(FACTORS)
            shape = tuple(initial[name].shape) if name in initial else (dimension,) * (1 + square)
            blocks[name] = Block(shape, task.dtype)
        return {"loss": Block((), task.dtype)}, blocks

    def first_anchors(self, task: Task) -> State:
        """Return the first anchors: random means and spherical covariances, if not given."""
        means = keyed(task.seed, "anchors").standard_normal(self.size(task), dtype="float32")
        anchors = {MEANS: self.spread * on_device(torch.from_numpy(means).to(task.dtype), task.device)}
        if self.covariances != "fixed":
            count, dimension = means.shape
            spherical = self.deviation * torch.eye(dimension, device=task.device, dtype=task.dtype)
            anchors[FACTORS] = spherical.repeat(count, 1, 1)
        return task.start.given(anchors)

    def init_server(self, task: Task) -> State:
        initial = task.initial()
        return {name: initial[name] for name in self.parts(task).shared} | self.first_anchors(task)

    def init_extras(self, task: Task) -> Extras:
        return {"iterations": torch.zeros(1)} if self.iterates else {}

    def init_client(self, task: Task, client: int) -> State:
        flag = {"pretrained": torch.zeros(1, device=task.device)} if self.pretrain else {}
        memory = first_memory(self.first_anchors(task)) if self.anchor_persist else {}
        return self.parts(task).first(task.initial(client)) | flag | memory

    def personal(self, task: Task) -> set[str]:
        return {name.removeprefix(OWN) for name in self.personal_names(task)}

    def personal_names(self, task: Task) -> set[str]:
        parts = self.parts(task)
        return {*parts.embedding, *parts.personal}

    @property
    def evaluates_shared(self) -> bool:
        return False

    @property
    def adapt_epochs(self) -> int:
        return self.tune_epochs

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        learner = self._learner(task, shared, personal, visits)
        parts, params = learner.terms.parts, learner.params
        learner.pretrain(self.first_anchors(task))
        if not self.between_rounds:
            learner.realign()
        sharing = bool(parts.personal and parts.shared) and visits.round >= self.shared_from
        epochs = self.epochs - (sharing and self.shared_epoch == "last")
        loss = learner.local(epochs, parts.personal or parts.shared, moving=True)
        if sharing:
            loss = learner.shared(parts.shared)
        learner.anchors()
        weight = visits.weights(self.weights)
        yield {"loss": (loss, weight)}
        message = {name: (params[name] - shared[name], weight) for name in parts.shared}
        holders = None
        if self.average == "holders":
            slots = learner.terms.anchors.slots.cpu().unsqueeze(1)
            holders = (slots == torch.arange(len(shared[MEANS]))[:, None]).any(2)
        yield message | changes(params, shared, weight, holders)
        return {name: params[name] for name in personal}

    @property
    def between_rounds(self) -> str:
        return "algorithm.realign_who = 'all'" if self.realign_who == "all" else ""

    def between(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        learner = self._learner(task, shared, personal, visits)
        learner.pretrain(self.first_anchors(task))
        learner.realign()
        return {name: learner.params[name] for name in personal}

    def _learner(self, task: Task, shared: State, personal: State, visits: Visits, testing: bool = False) -> Learner:
        params = self._begun(task, shared, personal, visits)
        weights = self.lambda1, self.lambda2, self.draws or self.batch
        _, dimension = self.size(task)
        anchors: Anchors | TargetAnchors = TargetAnchors(len(visits.clients), dimension)
        if task.federation.classes > 1:
            groups = on_device(torch.tensor(self.meta or range(task.federation.classes)), task.device)
            anchors = Anchors(held(task, visits.clients, groups), groups, dimension, self.distance, self.deviation)
        terms = Terms(task, self.parts(task), anchors, *weights)
        return Learner(self, task, visits, terms, params, FINE_TUNING if testing else 0)

    def _begun(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        """Return copies of what visits begin with, the anchors among it, with a leading client axis."""
        rows = len(visits.clients)
        served = {name: shared[name].expand(rows, *shared[name].shape) for name in (MEANS, FACTORS) if name in shared}
        return {name: value.clone() for name, value in (task.replicate(shared, visits) | served | personal).items()}

    def server(self, task: Task, shared: State, sums: Sums) -> State:
        after = super().server(task, shared, sums)
        for kind in (MEANS, FACTORS):
            if kind in shared:
                rows = [sums.moved(f"{kind}.{number}", value) for number, value in enumerate(shared[kind])]
                after[kind] = torch.stack(rows)
        if sums.iterated:
            factors = on_device(sums.iterated["factors"].to(after[FACTORS].dtype), after[FACTORS].device)
            changed = on_device(sums.iterated["changed"], factors.device)
            after[FACTORS] = torch.where(changed[:, None, None], factors, shared[FACTORS])
        return after

    def step(self, task: Task, state: ServerState, sums: Sums) -> ServerState:
        after = super().step(task, state, sums)
        if not sums.iterated:
            return after
        return replace(after, extras={"iterations": sums.iterated["iterations"].max().float().reshape(1)})

    def metrics(self, task: Task, state: ServerState) -> dict[str, float]:
        return {"barycenter_iterations": float(state.extras.get("iterations", 0.0))}

    @property
    def iterates(self) -> bool:
        return self.covariances == "bures"

    def iterated_reduction(self, task: Task) -> IteratedReduction | None:
        return Barycenters(*self.size(task), self.tolerance, self.iterations) if self.iterates else None

    def model(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        parts = self.parts(task)
        if self.evaluation == "stored":
            return parts.mixed(self._begun(task, shared, personal, visits))
        learner = self._learner(task, shared, personal, visits, testing=True)
        learner.pretrain(self.first_anchors(task))  # as before round 1, also where no round has invited a client yet
        first = self.evaluation != "head" or bool(self.between_rounds)
        if first:
            learner.realign()
        learner.local(self.tune_epochs, parts.personal or parts.shared, embedding=self.evaluation != "head")
        if self.evaluation != "tuned":
            learner.realign(REALIGNING_AGAIN if first else REALIGNING)
        return parts.mixed(learner.params)

    def adapted(self, task: Task, shared: State, visits: Visits, epochs: int) -> State:
        personal = stacked([self.init_client(task, int(client)) for client in visits.clients])
        learner = self._learner(task, shared, personal, visits, testing=True)
        if epochs:  # who took part aligned to the first anchors; a newcomer is sent the last ones and no others
            learner.pretrain({name: shared[name] for name in (MEANS, FACTORS) if name in shared})
            learner.realign()
            learner.local(epochs, learner.terms.parts.personal)
        return learner.terms.parts.mixed(learner.params)
