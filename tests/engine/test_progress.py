"""What a run says of a round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpcfl.engine.progress import Reporter

ROW: dict[str, Any] = {
    "client_test_loss": np.array([1.0, np.nan, 2.0]),
    "client_accuracy": np.array([0.25, np.nan, 0.75]),
    "cohort": np.array([1, 1, 1]),
    "arrived": np.array([1, 0, 1]),
    "loss": 1.5,
    "sim_seconds": 2.25,
}


@pytest.mark.parametrize("clock", ["simulated", "wall"])
def test_seconds_are_called_by_their_clock(clock: str, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(9, 0, clock)
    reporter.round(1, {**ROW, "sim_seconds": 1.0})
    reporter.round(2, {key: value for key, value in ROW.items() if not key.startswith("client_")})  # not evaluated
    reporter.round(3, ROW)
    reporter.close()
    assert capsys.readouterr().out.splitlines() == [
        f"round 1/9  accuracy 0.5000  loss 1.5000  2/3 arrived  {clock} 1.0 s",
        f"round 3/9  accuracy 0.5000  loss 1.5000  2/3 arrived  {clock} 2.2 s",
    ]
