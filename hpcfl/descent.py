"""Gradient steps for a chunk of clients at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcfl.message import State

if TYPE_CHECKING:
    from hpcfl.task import Task
    from hpcfl.visits import Batch, Visits

TUNING = 2**20
"""The phase of fine-tuning before a test: no part of a visit has so high a number."""


def zeros(state: State) -> State:
    """Return zeros of the same names, shapes and types."""
    return {name: torch.zeros_like(value) for name, value in state.items()}


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent with heavy-ball momentum and weight decay.

    Attributes
    ----------
    lr, momentum : float
    decay : float
        λ of the penalty ``λ/2 · |w|²``; it takes weights, not biases.
    """

    lr: float
    momentum: float = 0.0
    decay: float = 0.0

    def train(
        self,
        task: Task,
        params: State,
        batches: Iterable[Batch],
        velocity: State | None = None,
        names: Collection[str] | None = None,
    ) -> Tensor:
        """Take one step per batch, in place; return each client's mean loss over its steps, ``[c]``.

        Parameters
        ----------
        params : State
            ``{name: [c, …]}``.
        velocity : State, optional
            The momentum, changed in place; None: it starts from nothing and is forgotten.
        names : collection of str, optional
            The parameters that learn; the others stay. None: all.
        """
        learn = {name: params[name] for name in params if names is None or name in names}
        if velocity is None:
            velocity = zeros(learn) if self.momentum else {}
        count = len(next(iter(params.values())))
        losses = torch.zeros(count, device=task.device)
        taken = torch.zeros_like(losses)
        for batch in batches:
            losses += self._step(task, params, learn, velocity, batch)
            taken += batch.counted()
        return losses / taken

    def tuned(
        self, task: Task, params: State, visits: Visits, batch: int, epochs: int, names: Collection[str]
    ) -> State:
        """Return the parameters after some epochs in which only `names` learn: what is tested afterwards."""
        params = {name: value.clone() for name, value in params.items()}
        upper = task.above(params, visits, names)
        self.train(upper, params, upper.batches(visits, batch, epochs, phase=TUNING), names=names)
        return params

    def _step(self, task: Task, params: State, learn: State, velocity: State, batch: Batch) -> Tensor:
        """Take one step in place; its gradients are freed before those of the next one are computed."""
        gradients, loss = task.gradients(params, batch, learn)
        if self.decay:
            for name, gradient in gradients.items():
                if not name.rpartition(".")[2].startswith("bias"):
                    gradient.add_(params[name], alpha=self.decay)
        descend(learn, gradients, velocity, self.lr, self.momentum, batch.active())
        return loss


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
        if active is not None:
            gradient = gradient * active.view(-1, *[1] * (gradient.dim() - 1))
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
