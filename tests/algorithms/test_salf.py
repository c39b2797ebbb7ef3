from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats

from helpers.toys import (
    Rounds,
    cnn_task,
    full_batch,
    mlp_task,
    plain,
    plain_gradients,
    planned,
    same_bits,
    visits_of,
)
from hpcfl.algorithms import ServerState
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.salf import Salf
from hpcfl.base.errors import UsageError
from hpcfl.config import from_table
from hpcfl.engine.job import Job
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.speeds.base import Equal
from hpcfl.schedule.speeds.drawn import Exponential, UniformDepth
from hpcfl.sums.message import ExactSums
from hpcfl.testing.runs import table as run_table

L = 3
ROUNDS = 1000
LR = 0.5
ALPHA = 1e-3  # chance of a false alarm per test function; the seeds are fixed, so it is drawn once for all
DEADLINE = Participation(close="deadline")
EVERYONE_LATE = UniformDepth(stragglers=1.0)
HALF_LATE_FOR_GOOD = UniformDepth(stragglers=0.5, redraw=False)
UNEQUAL = Exponential(kind="dynamic-rate")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- many simulated updates from one state ------------------------------------------------------------------


@functools.cache
def simulated(users, algorithm, speed, count=ROUNDS):
    """The problem and the sums of `count` rounds, all from the same state: only the depths vary (batch = 0)."""
    rounds, found = Rounds(algorithm, mlp_task([6] * users, seed=3)), {}
    plans = [rounds.plan(speed, DEADLINE, 11, round_) for round_ in range(count)]
    drawn = [tuple(each.tobytes() for each in (plan.depth, plan.miss_probability, plan.arrival)) for plan in plans]
    for key, plan in zip(drawn, plans):
        if key not in found:
            found[key] = rounds.collect(plan)
    return rounds, [found[key] for key in drawn]


def flat(tensors, names):
    return torch.cat([tensors[name].double().flatten() for name in names]).numpy()


def updates(algorithm, rounds, sums):
    """What the server does in each of the rounds, per layer: L arrays [rounds, parameters]."""
    after = {each: algorithm.step(rounds.job.task, rounds.server, each).shared for each in dict.fromkeys(sums)}
    return [
        np.array([flat(after[each], names) - flat(rounds.state, names) for each in sums]) for names in rounds.layers
    ]


def steps_by_autograd(rounds, lr):
    """−η∇F_u per layer, by ordinary autograd: L arrays [users, parameters]."""
    task = rounds.job.task
    gradients = [
        plain_gradients(task, rounds.state, *full_batch(task, client)) for client in range(task.federation.clients)
    ]
    return [np.array([-lr * flat(own, names) for own in gradients]) for names in rounds.layers]


def biased_layers(found, steps):
    """Layers whose mean update is not the mean step, by z-tests along every user's own step (Bonferroni).

    Updates are combinations of the users' steps, so a bias cannot hide from all of these directions.
    """
    cut = stats.norm.isf(ALPHA / 2 / sum(len(layer) for layer in steps))
    biased = []
    for number, (layer, own) in enumerate(zip(found, steps), start=1):
        along = layer @ own.T
        wanted = own.mean(0) @ own.T
        rounding = 1e-5 * np.abs(own @ own.T).max()  # float32 states; matters where an update never varies
        error = along.std(0, ddof=1) / np.sqrt(len(along)) + rounding
        if (np.abs(along.mean(0) - wanted) > cut * error).any():
            biased.append(number)
    return biased


def salf(**keys):
    return Salf(**{"lr": LR, "batch": 0} | keys)


@pytest.mark.parametrize("users", [2, 4])
def test_the_mean_update_is_fedavgs_and_without_p_it_is_not(users):
    rounds, sums = simulated(users, salf(), EVERYONE_LATE)
    steps = steps_by_autograd(rounds, LR)
    assert all(np.linalg.matrix_rank(own) == users for own in steps)  # the toy's users do differ
    assert biased_layers(updates(salf(missing="exact"), rounds, sums), steps) == []
    assert biased_layers(updates(salf(missing="paper"), rounds, sums), steps) == []
    assert 1 in biased_layers(updates(salf(missing="none"), rounds, sums), steps)
    assert 1 in biased_layers(updates(salf(rule="released"), rounds, sums), steps)


