"""FedAvg, FedProx, dropped stragglers, partial work, corrections and server optimisers are what their papers say."""

from __future__ import annotations

from functools import partial
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from judges import world
from judges.corrections import FedAU, Known, Remembered
from judges.fedavg import fedavg
from judges.fednova import fednova
from judges.plain import adam, sgd
from judges.server import FedOpt, Momentum

BALL = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01, "epochs": 2, "batch": world.BATCH}
DEPTH = np.array([[1, 4, 1, 2, 1, 1], [4, 1, 1, 1, 4, 4], [4, 4, 3, 4, 4, 2], [1, 1, 4, 1, 4, 1], [4, 1, 1, 4, 1, 4]])
"""Who is there at the deadline (1): in round 2 nobody; a visit that is there in part counts for nothing."""
ARRIVED = [np.flatnonzero(row == 1).tolist() for row in DEPTH]
LATE = {"close": "deadline", "partial": "discard"}
ADAM = {"optimizer": "adam", "lr": 0.02, "betas": [0.8, 0.95], "epsilon": 1e-3, "momentum": 0.0}


def slower(round_: int) -> float:
    return 0.2 / (1 + 0.5 * round_)


def ball(round_: int = 0, client: int = 0, decay: float = 0.0) -> Any:
    return sgd(0.2 / (1 + decay * round_), 0.9, 0.01)


LOCAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ball": ({}, {}),
    "slower": ({"decay": 0.5, "weights": "uniform"}, {"local": partial(ball, decay=0.5)}),
    "kept": ({"persist_optimizer": True}, {"keep": True}),
    "all": ({"batch": 0}, {"batches": partial(world.batches, size=0)}),
    "steps": ({"epochs": 0, "steps": 5}, {"batches": partial(world.batches, steps=5)}),
    "adam": (ADAM, {"local": lambda *_: adam(0.02, (0.8, 0.95), 1e-3, 0.01, decoupled=False)}),
    "adamw": (
        ADAM | {"optimizer": "adamw", "persist_optimizer": True},
        {"local": lambda *_: adam(0.02, (0.8, 0.95), 1e-3, 0.01, decoupled=True), "keep": True},
    ),
    "fedprox": ({"name": "fedprox", "mu": 0.7}, {"proximal": 0.7}),
}


def judge(found: world.Outcome, arrived: list[list[int]], how: dict[str, Any], by: str = "samples") -> None:
    how = {"batches": world.batches, "local": ball, **how}
    w, losses = fedavg(world.start(), world.clients(), arrived, weights=world.weights(by), **how)
    world.near(found.shared, w)
    world.equal(found.rows["loss"], losses)


@pytest.mark.parametrize(("case", "chunk"), [(case, chunk) for case in LOCAL for chunk in (1, 4)])
def test_local_steps(tmp_path: Path, case: str, chunk: int) -> None:
    keys, how = LOCAL[case]
    algorithm = {"name": "fedavg", **BALL, **keys}
    found = world.play(tmp_path, algorithm=algorithm, participation=world.SOME, batch_clients=chunk)
    judge(found, found.who(), how, keys.get("weights", "samples"))


def late(folder: Path, **sections: Any) -> world.Outcome:
    algorithm = {"name": "fedavg", **BALL, **sections.pop("algorithm", {})}
    keys: dict[str, Any] = {"rounds": len(DEPTH), "participation": LATE, "speed": DEPTH, **sections}
    return world.play(folder, algorithm=algorithm, **keys)


@pytest.mark.parametrize("chunk", [1, 4])
def test_stragglers_are_dropped(tmp_path: Path, chunk: int) -> None:
    judge(late(tmp_path, batch_clients=chunk), ARRIVED, {})


@pytest.mark.parametrize(
    "keys",
    [{}, {"weights": "uniform", "momentum": 0.0, "weight_decay": 0.0}, {"persist_optimizer": True}],
    ids=["ball", "plain", "kept"],
)
def test_layers_of_the_last_step_count(tmp_path: Path, keys: dict[str, Any]) -> None:
    algorithm = {"epochs": 0, "steps": 3, **keys}
    layers = {"close": "deadline", "partial": "layers"}
    found = late(tmp_path, algorithm=algorithm, participation=layers, batch_clients=1 if "weights" in keys else 4)
    how: dict[str, Any] = {
        "batches": partial(world.batches, steps=3),
        "reached": lambda round_, client, name: DEPTH[round_, client] <= world.LAYER[name],
        "keep": "persist_optimizer" in keys,
        **({"local": lambda *_: sgd(0.2)} if "weights" in keys else {}),
    }
    there = [np.flatnonzero(row <= len(world.LAYERS)).tolist() for row in DEPTH]
    judge(found, there, how, keys.get("weights", "samples"))


