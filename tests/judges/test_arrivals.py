"""Methods without rounds against loops from their papers; who arrives when is the run's own record."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import exp
from pathlib import Path
from typing import Any

import arrival_times
import numpy as np
import pytest
from torch import Tensor

from judges import arrivals, world
from judges.arrivals import Visit, hinge, local, played, polynomial, timetable, trace
from judges.server import Delayed, FedOpt, Momentum, move
from judges.steps import Adam, Sgd

AGAIN = 2**16
"""A client's further visit with one version draws by numbers so much larger."""
PACES = np.array([0.9, 3.5, 1.7, 0.4, 2.6, 90.0])
"""The last client never arrives."""
KEYS: dict[str, Any] = {"lr": 0.1, "batch": world.BATCH, "epochs": 2, "momentum": 0.9, "weight_decay": 0.05}
UNIFORM = world.weights("uniform")
ROUNDS = 6


def passes(version: int, client: int, number: int) -> list[Tensor]:
    return world.batches(version, client, phase=AGAIN * number)


def three(version: int, client: int, number: int) -> list[Tensor]:
    return world.batches(version, client, steps=3, phase=AGAIN * number)


def one(version: int, client: int, number: int) -> list[Tensor]:
    return world.batches(version, client, steps=1, phase=AGAIN * number)


def sgd() -> Sgd:
    return Sgd(0.1, 0.9, 0.05)


def plain() -> Sgd:
    return Sgd(0.1)


def staleness(steps: list[list[Visit]]) -> list[int]:
    return [now - version for now, visits in enumerate(steps) for _, version, _ in visits]


STALE: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "constant": ({"weight": "constant"}, lambda x: 1.0),
    "polynomial": ({"weight": "polynomial", "a": 0.7}, lambda x: polynomial(x, 0.7)),
    "hinge": ({"weight": "hinge", "a": 2.0, "b": 1}, lambda x: hinge(x, 2.0, 1)),
    "adaptive": ({"weight": "adaptive"}, lambda x: min(1.0, 4 / x) if x else 1.0),  # of 4 at work
    "harmonic": ({"weight": "harmonic", "a": 0.7}, lambda x: 1 / (1 + 0.7 * x)),
    "exponential": ({"weight": "exponential", "a": 0.3}, lambda x: exp(-0.3 * x)),
}


@pytest.mark.parametrize("law", ["polynomial", "hinge"])
def test_fedasync(tmp_path: Path, law: str) -> None:
    keys, s = STALE[law]
    found = world.play(
        tmp_path,
        rounds=ROUNDS,
        algorithm={"name": "fedasync", **KEYS, "mu": 0.3, "alpha": 0.6},
        participation={"close": "arrivals", "buffer": 1},
        staleness=keys,
        speed=PACES,
    )
    steps = trace(found.rows)
    assert len(set(staleness(steps))) > 3
    work = local(world.clients(), passes, sgd, rho=0.3)
    world.near(found.shared, played(world.start(), steps, work, arrivals.fedasync(0.6, s)))


MOVES: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "none": ({}, lambda: move),
    "nesterov": ({"optimizer": "nesterov", "lr": 0.3, "betas": [0.8]}, lambda: Momentum(0.3, 0.8, nesterov=True)),
    "delayed": (
        {"optimizer": "delayed-nesterov", "lr": 0.8, "betas": [0.7], "cycle": 2, "share": 0.3},
        lambda: Delayed(0.8, 0.7, 2, 0.3),
    ),
    "adam": ({"optimizer": "adam", "lr": 0.05, "tau": 0.02}, lambda: FedOpt("adam", 0.05, 0.9, 0.99, 0.02)),
}


BUFFERED: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    **{law: ({"staleness": keys}, partial(arrivals.fedbuff, s)) for law, (keys, s) in STALE.items()},
    "ca2fl": ({"weighting": {"correct": "remembered"}}, arrivals.ca2fl),
}
IN_PART = np.random.default_rng(2).choice([0.4, 1.9, 2.15, 2.35, 2.55, 2.75], (9, len(PACES)))
"""Of three steps each layer is a ninth; after 2 seconds those of 2.15 lack the first layer, of 2.75 all."""


@pytest.mark.parametrize(
    ("law", "weights", "step", "chunk", "layers"),
    [
        ("polynomial", "uniform", "none", 4, False),
        ("hinge", "samples", "nesterov", 1, False),
        ("constant", "uniform", "adam", 4, False),
        ("adaptive", "uniform", "delayed", 4, False),
        ("harmonic", "samples", "none", 1, False),
        ("exponential", "uniform", "nesterov", 4, False),
        ("ca2fl", "uniform", "none", 4, False),
        ("ca2fl", "samples", "adam", 1, False),
        ("polynomial", "samples", "nesterov", 4, True),
        ("ca2fl", "uniform", "adam", 4, True),
        ("ca2fl", "samples", "none", 1, True),
    ],
)
def test_buffered(tmp_path: Path, law: str, weights: str, step: str, chunk: int, layers: bool) -> None:
    (more, rule), (server, moved) = BUFFERED[law], MOVES[step]
    rules: dict[str, Any] = {"close": "arrivals", "buffer": 3, "concurrency": 4}
    found = world.play(
        tmp_path,
        rounds=len(IN_PART) if layers else ROUNDS,
        batch_clients=chunk,
        algorithm={"name": "fedavg", **KEYS, "weights": weights, **({"epochs": 0, "steps": 3} if layers else {})},
        participation=rules | ({"partial": "layers", "max_seconds": 2.0} if layers else {}),
        server=server,
        speed=IN_PART if layers else PACES,
        **more,
    )
    steps = trace(found.rows)
    assert max(staleness(steps)) > 1
    assert any(len({visit[0] for visit in visits}) < len(visits) for visits in steps)  # one came twice
    work = local(world.clients(), three if layers else passes, sgd)
    if layers:
        depth = arrivals.depths(found.rows)
        assert set(depth.values()) == {1, 2, 3}
        assert any(min(depth[visit] for visit in visits) > 1 for visits in steps)  # none had the first layer
        work = arrivals.reaching(work, depth, world.LAYER)
    buffer = rule(world.weights(weights), moved())
    world.near(found.shared, played(world.start(), steps, work, buffer))


