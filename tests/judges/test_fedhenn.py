"""FedHeNN against a loop that forms every kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hpcfl
from judges import world
from judges.fedhenn import fedhenn
from judges.steps import Sgd

M = 9
LAST = len(world.SIZES)


def samples(round_: int, client: int) -> Tensor:
    drawn = hpcfl.keyed(world.SEED, "alignment", round_).standard_normal((M, 4), dtype="float32")
    return torch.from_numpy(drawn).double()


@pytest.mark.parametrize(
    ("keys", "optimiser", "weights", "chunk"),
    [
        ({"momentum": 0.9, "weight_decay": 0.05}, lambda: Sgd(0.1, 0.9, 0.05), "samples", 4),
        ({"decay": 0.0}, lambda: Sgd(0.1), "uniform", 1),
    ],
)
def test_fedhenn(tmp_path: Path, keys: dict[str, Any], optimiser: Any, weights: str, chunk: int) -> None:
    own = [world.drawn(world.LAYERS, seed=100 + client) for client in range(LAST)]
    found = world.play(
        tmp_path,
        batch_clients=chunk,
        initial=dict(enumerate(own)),
        algorithm={
            **{"name": "fedhenn", "lr": 0.1, "batch": world.BATCH, "epochs": 2, "eta": 0.3, "alignment": M},
            **{"weights": weights, **keys},
        },
        participation=world.SOME,
    )
    n = world.weights(weights)
    models, kernel, losses = fedhenn(
        *(world.clients(), own, found.who(), samples, world.batches, optimiser, n), eta=0.3
    )
    upper = torch.triu_indices(M, M)
    world.near(found.shared, {"kernel": kernel[upper[0], upper[1]]})
    for state, model in zip(found.personal, models, strict=True):
        world.near(state, model)
    np.testing.assert_allclose(found.rows["loss"], losses, rtol=0, atol=world.TOLERANCE)
