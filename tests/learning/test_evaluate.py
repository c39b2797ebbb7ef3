"""Tests and objectives in batches that fit into memory: the same sums, samples padded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.modules import Normed
from helpers.toys import federation
from hpcfl.base.types import Floats, State
from hpcfl.data import ClientData, Federation
from hpcfl.learning import evaluate, samples
from hpcfl.learning.config import TaskConfig
from hpcfl.learning.evaluate import client_objectives, client_scores, server_objective, server_scores
from hpcfl.learning.samples import Padded
from hpcfl.learning.task import Task
from hpcfl.models import foreign
from hpcfl.models.cnn import Cnn
from hpcfl.models.mlp import Mlp

TRAIN, TEST = [9, 3, 6, 4], [5, 0, 7, 1]
ALL = np.arange(4)
SCORES = {"tests": client_scores, "objectives": client_objectives}
IMAGE = (1, 12, 12)
OWN = {"loss": "helpers.losses:contrast", "metrics": ["accuracy", "helpers.losses:confidence"]}


def samples_of(shape: tuple[int, ...]) -> Federation:
    """Clients with so many samples to train by and to be tested by; the server has samples of both kinds, too."""
    found, tests, server = (federation(sizes, shape, seed=seed) for seed, sizes in enumerate((TRAIN, TEST, [8])))
    for client, other in enumerate(tests.held):
        own = found.held[client]
        found.held[client] = ClientData(own.train_features, own.train_labels, other.train_features, other.train_labels)
    object.__setattr__(found, "test_sizes", np.array(TEST))
    for name in ("server_test", "server_train"):
        object.__setattr__(found, name, lambda: (server.held[0].train_features, server.held[0].train_labels))
    return found


def mlp(kind: dict[str, Any] | None = None) -> Task:
    return Task(Mlp(hidden=(4,)), samples_of((5,)), 0, kind=TaskConfig.from_table(kind or {}, "task"))


def cnn() -> Task:
    return Task(Cnn(channels=(2, 3), kernel=3, hidden=(6,)), samples_of(IMAGE), 0)


def normed() -> Task:
    spec = "helpers.modules:Normed"
    return Task(foreign.section(spec, Normed)(name=spec), samples_of(IMAGE), 0)


MAKERS: dict[str, Callable[[], Task]] = {"mlp": mlp, "own loss": lambda: mlp(OWN), "cnn": cnn, "module": normed}


def own_params(task: Task) -> State:
    """Return parameters of each client's own."""
    generator = torch.Generator().manual_seed(1)
    return {name: 0.5 * torch.randn(4, *value.shape, generator=generator) for name, value in task.initial().items()}


def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return room for clients and samples of each forward pass from now on."""
    seen: list[tuple[int, int]] = []
    forward = Task.forward

    def noted(self: Task, params: Any, x: Tensor, *more: Any, **named: Any) -> Tensor:
        seen.append((x.shape[0], x.shape[1]))
        return forward(self, params, x, *more, **named)

    monkeypatch.setattr(Task, "forward", noted)
    return seen


def penalised(task: Task) -> Task:
    task.penalty = 0.3
    return task


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("found", SCORES.values(), ids=SCORES)
def test_a_chunk_is_what_its_clients_are(make: Callable[[], Task], found: Any) -> None:
    """Together as one by one; a client without samples has nothing, not even a penalty of theirs."""
    together = found(penalised(make()), params := own_params(make()), ALL)
    single = [
        found(penalised(make()), {name: value[[client]] for name, value in params.items()}, np.array([client]))
        for client in ALL
    ]
    np.testing.assert_allclose(together, np.concatenate(single, axis=-1), rtol=1e-5)
    assert (together[..., 1] == 0).all() == (found is client_scores)
    assert (together[..., [0, 2, 3]] != 0).all() or found is client_scores


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("found", SCORES.values(), ids=SCORES)
def test_a_pass_has_as_many_samples_as_fit(
    make: Callable[[], Task], found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 of 4 clients: 3 of each, in as many passes; of what the users' functions compare, nothing is cut off."""
    whole = found(penalised(make()), params := own_params(make()), ALL)
    task, longest = penalised(make()), max(TEST if found is client_scores else TRAIN)
    found(task, params, ALL)
    (nbytes,) = task.kept.sample_bytes.values()
    task.kept.batches.clear()
    monkeypatch.setattr(evaluate, "BATCH_BYTES", 15 * nbytes)
    seen = passes(monkeypatch)
    cut = found(task, params, ALL)
    assert seen == [(4, min(3, longest - start)) for start in range(0, longest, 3)]
    if found is client_objectives and task.loss.name in OWN.values():
        return  # a loss of one batch each, as in steps
    np.testing.assert_allclose(cut, whole, rtol=1e-5)
    seen.clear()
    monkeypatch.setattr(evaluate, "BATCH_BYTES", 1)
    task.kept.batches.clear()
    np.testing.assert_allclose(found(task, params, ALL), whole, rtol=1e-5)
    assert seen == [(4, 1)] * longest


