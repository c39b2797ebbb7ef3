"""Steps of linear stacks that are differentiated by hand, against PyTorch's own gradients and steps."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers.toys import federation, mlp_task, same_bits, visits_of
from hpcfl.data import ClientData
from hpcfl.data.base import InMemory
from hpcfl.learning.config import TaskConfig
from hpcfl.learning.fused import POINTWISE, formed
from hpcfl.learning.optim import Adam, Sgd
from hpcfl.learning.task import Task
from hpcfl.models import model_class
from hpcfl.models.glm import Glm

HERE = f"{__name__}:"
SIZES = [8, 3, 8, 5]
SHARP = {"rtol": 1e-11, "atol": 1e-13}
KINDS: dict[str, nn.Module] = {
    "identity": nn.Identity(),
    "relu": nn.ReLU(),
    "in-place": nn.ReLU(inplace=True),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "leaky": nn.LeakyReLU(0.2),
    "gelu": nn.GELU(),
    "gelu-tanh": nn.GELU("tanh"),
    "silu": nn.SiLU(),
    "softmax": nn.Softmax(-1),
}


def stack(shape: tuple[int, ...], classes: int, kind: str = "relu", last: str = "identity") -> nn.Module:
    """Return three layers, the middle one without a bias, in nested blocks."""
    block = nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), 6), KINDS[kind], nn.Linear(6, 5, bias=False))
    return nn.Sequential(block, KINDS[kind], nn.Linear(5, classes), KINDS[last])


def plain(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Linear(shape[0], classes, bias=False)


def tied(shape: tuple[int, ...], classes: int) -> nn.Module:
    net = nn.Sequential(nn.Linear(shape[0], 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, classes))
    net[2].weight = net[1].weight
    return net


def normed(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 5), nn.LayerNorm(5), nn.Linear(5, classes))


def frozen(shape: tuple[int, ...], classes: int) -> nn.Module:
    net = nn.Sequential(nn.Linear(shape[0], 5), nn.Linear(5, classes))
    net[0].requires_grad_(False)
    return net


def hooked(shape: tuple[int, ...], classes: int) -> nn.Module:
    net = nn.Sequential(nn.Linear(shape[0], classes))
    net[0].register_forward_hook(lambda _module, _inputs, output: 2 * output)
    return net


class Doubled(nn.Sequential):
    """A chain that does more than to call its modules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def doubled(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Doubled(nn.Linear(shape[0], classes))


def task_of(factory: str, computing: Any = None, loss: str = "auto", **keys: Any) -> Task:
    model = model_class(HERE + factory).from_table({"name": HERE + factory, **keys}, "model")
    return Task(model, federation(SIZES), 0, precision="double", kind=TaskConfig(loss=loss), computing=computing)


def own_params(task: Task, clients: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.stack(
            [value + 0.3 * torch.randn(value.shape, generator=generator, dtype=value.dtype) for _ in range(clients)]
        )
        for name, value in task.initial().items()
    }


def trained(task: Task, optimiser: Any, names: Any = None, batch: int = 3) -> tuple[dict[str, torch.Tensor], Any]:
    """Return parameters after two epochs, and the losses; clients 1 and 3 rest in the last steps."""
    params = own_params(task, 4)
    losses = optimiser.train(task, params, task.batches(visits_of(task, range(4)), batch, epochs=2), names=names)
    return params, losses


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_pytorchs(kind: str) -> None:
    fused, vmapped = (task_of("stack", how, kind=kind, last=kind) for how in (None, "vmapped"))
    assert (fused.computing, vmapped.computing) == ("fused", "vmapped")
    params, batch = own_params(fused, 4), next(fused.batches(visits_of(fused, range(4)), 0, steps=1))
    before = batch.x.clone()
    (found, losses), (wanted, known) = (task.gradients(params, batch) for task in (fused, vmapped))
    assert list(found) == [name for names in reversed(fused.layer_names()) for name in names]
    torch.testing.assert_close(losses, known, **SHARP)
    for name, value in wanted.items():
        assert value.any()
        torch.testing.assert_close(found[name], value, **SHARP)
    assert torch.equal(batch.x, before)


def test_every_kind_is_tried() -> None:
    assert {type(kind) for kind in KINDS.values()} | {nn.Flatten} == POINTWISE.keys()


@pytest.mark.parametrize("optimiser", [Sgd(0.2), Sgd(0.2, momentum=0.6), Sgd(0.2, decay=0.1), Adam(0.01, decay=0.1)])
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_steps_are_the_same(optimiser: Any, momentum: float) -> None:
    if momentum and isinstance(optimiser, Sgd):
        optimiser = Sgd(optimiser.lr, momentum=momentum, decay=optimiser.decay)
    (found, losses), (wanted, known) = (trained(task_of("stack", how), optimiser) for how in (None, "vmapped"))
    torch.testing.assert_close(losses, known, **SHARP)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, **SHARP)