@pytest.mark.parametrize(("users", "first"), [(2, 0.5625), (4, 0.31640625)])
def test_the_chance_that_nobody_reaches_a_layer(users, first):
    rounds = Rounds(salf(), mlp_task([2] * users))
    plan = rounds.plan(EVERYONE_LATE, DEADLINE, 0, 0)
    assert plan.miss_probability[0] == pytest.approx(first, abs=1e-15)
    np.testing.assert_allclose(plan.miss_probability, [(1 - layer / 4) ** users for layer in (1, 2, 3)], rtol=1e-14)


@pytest.mark.parametrize("speed", [HALF_LATE_FOR_GOOD, UNEQUAL], ids=["fixed stragglers", "unequal rates"])
def test_inverse_probability_is_unbiased_for_unequal_users_where_the_paper_is_not(speed):
    fair = salf(rule="inverse-probability")
    rounds, sums = simulated(4, fair, speed, 800)
    steps = steps_by_autograd(rounds, LR)
    assert biased_layers(updates(fair, rounds, sums), steps) == []
    rounds, sums = simulated(4, salf(), speed, 800)
    assert biased_layers(updates(salf(missing="exact"), rounds, sums), steps) == [1, 2, 3]


def squares_within(found, mean, variance):
    """Whether E‖update − mean‖² is `variance`, within 4 standard errors of its sample mean."""
    squares = ((found - mean) ** 2).sum(1)
    error = squares.std(ddof=1) / np.sqrt(len(squares))
    assert error < 0.075 * variance  # the simulation is long enough to say something
    return abs(squares.mean() - variance) < 4 * error


@pytest.mark.parametrize("users", [2, 4])
def test_the_variance_of_each_layer_is_the_exact_one(users):
    rounds, sums = simulated(users, salf(), EVERYONE_LATE)
    gradients = steps_by_autograd(rounds, -1.0)
    for number, (found, own) in enumerate(zip(updates(salf(), rounds, sums), gradients), start=1):
        mean = own.mean(0)
        p = (1 - number / (L + 1)) ** users
        spread = ((own - mean) ** 2).sum() / (users - 1)
        sizes = np.arange(1, users + 1)
        fewer = (stats.binom.pmf(sizes, users, number / (L + 1)) * (1 / sizes - 1 / users)).sum()
        variance = LR**2 * (p / (1 - p) * (mean**2).sum() + spread / (1 - p) ** 2 * fewer)
        assert squares_within(found, -LR * mean, variance), number
        assert not squares_within(found, -LR * mean, 1.3 * variance), number
        q = (1 - 1 / (L + 1)) ** users
        most = (own**2).sum(1).max()
        assert variance < LR**2 * 4 * users * L * most / (users - 1) * (1 + q) / (1 - q)  # the paper's (14)


def test_the_variance_of_inverse_probability_with_independent_users():
    fair = salf(rule="inverse-probability")
    rounds, sums = simulated(4, fair, UNEQUAL)
    reach = rounds.plan(UNEQUAL, DEADLINE, 11, 0).arrival
    steps = steps_by_autograd(rounds, LR)
    for number, (found, own) in enumerate(zip(updates(fair, rounds, sums), steps)):
        chance = reach[:, number]
        variance = ((own**2).sum(1) * (1 - chance) / chance).sum() / 4**2
        assert squares_within(found, own.mean(0), variance), number + 1


# --- who reaches which layer --------------------------------------------------------------------------------


def binomial_fit(sizes, users, chance):
    """p-value of the chi-square test of sizes against Bin(users, chance), rare sizes put together."""
    seen = np.bincount(np.asarray(sizes, dtype=int), minlength=users + 1)
    wanted = stats.binom.pmf(np.arange(users + 1), users, chance) * len(sizes)
    while wanted[0] < 5:
        wanted, seen = np.append(wanted[0] + wanted[1], wanted[2:]), np.append(seen[0] + seen[1], seen[2:])
    return stats.chisquare(seen, wanted).pvalue


