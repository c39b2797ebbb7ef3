"""How ranks agree where some of them may be missing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hpcfl.base.errors import ErrorOnOtherRank, LeftOut, RunError

pytestmark = pytest.mark.mpi

FAR = 1e6  # seconds
NOBODY: Any = None  # no lanes


def test_where_all_are_there_it_is_as_without(world: Any) -> None:
    from hpcfl.mpi.waiting import Roll, settle, tell, texts

    roll = Roll(world.comm, FAR, NOBODY)
    for comm in (roll, world.comm):
        assert texts(comm, f"rank {world.rank}") == [f"rank {rank}" for rank in range(world.size)]
        assert tell(comm, f"from {world.rank}: \udcff") == "from 0: \udcff"
        settle(comm, None)
        last = world.rank == world.size - 1
        with pytest.raises(RunError if last else ErrorOnOtherRank, match="no luck"):
            settle(comm, RunError("no luck") if last else None)
    assert roll.absent == {}


def test_who_comes_too_late_is_left_out(world: Any, shared_dir: Path) -> None:
    from hpcfl.mpi.waiting import Roll

    roll, begun = (
        Roll(world.comm.Dup(), 0.01, NOBODY),
        shared_dir / "begun",
    )  # not freed: what the late send is not taken
    if world.rank == 0:
        assert roll.exchange("here") == ["here"] + [""] * (world.size - 1)
        assert roll.absent == dict.fromkeys(range(1, world.size), "not there within 0.01 s")
        assert roll.exchange("again") == ["again"] + [""] * (world.size - 1)
        begun.touch()
    else:
        while not begun.exists():
            time.sleep(0.01)
        with pytest.raises(LeftOut, match=f"^rank {world.rank} came too late"):
            roll.exchange("late")
    world.meet()
