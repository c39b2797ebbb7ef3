"""The whole algorithm that the protocol's docstring shows: it runs, and is FedAvg of one step on all data."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.toys import Rounds, full_batch, mlp_task, plain_gradients, planned
from hpcfl.algorithms import base
from hpcfl.algorithms.fedavg import FedAvg

SIZES = [5, 3, 8, 2]


@pytest.fixture
def fedsgd(tmp_path: Path) -> Any:
    """Return the class that the docstring has, imported as a file of its own."""
    (source,) = re.findall(r"```python\n(.*?)```", base.__doc__ or "", re.DOTALL)
    path = tmp_path / "fedsgd.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("fedsgd", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FedSgd


@pytest.mark.parametrize("own_server", [True, False], ids=["its server", "the default"])
def test_is_fedavg_of_one_step(fedsgd: Any, own_server: bool) -> None:
    """In three rounds, of the second of which one client's visit does not count."""
    kind = fedsgd if own_server else type("Same", (fedsgd,), {"server": base.Algorithm.server})
    toy, fedavg = (
        Rounds(algorithm, mlp_task(SIZES), 3)
        for algorithm in (kind(lr=0.2), FedAvg(lr=0.2, epochs=0, steps=1, batch=0))
    )
    for round_, depth in enumerate(([1] * 4, [1, 4, 1, 1], [1] * 4)):
        for rounds in (toy, fedavg):
            rounds.step(planned(depth, 3, round_))
        for name, value in fedavg.state.items():
            np.testing.assert_allclose(toy.state[name], value, atol=1e-6)
            assert not torch.equal(toy.state[name], toy.job.task.initial()[name])


def test_moves_by_the_mean_gradient_as_autograd_has_it(fedsgd: Any) -> None:
    rounds = Rounds(fedsgd(lr=0.5), mlp_task(SIZES))
    task = rounds.job.task
    own = [plain_gradients(task, task.initial(), *full_batch(task, client)) for client in range(4)]
    rounds.step(planned([1] * 4, 3))
    for name, value in task.initial().items():
        mean = sum(size * gradients[name] for size, gradients in zip(SIZES, own)) / sum(SIZES)
        np.testing.assert_allclose(rounds.state[name], value - 0.5 * mean, atol=1e-6)
