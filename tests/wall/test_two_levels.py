"""Two levels: leaders pass on what they are told and add up what they hear, and nothing else is any different."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcfl import store
from hpcfl.testing.runs import play
from wall.test_rounds import RULES, SALF, FEDAVG, agree, real, replay, rounds_are_sound, simulated

pytestmark = pytest.mark.mpi


def test_thin(world: Any, shared_dir: Path) -> None:
    values = real("two-level", algorithm=SALF)
    run = play(world, values, shared_dir / "run", world.comm)
    twin = play(world, simulated(values), shared_dir / "twin", None)
    if world.rank == 0:
        agree(run, twin, True, seconds=False)
