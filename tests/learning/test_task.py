from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn

from helpers.toys import cnn_task, full_batch, mlp_task, plain, plain_gradients, same_bits, visits_of
from hpcfl.base.rng import StepKey
from hpcfl.learning.derivatives import per_sample_gradients
from hpcfl.learning.evaluate import client_scores, server_scores
from hpcfl.learning.fused import formed
from hpcfl.learning.task import Task
from hpcfl.models.cnn import Cnn
from hpcfl.models.mlp import Mlp
from hpcfl.models.modules.dropout import keyed, seeds_of
from hpcfl.models.modules.layers import Layer

SIZES = [3, 9, 5, 12]
MAKERS = {"mlp": mlp_task, "cnn": cnn_task}
CLOSE = {"atol": 1e-6, "rtol": 1e-5}


def own_params(task, clients, seed=0):
    """Parameters that differ from client to client, ``{name: [c, …]}``."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.stack([value + 0.1 * torch.randn(value.shape, generator=generator) for _ in range(clients)])
        for name, value in task.initial().items()
    }


def row(params, client):
    return {name: value[client] for name, value in params.items()}


def one_batch(task, clients, size=0, round_=0):
    return next(task.batches(visits_of(task, clients, round_=round_), size, steps=1))


# --- gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("count", [1, 4])
def test_gradients_are_autograds_of_the_plain_model(make, count):
    task = make(SIZES)
    params = own_params(task, count)
    gradients, losses = task.gradients(params, one_batch(task, range(count)))
    for client in range(count):
        x, y = full_batch(task, client)
        wanted = plain_gradients(task, row(params, client), x, y)
        for name, value in wanted.items():
            assert value.abs().max() > 0
            torch.testing.assert_close(gradients[name][client], value, **CLOSE)
        loss = nn.functional.cross_entropy(plain(task, row(params, client))(x), y)
        torch.testing.assert_close(losses[client], loss.detach(), **CLOSE)


def test_large_images_are_convolved_client_by_client(monkeypatch):
    task = cnn_task(SIZES)
    params, x = own_params(task, 4), one_batch(task, range(4)).x
    monkeypatch.setattr("hpcfl.models.modules.layers.vmap", None)
    whole = task.layers[0](params, x, None)
    assert whole.stride(2) == 1  # channels, for pooling
    for client in range(4):
        own = {name: value[client : client + 1] for name, value in params.items()}
        assert torch.equal(task.layers[0](own, x[client : client + 1], None)[0], whole[client])


def test_gradients_of_single_samples_add_up_to_that_of_a_batch():
    task = cnn_task([5])
    params, batch = own_params(task, 1), one_batch(task, [0])
    whole, _ = task.gradients(params, batch)
    for name, each in per_sample_gradients(task, row(params, 0), batch).items():
        assert each.shape == (5, *whole[name].shape[1:])
        torch.testing.assert_close(each.mean(0), whole[name][0], **CLOSE)


def test_clients_of_large_convolutions_gain_nothing_from_being_together():
    held = cnn_task(SIZES)
    large = Task(Cnn(channels=(64, 64), kernel=5, padding="same"), held.federation, 0)
    assert large.heavy
    assert not held.heavy


def all_rows(layers, count):
    """Every non-decreasing way to end the backward pass of `count` clients."""
    ways = [[last] for last in range(count + 1)]
    for _ in range(layers - 1):
        ways = [[first, *way] for way in ways for first in range(way[0] + 1)]
    return ways


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_backprop_gives_each_client_the_layers_it_has_time_for(make):
    task = make(SIZES)
    params, batch = own_params(task, 4), one_batch(task, range(4))
    layers = task.layer_names()
    wanted = [plain_gradients(task, row(params, client), *full_batch(task, client)) for client in range(4)]
    _, losses = task.gradients(params, batch)
    ways = all_rows(len(layers), 4)
    for rows in ways[:: 1 + len(ways) // 35]:
        found = list(task.backprop(params, batch, rows))
        assert [stage for stage, _, _ in found] == [s for s in reversed(range(len(layers))) if rows[s]]
        for stage, gradients, seen in found:
            assert tuple(gradients) == layers[stage]
            for name, value in formed(gradients).items():
                assert value.shape == (rows[stage], *task.initial()[name].shape)
                for client in range(rows[stage]):
                    torch.testing.assert_close(value[client], wanted[client][name], **CLOSE)
            torch.testing.assert_close(seen, losses[: rows[-1]], **CLOSE)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_whole_backprop_is_the_gradient_to_the_bit(make):
    task = make(SIZES)
    for count in (1, 4):
        params, batch = own_params(task, count), one_batch(task, range(count))
        whole, _ = task.gradients(params, batch)
        parts = {}
        for _, gradients, _ in task.backprop(params, batch, [count] * len(task.layer_names())):
            parts |= formed(gradients)
        assert same_bits({name: parts[name] for name in whole}, whole)


def test_no_graph_is_built_below_the_depth(monkeypatch):
    task = cnn_task(SIZES)
    params, batch = own_params(task, 1), one_batch(task, [1])
    tracked = []
    run = Layer.__call__

    def watched(self, *args):
        out = run(self, *args)
        tracked.append(out.requires_grad)
        return out

    monkeypatch.setattr(Layer, "__call__", watched)
    layers = len(task.layers)
    assert not list(task.backprop(params, batch, [0] * layers))
    for depth in range(1, layers + 1):
        tracked.clear()
        list(task.backprop(params, batch, [int(number >= depth) for number in range(1, layers + 1)]))
        assert tracked == [number >= depth for number in range(1, layers + 1)]


@pytest.mark.parametrize("computing", ["fused", "vmapped"])
def test_a_layer_is_computed_only_when_asked_for(computing, monkeypatch):
    task = mlp_task(SIZES, computing=computing)
    calls = []
    # by hand, what goes on to the next layer is one product, the last layer needs none
    place, name, free = (torch, "bmm", 1) if computing == "fused" else (torch.autograd, "grad", 0)
    original = getattr(place, name)

    def counted(*args, **keys):
        calls.append(1)
        return original(*args, **keys)

    monkeypatch.setattr(place, name, counted)
    backward = task.backprop(own_params(task, 4), one_batch(task, range(4)), [1, 2, 4])
    for number in (1, 2, 3):
        next(backward)
        assert len(calls) == number - free
    assert list(backward) == []
    calls.clear()
    list(task.backprop(own_params(task, 4), one_batch(task, range(4)), [0, 0, 4]))
    assert len(calls) == 1 - free


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_padded_clients_have_the_gradients_they_have_alone(make, dropout):
    task = make(SIZES, dropout=dropout)
    params = own_params(task, 4)
    for size in (0, 4):
        visits = visits_of(task, range(4))
        for step, batch in enumerate(task.batches(visits, size, epochs=1).padded()):
            together, losses = task.gradients(params, batch)
            for client in range(4):
                alone = list(task.batches(visits_of(task, [client]), size, epochs=1))
                mine = {name: value[client : client + 1] for name, value in params.items()}
                if step >= len(alone):
                    assert not batch.sizes[client]
                    assert all(not together[name][client].any() for name in together)
                    continue
                assert batch.sizes[client]
                gradients, loss = task.gradients(mine, alone[step])
                torch.testing.assert_close(losses[client], loss[0], **CLOSE)
                for name, value in gradients.items():
                    torch.testing.assert_close(together[name][client], value[0], **CLOSE)


# --- the model ----------------------------------------------------------------------------------------------


def test_initial_values_follow_the_seed_and_leave_torchs_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, again, other = mlp_task([3], seed=1), mlp_task([3], seed=1), mlp_task([3], seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert same_bits(one.initial(), again.initial())
    assert not torch.equal(one.initial()["fc1.weight"], other.initial()["fc1.weight"])


def test_initial_returns_copies():
    task = mlp_task([3])
    task.initial()["fc1.weight"].zero_()
    assert task.initial()["fc1.weight"].abs().max() > 0


def test_layers_are_modules_or_tensors_first_layer_first():
    task = mlp_task([3])
    assert task.layer_names() == (("fc1.weight", "fc1.bias"), ("fc2.weight", "fc2.bias"), ("fc3.weight", "fc3.bias"))
    assert task.layer_names("tensor") == tuple((name,) for names in task.layer_names() for name in names)
    weights = [weight for weight, _ in cnn_task([3]).layer_names()]
    assert weights == ["conv1.weight", "conv2.weight", "fc1.weight", "fc2.weight"]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_forward_is_the_plain_model_and_drops_nothing(make):
    task = make(SIZES, dropout=0.5)
    params = own_params(task, 3)
    x = torch.stack([full_batch(task, 1)[0]] * 3)
    logits = task.forward(params, x)
    assert logits.shape == (3, 9, 3)
    for client in range(3):
        torch.testing.assert_close(logits[client], plain(task, row(params, client)).eval()(x[client]), **CLOSE)


# --- batches ------------------------------------------------------------------------------------------------


def numbered(sizes, seed=0):
    """A task whose samples carry their own number as the label, so that batches show what they took."""
    task = mlp_task(sizes, seed=seed)
    for own in task.federation.held:
        own.train_labels[:] = np.arange(len(own.train_labels))
    return task


def taken(batches, place):
    """The sample numbers of one row of the chunk, step by step."""
    return [(b.y[place] if b.valid is None else b.y[place][b.valid[place]]).tolist() for b in batches]


@pytest.mark.parametrize("size", [1, 4, 5, 100, 0])
def test_an_epoch_takes_every_sample_once(size):
    task = numbered(SIZES)
    batches = list(task.batches(visits_of(task, range(4)), size, epochs=3).padded())
    for client, count in enumerate(SIZES):
        steps = [step for step in taken(batches, client) if step]
        per_epoch = -(-count // size) if size else 1
        assert len(steps) == 3 * per_epoch
        epochs = [list(chain(*steps[start : start + per_epoch])) for start in range(0, len(steps), per_epoch)]
        for epoch in epochs:
            assert sorted(epoch) == list(range(count))
        if count > 4:
            assert len({tuple(epoch) for epoch in epochs}) == 3
        for step in steps[: per_epoch - 1]:
            assert len(step) == size


@pytest.mark.parametrize("size", [1, 4, 100, 0])
def test_steps_run_through_whole_passes_without_a_partial_batch(size):
    task = numbered(SIZES)
    batches = list(task.batches(visits_of(task, range(4)), size, steps=7))
    assert len(batches) == 7
    for client, count in enumerate(SIZES):
        steps = taken(batches, client)
        assert [len(step) for step in steps] == [min(size, count) if size else count] * 7
        flat = list(chain(*steps))
        for start in range(0, len(flat), count):
            part = flat[start : start + count]
            assert len(set(part)) == len(part)


def test_batches_hold_the_samples_that_their_numbers_say():
    task = numbered(SIZES)
    for batch in task.batches(visits_of(task, [2, 0]), 4, epochs=1).padded():
        for place, client in enumerate([2, 0]):
            real = batch.valid[place]
            features = torch.from_numpy(task.federation.client(client).train_features)
            assert torch.equal(batch.x[place][real], features[batch.y[place][real]])


@pytest.mark.parametrize("work", [{"epochs": 2}, {"steps": 5}])
def test_the_order_depends_on_seed_round_and_client_only(work):
    def orders(task, clients, round_=0):
        batches = list(task.batches(visits_of(task, clients, round_=round_), 4, **work).padded())
        return {client: [s for s in taken(batches, place) if s] for place, client in enumerate(clients)}

    task = numbered([12] * 4)
    together = orders(task, [0, 1, 2, 3])
    assert orders(task, [3, 1]) == {client: together[client] for client in (3, 1)}
    for client in range(4):
        assert orders(task, [client])[client] == together[client]
        assert orders(task, [client], round_=1)[client] != together[client]
        assert orders(numbered([12] * 4, seed=1), [client])[client] != together[client]
    assert together[0] != together[1]


# --- dropout ------------------------------------------------------------------------------------------------


def mask(clients, round_=0, step=0, seed=0, number=1, chance=0.5, shape=(6, 40)):
    seeds = seeds_of(StepKey(seed, round_, clients, step), torch.device("cpu"))
    with keyed(seeds, number):
        return torch.nn.Dropout(chance)(torch.ones(len(clients), *shape))


def test_dropout_masks_belong_to_client_step_round_seed_and_layer():
    together = mask([4, 1, 7])
    for place, client in enumerate([4, 1, 7]):
        assert torch.equal(mask([client])[0], together[place])
    others = [mask([4], round_=1), mask([4], step=1), mask([4], seed=1), mask([4], number=2), mask([1])]
    assert not any(torch.equal(other[0], together[0]) for other in others)
    assert not torch.equal(together[0][0], together[0][1])  # nor are a batch's rows alike


def test_dropout_drops_its_chance_and_keeps_the_mean():
    dropped = mask([0], chance=0.3, shape=(100, 400))
    assert sorted(set(dropped.flatten().tolist())) == [0, pytest.approx(1 / 0.7)]
    assert abs(float((dropped == 0).double().mean()) - 0.3) < 4 * np.sqrt(0.3 * 0.7 / 40_000)
    assert abs(float(dropped.double().mean()) - 1) < 4 * np.sqrt(0.3 / 0.7 / 40_000)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_dropout_in_training_is_the_same_batched_or_one_by_one(make):
    task = make([8] * 4, dropout=0.5)
    params, batch = own_params(task, 4), one_batch(task, range(4))
    together, _ = task.gradients(params, batch)
    silent, _ = make([8] * 4).gradients(params, batch)
    seen = [{}, {}]
    for number, rows in enumerate(([4] * len(task.layer_names()), [2] * (len(task.layer_names()) - 1) + [4])):
        for _, gradients, _ in task.backprop(params, batch, rows):
            seen[number] |= formed(gradients)
    for client in range(4):
        mine = {name: value[client : client + 1] for name, value in params.items()}
        alone, _ = task.gradients(mine, one_batch(task, [client]))
        for name, value in alone.items():
            torch.testing.assert_close(together[name][client], value[0], **CLOSE)
            for gradients in seen:
                if client < len(gradients[name]):
                    torch.testing.assert_close(gradients[name][client], value[0], **CLOSE)
    assert (together["fc1.weight"] - silent["fc1.weight"]).abs().max() > 1e-3


def test_dropout_differs_from_step_to_step():
    task = mlp_task([6], dropout=0.5, hidden=(30,))
    params = own_params(task, 1)
    batches = list(task.batches(visits_of(task, [0]), 0, steps=2))
    gradients = [task.gradients(params, batch)[0]["fc1.weight"] for batch in batches]
    assert (gradients[0] - gradients[1]).abs().max() > 1e-3


class Foreign(Mlp):
    """A model with torch's own dropout, which takes no generator."""

    def build(self, shape, classes):
        first = nn.Sequential(nn.Flatten(), nn.Linear(shape[0], 20), nn.ReLU(), nn.Dropout(0.5))
        return [("a", first), ("b", nn.Sequential(nn.Linear(20, classes)))]