@pytest.mark.parametrize("users", [2, 4])
def test_how_many_reach_a_layer_is_binomial(users):
    rounds, sums = simulated(users, salf(), EVERYONE_LATE)
    for number, names in enumerate(rounds.layers, start=1):
        sizes = [each.weight(names[0]) for each in sums]
        assert sizes == [each.weight(names[1]) for each in sums]  # a module's weight and bias go together
        assert binomial_fit(sizes, users, number / (L + 1)) > ALPHA / L
        assert binomial_fit(sizes, users, number / (L + 2)) < 1e-6


@pytest.mark.parametrize("blocks", ["layer", "tensor"])
def test_every_user_sends_exactly_the_layers_from_its_depth_up_last_first(blocks):
    algorithm = salf(blocks=blocks)
    task = mlp_task([4] * 5)
    rounds = Rounds(algorithm, task)
    layers = algorithm.layers(task)
    order = [name for names in reversed(layers) for name in reversed(names)]
    for round_ in range(30):
        plan = rounds.plan(EVERYONE_LATE, DEADLINE, 5, round_)
        reached = {name: set() for name in order}
        for client in np.flatnonzero(plan.counted):
            depth = plan.depth[client]
            messages = list(algorithm.client(task, rounds.state, {}, visits_of(task, [client], [depth], round_)))
            sent = [name for message in messages for name, (_, weight) in message.items() if len(weight)]
            due = [name for names in reversed(layers[depth - 1 :]) for name in reversed(names)]
            assert sent == ["loss", *due]
            for name in due:
                reached[name].add(client)
        sets = [reached[names[0]] for names in layers]
        assert all(fewer <= more for fewer, more in pairwise(sets))
        assert [len(each) for each in sets] == [(plan.depth <= number + 1).sum() for number in range(len(layers))]


def test_depths_of_a_chunk_reach_the_right_clients():
    task = mlp_task([4, 5, 3, 6])
    rounds = Rounds(salf(missing="none"), task)
    sums = rounds.collect(planned([3, 1, 4, 2], L))
    for number, names in enumerate(rounds.layers, start=1):
        reached = [client for client, depth in enumerate([3, 1, 4, 2]) if depth <= number]
        for name in names:
            own = [plain_gradients(task, rounds.state, *full_batch(task, client))[name] for client in reached]
            torch.testing.assert_close(sums.mean(name).float(), -LR * sum(own) / len(own), atol=1e-6, rtol=1e-5)


# --- nobody late: FedAvg ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [mlp_task, cnn_task])
@pytest.mark.parametrize(("sizes", "batch"), [([8] * 5, 3), ([3, 9, 5, 12], 0), ([3, 9, 5, 12], 4)])
@pytest.mark.parametrize("per_chunk", [1, 2, None])
def test_with_nobody_late_it_is_one_step_fedavg_to_the_bit(make, sizes, batch, per_chunk):
    task = make(sizes)
    layerwise = Rounds(Salf(lr=0.3, batch=batch), task, per_chunk)
    whole = Rounds(FedAvg(lr=0.3, batch=batch, epochs=0, steps=1, weights="uniform"), task, per_chunk)
    start = layerwise.state
    for round_ in range(4):
        plan = layerwise.plan(UniformDepth(stragglers=0.0), DEADLINE, 1, round_)
        one, other = layerwise.step(plan), whole.step(whole.plan(Equal(), Participation(), 1, round_))
        assert torch.equal(one.mean("loss"), other.mean("loss"))
        assert same_bits(layerwise.state, whole.state)
    assert not any(torch.equal(start[name], layerwise.state[name]) for name in start)


# --- the server's step --------------------------------------------------------------------------------------

RULES = [
    {"rule": "paper", "missing": "exact"},
    {"rule": "paper", "missing": "paper"},
    {"rule": "paper", "missing": "none"},
    {"rule": "paper", "missing": "empirical"},
    {"rule": "released"},
    {"rule": "inverse-probability"},
]


@pytest.mark.parametrize("keys", RULES, ids=lambda keys: "-".join(keys.values()))
@pytest.mark.parametrize("depth", [[2, 3], [3, 3], [4, 4]])
def test_a_layer_that_nobody_reached_stays_to_the_bit(keys, depth):
    rounds = Rounds(salf(**keys), mlp_task([5, 5]))
    before = rounds.state
    rounds.step(planned(depth, L, miss=[1.0, 0.25, 0.1]))
    for number, names in enumerate(rounds.layers, start=1):
        for name in names:
            assert torch.equal(before[name], rounds.state[name]) == (number < min(depth))


