"""SALF: straggler-aware layer-wise federated learning (Lang, Cohen & Shlezinger).

Every user takes one SGD step; its layers leave as backpropagation reaches them, last first, until the deadline.
The server averages each layer over those who reached it (eq. 9):
``w^l ← w^l − η/(1 − p_l) · mean_{u ∈ U^l} ∇F_u^l``, with p_l the chance that nobody reaches layer l.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from hpcfl.algorithms.base import Algorithm, By, Client, Extras, Participation, ServerState, State, Sums, Task, Visits
from hpcfl.base.errors import UsageError
from hpcfl.base.lazy import torch
from hpcfl.learning.optim import Sgd, factors, layer_by_layer, zeros
from hpcfl.schedule.participation import NOT_KNOWN

PLAIN = "rule = 'paper' with missing = 'none'"


class Salf(Algorithm):
    """Layer-wise averaging: each layer over the clients that reached it before the round closed."""

    name: Literal["salf"] = "salf"
    lr: float = Field(0.05, gt=0)
    """Step size η."""
    decay: float = Field(0.0, ge=0)
    """The step size of round k, counted from 0, is ``lr / (1 + decay·k)``; for strongly convex objectives `hpcfl check`
    works out Theorem III.1's."""
    batch: int = Field(16, ge=0)
    """Samples per local step; 0 for all that a client has."""
    rule: Literal["paper", "released", "inverse-probability"] = "paper"
    """The server's denominator. ``paper``: ``(1 − p_l)·|U^l|`` (eq. 9). ``released``: the number of users invited (the
    authors' code). ``inverse-probability``: each contribution over its chance ``π_{u,l}``, then over the users invited;
    unbiased if no chance is 0."""
    missing: Literal["paper", "exact", "empirical", "none"] = "exact"
    """p_l of the ``paper`` rule. ``paper``: ``(1 − l/(L+1))^U`` (eq. 10). ``exact``: from the speed model in use.
    ``empirical``: ``(empty + 1)/(rounds + 2)`` over the past rounds. ``none``: 0."""
    blocks: Literal["layer", "tensor"] = "layer"
    """What a layer is. ``layer``: a module with weight and bias. ``tensor``: each tensor by itself (the authors'
    code)."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Heavy-ball momentum of the local step; of use only with `persist_optimizer`."""
    persist_optimizer: bool = False
    """Keep each user's momentum from visit to visit; it advances for the layers reached."""
    layerwise: ClassVar[bool] = True

    def check(self, participation: Participation, known: bool = True) -> None:
        self.check_only_for("algorithm.", "persist_optimizer", {"momentum": True})
        needs = f"{self.correction} needs the chance that a layer arrives"
        plain = self.rule == "paper" and self.missing == "none"
        if participation.by_arrivals and self.rule != "released" and not plain:
            beside = "has no meaning with participation.close = 'arrivals'"
            raise UsageError(f"{needs}, which {beside}: expected {PLAIN}, or rule = 'released'")
        exact = self.rule == "inverse-probability" or (self.rule == "paper" and self.missing == "exact")
        if exact and not known and participation.bound is not None:
            hint = "did you mean rule = 'paper' with missing = 'empirical' (or 'none')?"
            raise UsageError(f"{needs} {NOT_KNOWN}; {hint}")
        if self.rule == "inverse-probability" and participation.enough is not None:
            why = f"which is not known for participation.close = '{participation.close}'"
            raise UsageError(f"{needs}, {why}; did you mean close = 'deadline'?")

    @property
    def correction(self) -> str:
        """The key by which steps are corrected for those who did not arrive."""
        return f"algorithm.missing = '{self.missing}'" if self.rule == "paper" else f"algorithm.rule = '{self.rule}'"

    @property
    def needs_whole(self) -> str:
        counts = "algorithm.missing = 'empirical' counts the rounds in which nobody reaches a layer"
        return counts if self.missing == "empirical" else ""

    def mean_weights(self) -> By:
        if self.rule == "paper" and self.missing == "none":  # the mean over those who reached a layer
            return "uniform"
        own = f"{self.correction} is SALF's own correction for those who did not arrive"
        raise UsageError(f"weighting.correct: {own}: expected weighting.correct = 'none', or algorithm.{PLAIN}")

    def layers(self, task: Task) -> tuple[tuple[str, ...], ...]:
        return task.layer_names(self.blocks)

    def init_extras(self, task: Task) -> Extras:
        if self.missing != "empirical":
            return {}
        return {"empty": torch.zeros(len(self.layers(task))), "rounds": 0.0}

    def init_client(self, task: Task, client: int) -> State:
        return zeros(task.initial()) if self.momentum and self.persist_optimizer else {}

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        level = {name: number for number, names in enumerate(self.layers(task), start=1) for name in names}
        start = task.replicate(shared, visits)
        batch = next(task.batches(visits, self.batch, steps=1))
        velocity = {name: value.clone() for name, value in personal.items()}
        sgd = Sgd(self.learning_rate(visits.round), momentum=self.momentum)
        for name, value in layer_by_layer(task, start, batch, level, sgd, velocity, visits):
            if name != "loss":
                value = value - start[name][: len(value)]
                if self.rule == "inverse-probability":
                    value = value / factors(visits.arrival[:, level[name] - 1], value)
            yield {name: (value, visits.ones(len(value)))}
        return velocity

    def server(self, task: Task, shared: State, sums: Sums) -> State:
        """Move by p_l for l = 1 … L, but for those that the past rounds tell."""
        count = len(self.layers(task))
        paper = [(1 - number / (count + 1)) ** sums.invited for number in range(1, count + 1)]
        chances = {"exact": sums.miss_probability.tolist(), "paper": paper}
        return self._moved(task, shared, sums, chances.get(self.missing, [0.0] * count))

    def step(self, task: Task, state: ServerState, sums: Sums) -> ServerState:
        if not state.extras:
            return super().step(task, state, sums)
        empty, rounds = state.extras["empty"], state.extras["rounds"]
        chances = [(float(times) + 1) / (rounds + 2) for times in empty]
        again = empty.new_tensor([sums.weight(names[0]) == 0 for names in self.layers(task)])
        extras = {"empty": empty + again, "rounds": rounds + 1}
        return ServerState(self._moved(task, state.shared, sums, chances), extras)

    def _moved(self, task: Task, shared: State, sums: Sums, chances: list[float]) -> State:
        """Move each layer by the sum of what arrived over the rule's denominator; an empty layer stays."""
        after = dict(shared)
        for chance, names in zip(chances, self.layers(task)):
            for name in names:
                over = (1.0 - chance) * sums.weight(name) if self.rule == "paper" else float(sums.invited)
                after[name] = sums.moved(name, shared[name], over)
        return after