def test_torchs_own_dropout_is_keyed_too():
    task = Task(Foreign(), mlp_task([8] * 3).federation, 0)
    params, batch = own_params(task, 3), one_batch(task, range(3))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    together, _ = task.gradients(params, batch)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    for client in range(3):
        mine = {name: value[client : client + 1] for name, value in params.items()}
        alone, _ = task.gradients(mine, one_batch(task, [client]))
        for name, value in alone.items():
            torch.testing.assert_close(together[name][client], value[0], **CLOSE)
    assert torch.equal(task.forward(params, batch.x), task.forward(params, batch.x))


# --- tests on held-out data ---------------------------------------------------------------------------------


def test_scores_are_the_plain_models():
    task = mlp_task(SIZES)
    params = own_params(task, 4)
    for client, own in enumerate(task.federation.held):
        object.__setattr__(own, "test_features", own.train_features[: client * 2])
        object.__setattr__(own, "test_labels", own.train_labels[: client * 2])
    losses, right = client_scores(task, params, np.arange(4))
    assert (losses[0], right[0]) == (0, 0)
    for client in range(1, 4):
        x, y = (part[: client * 2] for part in full_batch(task, client))
        logits = plain(task, row(params, client))(x)
        wanted = nn.functional.cross_entropy(logits, y, reduction="sum").item()
        assert losses[client] == pytest.approx(wanted, rel=1e-5)
        assert right[client] == int((logits.argmax(1) == y).sum())
    assert right.sum() not in (0, sum([2, 4, 6]))


