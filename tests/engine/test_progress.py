"""What a run says of a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcfl
from hpcfl.engine.record import Reporter
from hpcfl.testing.runs import table

ROW: dict[str, Any] = {
    "client_test_loss": np.array([1.0, np.nan, 2.0]),
    "client_accuracy": np.array([0.25, np.nan, 0.75]),
    "mean_client_test_loss": 1.5,
    "mean_client_accuracy": 0.5,
    "cohort": np.array([1, 1, 1]),
    "arrived": np.array([1, 0, 1]),
    "loss": 1.5,
    "sim_seconds": 2.25,
}


@pytest.mark.parametrize("clock", ["simulated", "wall"])
def test_seconds_are_called_by_their_clock(clock: str, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(9, 0, clock)
    reporter.round(1, {**ROW, "sim_seconds": 1.0})
    reporter.round(2, {key: value for key, value in ROW.items() if "client_" not in key})  # not evaluated
    reporter.round(3, {**ROW, "unreachable": 2})
    reporter.close()
    assert capsys.readouterr().out.splitlines() == [
        f"round 1/9  mean_client_accuracy 0.5000  loss 1.5000  2/3 arrived  {clock} 1.0 s",
        f"round 3/9  mean_client_accuracy 0.5000  loss 1.5000  2/5 arrived, 2 unreachable  {clock} 2.2 s",
    ]


def test_an_accuracy_that_is_printed_is_recorded_under_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a model that all share the global test set tests nothing: `accuracy` is NaN, the clients' mean is not."""
    values = table("fedavg", "mlp", True, rounds=2, algorithm={"name": "local"})
    values |= {"evaluate": {"every": 1, "last": 1}}
    data = hpcfl.run(values, out=tmp_path / "run", quiet=False).data
    told, means = capsys.readouterr().out.splitlines(), data["mean_client_accuracy"].values
    assert np.isnan(data["accuracy"].values).all()
    np.testing.assert_array_equal(means, data["client_accuracy"].mean("client").values)
    np.testing.assert_array_equal(data["mean_client_test_loss"], data["client_test_loss"].mean("client").values)
    assert [line.split("  ")[1] for line in told] == [f"mean_client_accuracy {mean:.4f}" for mean in means]
