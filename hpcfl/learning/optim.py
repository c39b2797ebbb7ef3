"""Gradient steps for a chunk of clients at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from hpcfl.base.device_copy import on_device
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.types import Floats, State
from hpcfl.learning import fused
from hpcfl.learning.batches import Batch, Batches, Training, Visits

if TYPE_CHECKING:
    from hpcfl.learning.task import Objective, Task

FINE_TUNING = 2**20
"""The phase of fine-tuning before a test: no part of a visit has so high a number."""


def zeros(state: State) -> State:
    """Return tensors of zeros by the same names, of the same shapes and types.

    Examples
    --------
    >>> hpcfl.zeros({"w": torch.ones(2)})
    {'w': tensor([0., 0.])}
    """
    return {name: torch.zeros_like(value) for name, value in state.items()}


@dataclass(frozen=True)
class Optimizer(ABC):
    """What turns gradients into steps, for each client of a chunk by itself.

    Its memory is ``{name: [c, …]}``, changed in place.
    """

    lr: float
    decay: float = field(default=0.0, kw_only=True)
    """λ of the penalty ``λ/2 · |w|²``; it takes weights, not biases."""
    decayed: Collection[str] | None = field(default=None, kw_only=True)
    """Whose weights the penalty takes; None: all that learn."""

    @abstractmethod
    def init(self, params: State) -> State:
        """The memory before the first step; empty for none."""

    @abstractmethod
    def apply(self, params: State, gradients: fused.Gradients, memory: State, active: Tensor | None = None) -> None:
        """Take one step in place; of the clients `active` (bool ``[c]``) only, None: of all. Gradients are used up."""

    def train(
        self,
        task: Task,
        params: State,
        batches: Iterable[Batch],
        memory: State | None = None,
        names: Collection[str] | None = None,
        objective: Objective | None = None,
    ) -> Tensor:
        """`train` with one group of parameters: those in `names`, None: all."""
        learning = [name for name in params if names is None or name in names]
        return train(task, params, batches, [ParamGroup(learning, self, objective, memory)])

    def step(
        self, task: Task, params: State, learn: State, memory: State, batch: Batch, objective: Objective | None = None
    ) -> Tensor:
        """Let `learn`, a part of `params`, take one step in place; return the objective before it, ``[c]``."""
        gradients, loss = task.products(params, batch, learn, objective)
        self.apply(learn, gradients, memory, batch.active())
        return loss

    def penalised(self, name: str, gradient: Tensor | fused.Product, params: State) -> Tensor:
        """Return a gradient with the penalty's part, which is added in place."""
        formed = gradient.formed() if isinstance(gradient, fused.Product) else gradient
        decay = self.decay_of(name)
        return formed.add_(params[name], alpha=decay) if decay else formed

    def decay_of(self, name: str) -> float:
        """Return λ of one tensor."""
        taken = (self.decayed is None or name in self.decayed) and not name.rpartition(".")[2].startswith("bias")
        return self.decay if taken else 0.0


@dataclass(frozen=True)
class Sgd(Optimizer):
    """Stochastic gradient descent, ``v ← momentum·v + g``, ``w ← w − lr·v``; its memory is v."""

    momentum: float = 0.0

    def init(self, params: State) -> State:
        return zeros(params) if self.momentum else {}

    def apply(self, params: State, gradients: fused.Gradients, memory: State, active: Tensor | None = None) -> None:
        changes: State = {}
        for name, gradient in gradients.items():
            if isinstance(gradient, fused.Product) and active is None:
                value, decay = params[name], self.decay_of(name)
                if name in memory:
                    gradient.added_to(memory[name], self.momentum, 1.0).add_(value, alpha=decay)
                    value.sub_(memory[name], alpha=self.lr)
                else:
                    gradient.added_to(value, 1 - self.lr * decay, -self.lr)
                continue
            gradient = self.penalised(name, gradient, params)
            if active is not None:  # a client that rests may have any gradient, and 0 · ∞ is no number
                gradient = torch.where(column(active, gradient), gradient, 0.0)
            changes[name] = gradient
        if not changes:
            return
        if memory and active is None:
            velocities = [memory[name] for name in changes]
            torch._foreach_mul_(velocities, self.momentum)
            torch._foreach_add_(velocities, list(changes.values()))
            changes = dict(zip(changes, velocities))
        elif memory and active is not None:
            for name, gradient in changes.items():
                mask = column(active, gradient)
                memory[name].copy_(torch.where(mask, memory[name] * self.momentum + gradient, memory[name]))
                changes[name] = memory[name] * mask
        # by one operation, where a device has such
        torch._foreach_add_([params[name] for name in changes], list(changes.values()), alpha=-self.lr)


