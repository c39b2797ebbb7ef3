"""SCAFFOLD (Karimireddy et al., ICML 2020): two rounds by hand, and what its control variates are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.toys import Rounds, W, mlp_task, planned, quadratics, same_bits
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.scaffold import Scaffold
from hpcfl.base.errors import UsageError
from hpcfl.config import from_table
from hpcfl.learning.optim import Sgd, Shifted
from hpcfl.schedule.participation import Participation
from hpcfl.testing.test_algorithms import values

TWO: dict[str, Any] = {"lr": 0.1, "batch": 1, "epochs": 0, "steps": 2}
KEYS: dict[str, Any] = {"lr": 0.1, "batch": 4}


def state(rounds: Rounds) -> list[float]:
    """Return w, c, c_1, c_2."""
    shared, (chunk,) = rounds.state, rounds.job.chunks
    own = rounds.now.personal[0][f"control.{W}"].flatten().tolist()
    ordered = [own[list(chunk.clients).index(client)] for client in (0, 1)]
    return [float(shared[W]), float(shared[f"control.{W}"]), *ordered]


def test_two_rounds_by_hand() -> None:
    rounds = Rounds(Scaffold(**TWO), quadratics([0.0, 2.0], start=1.0))
    rounds.step(planned([1, 2], 1, 0))
    assert state(rounds) == pytest.approx([0.81, 0.475, 0.95, 0.0])
    rounds.step(planned([2, 1], 1, 1))
    assert state(rounds) == pytest.approx([0.94585, -0.102125, 0.95, -1.15425])


def test_a_visit_that_is_cut_short_counts_the_steps_that_it_took() -> None:
    """Of 5 the first round's takes 2."""
    rounds = Rounds(Scaffold(**TWO | {"steps": 5}), quadratics([0.0, 2.0], start=1.0))
    rounds.step(replace(planned([1, 2], 1, 0), steps=np.array([2, 0])))
    assert state(rounds) == pytest.approx([0.81, 0.475, 0.95, 0.0])


def test_a_round_of_both_by_hand() -> None:
    rounds = Rounds(Scaffold(**TWO), quadratics([0.0, 2.0], start=1.0))
    rounds.step(planned([1, 1], 1, 0))
    assert state(rounds) == pytest.approx([1.0, 0.0, 0.95, -0.95])


def test_it_stays_where_fedavg_drifts() -> None:
    """Optima 0 and 1 with 1 and 3 steps: SCAFFOLD's fixed point is their mean at any step size."""
    keys = {"lr": 0.1, "batch": 1, "weights": "uniform"}
    found = []
    for method in (Scaffold, FedAvg):
        rounds = Rounds(method(**keys), quadratics([0.0, 1.0], [1, 3]))
        for number in range(60):
            rounds.step(planned([1, 1], 1, number))
        found.append(float(rounds.state[W]))
    assert found == pytest.approx([0.5, 0.271 / 0.371], abs=1e-4)


@pytest.mark.parametrize("per_chunk", [1, 5])
def test_control_variates_are_means_of_gradients_and_the_servers_their_mean(per_chunk: int) -> None:
    """By the sum of all that FedAvg's first visits move by; in round 1 nobody but clients 1 and 3 counts."""
    task = mlp_task([3, 20, 8, 11, 4])
    rounds = Rounds(Scaffold(**KEYS), task, per_chunk)
    plain = [Rounds(FedAvg(**KEYS), task) for _ in range(5)]
    rounds.step(planned([1, 1, 1, 4, 1], 3, 0))
    for client, alone in enumerate(plain):
        alone.step(planned([1 if each == client else 4 for each in range(5)], 3, 0))
    steps = [1, 5, 2, 3, 1]

    def controls() -> dict[str, list[torch.Tensor]]:
        rows = {int(c): (chunk.number, row) for chunk in rounds.job.chunks for row, c in enumerate(chunk.clients)}
        places = [rows[client] for client in range(5)]
        held = rounds.now.personal
        return {name: [held[number][f"control.{name}"][row] for number, row in places] for name in task.initial()}

    for name, own in controls().items():
        start = task.initial()[name]
        for client, alone in enumerate(plain):
            gradient = (start - alone.state[name]) / (steps[client] * 0.1)
            torch.testing.assert_close(own[client], gradient * (client != 3), atol=1e-5, rtol=1e-4)
    first = {name: [each.clone() for each in own] for name, own in controls().items()}
    rounds.step(planned([4, 1, 4, 1, 4], 3, 1))
    for name, own in controls().items():
        torch.testing.assert_close(rounds.state[f"control.{name}"], torch.stack(own).mean(0), atol=1e-6, rtol=1e-5)
        assert [torch.equal(each, before) for each, before in zip(own, first[name])] == [True, False, True, False, True]


def test_the_first_round_and_any_of_one_client_are_fedavg() -> None:
    task = mlp_task([20])
    one, other = (Rounds(method(**KEYS), task) for method in (Scaffold, FedAvg))
    for number in range(3):
        for rounds in (one, other):
            rounds.step(planned([1], 3, number))
        for name, value in other.state.items():
            np.testing.assert_allclose(one.state[name], value, atol=1e-6)
        assert number or same_bits({name: one.state[name] for name in other.state}, other.state)


def test_a_shifted_step_leaves_those_who_rest() -> None:
    params = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    shift = {"w": torch.tensor([[1.0, -1.0], [5.0, 5.0]])}
    Shifted(0.5, shift=shift).apply(params, {"w": torch.ones(2, 2)}, {}, torch.tensor([True, False]))
    assert params["w"].tolist() == [[0.0, 2.0], [3.0, 4.0]]
    assert isinstance(Shifted(0.5, shift=shift), Sgd)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"optimizer": "adam"}, r"algorithm.optimizer: expected 'sgd' with algorithm.name = 'scaffold', got 'adam'"),
        ({"momentum": 0.5}, r"algorithm.momentum: expected 0.0 with .*, got 0.5; did you mean 0.0\?"),
        ({"weight_decay": 0.1}, r"algorithm.weight_decay: expected 0.0 with .*, got 0.1"),
        ({"persist_optimizer": True}, r"algorithm.persist_optimizer: expected false"),
    ],
)
def test_steps_that_are_not_plain_are_refused(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        Scaffold(**keys).check(Participation())


def test_clients_that_never_come_are_refused() -> None:
    with pytest.raises(UsageError, match=r"participation.hold_out: expected 0, since .*, got 3; did you mean 0\?"):
        from_table(
            values("scaffold") | {"participation": {"hold_out": 3}, "speed": {"model": "exponential"}}
        ).check_values()
