"""FedLRGD against its Algorithm 1, an inverse for each coordinate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcfl import config as configs
from hpcfl.algorithms.fedlrgd import low_rank
from judges import world
from judges.fedlrgd import descend, matrices, weights

R, STEPS, RIDGE, LR = 3, 4, 0.05, 0.4
SIZES = 1, 3, 60, 7
HELD = 5
"""Samples of the server: the first R are the surrogates, the others count like a client's."""
CLASSES = {"logistic": 2, "softmax": 3}


def gradient_of(link: str, ridge: float) -> Any:
    def g(x: Tensor, y: Tensor, theta: Tensor) -> Tensor:
        """``∂/∂θ`` of the cross-entropy and ``ridge/2 |θ|²``; θ is W, row by row, then b."""
        rows = 1 if link == "logistic" else CLASSES[link]
        W, b = theta[:-rows].view(rows, -1), theta[-rows:]
        z = W @ x + b
        chances = torch.sigmoid(z) if link == "logistic" else torch.softmax(z, 0)
        target = y.double().view(1) if link == "logistic" else torch.eye(rows, dtype=z.dtype)[y]
        rest = chances - target
        return torch.cat([(rest[:, None] * x).flatten(), rest]) + ridge * theta

    return g


@pytest.mark.parametrize(
    ("link", "penalty", "pipelined", "chunk", "regular"),
    [
        ("logistic", "reweighted", False, 1, {}),
        ("logistic", "exact", True, 4, {"damping": 0.1}),
        ("softmax", "reweighted", False, 4, {"truncation": 0.1}),
    ],
)
@pytest.mark.parametrize("solve_at", ["server", "client"])
def test_fedlrgd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    link: str, penalty: str, pipelined: bool, chunk: int, regular: dict[str, float], solve_at: str,
) -> None:  # fmt: skip
    if chunk == 1:  # a coordinate, two samples at a time
        monkeypatch.setattr(low_rank.Bound, "of", lambda *sizes: low_rank.Bound(2, 2))
        monkeypatch.setattr(low_rank, "PARTS", 2)
    rng = np.random.default_rng({"logistic": 11, "softmax": 21}[link])  # well-conditioned ones
    count, rows = sum(SIZES) + HELD, 1 if link == "logistic" else CLASSES[link]
    y = rng.integers(CLASSES[link], size=count)
    y[-HELD:] = np.arange(HELD) % CLASSES[link]
    x = (rng.random((count, 2)) + 0.5 * np.eye(3)[y][:, :2]).astype(np.float32)
    places = np.split(np.arange(count), np.cumsum([*SIZES]))
    theta = rng.normal(0, 0.3, rows * 3)
    points = rng.normal(0, 2.0, (R, rows * 3))
    split = {f"clients/{i}/train": torch.from_numpy(part) for i, part in enumerate(places[:-1])}
    world.write(tmp_path / "split.h5", {**split, "server/train": torch.from_numpy(places[-1])})
    data = {"train/features": torch.from_numpy(x), "train/labels": torch.from_numpy(y)}
    world.write(tmp_path / "pool.h5", data)
    first = {"linear.weight": theta[:-rows].reshape(rows, 2), "linear.bias": theta[-rows:], "points": points}
    world.write(tmp_path / "initial.h5", {name: torch.from_numpy(value) for name, value in first.items()})
    keys = {"name": "fedlrgd", "rank": R, "lr": LR, "steps": STEPS, "penalty": penalty, "pipelined": pipelined}
    source = {"name": "hdf5", "file": f"{tmp_path}/pool.h5", "partition": "file"}
    found = world.played(
        configs.from_table(
            {
                **{"rounds": 4, "clients": len(SIZES), "precision": "double", "batch_clients": chunk},
                "algorithm": {
                    **keys,
                    "solve_at": solve_at,
                    "growth": 1e6,
                    "reach": 1e6,
                    "batch": 0 if chunk == 1 else 8,
                    **regular,
                },
                "data": {**source, "partition_file": f"{tmp_path}/split.h5", "labels": CLASSES[link]},
                "model": {"name": "glm", "link": link, "ridge": RIDGE, "initial": f"{tmp_path}/initial.h5"},
            }
        )
    )
    g = gradient_of(link, RIDGE if penalty == "reweighted" else 0.0)
    held = [(torch.from_numpy(x[part]).double(), torch.from_numpy(y[part])) for part in places]
    own, rest = [part[:R] for part in held[-1]], [part[R:] for part in held[-1]]
    clients, at = [*held[:-1], (rest[0], rest[1])], torch.from_numpy(points)
    G = matrices((own[0], own[1]), at, g)
    condition = torch.linalg.cond(G)
    assert condition.max() < 100
    world.equal(found.rows["condition"][-1], condition.median(), tolerance=1e-10)
    world.equal(found.rows["worst_condition"][-1], condition.max(), tolerance=1e-10)
    cut = torch.linalg.matrix_rank(G, rtol=regular.get("truncation", 0.0)) < R
    assert found.rows["truncated"][-1] == cut.sum()
    assert cut.any() == ("truncation" in regular)
    v = weights(G, clients, at, g, **regular)
    np.testing.assert_allclose(found.extras["weights"].T * count, 1 + v, rtol=0, atol=1e-11)
    steps = STEPS * (3 if solve_at == "server" else 2)
    exact = RIDGE if penalty == "exact" else 0.0
    theta_after = descend(torch.from_numpy(theta), (own[0], own[1]), v, count, steps, LR, g, exact)[-1]
    got = torch.cat([found.shared["linear.weight"].flatten(), found.shared["linear.bias"]])
    np.testing.assert_allclose(got, theta_after, rtol=0, atol=world.TOLERANCE)
    assert found.rows["taken"][-1] == steps
