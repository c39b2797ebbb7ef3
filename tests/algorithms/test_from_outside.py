"""FedDyn, Ditto and pFedMe as those write them who know the documentation alone, against loops from their papers.

In two ways where there are two: the examples, and visits written out.

Clients of 1, 3, 60, 7 and 300 samples, of whom one is never invited, in double precision: alone, in chunks, on ranks,
and resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpcfl
from helpers.launcher import ROOT
from helpers.loops import Clients
from helpers.loops.ditto import ditto
from helpers.loops.feddyn import feddyn
from helpers.loops.pfedme import pfedme
from helpers.loops.scaffnew import scaffnew
from hpcfl import store
from hpcfl.config import from_table
from hpcfl.engine.job import Job
from hpcfl.testing.clients import SIZES
from hpcfl.testing.runs import play, resume, same
from lines import lines_of_code

LAYERS = ["fc1", "fc2"]
METHODS: dict[str, dict[str, Any]] = {
    "feddyn": {"name": "feddyn", "alpha": 0.2, "lr": 0.05},
    "ditto": {"name": "ditto", "pull": 0.3, "lr": 0.02},
    "pfedme": {"name": "pfedme", "pull": 2.0, "lr": 0.05, "eta": 0.2, "beta": 0.7, "inner": 3},
    "feddyn, written out": {"name": "helpers.newcomers.feddyn:FedDyn", "alpha": 0.2, "lr": 0.05},
    "ditto, with momentum": {"name": "helpers.newcomers.ditto:Ditto", "pull": 0.3, "lr": 0.02, "momentum": 0.9},
}
EXAMPLES = ("feddyn", "ditto", "pfedme")
LOOPS: dict[str, Callable[..., Any]] = {"feddyn": feddyn, "ditto": ditto, "pfedme": pfedme}
ROUNDS, BATCH, EPOCHS = 4, 20, 2


def values(method: str, per_chunk: int | bool) -> dict[str, Any]:
    return {
        **{"rounds": ROUNDS, "clients": len(SIZES), "seed": 4, "precision": "double", "batch_clients": per_chunk},
        "algorithm": {**METHODS[method], "batch": BATCH, "epochs": EPOCHS},
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
    paper = method.partition(",")[0]
    given = {key: value for key, value in METHODS[method].items() if key != "name"}
    if method == "ditto":
        given["momentum"] = 0.0
    clients = Clients(data, config.seed, LAYERS, BATCH, EPOCHS)
    shared, own, *others = LOOPS[paper](task.initial(), clients, cohorts, **given)
    extras = others[0] if paper == "feddyn" else {}
    if method == "feddyn":  # which keeps what has moved, and not the gradients that follow
        own = {client: {name: -value / given["alpha"] for name, value in each.items()} for client, each in own.items()}
        alpha = torch.tensor(given["alpha"], dtype=torch.float64)
        own = {client: {**each, "alpha:": alpha} for client, each in own.items()}
        extras = {name: -value / given["alpha"] for name, value in extras.items()}
    if method == "feddyn, written out":
        own = {client: {"slope." + name: value for name, value in each.items()} for client, each in own.items()}
        extras = {"h." + name: value for name, value in extras.items()}
    if method == "ditto, with momentum":
        for client, each in others[0].items():
            own[client] |= {"velocity." + name: value for name, value in each.items()}
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


def test_an_author_meets_few_hooks() -> None:
    own = vars(hpcfl.Algorithm).items()
    assert sum(callable(value) or isinstance(value, property) for name, value in own if name[0] != "_") <= 15


def test_what_the_page_shows_is_the_example() -> None:
    page = (ROOT / "docs" / "howto" / "own-method.md").read_text(encoding="utf-8")
    for name in ("feddyn", "pfedme"):
        source = (ROOT / "hpcfl" / "algorithms" / f"{name}.py").read_text(encoding="utf-8")
        assert f"```python\n{source}```" in page, name
        assert lines_of_code(source) <= 40, name


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


@pytest.mark.mpi
@pytest.mark.parametrize("width", [1, "two-level"])
@pytest.mark.parametrize("method", EXAMPLES)
def test_in_real_time_too(world: Any, shared_dir: Path, method: str, width: Any) -> None:
    given = values(method, False) | {"clock": "wall", "lane_width": width}
    given["participation"] = {**given["participation"], "close": "all"}
    run = play(world, given, shared_dir / "run", world.comm)
    if world.rank == 0:
        judged(method, run)
    resume(world, run, 2, world.comm)
    if world.rank == 0:
        judged(method, run)


@pytest.mark.parametrize("per_chunk", [False, 2, len(SIZES)], ids=["one by one", "pairs", "one chunk"])
def test_a_client_may_keep_the_very_model_that_it_is_given(solo: Any, tmp_path: Path, per_chunk: int | bool) -> None:
    """Scaffnew keeps it under a name of its own; hpcfl works on what it gives in place."""
    steps, lr = 5, 0.1
    given = values("feddyn", per_chunk) | {"participation": {}, "rounds": ROUNDS}
    given["algorithm"] = {"name": "helpers.newcomers.scaffnew:Scaffnew", "lr": lr, "steps": steps, "batch": 0}
    run = play(solo, given, tmp_path / "run", None)
    task = Job.of(from_table(given), None, 1).task
    data = [(task.samples(client).x, task.samples(client).y) for client in range(len(SIZES))]
    clients = Clients(data, given["seed"], LAYERS, max(SIZES), steps)
    shared, ends = scaffnew(task.initial(), clients, ROUNDS, lr=lr, steps=steps)
    agree(shared, store.load(store.latest(run)).shared)  # type: ignore[arg-type]
    for client, held in store.load_personal(store.latest(run), range(len(SIZES))).items():  # type: ignore[arg-type]
        for name, value in ends[client].items():
            np.testing.assert_allclose(held[f"x:{name}"], value, rtol=1e-12, atol=1e-12, err_msg=name)
