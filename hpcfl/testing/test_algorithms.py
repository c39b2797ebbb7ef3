"""What every algorithm must keep: those of the package, or those that ``--algorithm`` names."""

from __future__ import annotations

import ast
import inspect
import random
import shutil
import sys
from collections.abc import Callable
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
from hpcfl.commands import list as catalogue
from hpcfl.config import from_table
from hpcfl.launch import host
from hpcfl.testing import fake_device
from hpcfl.testing.clients import CLASSES, SIZES
from hpcfl.testing.played import Figures, Played, Watched, apart, whose
from hpcfl.testing.runs import alike, play, resume, same, table

CLOSE = 1e-5
EXACT = 1e-12
ROUNDS = 3  # of unequal clients
GENERATORS: dict[str, Callable[[int], Any]] = {
    "torch": torch.manual_seed,
    "numpy": np.random.seed,
    "random": random.seed,
}
FORBIDDEN = (
    *("mpi4py", "h5py", "time", "os", "pathlib"),
    *("hpcfl.store", "hpcfl.mpi.collective", "hpcfl.realtime", "hpcfl.mpi.waiting", "hpcfl.engine.loop"),
)

ARRIVING = {"model": "exponential", "kind": "dynamic"}
OWN: dict[str, dict[str, Any]] = {  # problems of those that need one of their own, and less work than by default
    "decoupled_diloco": {
        "algorithm": {"name": "decoupled_diloco", "lr": 0.01},
        "participation": {"close": "arrivals", "buffer": 2, "max_staleness": 1, "deadline": 3.0},
        "speed": ARRIVING,
        "fragments": {"count": 2},
    },
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
    "ringleader": {
        "participation": {"close": "arrivals", "buffer": 1, "dispatch": "reporter", "deadline": 3.0},
        "speed": ARRIVING,
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
    "linear_fedrep": {"data": {"name": "linear"}, "model": {"name": "linear"}},
}

WHOLE: dict[str, Path] = {}
SEEDED: dict[str, Figures] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("name", metafunc.config.getoption("--algorithm") or sorted(algorithms()))


def values(name: str, batched: bool = True) -> dict[str, Any]:
    """Return a small run with an algorithm's defaults or nearly so, two thirds of the clients late."""
    return table("salf", "mlp", batched, algorithm={"name": name}, speed=late(name, 0.7)) | OWN.get(name, {})


def late(name: str, share: float) -> dict[str, Any]:
    """Return speeds by which this share of the clients is late; others where rounds wait for all: no deadline there."""
    return ARRIVING if waits(name, 0) else {"model": "uniform-depth", "stragglers": share}


def waits(name: str, round_: int) -> bool:
    """Whether a method's round of this number waits for everybody."""
    given = {"name": name, **OWN.get(name, {}).get("algorithm", {})}
    return bool(algorithm_class(name)(**given).invites_all(round_))


def unequal(name: str, batched: bool = True) -> dict[str, Any]:
    """Return a run in double precision of clients of `SIZES` samples, one of whom is never invited."""
    own = OWN.get(name, {})
    if own.keys() & {"data", "model"}:
        pytest.skip("it has a problem of its own, with data of its own")
    few = {"rounds": ROUNDS, "clients": len(SIZES), "seed": 4, "batch_clients": len(SIZES) if batched else False}
    some = {"participation": {"invite": "uniform", "size": 3}, "speed": {"model": "none"}} | own
    made = {"data": {"name": "hpcfl.testing.clients:Unequal"}, "model": {"name": "mlp", "hidden": [4]}}
    return few | some | made | {"precision": "double", "algorithm": {"name": name, **own.get("algorithm", {})}}


def seeded(name: str, other: str = "") -> Figures:
    """Return what a short run ends with after global generators were seeded, one of them by another seed."""
    for generator, seed in GENERATORS.items():
        seed(int(generator == other))
    return Played(from_table(values(name))).play(2).state


def first(name: str) -> Figures:
    """Return what the first such run of the process ended with."""
    if name not in SEEDED:
        SEEDED[name] = seeded(name)
    return SEEDED[name]


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
    monkeypatch.setattr(host, "chosen", lambda wanted, key, number: fake_device.registered())
    other = values(name) | {"ranks_per_device": 2}  # or another launch's run on the CPU would be taken
    alike(play(solo, other, tmp_path / "there", None), whole)


def test_a_round_without_visits_changes_nothing(solo: Any, tmp_path: Path, name: str) -> None:
    nobody = {"model": "exponential", "rate": 1e-6}
    run, config = tmp_path / "void", values(name) | {"speed": nobody, "checkpoint": {"every": 1, "keep": 5}}
    first = next((number for number in range(config["rounds"]) if not waits(name, number)), None)
    if first is None:
        pytest.skip("all its rounds wait for everybody")
    with nullcontext() if first else pytest.raises(Diverged, match="no visit counted in any round"):
        play(solo, config, run, None)
    data = store.open_run(run)
    assert (data["void"].values[first:] == 1).all()
    saved = [store.load(path).shared for path in store.saved(run)]
    for key in saved[0]:
        np.testing.assert_array_equal(saved[0][key], saved[-1][key])


def test_learns(solo: Any, tmp_path: Path, name: str) -> None:
    run = play(solo, values(name) | {"rounds": 12, "speed": {"model": "none"}}, tmp_path / "run", None)
    data = store.open_run(run)
    kinds = data["test_loss"], data["client_test_loss"].mean("client"), data["loss"]
    assert np.isfinite(data["sim_seconds"].values).all()
    loss = next(kind for kind in kinds if kind.notnull().any()).dropna("round").values
    assert loss[-1] < loss[0]
    assert np.isfinite(loss).all()


def test_fused_vmapped_and_looped_agree(name: str) -> None:
    speed = {"speed": late(name, 0.3)}
    configs = [from_table(values(name, batched) | speed | OWN.get(name, {})) for batched in (True, False)]
    played = Played(configs[0], "fused")
    if played.job.task.computing != "fused":
        pytest.skip("its model is no stack of linear layers")
    fused = played.play(1).state
    for config in configs:
        other = Played(config, "vmapped").play(1).state
        assert other.keys() == fused.keys()
        for key, value in fused.items():
            torch.testing.assert_close(value, other[key], atol=CLOSE, rtol=CLOSE)


# ---- what those get wrong who know the package from outside


def test_a_chunk_of_unequal_clients_equals_single_visits(name: str) -> None:
    """Some have no samples in most steps of the others."""
    together, single = (Played(from_table(unequal(name, batched))).play(ROUNDS) for batched in (True, False))
    if line := apart(together.state | together.scores, single.state | single.scores, EXACT):
        pytest.fail(
            f"{name}: {line} between a chunk of clients of {', '.join(map(str, SIZES))} samples and visits one by one: "
            "what a client sends and keeps may depend on its own samples alone",
            pytrace=False,
        )


def test_clients_without_samples_of_some_classes(name: str) -> None:
    played = Played(from_table(unequal(name))).play(ROUNDS)
    what = f"where clients hold one or two of {CLASSES} classes"
    if played.rejected:
        pytest.fail(f"{name}.client: sends what is not finite {what}", pytrace=False)
    for (client, key), value in (played.state | played.scores).items():
        if not value.isfinite().all():
            pytest.fail(f"{name}: {whose(client, key)} is not finite {what}", pytrace=False)


def test_changes_nothing_that_it_is_given(name: str) -> None:
    """What is shared is served to others too, and may still be on its way; a test leaves no traces."""
    _ = Played(from_table(values(name, batched=False)), wrapper=Watched).play(2).scores


def test_sends_and_keeps_what_it_has_said(name: str) -> None:
    """Names, shapes and types of blocks are those of the layout, those of states as they began."""
    Played(from_table(values(name)), wrapper=Watched).play(2)


def test_keeps_nothing_outside_its_state(name: str) -> None:
    if line := apart(first(name), seeded(name)):
        pytest.fail(
            f"{name}: {line} between two runs in one process: what outlasts a visit belongs in `init_client`, "
            "`init_server` or `init_extras`, and random numbers come from hpcfl.keyed",
            pytrace=False,
        )


@pytest.mark.parametrize("generator", ["torch", "numpy", "random"])
def test_draws_nothing_from_global_generators(name: str, generator: str) -> None:
    """They go on elsewhere on other ranks, and begin anew where a run is resumed."""
    if line := apart(first(name), seeded(name, generator)):
        pytest.fail(
            f"{name}: {line} with another seed of {generator}'s global generator: random numbers come from hpcfl.keyed",
            pytrace=False,
        )
