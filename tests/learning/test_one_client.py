"""What an author writes of one client is what a chunk's clients minimise, together or one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers.toys import cnn_task, mlp_task, plain, visits_of
from hpcfl.learning import task as tasks
from hpcfl.learning.task import objective_of

EVEN, UNEVEN = [8, 8, 8], [3, 9, 5]
CLOSE = {"atol": 1e-6, "rtol": 1e-5}


def contrastive(params, batch, shared, personal):
    """In the manner of MOON: the loss, how near the latent is to the shared model's, how far from the own one's."""
    new, old, own = (batch.latent(state) for state in (params, shared, personal))
    near, far = (torch.cosine_similarity(new, other).exp() for other in (old, own))
    return batch.loss(params) - (near / (near + far)).log().mean() + 0.1 * batch.outputs(params).square().mean()


def begun(task, clients):
    """Parameters ``{name: [c, …]}``, a shared model, and a model of each client's own."""
    generator = torch.Generator().manual_seed(1)

    def near(value, *clients):
        return value + 0.1 * torch.randn((*clients, *value.shape), generator=generator)

    model = task.initial()
    states = [{name: near(value, *axis) for name, value in model.items()} for axis in ((clients,), (), (clients,))]
    return states, next(task.batches(visits_of(task, range(clients)), 0, steps=1).padded())


def by_hand(task, params, shared, personal, x, y):
    """The same by plain modules."""
    models = [plain(task, state) for state in (params, shared, personal)]
    new, old, own = (model[:-1](x).flatten(1) for model in models)
    near, far = (torch.cosine_similarity(new, other).exp() for other in (old, own))
    outputs = models[0](x)
    loss = nn.functional.cross_entropy(outputs, y)
    return loss - (near / (near + far)).log().mean() + 0.1 * outputs.square().mean()


@pytest.mark.parametrize("make", [mlp_task, cnn_task], ids=["mlp", "cnn"])
@pytest.mark.parametrize("sizes", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_each_client_has_its_own(make, sizes, monkeypatch):
    task, together = make(sizes), []
    vmap = torch.func.vmap
    monkeypatch.setattr(tasks.torch.func, "vmap", lambda *given: together.append(1) or vmap(*given))
    (params, shared, personal), batch = begun(task, len(sizes))
    _, values = task.gradients(params, batch, objective=objective_of(task, contrastive, shared, personal))
    assert bool(together) == (sizes is EVEN)
    for row, size in enumerate(sizes):
        own, kept = ({name: value[row] for name, value in state.items()} for state in (params, personal))
        wanted = by_hand(task, own, shared, kept, batch.x[row, :size], batch.y[row, :size])
        torch.testing.assert_close(values[row], wanted.detach(), **CLOSE)


def test_gradients_are_those_of_one_by_one():
    task = mlp_task(EVEN)
    (params, shared, personal), batch = begun(task, len(EVEN))
    whole, _ = task.gradients(params, batch, objective=objective_of(task, contrastive, shared, personal))
    for row in range(len(EVEN)):
        own, kept = ({name: value[row : row + 1] for name, value in state.items()} for state in (params, personal))
        one = next(task.batches(visits_of(task, [row]), 0, steps=1))
        alone, _ = task.gradients(own, one, objective=objective_of(task, contrastive, shared, kept))
        for name, value in alone.items():
            torch.testing.assert_close(whole[name][row], value[0], **CLOSE)
            assert value.abs().max() > 0


@pytest.mark.parametrize("sizes", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_the_loss_is_the_tasks_dropout_and_penalty_included(sizes):
    task = cnn_task(sizes, dropout=0.5)
    task.penalty = 0.1
    (params, shared, personal), batch = begun(task, len(sizes))
    objective = objective_of(task, lambda own, each, *_: each.loss(own), shared, personal)
    torch.testing.assert_close(objective(params, batch), task.losses(params, batch), **CLOSE)


def test_a_client_without_samples_in_a_step_has_none():
    task = mlp_task([4, 12])
    states = begun(task, 2)[0]
    batches = list(task.batches(visits_of(task, [0, 1]), 4, epochs=1).padded())
    objective = objective_of(task, lambda own, each, *_: each.loss(own) + len(each.y), *states[1:])
    assert batches[-1].sample_counts() == [0, 4]
    assert objective(states[0], batches[-1])[0] == 0
