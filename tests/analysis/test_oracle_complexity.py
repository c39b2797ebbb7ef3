"""The script of oracle complexity: Γ(ε), who wins and where, by hand on made-up curves and on runs of a few rounds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from math import inf, log
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import hpcfl
from helpers.scripts import script
from hpcfl.testing.runs import alone, toml

CLIENTS, SAMPLES, SERVER, RANK, STEPS = 4, 5, 6, 3, 40
FEDLRGD = {"name": "fedlrgd", "rank": RANK, "lr": 1.0, "steps": STEPS}
FEDAVE = {"name": "fedavg", "epochs": 0, "steps": 1, "batch": 0, "lr": 1.0}
CUBE = {"name": "unit_cube", "samples": SAMPLES, "server": SERVER, "test_samples": 0}


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return script("oracle_complexity")


# made-up curves


Curve = Callable[..., Any]


@pytest.fixture
def curve(study: ModuleType) -> Curve:
    """A run with these gaps that spends so much per evaluation, and so much on the first one more."""

    def made(
        method: str, gap: list[float], gradients: float, vectors: float, once: tuple[float, float] = (0, 0), **more: Any
    ) -> Any:
        steps = np.arange(1, len(gap) + 1)
        given = {"problem": '{"clients": 2, "data": {"name": "cube"}, "model": {}}', "setting": "{}", "seed": 1}
        return study.Run(
            **{**given, "start": 1.0, "least": 0.0, **more},
            method=method,
            gap=np.array(gap),
            gradients=once[0] + gradients * steps,
            vectors=once[1] + vectors * steps,
            computing=2 * (once[0] + gradients * steps),
            count=steps,
        )

    return made


def powers(count: int) -> list[float]:
    """Return 0.1, 0.01, …"""
    return [10.0**-k for k in range(1, count + 1)]


def test_gamma_is_that_of_the_first_evaluation_within_epsilon(curve: Curve) -> None:
    run = curve("FedAve", [0.5, 0.1, 0.2, 0.01], gradients=3, vectors=4)
    assert [run.at(epsilon) for epsilon in (0.5, 0.1, 0.09, 0.001)] == [0, 1, 3, None]
    assert [run.kept().at(epsilon) for epsilon in (0.5, 0.1, 0.09, 0.001)] == [0, 3, 3, None]
    assert list(run.complexity(10)) == [43, 86, 129, 172]
    assert list(run.time(10)) == [46, 92, 138, 184]


def test_a_method_has_the_setting_that_is_least_at_each_epsilon_and_phi(study: ModuleType, curve: Curve) -> None:
    slow = curve("FedAve", powers(4), gradients=5, vectors=1)
    fast = curve("FedAve", powers(2), gradients=1, vectors=2)
    case = {"slow": [slow], "fast": [fast]}

    def found(epsilon: float, phi: float) -> tuple[float, list[Any]]:
        best = study.best(case, study.Run.complexity, epsilon, phi)
        return best.cost, list(best.runs)

    assert found(0.01, 1) == (6, [fast])
    assert found(0.01, 10) == (30, [slow])
    assert found(0.001, 1) == (18, [slow])
    assert found(1e-5, 1) == (inf, [])


def test_a_setting_costs_the_median_over_its_seeds(study: ModuleType, curve: Curve) -> None:
    seeds = [curve("FedAve", powers(3), gradients=rate, vectors=0, seed=rate) for rate in (1, 2, 9)]
    assert study.best({"one": seeds}, study.Run.complexity, 0.001, 1).cost == 6
    short = [*seeds[:1], *(curve("FedAve", powers(2), gradients=1, vectors=0, seed=s) for s in (2, 3))]
    assert study.best({"one": short}, study.Run.complexity, 0.001, 1).cost == inf


@pytest.fixture
def methods(curve: Curve) -> dict[str, Any]:
    """FedLRGD pays 34 vectors and 5 gradients at once and ends at 1e-6; FedAve pays 10 vectors per decade down to 1e-8.

    At ε in (10^-(k+1), 10^-k] FedAve has had k + 1 epochs but at 10^-k, where it has had k.
    """
    ours = curve("FedLRGD", powers(6), gradients=5, vectors=0, once=(0, 34))
    theirs = curve("FedAve", powers(8), gradients=1, vectors=10)
    return {"FedLRGD": {"r": [ours]}, "FedAve": {"b": [theirs]}}


def test_ranges_begin_at_the_crossover_and_end_at_the_floor(study: ModuleType, methods: dict[str, Any]) -> None:
    tried = [0.1, 0.01, 0.001, 0.0009, 1e-4, 1e-5, 1e-6, 9e-7, 1e-8]
    # φ = 1: 34 + 5k against 11k: less from k = 6 on; φ = 10: 340 + 5k against 101k: from k = 4 on
    assert study.ranges(methods, 1, tried) == [(1e-6, 1e-6)]
    assert study.ranges(methods, 10, tried) == [(0.0009, 1e-6)]
    assert study.ranges(methods, 0, tried) == []
    assert study.won(10, [(0.0009, 1e-6)])["crossover"] == 0.0009
    assert study.won(10, [])["crossover"] is None
    assert study.said([], tried) == "never"
    assert study.said([(0.1, 1e-8)], tried) == "always"
    assert study.said([(0.0009, 1e-6)], tried) == "9.0e-04 to 1.0e-06"


def test_two_ranges_are_told_apart(study: ModuleType, methods: dict[str, Any], curve: Curve) -> None:
    late = curve("FedLRGD", powers(8), gradients=5, vectors=0, once=(0, 60))
    both = {**methods, "FedLRGD": {**methods["FedLRGD"], "late": [late]}}
    # φ = 10, k = 7: 600 + 35 against 707
    assert study.ranges(both, 10, [1e-3, 1e-4, 1e-6, 1e-7, 1e-8]) == [(1e-4, 1e-8)]
    later = curve("FedLRGD", powers(8), gradients=5, vectors=0, once=(0, 75))
    both["FedLRGD"]["late"] = [later]  # k = 7: 785 against 707; k = 8: 790 against 808
    assert study.ranges(both, 10, [1e-3, 1e-4, 1e-6, 1e-7, 1e-8]) == [(1e-4, 1e-6), (1e-8, 1e-8)]


def test_winners_and_ratios(study: ModuleType, methods: dict[str, Any]) -> None:
    for each in methods.values():
        for runs in each.values():
            runs[:] = [
                type(run)(**{**vars(run), "setting": json.dumps(dict.fromkeys(study.SHOWN[run.method], 1))})
                for run in runs
            ]
    first, second, third, last = study.rows(methods, [10.0], [1e-3, 1e-4, 1e-7, 1e-9])
    assert (first["winner"], first["FedLRGD"]["cost"], first["FedAve"]["cost"]) == ("FedAve", 355, 303)
    assert first["ratio"] == 355 / 303
    assert first["time_ratio"] == 370 / 306
    assert (second["winner"], second["FedLRGD"]["S"], second["FedAve"]["T"]) == ("FedLRGD", 4, 4)
    assert (third["winner"], third["FedLRGD"], third["ratio"]) == ("FedAve", None, None)
    assert (last["winner"], last["FedAve"], last["ratio"]) == ("neither", None, None)


def test_other_seeds_and_other_minima_are_refused(study: ModuleType, curve: Curve) -> None:
    ours = curve("FedLRGD", powers(2), 1, 1)
    with pytest.raises(SystemExit, match=r"^seeds \(1,\) and \(2,\) on .*; expected the same of each$"):
        study.cases([ours, curve("FedAve", powers(2), 1, 1, seed=2)])
    with pytest.raises(SystemExit, match=r"^F\* = 0.0 for FedLRGD, 0.5 for FedAve with seed 1; expected the same: "):
        study.cases([ours, curve("FedAve", powers(2), 1, 1, least=0.5)])


# runs


def made(folder: Path, algorithm: dict[str, Any], **more: Any) -> Path:
    values = {
        **{"rounds": 3, "clients": CLIENTS, "seed": 3, "precision": "double", "algorithm": algorithm, "data": CUBE},
        **{"evaluate": {"every": 1, "objective": True}, "participation": {"close": "all"}},
        **{"oracle": {"record": True, "phi": 100.0}, "model": {"name": "glm", "ridge": 0.1}, **more},
    }
    alone(values, toml(values, folder.with_suffix(".toml")), folder)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    ours = made(folder / "ours", FEDLRGD)
    return ours, made(folder / "theirs", FEDAVE, rounds=60, data={**CUBE, "deal": True})


Ran = Callable[..., tuple[str, str]]


@pytest.fixture
def ran(study: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ran:
    """Run the study in this process; return why it ended, if not well, and what it printed."""

    def run(*words: Path | str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["oracle_complexity", *map(str, words)])
        try:
            study.main()
        except SystemExit as end:
            return str(end), capsys.readouterr().out
        return "", capsys.readouterr().out

    return run


def test_gamma_of_runs_is_what_the_paper_says(pair: tuple[Path, Path], ran: Ran, tmp_path: Path) -> None:
    picture = tmp_path / "gamma.png"
    error, out = ran(*pair, "--phi", "7", "--epsilon", "1e-1", "1e-2", "1e-3", "-o", picture)
    assert not error
    (found,) = json.loads(out.splitlines()[-1])["oracle_complexity"]
    assert (found["clients"], found["seeds"], found["settings"]) == (CLIENTS, [3], {"FedLRGD": 1, "FedAve": 1})
    reached = [row for row in found["rows"] if row["FedLRGD"] and row["FedAve"]]
    assert reached
    for row in reached:
        ours, theirs = row["FedLRGD"], row["FedAve"]
        # Theorem 2, and the samples that the server holds beyond r: r² + (R - r) r + r s + r S + φ m r
        once = RANK * (RANK + SERVER - RANK + SAMPLES) + 7 * CLIENTS * RANK
        assert ours["cost"] == once + RANK * ours["S"]
        assert theirs["cost"] == theirs["T"] * (
            SAMPLES + 2 + 7 * CLIENTS
        )  # 6 samples dealt out to 4 clients: 2 at most
        assert row["ratio"] == ours["cost"] / theirs["cost"]
    assert picture.stat().st_size > 1000


def test_gaps_are_measured_from_the_minimum_of_both(study: ModuleType, pair: tuple[Path, Path]) -> None:
    ours, theirs = map(study.read, pair)
    assert ours.start == pytest.approx(log(2))
    assert ours.least == pytest.approx(theirs.least, abs=1e-12)
    recorded = hpcfl.open_run(pair[1])["objective"].values
    np.testing.assert_allclose(theirs.gap, recorded - theirs.least, atol=1e-15)
    assert 0 < theirs.gap[-1] < 1e-3  # exact descent: all samples in each step
    assert theirs.time(0)[0] == pytest.approx(2 * (SAMPLES + 2) + log(CLIENTS))
    assert ours.problem == theirs.problem


def test_one_method_alone_and_no_objective_are_refused(pair: tuple[Path, Path], ran: Ran, tmp_path: Path) -> None:
    error, _ = ran(pair[0])
    assert error.startswith("runs of FedLRGD alone on {")
    assert error.endswith("}; expected runs of fedlrgd and of fedavg")
    silent = made(tmp_path / "silent", FEDAVE, rounds=1, evaluate={"every": 1})
    assert ran(*pair, silent)[0] == f"{silent}: no objective was recorded, expected evaluate.objective = true"
    cheap = made(tmp_path / "cheap", FEDAVE, rounds=1, oracle={})
    assert ran(*pair, cheap)[0] == f"{cheap}: no oracle complexity was recorded, expected oracle.record = true"
    other = made(tmp_path / "other", {"name": "local"}, rounds=1)
    assert ran(*pair, other)[0] == f"{other}: algorithm.name = 'local', expected fedlrgd or fedavg"
