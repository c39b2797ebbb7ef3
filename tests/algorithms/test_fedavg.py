from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.toys import Rounds, cnn_task, load, mlp_task, plain, planned, read, same_bits, visits_of
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.base.errors import UsageError
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.speeds.base import Equal
from hpcfl.schedule.speeds.drawn import UniformDepth

SIZES = [3, 20, 8, 11, 4]
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


class Plain:
    """FedAvg by torch.optim and a loop over clients; only the order of the samples comes from the task."""

    def __init__(self, algorithm, task):
        self.algorithm, self.task = algorithm, task
        self.state = task.initial()
        clients = range(task.federation.clients)
        self.nets = [plain(task) for _ in clients]
        self.optimizers = [self.optimizer(net) for net in self.nets]

    def optimizer(self, net):
        return torch.optim.SGD(net.parameters(), lr=self.algorithm.lr, momentum=self.algorithm.momentum)

    def trained(self, client, round_):
        """The client's new parameters and its mean loss over its own steps."""
        net, algorithm, task = self.nets[client], self.algorithm, self.task
        if not algorithm.persist_optimizer:
            self.optimizers[client] = self.optimizer(net)
        load(net, self.state)
        losses = []
        visit = visits_of(task, [client], round_=round_)
        for batch in task.batches(visit, algorithm.batch, algorithm.epochs, algorithm.steps):
            real = slice(None) if batch.valid is None else batch.valid[0]
            loss = torch.nn.functional.cross_entropy(net(batch.x[0][real]), batch.y[0][real])
            self.optimizers[client].zero_grad()
            loss.backward()
            self.optimizers[client].step()
            losses.append(loss.item())
        return read(net, task), np.mean(losses)

    def step(self, round_, clients):
        """One round with these clients; return the weighted mean loss."""
        found = [self.trained(client, round_) for client in clients]
        sizes = self.task.federation.train_sizes[clients].astype(float)
        if self.algorithm.weights == "uniform":
            sizes = np.ones(len(clients))
        weights = sizes / sizes.sum()
        self.state = {
            name: sum(w * own[name].double() for w, (own, _) in zip(weights, found)).float() for name in self.state
        }
        return sum(w * loss for w, (_, loss) in zip(weights, found))


def assert_close(state, wanted):
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, **CLOSE)


WORK = {
    "epochs": {"epochs": 2},
    "epochs, momentum": {"epochs": 2, "momentum": 0.9},
    "epochs, momentum kept": {"epochs": 1, "momentum": 0.9, "persist_optimizer": True},
    "steps": {"epochs": 0, "steps": 5},
    "steps, momentum": {"epochs": 0, "steps": 3, "momentum": 0.9},
    "full batch": {"epochs": 3, "batch": 0},
    "uniform": {"epochs": 1, "weights": "uniform"},
}


@pytest.mark.parametrize("per_chunk", [1, 2, None], ids=["one by one", "pairs", "one chunk"])
@pytest.mark.parametrize("work", WORK)
def test_it_is_the_plain_loop(work, per_chunk):
    algorithm = FedAvg(**{"lr": 0.1, "batch": 4} | WORK[work])
    task = mlp_task(SIZES)  # 3 is less than a batch, 11 leaves a partial last one
    rounds, loop = Rounds(algorithm, task, per_chunk), Plain(algorithm, task)
    start = rounds.state
    for round_ in range(3):
        rounds.step(planned([1] * 5, 3, round_))
        loop.step(round_, range(5))
        assert_close(rounds.state, loop.state)
    moved = max(float((start[name] - rounds.state[name]).abs().max()) for name in start)
    assert moved > 100 * CLOSE["atol"]


@pytest.mark.parametrize("per_chunk", [1, 2, None], ids=["one by one", "pairs", "one chunk"])
@pytest.mark.parametrize("work", WORK)
def test_the_loss_is_the_mean_over_a_clients_own_steps(work, per_chunk):
    algorithm = FedAvg(**{"lr": 0.1, "batch": 4} | WORK[work])
    task = mlp_task(SIZES)
    sums = Rounds(algorithm, task, per_chunk).step(planned([1] * 5, 3))
    assert float(sums.mean("loss")) == pytest.approx(Plain(algorithm, task).step(0, range(5)), rel=1e-4)


@pytest.mark.parametrize("per_chunk", [1, None], ids=["one by one", "one chunk"])
def test_it_is_the_plain_loop_with_convolutions(per_chunk):
    algorithm = FedAvg(lr=0.1, batch=4, epochs=1, momentum=0.5)
    task = cnn_task(SIZES)
    rounds, loop = Rounds(algorithm, task, per_chunk), Plain(algorithm, task)
    for round_ in range(2):
        rounds.step(planned([1] * 5, 4, round_))
        loop.step(round_, range(5))
        assert_close(rounds.state, loop.state)


def test_the_kinds_of_work_differ():
    ends = []
    for keys in WORK.values():
        rounds = Rounds(FedAvg(**{"lr": 0.1, "batch": 4} | keys), mlp_task(SIZES))
        for round_ in range(2):
            rounds.step(planned([1] * 5, 3, round_))
        ends.append(torch.cat([value.flatten() for value in rounds.state.values()]))
    apart = [(one - other).abs().max() for i, one in enumerate(ends) for other in ends[:i]]
    assert min(apart) > 30 * CLOSE["atol"]


