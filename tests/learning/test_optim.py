"""Optimisers of chunks: each client's steps are those that it would take alone with torch's own optimiser."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.toys import full_batch, mlp_task, plain, read, visits_of
from hpcfl.base.types import State
from hpcfl.learning.batches import Batch
from hpcfl.learning.optim import Adam, AdamW, Optimizer, Sgd, zeros

EPOCHS = 3


def reference(kind: str, net: torch.nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw":
        weights, biases = ([p for p in net.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
        groups = [{"params": weights, "weight_decay": 0.5}, {"params": biases, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95), eps=1e-6)
    if kind == "adam":
        return torch.optim.Adam(net.parameters(), lr=0.01)
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5)


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("adam", Adam(0.01)),
        ("adamw", AdamW(0.01, decay=0.5, betas=(0.8, 0.95), epsilon=1e-6)),
        ("sgd", Sgd(0.01, momentum=0.5)),
    ],
)
def test_steps_are_those_of_torch(kind: str, optimizer: Optimizer) -> None:
    """Clients of 8 and 3 samples, batches of 4: the smaller one rests in every second step."""
    task = mlp_task([8, 3])
    visits = visits_of(task, [0, 1])
    params = {name: value.clone() for name, value in task.replicate(task.initial(), visits).items()}
    optimizer.train(task, params, task.batches(visits, 4, EPOCHS))
    for client in (0, 1):
        net = plain(task, task.initial())
        own = reference(kind, net)
        for batch in task.batches(visits_of(task, [client]), 4, EPOCHS):
            own.zero_grad()
            torch.nn.functional.cross_entropy(net(batch.x[0]), batch.y[0]).backward()
            own.step()
        for name, value in read(net, task).items():
            np.testing.assert_allclose(params[name][client], value, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("optimizer", [Sgd(0.1, momentum=0.5), Adam(0.1), AdamW(0.1, decay=0.1)])
def test_what_is_no_number_where_a_client_rests_moves_nothing(optimizer: Optimizer) -> None:
    """A mean over no samples: the client of 3 has none in the second step."""
    task = mlp_task([8, 3])
    visits = visits_of(task, [0, 1])
    params = {name: value.clone() for name, value in task.replicate(task.initial(), visits).items()}
    memory = optimizer.init(params)

    def mean(params: State, batch: Batch) -> Tensor:
        real = torch.ones_like(batch.y) if batch.valid is None else batch.valid
        return (task.forward(params, batch.x).square().sum(2) * real).sum(1) / real.sum(1)

    losses = optimizer.train(task, params, task.batches(visits, 4, 1), memory, objective=mean)
    alone = {name: value.clone() for name, value in task.replicate(task.initial(), visits_of(task, [1])).items()}
    once = optimizer.train(task, alone, task.batches(visits_of(task, [1]), 4, 1), objective=mean)
    torch.testing.assert_close(losses[1:], once)
    for name, value in alone.items():
        torch.testing.assert_close(params[name][1:], value)
    assert all(value.isfinite().all() for value in memory.values())


def test_another_objective_is_what_is_minimised() -> None:
    task = mlp_task([6])
    visits = visits_of(task, [0])
    params = {name: value.clone() for name, value in task.replicate(task.initial(), visits).items()}
    name = "fc1.weight"
    before = params[name].clone()
    loss = Sgd(0.1).train(
        task, params, task.batches(visits, 0, 1), names={name}, objective=lambda p, batch: p[name].square().sum((1, 2))
    )
    torch.testing.assert_close(loss, before.square().sum((1, 2)))
    torch.testing.assert_close(params[name], 0.8 * before)


def test_the_parts_of_a_model_make_the_whole() -> None:
    task = mlp_task([6])
    params, (x, _) = task.replicate(task.initial(), visits_of(task, [0])), full_batch(task, 0)
    middle = task.forward(params, x[None], last=2)
    assert middle.shape[-1] == 3
    torch.testing.assert_close(task.forward(params, middle, first=2), task.forward(params, x[None]))


def test_an_objective_counts_only_where_a_client_takes_a_step() -> None:
    """The smaller client rests in every second step; what is added to its loss there must not be recorded."""
    task = mlp_task([8, 3])
    visits = visits_of(task, [0, 1])
    params = {name: value.clone() for name, value in task.replicate(task.initial(), visits).items()}
    found = Sgd(1e-9).train(
        task,
        params,
        task.batches(visits, 4, EPOCHS),
        names={"fc1.bias"},
        objective=lambda p, batch: p["fc1.bias"].sum(1) * 0 + 1,
    )
    assert found.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_who_rests_does_not_move_whatever_its_gradient(momentum: float) -> None:
    params, gradient = {"w": torch.zeros(2, 3)}, torch.tensor([[1.0] * 3, [torch.nan] * 3])
    velocity = zeros(params) if momentum else {}
    Sgd(0.5, momentum=momentum).apply(params, {"w": gradient}, velocity, torch.tensor([True, False]))
    np.testing.assert_array_equal(params["w"], [[-0.5] * 3, [0.0] * 3])
