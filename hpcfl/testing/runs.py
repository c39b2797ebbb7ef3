"""Small runs and what to compare of them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hpcfl import store
from hpcfl.commands.show import summary
from hpcfl.engine.record import PER_RANK, WALL
from hpcfl.launch.request import resume_request, run_request
from hpcfl.launch.run import launch
from hpcfl.store.atomic import number_of

SINGLES = "HPCFL_TEST_SINGLES"  # folder where launches leave runs of one rank for each other

LATE = {"model": "uniform-depth", "stragglers": 0.7}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {
        "algorithm": {"name": "fedavg", "batch": 32, "momentum": 0.5},
        "speed": {"model": "exponential"},
        "participation": {"invite": "uniform", "size": 5, "close": "first", "first": 4},
        "data": {"name": "digits", "partition": "dirichlet", "alpha": 5.0},
    },
    "drop": {
        "algorithm": {"name": "fedavg", "epochs": 0, "steps": 2, "momentum": 0.5, "persist_optimizer": True},
        "speed": LATE,
        "participation": {"close": "deadline", "partial": "discard"},
    },
    "salf": {
        "algorithm": {"name": "salf", "missing": "empirical", "momentum": 0.5, "persist_optimizer": True},
        "speed": {**LATE, "stragglers": 1.0},
        "participation": {"close": "deadline"},
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"name": "mlp", "hidden": [16], "dropout": 0.2},
    "cnn": {"name": "cnn", "channels": [3, 4], "kernel": 3, "padding": "same", "hidden": [12]},
}


def table(method: str, model: str, batched: bool, **more: Any) -> dict[str, Any]:
    """Return a small run's config: 7 clients in chunks of 2 (the last of 1), or one by one."""
    plain = {"rounds": 4, "clients": 7, "seed": 3, "batch_clients": 2 if batched else False}
    often = {"evaluate": {"every": 2, "last": 1}, "checkpoint": {"every": 2, "keep": 5}}
    return {**plain, **often, "data": {"name": "digits"}, **METHODS[method], "model": MODELS[model], **more}


def toml(values: dict[str, Any], path: Path) -> Path:
    """Write a config; JSON's scalars and lists are TOML's."""
    flat = [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for name, section in values.items():
        if isinstance(section, dict):
            inner = [(key, value) for key, value in section.items() if not isinstance(value, dict)]
            inner += [
                (f"{key}.{own}", each)
                for key, value in section.items()
                if isinstance(value, dict)
                for own, each in value.items()
            ]
            flat += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in inner)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(flat))
    return path


def play(world: Any, values: dict[str, Any], folder: Path, comm: Any) -> Path:
    """Run a config on the ranks of `comm`, or on rank 0 without MPI (None); return the run folder."""
    file = folder.with_suffix(".toml")
    if world.rank == 0:
        toml(values, file)
    if comm is not None:
        launch(lambda: run_request(str(file), (), folder, None, resume=False, quiet=True), comm)
    elif world.rank == 0:
        alone(values, file, folder)
    world.meet()
    return folder


def alone(values: dict[str, Any], file: Path, folder: Path) -> None:
    """Run a config without MPI, or take the run from a launch that has done it before this one."""
    place = os.environ.get(SINGLES)
    kept = Path(place) / hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest() if place else None
    if kept is not None and kept.exists():
        shutil.copytree(kept, folder)
        return
    launch(lambda: run_request(str(file), (), folder, None, resume=False, quiet=True), None)
    if kept is not None:
        copy = shutil.copytree(folder, kept.with_name(f"{kept.name}.{os.getpid()}"))
        with suppress(OSError):  # another launch was faster
            copy.rename(kept)


def recorded(folder: Path) -> dict[str, np.ndarray]:
    """Return every recorded metric but those of wall time and of single ranks."""
    data = store.open_run(folder)
    skip = {*WALL, *PER_RANK, "rank"}
    return {str(name): data[name].values for name in [*data.data_vars, *data.coords] if name not in skip}


def same(one: Path, other: Path) -> None:
    """Assert that two runs recorded the same and ended in the same state, to the bit."""
    left, right = recorded(one), recorded(other)
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)
    assert summary(one)["state_sha256"] == summary(other)["state_sha256"]


def alike(one: Path, other: Path) -> None:
    """Assert the same of runs on a CPU and elsewhere, up to how sums of float32 are rounded: chunk or product."""
    for left, right in ((recorded(one), recorded(other)), (ended(one), ended(other))):
        assert left.keys() == right.keys()
        for name, value in left.items():
            if value.dtype.kind == "f":
                np.testing.assert_allclose(value, right[name], rtol=2e-6, atol=1e-7, err_msg=name)
            else:
                np.testing.assert_array_equal(value, right[name], err_msg=name)


def ended(folder: Path) -> dict[str, np.ndarray]:
    """Return the shared state that a run has ended with."""
    newest = store.latest(folder)
    return {} if newest is None else dict(store.load(newest, personal=False).shared)


def resume(world: Any, folder: Path, done: int, comm: Any) -> None:
    """Resume a finished run on the ranks of `comm` as if it had been stopped after `done` rounds."""
    if world.rank == 0:
        cut_back(folder, done)
    world.meet()
    if comm is not None or world.rank == 0:
        launch(lambda: resume_request(folder, None, quiet=True), comm)
    world.meet()


def cut_back(folder: Path, done: int) -> None:
    """Make a finished run look as if it had been stopped after the checkpoint of round `done`."""
    for path in store.saved(folder):
        if number_of(path) > done:
            shutil.rmtree(path)
    store.write_status(folder, "stopped")
