"""HeteroFL (Diao, Ding & Tarokh, 2021), FedRolex (Alam et al., 2022): sub-models, masks and sums of parts, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from helpers import modules
from helpers.toys import Rounds, cnn_task, federation, full_batch, mlp_task, planned, same_bits, visits_of
from hpcfl.algorithms.buffered import with_buffers
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.fedrolex import FedRolex
from hpcfl.algorithms.heterofl import HeteroFl
from hpcfl.base.errors import UsageError
from hpcfl.base.rng import StepKey
from hpcfl.config import load
from hpcfl.learning.batches import Batch
from hpcfl.learning.config import TaskConfig
from hpcfl.learning.task import Task
from hpcfl.models import model_class
from hpcfl.models.bilstm import BiLstm
from hpcfl.models.mlp import Mlp
from hpcfl.models.modules.narrow import hidden_axes
from hpcfl.models.vgg import Vgg
from hpcfl.sums.guard import Sieve
from hpcfl.sums.message import Block, ExactSums, masked, moved

SIZES = [3, 20, 8, 11, 4]
BOTH = pytest.mark.parametrize("method", [HeteroFl, FedRolex])


# ---- sums of parts


def summed(block, *messages):
    sums = ExactSums(({"w": block},))
    for value in messages:
        sums.add({"w": (torch.tensor([value]), torch.ones(1, dtype=torch.float64))})
    return sums


def test_a_coordinate_is_averaged_over_who_holds_it_and_kept_where_nobody_does() -> None:
    """The toy of HeteroFL: the server's 0 0 0 0, a whole client's 1 2 3 4, and one of half the width with 3 4."""
    block = Block((4,), parts=((4,), (2,)))
    both = summed(block, [1.0, 2.0, 3.0, 4.0], [3.0, 4.0])
    assert moved(torch.zeros(4), both.mean("w")).tolist() == [2.0, 3.0, 3.0, 4.0]
    assert both.weight("w") == 2.0
    start = torch.tensor([0.0, 0.0, 7.0, -0.3])
    assert moved(start, summed(block, [3.0, 4.0]).mean("w")).tolist() == [3.0, 4.0, *start[2:].tolist()]
    assert torch.equal(moved(start, summed(block).mean("w")), start)


@pytest.mark.parametrize("size", [3, 40], ids=["bins", "whole numbers"])
def test_sums_of_parts_do_not_depend_on_who_adds_them(size: int) -> None:
    block = Block((size, size), parts=((size, size), (2, 3)))
    rng = torch.Generator().manual_seed(3)
    rows = [torch.randn(1, *shape, generator=rng) for shape in (block.parts * 4)]
    ones = torch.ones(1, dtype=torch.float64)
    one, *ranks = (ExactSums(({"w": block},)) for _ in range(3))
    for number, row in enumerate(rows):
        one.add({"w": (row, ones)})
        ranks[number % 2].add({"w": (row, ones)})
    for mine, others in zip(ranks[0].buffers, ranks[1].buffers):
        mine += others
    assert torch.equal(one.mean("w"), ranks[0].mean("w"))
    corner = torch.stack([row[0, :2, :3] for row in rows]).double().mean(0)
    torch.testing.assert_close(one.mean("w")[:2, :3], corner)
    whole = torch.stack([row[0] for row in rows[::2]]).double().mean(0)
    torch.testing.assert_close(one.mean("w")[2:], whole[2:])


def test_a_mask_says_which_coordinates_count() -> None:
    block = Block((2, 2))
    sums = ExactSums(({"w": block, "held w": block},))
    values = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])
    mask = torch.tensor([[[1.0], [1.0]], [[0.0], [1.0]]])
    sums.add(masked("w", values, mask, torch.tensor([1.0, 3.0], dtype=torch.float64)))
    assert sums.mean("w").tolist() == [[1.0, 2.0], [6.0, 7.0]]


def test_a_mask_is_no_part_of_a_messages_norm() -> None:
    block = Block((2,))
    layout = ({"loss": Block(()), "w": block, "held w": replace(block, mask=True)},)
    sieve = Sieve(1, layout, whole=True, limits=np.array([4.5]))
    message = masked("w", torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 1.0]]), torch.ones(1))
    sieve.judge([(name, *part) for name, part in message.items()])
    assert sieve.norms.tolist() == [[4.0]]


# ---- who holds what


def holds(method, sizes=SIZES, paces=None):
    task = mlp_task(sizes)
    task.paces = np.ones(len(sizes)) if paces is None else np.array(paces)
    return [method.rates[level] for level in method.holds(task)]


def test_rates_go_by_shares_speed_or_client() -> None:
    assert holds(HeteroFl(rates=(1.0, 0.5))) == [1.0, 1.0, 1.0, 0.5, 0.5]
    assert holds(HeteroFl(rates=(0.25, 1.0), shares=(3, 2))) == [0.25] * 3 + [1.0] * 2
    by_speed = HeteroFl(rates=(0.25, 1.0), shares=(3, 2), assign="speed")
    assert holds(by_speed, paces=[5, 1, 4, 2, 3]) == [0.25, 1.0, 0.25, 1.0, 0.25]
    assert holds(HeteroFl(rates=(0.1, 0.2, 0.3, 0.4, 1.0), assign="clients")) == [0.1, 0.2, 0.3, 0.4, 1.0]


def test_bad_rates_are_refused_in_one_line() -> None:
    for rates in ([0.0], [1.1], []):
        with pytest.raises(UsageError, match=r"^algorithm\.rates[^\n]*$"):
            HeteroFl.from_table({"rates": rates}, "algorithm")
    refused = {
        "one per client": HeteroFl(assign="clients"),
        "equally fast": HeteroFl(assign="speed"),
    }
    for words, method in refused.items():
        with pytest.raises(UsageError, match=words):
            method.holds(mlp_task([3, 4]))
    with pytest.raises(UsageError, match=r"algorithm\.rates: expected 1 for a model without hidden layers"):
        Rounds(HeteroFl(), mlp_task([3, 4], hidden=()))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("algorithm.persist_optimizer=true", "algorithm.persist_optimizer"),
        ("algorithm.rates=[0.5, 1.5]", "algorithm.rates"),
        ("algorithm.shares=[1, 2]", "algorithm.shares: expected 3"),
        ("data.name=linear", "mask_labels"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(setting: str, words: str) -> None:
    table = {
        **{"rounds": 1, "clients": 4, "data": {"name": "digits"}, "model": {"name": "mlp"}},
        "algorithm": {"name": "heterofl", "rates": [1.0, 0.5, 0.25]},
    }
    with pytest.raises(UsageError, match=rf"^[^\n]*{words}[^\n]*$"):
        load(table, [setting]).check(None)


def test_models_that_cannot_be_narrowed_are_refused() -> None:
    task = Task(BiLstm(), federation([4], shape=(6, 3)), 0)
    with pytest.raises(UsageError, match=r"^model: layer \w+ cannot be made narrower[^\n]*$"):
        hidden_axes(task.layers)
    with pytest.raises(UsageError, match=r"^model: Normed in 'helpers\.modules:Normed' cannot be made narrower[^\n]*$"):
        hidden_axes(module_task("Normed").layers)
    task = module_task("normed_chain", "mean")
    with pytest.raises(UsageError, match=r"^task\.buffers: expected 'static'[^\n]*$"):
        Rounds(with_buffers(HeteroFl(rates=(1.0, 0.5)), task), task)


def test_units_are_rounded_up_or_by_fedrolex_down() -> None:
    assert [HeteroFl().units(rate, whole) for rate, whole in ((0.5, 5), (0.07, 100), (1.0, 7))] == [3, 7, 7]
    assert [FedRolex().units(rate, whole) for rate, whole in ((0.5, 5), (0.29, 100), (0.01, 7))] == [2, 29, 1]


def test_inputs_of_a_layer_after_pooled_images_follow_their_channels() -> None:
    task = cnn_task([4])
    method = HeteroFl(rates=(0.5,))
    shapes = {
        name: method.held(value.shape, hidden_axes(task.layers)[name], 0.5) for name, value in task.initial().items()
    }
    pixels = task.initial()["fc1.weight"].shape[1] // 3
    assert shapes == {
        **{"conv1.weight": (1, 1, 3, 3), "conv1.bias": (1,), "conv2.weight": (2, 1, 3, 3), "conv2.bias": (2,)},
        **{"fc1.weight": (3, 2 * pixels), "fc1.bias": (3,), "fc2.weight": (3, 3), "fc2.bias": (3,)},
    }


# ---- batch normalisation


def module_task(name: str, buffers: str = "static") -> Task:
    values = {"name": f"helpers.modules:{name}"}
    data, kind = federation([6, 9], shape=(1, 8, 8)), TaskConfig(buffers=buffers)
    return Task(model_class(values["name"]).from_table(values, "model"), data, 0, kind=kind)


def test_channels_of_vgg_become_fewer_with_their_normalisations() -> None:
    task = Task(Vgg(width=2), federation([4], shape=(3, 32, 32)), 0)
    axes, method = hidden_axes(task.layers), HeteroFl()
    half = {name: value.shape for name, value in Vgg(width=1).module((3, 32, 32), 3).state_dict().items()}
    assert {name: method.held(value.shape, axes[name], 0.5) for name, value in task.initial().items()} == {
        name: shape for name, shape in half.items() if name in task.initial()
    }
    assert {name: method.held(value.shape, axes[name], 0.5) for name, value in task.whole.buffers.items()} == {
        name: shape for name, shape in half.items() if name in task.whole.buffers
    }


@pytest.mark.parametrize("redraw", [False, True])
@pytest.mark.parametrize("scaler", [False, True])
def test_a_normalised_sub_model_is_trained_as_a_small_model_is(scaler: bool, redraw: bool) -> None:
    """Two clients of half the channels, two steps, against plain modules that normalise by their batches."""
    task = module_task("normed_chain")
    keys = {"rates": (0.5,), "lr": 0.3, "batch": 5, "epochs": 0, "steps": 2, "mask_labels": False}
    method = with_buffers(HeteroFl(scaler=scaler, redraw=redraw, **keys), task)
    rounds = Rounds(method, task)
    start, ends = {name: value.clone() for name, value in rounds.state.items()}, []
    for client in (0, 1):
        net = modules.normed_chain((1, 8, 8), 3, channels=2).train()
        with torch.no_grad():
            for name, value in net.named_parameters():
                value.copy_(start[name][tuple(map(slice, value.shape))])
        for conv in (net[0][0], net[1][0]):
            conv.register_forward_hook(lambda _, __, output: output / (0.5 if scaler else 1.0))
        step = torch.optim.SGD(net.parameters(), 0.3)
        for batch in task.batches(visits_of(task, [client]), 5, steps=2):
            step.zero_grad()
            F.cross_entropy(net(batch.x[0]), batch.y[0]).backward()
            step.step()
        ends.append(dict(net.named_parameters()))
    rounds.step(planned([1, 1], 3))
    for name, value in task.initial().items():
        wanted = value.clone()
        wanted[tuple(map(slice, ends[0][name].shape))] = (ends[0][name] + ends[1][name]).detach() / 2
        torch.testing.assert_close(rounds.state[name], wanted, atol=1e-6, rtol=1e-5)
    assert all(torch.equal(rounds.state[name], start[name]) for name in task.buffer_names)  # nothing has gathered any


def test_normalised_windows_of_all_units_are_the_whole_model() -> None:
    keys = {"rates": (1.0,), "lr": 0.1, "batch": 5, "mask_labels": False}
    task = module_task("normed_chain")
    one, other = (Rounds(with_buffers(method(**keys), task), task) for method in (FedRolex, HeteroFl))
    for round_ in range(2):
        for rounds in (one, other):
            rounds.step(planned([1, 1], 3, round_))
    for name in task.initial():
        torch.testing.assert_close(one.state[name], other.state[name])


# ---- windows


@pytest.mark.parametrize(
    ("windows", "wanted"), [("paper", ["01", "12", "23", "30", "01"]), ("released", ["01", "30", "23", "12", "01"])]
)
def test_windows_roll(windows: str, wanted: list[str]) -> None:
    """The toy of FedRolex: K = 4, half of them, rounds 0 to 4."""
    task, method = mlp_task([5], hidden=(4,)), FedRolex(windows=windows)
    units = {name: torch.zeros_like(value) for name, value in task.initial().items()}
    units["fc1.bias"] = torch.arange(4.0)
    found = [method.placed(task, units, round_)["fc1.bias"][:2].int().tolist() for round_ in range(5)]
    assert ["".join(map(str, each)) for each in found] == wanted


def test_in_each_round_only_the_window_moves() -> None:
    task = mlp_task(SIZES, hidden=(4, 3))
    rounds = Rounds(FedRolex(rates=(0.5,), lr=0.1), task)
    for round_ in range(5):
        before = rounds.state
        rounds.step(planned([1] * 5, 3, round_))
        bias = (rounds.state["fc1.bias"] != before["fc1.bias"]).nonzero().flatten().tolist()
        assert bias == sorted([round_ % 4, (round_ + 1) % 4])
        weight = (rounds.state["fc2.weight"] != before["fc2.weight"]).nonzero().tolist()
        assert {row for row, _ in weight} == {round_ % 3}
        assert {column for _, column in weight} <= set(bias)


# ---- training


@BOTH
@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_rate_1_with_labels_unmasked_is_fedavg(method, weights) -> None:
    keys = {"lr": 0.1, "batch": 4, "epochs": 2, "momentum": 0.9, "weights": weights}
    own = method(rates=(1.0,), mask_labels=False, **keys)
    one, other = (Rounds(each, mlp_task(SIZES), 2) for each in (own, FedAvg(**keys)))
    for round_ in range(3):
        for rounds in (one, other):
            rounds.step(planned([1, 1, 4, 1, 1], 3, round_))
        if method is HeteroFl:
            assert same_bits(one.state, other.state)
        for name, value in one.state.items():  # windows add up the same units in another order
            torch.testing.assert_close(value, other.state[name])


@pytest.mark.parametrize("scaler", [False, True])
def test_a_sub_model_is_trained_as_a_small_model_is(scaler: bool) -> None:
    """One client of rate ½, two steps on all that it has, against autograd on the first units."""
    task = mlp_task([20], hidden=(4, 3))
    rounds = Rounds(HeteroFl(rates=(0.5,), lr=0.3, batch=0, epochs=0, steps=2, scaler=scaler, mask_labels=False), task)
    start, (x, y) = rounds.state, full_batch(task, 0)
    small = {"fc1": (2, 5), "fc2": (2, 2), "fc3": (3, 2)}
    w = {}
    for layer, (rows, columns) in small.items():
        w[f"{layer}.weight"] = start[f"{layer}.weight"][:rows, :columns].clone().requires_grad_()
        w[f"{layer}.bias"] = start[f"{layer}.bias"][:rows].clone().requires_grad_()
    divisor = 0.5 if scaler else 1.0
    for _ in range(2):
        h = x
        for layer in ("fc1", "fc2"):
            h = (F.linear(h, w[f"{layer}.weight"], w[f"{layer}.bias"]) / divisor).relu()
        loss = F.cross_entropy(F.linear(h, w["fc3.weight"], w["fc3.bias"]), y)
        for value, gradient in zip(w.values(), torch.autograd.grad(loss, list(w.values()))):
            value.data -= 0.3 * gradient
    sums = rounds.step(planned([1], 3))
    for name, value in start.items():
        wanted = value.clone()
        wanted[tuple(map(slice, w[name].shape))] = w[name].detach()
        torch.testing.assert_close(rounds.state[name], wanted, atol=1e-6, rtol=1e-5)
        outside = torch.ones(value.shape, dtype=torch.bool)
        outside[tuple(map(slice, w[name].shape))] = False
        assert torch.equal(rounds.state[name][outside], value[outside])
    assert sums.weight("fc1.weight") == 1.0


def test_absent_logits_are_0_in_the_loss() -> None:
    """The toy: logits 2, 1, 5, a client with labels 0 and 1, target 0."""
    data = federation([4])
    data.held[0].train_labels[:] = [0, 1, 0, 1]
    task = Task(Mlp(hidden=()), data, 0)
    params = {"fc1.weight": torch.zeros(1, 3, 5), "fc1.bias": torch.tensor([[2.0, 1.0, 5.0]])}
    objective = HeteroFl(rates=(1.0,)).minimised(task, task.initial(), {}, visits_of(task, [0]))
    batch = Batch(torch.zeros(1, 1, 5), torch.zeros(1, 1, dtype=torch.int64), None, StepKey(0, 0, [0], 0))
    assert objective is not None
    assert float(objective(params, batch)) == pytest.approx(0.4076060, abs=1e-6)


@BOTH
def test_rows_of_the_last_layer_are_averaged_over_who_has_the_label(method) -> None:
    """Two clients without weight decay: a row moves by the mean of those who have its label, or not at all."""
    data = federation([6, 6])
    for held, labels in zip(data.held, ([0, 1], [0, 0])):
        held.train_labels[:] = labels * 3
    task = Task(Mlp(hidden=(4,)), data, 0)
    keys = {"rates": (1.0, 0.5), "assign": "clients", "lr": 0.1, "batch": 0}
    start, rounds = task.initial()["fc2.bias"], Rounds(method(**keys), task)
    apart = []
    for client in (0, 1):
        one = Rounds(method(**keys), task)
        one.step(planned([1 if each == client else 3 for each in (0, 1)], 2))
        apart.append(one.state["fc2.bias"] - start)
    rounds.step(planned([1, 1], 2))
    change = rounds.state["fc2.bias"] - start
    torch.testing.assert_close(change[0], (apart[0][0] + apart[1][0]) / 2)
    torch.testing.assert_close(change[1], apart[0][1])
    assert float(change[2]) == 0.0
    assert float(apart[0][1]) != 0.0


@BOTH
@pytest.mark.parametrize("make", [mlp_task, cnn_task])
def test_together_is_one_by_one(method, make) -> None:
    keys = {"rates": (1.0, 0.5, 0.25), "lr": 0.1, "batch": 4}
    one, other = Rounds(method(**keys), make(SIZES), 1), Rounds(method(**keys), make(SIZES))
    layers = len(one.layers)
    assert [len(chunk.clients) for chunk in other.job.chunks] == [2, 1, 2]
    for round_ in range(2):
        for rounds in (one, other):
            rounds.step(planned([1] * 5, layers, round_))
    for name, value in one.state.items():
        torch.testing.assert_close(value, other.state[name], atol=1e-5, rtol=1e-4)


# ---- rates dealt anew in each round


def test_redrawn_rates_are_dealt_in_exact_numbers_and_to_others_in_each_round() -> None:
    task, method = mlp_task([3] * 10), HeteroFl(rates=(1.0, 0.5), shares=(3, 7), redraw=True)
    rounds = [method._rates(task, replace(visits_of(task, range(10)), round=number)) for number in range(20)]
    assert {each.count(1.0) for each in rounds} == {3}
    whole = np.array(rounds) == 1.0
    assert whole.any(0).all()
    assert not whole.all(0).any()


@BOTH
@pytest.mark.parametrize("mask_labels", [False, True])
def test_a_redrawn_rate_is_that_rate(method, mask_labels: bool) -> None:
    """Whole tensors with masks come to what parts of tensors come to: one rate for all, so that no deal matters."""
    keys = {"rates": (0.5,), "lr": 0.1, "batch": 4, "epochs": 2, "momentum": 0.5, "mask_labels": mask_labels}
    one, other = (Rounds(method(redraw=redraw, **keys), mlp_task(SIZES), 2) for redraw in (False, True))
    for round_ in range(3):
        for rounds in (one, other):
            rounds.step(planned([1, 1, 4, 1, 1], 3, round_))
    for name, value in one.state.items():
        torch.testing.assert_close(other.state[name], value, atol=1e-6, rtol=1e-5)


def test_a_coordinate_moves_by_the_mean_over_those_who_held_it_this_round() -> None:
    """Two clients, one of half the width: outside, the other one alone counts, whichever it is."""
    task = mlp_task([6, 6], hidden=(4,))
    keys = {"lr": 0.1, "batch": 0, "mask_labels": False, "scaler": False}
    own = {rate: HeteroFl(rates=(rate,), **keys) for rate in (1.0, 0.5)}
    method = HeteroFl(rates=(1.0, 0.5), redraw=True, **keys)
    for round_ in range(3):
        rates = method._rates(task, replace(visits_of(task, [0, 1]), round=round_))
        alone = [Rounds(own[rate], task) for rate in rates]
        for client, rounds in enumerate(alone):
            rounds.step(planned([1 if each == client else 3 for each in (0, 1)], 2, round_))
        both = Rounds(method, task)
        both.step(planned([1, 1], 2, round_))
        bias = [rounds.state["fc1.bias"] for rounds in alone]
        whole = bias[rates.index(1.0)]
        torch.testing.assert_close(both.state["fc1.bias"], torch.cat([(bias[0] + bias[1])[:2] / 2, whole[2:]]))
