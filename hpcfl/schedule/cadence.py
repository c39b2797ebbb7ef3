"""In which rounds models are tested and checkpoints are written."""

from __future__ import annotations

from pydantic import Field

from hpcfl.base.config import ConfigBase


class Evaluate(ConfigBase):
    """When models are evaluated, and what else is computed then."""

    every: int = Field(10, ge=1)
    """Rounds from one evaluation to the next."""
    last: int = Field(10, ge=1)
    """Models are also evaluated after each of so many last rounds of the run."""
    objective: bool = False
    """Record the objective too: the mean loss over all training samples, the clients' under the models that they
    predict with (of those that take part), the server's own (if it holds any) under the shared one, each with the
    penalty. Nothing is drawn for it: no dropout, no augmentation. In real time it is not known where a client did not
    answer."""

    def due(self, done: int, rounds: int) -> bool:
        """Return whether the state after `done` of `rounds` rounds is evaluated."""
        return done % self.every == 0 or done > rounds - self.last


class Checkpoints(ConfigBase):
    """When checkpoints are written, and how many are kept."""

    every: int = Field(50, ge=1)
    """Rounds from one checkpoint to the next; one more is written at the end."""
    keep: int = Field(2, ge=1)
    """Checkpoints that are kept, the newest ones."""

    def due(self, done: int, rounds: int) -> bool:
        """Return whether the state after `done` of `rounds` rounds is saved."""
        return done % self.every == 0 or done == rounds
