"""FLIC against a loop from its paper, on clients whose features differ in number."""

from __future__ import annotations

from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hpcfl
from judges import world
from judges.flic import FACTORS, MEANS, OWN, Flic, Released, Targets
from judges.plain import Client, Params
from judges.server import FedOpt, move
from judges.steps import Adam, Sgd

N, ROUNDS = len(world.SIZES), 3
K, EMBED, HIDDEN = 3, 5, 4
BATCH = 26
"""The client of 52 samples has none in the last step of the pass of that of 60; steps are dear here."""
PHASE = 2**32
BETA = {"fedrep": ("head",), "fedavg-ft": (), "l2gd": ("hidden", "head")}
"""What begins the names of β_i."""


@cache
def spaces(real: bool = False) -> list[Client]:
    """The clients of all judges; number i sees i mod 3 features more, which mean nothing. Labels may be `real`."""
    found = []
    for i, (x, y) in enumerate(world.clients()):
        rng = np.random.default_rng(40 + i)
        more = rng.normal(size=(len(y), i % 3)).astype(np.float32)
        labels = torch.from_numpy(rng.uniform(-1, 2, len(y)).astype(np.float32)).double() if real else y
        found.append((torch.cat([x, torch.from_numpy(more).double()], 1), labels))
    return found


def embedding(client: int) -> Params:
    return world.drawn({"embed1": (EMBED, 4 + client % 3), "embed2": (K, EMBED)}, seed=200 + client)


def rest(classes: int, seed: int = 300) -> Params:
    return world.drawn({"hidden1": (HIDDEN, K), "head": (classes, HIDDEN)}, seed)


def anchors(count: int, keys: dict[str, Any]) -> Params:
    """The first ones: with a `spread` those that hpcfl draws."""
    rng = np.random.default_rng(301)
    spread, means = np.eye(K) + rng.normal(0, 0.3, (count, K, K)), rng.normal(0, 2.0, (count, K))
    if "spread" in keys:
        means = hpcfl.keyed(world.SEED, "anchors").standard_normal((count, K), dtype="float32").astype(float)
        means *= keys["spread"]
    if "spread" in keys or "covariances" not in keys:
        spread = keys.get("deviation", 1.0) * np.broadcast_to(np.eye(K), (count, K, K))
    return {MEANS: torch.from_numpy(means), FACTORS: torch.from_numpy(spread)}


def batches(t: int, i: int, phase: int, epochs: int, size: int) -> list[Tensor]:
    return world.batches(t, i, epochs=epochs, size=size, phase=phase)


def noise(t: int, i: int, phase: int, step: int, count: int, meta: list[int]) -> Tensor:
    """What samples of the anchors that a client holds are made of; a `count` below 0: those for its distance."""
    purpose, held = "draws of anchors" if count > 0 else "samples of anchors", {meta[c] for c in spaces()[i][1]}
    rng = hpcfl.keyed(world.SEED, purpose, t, i, step + PHASE * phase)
    return torch.from_numpy(rng.standard_normal((len(held), abs(count), K), dtype="float32")).double()


def real_noise(t: int, i: int, phase: int, step: int, count: int, meta: list[int]) -> Tensor:
    """The same for real labels: that of each sample, and its noise."""
    rng = hpcfl.keyed(world.SEED, "draws of anchors", t, i, step + PHASE * phase)
    labels = rng.random((count, 1), dtype="float32")
    return torch.from_numpy(np.hstack([labels, rng.standard_normal((count, K), dtype="float32")])).double()


def play(folder: Path, chunk: int, first: Params, own: list[Params], real: bool, **sections: Any) -> world.Outcome:
    """Run on the `spaces`; `first` is what is shared at first, `own` what clients begin with."""
    samples: dict[str, Tensor] = {}
    for i, (x, y) in enumerate(spaces(real)):
        for part, rows in (("train", slice(None)), ("test", slice(2))):
            samples[f"clients/{i}/{part}/features"], samples[f"clients/{i}/{part}/labels"] = x[rows].float(), y[rows]
    world.write(folder / "spaces.h5", samples)
    begun = {f"clients/{i}/{name}": value for i, values in enumerate(own) for name, value in values.items()}
    world.write(folder / "first.h5", first | begun)
    latent = {"name": "latent", "widths": [EMBED], "dimension": K, "hidden": [HIDDEN]}
    return world.play(
        folder,
        rounds=ROUNDS,
        batch_clients=chunk,
        data={"name": "hdf5", "file": f"{folder}/spaces.h5", **({} if real else {"labels": world.CLASSES})},
        model={**latent, "initial": f"{folder}/first.h5"},
        participation=world.SOME,
        **sections,
    )


