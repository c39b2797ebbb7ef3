"""Means over those who arrived, corrected for those who did not, around any method whose server takes such means.

A client's weight v_i is the method's own: its samples, or 1. The plain mean ``Σ_S v_i Δ_i / Σ_S v_i`` of the changes of
those who arrived, S, follows the fast clients. Here the values are changed where they are computed, and the server
divides by other weights, so that sums are formed as ever: exactly, in any order, on any number of ranks.

============== ============================ ===================================================
``correct``    a client sends               the server moves a block by
============== ============================ ===================================================
``known``      Δ_i / π_i                    their sum over the weights of all who were invited
``estimated``  ω_i Δ_i                      their sum over the weights of all clients
``remembered`` Δ_i − y_i; y_i ← Δ_i         their mean, and the mean of y over all clients
============== ============================ ===================================================

Where layers count one by one, π, ω and y are each layer's own. Blocks that are in no layer, as the loss, keep their
plain means, and so do personal layers that are sent. All clients are those that take part, whether they ever came.

- ``known``: π_i is the chance that the visit, or its layer, arrives in time, as the speed model has it. Where visits
  are cut short at a step (``partial = "steps"``), each step's change counts over the chance that so many are done,
  q_ik: ``Σ_k d_ik/q_ik`` has the mean of the whole visit's change, as what was done is the beginning of the whole.
  ``Δ_i / E[τ_i]``, and FedNova's mean of steps over π_i, have it to first order in the step size only.
- ``estimated``: FedAU (Wang & Ji, ICLR 2024). ω_i is the mean of the rounds from one arrival to the next, of those that
  ended before this round; 1 until there is one. With a cutoff K an absence ends an interval of K after K rounds,
  so that no ω_i exceeds K.
- ``remembered``: FedVARP (Jhunjhunwala et al., UAI 2022), or with ``mean = "all"`` MIFA (Gu et al., NeurIPS 2021)
  that begins with zeros and waits for nobody. y is of before the round. A round, or a layer, in which nobody arrived
  moves by the mean of y, as MIFA's does; FedVARP's formula has no value there. What is remembered is the change at the
  first round's step size: at η_t it counts η_t/η_0 times, which is MIFA's memory of gradients where η falls.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from hpcfl.algorithms.base import Algorithm, By, Client, Extras, Participation, Recalled, ServerState, Task, Visits
from hpcfl.algorithms.wrapped import Wrapper, changed, without, wrapped
from hpcfl.base.config import ConfigBase
from hpcfl.base.device_copy import on_device
from hpcfl.base.errors import UsageError, no_meaning
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.types import Ints, State
from hpcfl.learning.optim import Weighed, factors
from hpcfl.schedule.participation import NOT_KNOWN
from hpcfl.schedule.plan import Plan
from hpcfl.sums.message import Block, CorrectedSums, Sums

Change = Callable[[str, int, "Tensor"], "Tensor"]
"""What becomes of a block's values ``[k, …]``: block, layer (1 … L), values."""

INTERVALS, MEMORY = "intervals:", "remembered:"  # begin the names of what clients keep; blocks' names follow
ROUNDS = "remembered"  # how many rounds the server has seen