@pytest.mark.parametrize("names", [["2.weight", "2.bias"], ["0.1.weight"], ["0.3.weight", "2.bias"]])
def test_only_some_learn(names: list[str]) -> None:
    task = task_of("stack")
    (found, _), (wanted, _) = (
        trained(each, Sgd(0.2, momentum=0.5), names) for each in (task, task_of("stack", "vmapped"))
    )
    start = own_params(task, 4)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, **SHARP)
        assert torch.equal(found[name], start[name]) == (name not in names)


@pytest.mark.parametrize("numbers", [1, 3])
def test_squared_errors_by_hand(numbers: int) -> None:
    """One step of a linear model without bias from W = 0: ``W ← lr · 2/(B K) · Σ y xᵀ``."""
    x = np.array([[1.0, 2.0], [0.5, -1.0]], np.float32)
    y = np.arange(1.0, 1 + 2 * numbers, dtype=np.float32).reshape(2, numbers)
    y = y[:, 0] if numbers == 1 else y
    held = InMemory.of([ClientData(x, y, x[:0], y[:0])], numbers)
    task = Task(model_class(HERE + "plain").from_table({"name": HERE + "plain"}, "model"), held, 0, precision="double")
    assert task.computing == "fused"
    params = {"weight": torch.zeros(1, numbers, 2, dtype=torch.float64)}
    losses = Sgd(0.25).train(task, params, task.batches(visits_of(task, [0]), 0, epochs=1))
    np.testing.assert_allclose(losses[0], (y.astype(float) ** 2).mean(), rtol=1e-12)
    wanted = 0.25 * 2 / y.size * y.astype(float).reshape(2, numbers).T @ x
    np.testing.assert_allclose(params["weight"][0], wanted, rtol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_penalty_takes_biases_too(momentum: float) -> None:
    model, held = Glm(link="identity", ridge=0.5), federation(SIZES, shape=(4,))
    targets = [replace(data, train_labels=data.train_labels.astype(np.float32)) for data in map(held.client, range(4))]
    tasks = [Task(model, InMemory.of(targets, 1), 0, precision="double", computing=how) for how in ("fused", "vmapped")]
    assert tasks[0].fused is not None
    (found, losses), (wanted, known) = (trained(task, Sgd(0.1, momentum=momentum)) for task in tasks)
    torch.testing.assert_close(losses, known, **SHARP)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, **SHARP)


@pytest.mark.parametrize("factory", ["tied", "normed", "frozen", "hooked", "doubled"])
def test_others_are_left_to_pytorch(factory: str) -> None:
    task = task_of(factory)
    assert task.fused is None
    assert task.computing in ("vmapped", "looped")


def test_a_loss_from_outside_is_left_to_pytorch() -> None:
    assert task_of("stack").fused is not None
    assert task_of("stack", loss="helpers.losses:entropy").fused is None


def test_together_is_one_by_one() -> None:
    task = mlp_task([6] * 5, dropout=0.3)
    together = own_params(task, 5)
    Sgd(0.3).train(task, together, task.batches(visits_of(task, range(5)), 2, epochs=1))
    for client in range(5):
        alone = {name: value[client : client + 1] for name, value in own_params(task, 5).items()}
        Sgd(0.3).train(task, alone, task.batches(visits_of(task, [client]), 2, epochs=1))
        for name, value in alone.items():
            torch.testing.assert_close(together[name][client], value[0])


def test_what_was_recorded_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcfl.learning.fused.Fused.apart", lambda *_: 0.5)
    undecided = mlp_task(SIZES)
    assert (undecided.fused, undecided.computing) == (None, "vmapped")
    assert undecided.why == "a chain of layers; fused, its gradients would differ from the loop's by 0.5"
    assert mlp_task(SIZES, computing="fused").computing == "fused"
    assert not undecided.oracle_calls.any()


def test_products_are_gradients() -> None:
    task = mlp_task(SIZES)
    params, batch = own_params(task, 4), next(task.batches(visits_of(task, range(4)), 0, steps=1))
    products, _ = task.products(params, batch)
    assert same_bits(formed(products), task.gradients(params, batch)[0])