def judge(folder: Path, chunk: int, kind: type[Flic] = Flic, adaptive: bool = False, **more: Any) -> None:
    """Compare all that a run leaves; the judge is told those keys of the config that it has, by their names."""
    keys = {"batch": BATCH, "epochs": 2, "lambda1": 0.3, "lambda2": 0.2, "weights": "uniform", **more}
    keys["lr"] = 0.02 if keys["optimizer"] == "adam" else 0.1
    real, inside = kind is Targets, keys.get("inside", "fedrep")
    classes, copy = 1 if real else world.CLASSES, OWN if inside == "l2gd" else ""
    meta = list(keys.get("meta", range(max(classes, 2))))
    alpha, begun = rest(classes), anchors(max(meta) + 1, keys)
    beta = [{n: value for n, value in rest(classes, 400 + i).items() if n.startswith(BETA[inside])} for i in range(N)]
    given = {name: begun[name] for name in begun if "spread" not in keys and ("covariances" in keys or name == MEANS)}
    found = play(
        *(folder, chunk, alpha | given, [embedding(i) | beta[i] for i in range(N)], real),
        algorithm={"name": "flic", **keys},
        server={"optimizer": "adam", "lr": 0.05, "tau": 0.02} if adaptive else {},
    )
    assert (FACTORS in found.shared) == ("covariances" in keys)
    known = {each.name for each in fields(kind)} - {"weights"}
    loop = kind(
        data=spaces(real),
        own=[embedding(i) | {copy + name: value for name, value in beta[i].items()} for i in range(N)],
        shared={name: value for name, value in alpha.items() if copy or name not in beta[0]} | begun,
        batches=batches,
        noise=partial(real_noise if real else noise, meta=meta),
        optimiser=Sgd if keys["optimizer"] == "sgd" else Adam,
        weights=world.weights(keys["weights"]),
        move=FedOpt("adam", 0.05, 0.9, 0.99, 0.02) if adaptive else move,
        **{"anchor_lr": keys["lr"], "meta": meta, **{key: value for key, value in keys.items() if key in known}},
    )
    losses = [loop.round(t, active) for t, active in enumerate(found.who())]
    world.near(found.shared, {name: value for name, value in loop.shared.items() if name in found.shared})
    for state, kept in zip(found.personal, loop.own, strict=True):
        world.near(state, kept)
    world.equal(found.rows["loss"], losses, "loss")
    world.equal(found.rows["client_test_loss"][-1], [loop.tested(ROUNDS, i) for i in range(N)], "tested")


LEARNT = {"optimizer": "sgd", "anchor_steps": 2, "anchor_lr": 0.1}
BURES = LEARNT | {"covariances": "bures", "tolerance": 1e-14, "iterations": 40}
ALIGNED = {"pretrain": 1, "pretrain_batch": 20, "realign": 1, "tune_epochs": 1}
CASES: dict[str, dict[str, Any]] = {
    "fixed": {"optimizer": "adam", "chunk": 1},
    "mean": {**LEARNT, "weights": "samples", "average": "holders", "covariances": "mean", "chunk": 4},
    "bures": {**BURES, "weights": "samples", "average": "holders", "chunk": 4},
    "bures, of all": {**BURES, "chunk": 1},
    "l2gd": {"inside": "l2gd", "mix": 0.3, "optimizer": "sgd", "weights": "samples", "chunk": 4, "adaptive": True},
    "l2gd, joint": {
        **{"inside": "l2gd", "optimizer": "adam", "local_step": "joint", "weight_decay": 0.05, "chunk": 1},
        **{"batch": 60, "evaluation": "tuned", "tune_epochs": 1},
    },
    "fedavg-ft": {**ALIGNED, "inside": "fedavg-ft", "optimizer": "adam", "evaluation": "round", "chunk": 4},
    "head": {
        **{**ALIGNED, "optimizer": "adam", "anchor_persist": True, "draws": 7, "chunk": 1},
        **{"batch": 60, "evaluation": "head", "tune_epochs": 2},
    },
    "meta": {
        **{**LEARNT, "meta": [0, 2, 1, 0], "average": "holders", "covariances": "mean", "chunk": 4},
        **{"spread": 1.5, "deviation": 1.2},
    },
    "targets": {
        **{"kind": Targets, "inside": "fedavg-ft", "optimizer": "sgd", "local_step": "joint", "chunk": 4},
        **{"evaluation": "tuned", "tune_epochs": 1},
    },
}


@pytest.mark.parametrize("name", CASES)
def test_flic(tmp_path: Path, name: str) -> None:
    judge(tmp_path, **CASES[name])


THEIRS = {
    **{"local_step": "joint", "distance": "samples", "anchor_loss": "means", "anchor_every": "batch"},
    **{"realign_who": "all", "shared_epoch": "last", "shared_from": 1, "optimizer": "adam"},
}


@pytest.mark.parametrize(
    "keys",
    [
        {"evaluation": "round", "deviation": 1.3, "weight_decay": 0.05, "anchor_lr": 0.03, "anchor_steps": 2},
        {"evaluation": "head", "lambda1": 0.0, "lambda2": 0.0, "batch": 60},
    ],
    ids=["all", "loss"],
)
def test_as_released(tmp_path: Path, keys: dict[str, Any]) -> None:
    judge(tmp_path, 1, Released, **ALIGNED, **THEIRS, **keys)
