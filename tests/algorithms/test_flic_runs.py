"""Runs of FLIC whose clients differ in width: who did not count keeps all; going on; newcomers; what a check says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from hpcfl import store
from hpcfl.algorithms.flic.algorithm import Flic
from hpcfl.commands.check import report
from hpcfl.commands.cli import main
from hpcfl.commands.show import summary
from hpcfl.config import from_table
from hpcfl.data.base import ClientData
from hpcfl.engine.job import Job
from hpcfl.testing.runs import play, resume, same

CLIENTS, LABELS, DIMENSION = 7, 8, 4
DATA = {
    "name": "noisy_features",
    "labels": LABELS,
    "classes": 2,
    "informative": 3,
    "least_noise": 0,
    "most_noise": 5,
    "spread": 3.0,
    "samples_per_class": 20,
    "thinning": False,
}
BURES = {"covariances": "bures", "iterations": 20}
DEADLINE = {"participation": {"close": "deadline", "deadline": 0.5}}
DOUBLING = {
    "participation": {"close": "first", "first": 2},
    "doubling": {"when": "rounds", "rounds": 2},
}


def table(keys: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A run of 7 clients of different widths in chunks of at most 3, saved after every round."""
    plain = {"rounds": 5, "clients": CLIENTS, "seed": 2, "batch_clients": 3}
    often = {"evaluate": {"every": 5, "last": 1}, "checkpoint": {"every": 1, "keep": 9}}
    algorithm = {"name": "flic", "epochs": 1, "batch": 16, "lr": 0.01, **(keys or {})}
    model = {"name": "latent", "dimension": DIMENSION, "widths": [6], "hidden": [5]}
    fixed = {"algorithm": algorithm, "model": model, "data": DATA, "speed": {"model": "exponential"}}
    return {**plain, **often, **fixed, **more}


def widths(values: dict[str, Any]) -> list[int]:
    return [width for (width,) in job(values).task.federation.shapes]


def job(values: dict[str, Any], ranks: int = 1) -> Job:
    config = from_table(values)
    config.check(None)
    return Job.of(config, None, ranks)


def states(folder: Path) -> list[tuple[dict[str, Any], dict[int, dict[str, Any]]]]:
    """Shared and personal state after each round that was saved."""
    paths = store.saved(folder)
    return [(store.load(path, personal=False).shared, store.load_personal(path, range(CLIENTS))) for path in paths]


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


# ---- who counts


def holders(values: dict[str, Any]) -> np.ndarray:
    """Which client holds which class, bool [clients, labels]."""
    task = job(values).task
    return np.array([[bool((task.samples(i).y == c).any()) for c in range(LABELS)] for i in range(CLIENTS)])


@pytest.mark.parametrize("rule", [DEADLINE, DOUBLING], ids=["deadline", "doubling"])
@pytest.mark.parametrize("keys", [{}, BURES], ids=["means", "bures"])
def test_only_what_counted_changes_anything(
    keys: dict[str, Any], rule: dict[str, Any], solo: Any, tmp_path: Path
) -> None:
    values = table(keys, **rule)
    run, begun = play(solo, values, tmp_path / "run", None), job(values)
    counted = store.open_run(run)["arrived"].values == 1
    assert counted.any(1).all()
    assert not counted.all()
    held, found = holders(values), states(run)
    entered = {client: begun.algorithm.init_client(begun.task, client) for client in range(CLIENTS)}
    start = {name: value.numpy() for name, value in begun.algorithm.init_server(begun.task).items()}
    own = {client: {name: value.numpy() for name, value in state.items()} for client, state in entered.items()}
    moved = []
    for who, before, after in zip(counted, [(start, own), *found], found):
        for client in range(CLIENTS):
            assert equal(before[1][client], after[1][client]) == (not who[client])
        for name in start:
            if name.startswith("anchor."):
                moved.append(held[who].any(0))
                kept = [np.array_equal(before[0][name][c], after[0][name][c]) for c in range(LABELS)]
                np.testing.assert_array_equal(kept, ~moved[-1], err_msg=name)
            else:
                assert not np.array_equal(before[0][name], after[0][name])
    assert np.any(moved)
    assert not np.all(moved)


def test_sets_double_until_all_count(solo: Any, tmp_path: Path) -> None:
    run = play(solo, table(**DOUBLING), tmp_path / "run", None)
    assert store.open_run(run)["arrived"].values.sum(1).tolist() == [2, 2, 4, 4, 7]


# ---- going on


@pytest.mark.parametrize(
    "keys", [{**BURES, "pretrain": 1}, {"inside": "l2gd", "evaluation": "tuned", "tune_epochs": 1}]
)
def test_a_run_goes_on_with_the_same_bits(keys: dict[str, Any], solo: Any, tmp_path: Path) -> None:
    values = table(keys, **DEADLINE)
    assert len(set(widths(values))) > 3
    whole, half = (play(solo, values, tmp_path / name, None) for name in ("whole", "half"))
    resume(solo, half, 2, None)
    same(half, whole)
    for one, other in zip(states(half), states(whole), strict=True):
        assert equal(one[0], other[0])
        assert all(equal(one[1][client], other[1][client]) for client in range(CLIENTS))


# ---- newcomers


def few(solo: Any, folder: Path, **keys: Any) -> tuple[Path, Job, list[int]]:
    """A run in which not all take part; and who does not."""
    values = table(keys, rounds=2, participation={"invite": "uniform", "size": 2})
    run = play(solo, values, folder / "run", None)
    never = np.flatnonzero(~(store.open_run(run)["arrived"].values == 1).any(0)).tolist()
    return run, job(values), never


