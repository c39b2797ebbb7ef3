"""SCAFFOLD is what its paper says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from judges import world
from judges.scaffold import scaffold
from judges.server import Momentum, move

SECONDS = np.array([[0.5, 1.2, 3.1, 1.0, 9.0, 2.0], [7.0, 0.2, 1.7, 2.5, 1.01, 4.0], [9.0, 9.0, 90.0, 9.0, 90.0, 9.0]])
"""How long whole visits would take, of which only what fits into one second is done: in the last round nothing."""


def begun(round_: int, client: int) -> list[Any]:
    whole = world.batches(round_, client)
    return whole[: int(len(whole) / max(1.0, SECONDS[round_, client]))]


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("by", ["uniform", "samples"])
def test_scaffold(tmp_path: Path, by: str, chunk: int) -> None:
    algorithm = {"name": "scaffold", "lr": 0.2, "decay": 0.5, "epochs": 2, "batch": world.BATCH, "weights": by}
    server = {"server": {"optimizer": "momentum", "lr": 0.8, "betas": [0.7]}} if chunk > 1 else {}
    partial = {"close": "deadline", "deadline": 1.0, "partial": "steps"}
    found = world.play(
        tmp_path, algorithm=algorithm, participation=partial, speed=SECONDS, rounds=3, batch_clients=chunk, **server
    )
    there = [[client for client in range(len(world.SIZES)) if begun(round_, client)] for round_ in range(3)]
    assert there[2] == []
    w, c, own, losses = scaffold(
        *(world.start(), world.clients(), there, begun, world.weights(by), lambda round_: 0.2 / (1 + 0.5 * round_)),
        server=Momentum(0.8, 0.7) if server else move,
    )
    world.near(found.shared, w | {f"control.{name}": value for name, value in c.items()})
    for held, mine in zip(found.personal, own, strict=True):
        world.near(held, {f"control.{name}": value for name, value in mine.items()})
    world.equal(found.rows["loss"], losses)
