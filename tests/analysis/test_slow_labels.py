"""The picture of slow clients with labels of their own: what is run, and its figures computed again by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from slow_labels import METHODS, Curve, curve, draw, figures

import hpcfl


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slow")


def test_the_slow_third_holds_digits_that_nobody_else_has(runs: Path) -> None:
    curve("SALF, eq. 9", 1, 1, 0.2, runs)
    (folder,) = runs.glob("SALF--eq--9_*")
    labels = [set(model.data.train_labels.tolist()) for model in hpcfl.open_models(folder)]
    slow, others = set().union(*labels[8:]), set().union(*labels[:8])
    assert slow == {7, 8, 9}
    assert not slow & others


def test_a_curve_is_the_mean_over_clients_against_simulated_time(runs: Path) -> None:
    found = curve("FedAvg that waits", 2, 10, 0.2, runs)
    (folder,) = runs.glob("FedAvg-that-waits_*")
    data = hpcfl.open_run(folder)
    accuracy = data["client_accuracy"].values  # the last 10 rounds are evaluated one by one
    np.testing.assert_allclose(found.all, accuracy.mean(1))
    np.testing.assert_allclose(found.slow, accuracy[:, 8:].mean(1))
    np.testing.assert_array_equal(found.seconds, data["sim_seconds"].values)
    assert found.seconds[-1] > 10 * 0.5  # it waits for visits of 5 seconds on average


def test_every_method_closes_its_rounds_and_takes_steps_of_one_size(runs: Path) -> None:
    for method in METHODS:
        found = curve(method, 1, 1, 0.1, runs)
        assert (found.seconds[-1] == pytest.approx(0.5)) == (method != "FedAvg that waits")
    for folder in runs.glob("*_lr=0.1_seed=1"):
        config = hpcfl.open_run(folder).attrs["config"]
        assert '"lr":0.1' in config.replace(" ", "")


def test_figures_are_means_and_deviations_at_equal_times(tmp_path: Path) -> None:
    times = np.array([1.0, 2.0, 4.0])
    one = Curve(times, np.array([0.1, 0.5, 0.7]), np.array([0, 0, 0.2]))
    two = Curve(times, np.array([0.3, 0.7, 0.9]), np.array([0, 0.2, 0.6]))
    late = Curve(np.array([3.0, 50.0]), np.array([0.2, 0.9]), np.array([0.4, 0.8]))
    found = {method: [one, two] for method in METHODS} | {"FedAvg that waits": [late, late]}
    first, second, *_ = figures(found, 4.0)
    assert first["all"] == {"1": None, "2": None, "4": [0.2, 0.0]}
    assert first["at_the_end"] == [0.9, 0.8]
    assert first["ends"] == 50.0
    root = round(math.sqrt(0.02), 4)
    assert second["all"] == {"1": [0.2, root], "2": [0.6, root], "4": [0.8, root]}
    assert second["slow"]["4"] == [0.4, round(math.sqrt(0.08), 4)]
    assert second["seeds"] == 2
    draw(found, 4.0, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
