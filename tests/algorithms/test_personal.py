"""Methods with shared and personal layers, against plain torch loops over clients and against each other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.toys import Rounds, mlp_task, plain, planned, read, same_bits, visits_of
from hpcfl import store
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.fedrep import FedRep
from hpcfl.algorithms.lg_fedavg import LgFedAvg
from hpcfl.algorithms.local import Local
from hpcfl.base.errors import UsageError
from hpcfl.learning.optim import FINE_TUNING
from hpcfl.schedule.participation import Participation
from hpcfl.testing.runs import play, same, table

SIZES = [3, 20, 8, 11, 4]
CLOSE = {"atol": 1e-5, "rtol": 1e-4}
KEYS: dict[str, Any] = {"lr": 0.1, "batch": 4, "momentum": 0.5, "weight_decay": 0.01}
HEAD = {"fc3.weight", "fc3.bias"}
FIRST = {"fc1.weight", "fc1.bias"}


def phases(algorithm):
    """What a visit does, as (personal layers learn, shared layers learn, epochs, phase), by the papers."""
    if isinstance(algorithm, FedRep):
        blocks = range(algorithm.blocks)
        turns = [
            [(True, False, algorithm.head_epochs, 2 * b + 1), (False, True, algorithm.epochs, 2 * b)] for b in blocks
        ]
        return [phase for block in turns for phase in block]
    return [(True, True, algorithm.epochs, 0)]


class Plain:
    """One ordinary network per client and torch.optim; only the order of the samples comes from the task."""

    def __init__(self, algorithm, task, own):
        self.algorithm, self.task, self.own = algorithm, task, own
        self.shared = {name: value for name, value in task.initial().items() if name not in own}
        heads = {name: value for name, value in task.initial().items() if name in own}
        self.personal = [dict(heads) for _ in range(task.federation.clients)]

    def trained(self, client, state, turns, round_):
        """The client's parameters after these phases of training from `state`."""
        net = plain(self.task, {name: state[name] for name in self.task.initial()})
        named = dict(zip(self.task.initial(), net.parameters(), strict=True))
        decayed = [value for value in named.values() if value.dim() > 1]
        others = [value for value in named.values() if value.dim() == 1]
        groups = [{"params": decayed, "weight_decay": self.algorithm.weight_decay}, {"params": others}]
        optimizer = torch.optim.SGD(groups, lr=self.algorithm.lr, momentum=self.algorithm.momentum)
        visit = visits_of(self.task, [client], round_=round_)
        for personal, shared, epochs, phase in turns:
            learn = [
                value
                for name, value in named.items()
                if (name in self.own and personal) or (name not in self.own and shared)
            ]
            for batch in self.task.batches(visit, self.algorithm.batch, epochs, phase=phase):
                real = slice(None) if batch.valid is None else batch.valid[0]
                loss = torch.nn.functional.cross_entropy(net(batch.x[0][real]), batch.y[0][real])
                optimizer.zero_grad(set_to_none=True)
                for value, gradient in zip(learn, torch.autograd.grad(loss, learn)):
                    value.grad = gradient
                optimizer.step()
        return read(net, self.task)

    def step(self, round_, clients):
        found = {c: self.trained(c, self.shared | self.personal[c], phases(self.algorithm), round_) for c in clients}
        sizes = self.task.federation.train_sizes[list(clients)].astype(float)
        weights = sizes / sizes.sum()
        self.shared = {
            name: sum(w * own[name].double() for w, own in zip(weights, found.values())).float() for name in self.shared
        }
        for client, own in found.items():
            self.personal[client] = {name: own[name] for name in self.own}


def assert_close(state, wanted):
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, **CLOSE)


METHODS = {
    "fedrep": (FedRep(**KEYS, head_epochs=3), HEAD),
    "fedrep in blocks": (FedRep(**KEYS, head_epochs=2, epochs=2, blocks=2), HEAD),
    "fedrep, two layers": (FedRep(**KEYS, head_epochs=2, head_layers=2), HEAD | {"fc2.weight", "fc2.bias"}),
    "lg_fedavg": (LgFedAvg(**KEYS, epochs=2), FIRST),
    "local": (Local(**KEYS), FIRST | HEAD | {"fc2.weight", "fc2.bias"}),
}