@dataclass(frozen=True)
class Shifted(Sgd):
    """Plain descent along shifted gradients, ``w ← w − lr·(g + shift)``."""

    shift: State = field(default_factory=dict, kw_only=True)
    """What is added to the gradients, ``{name: [c, …]}``."""

    def apply(self, params: State, gradients: fused.Gradients, memory: State, active: Tensor | None = None) -> None:
        super().apply(params, gradients, memory, active)
        for name in gradients:
            shift = self.shift[name]
            params[name].add_(shift if active is None else shift * column(active, shift), alpha=-self.lr)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam with bias correction (Kingma & Ba, 2015); each client counts the steps that it has taken itself."""

    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def init(self, params: State) -> State:
        moments = {f"{kind} {name}": torch.zeros_like(value) for name, value in params.items() for kind in ("m", "v")}
        return moments | {"steps": next(iter(params.values())).new_zeros(_clients(params))}

    def apply(self, params: State, gradients: fused.Gradients, memory: State, active: Tensor | None = None) -> None:
        steps = memory["steps"]
        steps += 1 if active is None else active.to(steps.dtype)
        scale = self.lr * (1 - self.betas[1] ** steps).sqrt() / (1 - self.betas[0] ** steps)
        if active is not None:
            scale = torch.where(active, scale, 0.0)
        for name, gradient in gradients.items():
            gradient = self.penalised(name, gradient, params)
            epsilon = self.epsilon * column((1 - self.betas[1] ** steps).sqrt(), gradient)
            mask = None if active is None else column(active, gradient)
            if mask is not None:
                gradient = torch.where(mask, gradient, 0.0)
            first = _averaged(memory[f"m {name}"], gradient, self.betas[0], mask)
            second = _averaged(memory[f"v {name}"], gradient.square(), self.betas[1], mask)
            # the factor of a client that has taken no step yet is 0 · ∞
            step = column(scale, gradient) * first / (second.sqrt() + epsilon)
            params[name].sub_(step if mask is None else torch.where(mask, step, 0.0))


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam whose penalty is in no gradient: weights shrink by lr·λ before a step (Loshchilov & Hutter, 2019)."""

    def apply(self, params: State, gradients: fused.Gradients, memory: State, active: Tensor | None = None) -> None:
        for name in gradients:
            if shrinks := self.lr * self.decay_of(name):
                value = params[name]
                value.mul_(1 - shrinks if active is None else 1 - shrinks * column(active, value).to(value.dtype))
        super().apply(params, gradients, memory, active)

    def penalised(self, name: str, gradient: Tensor | fused.Product, params: State) -> Tensor:
        return gradient.formed() if isinstance(gradient, fused.Product) else gradient


@dataclass(frozen=True)
class ParamGroup:
    """Some parameters and how they learn."""

    names: Collection[str]
    optimiser: Optimizer
    objective: Objective | None = None
    """None: the mean loss."""
    memory: State | None = None
    """The optimiser's; None: it starts from nothing and is forgotten."""


