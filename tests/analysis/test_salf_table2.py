"""The scripts of SALF's Table II and Figure 5: what a run is, they take from the run's config."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hpcfl import run

ANALYSIS = Path(__file__).parents[2] / "analysis"
FEW = {"rounds": 2, "clients": 10, "data": {"name": "digits", "train_samples": 200}}


def said(script: str, *arguments: str | Path) -> Any:
    command = [sys.executable, str(ANALYSIS / script), *map(str, arguments)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def test_shares_of_stragglers_and_settings_are_those_of_the_runs(tmp_path: Path) -> None:
    runs = {  # names say nothing
        "a": ("table2-mlp-vanilla", {}),
        "b": ("table2-mlp-salf", {}),
        "c": ("table2-mlp-salf-text", {"speed.stragglers": 0.3}),
        "d": ("table2-mlp-drop", {"speed.stragglers": 0.5}),
        "e": ("table2-mlp-drop-text", {"speed.stragglers": 0.4}),
        "f": ("table2-mlp-heterofl-text", {"algorithm.shares": [0.3, 0.7]}),
        "g": ("table2-mlp-salf", {"algorithm.rule": "paper"}),
        "h": ("table2-mlp-async", {"speed.stragglers": 0.7}),
    }
    for name, (preset, changed) in runs.items():
        run(preset, overlays=FEW, settings=changed, out=tmp_path / name)
    picture = tmp_path / "fig.png"
    rows = said("salf_table2.py", "-o", picture, *sorted(tmp_path.glob("?")))["table2"]
    found = {
        (row["method"], row["stragglers"]): (
            row["published"],
            [key for key in ("released", "text", "mixed") if key in row],
        )
        for row in rows
    }
    assert found == {
        ("vanilla", 0.0): (0.90, ["released"]),
        ("salf", 0.9): (0.81, ["released", "mixed"]),
        ("salf", 0.3): (0.88, ["text"]),
        ("drop", 0.5): (0.84, ["released"]),
        ("drop", 0.4): (None, ["text"]),
        ("heterofl", 0.7): (None, ["text"]),
        ("async", 0.7): (0.82, ["released"]),
    }
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_deadlines_are_parts_of_the_longest_visit(tmp_path: Path) -> None:
    few = {**FEW, "speed": {"longest": 4.0, "costs": "equal"}, "model": {"name": "mlp"}}
    run("salf-fig5-salf", overlays=few, settings={"participation.deadline": 1.0}, out=tmp_path / "a")
    run("salf-fig5-drop", overlays=few, settings={"participation.deadline": 2.0}, out=tmp_path / "b")
    run("table2-mlp-vanilla-text", overlays=FEW, out=tmp_path / "c")
    run("salf-fig5-async", overlays=few, settings={"participation.deadline": 4.0}, out=tmp_path / "d")
    rows = said("salf_deadlines.py", "-o", tmp_path / "fig.png", *sorted(tmp_path.glob("?")))["deadlines"]
    assert [(row["method"], row["part"]) for row in rows] == [
        ("async", 1.0),
        ("drop", 0.5),
        ("salf", 0.25),
        ("vanilla", None),
    ]
    assert (tmp_path / "fig.png").exists()
