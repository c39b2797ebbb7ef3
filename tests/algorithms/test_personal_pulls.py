"""FedDyn, Ditto and pFedMe by hand, on ``½(w − b)²`` of one number; their loops are in test_from_outside.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.toys import Rounds, W, mlp_task, planned, quadratics, same_bits
from hpcfl.algorithms.ditto import Ditto
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.feddyn import FedDyn
from hpcfl.algorithms.fedprox import FedProx
from hpcfl.algorithms.focus import Focus
from hpcfl.algorithms.pfedme import PFedMe
from hpcfl.base.errors import UsageError
from hpcfl.config import from_table
from hpcfl.testing.runs import ended, play, table
from hpcfl.testing.test_algorithms import values

W3 = "fc3.weight"
EXACT: dict[str, Any] = {"alpha": 1.0, "lr": 0.5, "epochs": 0, "steps": 1, "batch": 0}
"""FedDyn whose one step leads to the minimum of a client's bent loss."""


def path(method: Any, centres: list[float], start: float, rounds: list[list[int]]) -> list[list[float]]:
    """Return w and what each client keeps of it after each round, to which so many come as it says."""
    play, found = Rounds(method, quadratics(centres, start=start)), []
    for number, there in enumerate(rounds):
        play.step(planned([1 if client in there else 2 for client in range(len(centres))], 1, number))
        own = play.now.personal[0].get(W)
        found.append([float(play.state[W]), *([] if own is None else own.flatten().tolist())])
    return found


def test_feddyn_by_hand() -> None:
    both = path(FedDyn(**EXACT), [0.0, 2.0], 3.0, [[0, 1], [0, 1]])
    np.testing.assert_allclose(both, [[1.0, -1.5, -0.5], [1.0, -1.25, 0.25]], atol=1e-12)
    one = path(FedDyn(**EXACT), [0.0, 2.0], 3.0, [[0], [1]])
    np.testing.assert_allclose(one, [[0.75, -1.5, 0.0], [0.9375, -1.5, 0.625]], atol=1e-12)
    assert path(FedDyn(**EXACT), [0.0, 2.0], 3.0, [[0], []])[1] == one[0]


def test_feddyns_fixed_point_is_the_optimum_of_all() -> None:
    """Where gradients of clients add up to 0, of which each keeps its own over −α."""
    w, *own = path(FedDyn(**EXACT), [0.0, 1.0, 5.0], 3.0, [[0, 2], [1, 2], [0, 1]] * 40)[-1]
    assert w == pytest.approx(2.0, abs=1e-6)
    assert own == pytest.approx([-2.0, -1.0, 3.0], abs=1e-5)


def test_feddyns_strength_by_samples() -> None:
    """One step of α_i = α · mean n / n_i from h = 0 is plain; the second round's is along ``g + α_i (y − w + h_i)``."""
    keys = {**EXACT, "lr": 0.1, "alpha": 0.3, "alpha_by": "samples"}
    task = quadratics([1.0, 4.0], [1, 3], start=2.0)
    play = Rounds(FedDyn(**keys), task, 1)
    w, h, mean = 2.0, np.zeros(2), 0.0
    for number in range(3):
        play.step(planned([1, 1], 1, number))
        moves = np.array([-0.1 * ((w - b) + 0.3 * 2 / n * own) for b, n, own in zip([1.0, 4.0], [1, 3], h)])
        h, mean = h + moves, mean + moves.sum() / 2
        w += moves.mean() + mean
        assert float(play.state[W]) == pytest.approx(w, abs=1e-12)


def test_feddyn_that_keeps_nothing_is_fedprox() -> None:
    """In a first round, but for the server's h."""
    task, keys = mlp_task([5, 9, 12], precision="double"), {"lr": 0.1, "batch": 4, "weights": "uniform"}
    one, other = Rounds(FedDyn(alpha=0.2, **keys), task), Rounds(FedProx(mu=0.2, **keys), task)
    begun = {name: value.clone() for name, value in one.state.items()}
    for rounds in (one, other):
        rounds.step(planned([1, 1, 1], 3, 0))
    for name, value in other.state.items():
        moved = 2 * (value - begun[name])  # the mean of the changes, and h, which is the same mean
        torch.testing.assert_close(one.state[name] - begun[name], moved, rtol=1e-10, atol=1e-13)


def test_ditto_by_hand() -> None:
    play = Rounds(Ditto(lr=0.1, pull=1.0, epochs=0, steps=2, batch=0), quadratics([4.0], start=2.0))
    play.now.personal[0][W].zero_()
    found = []
    for steps in (1, 2):
        play = Rounds(Ditto(lr=0.1, pull=1.0, epochs=0, steps=steps, batch=0), quadratics([4.0], start=2.0))
        play.now.personal[0][W].zero_()
        play.step(planned([1], 1))
        found.append([float(play.now.personal[0][W]), float(play.state[W])])
    np.testing.assert_allclose(found, [[0.6, 2.2], [1.08, 2.38]], atol=1e-12)