def test_the_servers_test_set_is_scored_whole(monkeypatch):
    task = mlp_task([40])
    x, y = full_batch(task, 0)
    assert server_scores(task, task.initial()) is None
    task = mlp_task([40])
    monkeypatch.setattr(type(task.federation), "server_test", lambda _self: (x.numpy(), y.numpy()))
    monkeypatch.setattr("hpcfl.learning.evaluate.TEST_BATCH", 7)
    (loss, correct), size = server_scores(task, task.initial())
    logits = plain(task, task.initial())(x)
    assert loss == pytest.approx(nn.functional.cross_entropy(logits, y, reduction="sum").item(), rel=1e-5)
    assert (correct, size) == (int((logits.argmax(1) == y).sum()), 40)


# --- the layers above fixed ones ---------------------------------------------------------------------------


def test_fixed_layers_are_computed_once_and_change_nothing():
    task = mlp_task([3, 20, 8])
    visits = visits_of(task, [2, 0, 1])
    params = {name: value.clone() for name, value in task.replicate(task.initial(), visits).items()}
    for value in params.values():  # clients that differ
        value.mul_(torch.arange(1, 4).view(-1, *[1] * (value.dim() - 1)))
    own = {"fc3.weight", "fc3.bias"}
    upper = task.freeze_below(params, visits, own)
    assert [layer.name for layer in upper.layers] == ["fc3"]
    for above, below in zip(*(each.batches(visits, 4, 2, phase=1).padded() for each in (upper, task))):
        assert torch.equal(above.y, below.y)
        assert above.x.shape[-1] == 3  # what fc2 gives
        found, losses = upper.gradients(params, above, own)
        wanted, all_losses = task.gradients(params, below, own)
        assert found.keys() == own
        torch.testing.assert_close(losses, all_losses)
        for name in own:
            torch.testing.assert_close(found[name], wanted[name])


