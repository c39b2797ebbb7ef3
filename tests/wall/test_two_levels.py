"""Two levels: leaders pass on what they are told and add up what they hear, and nothing else is any different."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.runs import after_each_round
from hpcfl.base.errors import Stopped
from hpcfl.engine import stopping
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


def test_another_rank_leads_where_a_leader_hangs(
    world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 is suspended after round 2, and wakes up when its node has been led by another one for some rounds."""
    if world.size < 4:
        pytest.skip("needs two nodes, one of two ranks")
    pids = world.comm.allgather(os.getpid())
    folder, led = shared_dir / "run", []

    def act(done: int, row: Any) -> None:
        cohort = {*np.flatnonzero(row["arrived"]).tolist()}
        led.append(cohort)
        if done == 2:
            os.kill(pids[1], signal.SIGSTOP)
        if done == 8:
            os.kill(pids[1], signal.SIGCONT)
        if done > 8 and len(cohort) == world.size - 1:
            stopping.request(folder)

    after_each_round(monkeypatch, act)
    monkeypatch.setattr(stopping, "LOOK_SECONDS", 0.0)
    more = {"clients": world.size - 1, "rounds": 400, "algorithm": SALF, "evaluate": {"every": 1}}
    more |= {"participation": {"close": "deadline", "deadline": 0.3}, "checkpoint": {"every": 400}}
    with pytest.raises(Stopped) as caught:
        play(world, real("two-level", leaders=2, fan_out=2, **more), folder, world.comm)
    world.meet()
    values = real("two-level", leaders=2, fan_out=2, **more)
    again = play(world, replay(values, folder, rounds=caught.value.round), shared_dir / "again", None)
    if world.rank:
        return
    agree(folder, again, True, clients=world.size - 1)
    print(led)