@pytest.mark.parametrize("per_chunk", [1, 2, None], ids=["one by one", "pairs", "one chunk"])
@pytest.mark.parametrize("method", METHODS)
def test_it_is_the_plain_loop(method, per_chunk):
    algorithm, own = METHODS[method]
    task = mlp_task(SIZES)
    rounds, loop = Rounds(algorithm, task, per_chunk), Plain(algorithm, task, own)
    absent = len(rounds.layers) + 1
    for round_, depth in enumerate([[1, 1, 1, 1, 1], [1, absent, 1, 1, absent], [absent, 1, 1, absent, 1]]):
        rounds.step(planned(depth, len(rounds.layers), round_))
        loop.step(round_, [client for client in range(5) if depth[client] == 1])
        assert_close(rounds.state, loop.shared)
        for chunk in rounds.job.chunks:
            for row, client in enumerate(chunk.clients):
                found = {name: value[row] for name, value in rounds.now.personal[chunk.number].items()}
                assert_close(found, loop.personal[client])


def test_who_does_not_take_part_keeps_its_head_to_the_bit():
    algorithm, _ = METHODS["fedrep"]
    rounds = Rounds(algorithm, mlp_task(SIZES), 1)
    rounds.step(planned([1] * 5, 2))
    before = copy.deepcopy(rounds.now.personal)
    rounds.step(planned([3, 1, 3, 3, 3], 2, 1))
    kept = [same_bits(before[number], rounds.now.personal[number]) for number in range(5)]
    assert kept == [True, False, True, True, True]


def test_only_what_is_shared_is_sent():
    task = mlp_task(SIZES)
    sent = {
        name: {block for group in algorithm.layout(task) for block in group} for name, (algorithm, _) in METHODS.items()
    }
    every = set(task.initial()) | {"loss"}
    for name, (_, own) in METHODS.items():
        assert sent[name] == every - own, name
    asked = FedRep(evaluation="fine-tune").layout(task)
    assert {block for group in asked for block in group} == every


# ---- protocols of evaluation


def model_of(rounds, clients):
    chunk = rounds.job.chunks[0]
    return rounds.job.algorithm.model(
        rounds.job.task,
        rounds.state,
        rounds.now.personal[chunk.number],
        visits_of(rounds.job.task, clients, round_=rounds.now.round),
    )


@pytest.mark.parametrize("method", [FedRep, LgFedAvg])
@pytest.mark.parametrize("evaluation", ["stored", "fine-tune", "new-client"])
def test_what_clients_are_tested_with(method, evaluation):
    algorithm = method(**KEYS, evaluation=evaluation, tune_epochs=3)
    task = mlp_task(SIZES)
    own = algorithm.personal_names(task)
    rounds, loop = Rounds(algorithm, task), Plain(algorithm, task, own)
    initial = loop.personal[0]
    for round_ in range(2):
        rounds.step(planned([1] * 5, len(rounds.layers), round_))
        loop.step(round_, range(5))
    weights = np.array(SIZES) / sum(SIZES)
    mean = {name: sum(w * head[name].double() for w, head in zip(weights, loop.personal)).float() for name in own}
    found = model_of(rounds, range(5))
    for client in range(5):
        start = {"stored": loop.personal[client], "fine-tune": mean, "new-client": initial}[evaluation]
        turns = [] if evaluation == "stored" else [(True, False, 3, FINE_TUNING)]
        wanted = loop.trained(client, loop.shared | start, turns, 2)
        assert_close({name: found[name][client] for name in wanted}, wanted)


def test_own_models_learn_before_the_test_even_of_who_never_took_part():
    task = mlp_task(SIZES)
    algorithm = Local(**KEYS, evaluation="tuned", tune_epochs=3)
    rounds, loop = Rounds(algorithm, task), Plain(algorithm, task, algorithm.personal_names(task))
    rounds.step(planned([1, 1, 2, 1, 1], 1))
    loop.step(0, [0, 1, 3, 4])
    stored = copy.deepcopy(rounds.now.personal[0])
    found = model_of(rounds, range(5))
    for client in range(5):
        wanted = loop.trained(client, loop.personal[client], [(True, False, 3, FINE_TUNING)], 1)
        assert_close({name: found[name][client] for name in wanted}, wanted)
    assert same_bits(rounds.now.personal[0], stored)


