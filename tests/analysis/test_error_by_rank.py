"""The script of FedLRGD's error by rank: slopes of made-up errors, and figures of small runs computed another way."""

from __future__ import annotations

import json
import sys
from math import e, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_flic_figures import script

from hpcfl import store
from hpcfl.algorithms.fedlrgd.low_rank import Bound, Surrogates, inverted, solved
from hpcfl.contrib.theory.optimum import PooledObjective
from hpcfl.results.trained import open_models
from hpcfl.sums.guard import Watch
from hpcfl.testing.runs import alone, toml

error_by_rank = script("error_by_rank")
RANKS = [2, 4, 8, 16]
METHOD: dict[str, Any] = {"name": "fedlrgd", "rank": 2}
COMMON: dict[str, Any] = {
    "rounds": 1,
    "clients": 2,
    "seed": 3,
    "precision": "double",
    "algorithm": METHOD,
    "data": {"name": "unit_cube", "dimension": 1, "labels": 1, "samples": 3, "test_samples": 0, "server": 5},
    "model": {"name": "glm", "link": "rough", "smoothness": 2.0, "ridge": 0.05},
}


def made(folder: Path, **more: Any) -> Path:
    values = {**COMMON, **more}
    alone(values, toml(values, folder.with_suffix(".toml")), folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for rank in (2, 4):
        made(folder / f"rank-{rank}", algorithm={**METHOD, "rank": rank})
    return folder


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: Path | str) -> Any:
    """Run the script in this process; return its JSON."""
    monkeypatch.setattr(sys, "argv", ["error_by_rank", *map(str, words)])
    error_by_rank.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


# lines through made-up errors


def test_the_slope_of_a_power_law_is_its_exponent() -> None:
    found = error_by_rank.line(RANKS, [3 * rank**-1.5 for rank in RANKS], 1e-9)
    assert found == pytest.approx({"slope": -1.5, "late": -1.5, "bend": 0})


def test_a_bend_is_the_parabolas() -> None:
    values = [np.exp(-0.25 * log(rank) ** 2 - log(rank)) for rank in RANKS]
    found = error_by_rank.line(RANKS, values, 0.0)
    assert found["bend"] == pytest.approx(-0.25)
    # a parabola's secants over equal steps have its slope in the middle
    assert found["slope"] == pytest.approx(-1 - 0.5 * log(2 * 16) / 2)
    assert found["late"] == pytest.approx(-1 - 0.5 * log(8))


def test_what_comes_after_the_floor_is_reached_does_not_count() -> None:
    found = error_by_rank.line(RANKS, [1e-1, 1e-3, 1e-9, 1e-1], 1e-5)
    assert found == pytest.approx({"slope": -2 / np.log10(2), "late": -2 / np.log10(2), "bend": 0})
    assert error_by_rank.line(RANKS, [1e-6, 1, 1, 1], 1e-5) == dict.fromkeys(("slope", "late", "bend"))
    assert error_by_rank.line([2, 4], [1.0, 0.5], 0.0) == {"slope": pytest.approx(-1), "late": None, "bend": None}


def row(law: str, smoothness: float | None, seed: int, rank: int, error: float) -> Any:
    figures = {"error": error, "rms": 2 * error, "relative": error, "best": error**2, "condition": 1.0, "truncated": 0}
    return error_by_rank.Row(law, smoothness, 2, seed, rank, **figures)


def test_slopes_are_means_over_seeds_and_compared_seed_by_seed() -> None:
    exponents = {("rough", 1.0): (-0.4, -0.6, -0.8), ("rougher", 0.8): (-0.3, -0.3, -0.3)}
    exponents |= {("tanh", None): (-2, -3, -5), ("softmax", None): (-1, -1, -1)}
    rows = [
        row(*law, seed, rank, rank**exponent)
        for law, own in exponents.items()
        for seed, exponent in enumerate(own)
        for rank in RANKS
    ]
    cases = error_by_rank.slopes(rows, 0.0)
    assert [case["law"] for case in cases] == ["rougher", "rough", "softmax", "tanh"]  # by smoothness
    assert [case["theory"] for case in cases] == [-0.4, -0.5, None, None]
    assert [case["error"]["as_fast"]["slope"] for case in cases] == [False, True, None, None]
    assert [case["best"]["as_fast"]["late"] for case in cases] == [True, True, None, None]  # twice the exponent
    rough = cases[1]["error"]
    assert rough["slope"] == {"mean": pytest.approx(-0.6), "error": pytest.approx(0.2 / sqrt(3))}
    assert rough["slopes"] == pytest.approx([-0.4, -0.6, -0.8])
    first, _, second = pairs = error_by_rank.steepening(cases)
    known = [(pair["from"], pair["to"]) for pair in pairs]
    assert known == [("rougher", "rough"), ("rough", "softmax"), ("rough", "tanh")]
    assert first["error"]["mean"] == pytest.approx(-0.3)
    assert second["error"]["mean"] == pytest.approx(-(1.6 + 2.4 + 4.2) / 3)


