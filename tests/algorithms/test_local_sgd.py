"""The base of local training: what its keys do for all methods alike."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.toys import Rounds, mlp_task, planned, same_bits
from hpcfl.algorithms import algorithms
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.fedrep import FedRep
from hpcfl.algorithms.lg_fedavg import LgFedAvg
from hpcfl.algorithms.local import Local
from hpcfl.algorithms.local_sgd import LocalTraining
from hpcfl.base.errors import UsageError
from hpcfl.schedule.participation import Participation

SIZES = [3, 20, 8]
PLAIN: dict[str, Any] = {"lr": 0.1, "batch": 4}
KEYS: dict[str, dict[str, Any]] = {
    "steps": {"epochs": 0, "steps": 3},
    "decay": {"decay": 2.0},
    "adam": {"optimizer": "adam", "lr": 0.01},
    "weight decay": {"weight_decay": 0.1},
}


def after_two_rounds(algorithm: LocalTraining) -> Rounds:
    rounds = Rounds(algorithm, mlp_task(SIZES))
    for round_ in range(2):
        rounds.step(planned([1] * 3, len(rounds.layers), round_))
    return rounds


@pytest.mark.parametrize("which", KEYS)
def test_a_key_does_the_same_for_all_methods(which: str) -> None:
    """Where all layers are shared, they are FedAvg, to the bit."""
    keys = PLAIN | KEYS[which]
    wanted = after_two_rounds(FedAvg(**keys)).state
    assert same_bits(after_two_rounds(LgFedAvg(**keys, shared_layers=3)).state, wanted)
    assert same_bits(after_two_rounds(FedRep(**keys, head_layers=0)).state, wanted)
    assert not same_bits(after_two_rounds(FedAvg(**PLAIN)).state, wanted)


@pytest.mark.parametrize("which", KEYS)
def test_a_client_alone_is_fedavg_of_one(which: str) -> None:
    keys, only = PLAIN | KEYS[which], [1, 4, 4]
    shared, own = (Rounds(method(**keys), mlp_task(SIZES)) for method in (FedAvg, Local))
    shared.step(planned(only, 3))
    own.step(planned([1, 2, 2], 1))
    found = {name: value[list(own.job.chunks[0].clients).index(0)] for name, value in own.now.personal[0].items()}
    for name, value in shared.state.items():
        assert found[name] == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize("method", [FedRep, LgFedAvg, Local])
def test_local_work_of_nothing_is_refused(method: type[FedAvg]) -> None:
    with pytest.raises(UsageError, match=r"expected one of epochs and steps above 0 .* got epochs = 0, steps = 0"):
        method(epochs=0).check(Participation())


def test_the_base_is_no_method() -> None:
    assert "hpcfl.algorithms.local_sgd" not in algorithms().values()
    assert {"fedavg", "fedprox", "local"} <= algorithms().keys()
