"""What tests do to runs: an act after each round, a job put together without being run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpcfl.config import Config, from_table
from hpcfl.engine.job import Job
from hpcfl.engine.record import Reporter
from hpcfl.testing.runs import table


def after_each_round(monkeypatch: pytest.MonkeyPatch, act: Callable[[int, Any], Any]) -> None:
    """Do something, given how many rounds are done and the last one's row, when a round has been told of."""
    tell = Reporter.round

    def told(self: Reporter, done: int, row: Any) -> None:
        tell(self, done, row)
        act(done, row)

    monkeypatch.setattr(Reporter, "round", told)


def put_together(config: Config, ranks: int = 1) -> Job:
    """Return the job of a config after its check, as a run does; UsageError from either."""
    config.check(None)
    return Job.of(config, None, ranks)


def job_in_real_time(ranks: int, **more: Any) -> Job:
    """SALF with momentum that is kept and a model of three layers, by the wall clock; 7 clients."""
    model = {"name": "mlp", "hidden": [16, 8]}
    plain = {"speed": {"model": "none"}, "participation": {"close": "all"}, "model": model, "threads": 1}
    values = {**table("salf", "mlp", False), **plain, "clock": "wall", **more}
    return put_together(from_table(values), ranks)