@pytest.mark.parametrize("pull", [0.0, 0.7])
def test_dittos_shared_model_is_fedavgs_to_the_bit(pull: float) -> None:
    task, keys = mlp_task([5, 9, 12, 3]), {"lr": 0.1, "batch": 4, "epochs": 2, "momentum": 0.5}
    one, other = Rounds(Ditto(pull=pull, **keys), task), Rounds(FedAvg(**keys), task)
    alone = Rounds(FedAvg(**keys), task)
    for number in range(3):
        for rounds in (one, other):
            rounds.step(planned([1, 1, 4, 1], 3, number))
        alone.step(planned([1, 4, 4, 4], 3, number))
    assert same_bits(one.state, other.state)
    for name, value in alone.state.items():  # of client 0: with pull 0 its own model is that of local training
        near = torch.allclose(one.now.personal[0][name][0], value, rtol=1e-4, atol=1e-5)
        assert near == (pull == 0)


def test_dittos_shared_statistics_are_fedavgs_to_the_bit(tmp_path: Path, solo: Any) -> None:
    """Running means of a batch normalisation are of the shared model's steps alone."""
    ends = []
    for name in ("ditto", "fedavg"):
        keys: dict[str, Any] = {"algorithm": {"name": name, "batch": 8}, "model": {"name": "helpers.modules:Normed"}}
        more = {"participation": {"close": "all"}, "speed": {"model": "none"}, "rounds": 2}
        ends.append(ended(play(solo, table("fedavg", "mlp", True) | keys | more, tmp_path / name, None)))
    assert ends[0].keys() == ends[1].keys()
    assert any("running" in key for key in ends[0])
    for key, value in ends[1].items():
        np.testing.assert_array_equal(ends[0][key], value, err_msg=key)


@pytest.mark.parametrize("name", ["feddyn", "focus"])
def test_what_the_server_keeps_is_formed_anew(name: str) -> None:
    """As where a checkpoint holds older states of some clients; as long as it does not, it stays."""
    method = FedDyn(alpha=0.2, lr=0.1) if name == "feddyn" else Focus(lr=0.02, steps=2, batch=4)
    task = mlp_task([5, 9, 12], precision="double")
    play = Rounds(method, task)
    for number, depth in enumerate(([1, 4, 1], [1, 1, 4])):
        play.step(planned(depth, 3, number))
    (chunk,), (own,) = play.job.chunks, play.now.personal.values()

    def everybody() -> Any:
        return ((int(c), {key: value[row] for key, value in own.items()}) for row, c in enumerate(chunk.clients))

    found = method.recalled(task, play.now.extras, everybody)
    assert found.keys() == play.now.extras.keys()
    for key, value in play.now.extras.items():
        assert float(value.abs().max()) > 0
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)
    own[W3][0] += 1.0
    share = 1.0 if name == "focus" else 1 / 3
    torch.testing.assert_close(method.recalled(task, play.now.extras, everybody)[W3], found[W3] + share)


def test_pfedme_by_hand() -> None:
    keys = {"pull": 1.0, "eta": 0.5, "batch": 0}
    for beta, w in ((1.0, 1.75), (2.0, 3.5)):  # a step of ½ leads to the proximal point
        (found,) = path(PFedMe(lr=0.5, inner=1, epochs=2, beta=beta, **keys), [4.0], 0.0, [[0]])
        assert found == pytest.approx([w, 2.5], abs=1e-12)
    (found,) = path(PFedMe(lr=0.5, inner=1, epochs=1, **keys), [4.0], 0.0, [[0]])
    assert found == pytest.approx([1.0, 2.0], abs=1e-12)
    for epochs, wanted in ((1, [0.36, 0.72]), (2, [0.8028, 1.2456])):
        (found,) = path(PFedMe(lr=0.1, inner=2, epochs=epochs, **keys), [4.0], 0.0, [[0]])
        assert found == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("pull", [1.0, 1e4])
def test_pfedme_with_eta_over_1_by_lambda_takes_proximal_steps(pull: float) -> None:
    """w_i is the proximal point then; with a large λ its steps are those of local SGD of size 1/λ."""
    keys = {"lr": 1 / (1 + pull), "eta": 1 / pull, "pull": pull, "batch": 0, "inner": 1}
    (found,) = path(PFedMe(epochs=3, **keys), [4.0], 0.0, [[0]])
    w = 0.0
    for _ in range(3):
        w = (4.0 + pull * w) / (1 + pull)
    assert found == pytest.approx([w, w], abs=1e-12)
    (plain,) = path(FedAvg(lr=1 / pull, epochs=3, batch=0), [4.0], 0.0, [[0]])
    assert (plain[0] == pytest.approx(w, rel=1e-3)) == (pull > 1)


@pytest.mark.parametrize(
    ("method", "section", "line"),
    [
        ("feddyn", {"participation": {"hold_out": 1}}, "participation.hold_out: expected 0, since h is the mean"),
        ("feddyn", {"algorithm": {"name": "feddyn", "persist_optimizer": True}}, "algorithm.persist_optimizer"),
        ("ditto", {"algorithm": {"name": "ditto", "tune_epochs": 3}}, "algorithm.tune_epochs"),
        ("feddyn", {"server": {"optimizer": "adam"}}, "server.optimizer: expected 'none'"),
        ("feddyn", {"weighting": {"correct": "remembered"}}, "weighting.correct: algorithm.name = 'feddyn'"),
        ("feddyn", {"participation": {"close": "arrivals", "buffer": 2}}, "what the server keeps must be"),
        ("ditto", {"participation": {"close": "deadline", "deadline": 1.0, "partial": "layers"}}, "one by one"),
    ],
)
def test_what_does_not_go_with_them_is_refused(method: str, section: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        from_table(values(method) | {"speed": {"model": "exponential"}} | section).check_values()
