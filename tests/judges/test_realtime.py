"""In real time, with rounds that wait for all, ranks make of the clients what the judges do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from judges import arrivals
from judges import world as judged
from judges.arrivals import local, played, polynomial
from judges.fedavg import fedavg
from judges.personal import Srpfl
from judges.plain import Params, sgd
from judges.salf import salf
from judges.scaffold import scaffold
from judges.server import FedOpt, move
from judges.steps import Sgd

pytestmark = pytest.mark.mpi

FIT = {"lr": 0.2, "epochs": 2, "batch": judged.BATCH}
YOGI = {"optimizer": "yogi", "lr": 0.1, "betas": [0.8, 0.9], "tau": 0.05}


def averaged(who: list[list[int]]) -> Params:
    local, server = lambda *_: sgd(0.2, 0.9, 0.01), FedOpt("yogi", 0.1, 0.8, 0.9, 0.05)
    return fedavg(
        judged.start(), judged.clients(), who, judged.batches, local, judged.weights(), server=server, proximal=0.7
    )[0]


def controlled(who: list[list[int]]) -> Params:
    by = judged.weights("uniform")
    return scaffold(judged.start(), judged.clients(), who, judged.batches, by, lambda round_: 0.2)[0]


def layered(who: list[list[int]]) -> Params:
    layers = [[f"{layer}.weight", f"{layer}.bias"] for layer in judged.LAYERS]
    depths = [dict.fromkeys(each, 1) for each in who]
    once = partial(judged.batches, epochs=1)
    return salf(judged.start(), judged.clients(), depths, once, layers, lr=lambda round_: 0.2)[0]


def personal(who: list[list[int]]) -> Params:
    """FedRep, each client's head beginning like the others'."""
    start, body, head = judged.start(), ("fc1", "fc2"), ("fc3",)
    own = [{name: value for name, value in start.items() if name.startswith(head)} for _ in judged.SIZES]
    turns = [(head, 1, 2), (body, 0, 2)]
    clients, sgd = judged.clients(), lambda round_: Sgd(0.2, 0.9, 0.01)
    judge = Srpfl(clients, start, own, turns, judged.batches, judged.weights(), sgd)
    for round_, active in enumerate(who):
        judge.round(round_, active)
    return {name: judge.shared[name] for name in judge.bare}


METHODS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[list[list[int]]], Params]]] = {
    "fedprox": ({**FIT, "mu": 0.7, "momentum": 0.9, "weight_decay": 0.01}, {"server": YOGI}, averaged),
    "fedrep": ({**FIT, "head_epochs": 2, "momentum": 0.9, "weight_decay": 0.01}, {}, personal),
    "scaffold": (FIT, {}, controlled),
    "salf": ({"lr": 0.2, "batch": judged.BATCH, "missing": "none"}, {}, layered),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods(world: Any, shared_dir: Path, name: str) -> None:
    if world.size == 1:
        pytest.skip("needs a server and a client")
    keys, more, judge = METHODS[name]
    sections: dict[str, Any] = {"clock": "wall", "batch_clients": "auto", "participation": judged.SOME, **more}
    found = judged.run(shared_dir, world.comm, algorithm={"name": name, **keys}, **sections)
    if found is not None:
        assert found.who() == found.who("cohort")
        judged.near(found.shared, judge(found.who()))


def passes(version: int, client: int, number: int) -> list[Any]:
    return judged.batches(version, client, phase=AGAIN * number)


AGAIN = 2**16
"""A client's further visit with one version draws by numbers so much larger."""
STALE = {"weight": "polynomial", "a": 0.7}
WITHOUT_ROUNDS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Params, list[arrivals.Change]], Params]]] = {
    "fedasync": (
        {"name": "fedasync", "mu": 0.7, "alpha": 0.6},
        {"participation": {"buffer": 1}, "staleness": STALE},
        arrivals.fedasync(0.6, lambda x: polynomial(x, 0.7)),
    ),
    "ca2fl": (
        {"name": "fedprox", "mu": 0.7},
        {"participation": {"buffer": 3}, "weighting": {"correct": "remembered"}},
        arrivals.ca2fl(judged.weights(), move),
    ),
}


@pytest.mark.parametrize("name", WITHOUT_ROUNDS)
def test_arrivals(world: Any, shared_dir: Path, name: str) -> None:
    """Who arrives when is as the ranks happened to be."""
    if world.size == 1:
        pytest.skip("needs a server and a client")
    keys, more, server = WITHOUT_ROUNDS[name]
    more = {**more, "participation": {"close": "arrivals", **more["participation"]}}
    algorithm = {**FIT, "momentum": 0.9, "weight_decay": 0.01, **keys}
    sections: dict[str, Any] = {"clock": "wall", "batch_clients": False, "rounds": 8, **more}
    found = judged.run(shared_dir, world.comm, algorithm=algorithm, **sections)
    if found is not None:
        work = local(judged.clients(), passes, lambda: Sgd(0.2, 0.9, 0.01), rho=0.7)
        judged.near(found.shared, played(judged.start(), arrivals.trace(found.rows), work, server))