def train(task: Task, params: State, batches: Iterable[Batch], groups: Iterable[ParamGroup]) -> Tensor:
    """Let the groups of parameters take a step each on every batch, one after the other, in place.

    Return each client's mean of the last group's objective over its steps, ``[c]``. An empty group is left out; where
    all are, no batch is asked for.
    """
    learning = [group for group in groups if group.names]
    states = [{name: params[name] for name in group.names} for group in learning]
    kept = [
        group.optimiser.init(state) if group.memory is None else group.memory for group, state in zip(learning, states)
    ]
    losses = torch.zeros(_clients(params), dtype=task.dtype, device=task.device)
    taken: Tensor | int = 0
    steps = batches.padded() if isinstance(batches, Batches) else batches  # who has no samples in a step rests
    for batch in steps if learning else ():
        for group, learn, memory in zip(learning, states, kept):
            loss = group.optimiser.step(task, params, learn, memory, batch, group.objective)
        active = batch.active()
        if active is None:
            losses += loss
            taken += 1
        else:
            losses += torch.where(active, loss, 0.0)  # an objective may be anything where a client rests
            taken = active.to(losses.dtype) + taken
        if batch.note is not None:
            batch.note(_over(losses, taken))
    return _over(losses, taken)


def _over(losses: Tensor, taken: Tensor | int) -> Tensor:
    return losses / (max(taken, 1) if isinstance(taken, int) else taken.clamp(min=1))


def _clients(params: State) -> int:
    return len(next(iter(params.values())))


def column(values: Tensor, like: Tensor) -> Tensor:
    """One value per client, ``[c, 1, …]``."""
    return values.view(-1, *[1] * (like.dim() - 1))


def factors(values: Tensor | Floats, like: Tensor) -> Tensor:
    """One value for each of the first clients, whom `like` is of, ready to be multiplied with it."""
    found = torch.as_tensor(values[: len(like)]).to(like.dtype)
    return column(on_device(found, like.device), like)


@dataclass
class Weighed(Training):
    """How far visits have come each of whose steps counts by the chance q that it is done: ``Σ d_k/q_k`` in all.

    `extra` is what that is more than what the steps have changed, ``Σ d_k (1/q_k − 1)``: exactly 0 where q is 1.
    """

    chances: Floats = field(default_factory=lambda: np.ones((0, 0)))
    """q, ``[c, T]``; 0 of steps that nobody does."""
    extra: State = field(default_factory=dict)
    _more: Tensor | None = None  # 1/q − 1 of each step, [T, c], where the model is
    _last: State = field(default_factory=dict)
    _taken: int = 0

    def begin(self, params: State, memory: State) -> None:
        super().begin(params, memory)
        more = np.divide(1 - self.chances, self.chances, out=np.zeros_like(self.chances), where=self.chances > 0)
        self._more = on_device(torch.from_numpy(more.T.copy()), next(iter(params.values())).device)
        self._last = {name: value.clone() for name, value in params.items()}
        self.extra = zeros(params)

    def note(self, loss: Tensor) -> None:
        super().note(loss)
        assert self._more is not None
        for name, value in self.params.items():
            self.extra[name].addcmul_(value - self._last[name], factors(self._more[self._taken], value))
            self._last[name].copy_(value)
        self._taken += 1


def stacked(states: Sequence[State]) -> State:
    """Return the clients' states with a leading client axis."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def layer_by_layer(
    task: Task, params: State, batch: Batch, level: Mapping[str, int], by: Optimizer, memory: State, visits: Visits
) -> Iterator[tuple[str, Tensor]]:
    """Take one step, the last layer first, for those clients that still have time for it: the first ones.

    Yields their losses as ``"loss"``, then each tensor as it is after the step, ``[k, …]``, as far as anybody comes.
    `level` has the layer (1 … L) of each; what lies below may still need it as it was, so that `params` stay.
    """
    in_time = [visits.in_time(max(level[name] for name in names)) for names in task.layer_names()]
    rows = list(accumulate(in_time, max))
    for number, gradients, losses in task.backprop(params, batch, rows, visits.closed):
        if number == len(rows) - 1:
            yield "loss", losses
        for name in reversed(list(gradients)):
            count = visits.in_time(level[name])
            if not count:
                return
            moved = {name: params[name][:count].clone()}
            by.apply(moved, {name: gradients[name][:count]}, {name: memory[name][:count]} if memory else {})
            yield name, moved[name]


def _averaged(mean: Tensor, value: Tensor, beta: float, mask: Tensor | None) -> Tensor:
    """Advance an exponential average in place, where the mask says."""
    return mean.lerp_(value, 1 - beta if mask is None else (mask.to(mean.dtype) * (1 - beta)).expand_as(mean))
