"""Losses and metrics as users write them, and some that are refused."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NOTHING = 3


def entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="none")


def half_square(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.squeeze(-1) - labels).square() / 2


def contrast(outputs: Tensor, labels: Tensor) -> Tensor:
    """A loss that compares the samples of a batch with one another."""
    each = entropy(outputs, labels)
    return each * (1 + labels) - each.mean() * labels.double().mean().to(each)


def noisy(outputs: Tensor, labels: Tensor) -> Tensor:
    return entropy(outputs + 0.1 * torch.randn_like(outputs), labels)


def confidence(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.softmax(-1).amax(-1)


def reduced(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels)


def number(outputs: Tensor, labels: Tensor) -> float:
    return float(reduced(outputs, labels))


def failing(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.view(7, 7)


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """A metric by the name of a column."""
    return confidence(outputs, labels)


def late(outputs: Tensor, labels: Tensor) -> Tensor:
    """A loss that takes a trial of three samples, but no batch."""
    if len(labels) > 3:
        raise ValueError("too many")
    return entropy(outputs, labels)


def blind(outputs: Tensor, labels: Tensor) -> Tensor:
    """A loss of which all gradients are 0."""
    return 0.0 * entropy(outputs, labels)


def endless(outputs: Tensor, labels: Tensor) -> Tensor:
    """Infinite for some samples in tests, which the outputs are not."""
    each = entropy(outputs, labels)
    return each if torch.is_grad_enabled() else torch.where(labels == 0, torch.inf, each)


def unknown(outputs: Tensor, labels: Tensor) -> Tensor:
    """No number in training."""
    return entropy(outputs, labels) * (torch.nan if torch.is_grad_enabled() else 1.0)
