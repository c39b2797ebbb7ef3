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


class Salf(Algorithm):
    """Layer-wise averaging: each layer over the clients that reached it before the round closed."""

    name: Literal["salf"] = "salf"
    lr: float = Field(0.05, gt=0)
    """Step size η."""
    decay: float = Field(0.0, ge=0)
    """The step size of round k, counted from 0, is ``lr / (1 + decay·k)``. Theorem III.1's ``2/(ρ_c (γ + k))`` is
    ``lr = 2/(ρ_c γ)``, ``decay = 1/γ``, which `hpcfl check` works out for strongly convex objectives."""
    batch: int = Field(16, ge=0)
    """Samples of the one local step; 0 for all that a client has."""
    rule: Literal["paper", "released", "inverse-probability"] = "paper"
    """The server's denominator. ``paper``: ``(1 − p_l)·|U^l|`` (eq. 9). ``released``: the number of users invited,
    whether they reached the layer or not, as in the authors' code. ``inverse-probability``: each contribution over its
    own chance ``π_{u,l}``, then over the users invited; unbiased for unequal users too, as long as no chance is 0."""
    missing: Literal["paper", "exact", "empirical", "none"] = "exact"
    """p_l of the ``paper`` rule. ``paper``: ``(1 − l/(L+1))^U`` (eq. 10). ``exact``: from the speed model in use.
    ``empirical``: ``(empty + 1)/(rounds + 2)`` over the past rounds. ``none``: 0."""
    blocks: Literal["layer", "tensor"] = "layer"
    """What a layer is. ``layer``: a module with weight and bias. ``tensor``: each tensor by itself (the authors'
    code)."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Heavy-ball momentum of the local step; of use only where `persist_optimizer` keeps it between visits."""
    persist_optimizer: bool = False
    """Keep each user's momentum from visit to visit; it advances for the layers that were reached."""
    layerwise: ClassVar[bool] = True

    def check(self, participation: Participation, known: bool = True) -> None:
        self.check_only_for("algorithm.", "persist_optimizer", {"momentum": True})
        if participation.by_arrivals and self.rule != "released" and (self.rule, self.missing) != ("paper", "none"):
            raise UsageError(
                f"algorithm.missing = '{self.missing}', algorithm.rule = '{self.rule}': chances to arrive have no "
                "meaning with participation.close = 'arrivals': expected rule = 'paper' with missing = 'none', or "
                "rule = 'released'"
            )
        unknown = not known and participation.bound is not None
        because = (
            "needs the chance that a layer arrives by the deadline, which real time with speed.model = 'none' does "
            "not tell; did you mean "
        )
        if unknown and self.rule == "inverse-probability":
            raise UsageError(
                f"algorithm.rule = 'inverse-probability' {because}rule = 'paper' with missing = 'empirical'?"
            )
        if unknown and self.rule == "paper" and self.missing == "exact":
            raise UsageError(f"algorithm.missing = 'exact' {because}missing = 'empirical' (or 'paper', 'none')?")
        if self.rule == "inverse-probability" and participation.enough is not None:
            raise UsageError(
                "algorithm.rule = 'inverse-probability' needs the chance that a layer arrives, which is not known "
                f"for participation.close = '{participation.close}'; did you mean close = 'deadline'?"
            )

    def mean_weights(self) -> By:
        if self.rule == "paper" and self.missing == "none":  # the mean over those who reached a layer
            return "uniform"
        key, value = ("missing", self.missing) if self.rule == "paper" else ("rule", self.rule)
        raise UsageError(
            f"weighting.correct: algorithm.{key} = '{value}' is SALF's own correction for those who did not arrive: "
            "expected weighting.correct = 'none', or algorithm.rule = 'paper' with missing = 'none'"
        )

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
        if self.missing == "exact":
            return self._moved(task, shared, sums, sums.miss_probability.tolist())
        layers = range(1, count + 1) if self.missing == "paper" else ()
        chances = [(1 - number / (count + 1)) ** sums.invited for number in layers]
        return self._moved(task, shared, sums, chances or [0.0] * count)

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