@pytest.mark.parametrize("keys", [{}, {"momentum": 0.9}, {"momentum": 0.9, "persist_optimizer": True}])
def test_chunks_do_not_matter_beyond_rounding(keys):
    algorithm, task = FedAvg(lr=0.1, batch=4, epochs=2, **keys), mlp_task(SIZES, dropout=0.3)
    one, all_ = Rounds(algorithm, task, 1), Rounds(algorithm, task)
    for round_ in range(3):
        for rounds in (one, all_):
            rounds.step(planned([1, 1, 4, 1, 1], 3, round_))
    assert_close(one.state, all_.state)


def test_a_client_alone_keeps_its_model():
    task = mlp_task(SIZES)
    algorithm = FedAvg(lr=0.1, batch=4, epochs=1)
    rounds, loop = Rounds(algorithm, task), Plain(algorithm, task)
    rounds.step(planned([4, 4, 4, 1, 4], 3))
    assert_close(rounds.state, loop.trained(3, 0)[0])


def test_weights_are_the_samples_or_one():
    task = mlp_task(SIZES)
    for weights, wanted in (("samples", sum(SIZES)), ("uniform", len(SIZES))):
        sums = Rounds(FedAvg(weights=weights), task).collect(planned([1] * 5, 3))
        assert [sums.weight(name) for name in sums] == [wanted] * 7


def test_the_momentum_that_is_kept_is_torchs():
    task = mlp_task(SIZES)
    algorithm = FedAvg(lr=0.1, batch=4, epochs=1, momentum=0.9, persist_optimizer=True)
    rounds, loop = Rounds(algorithm, task), Plain(algorithm, task)
    for round_, depth in enumerate([[1, 1, 1, 1, 1], [1, 4, 1, 4, 1], [4, 1, 1, 1, 4]]):
        rounds.step(planned(depth, 3, round_))
        loop.step(round_, np.flatnonzero(np.array(depth) == 1))
        assert_close(rounds.state, loop.state)
    (chunk,) = rounds.job.chunks
    for row, client in enumerate(chunk.clients):
        for name, parameter in zip(task.initial(), loop.nets[client].parameters()):
            wanted = loop.optimizers[client].state[parameter]["momentum_buffer"]
            torch.testing.assert_close(rounds.now.personal[0][name][row], wanted, **CLOSE)


def test_nothing_personal_is_kept_without_need():
    task = mlp_task([3])
    assert FedAvg(momentum=0.9).init_client(task, 0) == {}
    assert FedAvg(persist_optimizer=True).init_client(task, 0) == {}
    assert FedAvg(momentum=0.9, persist_optimizer=True).init_client(task, 0).keys() == task.initial().keys()


# --- drop-stragglers (SALF, eq. 4) --------------------------------------------------------------------------

DROP = Participation(close="deadline", partial="discard")


def test_drop_is_the_mean_over_those_in_time():
    task = mlp_task(SIZES)
    algorithm = FedAvg(lr=0.1, batch=4, epochs=0, steps=1)
    rounds, loop = Rounds(algorithm, task), Plain(algorithm, task)
    speed = UniformDepth(stragglers=0.6)
    numbers = set()
    for round_ in range(8):
        plan = rounds.plan(speed, DROP, 1, round_)
        in_time = np.flatnonzero(plan.depth == 1)
        sums = rounds.step(plan)
        loop.step(round_, in_time)
        assert sums.weight("fc1.weight") == sum(SIZES[client] for client in in_time)
        assert_close(rounds.state, loop.state)
        numbers.add(len(in_time))
    assert len(numbers) > 1  # a straggler that happens to finish is in time


def test_drop_with_nobody_in_time_keeps_the_model_to_the_bit():
    rounds = Rounds(FedAvg(), mlp_task(SIZES))
    before = rounds.state
    plan = rounds.plan(UniformDepth(stragglers=1.0, complete=False), DROP, 1, 0)
    assert not plan.counted.any()
    rounds.step(plan)
    assert same_bits(before, rounds.state)


def test_only_the_invited_train():
    task = mlp_task(SIZES)
    algorithm = FedAvg(lr=0.1, batch=4, epochs=1)
    rounds, loop = Rounds(algorithm, task, 2), Plain(algorithm, task)
    participation = Participation(invite="uniform", size=2)
    for round_ in range(4):
        plan = rounds.plan(Equal(), participation, 6, round_)
        rounds.step(plan)
        loop.step(round_, plan.cohort)
        assert_close(rounds.state, loop.state)


@pytest.mark.parametrize(
    "keys", [{"epochs": 0}, {"steps": 2}, {"epochs": -1}, {"epochs": 0, "steps": -2}, {"batch": -1}]
)
def test_work_of_nothing_or_counted_twice_is_refused(keys):
    with pytest.raises(UsageError, match="algorithm"):
        FedAvg.from_table(keys, "algorithm").check(Participation())


def test_proper_work_is_not_refused():
    FedAvg().check(Participation())
    FedAvg(epochs=0, steps=3, batch=0).check(DROP)