def answered(algorithm, task, shared, reached, invited=4, missing=None, extras=None):
    """The server's answer where `reached[l-1]` users sent ones as the change of every tensor of layer l."""
    sums = ExactSums(algorithm.layout(task), invited, np.zeros(len(reached)) if missing is None else missing)
    for names, count in zip(algorithm.layers(task), reached):
        weight = torch.ones(count, dtype=torch.float64)
        sums.add({name: (torch.ones(count, *shared[name].shape), weight) for name in names})
    after = algorithm.step(task, ServerState(shared, extras or {}), sums)
    return after.shared if extras is None else after


def moves(algorithm, task, before, after):
    """By how much each layer moved; all its entries must have moved alike."""
    found = []
    for names in algorithm.layers(task):
        values = torch.cat([(after[name] - before[name]).flatten() for name in names])
        assert (values == values[0]).all()
        found.append(float(values[0]))
    return found


def zero_state(algorithm, task):
    return {name: torch.zeros_like(value) for name, value in algorithm.init_server(task).items()}


def test_paper_uses_formula_10_with_the_number_invited():
    task = mlp_task([2] * 4)
    for invited in (2, 4, 7):
        before = zero_state(salf(), task)
        after = answered(salf(missing="paper"), task, before, [1, 2, 2], invited)
        wanted = [1 / (1 - (1 - number / 4) ** invited) for number in (1, 2, 3)]
        np.testing.assert_allclose(moves(salf(), task, before, after), wanted, rtol=1e-7)


def test_exact_uses_the_speed_models_chances_and_none_uses_none():
    task, chances = mlp_task([2] * 4), np.array([0.75, 0.5, 0.2])
    before = zero_state(salf(), task)
    after = answered(salf(missing="exact"), task, before, [1, 2, 3], missing=chances)
    np.testing.assert_allclose(moves(salf(), task, before, after), [4.0, 2.0, 1.25], rtol=1e-7)
    after = answered(salf(missing="none"), task, before, [1, 2, 3], missing=chances)
    assert moves(salf(), task, before, after) == [1, 1, 1]


def test_formula_10_oversteps_by_the_spec_s_factor_where_somebody_is_always_in_time():
    speed = UniformDepth(stragglers=5 / 6)
    algorithm = salf(missing="paper")
    task = mlp_task([2] * 6)
    plan = Rounds(algorithm, task).plan(speed, DEADLINE, 0, 0)
    assert (plan.miss_probability == 0).all()
    before = zero_state(algorithm, task)
    factor = moves(algorithm, task, before, answered(algorithm, task, before, [1, 1, 1], invited=6))[0]
    assert factor == pytest.approx(1 / (1 - 0.75**6), rel=1e-6)  # 1.22 for L = 3


def test_empirical_counts_past_rounds_only_and_is_smoothed():
    algorithm, task = salf(missing="empirical"), mlp_task([2] * 4)
    before, extras = zero_state(algorithm, task), algorithm.init_extras(task)
    history = [[0, 0, 1], [0, 2, 4], [1, 1, 1], [0, 1, 3]]
    # (empty + 1)/(rounds + 2) by hand, before each of the rounds
    by_hand = [
        [1 / 2, 1 / 2, 1 / 2],
        [2 / 3, 2 / 3, 1 / 3],
        [3 / 4, 2 / 4, 1 / 4],
        [3 / 5, 2 / 5, 1 / 5],
    ]
    for reached, chances in zip(history, by_hand):
        state = answered(algorithm, task, before, reached, missing=np.full(L, 0.9), extras=extras)
        extras = state.extras
        wanted = [1 / (1 - p) if count else 0 for p, count in zip(chances, reached)]
        np.testing.assert_allclose(moves(algorithm, task, before, state.shared), wanted, rtol=1e-6)
    assert extras["empty"].tolist() == [3, 1, 0]
    assert extras["rounds"] == 4


def test_empirical_counts_stay_at_the_server():
    task = mlp_task([2])
    job = Rounds(salf(missing="empirical"), task).job
    assert job.begin(0).extras.keys() == {"empty", "rounds"}
    assert job.begin(1).extras == {}
    assert job.begin(0).shared.keys() == job.begin(1).shared.keys() == task.initial().keys()
    assert salf().init_extras(task) == {}