class Weighting(ConfigBase):
    """Whether means over those who arrived are corrected for those who did not."""

    correct: Literal["none", "known", "estimated", "remembered"] = "none"
    """``none``: means are over those who arrived. ``known``: each contribution over its chance to arrive by the speed
    model, over all invited. ``estimated``: each times the client's mean interval between arrivals, over all clients
    (FedAU). ``remembered``: who did not arrive counts with what it sent last (FedVARP, MIFA)."""
    cutoff: int = Field(50, ge=0)
    """Rounds of absence after which an interval ends, FedAU's K (``estimated``), and so the largest factor of a
    contribution. 0: none is cut."""
    mean: Literal["arrived", "all"] = "arrived"
    """Over whom changes since what is remembered are averaged (``remembered``). ``arrived``: those who arrived
    (FedVARP). ``all``: all clients (MIFA)."""

    def check(self, algorithm: Algorithm, participation: Participation, known: bool, clock: str = "simulated") -> None:
        """Raise UsageError where keys do not go together, or not with the method, how rounds close, or the clock.

        `known` is True where the speed model gives the chance to arrive in time.
        """
        self.check_only_for("weighting.", "correct", {"cutoff": "estimated", "mean": "remembered"})
        if self.correct != "none":
            algorithm.mean_weights()
        key, close = "weighting.correct", f"participation.close = '{participation.close}'"
        if self.correct in ("known", "estimated") and participation.by_arrivals:
            beside = f"{close}, where nobody is missing in a round"
            raise no_meaning(key, self.correct, beside, f"{key} = 'remembered'")
        if self.correct == "remembered" and algorithm.moves_parts:
            why = f"algorithm.name = '{algorithm.name}' lets clients hold other parts of the model in each round"
            raise UsageError(f"{key} = 'remembered': {why}; did you mean {key} = 'estimated'?")
        if self.correct == "remembered" and participation.every_client:
            raise no_meaning(key, self.correct, "participation.every_client = true: nobody is away", f"{key} = 'none'")
        falls = algorithm.learning_rate(1) != algorithm.learning_rate(0)
        if self.correct == "remembered" and participation.by_arrivals and falls:
            why = "changes of different rounds are added, whose step sizes must be alike"
            raise UsageError(f"{key} = 'remembered': with {close} {why}: expected algorithm.decay = 0")
        if self.correct == "known" and participation.close == "all":
            raise no_meaning(key, "known", f"{close}: nobody is away", "participation.close = 'deadline'")
        needs, instead = f"{key} = 'known' needs the chance to arrive", f"did you mean {key} = 'estimated'"
        if self.correct == "known" and participation.close != "deadline":
            raise UsageError(f"{needs}, which is not known for {close}; {instead}, or close = 'deadline'?")
        if self.correct != "none" and participation.work == "speed" and algorithm.counts_steps:
            why = f"algorithm.name = '{algorithm.name}' counts steps, which must not depend on the client's speed"
            raise UsageError(f"{key} = '{self.correct}': {why}: expected participation.work = 'alike'")
        if self.correct == "known" and not known:
            raise UsageError(f"{needs} {NOT_KNOWN}; {instead}?")
        if self.correct == "known" and participation.by_steps and not algorithm.snapshots:
            several = f"algorithm.name = '{algorithm.name}' learns in several phases"
            raise UsageError(f"{needs} of each step, and {several}: expected participation.partial = 'discard'")
        if self.correct == "known" and participation.by_steps and clock != "simulated":
            raise UsageError(f"{needs} of each step, which real time does not tell; {instead}?")

    def warnings(self, plan: Plan) -> dict[str, str]:
        """Return what the user should know of the chances to arrive, as a first plan has them, by name."""
        steps = plan.step_chances
        never = int(((plan.arrival if steps is None else steps) == 0).any(1).sum()) if self.correct == "known" else 0
        what = "arrive in time, with all layers or some" if steps is None else "do all of their steps in time"
        who = f"{never} of {len(plan.arrival)} clients have no chance to {what}"
        text = f"weighting.correct = 'known': {who}: their share is missing, and steps are shorter by it"
        return {"unreachable": text} if never else {}


def with_correction(algorithm: Algorithm, weighting: Weighting, members: Ints, by_steps: bool = False) -> Algorithm:
    """Return the method that corrects for those who did not arrive.

    `members` are the ids of all who take part; visits may be cut short `by_steps`.
    """
    if weighting.correct == "none":
        return algorithm
    known = _KnownSteps if by_steps else _Known
    around = {"known": known, "estimated": _Estimated, "remembered": _Remembered}[weighting.correct]
    return wrapped(
        algorithm, around, weighting=weighting, members=tuple(members.tolist()), weighted_by=algorithm.mean_weights()
    )


def with_even_clients(algorithm: Algorithm) -> Algorithm:
    """Return the method of whose clients each counts alike in a step, however often it has reported in it."""
    return algorithm if algorithm.means_alone else wrapped(algorithm, _Even)


class _Even(Wrapper):
    """Visits' changes are scaled for this as if all held all; means stand for the clients that have reported."""

    def step(self, task: Task, state: ServerState, sums: Sums) -> ServerState:
        assert sums.arrived is not None
        visits, clients = len(sums.arrived.clients), np.unique(sums.arrived.clients)
        held = {
            name: weight * visits / len(clients) for name, weight in self.holders(task, clients, sums.round).items()
        }
        return super().step(task, state, CorrectedSums(sums, clients, {}, held=held))


