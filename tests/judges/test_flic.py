"""FLIC against a loop from its paper, on clients whose features differ in number."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hpcfl
from judges import world
from judges.flic import FACTORS, MEANS, Flic, Released
from judges.plain import Client, Params
from judges.steps import Adam, Sgd

N = len(world.SIZES)
K, EMBED, HIDDEN = 3, 5, 4
BATCH = 26
"""The client of 52 samples has none in the last step of the pass of that of 60; steps are dear here."""
PHASE = 2**32


@cache
def spaces() -> list[Client]:
    """The clients of all judges; number i sees i mod 3 features more, which mean nothing."""
    found = []
    for i, (x, y) in enumerate(world.clients()):
        more = np.random.default_rng(40 + i).normal(size=(len(y), i % 3)).astype(np.float32)
        found.append((torch.cat([x, torch.from_numpy(more).double()], 1), y))
    return found


def embedding(client: int) -> Params:
    return world.drawn({"embed1": (EMBED, 4 + client % 3), "embed2": (K, EMBED)}, seed=200 + client)


def rest() -> Params:
    return world.drawn({"hidden1": (HIDDEN, K), "head": (world.CLASSES, HIDDEN)}, seed=300)


def anchors() -> Params:
    rng = np.random.default_rng(301)
    spread = np.eye(K) + rng.normal(0, 0.3, (world.CLASSES, K, K))
    means = rng.normal(0, 2.0, (world.CLASSES, K))
    return {MEANS: torch.from_numpy(means), FACTORS: torch.from_numpy(spread)}


def batches(t: int, i: int, phase: int, epochs: int, size: int) -> list[Tensor]:
    return world.batches(t, i, epochs=epochs, size=size, phase=phase)


def noise(t: int, i: int, phase: int, step: int, count: int) -> Tensor:
    """What samples of the anchors that a client holds are made of; a `count` below 0: those for its distance."""
    purpose, held = "draws of anchors" if count > 0 else "samples of anchors", len(spaces()[i][1].unique())
    rng = hpcfl.keyed(world.SEED, purpose, t, i, step + PHASE * phase)
    return torch.from_numpy(rng.standard_normal((held, abs(count), K), dtype="float32")).double()


SETTINGS: dict[str, dict[str, Any]] = {
    "fixed": {"weights": "uniform", "optimizer": "adam", "lr": 0.02},
    "mean": {"weights": "samples", "optimizer": "sgd", "average": "holders", "covariances": "mean"},
    "bures": {"weights": "samples", "optimizer": "sgd", "average": "holders", "covariances": "bures"},
    "bures, of all": {"weights": "uniform", "optimizer": "sgd", "covariances": "bures"},
}


def play(folder: Path, chunk: int, given: Params, keys: dict[str, Any]) -> world.Outcome:
    """Run on the `spaces`; `given` are what is shared at first, and the heads."""
    samples: dict[str, Tensor] = {}
    for i, (x, y) in enumerate(spaces()):
        for part, rows in (("train", slice(None)), ("test", slice(2))):
            samples[f"clients/{i}/{part}/features"], samples[f"clients/{i}/{part}/labels"] = x[rows].float(), y[rows]
    world.write(folder / "spaces.h5", samples)
    own = {f"clients/{i}/{name}": value for i in range(N) for name, value in embedding(i).items()}
    world.write(folder / "first.h5", given | own)
    latent = {"name": "latent", "widths": [EMBED], "dimension": K, "hidden": [HIDDEN]}
    return world.play(
        folder,
        rounds=3,
        batch_clients=chunk,
        algorithm={"name": "flic", "batch": BATCH, "epochs": 2, "lambda1": 0.3, "lambda2": 0.2, **keys},
        data={"name": "hdf5", "file": f"{folder}/spaces.h5", "labels": world.CLASSES},
        model={**latent, "initial": f"{folder}/first.h5"},
        participation=world.SOME,
    )


def judged(kind: type[Flic], anchors: Params, keys: dict[str, Any], **more: Any) -> Flic:
    upper, sgd = rest(), keys["optimizer"] == "sgd"
    heads = {name: value for name, value in upper.items() if name.startswith("head")}
    hidden = {name: value for name, value in upper.items() if name.startswith("hidden")}
    loop = {"batch": BATCH, "epochs": 2, "lambda1": 0.3, "lambda2": 0.2, "lr": keys["lr"], **more}
    own = [embedding(i) | heads for i in range(N)]
    by = world.weights(keys["weights"])
    return kind(spaces(), own, hidden | anchors, batches, noise, Sgd if sgd else Adam, weights=by, **loop)


def compare(found: world.Outcome, loop: Flic) -> None:
    for t, active in enumerate(found.who()):
        loop.round(t, active)
    world.near(found.shared, {name: value for name, value in loop.shared.items() if name in found.shared})
    for state, kept in zip(found.personal, loop.own, strict=True):
        world.near(state, kept)


@pytest.mark.parametrize(("name", "chunk"), [("fixed", 1), ("mean", 4), ("bures", 4), ("bures, of all", 1)])
def test_flic(tmp_path: Path, name: str, chunk: int) -> None:
    keys = {"lr": 0.1, "covariances": "fixed", "average": "active", **SETTINGS[name]}
    first, fixed = anchors(), keys["covariances"] == "fixed"
    moves = {} if fixed else {"anchor_steps": 2, "anchor_lr": 0.1}
    stops = {"tolerance": 1e-14, "iterations": 40} if keys["covariances"] == "bures" else {}
    found = play(tmp_path, chunk, rest() | ({MEANS: first[MEANS]} if fixed else first), keys | moves | stops)
    assert (FACTORS in found.shared) != fixed
    own = {
        "covariances": keys["covariances"],
        "holders": keys["average"] == "holders",
        "anchor_lr": keys["lr"],
        **moves,
    }
    compare(found, judged(Flic, spheres(1.0) if fixed else first, keys, **own))


def spheres(deviation: float) -> Params:
    return {MEANS: anchors()[MEANS], FACTORS: deviation * torch.eye(K).double().repeat(world.CLASSES, 1, 1)}


def test_as_released(tmp_path: Path) -> None:
    keys = {"weights": "uniform", "optimizer": "adam", "lr": 0.02}
    same = {"pretrain": 1, "pretrain_batch": 20, "realign": 1, "shared_from": 1}
    theirs = {"local_step": "joint", "distance": "samples", "anchor_loss": "means", "anchor_every": "batch"}
    theirs |= {"realign_who": "all", "shared_epoch": "last"}
    given = rest() | {MEANS: anchors()[MEANS]}
    found = play(
        tmp_path, 1, given, {**keys, **same, **theirs, "deviation": 1.3, "weight_decay": 0.05, "anchor_lr": 0.03}
    )
    compare(found, judged(Released, spheres(1.3), keys, **same, decay=0.05, anchor_lr=0.03))