def test_layers_that_draw_are_not_computed_once():
    visits = visits_of(mlp_task([3, 4]), [0, 1])
    task = mlp_task([3, 4], dropout=0.5)
    params = task.replicate(task.initial(), visits)
    assert task.freeze_below(params, visits, {"fc3.weight"}) is task
    assert task.freeze_below(params, visits, {"fc1.weight", "fc3.weight"}) is task
    plain_ = mlp_task([3, 4])
    assert plain_.freeze_below(plain_.replicate(plain_.initial(), visits), visits, {"fc1.bias"}) is plain_


@pytest.mark.parametrize("sizes", [[5, 9, 7], [40, 3, 8]])
def test_samples_of_one_array_are_those_of_several(sizes):
    task, other = mlp_task(sizes), mlp_task(sizes)
    visits = visits_of(task, [0, 1, 2])
    other.hold(np.array([1]))
    other.hold(np.array([2, 0]))
    together, apart = (list(each.batches(visits, 4, 2).padded()) for each in (task, other))
    assert len({id(task.samples(client).pool) for client in range(3)}) == 1
    assert [other.samples(client).start for client in range(3)] == [sizes[2], 0, 0]
    for one, other in zip(together, apart, strict=True):
        real = slice(None) if one.valid is None else one.valid
        assert torch.equal(one.x[real], other.x[real])
        assert torch.equal(one.y[real], other.y[real])