SECONDS = np.array([[0.5, 1.2, 3.1, 1.0, 9.0, 2.0], [7.0, 0.2, 1.7, 2.5, 1.01, 4.0], [9.0, 9.0, 90.0, 9.0, 90.0, 9.0]])
"""How long whole visits would take, of which only what fits into one second is done."""
STEPS = {"close": "deadline", "deadline": 1.0, "partial": "steps"}


def begun(round_: int, client: int) -> list[Any]:
    whole = world.batches(round_, client)
    return whole[: int(len(whole) / max(1.0, SECONDS[round_, client]))]


SOME_STEPS = [[client for client in range(len(world.SIZES)) if begun(round_, client)] for round_ in range(len(SECONDS))]


@pytest.mark.parametrize("chunk", [1, 4])
def test_what_was_begun_counts(tmp_path: Path, chunk: int) -> None:
    keys: dict[str, Any] = {"speed": SECONDS, "participation": STEPS, "rounds": len(SECONDS), "batch_clients": chunk}
    found = world.play(tmp_path, algorithm={"name": "fedavg", **BALL}, **keys)
    assert SOME_STEPS[-1] == []
    judge(found, SOME_STEPS, {"batches": begun})


CORRECTED: dict[str, tuple[dict[str, Any], Any]] = {
    "fedau": ({"correct": "estimated"}, lambda: FedAU(list(world.start()))),
    "fedau-cut": ({"correct": "estimated", "cutoff": 2}, lambda: FedAU(list(world.start()), 2)),
    "fedvarp": ({"correct": "remembered"}, lambda: Remembered(world.start(), slower, everybody=False)),
    "mifa": (
        {"correct": "remembered", "mean": "all"},
        lambda: Remembered(world.start(), slower, everybody=True),
    ),
}


NOVA: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"momentum": 0.0, "weights": "uniform"}, {}),
    "momentum": ({}, {"momentum": 0.9}),
    "proximal": ({"momentum": 0.0, "mu": 0.7}, {"mu": 0.7}),
}


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("case", NOVA)
def test_fednova(tmp_path: Path, case: str, chunk: int) -> None:
    keys, how = NOVA[case]
    sections: dict[str, Any] = {"speed": SECONDS, "participation": STEPS, "rounds": len(SECONDS)}
    found = world.play(tmp_path, algorithm={"name": "fednova", **BALL, **keys}, batch_clients=chunk, **sections)
    by = world.weights(keys.get("weights", "samples"))
    w, losses = fednova(world.start(), world.clients(), SOME_STEPS, begun, by, lr=0.2, decay=0.01, **how)
    world.near(found.shared, w)
    world.equal(found.rows["loss"], losses)


@pytest.mark.parametrize("case", NOVA)
@pytest.mark.parametrize("name", ["fedau", "fedvarp"])
def test_fednova_corrected(tmp_path: Path, name: str, case: str) -> None:
    """τ_eff is then that of all clients' whole visits."""
    (more, correct), (keys, how) = CORRECTED[name], NOVA[case]
    sections: dict[str, Any] = {"speed": SECONDS, "participation": STEPS, "rounds": len(SECONDS), "weighting": more}
    found = world.play(tmp_path, algorithm={"name": "fednova", **BALL, **keys}, **sections)
    by = world.weights(keys.get("weights", "samples"))
    plan = {client: len(world.batches(0, client)) for client in range(len(world.SIZES))}
    if name == "fedvarp":  # steps do not fall here
        correct = partial(Remembered, world.start(), lambda round_: 0.2, everybody=False)
    how = how | {"correct": correct(), "whole": lambda round_: plan}
    w, losses = fednova(world.start(), world.clients(), SOME_STEPS, begun, by, lr=0.2, decay=0.01, **how)
    world.near(found.shared, w)
    world.equal(found.rows["loss"], losses)


