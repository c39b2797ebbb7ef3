"""`golden.against` finds what has changed since a commit, here a copy of the package, and says what is not there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from golden.against import compared
from helpers.launcher import ROOT


@pytest.mark.launch
def test_a_planted_change_is_found(tmp_path: Path) -> None:
    """SALF's changes are a millionth smaller in the copy, which lacks a preset too, and writes another format."""
    old = tmp_path / "old"
    for name in ("hpcfl", "jobs", "examples"):
        shutil.copytree(ROOT / name, old / name, ignore=shutil.ignore_patterns("__pycache__", "flic-linear.toml"))
    file = old / "hpcfl" / "algorithms" / "salf.py"
    change = "value - start[name][: len(value)]"
    assert file.read_text().count(change) == 1
    file.write_text(file.read_text().replace(change, f"({change}) * 0.999999"))
    numbered = old / "hpcfl" / "store" / "attributes.py"
    assert numbered.read_text().count("RUN_FORMAT = 1\n") == 1
    numbered.write_text(numbered.read_text().replace("RUN_FORMAT = 1\n", "RUN_FORMAT = 2\n"))
    rows = compared((old, ROOT), ["fedavg-digits", "flic-linear", "salf-digits"], tmp_path, ranks=(1,))
    assert [(row["name"], row["outcome"]) for row in rows] == [
        ("fedavg-digits", "equal"),
        ("flic-linear", "not in COMMIT"),
        ("salf-digits", "differs"),
    ]
    assert "flic-linear" in rows[1]["why"]
    assert "the state by" in rows[2]["why"]
