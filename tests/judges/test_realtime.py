"""In real time, with rounds that wait for all, ranks make of the clients what the judges do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from judges import world as judged
from judges.fedavg import fedavg
from judges.plain import Params, sgd
from judges.salf import salf
from judges.scaffold import scaffold
from judges.server import FedOpt

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


METHODS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[list[list[int]]], Params]]] = {
    "fedprox": ({**FIT, "mu": 0.7, "momentum": 0.9, "weight_decay": 0.01}, {"server": YOGI}, averaged),
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