@pytest.mark.parametrize("chunk", [1, 4])
def test_steps_by_speed(tmp_path: Path, chunk: int) -> None:
    """Of 6 for the fastest; all wait for one another, and visits take their steps' seconds."""
    paces = np.array([0.58, 0.75, 1.51, 3.33, 0.6, 9.0])
    found = world.play(
        tmp_path,
        algorithm={"name": "fedavg", **BALL, "epochs": 0, "steps": 6},
        **{"participation": {**world.SOME, "work": "speed"}, "batch_clients": chunk},
        speed={**world.table(tmp_path / "paces.csv", paces), "per": "step"},
    )
    steps = [6, 4, 2, 1, 5, 1]
    judge(
        found, found.who(), {"batches": lambda round_, client: world.batches(round_, client, steps=6)[: steps[client]]}
    )
    world.equal(found.rows["steps"], np.where(found.rows["cohort"], steps, -1))
    taken = np.where(found.rows["cohort"], paces * steps, np.nan)
    world.equal(found.rows["visit_seconds"], taken)


SERVERS: dict[str, tuple[dict[str, Any], Any]] = {
    "momentum": ({"lr": 0.8, "betas": [0.7]}, lambda: Momentum(0.8, 0.7)),
    "nesterov": ({"lr": 0.8, "betas": [0.7]}, lambda: Momentum(0.8, 0.7, nesterov=True)),
    "adam": ({"lr": 0.1, "betas": [0.8, 0.9], "tau": 0.05}, lambda: FedOpt("adam", 0.1, 0.8, 0.9, 0.05)),
    "yogi": ({"lr": 0.1, "betas": [0.8, 0.9], "tau": 0.05}, lambda: FedOpt("yogi", 0.1, 0.8, 0.9, 0.05)),
    "adagrad": ({"lr": 0.1, "betas": [0.8], "tau": 0.05}, lambda: FedOpt("adagrad", 0.1, 0.8, 0.0, 0.05)),
}


@pytest.mark.parametrize("name", SERVERS)
def test_server_optimisers(tmp_path: Path, name: str) -> None:
    keys, server = SERVERS[name]
    judge(late(tmp_path, server={"optimizer": name, **keys}), ARRIVED, {"server": server()})


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("name", CORRECTED)
def test_corrections(tmp_path: Path, name: str, chunk: int) -> None:
    keys, correct = CORRECTED[name]
    algorithm = {"decay": 0.5, "weights": "uniform" if chunk == 1 else "samples"}
    server = {"optimizer": "adam", **SERVERS["adam"][0]}
    found = late(tmp_path, algorithm=algorithm, weighting=keys, server=server, batch_clients=chunk)
    how = {"correct": correct(), "server": SERVERS["adam"][1](), "local": partial(ball, decay=0.5)}
    judge(found, ARRIVED, how, algorithm["weights"])


GROUPS = {"model": "groups", "means_of": [0.8, 2.0], "shares_of": [0.5, 0.5], "kind": "dynamic", "sorted": True}
"""Exponential seconds: the first three clients are the fast ones."""


@pytest.mark.parametrize("partial_", ["discard", "steps"])
def test_known_chances(tmp_path: Path, partial_: str) -> None:
    participation = {"close": "deadline", "partial": partial_, "deadline": 1.5, **world.SOME}
    found = world.play(
        tmp_path,
        **{"algorithm": {"name": "fedavg", **BALL}, "speed": GROUPS, "participation": participation},
        **{"weighting": {"correct": "known"}, "rounds": 4},
    )

    def chance(client: int, share: float) -> float:
        """Of so much of a visit to be done in time."""
        return 1 - exp(-1.5 / share / GROUPS["means_of"][client // 3])

    done = found.rows.get("steps")
    if done is None:
        how: dict[str, Any] = {"correct": Known(lambda client, name: chance(client, 1.0), found.who("cohort"))}
    else:  # each step over the chance that so many are done
        how = {"correct": Known(lambda client, name: 1.0, found.who("cohort"))}
        how["batches"] = lambda round_, client: world.batches(round_, client)[: done[round_, client]]
        how["counts"] = lambda client, step: 1 / chance(client, (step + 1) / len(world.batches(0, client)))
    judge(found, found.who(), how)
