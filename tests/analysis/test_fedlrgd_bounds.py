"""The bounds of FedLRGD's paper: formulas as printed, by loops; Lemma 2 and the wrapper of studies on small runs."""

from __future__ import annotations

import json
from itertools import count, product
from math import e, exp, factorial, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpcfl
from helpers.scripts import script
from hpcfl.config import load
from hpcfl.contrib.theory.complexity import Constants
from hpcfl.testing.runs import alone, toml

bounds, descent, runs = (script(f"fedlrgd_{name}") for name in ("bounds", "descent", "runs"))
ROUND = Constants(dimension=1, parameters=2, smooth=2.0, convex=1.0, bound=1.0, start=0.5)


@pytest.mark.parametrize(("m", "b", "epsilon"), [(3, 1, 0.5), (3, 7, 0.5), (40, 11, 0.05), (5, 400, 2.0)])
def test_lemma_3_as_printed_allows_of_no_fewer_epochs(m: int, b: int, epsilon: float) -> None:
    smooth, convex, kappa, variance, apart = 2.0, 1.0, 2.0, 2.0, 8.0

    def bound(epochs: int) -> float:
        u = epochs * b + 1
        return (
            smooth * (first * b + 1) ** 2 / (2 * u**2) * apart
            + 8 * kappa * variance / (convex * m) * b / u
            + 8 * e * smooth * kappa**2 * variance / m * (b - 1) ** 2 / u
            + 128 * e * kappa**3 * variance / convex * (b - 1) / u**2
        )

    first = 4 * max(kappa, 4, 4 * m / (convex**2 * b))
    found = int(bounds.lemma3(ROUND, m, np.array([float(b)]), epsilon)[0])
    assert bound(found) <= epsilon
    assert found == next(epochs for epochs in count(found - 3) if epochs >= first and bound(epochs) <= epsilon)


def test_the_least_cost_of_fedave_is_that_of_all_b() -> None:
    costs = [float(bounds.lemma3(ROUND, 6, np.array([float(b)]), 0.1)[0]) * (b + 600) for b in range(1, 200)]
    assert exp(bounds.fedave(ROUND, 6, 0.1)) == pytest.approx(min(costs))


def test_gamma_of_theorem_2_is_the_sum_of_its_terms() -> None:
    log_rank, steps, gamma = bounds.lrgd(bounds.problem(2), 50, 1e-2)
    r = exp(log_rank)
    assert (int(np.ceil(r)), steps) == (46_671, 1312)  # as `hpcfl check fedlrgd-logistic` has it
    assert exp(gamma) == pytest.approx(r * r + 50 * r + r * steps + 100 * 50 * r)


def test_ratios_are_those_at_an_accuracy_that_follows_from_all_samples() -> None:
    known, m = bounds.problem(1), 1e4
    form, lemma3 = bounds.ratios(known, 4.0)
    n = 50 * m
    for _ in range(20):
        n = 50 * m + exp(known.best_log_rank(n**-0.5)[0])
    gamma = bounds.lrgd(known, m, n**-0.5)[2]
    assert 10**form == pytest.approx(exp(gamma) / (8 * 100 * m * (2 * sqrt(n)) ** 0.75), rel=1e-3)
    assert 10**lemma3 == pytest.approx(exp(gamma - bounds.fedave(known, m, n**-0.5)), rel=1e-3)


def test_the_last_place_where_a_ratio_is_not_below_1_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {0.0: (-1.0, -1.0), 0.5: (1.0, -2.0), 1.0: (0.0, -3.0), 1.5: (-1.0, -4.0), 2.0: (-2.0, -5.0)}
    monkeypatch.setattr(bounds, "POWERS", np.array(list(cases)))
    monkeypatch.setattr(bounds, "ratios", lambda known, power: cases[power])
    assert bounds.proposition1(1) == {"d": 1, "form": 1.5, "lemma3": 0.0, "ratios": {"2": [-2.0, -5.0]}}
    monkeypatch.setattr(bounds, "POWERS", np.array([0.0, 0.5]))
    assert bounds.proposition1(1)["form"] is None


def test_theorem_1_as_printed() -> None:
    for d, eta, rank, steep in ((2, 1, 64, 1.2), (3, 4, 9e5, 0.7)):
        low = eta - 1
        squared = steep**2 * e ** (2 * eta / d) * d ** (eta / d) * 4**eta * (low + d) ** (2 * eta)
        squared *= (1 / rank) ** (2 * eta / d) / factorial(low) ** 2
        assert bounds.theorem1(d, eta, rank, steep) == pytest.approx(sqrt(squared))
    found = bounds.low_rank(1, 128)
    assert (found["needed"], found["eta"]) == (62, 1)
    assert bounds.low_rank(2, 128)["bound"] is None


def test_the_least_rank_is_one_at_which_the_bound_is_low_enough() -> None:
    least = bounds.low_rank(1, 64)["least"]
    assert bounds.low_rank(1, least)["bound"] <= bounds.LEVEL
    assert bounds.low_rank(1, least - 5)["bound"] > bounds.LEVEL


