"""FLANP is what its paper says; so is local training, which shares nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from judges import world
from judges.flanp import flanp
from judges.local import local
from judges.plain import sgd

SECONDS = np.array([2.0, 0.4, 1.6, 0.7, 3.1, 0.9])

STAGES: dict[str, tuple[dict[str, Any], Callable[[int, int, float], bool]]] = {
    "rounds": ({"when": "rounds", "rounds": 2}, lambda stage, done, square: done == 2),
    "gradient": ({"when": "gradient", "threshold": 1.0}, lambda stage, done, square: square <= 1.0 / 2**stage),
}


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("when", STAGES)
def test_flanp(tmp_path: Path, when: str, chunk: int) -> None:
    keys, ends = STAGES[when]
    found = world.play(
        tmp_path,
        algorithm={"name": "fedavg", "lr": 0.2, "epochs": 2, "batch": world.BATCH},
        **{"participation": {"close": "first", "first": 1}, "doubling": keys, "speed": SECONDS},
        **{"rounds": 9, "batch_clients": chunk},
    )
    w, losses, who, seconds = flanp(
        *(world.start(), world.clients(), SECONDS.tolist(), world.batches, world.weights()),
        **{"first": 1, "rounds": 9, "lr": 0.2, "stage_ends": ends},
    )
    assert found.who() == who
    assert len({len(each) for each in who}) >= 3, who
    world.near(found.shared, w)
    world.equal(found.rows["loss"], losses)
    world.equal(found.rows["round_seconds"], seconds)


@pytest.mark.parametrize("chunk", [1, 4])
def test_local(tmp_path: Path, chunk: int) -> None:
    own = {client: world.drawn(world.LAYERS, 20 + client) for client in range(len(world.SIZES))}
    found = world.play(
        tmp_path,
        algorithm={
            "name": "local",
            "lr": 0.2,
            "momentum": 0.9,
            "weight_decay": 0.01,
            "epochs": 2,
            "batch": world.BATCH,
        },
        **{"participation": world.SOME, "batch_clients": chunk, "initial": own},
    )
    models, losses = local(
        *([*own.values()], world.clients(), found.who(), world.batches, sgd(0.2, 0.9, 0.01), world.weights())
    )
    for held, mine in zip(found.personal, models, strict=True):
        world.near(held, mine)
    world.equal(found.rows["loss"], losses)
