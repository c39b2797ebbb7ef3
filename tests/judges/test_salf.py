"""SALF is what its paper says."""

from __future__ import annotations

from functools import partial
from math import exp, prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from judges import world
from judges.corrections import FedAU, Known, Remembered, plain
from judges.salf import salf
from judges.server import FedOpt

LAYERS = [[f"{layer}.weight", f"{layer}.bias"] for layer in world.LAYERS]
TENSORS = [[name] for layer in LAYERS for name in layer]
U, L = len(world.SIZES), len(LAYERS)
DEPTH = np.array([[1, 4, 2, 2, 3, 4], [4, 4, 3, 4, 3, 4], [4, 4, 4, 4, 4, 4], [2, 1, 4, 3, 4, 4], [4, 2, 1, 1, 2, 4]])
"""First layer that is there in time: in round 1 nobody reaches the first two, in round 2 nobody any, client 5 never."""
DEEP = np.array([[1, 7, 2, 6, 4, 7], [5, 7, 3, 7, 3, 7], [7, 7, 7, 7, 7, 7], [2, 1, 7, 5, 6, 7]])
"""The same where each tensor is a layer."""


def eta(round_: int) -> float:
    return 0.3 / (1 + 0.5 * round_)


def judged(found: world.Outcome, depth: np.ndarray[Any, Any], layers: list[list[str]], **how: Any) -> None:
    """Assert that a run is what the judge makes of depths, where −1 is no invitation."""
    invited = [{u: int(d) for u, d in enumerate(row) if d >= 0} for row in depth]
    once = partial(world.batches, epochs=1)
    w, velocity, losses = salf(world.start(), world.clients(), invited, once, layers, lr=eta, **how)
    world.near(found.shared, w)
    world.equal(found.rows["loss"], losses)
    for held, mine in zip(found.personal, velocity, strict=True):
        for name, value in held.items() if how.get("momentum") else ():
            world.equal(value, mine.get(name, np.zeros(value.shape)), name)


def play(folder: Path, speed: Any = DEPTH, close: dict[str, Any] | None = None, **keys: Any) -> world.Outcome:
    own = {name: keys.pop(name) for name in ("weighting", "server", "batch_clients", "rounds") if name in keys}
    rounds = own.pop("rounds", len(speed))
    algorithm = {"name": "salf", "lr": 0.3, "decay": 0.5, "batch": world.BATCH, **keys}
    participation = {"close": "deadline", "partial": "layers", **(close or {})}
    return world.play(folder, algorithm=algorithm, participation=participation, speed=speed, rounds=rounds, **own)


def empirical(depth: np.ndarray[Any, Any]) -> Any:
    """1 over 1 − p_l, p_l by what was empty before."""

    def scale(round_: int, layer: int, reached: int) -> float:
        empty = sum(not (row <= layer).any() for row in depth[:round_])
        return 1 / (1 - (empty + 1) / (round_ + 2))

    return scale


RULES: dict[str, tuple[dict[str, Any], Any]] = {
    "none": ({"missing": "none"}, lambda round_, layer, reached: 1.0),
    "paper": ({"missing": "paper"}, lambda round_, layer, reached: 1 / (1 - (1 - layer / (L + 1)) ** U)),
    "empirical": ({"missing": "empirical"}, empirical(DEPTH)),
    "released": ({"rule": "released"}, lambda round_, layer, reached: reached / U),
}


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("rule", RULES)
def test_rules(tmp_path: Path, rule: str, chunk: int) -> None:
    keys, scale = RULES[rule]
    found = play(tmp_path, **keys, momentum=0.9, persist_optimizer=True, batch_clients=chunk)
    judged(found, DEPTH, LAYERS, momentum=0.9, scale=scale)


def test_each_tensor_a_layer(tmp_path: Path) -> None:
    found = play(tmp_path, DEEP, rule="released", blocks="tensor", momentum=0.9, persist_optimizer=True)
    judged(found, DEEP, TENSORS, momentum=0.9, scale=lambda round_, layer, reached: reached / U)


def test_some_are_invited(tmp_path: Path) -> None:
    found = play(tmp_path, DEPTH[: world.ROUNDS], close=world.SOME, missing="paper")
    depth = np.where(found.rows["cohort"], DEPTH[: world.ROUNDS], -1)
    judged(found, depth, LAYERS, scale=lambda round_, layer, reached: 1 / (1 - (1 - layer / (L + 1)) ** 3))


UNIFORM = {"model": "uniform-depth", "stragglers": 1.0}
GROUPS = {"model": "groups", "means_of": [1.0, 4.0], "shares_of": [0.5, 0.5], "kind": "dynamic", "sorted": True}
"""Exponential seconds, the first three clients the fast ones; each layer is a third of the work."""


def reached(client: int, layer: int) -> float:
    """π_{u,l}: the chance to have come to a layer after one second."""
    return 1 - exp(-1 / (GROUPS["means_of"][client // 3] * (L - layer + 1) / L))


def nobody(layer: int, clients: list[int]) -> float:
    return prod(1 - reached(u, layer) for u in clients)


def test_missing_from_the_law_of_depths(tmp_path: Path) -> None:
    found = play(tmp_path, UNIFORM, missing="exact", rounds=4)
    judged(
        found,
        found.rows["depth"],
        LAYERS,
        scale=lambda round_, layer, reached: 1 / (1 - (1 - layer / (L + 1)) ** U),
    )


def test_missing_from_the_law_of_seconds(tmp_path: Path) -> None:
    found = play(tmp_path, GROUPS, world.SOME, missing="exact", rounds=4)
    invited = found.who("cohort")
    judged(
        found,
        found.rows["depth"],
        LAYERS,
        scale=lambda round_, layer, reached: 1 / (1 - nobody(layer, invited[round_])),
    )


@pytest.mark.parametrize(
    "keys",
    [{"rule": "inverse-probability"}, {"missing": "none", "weighting": {"correct": "known"}}],
    ids=["rule", "known"],
)
def test_chances_of_each_layer(tmp_path: Path, keys: dict[str, Any]) -> None:
    found = play(tmp_path, GROUPS, world.SOME, rounds=4, **keys)
    known = Known(lambda client, name: reached(client, world.LAYER[name]), found.who("cohort"))
    judged(found, found.rows["depth"], LAYERS, correct=known)


CORRECTED: dict[str, tuple[dict[str, Any], Any]] = {
    "fedau": ({"correct": "estimated", "cutoff": 3}, lambda: FedAU(list(world.start()), 3)),
    "fedvarp": ({"correct": "remembered"}, lambda: Remembered(world.start(), eta, everybody=False)),
    "mifa": ({"correct": "remembered", "mean": "all"}, lambda: Remembered(world.start(), eta, everybody=True)),
    "plain": ({"correct": "none"}, lambda: plain),
}


@pytest.mark.parametrize("name", CORRECTED)
def test_corrections_layer_by_layer(tmp_path: Path, name: str) -> None:
    weighting, correct = CORRECTED[name]
    server = {"optimizer": "yogi", "lr": 0.1, "betas": [0.8, 0.9], "tau": 0.05}
    found = play(tmp_path, missing="none", weighting=weighting, server=server)
    judged(found, DEPTH, LAYERS, correct=correct(), server=FedOpt("yogi", 0.1, 0.8, 0.9, 0.05))
