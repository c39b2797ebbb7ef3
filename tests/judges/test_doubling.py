"""FLANP is what its paper says; so is local training, which shares nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from judges import world
from judges.flanp import Plateau, Theory, flanp
from judges.local import local
from judges.plain import sgd

SECONDS = np.array([1.5, 0.4, 1.2, 1.1, 1.0, 1.35])
TIMES = 0.4, 1.0, 1.2, 1.5
"""When the first 1, 2, 4 and 6 of them are done."""
COST = 0.25
"""Seconds that each round takes beside."""
THEORY: dict[str, Any] = {"when": "theory", "contraction": 0.25, "distance": 3.1}

LATE = "gradient", "plateau"
"""Where rounds have a deadline too."""

STAGES: dict[str, tuple[dict[str, Any], Callable[[], Callable[[int, list[float], list[float]], bool]]]] = {
    "rounds": ({"when": "rounds", "rounds": 2}, lambda: lambda stage, squares, losses: len(squares) == 2),
    "gradient": (
        {"when": "gradient", "threshold": 0.3},
        lambda: lambda stage, squares, losses: squares[-1:] != [] and squares[-1] <= 0.3 / 2**stage,
    ),
    "plateau": ({"when": "plateau", "patience": 2, "tolerance": 0.2}, lambda: Plateau(2, 0.2)),
    "theory": (THEORY, lambda: Theory(TIMES, 0.25, COST, 3.1, skip=False)),
    "skips": (THEORY | {"skip": True}, lambda: Theory(TIMES, 0.25, COST, 3.1, skip=True)),
    "samples": (
        {"when": "rounds", "rounds": 2, "by": "samples"},
        lambda: lambda stage, squares, losses: len(squares) == 2,
    ),
}


def whole(round_: int, client: int) -> Any:
    return world.batches(round_, client, epochs=1, size=0)


@pytest.mark.parametrize(("when", "chunk"), [*((when, 4) for when in STAGES), ("gradient", 1)])
def test_flanp(tmp_path: Path, when: str, chunk: int) -> None:
    keys, ends = STAGES[when]
    rules = {"first": 2 if when == "rounds" else 1} | ({"deadline": 3.0} if when in LATE else {})
    pace = np.tile(SECONDS, (11, 1))
    pace[3] += 2.8 if when in LATE else 0  # nobody is there at the deadline
    pace[6] += 1.9 if when in LATE else 0  # some are
    found = world.play(
        tmp_path,
        algorithm={"name": "fedavg", "lr": 0.5, "batch": 0},
        **{"participation": {"close": "first", **rules}, "doubling": keys, "speed": pace if when in LATE else SECONDS},
        **{"rounds": len(pace), "batch_clients": chunk, "communication": COST},
    )
    w, losses, who, seconds, stages = flanp(
        *(world.start(), world.clients(), pace.tolist(), whole, world.weights()),
        **{"lr": 0.5, "stage_ends": ends(), "by_samples": keys.get("by") == "samples", "communication": COST, **rules},
    )
    assert found.who() == who
    assert len({len(each) for each in who}) >= 3
    world.near(found.shared, w)
    world.equal(found.rows["loss"], losses)
    world.equal(found.rows["round_seconds"], seconds)
    world.equal(found.rows["stage"], stages)


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