@pytest.mark.parametrize("eta", [1, 2, 3, 5])
def test_piecewise_polynomials_are_those_of_all_derivatives(eta: int) -> None:
    """Eq. 49 with derivatives by automatic differentiation, a point at a time."""
    cells, points, worst = 2, 6, 0.0
    at = (np.arange(points) + 0.5) / points
    for w, b, x, y in product((-1.0, -0.3, 0.6, 1.0), (-1.0, 0.0, 1.0), at, at):
        z = [torch.tensor((np.floor(each * cells) + 0.5) / cells, requires_grad=True) for each in (x, y)]
        total = 0.0
        for first, second in product(range(eta), range(eta)):
            if first + second < eta:
                value = z[0] * (torch.sigmoid(w * z[0] + b) - z[1])
                for variable in (*[z[0]] * first, *[z[1]] * second):
                    (value,) = torch.autograd.grad(value, variable, create_graph=True, materialize_grads=True)
                    value = value + 0 * (z[0] + z[1])
                term = value.item() * (x - z[0].item()) ** first * (y - z[1].item()) ** second
                total += term / (factorial(first) * factorial(second))
        worst = max(worst, abs(x * (1 / (1 + exp(-w * x - b)) - y) - total))
    bound = float(bounds.holder(eta, np.array(1.0))) / (factorial(eta - 1) * cells**eta)
    assert bounds.lemma1(eta, cells, points) == pytest.approx(worst / bound, rel=1e-6)
    assert worst <= bound


def test_the_chance_of_samples_in_all_cells() -> None:
    """Four samples, one in each quarter: 4!/4⁴. Three of one cell: always."""
    assert bounds.invertible(2, 1) == {"r": 4, "cells": 4, "monomials": 1, "log10": pytest.approx(np.log10(24 / 256))}
    assert bounds.invertible(1, 2)["log10"] == pytest.approx(0.0, abs=1e-12)


def test_appendix_a_is_no_less_than_what_is_found() -> None:
    for d in (2, 4):
        found = bounds.appendix(d, draws=2000)
        assert found["curvature"] == pytest.approx((d - 1) / 4 + 0.01)
        assert found["second"] <= found["L2"]
        assert found["curvature"] < found["L1"]


# Lemma 2


def test_lemma_2_as_printed() -> None:
    errors, kept = np.array([0.3, 0.0, 0.2, 0.1]), 1 - 0.5 / 2
    found, made = descent.bounds(4.0, errors, 2.0, 0.5)
    for steps in (1, 2, 3, 4):
        own = sum(kept ** (steps - g) * errors[g - 1] for g in range(1, steps + 1)) / (2 * 2.0)
        assert made[steps - 1] == pytest.approx(own)
        assert found[steps - 1] == pytest.approx(kept**steps * 4.0 + own)


@pytest.mark.parametrize("penalty", ["reweighted", "exact"])
def test_steps_are_taken_again_as_they_were(tmp_path: Path, penalty: str) -> None:
    config: dict[str, Any] = {
        **{"rounds": 4, "clients": 5, "seed": 4, "precision": "double", "participation": {"close": "all"}},
        "evaluate": {"every": 1, "objective": True},
        "algorithm": {"name": "fedlrgd", "rank": 4, "lr": 1.3, "steps": 3, "penalty": penalty},
        "data": {"name": "unit_cube", "dimension": 1, "samples": 12, "server": 6, "test_samples": 0},
        "model": {"name": "glm", "link": "logistic", "ridge": 0.05},
    }
    alone(config, toml(config, tmp_path / "run.toml"), tmp_path / "run")
    found = descent.of_run(tmp_path / "run")
    models, data = hpcfl.open_models(tmp_path / "run"), hpcfl.open_run(tmp_path / "run")
    gaps, errors, _ = descent.descended(models, 9)
    recorded = data["objective"].values
    np.testing.assert_allclose(np.diff(gaps[::3]), np.diff(recorded), rtol=0, atol=1e-14)
    assert (found["steps"], found["held"], found["apart"]) == (9, 9, 0.0)
    assert errors.min() > 0
    # the inverse itself, of each coordinate's matrix
    matrices = descent.surrogates(models).matrices(torch.from_numpy(models.shared["points"]), slice(None))
    largest = max(np.linalg.norm(np.linalg.inv(each), 2) for each in matrices.numpy())
    assert found["alpha"] == pytest.approx(log(largest) / log(4))


# runs of studies


def test_each_run_of_a_study_is_a_config() -> None:
    for study in runs.STUDIES.values():
        asked = study.runs()
        assert len(asked) == len({json.dumps(run) for run in asked})
        for preset, settings in study.runs(study.seeds[:1]):
            assert load(preset, settings, []).seed == study.seeds[0]
    assert [len(runs.STUDIES[name].runs()) for name in ("gamma", "error")] == [159, 315]


def test_a_study_makes_its_runs_and_prints_its_script_s_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"algorithm.rank": [2, 4], "data.dimension": [1]}
    settings = {"data.samples": 3, "data.server": 5, "clients": 2}
    study = runs.Study("error_by_rank", [runs.Sweep("fedlrgd-rough", settings, sizes)], [1, 2, 3], ("--brief",))
    monkeypatch.setitem(runs.STUDIES, "error", study)
    monkeypatch.setattr("sys.argv", ["fedlrgd_runs", "error", str(tmp_path), "--seeds", "3"])
    runs.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sorted(found) == ["points", "slopes", "steepening"]
    (case,) = found["slopes"]
    assert (case["seeds"], case["medians"]["rank"]) == ([3], [2, 4])
    assert len(case["medians"]["best"]) == len(case["medians"]["error"]) == 2
