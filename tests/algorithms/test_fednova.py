"""FedNova (Wang et al., NeurIPS 2020): fixed points and norms by hand; equal numbers of steps are FedAvg."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.toys import Rounds, W, mlp_task, planned, quadratics, same_bits
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.fednova import FedNova
from hpcfl.algorithms.fedprox import FedProx
from hpcfl.base.errors import UsageError
from hpcfl.schedule.participation import Participation

HALVES: dict[str, Any] = {"lr": 0.1, "batch": 1, "weights": "uniform"}  # passes of 1 and 3 steps, p = 1/2 each


def after(method: FedAvg, start: float = 0.0, depth: tuple[int, ...] = (1, 1)) -> float:
    """Return w after one round of two clients with b = (0, 1) and τ = (1, 3)."""
    found = Rounds(method, quadratics([0.0, 1.0], [1, 3], start))
    found.step(planned(depth, 1))
    return float(found.state[W])


def test_one_round_by_hand() -> None:
    assert after(FedAvg(**HALVES)) == pytest.approx(0.1355, abs=1e-12)
    assert after(FedNova(**HALVES)) == pytest.approx(0.0903333, abs=5e-8)


def test_the_steps_are_those_that_a_visit_was_left_with() -> None:
    """Both would take 3; the first one's visit is cut short after 1."""
    rounds = Rounds(FedNova(**HALVES), quadratics([0.0, 1.0], [3, 3]))
    sums = rounds.step(replace(planned([1, 1], 1), steps=np.array([1, 3])))
    assert float(rounds.state[W]) == pytest.approx(0.0903333, abs=5e-8)
    assert float(sums.mean("steps")) == 2.0


@pytest.mark.parametrize(
    ("method", "lr", "fixed"),
    [
        (FedAvg, 0.1, 0.271 / 0.371),
        (FedNova, 0.1, 0.271 / 0.571),  # 0.4746: 0.0903333 over 0.1903333
        (FedAvg, 1e-4, 0.75),  # where it goes as the step falls, whatever the mean of the optima, 0.5
        (FedNova, 1e-4, 0.5),
    ],
)
def test_the_fixed_points_by_hand(method: type[FedAvg], lr: float, fixed: float) -> None:
    """A round that begins there stays, to the order of the step's square, and one that begins beside it does not."""
    rules = method(**HALVES | {"lr": lr})
    assert abs(after(rules, fixed) - fixed) < (1e-12 if lr == 0.1 else 2 * lr**2)
    assert after(rules, fixed - 0.1) - (fixed - 0.1) > lr / 10


def test_the_norms_by_hand() -> None:
    """Three steps: [3 − 0.9·2.71]/0.1 with momentum, (1 − 0.9³)/0.1 with a proximal term."""
    three = torch.tensor([3.0], dtype=torch.float64)
    assert float(FedNova(momentum=0.9)._norm(three, 0.1)) == pytest.approx(5.61)
    assert float(FedNova(mu=1.0)._norm(three, 0.1)) == pytest.approx(2.71)
    assert float(FedNova()._norm(three, 0.1)) == 3.0


def test_momentum_and_a_proximal_term_are_normalised_by_what_they_do() -> None:
    """As η → 0 the gradients of a visit are all g: Δ_i/‖a_i‖ is −η g for both clients, however many steps they take.

    With momentum the server then moves by −η g (1 + 5.61)/2, with a proximal term by −η g (1 + 3)/2.
    """
    for keys, norm in (({"momentum": 0.9}, 5.61), ({"mu": 1e3}, 3.0)):
        lr = 1e-4  # of the term α = ημ = 0.1, which is not small: ‖a‖₁ = 2.71
        rounds = Rounds(FedNova(**HALVES | keys | {"lr": lr}), quadratics([1.0, 1.0], [1, 3]))
        rounds.step(planned([1, 1], 1))
        assert float(rounds.state[W]) == pytest.approx(lr * (1 + norm) / 2, rel=1e-3)


@pytest.mark.parametrize("keys", [{"epochs": 0, "steps": 3}, {"epochs": 0, "steps": 2, "momentum": 0.9}])
def test_equal_numbers_of_steps_are_fedavg(keys: dict[str, Any]) -> None:
    task = mlp_task([3, 20, 8, 11])
    nova, fedavg = (Rounds(method(lr=0.1, batch=4, **keys), task) for method in (FedNova, FedAvg))
    for number, depth in enumerate(([1, 1, 1, 1], [1, 4, 1, 1])):
        for rounds in (nova, fedavg):
            rounds.step(planned(depth, 3, number))
        for name, value in fedavg.state.items():
            np.testing.assert_allclose(nova.state[name], value, atol=1e-6)


def test_one_step_is_fedavg_to_the_bit() -> None:
    task = mlp_task([3, 20, 8])
    nova, fedavg = (Rounds(method(lr=0.1, batch=4, epochs=0, steps=1), task) for method in (FedNova, FedAvg))
    for number in range(2):
        for rounds in (nova, fedavg):
            rounds.step(planned([1, 1, 1], 3, number))
    assert same_bits(nova.state, fedavg.state)


def test_only_those_who_count_make_up_the_mean_and_the_steps() -> None:
    """Alone, with whatever number of steps, a client is FedAvg of one."""
    one = after(FedAvg(**HALVES), depth=(2, 1))
    assert after(FedNova(**HALVES), depth=(2, 1)) == pytest.approx(one, abs=1e-15)
    assert one == pytest.approx(0.271)
    assert after(FedNova(**HALVES), depth=(2, 2)) == 0.0


def test_the_proximal_term_is_fedprox_of_one_client() -> None:
    keys = HALVES | {"mu": 2.0}
    nova, prox = (Rounds(method(**keys), quadratics([1.0], [4])) for method in (FedNova, FedProx))
    for rounds in (nova, prox):
        rounds.step(planned([1], 1))
    norm = (1 - 0.8**4) / 0.2
    assert float(nova.state[W]) == pytest.approx(float(prox.state[W]) * 4 / norm)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"optimizer": "adam"}, r"algorithm.optimizer: expected 'sgd' with algorithm.name = 'fednova', got 'adam'"),
        (
            {"momentum": 0.5, "persist_optimizer": True},
            r"algorithm.persist_optimizer: expected false with .* 'fednova'",
        ),
        ({"mu": 0.1, "momentum": 0.5}, r"algorithm.momentum: expected 0.0 with .*, got 0.5; did you mean 0.0\?"),
        ({"mu": 10.0, "lr": 0.1}, r"algorithm.mu: expected less than 1/algorithm.lr = 10, got 10.0"),
    ],
)
def test_what_breaks_the_norm_is_refused(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        FedNova(**keys).check(Participation())
