"""Gradient steps for a chunk of clients at once."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcfl.message import State


def zeros(state: State) -> State:
    """Return zeros of the same names, shapes and types."""
    return {name: torch.zeros_like(value) for name, value in state.items()}


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
