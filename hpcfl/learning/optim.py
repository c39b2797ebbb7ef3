"""Gradient steps for a chunk of clients at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcfl.base.types import State

if TYPE_CHECKING:
    from hpcfl.learning.batches import Batch, Visits
    from hpcfl.learning.task import Objective, Task

FINE_TUNING = 2**20
"""The phase of fine-tuning before a test: no part of a visit has so high a number."""


def zeros(state: State) -> State:
    """Return zeros of the same names, shapes and types."""
    return {name: torch.zeros_like(value) for name, value in state.items()}


@dataclass(frozen=True)
class Optimizer(ABC):
    """What turns gradients into steps, for each client of a chunk by itself.

    Attributes
    ----------
    lr : float
        Step size.
    decay : float
        λ of the penalty ``λ/2 · |w|²``; it takes weights, not biases.
    """

    lr: float
    decay: float = field(default=0.0, kw_only=True)

    @abstractmethod
    def begin(self, params: State) -> State:
        """Return the memory before the first step, ``{name: [c, …]}``; empty for none."""

    @abstractmethod
    def apply(self, params: State, gradients: State, memory: State, active: Tensor | None = None) -> None:
        """Take one step in place, `memory` too; of the clients `active` (bool ``[c]``) only, None: of all."""

    def train(
        self,
        task: Task,
        params: State,
        batches: Iterable[Batch],
        memory: State | None = None,
        names: Collection[str] | None = None,
        objective: Objective | None = None,
    ) -> Tensor:
        """Take one step per batch, in place; return each client's mean objective over its steps, ``[c]``.

        Parameters
        ----------
        params : State
            ``{name: [c, …]}``.
        memory : State, optional
            The optimiser's, changed in place; None: it starts from nothing and is forgotten.
        names : collection of str, optional
            The parameters that learn; the others stay. None: all.
        objective : callable, optional
            What is minimised; None: the mean loss.
        """
        learn = params.keys() if names is None else params.keys() & names
        group = ParamGroup([name for name in params if name in learn], self, objective, memory)
        return train(task, params, batches, [group])

    def fine_tuned(
        self, task: Task, params: State, visits: Visits, batch: int, epochs: int, names: Collection[str]
    ) -> State:
        """Return the parameters after some epochs in which only `names` learn: what is tested afterwards."""
        params = {name: value.clone() for name, value in params.items()}
        upper = task.freeze_below(params, visits, names)
        self.train(upper, params, upper.batches(visits, batch, epochs, phase=FINE_TUNING), names=names)
        return params

    def step(
        self, task: Task, params: State, learn: State, memory: State, batch: Batch, objective: Objective | None = None
    ) -> Tensor:
        """Let `learn`, a part of `params`, take one step in place; return the objective before it, ``[c]``.

        The gradients are freed before those of the next step are computed.
        """
        gradients, loss = task.gradients(params, batch, learn, objective)
        if self.decay:
            for name, gradient in gradients.items():
                if not name.rpartition(".")[2].startswith("bias"):
                    gradient.add_(params[name], alpha=self.decay)
        self.apply(learn, gradients, memory, batch.active())
        return loss


@dataclass(frozen=True)
class Sgd(Optimizer):
    """Stochastic gradient descent with heavy-ball momentum."""

    momentum: float = 0.0

    def begin(self, params: State) -> State:
        """Return the velocity, zero; nothing without momentum."""
        return zeros(params) if self.momentum else {}

    def apply(self, params: State, gradients: State, memory: State, active: Tensor | None = None) -> None:
        """Take one step, see `descend`."""
        descend(params, gradients, memory, self.lr, self.momentum, active)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam with bias correction (Kingma & Ba, 2015); each client counts the steps that it has taken itself."""

    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def begin(self, params: State) -> State:
        """Return first and second moments and the numbers of steps, zero."""
        moments = {f"{kind} {name}": torch.zeros_like(value) for name, value in params.items() for kind in ("m", "v")}
        return moments | {"steps": next(iter(params.values())).new_zeros(_rows(params))}

    def apply(self, params: State, gradients: State, memory: State, active: Tensor | None = None) -> None:
        """Take one step."""
        steps = memory["steps"]
        steps += 1 if active is None else active.to(steps.dtype)
        scale = self.lr * (1 - self.betas[1] ** steps).sqrt() / (1 - self.betas[0] ** steps)
        if active is not None:
            scale = torch.where(active, scale, 0.0)
        for name, gradient in gradients.items():
            shape = -1, *[1] * (gradient.dim() - 1)
            epsilon = self.epsilon * (1 - self.betas[1] ** steps).sqrt().view(shape)
            mask = None if active is None else active.view(shape)
            first = _mixed(memory[f"m {name}"], gradient, self.betas[0], mask)
            second = _mixed(memory[f"v {name}"], gradient.square(), self.betas[1], mask)
            # the factor of a client that has taken no step yet is 0 · ∞
            step = scale.view(shape) * first / (second.sqrt() + epsilon)
            params[name].sub_(step if mask is None else torch.where(mask, step, 0.0))