GRADIENT: dict[str, Any] = {"lr": 0.1, "batch": world.BATCH}
SOON = np.array([0.9, 3.5, 1.7, 0.4, 2.6, 8.3])


@pytest.mark.parametrize(("buffer", "weights"), [(4, "uniform"), (3, "samples")])
def test_rennala(tmp_path: Path, buffer: int, weights: str) -> None:
    found = world.play(
        tmp_path,
        rounds=ROUNDS,
        algorithm={"name": "fedavg", "epochs": 0, "steps": 1, **GRADIENT, "weights": weights},
        participation={"close": "arrivals", "buffer": buffer, "max_staleness": 0, "dispatch": "reporter"},
        speed=SOON,
    )
    steps = trace(found.rows)
    assert steps == timetable(SOON.tolist(), ROUNDS, buffer=buffer, most=0)
    buffer_of = arrivals.fedbuff(lambda x: 1.0, world.weights(weights), move)
    world.near(found.shared, played(world.start(), steps, local(world.clients(), one, plain), buffer_of))


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("R", [1, 3])
def test_ringmaster(tmp_path: Path, R: int, stop: bool) -> None:
    found = world.play(
        tmp_path,
        rounds=2 * ROUNDS,
        algorithm={"name": "ringmaster", **GRADIENT},
        participation={
            **{"close": "arrivals", "buffer": 1, "max_staleness": R - 1, "stop_stale": stop, "dispatch": "reporter"}
        },
        speed=SOON,
    )
    steps = trace(found.rows)
    assert steps == timetable(SOON.tolist(), 2 * ROUNDS, most=R - 1, stop=stop)
    rule = arrivals.fedbuff(lambda x: 1.0, UNIFORM, move)
    world.near(found.shared, played(world.start(), steps, local(world.clients(), one, plain), rule))


@pytest.mark.parametrize("noise", [0.0, 0.3, 4.0, 4.1, 90.0])
def test_theory(noise: float) -> None:
    """More or fewer workers are worth their seconds."""
    L, gap, accuracy, paces = 2.5, 3.0, 0.5, [0.4, 1.7, 0.9, 3.5, 90.0]
    assert arrivals.delays(noise, accuracy) == arrival_times.threshold(noise, accuracy)
    law = arrival_times.optimal_time(paces, L, gap, noise, accuracy)
    assert law == pytest.approx(arrivals.optimal_time(paces, L, gap, noise, accuracy), rel=world.TOLERANCE)


@pytest.mark.parametrize(("buffer", "chunk"), [(6, 4), (9, 1)])
def test_malenia(tmp_path: Path, buffer: int, chunk: int) -> None:
    found = world.play(
        tmp_path,
        rounds=4,
        batch_clients=chunk,
        algorithm={"name": "fedavg", "epochs": 0, "steps": 1, "weights": "uniform", **GRADIENT},
        participation={"close": "arrivals", "buffer": buffer, "every_client": True, "max_staleness": 0},
        speed=SOON,
    )
    steps = trace(found.rows)
    assert steps == timetable(SOON.tolist(), 4, buffer=buffer, most=0, every=True)
    assert len({len(visits) for visits in steps}) >= 1
    rule = arrivals.malenia(len(world.SIZES))
    world.near(found.shared, played(world.start(), steps, local(world.clients(), one, plain), rule))


@pytest.mark.parametrize("close", ["all", "arrivals"])
def test_diloco(tmp_path: Path, close: str) -> None:
    """With rounds that wait for all it is DiLoCo as printed."""
    participation: dict[str, Any] = {"close": close}
    if close == "arrivals":
        participation |= {"buffer": 2, "concurrency": 4}
    inner = {"optimizer": "adamw", "lr": 0.02, "weight_decay": 0.3, "betas": [0.9, 0.95], "persist_optimizer": True}
    found = world.play(
        tmp_path,
        rounds=5,
        algorithm={"name": "fedavg", **inner, "batch": world.BATCH, "epochs": 0, "steps": 4, "weights": "uniform"},
        participation=participation,
        server={"optimizer": "nesterov", "lr": 0.7, "betas": [0.9]},
        speed=PACES if close == "arrivals" else SOON,
    )
    everybody = [[(i, t, 0) for i in range(len(world.SIZES))] for t in range(5)]
    work = local(
        world.clients(),
        lambda version, client, number: world.batches(version, client, steps=4, phase=AGAIN * number),
        lambda: Adam(0.02, (0.9, 0.95), decay=0.3, decoupled=True),
        persist=True,
    )
    steps = trace(found.rows) if close == "arrivals" else everybody
    rule = arrivals.fedbuff(lambda x: 1.0, UNIFORM, Momentum(0.7, 0.9, nesterov=True))
    world.near(found.shared, played(world.start(), steps, work, rule))