@pytest.mark.parametrize(("d", "eta", "expected"), [(1, 1.0, 2 * e), (1, 4.0, 8 * e), (2, 2.0, 36 * sqrt(2) * e)])
def test_the_theorem_speaks_of_large_ranks_only(d: int, eta: float, expected: float) -> None:
    assert error_by_rank.needed(d, eta) == np.ceil(expected)


# matrices


def test_what_the_best_rank_leaves_are_the_small_singular_values() -> None:
    one = torch.zeros(3, 4, dtype=torch.float64)
    one[[0, 1, 2], [1, 2, 0]] = torch.tensor([2.0, 3.0, 1.0], dtype=torch.float64)
    two = torch.ones(3, 4, dtype=torch.float64)
    found = error_by_rank.tails(torch.stack([one, two]), [1, 2, 3])
    assert found == pytest.approx([sqrt(5 / 12), sqrt(1 / 12), 0], abs=1e-14)


def test_gradients_of_low_rank_are_reweighted_without_error() -> None:
    rng = np.random.default_rng(0)
    low = torch.from_numpy(rng.normal(size=(2, 9, 3)) @ rng.normal(size=(2, 3, 8)))  # 2 coordinates, 9 θ, 8 samples
    own, points = slice(4, 7), slice(0, 3)  # of 4 samples of the server's the first 3 stand in; the first θ are ϑ
    others = low.sum(2) - low[:, :, own].sum(2)
    inverse, _ = inverted(low[:, points, own], 0.0, 0.0)
    weights = (1 + solved(inverse, others[:, points].T)) / 8
    error, exact = error_by_rank.errors(low, weights, 4)
    assert error == pytest.approx(np.zeros(9), abs=1e-12)
    assert exact == pytest.approx(low.mean(2).norm(dim=0).numpy())
    off, _ = error_by_rank.errors(low, weights + 1, 4)
    assert off == pytest.approx(low[:, :, own].sum(2).norm(dim=0).numpy())


# runs


def test_errors_are_those_of_the_runs_weights(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "error.png"
    folders = [runs / "rank-2", runs / "rank-4"]
    found = printed(monkeypatch, capsys, *folders, "--points", "7", "-o", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [own["rank"] for own in found["runs"]] == [2, 4]
    for folder, own in zip(folders, found["runs"]):
        models = open_models(folder)
        objective, points = PooledObjective(models.task), error_by_rank.fresh(models, 7)
        held = models.task.server_batch()
        assert held is not None
        stand_ins = Surrogates(models.task, held, own["rank"], Bound.of(2**20, 2, own["rank"], 8))
        weights = torch.from_numpy(models.extras["weights"])
        exact = [objective.gradient(point.numpy()) for point in points]
        apart = [np.linalg.norm(stand_ins.gradient(at, weights).numpy() - to) for at, to in zip(points, exact)]
        assert own["error"] == pytest.approx(np.median(apart))
        assert own["rms"] == pytest.approx(sqrt(np.mean(np.square(apart))))
        assert own["relative"] == pytest.approx(np.median(apart / np.linalg.norm(exact, axis=1)))
        assert own["condition"] == store.open_run(folder)["worst_condition"].values[-1]
    (case,) = found["slopes"]
    assert (case["law"], case["dimension"], case["theory"]) == ("rough, η = 2", 1, -2.0)
    two, four = (own["error"] for own in found["runs"])
    assert case["error"]["slope"]["mean"] == pytest.approx(np.log2(four / two))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"algorithm": {"name": "fedavg"}}, "algorithm.name = 'fedavg': expected 'fedlrgd'"),
        (
            {"participation": {"close": "deadline", "deadline": 1e-9}, "speed": {"model": "exponential"}},
            "has no weights: expected a run in which clients' sums have arrived",
        ),
        ({"algorithm": {**METHOD, "scale": 2.0}}, "algorithm.scale: the runs have 1.0, 2.0; expected one of them only"),
    ],
)
def test_other_runs_are_refused_in_one_line(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], expected: str
) -> None:
    monkeypatch.setattr(Watch, "ended", lambda self: "")  # one of them learns nothing
    other = made(tmp_path / "other", **more)
    monkeypatch.setattr(sys, "argv", ["error_by_rank", str(runs / "rank-2"), str(other)])
    with pytest.raises(SystemExit) as caught:
        error_by_rank.main()
    (line,) = str(caught.value).splitlines()
    assert line.endswith(expected)


def test_as_many_points_as_ranks_are_too_few(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["error_by_rank", str(runs / "rank-4"), "--points", "4"])
    with pytest.raises(SystemExit, match="--points 4: expected more than the largest rank, 4"):
        error_by_rank.main()
