"""What every algorithm must keep: those of the package, or those that ``--algorithm`` names."""

from __future__ import annotations

import ast
import inspect
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcfl import config as configs
from hpcfl import store
from hpcfl.algorithms import algorithm_class, algorithms
from hpcfl.base.errors import Diverged, UsageError
from hpcfl.base.types import Computing
from hpcfl.comm.transport import Alone
from hpcfl.commands import list as catalogue
from hpcfl.config import Config, from_table
from hpcfl.engine.job import Job
from hpcfl.engine.loop import step
from hpcfl.engine.record import Record
from hpcfl.engine.simulated import Simulated
from hpcfl.launch import device
from hpcfl.testing import fake_device
from hpcfl.testing.runs import play, resume, same, table

CLOSE = 1e-5
FORBIDDEN = (
    *("mpi4py", "h5py", "time", "os", "pathlib"),
    *("hpcfl.store", "hpcfl.comm.collective", "hpcfl.engine.wall", "hpcfl.comm.mpi", "hpcfl.engine.loop"),
)

ARRIVING = {"model": "exponential", "kind": "dynamic"}
OWN: dict[str, dict[str, Any]] = {  # problems of those that need one of their own, and less work than by default
    "fedasync": {"participation": {"close": "arrivals", "buffer": 1, "deadline": 3.0}, "speed": ARRIVING},
    "fedhenn": {"algorithm": {"name": "fedhenn", "alignment": 12}},
    "fedlrgd": {  # as the paper prints it: inverses go to the clients, sums come back one by one
        "precision": "double",
        "data": {"name": "unit_cube", "samples": 12, "server": 5, "heterogeneity": 0.5},
        "model": {"name": "glm", "ridge": 0.1},
        "algorithm": {
            **{"name": "fedlrgd", "rank": 4, "lr": 0.7, "steps": 3, "solve_at": "client", "pipelined": True},
        },
    },
    "fedrep": {"algorithm": {"name": "fedrep", "head_epochs": 2}},
    "flic": {  # clients in chunks of one width and of several, embeddings that align before a first visit
        "data": {
            **{"name": "linear_mapping", "labels": 6, "informative": 3, "least": 4, "most": 5, "samples_per_class": 40},
            **{"spread": 2.0, "thinning": False},
        },
        "model": {"name": "latent", "widths": [8], "dimension": 4, "hidden": [6]},
        "algorithm": {
            **{"name": "flic", "epochs": 1, "batch": 20, "draws": 4, "lr": 0.02, "pretrain": 1},
            **{"lambda1": 0.1, "lambda2": 0.1, "average": "holders", "covariances": "bures"},
            "iterations": 3,
        },
    },
    "ringmaster": {
        "participation": {
            "close": "arrivals",
            "buffer": 1,
            "dispatch": "reporter",
            "max_staleness": 2,
            "deadline": 3.0,
        },
        "speed": ARRIVING,
    },
    "linear_fedrep": {
        "data": {"name": "linear"},
        "model": {"name": "linear"},
        "speed": {"model": "exponential", "kind": "dynamic"},  # a first round for everybody has no deadline
    },
}

WHOLE: dict[str, Path] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("name", metafunc.config.getoption("--algorithm") or sorted(algorithms()))


def values(name: str, batched: bool = True) -> dict[str, Any]:
    """Return a small run with an algorithm's defaults or nearly so, two thirds of the clients late."""
    late = {"model": "uniform-depth", "stragglers": 0.7}
    return table("salf", "mlp", batched, algorithm={"name": name}, speed=late) | OWN.get(name, {})


def after_one_round(config: Config, computing: Computing) -> tuple[Job, dict[tuple[int, str], Any]]:
    """Return what is shared (client −1) and what each client keeps after one round."""
    job = Job.of(config, None, 1, computing=computing)
    now, record = job.begin(0), Record.open()
    plan, record.sums = Simulated(job, Alone(), 0).exchange(now, record)
    step(job, now, record, plan)
    found = {(-1, name): value for name, value in now.shared.items()}
    for chunk in job.chunks:
        for name, values in now.personal[chunk.number].items():
            found |= {(int(client), name): value for client, value in zip(chunk.clients, values)}
    return job, found


