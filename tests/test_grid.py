"""The grid of methods and axes: a drawn part of it in each commit, and what is refused by `check` as by `run`."""

from __future__ import annotations

import json
import os
import random
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

import grid
import hpcfl
from hpcfl.base.errors import UsageError
from hpcfl.commands.cli import main
from hpcfl.config import from_table
from hpcfl.testing.runs import toml

ACCEPTED = 60


def seed() -> int:
    """Another part with each commit, where the commit is known."""
    return int.from_bytes(os.environ.get("HPCFL_DRAWN", "").encode()[:6], "big")


def test_what_is_accepted_has_an_effect() -> None:
    found = grid.run(inf, seed(), ACCEPTED)
    assert not found.faults, "\n".join(found.faults)
    assert sum(ended is not None for ended in found.ended.values()) > 20


@pytest.mark.parametrize(
    "where",
    [("fednova", "deadline", "steps"), ("local", "all", "auto"), ("fedlrgd", "all", "auto"), ("flic", "first", "auto")],
    ids=lambda where: where[0],
)
def test_real_time_sums_what_counted(where: tuple[str, str, str]) -> None:
    """Of which FedNova once told the steps that it had planned, and `local` a loss of half as many digits."""
    found = grid.Grid()
    assert found.play((*where, "none", "none", "none", "all", "wall"))
    assert not found.faults, "\n".join(found.faults)


def test_there_are_few_exceptions() -> None:
    assert len(grid.NO_OPS) <= 10


@pytest.mark.parametrize("clock", grid.AXES["clock"])
@pytest.mark.parametrize("place", range(2))
def test_a_check_refuses_what_a_run_refuses(
    place: int, clock: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the same line, and the same exit code."""
    order = random.Random(2 * seed() + place)
    file = toml(grid.table(drawn(order, clock, accepted=False)), tmp_path / "config.toml")
    said = []
    for words in (["check", str(file)], ["run", str(file), "--out", str(tmp_path / "run"), "--quiet"]):
        assert main(words) == 2
        said.append(capsys.readouterr().err.splitlines()[-1])
    assert said[0] == said[1], file.read_text()
    assert not (tmp_path / "run").exists()


@pytest.mark.mpi
@pytest.mark.parametrize("place", range(3))
def test_ranks_run_what_is_accepted(world: Any, shared_dir: Path, place: int) -> None:
    """In real time: to its end, and with numbers."""
    if world.size == 1:
        pytest.skip("needs a server and a client")
    keys = grid.table(drawn(random.Random(3 * seed() + place), "wall", accepted=True))
    done = hpcfl.run(keys, out=shared_dir / "run", quiet=True, comm=world.comm)
    if world.rank == 0:
        assert len(done.data["round"]) == grid.ROUNDS, json.dumps(keys)
        assert all(torch.isfinite(value).all() for value in next(iter(done.models)).params.values())


def drawn(order: random.Random, clock: str, accepted: bool) -> grid.Point:
    """Return a point that is accepted, or one that is not."""
    while True:
        point = (*(order.choice(sorted(grid.AXES[name])) for name in grid.NAMES[:-1]), clock)
        try:
            from_table(grid.table(point)).check_values()
        except UsageError:
            if not accepted:
                return point
        else:
            if accepted:
                return point
