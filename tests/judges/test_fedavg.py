"""FedAvg is what its paper says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from judges import world
from judges.fedavg import fedavg


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("uniform", [False, True])
def test_fedavg(tmp_path: Path, chunk: int, uniform: bool) -> None:
    keys: dict[str, Any] = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01, "epochs": 2, "batch": world.BATCH}
    keys |= {"name": "fedavg", "weights": "uniform" if uniform else "samples", "decay": 0.5}
    found = world.play(tmp_path, algorithm=keys, participation=world.SOME, batch_clients=chunk)
    how = {"lr": 0.2, "momentum": 0.9, "decay": 0.01, "slower": 0.5, "uniform": uniform}
    w, losses = fedavg(world.start(), world.clients(), found.who(), world.batches, **how)
    world.near(found.shared, w)
    np.testing.assert_allclose(found.rows["loss"], losses, rtol=0, atol=world.TOLERANCE)
