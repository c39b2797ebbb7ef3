"""Two levels: leaders pass on what they are told and add up what they hear, and nothing else is any different."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcfl.testing.runs import play
from wall.test_rounds import FEDAVG, RULES, SALF, agree, real, replay, rounds_are_sound, simulated

pytestmark = pytest.mark.mpi


def led(world: Any, **more: Any) -> dict[str, Any]:
    """A small run over two levels: two leaders, where there are ranks for that; those of four and more are a tree."""
    leaders = world.size - 1 if world.size > 4 else min(2, world.size - 1)
    return real("two-level", leaders=leaders, fan_out=2, **more)


@pytest.mark.parametrize("algorithm", [SALF, FEDAVG], ids=["salf", "fedavg"])
def test_without_a_deadline_it_is_the_simulated_run(world: Any, shared_dir: Path, algorithm: dict[str, Any]) -> None:
    if world.size == 1:
        pytest.skip("needs a server and a client")
    values = led(world, algorithm=algorithm)
    run = play(world, values, shared_dir / "run", world.comm)
    twin = play(world, simulated(values), shared_dir / "twin", None)
    if world.rank == 0:
        agree(run, twin, True, seconds=False)


@pytest.mark.parametrize("rule", [*RULES])
def test_a_replay_ends_in_the_same_state(world: Any, shared_dir: Path, rule: str) -> None:
    if world.size == 1:
        pytest.skip("needs a server and a client")
    values = led(world, **RULES[rule])
    run = play(world, values, shared_dir / "run", world.comm)
    again = play(world, replay(values, run), shared_dir / "again", None)
    if world.rank == 0:
        agree(run, again, True)
        rounds_are_sound(run)