@dataclass(frozen=True)
class ParamGroup:
    """Some parameters, their optimiser, what they learn by (None: the mean loss), and the optimiser's memory."""

    names: Collection[str]
    optimiser: Optimizer
    objective: Objective | None = None
    memory: State | None = None


def train(task: Task, params: State, batches: Iterable[Batch], groups: Iterable[ParamGroup]) -> Tensor:
    """Let the parameter groups take a step each on every batch, one after the other, in place.

    An empty group is left out; where all are, no batch is asked for.

    Returns
    -------
    Tensor [c]
        Each client's mean of the last group's objective over its steps.
    """
    learning = [group for group in groups if group.names]
    own = [{name: params[name] for name in group.names} for group in learning]
    kept = [group.optimiser.begin(o) if group.memory is None else group.memory for group, o in zip(learning, own)]
    losses = torch.zeros(_rows(params), dtype=task.dtype, device=task.device)
    taken = torch.zeros_like(losses)
    for batch in batches if learning else ():
        for group, learn, memory in zip(learning, own, kept):
            loss = group.optimiser.step(task, params, learn, memory, batch, group.objective)
        counted = batch.active_weight()
        losses += loss * counted  # an objective may be more than the loss, also where a client rests
        taken += counted
    return losses / taken.clamp(min=1)


def _rows(params: State) -> int:
    return len(next(iter(params.values())))


def _mixed(mean: Tensor, value: Tensor, beta: float, mask: Tensor | None) -> Tensor:
    """Advance a running mean in place, where the mask says; return it."""
    return mean.lerp_(value, 1 - beta if mask is None else torch.where(mask, 1 - beta, 0.0).expand_as(mean))


def descend(
    params: State, gradients: State, velocity: State, lr: float, momentum: float, active: Tensor | None = None
) -> None:
    """Take one SGD step in place: ``v ← momentum·v + g``, ``w ← w − lr·v`` (v = g without momentum).

    Parameters
    ----------
    velocity : State
        The momentum, changed in place; empty for none.
    active : bool [c], optional
        Clients that take the step; None for all.
    """
    for name, gradient in gradients.items():
        if active is not None:  # a client that rests may have any gradient, and 0 · ∞ is no number
            gradient = torch.where(active.view(-1, *[1] * (gradient.dim() - 1)), gradient, 0.0)
        if velocity:
            gradient = _pushed(velocity[name], gradient, momentum, active)
        params[name].add_(gradient, alpha=-lr)


def _pushed(velocity: Tensor, gradient: Tensor, momentum: float, active: Tensor | None) -> Tensor:
    """Advance the momentum in place for the active clients; return their step, zero for the others."""
    if active is None:
        return velocity.mul_(momentum).add_(gradient)
    mask = active.view(-1, *[1] * (gradient.dim() - 1))
    velocity.copy_(torch.where(mask, velocity * momentum + gradient, velocity))
    return velocity * mask