@pytest.fixture
def whole(solo: Any, tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """A run by one rank that nobody disturbed; tests read it, and take copies."""
    if name not in WHOLE:
        WHOLE[name] = play(solo, values(name), tmp_path_factory.mktemp(name) / "whole", None)
    return WHOLE[name]


def test_is_documented_in_the_catalogue(name: str) -> None:
    head, *lines = catalogue.described(algorithm_class(name))
    assert head.startswith(f"  {name}: ")
    assert head.endswith(".")
    keys = [key for key in algorithm_class(name).model_fields if key != "name"]
    for key, line in zip(keys, lines, strict=True):
        _, _, text = line.partition(f"    {key} = ")
        assert "  " in text, f"{name}.{key} has no text: {line}"


def test_refuses_unknown_keys_and_other_types(name: str) -> None:
    for bad in ({"no_such_key": 1}, {"lr": "0.1"}, {"lr": True}):
        with pytest.raises(UsageError, match=r"^algorithm\."):
            configs.from_table(values(name) | {"algorithm": {"name": name, **bad}})


def test_knows_no_transport_files_clocks_or_other_algorithms(name: str) -> None:
    source = inspect.getsource(sys.modules[algorithm_class(name).__module__])
    imported = [
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    cls = algorithm_class(name)  # what is another method with something more may know that one
    others = {module for other, module in algorithms().items() if not issubclass(cls, algorithm_class(other))}
    assert not [module for module in imported if module in others or str(module).startswith(FORBIDDEN)]


@pytest.mark.mpi
def test_one_rank_equals_n(world: Any, shared_dir: Path, name: str) -> None:
    same(
        play(world, values(name), shared_dir / "ranks", world.comm), play(world, values(name), shared_dir / "one", None)
    )


def test_batched_equals_single(whole: Path, solo: Any, tmp_path: Path, name: str) -> None:
    runs = whole, play(solo, values(name, batched=False), tmp_path / "single", None)
    one, other = (store.load(store.latest(run)).shared for run in runs)  # type: ignore[arg-type]
    for key in one:
        np.testing.assert_allclose(one[key], other[key], atol=1e-5, err_msg=key)


def test_resumed_equals_uninterrupted(whole: Path, solo: Any, tmp_path: Path, name: str) -> None:
    half = shutil.copytree(whole, tmp_path / "half")
    resume(solo, half, 2, None)
    same(half, whole)


@pytest.mark.skipif(not fake_device.available(), reason="this torch has no back ends in Python")
def test_a_device_beside_the_cpu(
    whole: Path, solo: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of the device and of the CPU are not mixed, and what is computed there is what the CPU gives."""
    monkeypatch.setattr(device, "chosen", lambda wanted, key, number: fake_device.registered())
    other = values(name) | {"ranks_per_device": 2}  # or another launch's run on the CPU would be taken
    same(play(solo, other, tmp_path / "there", None), whole)


def test_a_round_without_visits_changes_nothing(solo: Any, tmp_path: Path, name: str) -> None:
    nobody = {"model": "exponential", "rate": 1e-6}
    first = int(algorithm_class(name)(name=name).invites_all(0))  # such a round waits for everybody
    run, config = tmp_path / "void", values(name) | {"speed": nobody, "checkpoint": {"every": 1, "keep": 5}}
    with nullcontext() if first else pytest.raises(Diverged, match="no visit counted in any round"):
        play(solo, config, run, None)
    data = store.open_run(run)
    assert (data["void"].values[first:] == 1).all()
    saved = [store.load(path).shared for path in store.saved(run)]
    for key in saved[0]:
        np.testing.assert_array_equal(saved[0][key], saved[-1][key])


def test_learns(solo: Any, tmp_path: Path, name: str) -> None:
    run = play(solo, values(name) | {"rounds": 6, "speed": {"model": "none"}}, tmp_path / "run", None)
    data = store.open_run(run)
    kinds = data["test_loss"], data["client_test_loss"].mean("client"), data["loss"]
    assert np.isfinite(data["sim_seconds"].values).all()
    loss = next(kind for kind in kinds if kind.notnull().any()).dropna("round").values
    assert loss[-1] < loss[0]
    assert np.isfinite(loss).all()


def test_fused_vmapped_and_looped_agree(name: str) -> None:
    late = {"model": "uniform-depth", "stragglers": 0.3}
    configs = [from_table(values(name, batched) | {"speed": late} | OWN.get(name, {})) for batched in (True, False)]
    job, fused = after_one_round(configs[0], "fused")
    if job.task.computing != "fused":
        pytest.skip("its model is no stack of linear layers")
    for config in configs:
        _, other = after_one_round(config, "vmapped")
        assert other.keys() == fused.keys()
        for key, value in fused.items():
            torch.testing.assert_close(value, other[key], atol=CLOSE, rtol=CLOSE)
