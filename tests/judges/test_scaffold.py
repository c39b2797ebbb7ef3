"""SCAFFOLD is what its paper says."""

from __future__ import annotations

from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from judges import world
from judges.corrections import FedAU, Known, Remembered, plain
from judges.scaffold import scaffold
from judges.server import Momentum, move

SECONDS = np.array([[0.5, 1.2, 3.1, 1.0, 9.0, 2.0], [7.0, 0.2, 1.7, 2.5, 1.01, 4.0], [9.0, 9.0, 90.0, 9.0, 90.0, 9.0]])
"""How long whole visits would take, of which only what fits into one second is done: in the last round nothing."""


def begun(round_: int, client: int) -> list[Any]:
    whole = world.batches(round_, client)
    return whole[: int(len(whole) / max(1.0, SECONDS[round_, client]))]


CORRECTED: dict[str, tuple[dict[str, Any], Any]] = {
    "none": ({}, lambda: plain),
    "estimated": ({"weighting": {"correct": "estimated"}}, lambda: FedAU(list(world.start()))),
    "remembered": (
        {"weighting": {"correct": "remembered"}},
        lambda: Remembered(world.start(), lambda round_: 0.2 / (1 + 0.5 * round_), everybody=False),
    ),
}


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize(
    ("by", "correct"), [("uniform", "none"), ("samples", "none"), ("uniform", "estimated"), ("samples", "remembered")]
)
def test_scaffold(tmp_path: Path, by: str, correct: str, chunk: int) -> None:
    algorithm = {"name": "scaffold", "lr": 0.2, "decay": 0.5, "epochs": 2, "batch": world.BATCH, "weights": by}
    server = {"server": {"optimizer": "momentum", "lr": 0.8, "betas": [0.7]}} if chunk > 1 else {}
    keys, correction = CORRECTED[correct]
    partial = {"close": "deadline", "deadline": 1.0, "partial": "steps"}
    found = world.play(
        tmp_path,
        algorithm=algorithm,
        participation=partial,
        speed=SECONDS,
        rounds=3,
        batch_clients=chunk,
        **server,
        **keys,
    )
    there = [[client for client in range(len(world.SIZES)) if begun(round_, client)] for round_ in range(3)]
    assert there[2] == []
    w, c, own, losses = scaffold(
        *(world.start(), world.clients(), there, begun, world.weights(by), lambda round_: 0.2 / (1 + 0.5 * round_)),
        server=Momentum(0.8, 0.7) if server else move,
        correct=correction(),
    )
    world.near(found.shared, w | {f"control.{name}": value for name, value in c.items()})
    for held, mine in zip(found.personal, own, strict=True):
        world.near(held, {f"control.{name}": value for name, value in mine.items()})
    world.equal(found.rows["loss"], losses)


def test_scaffold_step_by_step_over_chances(tmp_path: Path) -> None:
    """What w moves by; control variates follow from the steps that were taken."""
    groups = {"model": "groups", "means_of": [0.8, 2.0], "shares_of": [0.5, 0.5], "kind": "dynamic", "sorted": True}
    participation = {"close": "deadline", "partial": "steps", "deadline": 1.5, **world.SOME}
    algorithm = {"name": "scaffold", "lr": 0.2, "epochs": 2, "batch": world.BATCH}
    keys: dict[str, Any] = {"speed": groups, "participation": participation, "weighting": {"correct": "known"}}
    found = world.play(tmp_path, algorithm=algorithm, rounds=4, **keys)
    done = found.rows["steps"]

    def counts(client: int, step: int) -> float:
        share = (step + 1) / len(world.batches(0, client))
        return 1 / (1 - exp(-1.5 / share / groups["means_of"][client // 3]))

    w, c, own, _ = scaffold(
        *(world.start(), world.clients(), found.who()),
        *(lambda round_, client: world.batches(round_, client)[: done[round_, client]], world.weights("uniform")),
        lambda round_: 0.2,
        correct=Known(lambda client, name: 1.0, found.who("cohort")),
        counts=counts,
    )
    world.near(found.shared, w | {f"control.{name}": value for name, value in c.items()})
    for held, mine in zip(found.personal, own, strict=True):
        world.near(held, {f"control.{name}": value for name, value in mine.items()})