def net(own: dict[str, Any]) -> nn.Sequential:
    """An ordinary network of the tensors ``layer.weight`` and ``layer.bias``."""
    names = ["embed1", "embed2", "hidden1", "head"]
    layers = []
    for name in names:
        weight = torch.from_numpy(np.array(own[f"{name}.weight"]))
        layers.append(nn.Linear(weight.shape[1], weight.shape[0]))
        layers[-1].weight.data, layers[-1].bias.data = weight, torch.from_numpy(np.array(own[f"{name}.bias"]))
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], layers[2], nn.LeakyReLU(0.01), layers[3])


@torch.no_grad()
def scored(own: dict[str, Any], data: ClientData) -> tuple[float, float]:
    """Accuracy and mean loss on a client's test part."""
    outputs, y = net(own)(torch.from_numpy(data.test_features)), torch.from_numpy(data.test_labels)
    return float((outputs.argmax(1) == y).double().mean()), float(nn.functional.cross_entropy(outputs, y))


def adapt(run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["adapt", str(run), "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_newcomers_of_any_width_learn_what_is_theirs(
    solo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcfl.mpi.launcher.world", lambda: None)
    run, job_, never = few(solo, tmp_path)
    path, federation = tmp_path / "own.h5", job_.task.federation
    found = adapt(run, capsys, "--epochs", "20", "--out", str(path))
    assert [row["client"] for row in found["clients"]] == never
    assert len({federation.shapes[client] for client in never}) > 1
    layers = ["embed1", "embed2", "head"]
    assert found["layers"] == [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    shared = store.load(store.latest(run)).shared
    with h5py.File(path) as file:
        for row in found["clients"]:
            client = row["client"]
            own = {name: item[()] for name, item in file[f"clients/{client}"].items()}
            assert sorted(own) == sorted(found["layers"])
            assert own["embed1.weight"].shape == (6, *federation.shapes[client])
            fresh = {name: value.numpy() for name, value in job_.task.initial(client).items()}
            for when, tensors in (("before", fresh), ("after", own)):
                there = row[f"accuracy_{when}"], row[f"loss_{when}"]
                assert there == pytest.approx(scored(shared | {n: tensors[n] for n in own}, federation.client(client)))
            assert row["loss_after"] < row["loss_before"]
    assert found["mean"]["accuracy_after"] > found["mean"]["accuracy_before"]


def test_widths_adapt_together_as_each_by_itself(
    solo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcfl.mpi.launcher.world", lambda: None)
    run, *_ = few(solo, tmp_path, covariances="mean", pretrain=1)
    together = adapt(run, capsys, "--epochs", "2")["clients"]
    for row in together:
        (alone,) = adapt(run, capsys, "--epochs", "2", "--client", str(row["client"]))["clients"]
        assert alone == pytest.approx(row, abs=1e-5)


@pytest.mark.parametrize(
    ("inside", "above"),
    [
        ("fedavg-ft", []),
        ("l2gd", [f"own.{layer}.{kind}" for layer in ("head", "hidden1") for kind in ("bias", "weight")]),
    ],
)
def test_what_is_a_newcomers_own(
    inside: str,
    above: list[str],
    solo: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hpcfl.mpi.launcher.world", lambda: None)
    run, _, never = few(solo, tmp_path, inside=inside)
    found = adapt(run, capsys, "--epochs", "1", "--out", str(tmp_path / "own.h5"))
    embedding = [f"embed{layer}.{kind}" for layer in (1, 2) for kind in ("weight", "bias")]
    assert found["layers"] == [*embedding, *above]
    with h5py.File(tmp_path / "own.h5") as file:
        assert sorted(file[f"clients/{never[0]}"]) == sorted(found["layers"])


# ---- what a check and show say


def said(values: dict[str, Any], ranks: int = 1) -> dict[str, str]:
    config = from_table(values)
    lines = report(config, config.check(None), None, ranks)
    return dict(re.split(r"\s+", line, maxsplit=1) for line in lines if not line.startswith("further"))


def test_a_check_counts_what_is_shared_and_the_widest_client() -> None:
    alpha, means, factors = 5 * DIMENSION + 5, LABELS * DIMENSION, LABELS * DIMENSION**2
    assert said(table())["message"].startswith(f"{4 * (alpha + means)} bytes per whole visit;")
    assert said(table({"covariances": "mean"}))["message"].startswith(
        f"{4 * (alpha + means + factors)} bytes per whole"
    )
    assert said(table(**DOUBLING))["cohort"].startswith("7 invited, 3.8 counted on average")
    wide = {**DATA, "most_noise": 9000}
    values = table(data=wide, clock="wall", batch_clients="auto", speed={"model": "none"})
    widest = max(widths({**values, "clock": "simulated"}))
    phi, beta = 6 * (widest + 1) + DIMENSION * 7, LABELS * 6
    bytes_ = 4 * 4 * (phi + beta + alpha) + 2 * 3 * 4 * (phi + beta)  # 3 clients on each of 3 client ranks
    assert f"{bytes_ / 1e6:.3g} MB per client rank" in said(values, ranks=4)["memory"]


def test_it_is_shown_like_any_run(solo: Any, tmp_path: Path) -> None:
    run = play(solo, table(BURES, rounds=2, evaluate={"every": 1}), tmp_path / "run", None)
    row = summary(run)
    assert (row["status"], row["rounds"], row["accuracy"]) == ("done", 2, None)
    assert 0 < row["client_accuracy"] <= 1
    assert Flic.metric_columns.keys() == {"barycenter_iterations"}
    assert (store.open_run(run)["barycenter_iterations"].values > 0).all()
