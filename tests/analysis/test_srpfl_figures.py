"""The scripts of SRPFL's figures, on runs of a few rounds: what they refuse, and JSON that any program reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
