"""Runs with what users have written: their files in a folder, a config that names one thing of them, and how it ends.

Every thing in these files either ends in one line that names the file, or is right.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hpcfl.commands.cli import main
from hpcfl.commands.show import summary
from hpcfl.store import read_status
from hpcfl.testing.runs import table, toml

HERE = Path(__file__).parent
KEYS = {"methods": "algorithm.name", "models": "model.name", "data": "data.name", "losses": "task.loss"}


def names(kind: str) -> set[str]:
    """Return what a user's file of one kind defines."""
    tree = ast.parse((HERE / f"user_{kind}.py").read_text(encoding="utf-8"))
    found = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return {name for name in found if not name.startswith("_")}


def written(kind: str, name: str, folder: Path) -> Path:
    """Write the users' files into a folder, and a config that names one thing of them."""
    for file in HERE.glob("user_*.py"):
        shutil.copy(file, folder)
    section, _, key = KEYS[kind].partition(".")
    plain = {"participation": {}, "speed": {"model": "none"}, "evaluate": {"every": 2}, "checkpoint": {"every": 2}}
    values: dict[str, Any] = table("fedavg", "mlp", False, rounds=2, clients=3, **plain)
    values |= {"algorithm": {"name": "fedavg", "batch": 10}, "model": {"name": "mlp", "hidden": [8]}}
    values |= {"data": {"name": "user_data:Fair"}, section: {key: f"user_{kind}:{name}"}}
    return toml(values, folder / f"{name}.toml")


def ended(kind: str, name: str, folder: Path, out: str = "out") -> int:
    """Run it in this process; return the exit code."""
    before = Path.cwd()
    try:
        return main(["run", str(written(kind, name, folder)), "--out", str(folder / out), "--quiet"])
    finally:
        os.chdir(before)


def line_of(kind: str, name: str, error: str) -> str:
    """Return the one line that was said, without what it begins with: the key, what it names and, last, the file."""
    said = [line for line in error.splitlines() if "Warning: " not in line and not line.startswith("  ")]
    assert len(said) == 1, error
    key, spec = KEYS[kind], f"user_{kind}:{name}"
    begun = re.fullmatch(
        rf"hpcfl: (?:{key} = '{spec}': |(?=.*= '{spec}'))(.*) \(\S*user_{kind}\.py, line \d+\)", said[0]
    )
    assert begun, said[0]
    return begun[1]


def refused(kind: str, name: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Assert that it ends in one line, which has these words, and never as done."""
    assert ended(kind, name, folder) in (1, 2)
    assert words in line_of(kind, name, capsys.readouterr().err)
    assert not (folder / "out").exists() or read_status(folder / "out").state == "failed"


@cache
def _known() -> dict[tuple[str, str], str]:
    return {}


def right(kind: str, name: str, like: str, folder: Path) -> None:
    """Assert that it ends as another does, or as it does once more in this process, to the bit."""
    states = []
    for number, each in enumerate([name, like][: 1 + ((kind, like) not in _known())]):
        assert ended(kind, each, folder, str(number)) == 0
        states.append(summary(folder / str(number))["state_sha256"])
    assert states[0] == _known().setdefault((kind, like), states[-1])