@pytest.mark.parametrize("evaluation", ["shared", "fine-tune"])
def test_the_global_accuracy_is_one_of_the_model_that_clients_predict_with(
    solo: Any, tmp_path: Path, evaluation: str
) -> None:
    """Of a model that nobody predicts with as it is, nothing is recorded that plots or tables might take for it."""
    algorithm = {"name": "fedavg", "evaluation": evaluation, "tune_epochs": 1}
    run = play(solo, table("fedavg", "mlp", True, algorithm=algorithm), tmp_path / "run", None)
    data = store.open_run(run)
    assert data["accuracy"].notnull().any() == (evaluation == "shared")
    assert data["client_accuracy"].notnull().any()


def test_fedavg_is_tested_after_fine_tuning_its_last_layer():
    task = mlp_task(SIZES)
    algorithm = FedAvg(lr=0.1, batch=4, evaluation="fine-tune", tune_epochs=2)
    rounds = Rounds(algorithm, task)
    rounds.step(planned([1] * 5, 3))
    loop = Plain(LgFedAvg(lr=0.1, batch=4), task, HEAD)
    found = model_of(rounds, range(5))
    for client in range(5):
        wanted = loop.trained(client, rounds.state, [(True, False, 2, FINE_TUNING)], 1)
        assert_close({name: found[name][client] for name in wanted}, wanted)


# ---- equalities between methods


SAME = {
    "fedrep with all shared": {"name": "fedrep", "head_layers": 0},
    "lg_fedavg with nothing local": {"name": "lg_fedavg", "shared_layers": 2},
}


@pytest.mark.parametrize("which", SAME)
def test_it_is_fedavg_to_the_bit(solo: Any, tmp_path: Path, which: str) -> None:
    keys = {"lr": 0.1, "batch": 32, "epochs": 2, "momentum": 0.5}
    one = play(solo, table("fedavg", "mlp", True, algorithm={**SAME[which], **keys}), tmp_path / "one", None)
    other = play(solo, table("fedavg", "mlp", True, algorithm={"name": "fedavg", **keys}), tmp_path / "other", None)
    same(one, other)


@pytest.mark.parametrize("name", ["fedrep", "lg_fedavg", "fedavg", "hf_maml"])
def test_from_the_stage_of_everybody_on_it_is_the_algorithm_itself(solo: Any, tmp_path: Path, name: str) -> None:
    """SRPFL with one stage is its subroutine, and FLANP at its last stage is FedAvg."""
    keys = {"name": name, "batch": 32} | ({"shared_layers": 1} if name == "lg_fedavg" else {})
    staged = {"participation": {"close": "first", "first": 7}, "doubling": {"when": "rounds"}}
    runs = [
        play(solo, table("fedavg", "mlp", True, algorithm=keys, **rules), tmp_path / str(number), None)
        for number, rules in enumerate([staged, {"participation": {"close": "all"}}])
    ]
    same(*runs)


def test_two_phases_of_a_visit_do_not_share_their_order():
    task = mlp_task([20])
    first, second = (next(task.batches(visits_of(task, [0]), 20, 1, phase=phase)).x for phase in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first.sort(1).values, second.sort(1).values)


# ---- bad input


@pytest.mark.parametrize(
    ("algorithm", "line"),
    [
        (FedRep(head_layers=3), r"algorithm\.head_layers: expected 0 … 2 for this model, got 3; did you mean 2"),
        (LgFedAvg(shared_layers=4), r"algorithm\.shared_layers: expected 1 … 3 for this model, got 4; did you mean 3"),
    ],
)
def test_layers_that_are_not_there(algorithm, line):
    with pytest.raises(UsageError, match=line):
        algorithm.layout(mlp_task([3]))


def test_passes_before_a_test_that_nobody_makes():
    with pytest.raises(UsageError, match=r"algorithm\.tune_epochs = 3 has no meaning .* set algorithm\.evaluation = "):
        Local(tune_epochs=3).check(Participation())


def test_no_more_layers_than_there_are_learn_before_a_test():
    with pytest.raises(UsageError, match=r"algorithm\.tune_layers: expected 1 … 3 .* got 4; did you mean 3"):
        FedAvg(tune_layers=4).personal_names(mlp_task([3]))
