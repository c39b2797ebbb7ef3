"""The script of SALF's Table II: what a run is, it takes from the run's config."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from hpcfl import run

SCRIPT = Path(__file__).parents[2] / "analysis" / "salf_table2.py"


def test_shares_of_stragglers_are_those_of_the_runs(tmp_path: Path) -> None:
    few = {"rounds": 2, "clients": 10, "data": {"name": "digits", "train_samples": 200}}
    runs = {  # names say nothing
        "b": ("table2-mlp-salf", 0.9),
        "c": ("table2-mlp-salf", 0.3),
        "d": ("table2-mlp-drop", 0.5),
        "e": ("table2-mlp-drop", 0.4),
    }
    run("table2-mlp-vanilla", overlays=few, out=tmp_path / "a")
    for name, (preset, share) in runs.items():
        run(preset, overlays=few, settings={"speed.stragglers": share}, out=tmp_path / name)
    command = [sys.executable, str(SCRIPT), *map(str, tmp_path.iterdir())]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    rows = {(row["method"], row["stragglers"]): row["published"] for row in json.loads(said)["table2"]}
    assert rows == {
        ("vanilla", 0.0): 0.90,
        ("salf", 0.9): 0.81,
        ("salf", 0.3): 0.88,
        ("drop", 0.5): 0.84,
        ("drop", 0.4): None,
    }