def heavier(base, factor):
    """The algorithm with all weights of its messages multiplied."""

    class Heavier(base):
        def client(self, task, shared, personal, visits):
            inner = super().client(task, shared, personal, visits)
            while True:
                try:
                    message = next(inner)
                except StopIteration as end:
                    return end.value
                yield {name: (value, weight * factor) for name, (value, weight) in message.items()}

    return Heavier


@pytest.mark.parametrize("factor", [2, 3, 1000])
@pytest.mark.parametrize("base", [Salf, FedAvg])
def test_scaling_all_weights_changes_nothing(base, factor):
    task = mlp_task([3, 9, 5, 12])
    one, many = Rounds(base(lr=0.3, batch=4), task), Rounds(heavier(base, factor)(lr=0.3, batch=4), task)
    depths = [[1, 1, 1, 1], [2, 1, 3, 4], [4, 3, 3, 2]] if base is Salf else [[1, 1, 1, 1], [1, 4, 4, 1], [1, 1, 4, 1]]
    for round_, depth in enumerate(depths):
        plan = planned(depth, L, round_, miss=[0.3, 0.2, 0.1])
        before, after = one.step(plan), many.step(plan)
        assert after.weight("loss") == factor * before.weight("loss")
        assert same_bits(one.state, many.state)


# --- what the authors' code does ----------------------------------------------------------------------------


def local_step(task, state, client, round_, batch, lr):
    """One SGD step of one client by torch.optim, on the batch that the task gives it: ``{name: w_u}``."""
    (taken,) = task.batches(visits_of(task, [client], round_=round_), batch, steps=1)
    net = plain(task, state)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    torch.nn.functional.cross_entropy(net(taken.x[0]), taken.y[0]).backward()
    optimizer.step()
    return dict(zip(state, [p.detach() for p in net.parameters()]))


def filled_mean(task, state, layers, depth, round_, batch, lr):
    """The mean over all users, layers that did not arrive filled with the global ones."""
    own = [local_step(task, state, client, round_, batch, lr) for client in range(len(depth))]
    after = {}
    for number, names in enumerate(layers, start=1):
        for name in names:
            held = [w[name] if d <= number else state[name] for w, d in zip(own, depth)]
            after[name] = torch.stack(held).double().mean(0).float()
    return after


@pytest.mark.parametrize("blocks", ["layer", "tensor"])
def test_released_fills_missing_layers_and_averages_over_all_users(blocks):
    task = mlp_task([9] * 5)
    rounds = Rounds(Salf(lr=0.4, batch=4, rule="released", blocks=blocks), task)
    most = len(rounds.layers)
    generator = np.random.default_rng(0)
    for round_ in range(4):
        depth = generator.integers(1, most + 2, 5)
        wanted = filled_mean(task, rounds.state, rounds.layers, depth, round_, 4, 0.4)
        rounds.step(planned(depth, most, round_, miss=np.full(most, 0.4)))
        for name, value in wanted.items():
            torch.testing.assert_close(rounds.state[name], value, atol=1e-6, rtol=0)


def test_released_with_discard_is_the_released_drop():
    task = mlp_task([9] * 6)
    rounds = Rounds(Salf(lr=0.4, batch=4, rule="released"), task)
    speed = UniformDepth(stragglers=0.5, nothing=False, complete=False, redraw=False)
    drop = Participation(close="deadline", partial="discard")
    for round_ in range(3):
        plan = rounds.plan(speed, drop, 2, round_)
        assert sorted(plan.depth) == [1, 1, 1, 4, 4, 4]
        own = [local_step(task, rounds.state, client, round_, 4, 0.4) for client in range(6)]
        before = rounds.state
        rounds.step(plan)
        for name in before:
            held = [w[name] if d == 1 else before[name] for w, d in zip(own, plan.depth)]
            torch.testing.assert_close(rounds.state[name], torch.stack(held).mean(0), atol=1e-6, rtol=0)


