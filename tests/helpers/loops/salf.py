"""SALF as its authors released it: layers are tensors, the server divides by all users, momentum stays with a user."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from helpers.loops import Client, Params, dense, leaves, slopes
from hpcfl.base.rng import keyed

LAYERS = ["fc1", "fc2", "fc3"]
# layers 1 … L, of which the last is ready first
TENSORS = [f"{layer}.{part}" for layer in LAYERS for part in ("weight", "bias")]


def salf(
    start: Params, data: list[Client], depths: np.ndarray, seed: int, lr: float, momentum: float, batch: int
) -> tuple[Params, list[Params]]:
    """Return the global model and the users' momentum after as many rounds as there are rows of depths [T, U]."""
    w, users = dict(start), range(len(data))
    velocity = [{name: torch.zeros_like(value) for name, value in start.items()} for _ in users]
    for round_, depth in enumerate(depths):
        arrived = [dict(w) for _ in users]  # what a user has not reached is filled with w
        for user, (x, y) in enumerate(data):
            rows = keyed(seed, "batches", round_, user).permutation(len(y))[:batch]
            params = leaves(w)
            gradient = slopes(F.cross_entropy(dense(params, x[rows], LAYERS), y[rows]), params)
            for name in TENSORS[depth[user] - 1 :]:
                velocity[user][name] = momentum * velocity[user][name] + gradient[name]
                arrived[user][name] = w[name] - lr * velocity[user][name]
        w = {name: torch.stack([each[name] for each in arrived]).mean(0) for name in w}
    return w, velocity
