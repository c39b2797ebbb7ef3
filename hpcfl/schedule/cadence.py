"""In which rounds models are tested and checkpoints are written, and after which a run ends early."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isnan, nan
from typing import Any, Literal

import numpy as np
from pydantic import Field

from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError, did_you_mean, refusal

LOSSES = ("test_loss", "objective")


class Evaluate(ConfigBase):
    """When models are evaluated, and what else is computed then."""

    every: int = Field(10, ge=1)
    """Rounds from one evaluation to the next."""
    last: int = Field(10, ge=1)
    """Models are also evaluated after each of so many last rounds of the run."""
    objective: bool = False
    """Record the objective too: the mean loss over all training samples, of clients that take part under the models
    that they predict with, of the server's under the shared one, with the penalty, without dropout or augmentation. In
    real time it is not known where a client did not answer."""

    def due(self, done: int, rounds: int) -> bool:
        """Return whether the state after `done` of `rounds` rounds is evaluated."""
        return done % self.every == 0 or done > rounds - self.last


class Target(ConfigBase):
    """When a run ends before its last round; it is done then, and may be given more."""

    accuracy: float | None = Field(None, gt=0, le=1)
    """End after the first test with so much accuracy, of the shared model or, if that is not tested, the mean over
    clients. By default never."""
    patience: int | None = Field(None, ge=1)
    """End after so many tests in a row without a better one, by accuracy or, where a task has none, by the loss. By
    default never."""

    def check(self, metrics: Iterable[str]) -> None:
        """Raise UsageError where no test gives an accuracy that is waited for."""
        if self.accuracy is not None and "accuracy" not in metrics:
            instead = "did you mean stop.patience?"
            raise UsageError(f"stop.accuracy = {self.accuracy:g}: no test of this task gives an accuracy; {instead}")


class Checkpoints(ConfigBase):
    """When checkpoints are written, and how many are kept."""

    every: int = Field(50, ge=1)
    """Rounds from one checkpoint to the next; one more is written at the end."""
    keep: int = Field(2, ge=1)
    """Checkpoints that are kept, the newest ones."""
    keep_every: int | None = Field(None, ge=1)
    """Keep for good those after a multiple of so many rounds, itself a multiple of `every`. By default none."""
    keep_best: str | None = None
    """Keep the best one too, by this figure of its evaluation: ``test_loss``, a metric (``accuracy``), ``objective``;
    without a global test set by the mean of the clients' own. Of equals the newest. By default none."""
    best: Literal["auto", "largest", "smallest"] = "auto"
    """What is best. ``auto``: the smallest loss or objective, the largest metric."""

    def due(self, done: int, rounds: int) -> bool:
        """Return whether the state after `done` of `rounds` rounds is saved."""
        return done % self.every == 0 or done == rounds

    def kept(self, scores: Mapping[int, float]) -> set[int]:
        """Return which checkpoints stay of those after so many rounds, the last of which is new."""
        stay = set(sorted(scores)[-self.keep :])
        stay |= {done for done in scores if self.keep_every and done % self.keep_every == 0}
        known = [(score, done) for done, score in scores.items() if not isnan(score)]
        return stay | ({max(known)[1]} if known else set())

    def score(self, scores: Mapping[str, Any]) -> float:
        """Return how good a state is, more being better, whose evaluation gave these `scores`, if any; NaN: unknown."""
        if self.keep_best is None:
            return nan
        value = scores.get(self.keep_best)
        if value is None:
            own = np.asarray(scores.get(f"client_{self.keep_best}", ()), np.float64)
            known = own[~np.isnan(own)]
            value = known.mean() if len(known) else nan
        least = self.best == "smallest" or (self.best == "auto" and self.keep_best in LOSSES)
        return -float(value) if least else float(value)

    def check(self, evaluate: Evaluate, metrics: Iterable[str]) -> None:
        """Raise UsageError for keys that do not go together, or not with what is evaluated, and when."""
        if self.keep_every and self.keep_every % self.every:
            near = self.every * max(1, round(self.keep_every / self.every))
            multiple = f"a multiple of checkpoint.every = {self.every}"
            raise refusal("checkpoint.keep_every", multiple, self.keep_every, near)
        if self.keep_best is None:
            if self.best != "auto":
                why = "has no meaning without checkpoint.keep_best: did you mean 'auto'?"
                raise UsageError(f"checkpoint.best = '{self.best}' {why}")
            return
        names = ["test_loss", *metrics, *(["objective"] if evaluate.objective else [])]
        if self.keep_best not in names:
            hint = did_you_mean(self.keep_best, names)
            raise UsageError(f"checkpoint.keep_best: no test gives '{self.keep_best}'{hint}")
        if self.every % evaluate.every:
            multiple = f"a multiple of evaluate.every = {evaluate.every}"
            why = "as checkpoint.keep_best compares states that were evaluated"
            near = evaluate.every * -(-self.every // evaluate.every)
            raise refusal("checkpoint.every", f"{multiple}, {why}", self.every, near)