def test_blocks_of_single_tensors_count_from_the_last_bias():
    task = mlp_task([5])
    algorithm = salf(blocks="tensor", missing="none")
    order = ["fc3.bias", "fc3.weight", "fc2.bias", "fc2.weight", "fc1.bias", "fc1.weight"]
    assert [name for group in algorithm.layout(task)[1:] for name in group] == order
    for sent in range(7):
        rounds = Rounds(algorithm, task)
        before = rounds.state
        rounds.step(planned([7 - sent], 6))
        wanted = plain_gradients(task, before, *full_batch(task, 0))
        for name in order[:sent]:
            torch.testing.assert_close(rounds.state[name], before[name] - LR * wanted[name], atol=1e-6, rtol=0)
        for name in order[sent:]:
            assert torch.equal(rounds.state[name], before[name])


@pytest.mark.parametrize("depths", [[[1], [2], [4], [1]], [[1, 2, 4], [3, 1, 1], [4, 2, 1], [1, 1, 2]]])
@pytest.mark.parametrize("per_chunk", [1, None])
def test_momentum_is_torchs_and_advances_only_where_a_layer_was_reached(depths, per_chunk):
    users = len(depths[0])
    task = mlp_task([9] * users)
    algorithm = Salf(lr=0.4, batch=4, momentum=0.5, persist_optimizer=True, missing="none")
    rounds = Rounds(algorithm, task, per_chunk)
    nets = [plain(task) for _ in range(users)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.4, momentum=0.5) for net in nets]
    names = list(task.initial())
    level = {name: number for number, layer in enumerate(task.layer_names(), start=1) for name in layer}
    state = task.initial()
    for round_, depth in enumerate(depths):
        arrived = {name: [] for name in names}
        for client, (net, optimizer) in enumerate(zip(nets, optimizers)):
            with torch.no_grad():
                for parameter, name in zip(net.parameters(), names):
                    parameter.copy_(state[name])
            (taken,) = task.batches(visits_of(task, [client], round_=round_), 4, steps=1)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(taken.x[0]), taken.y[0]).backward()
            for parameter, name in zip(net.parameters(), names):
                if depth[client] > level[name]:
                    parameter.grad = None  # torch.optim leaves it and its momentum alone
                else:
                    arrived[name].append((parameter, name))
            optimizer.step()
        state = {
            name: torch.stack([p.detach() for p, _ in arrived[name]]).mean(0) if arrived[name] else state[name]
            for name in names
        }
        rounds.step(planned(depth, L, round_))
        for name in names:
            torch.testing.assert_close(rounds.state[name], state[name], atol=2e-6, rtol=1e-5)
        for chunk in rounds.job.chunks:
            for row, client in enumerate(chunk.clients):
                for parameter, name in zip(nets[client].parameters(), names):
                    buffer = optimizers[client].state[parameter].get("momentum_buffer")
                    wanted = torch.zeros_like(parameter) if buffer is None else buffer
                    kept = rounds.now.personal[chunk.number][name][row]
                    torch.testing.assert_close(kept, wanted.detach(), atol=2e-6, rtol=1e-5)


def test_momentum_that_does_not_persist_changes_nothing():
    task = mlp_task([9] * 3)
    one, other = Rounds(Salf(), task), Rounds(Salf(momentum=0.9), task)
    for round_ in range(3):
        one.step(planned([1, 2, 3], L, round_))
        other.step(planned([1, 2, 3], L, round_))
    assert same_bits(one.state, other.state)


# --- refusals -----------------------------------------------------------------------------------------------


def test_inverse_probability_is_refused_where_the_chances_are_not_known():
    with pytest.raises(UsageError, match="inverse-probability"):
        Salf(rule="inverse-probability").check(Participation(close="first", first=2))
    Salf(rule="inverse-probability").check(DEADLINE)
    Salf(rule="paper").check(Participation(close="first", first=2))


def test_a_batch_below_zero_is_refused():
    with pytest.raises(UsageError, match="batch"):
        Salf.from_table({"batch": -1}, "algorithm")


def test_layers_that_nobody_reaches_do_not_travel() -> None:
    job = Job.of(from_table(run_table("salf", "mlp", batched=True)), None, 1)
    plan = job.planner.plan(job.planner.attempt(0))
    layers = job.layers.tensors
    for first in range(1, len(layers) + 2):
        depth = np.full_like(plan.depth, len(layers) + 1)
        depth[-1] = first
        expected = {"loss", *(name for names in layers[first - 1 :] for name in names)}
        assert job.sent(replace(plan, depth=depth)) == (expected if first <= len(layers) else set())
