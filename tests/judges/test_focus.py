"""FOCUS is what its paper says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from judges import world
from judges.focus import focus

SECONDS = np.array([[0.5, 1.2, 3.1, 1.0, 9.0, 2.0], [7.0, 0.2, 1.7, 2.5, 1.01, 4.0], [9.0, 9.0, 90.0, 9.0, 90.0, 9.0]])
"""How long whole visits would take, of which only what fits into one second is done: in the last round nothing."""


def begun(round_: int, client: int) -> list[Any]:
    whole = world.batches(round_, client, size=world.BATCH, steps=4)
    return whole[: int(len(whole) / max(1.0, SECONDS[round_, client]))]


@pytest.mark.parametrize("chunk", [1, 4])
def test_focus(tmp_path: Path, chunk: int) -> None:
    algorithm = {"name": "focus", "lr": 0.03, "steps": 4, "batch": world.BATCH}
    partial = {"close": "deadline", "deadline": 1.0, "partial": "steps"}
    found = world.play(
        tmp_path, algorithm=algorithm, participation=partial, speed=SECONDS, rounds=3, batch_clients=chunk
    )
    there = [[client for client in range(len(world.SIZES)) if begun(round_, client)] for round_ in range(3)]
    assert there[2] == []
    assert len(there[0]) > 2
    w, total, last, losses = focus(world.start(), world.clients(), there, begun, 0.03)
    world.near(found.shared, w)
    world.near(found.extras, total)
    for held, mine in zip(found.personal, last, strict=True):
        world.near(held, mine)
    world.equal(found.rows["loss"], losses)
