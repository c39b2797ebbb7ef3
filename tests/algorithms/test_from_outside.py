"""FedDyn and Ditto as those write them who know the documentation alone, against loops from their papers.

Clients of 1, 3, 60, 7 and 300 samples, of whom one is never invited, in double precision: alone, in chunks, on ranks,
and resumed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.loops import Clients
from helpers.loops.ditto import ditto
from helpers.loops.feddyn import feddyn
from hpcfl import store
from hpcfl.config import from_table
from hpcfl.engine.job import Job
from hpcfl.testing.clients import SIZES
from hpcfl.testing.runs import play, resume, same

LAYERS = ["fc1", "fc2"]
METHODS: dict[str, dict[str, Any]] = {
    "feddyn": {"name": "helpers.newcomers.feddyn:FedDyn", "alpha": 0.2, "lr": 0.05},
    "ditto": {"name": "helpers.newcomers.ditto:Ditto", "pull": 0.3, "lr": 0.02, "momentum": 0.9},
}
ROUNDS = 4


def values(method: str, per_chunk: int | bool) -> dict[str, Any]:
    return {
        **{"rounds": ROUNDS, "clients": len(SIZES), "seed": 4, "precision": "double", "batch_clients": per_chunk},
        "algorithm": {**METHODS[method], "batch": 20, "epochs": 2},
        "participation": {"invite": "uniform", "size": 3},
        "data": {"name": "hpcfl.testing.clients:Unequal"},
        "model": {"name": "mlp", "hidden": [4]},
        "speed": {"model": "none"},
        "checkpoint": {"every": 2, "keep": 5},
    }


def judged(method: str, run: Path) -> None:
    """Assert that a run ended where the loop does."""
    config = from_table(values(method, False))
    task = Job.of(config, None, 1).task
    data = [(task.samples(client).x, task.samples(client).y) for client in range(len(SIZES))]
    cohorts = [np.flatnonzero(row == 1).tolist() for row in store.open_run(run)["cohort"].values]
    assert len(cohorts) == ROUNDS
    assert len({client for cohort in cohorts for client in cohort}) == len(SIZES) - 1
    keys = {key: value for key, value in config.algorithm.model_dump().items() if key != "name"}
    clients = Clients(data, config.seed, LAYERS, keys.pop("batch"), keys.pop("epochs"))
    loop = {"feddyn": feddyn, "ditto": ditto}[method]
    shared, *others = loop(task.initial(), clients, cohorts, **keys)  # type: ignore[operator]
    if method == "feddyn":
        slopes, h = others
        own = {client: {"slope." + name: value for name, value in each.items()} for client, each in slopes.items()}
        extras = {"h." + name: value for name, value in h.items()}
    else:
        own, velocity = others
        for client, each in velocity.items():
            own[client] |= {"velocity." + name: value for name, value in each.items()}
        extras = {}
    saved = store.load(store.latest(run))  # type: ignore[arg-type]
    agree(shared, saved.shared)
    agree(extras, saved.extras)
    for client, held in store.load_personal(store.latest(run), range(len(SIZES))).items():  # type: ignore[arg-type]
        agree(own[client], held)
    assert any(not torch.equal(value, task.initial()[name]) for name, value in shared.items())


def agree(wanted: dict[str, Any], found: dict[str, Any]) -> None:
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("per_chunk", [False, 2, len(SIZES)], ids=["one by one", "pairs", "one chunk"])
@pytest.mark.parametrize("method", METHODS)
def test_equals_its_paper(solo: Any, tmp_path: Path, method: str, per_chunk: int | bool) -> None:
    run = play(solo, values(method, per_chunk), tmp_path / "run", None)
    judged(method, run)
    resume(solo, run, 2, None)
    judged(method, run)


@pytest.mark.mpi
@pytest.mark.parametrize("method", METHODS)
def test_on_ranks_too(world: Any, shared_dir: Path, method: str) -> None:
    run = play(world, values(method, 2), shared_dir / "run", world.comm)
    alone = play(world, values(method, 2), shared_dir / "alone", None)
    if world.rank == 0:
        judged(method, run)
        same(run, alone)
    resume(world, run, 2, world.comm)
    if world.rank == 0:
        same(run, alone)