def test_the_server_tests_as_many_samples_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    task = penalised(mlp())
    shared = task.initial()
    scores, objective = server_scores(task, shared), server_objective(task, shared)
    assert scores is not None
    monkeypatch.setattr(evaluate, "BATCH_BYTES", 3 * next(iter(task.kept.sample_bytes.values())))
    seen = passes(monkeypatch)
    again = server_scores(task, shared)
    assert again is not None
    np.testing.assert_allclose(again[0], scores[0], rtol=1e-5)
    assert (again[1], seen) == (8, [(1, 3), (1, 3), (1, 2)])
    assert server_objective(task, shared) == (pytest.approx(objective[0], rel=1e-5), 8)
    assert seen[3:] == seen[:3]


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (mlp, 4 * (5 + 5)),  # features, and the same flattened, float32
        (cnn, 4 * (12 * 12 + 2 * 10 * 10)),  # an image, and what the first convolution makes of it
        (normed, 4 * (12 * 12 + 4 * 12 * 12)),
    ],
    ids=["mlp", "cnn", "module"],
)
def test_what_a_sample_costs(make: Callable[[], Task], wanted: int) -> None:
    task = make()
    client_scores(task, own_params(task), ALL)
    assert list(task.kept.sample_bytes.values()) == [wanted]


@pytest.mark.parametrize("found", SCORES.values(), ids=SCORES)
def test_samples_are_padded_once_if_there_is_room(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task, params, made = mlp(), own_params(mlp()), []
    of = Padded.of
    monkeypatch.setattr(Padded, "of", lambda parts: made.append(len(parts)) or of(parts))
    first = found(task, params, ALL)
    room = sum(batch.nbytes for batches in task.kept.batches.values() for batch in batches)
    width = max(TEST if found is client_scores else TRAIN)
    assert room == 4 * width * (5 * 4 + 8 + 1)  # features, label, whether it is real
    np.testing.assert_array_equal(found(task, params, ALL), first)
    assert made == [4]
    found(task, {name: value[:1] for name, value in params.items()}, ALL[:1])
    assert (made, len(task.kept.batches)) == ([4, 1], 1)  # one client's are quickly copied
    monkeypatch.setattr(samples, "KEPT_BYTES", room)
    some = {name: value[:3] for name, value in params.items()}
    np.testing.assert_allclose(found(task, some, ALL[:3]), first[..., :3], rtol=1e-6)
    assert len(task.kept.batches) == 1
    task.release_data()
    assert not task.kept.batches


def test_what_becomes_of_padding_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where it is no number."""
    forward, task = Task.forward, mlp()

    def divided(self: Task, params: Any, x: Tensor, *more: Any, **named: Any) -> Tensor:
        return forward(self, params, x / x.abs().sum(-1, keepdim=True), *more, **named)

    monkeypatch.setattr(Task, "forward", divided)
    params = own_params(task)
    for found in SCORES.values():
        together: Floats = found(task, params, ALL)
        assert np.isfinite(together).all()
    assert torch.isnan(task.forward(params, torch.zeros(4, 1, 5))).all()
