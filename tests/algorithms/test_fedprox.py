"""FedProx (Li et al., MLSys 2020): FedAvg without the proximal term, and the term by hand."""

from __future__ import annotations

import pytest
import torch

from helpers.toys import Rounds, full_batch, mlp_task, plain_gradients, planned, same_bits
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.fedprox import FedProx
from hpcfl.base.errors import UsageError

SIZES = [3, 20, 8, 11, 4]


@pytest.mark.parametrize(("mu", "equal"), [(0.0, True), (0.5, False)])
def test_it_is_fedavg_to_the_bit_without_the_term(mu: float, equal: bool) -> None:
    keys = {"lr": 0.1, "batch": 4, "epochs": 2, "momentum": 0.9, "persist_optimizer": True}
    one, other = (Rounds(method, mlp_task(SIZES)) for method in (FedProx(mu=mu, **keys), FedAvg(**keys)))
    losses = []
    for round_ in range(3):
        sums = [rounds.step(planned([1, 1, 4, 1, 1], 3, round_)) for rounds in (one, other)]
        losses.append(sums[0].mean("loss").item() == sums[1].mean("loss").item())
    assert same_bits(one.state, other.state) == equal
    assert losses == [equal] * 3


def test_after_the_first_step_the_gradient_has_mu_times_the_way_from_the_start() -> None:
    """One client, two steps on all that it has: at the start the term is flat."""
    task, lr, mu = mlp_task([20]), 0.3, 2.0
    rounds = Rounds(FedProx(lr=lr, mu=mu, batch=0, epochs=0, steps=2), task)
    x, y = full_batch(task, 0)
    start = w = rounds.state
    losses = []
    for _ in range(2):
        apart = {name: value - start[name] for name, value in w.items()}
        term = mu / 2 * sum(float(value.square().sum()) for value in apart.values())
        losses.append(task.forward({n: v[None] for n, v in w.items()}, x[None])[0])
        losses[-1] = float(torch.nn.functional.cross_entropy(losses[-1], y)) + term
        gradients = plain_gradients(task, w, x, y)
        w = {name: value - lr * (gradients[name] + mu * apart[name]) for name, value in w.items()}
    sums = rounds.step(planned([1], 3))
    assert float(sums.mean("loss")) == pytest.approx(sum(losses) / 2, rel=1e-5)
    for name, value in w.items():
        torch.testing.assert_close(rounds.state[name], value, atol=1e-6, rtol=1e-5)


def test_a_negative_mu_is_refused() -> None:
    with pytest.raises(UsageError, match=r"algorithm\.mu"):
        FedProx.from_table({"mu": -0.1}, "algorithm")
