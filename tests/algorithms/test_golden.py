"""Runs whose weights, split, paces and stragglers come from files equal independent loops (helpers/loops) to 1e-12."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from helpers.loops import Client, Params
from helpers.loops.flic import Flic
from helpers.loops.salf import salf
from helpers.loops.srpfl import Visit, srpfl
from hpcfl import store
from hpcfl.config.presets import read_overlay
from hpcfl.testing.runs import play

Arrays = dict[str, np.ndarray[Any, Any]]

SEED, USERS, CLASSES = 7, 5, 3
SIZES = 31, 22, 25, 40, 18  # training samples
PACES = 0.9, 3.5, 0.2, 1.7, 2.6
WIDTHS = {"fc1": (6, 8), "fc2": (5, 6), "fc3": (3, 5)}
MLP = {
    f"{layer}.{part}": shape[:axes]
    for layer, shape in WIDTHS.items()
    for part, axes in (("weight", 2), ("bias", 1))
}  # fmt: skip


def near(found: Mapping[str, Any], wanted: Params) -> None:
    """Assert that all that an independent loop has is found."""
    assert wanted
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value.numpy(), rtol=0, atol=1e-12, err_msg=name)


def drawn(rng: np.random.Generator, shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    return {name: rng.normal(0, 0.5, shape) for name, shape in shapes.items()}


def tensors(values: Arrays) -> Params:
    return {name: torch.from_numpy(value) for name, value in values.items()}


def write(path: Path, values: Mapping[str, Any]) -> None:
    with h5py.File(path, "w") as file:
        file.update(values)


def write_initial(folder: Path, shared: Arrays, own: Iterable[Arrays] = ()) -> None:
    each = {f"clients/{user}/{name}": value for user, state in enumerate(own) for name, value in state.items()}
    write(folder / "initial.h5", shared | each)


@pytest.fixture
def pool(tmp_path: Path) -> list[Client]:
    """Make files of a pool, its split among the users, and their paces; return what each user holds."""
    rng = np.random.default_rng(1)
    y = rng.integers(CLASSES, size=sum(SIZES) + 20)
    x = (rng.normal(size=(len(y), 8)) + np.eye(8)[y]).astype(np.float32)
    parts = np.split(rng.permutation(len(y))[20:], np.cumsum(SIZES)[:-1])  # 20 samples are nobody's
    samples = {"train/features": x, "train/labels": y, "test/features": x[:10], "test/labels": y[:10]}
    write(tmp_path / "pool.h5", samples)
    write(tmp_path / "split.h5", {f"clients/{user}/train": part for user, part in enumerate(parts)})
    rows = "".join(f"{user},{pace}\n" for user, pace in enumerate(PACES))
    (tmp_path / "paces.csv").write_text(f"client,seconds\n{rows}")
    return [(torch.from_numpy(x[part]).double(), torch.from_numpy(y[part])) for part in parts]


def run(solo: Any, folder: Path, **sections: Any) -> tuple[Mapping[str, Any], list[Arrays]]:
    """Run on the files in a folder; return what is shared in the end, and what each client keeps."""
    split = {"partition": "file", "partition_file": f"{folder}/split.h5"}
    values: dict[str, Any] = {
        **{"rounds": 6, "clients": USERS, "seed": SEED, "precision": "double", "evaluate": {"every": 100, "last": 1}},
        **{"data": split, "model": {"name": "mlp", "hidden": [6, 5]}, "speed": {"file": f"{folder}/paces.csv"}},
        **sections,
    }
    values["data"] = {"name": "hdf5", "file": f"{folder}/pool.h5", **values["data"]}
    values["model"] = {"initial": f"{folder}/initial.h5", **values["model"]}
    values["speed"] = {"model": "table", **values["speed"]}
    path = store.latest(play(solo, values, folder / "run", None))
    assert path is not None
    own = store.load_personal(path, range(values["clients"]))
    return store.load(path).shared, [own[client] for client in sorted(own)]


def test_salf_released(solo: Any, tmp_path: Path, pool: list[Client]) -> None:
    rng = np.random.default_rng(2)
    start, depths = drawn(rng, MLP), rng.integers(1, len(MLP) + 2, (6, USERS))
    depths[3] = len(MLP) + 1  # a round in which nothing arrives
    write_initial(tmp_path, start)
    rounds, clients = np.divmod(np.arange(depths.size), USERS)
    write(tmp_path / "depths.h5", {"round": rounds, "client": clients, "depth": depths.ravel()})
    keys = {"name": "salf", "rule": "released", "blocks": "tensor", "momentum": 0.5, "persist_optimizer": True}
    algorithm, speed = {**keys, "lr": 0.2, "batch": 16}, {"file": f"{tmp_path}/depths.h5"}
    shared, own = run(solo, tmp_path, algorithm=algorithm, participation={"close": "deadline"}, speed=speed)
    model, velocities = salf(tensors(start), pool, depths, SEED, lr=0.2, momentum=0.5, batch=16)
    near(shared, model)
    for found, velocity in zip(own, velocities, strict=True):
        near(found, velocity)


LOWER, HEAD = ("fc1", "fc2"), ("fc3",)
FEDREP = Visit(HEAD, ((HEAD, 1, 3), (LOWER, 0, 2), (HEAD, 3, 3), (LOWER, 2, 2)), 0.1, 0.5, 1e-2, 12)
LG = Visit(("fc1",), (((*LOWER, *HEAD), 0, 2),), 0.1, 0.0, 1e-2, 12)
KEYS: dict[str, dict[str, Any]] = {
    "fedrep": {"name": "fedrep", "epochs": 2, "head_epochs": 3, "blocks": 2, "momentum": 0.5},
    "lg_fedavg": {"name": "lg_fedavg", "epochs": 2, "shared_layers": 2},
}


@pytest.mark.parametrize(
    ("name", "how", "newcomer"),
    [
        ("fedrep", FEDREP, "initial"),
        ("fedrep", FEDREP, "averaged"),
        ("lg_fedavg", LG, "initial"),
        ("lg_fedavg", LG, "averaged"),
    ],
)
def test_srpfl(solo: Any, tmp_path: Path, pool: list[Client], name: str, how: Visit, newcomer: str) -> None:
    rng = np.random.default_rng(3)
    start = drawn(rng, MLP)
    first = [drawn(rng, {key: MLP[key] for key in MLP if key.startswith(how.personal)}) for _ in range(USERS)]
    write_initial(tmp_path, start, first)
    shared, own = run(
        solo,
        tmp_path,
        algorithm={**KEYS[name], "lr": 0.1, "batch": 12, "weight_decay": 1e-2, "newcomer": newcomer},
        participation={"close": "first", "first": 1},
        doubling={"when": "rounds", "rounds": 2},
    )
    mean, kept = srpfl(
        *(tensors(start), [tensors(state) for state in first], pool, PACES, how),
        **{"first": 1, "stage": 2, "rounds": 6, "seed": SEED, "averaged": newcomer == "averaged"},
    )
    near(shared, mean)
    for found, state in zip(own, kept, strict=True):
        near(found, state)
    near(own[1], tensors(first[1]))  # stages of 1, 2 and 4 visits: the slowest had none


EMBEDDING = {"embed1.bias": (6,), "embed2.weight": (3, 6), "embed2.bias": (3,)}
HOLD = (0, 1), (1, 2), (0, 2), (0, 1)


def spaces(folder: Path, rng: np.random.Generator) -> list[Client]:
    """Make files of four clients of other widths, and of their paces in each of 3 rounds; return what they hold."""
    centres, data, samples = rng.normal(0, 1.5, (CLASSES, 4)), [], {}
    for client, classes in enumerate(HOLD):
        y, spurious = np.repeat(classes, 14), rng.normal(size=(28, client))
        x = np.hstack([centres[y] + rng.normal(size=(28, 4)), spurious]).astype(np.float32)
        for part, rows in (("train", slice(None)), ("test", slice(2))):
            samples |= {f"clients/{client}/{part}/features": x[rows], f"clients/{client}/{part}/labels": y[rows]}
        data.append((torch.from_numpy(x).double(), torch.from_numpy(y)))
    write(folder / "pool.h5", samples)
    lines = [f"{place // 4},{place % 4},{pace}" for place, pace in enumerate(rng.random(12))]
    (folder / "paces.csv").write_text("\n".join(["round,client,seconds", *lines, ""]))
    return data


def test_flic_class_released(solo: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    data = spaces(tmp_path, rng)
    anchors = rng.normal(0, 2.0, (CLASSES, 3))
    head = drawn(rng, {"head.weight": (CLASSES, 3), "head.bias": (CLASSES,)})
    phi = [drawn(rng, {"embed1.weight": (6, x.shape[1]), **EMBEDDING}) for x, _ in data]
    write_initial(tmp_path, {"anchor.means": anchors, **head}, phi)
    keys = {"lr": 0.01, "batch": 14, "epochs": 2, "lambda1": 0.1, "lambda2": 0.2, "pretrain": 1, "pretrain_batch": 28}
    shared, own = run(
        solo,
        tmp_path,
        **{"rounds": 3, "clients": 4, "data": {}, "model": {"name": "latent", "widths": [6], "dimension": 3}},
        algorithm={"name": "flic", **read_overlay("flic-released")["algorithm"], **keys},
        participation={"close": "first", "first": 2},
    )
    loop = Flic(data, [tensors(one | head) for one in phi], torch.from_numpy(anchors), SEED, **keys)
    paces = np.loadtxt(tmp_path / "paces.csv", delimiter=",", skiprows=1)[:, 2].reshape(3, 4)
    for round_, fastest in enumerate(paces.argsort(1)[:, :2]):
        loop.round(round_, sorted(fastest.tolist()), torch.from_numpy(anchors))
    near(shared, {"anchor.means": loop.anchors})
    for found, state in zip(own, loop.personal, strict=True):
        near(found, state)