class _Corrected(Wrapper):
    """What all have in common; the method sees nothing of what clients keep for it."""

    weighting: Weighting
    members: tuple[int, ...]
    weighted_by: By

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        numbers, change, kept = _numbers(self, task), *self.correction(task, _ours(personal), visits)
        after = yield from changed(
            super().client(task, shared, _theirs(personal), visits),
            lambda message: {
                name: (change(name, numbers[name], value) if name in numbers else value, weight)
                for name, (value, weight) in message.items()
            },
        )
        return {**after, **kept}

    @abstractmethod
    def correction(self, task: Task, own: State, visits: Visits) -> tuple[Change, State]:
        """Return what becomes of a block's values, and what the clients keep then, which may follow from these."""

    def model(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        return super().model(task, shared, _theirs(personal), visits)

    def between(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        return super().between(task, shared, _theirs(personal), visits)


class _Scaled(_Corrected):
    """Each value is scaled, and the server divides by the weights of more clients than have arrived."""

    def step(self, task: Task, state: ServerState, sums: Sums) -> ServerState:
        clients = sums.cohort if self.weighting.correct == "known" else np.array(self.members)
        over = dict.fromkeys(_numbers(self, task), _weight(self, task, clients))
        held = self.holders(task, clients, sums.round)
        return super().step(task, state, CorrectedSums(sums, clients, over, held=held))


class _Known(_Scaled):
    def correction(self, task: Task, own: State, visits: Visits) -> tuple[Change, State]:
        return lambda name, number, value: value / factors(visits.arrival[:, number - 1], value), {}


class _KnownSteps(_Scaled):
    """Visits form what they send step by step."""

    weighs_steps: ClassVar[bool] = True

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        assert visits.step_chances is not None
        weighed = replace(visits, training=Weighed(chances=visits.step_chances))
        return super().client(task, shared, personal, weighed)

    def correction(self, task: Task, own: State, visits: Visits) -> tuple[Change, State]:
        return lambda name, number, value: value, {}


class _Estimated(_Scaled):
    def init_client(self, task: Task, client: int) -> State:
        begun = torch.tensor([-1.0, 0.0, 0.0], dtype=torch.float64)  # the last arrival, intervals' sum and their number
        kept = {INTERVALS + names[0]: begun.to(task.device) for names in self.layers(task)}
        return super().init_client(task, client) | kept

    def correction(self, task: Task, own: State, visits: Visits) -> tuple[Change, State]:
        first = {number: INTERVALS + names[0] for number, names in enumerate(self.layers(task), start=1)}
        kept = dict(own)

        def change(name: str, number: int, value: Tensor) -> Tensor:
            since, count = own[first[number]], len(value)
            weight, after = intervals(since[:count], visits.round, self.weighting.cutoff)
            kept[first[number]] = torch.cat([after, since[count:]])
            return value * factors(weight, value)

        return change, kept


class _Remembered(_Corrected):
    def init_client(self, task: Task, client: int) -> State:
        return super().init_client(task, client) | _nothing(self, task)

    def init_extras(self, task: Task) -> Extras:
        return {**super().init_extras(task), **_nothing(self, task, torch.float64), ROUNDS: 0.0}

    def recalled(self, task: Task, extras: Extras, personal: Recalled) -> Extras:
        whole, mean = self._whole(task, self._held(task)), {name: 0.0 * value for name, value in _ours(extras).items()}
        for client, own in personal():
            weight = _weight(self, task, [client]) if client in self.members else 0.0
            for name, value in _ours(own).items():
                mean[name] = mean[name] + weight / whole[name.removeprefix(MEMORY)] * value.double()
        rest = super().recalled(task, _theirs(extras), lambda: ((each, _theirs(own)) for each, own in personal()))
        return {**rest, **mean, ROUNDS: extras[ROUNDS]}

    def _held(self, task: Task) -> State:
        """Return the weight of all clients at each coordinate of blocks that not all hold whole, in any round."""
        return self.holders(task, np.array(self.members), 0)

    def _whole(self, task: Task, held: State) -> dict[str, Any]:
        """Return the weight of all clients in the mean of each block: one number, or one for each coordinate."""
        some = {name: on_device(value.where(value > 0, 1.0), task.device) for name, value in held.items()}
        return dict.fromkeys(_blocks(self, task), _weight(self, task, self.members)) | some

    def correction(self, task: Task, own: State, visits: Visits) -> tuple[Change, State]:
        scale, kept = _scale(self, visits.round), dict(own)

        def change(name: str, number: int, value: Tensor) -> Tensor:
            part = tuple(map(slice, value.shape))  # of who holds a part, and of the first clients
            kept[MEMORY + name] = own[MEMORY + name].clone()
            kept[MEMORY + name][part] = value / scale
            return value - scale * own[MEMORY + name][part]

        return change, kept

    def step(self, task: Task, state: ServerState, sums: Sums) -> ServerState:
        names, over = _blocks(self, task), _weight(self, task, self.members)
        held = self._held(task)
        whole = self._whole(task, held)
        rounds, scale = state.extras[ROUNDS], _scale(self, int(state.extras[ROUNDS]))
        mean = {name: state.extras[MEMORY + name] for name in names}
        corrected = CorrectedSums(
            sums,
            np.array(self.members),
            dict.fromkeys(names, over) if self.weighting.mean == "all" else {},
            {name: scale * value for name, value in mean.items()},
            held if self.weighting.mean == "all" else {},
        )
        after = super().step(task, replace(state, extras=_theirs(state.extras)), corrected)
        moves = {name: on_device(sums.over(name, 1.0), mean[name].device) / whole[name] / scale for name in names}
        now = {MEMORY + name: value + moves[name] for name, value in mean.items()}
        return replace(after, extras={**after.extras, **now, ROUNDS: rounds + 1})


def intervals(kept: Tensor, round: int, cutoff: int = 0) -> tuple[Tensor, Tensor]:
    """Return FedAU's weights ``[c]`` of visits in a round, and what their clients keep once they have arrived.

    Parameters
    ----------
    kept : float64 [c, 3]
        The round of the last arrival (-1: none), the sum of the intervals that have ended, and their number.
    """
    last, total, number = kept.unbind(1)
    missed = round - last - 1
    cuts = missed.div(cutoff, rounding_mode="floor") if cutoff else torch.zeros_like(missed)
    length = cuts * cutoff
    total, number = total + length, number + cuts
    weight = torch.where(number > 0, total / number.clamp(min=1), 1.0)
    after = [torch.full_like(last, round), total + missed - length + 1, number + 1]
    return weight, torch.stack(after, 1)


def _numbers(method: Algorithm, task: Task) -> dict[str, int]:
    """Return the blocks that are corrected, and their layers (1 … L)."""
    others = method.personal(task) | method.summed(task)
    layers = enumerate(method.layers(task), start=1)
    return {name: number for number, names in layers for name in names if name not in others}


def _blocks(method: Algorithm, task: Task) -> dict[str, Block]:
    """Return the same blocks with their shapes."""
    numbers = _numbers(method, task)
    return {name: block for group in method.layout(task) for name, block in group.items() if name in numbers}


def _nothing(method: Algorithm, task: Task, dtype: torch.dtype | None = None) -> State:
    """Return what is remembered before anybody has sent anything, in a type of its own or in that of the blocks."""
    blocks = _blocks(method, task).items()
    return {MEMORY + name: torch.zeros(b.shape, dtype=dtype or b.dtype, device=task.device) for name, b in blocks}


def _weight(method: _Corrected, task: Task, clients: Sequence[int] | Ints) -> float:
    """Return the sum of some clients' weights in the method's means."""
    if method.weighted_by == "uniform":
        return float(len(clients))
    return float(task.federation.train_sizes[list(clients)].sum())


def _scale(method: Algorithm, round: int) -> float:
    """Return a round's step size over that of the first one."""
    return method.learning_rate(round) / method.learning_rate(0)


def _ours(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name == ROUNDS or name.startswith((INTERVALS, MEMORY))}


def _theirs(state: Mapping[str, Any]) -> dict[str, Any]:
    return without(state, _ours(state))
