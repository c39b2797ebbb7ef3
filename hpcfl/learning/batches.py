"""What an algorithm's client side is given: the visits of a chunk, and the samples of one step."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Event
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hpcfl.base.rng import StepKey
from hpcfl.base.types import Floats, Ints


class RoundClosed(Exception):  # noqa: N818
    """The round has closed: what is still being computed has lost its purpose."""


@dataclass(frozen=True)
class Visits:
    """The visits of one chunk in one round, deepest first.

    Attributes
    ----------
    round : int
    clients : int64 [c]
        Client ids.
    depth : int64 [c]
        First layer (1 … L) each one delivers in time, ascending.
    samples : int64 [c]
        Training samples each one holds.
    arrival : float64 [c, L]
        Chance that layer l counts; NaN where unknown.
    over : threading.Event, optional
        In wall clock: set when the round has closed.
    """

    round: int
    clients: Ints
    depth: Ints
    samples: Ints
    arrival: Floats
    closed: Event | None = None

    @classmethod
    def for_test(cls, round: int, clients: Ints) -> Visits:
        """Return what a test after `round` rounds needs to know: nothing is sent, so depths and chances are empty."""
        return cls(round, clients, np.ones(0, int), np.ones(0, int), np.ones((0, 0)))

    def raise_if_closed(self) -> None:
        """Raise `RoundClosed` where the round has closed meanwhile."""
        if self.closed is not None and self.closed.is_set():
            raise RoundClosed

    def in_time(self, layer: int) -> int:
        """Return how many rows (the first ones) still have time for layer `layer` (1 … L)."""
        if self.closed is not None and self.closed.is_set():
            return 0
        return int(np.searchsorted(self.depth, layer, side="right"))

    def ones(self, rows: int) -> Tensor:
        """Return weight 1 for the first `rows` visits."""
        return torch.ones(rows, dtype=torch.float64)

    def sizes(self, rows: int) -> Tensor:
        """Return weight n_i for the first `rows` visits."""
        return torch.from_numpy(self.samples[:rows].astype(np.float64))

    def weights(self, by: Literal["samples", "uniform"]) -> Tensor:
        """Return the weights of all visits in a mean over clients, ``[c]``: the numbers of samples, or 1."""
        rows = len(self.clients)
        return self.sizes(rows) if by == "samples" else self.ones(rows)


@dataclass(frozen=True)
class Batch:
    """One step's samples: features ``[c, B, …]``, labels ``[c, B]``, which rows are real (None: all).

    Attributes
    ----------
    sizes : list of int, optional
        How many rows of each client are real, known without asking the device; None: `valid` tells.
    """

    x: Tensor
    y: Tensor
    valid: Tensor | None
    key: StepKey
    sizes: list[int] | None = None

    def sample_counts(self) -> list[int]:
        """Return how many samples of each client there are, [c]."""
        if self.sizes is None:
            return [self.x.shape[1]] * len(self.x) if self.valid is None else self.valid.sum(1).tolist()
        return self.sizes

    def active(self) -> Tensor | None:
        """Return which clients have any sample in this step, bool ``[c]``; None for all of them."""
        return None if self.valid is None else self.valid.any(1)

    def active_weight(self) -> Tensor:
        """Return 1 for each client that has a sample in this step, else 0, ``[c]``."""
        active = self.active()
        return self.x.new_ones(len(self.x)) if active is None else active.to(self.x.dtype)

    def losses(self, logits: Tensor, rows: int | None = None) -> Tensor:
        """Return each client's mean loss over its real rows, ``[c]`` (or of the first `rows`)."""
        y = self.y[:rows]
        each = losses(logits, y)
        if self.valid is None:
            return each.mean(1)
        valid = self.valid[:rows]
        return (each * valid).sum(1) / valid.sum(1).clamp(min=1)


def losses(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the samples' losses ``[c, B]``: cross-entropy for classes, the squared error for targets.

    Parameters
    ----------
    outputs : Tensor
        ``[c, B, classes]``, or ``[c, B, 1]`` for targets.
    y : Tensor
        Classes, int64 ``[c, B]``, or targets, float32.
    """
    if y.is_floating_point():
        return (outputs.squeeze(-1) - y).square()
    return F.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
