"""The scripts of SRPFL's figures, on runs of a few rounds: what they refuse, and JSON that any program reads."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcfl import open_run
from hpcfl.launch.request import run_request
from hpcfl.launch.run import launch

ANALYSIS = Path(__file__).parents[2] / "analysis"


def ran(folder: Path, preset: str, *settings: str) -> Path:
    launch(lambda: run_request(preset, settings, folder, None, quiet=True), None)
    return folder


def analysed(script: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ANALYSIS / f"{script}.py"), *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def strict(line: str) -> Any:
    """Read JSON as it is defined: without Infinity and NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(line, parse_constant=refuse)


def test_targets_that_are_never_reached_are_null(tmp_path: Path) -> None:
    few = ("rounds=1", "clients=256", "evaluate.every=1", "algorithm.initial=random")
    folders = [ran(tmp_path / name, name, *few) for name in ("srpfl-linear", "fedrep-linear")]
    (row, *_) = strict(analysed("srpfl_speedup", *folders).stdout.splitlines()[-1])["speedup"]
    assert row["fedrep"] is None
    assert row["ratio"] is None
    assert row["target"] > 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("speed.model=groups",), "speed.model: the runs have exponential, groups; expected one of them only"),
        (
            ("participation.invite=uniform", "participation.size=8"),
            "participation.invite: the runs have all, uniform; expected one of them only",
        ),
    ],
)
def test_runs_of_other_settings_are_no_seeds_of_one(settings: tuple[str, ...], said: str, tmp_path: Path) -> None:
    few = ("rounds=1", "evaluate.every=1")
    one = ran(tmp_path / "one", "srpfl-fedrep-digits", *few)
    other = ran(tmp_path / "other", "srpfl-fedrep-digits", *few, *settings)
    found = analysed("srpfl_time", one, other)
    assert (found.returncode, found.stderr) == (1, f"{said}\n")
    alone = analysed("srpfl_time", other)
    assert alone.returncode == 0, alone.stderr
    assert {row["seeds"] for row in strict(alone.stdout.splitlines()[-1])["times"]} == {1}


def test_the_small_case_is_by_method_and_by_what_differs(tmp_path: Path) -> None:
    few = ("rounds=10", "clients=4", "participation.first=2", "evaluate.every=10", "algorithm.head_epochs=1")
    ways = [f"algorithm.newcomer={word}" for word in ("initial", "averaged")]
    folders = [ran(tmp_path / way, "srpfl-fedrep-digits", *few, "algorithm.epochs=1", way) for way in ways]
    rows = strict(analysed("srpfl_small", *folders).stdout.splitlines()[-1])["accuracies"]
    assert [(row["method"], row["setting"], row["seeds"]) for row in rows] == [
        ("FedRep-SRPFL", "newcomer = averaged", 1),
        ("FedRep-SRPFL", "newcomer = initial", 1),
    ]
    for row, way in zip(rows, reversed(ways)):
        run = open_run(tmp_path / way)
        last = run["client_accuracy"][-1].values
        assert row["accuracy"] == [pytest.approx(100 * np.average(last, weights=run["test_samples"].values))]
        assert row["seconds"] == [pytest.approx(float(run["sim_seconds"][-1]))]


def test_every_shard_is_dealt_once_and_of_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ANALYSIS)
    from srpfl_small import dealt

    labels = np.arange(203) % 10  # three classes have a sample more
    classes = np.array([[0, 1], [1, 2], [2, 3], [3, 0], [4, 4], [5, 6], [6, 7], [7, 8], [8, 9], [9, 5]])
    parts = dealt(labels, classes, random.Random(1))
    assert [set(labels[part]) for part in parts] == [set(row) for row in classes.tolist()]
    assert sorted(np.concatenate(parts).tolist()) == list(range(203))
    assert {len(part) for part in parts} <= {20, 21, 22}
