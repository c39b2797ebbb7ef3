"""The grid of methods and axes: a drawn part of it in each commit, and what is refused by `check` as by `run`."""

from __future__ import annotations

import json
import os
import random
from math import inf
from pathlib import Path

import pytest

import grid
from hpcfl.commands.cli import main
from hpcfl.testing.runs import toml

ACCEPTED = 60


def seed() -> int:
    """Another part with each commit, where the commit is known."""
    return int.from_bytes(os.environ.get("HPCFL_DRAWN", "").encode()[:6], "big")


def test_what_is_accepted_has_an_effect() -> None:
    found = grid.run(inf, seed(), ACCEPTED)
    assert not found.faults, "\n".join(found.faults)
    assert sum(ended is not None for ended in found.ended.values()) > 20


def test_there_are_few_exceptions() -> None:
    assert len(grid.NO_OPS) <= 10


@pytest.mark.parametrize("place", range(3))
def test_a_check_refuses_what_a_run_refuses(place: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the same line, and the same exit code."""
    found = grid.run(inf, 3 * seed() + place, accepted=2)
    point = random.Random(place).choice(sorted(found.lines))
    file, said = toml(grid.table(point), tmp_path / "config.toml"), []
    for words in (["check", str(file)], ["run", str(file), "--out", str(tmp_path / "run"), "--quiet"]):
        assert main(words) == 2
        said.append(capsys.readouterr().err.splitlines()[-1])
    assert said[0] == said[1], json.dumps(point)
    assert not (tmp_path / "run").exists()
