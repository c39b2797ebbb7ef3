"""The script of running times: Erlang's law where it can be worked out, against simulations, and on a run."""

from __future__ import annotations

import json
from math import exp, log, sqrt
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from helpers.scripts import script
from hpcfl.testing.runs import alone, toml


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return script("running_time")


def test_the_quantile_and_the_mean_by_hand(study: ModuleType) -> None:
    """Exponential times, b = 1: F^-1(1 - 1/m) = log m, E max = 1 + 1/2 + … + 1/m. Two of shape 2: E max = 2.75."""
    for m in (2, 10, 1000):
        assert study.quantile(1, m) == pytest.approx(log(m), rel=1e-12)
        assert study.slowest(1, m) == pytest.approx(1 + sum(1 / k for k in range(1, m + 1)), rel=1e-9)
    # E max = 2 E Y - E min, and E min = ∫ (1 + y)² exp(-2y) dy = 1/2 + 1/2 + 1/4
    assert study.slowest(2, 2) == pytest.approx(2 + 2 * 2 - 1.25, rel=1e-9)
    assert study.slowest(7, 1) == pytest.approx(2 * 7, rel=1e-9)  # eq. 20: the server is one client


def test_quantiles_are_within_the_bounds_of_proposition_2(study: ModuleType) -> None:
    for b in (1, 3, 20, 500):
        for m in (2, 12, 56, 10**4):
            found = study.bounds(b, m)
            assert (found is None) == ((m - 1) * b < 55)
            if found is not None:
                assert found[0] <= study.quantile(b, m) <= found[1]
    y = study.quantile(3, 100)
    assert 1 - exp(-y) * (1 + y + y * y / 2) == pytest.approx(1 - 1 / 100, rel=1e-12)  # eq. 73


@pytest.mark.parametrize(("b", "m"), [(1, 50), (20, 50), (200, 5)])
def test_the_law_is_that_of_the_simulation(study: ModuleType, b: int, m: int) -> None:
    mean, error = study.simulated(b, m, np.random.default_rng(5), draws=4000)
    assert error < 0.02 * mean
    assert abs(mean - study.slowest(b, m)) < 4 * error
    assert study.limit(b, m) == pytest.approx(study.slowest(b, m), rel=0.03)


def test_the_queue_lets_one_vector_go_per_unit(study: ModuleType) -> None:
    mean, variance = study.queue(30, np.random.default_rng(7), draws=8000)
    assert abs(mean - 30) < 4 * sqrt(30 / 8000)
    assert variance == pytest.approx(30, rel=0.1)


def test_a_run(study: ModuleType, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Two rounds of 3 steps on one sample by 4 clients, φ = 2: 2 (6 + log 4 + 2 · 4) by eq. 25."""
    config = {
        **{"rounds": 2, "clients": 4, "seed": 1, "participation": {"close": "all"}},
        "oracle": {"record": True, "phi": 2.0},
        "algorithm": {"name": "fedavg", "epochs": 0, "steps": 3, "batch": 1},
        "data": {"name": "unit_cube", "samples": 5, "test_samples": 0},
        "model": {"name": "glm"},
    }
    alone(config, toml(config, tmp_path / "run.toml"), tmp_path / "run")
    monkeypatch.setattr("sys.argv", ["running_time", str(tmp_path / "run"), "--gradients", "3", "--clients", "4"])
    study.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["running_time"]
    (run,), (law,) = found["runs"], found["laws"]
    assert run["recorded"] == pytest.approx(2 * (6 + log(4) + 8))
    assert run["law"] == pytest.approx(2 * (law["law"] + 8))
    assert abs(run["simulated"] - run["law"]) < 4 * run["error"]
