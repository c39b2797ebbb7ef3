"""Layers of the last of several local steps: FedAvg where everybody is in time, and by hand where somebody is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hpcfl import store
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.fednova import FedNova
from hpcfl.algorithms.fedprox import FedProx
from hpcfl.algorithms.last_step import with_last_step
from hpcfl.algorithms.lg_fedavg import LgFedAvg
from hpcfl.algorithms.salf import Salf
from hpcfl.base.errors import UsageError
from hpcfl.config import from_table
from hpcfl.engine.job import Job
from hpcfl.engine.uneven import drained
from hpcfl.learning.batches import Visits
from hpcfl.testing.runs import play, resume, same, table

FEDAVG = {"name": "fedavg", "batch": 32, "epochs": 0, "steps": 3, "momentum": 0.5, "persist_optimizer": True}
DYNAMIC = {"model": "exponential", "kind": "dynamic"}
FIRST = {"close": "first", "first": 3, "partial": "layers"}
UNEQUAL = {"name": "digits", "partition": "dirichlet", "alpha": 5.0}


def values(participation: dict[str, Any], model: str = "mlp", **more: Any) -> dict[str, Any]:
    plain = {"algorithm": FEDAVG, "speed": DYNAMIC, "participation": participation, "data": UNEQUAL}
    return table("fedavg", model, True, **{**plain, **more})


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_in_time_it_is_fedavg(solo: Any, tmp_path: Any, model: str) -> None:
    """To the bit, whatever has computed the last step."""
    late = {"close": "deadline", "deadline": 1e6}
    runs = [
        play(solo, values({**late, "partial": partial}, model), tmp_path / partial, None)
        for partial in ("layers", "discard")
    ]
    same(*runs)


SPACES = {
    "algorithm": {"name": "lg_fedavg", "shared_layers": 2, "batch": 8, "epochs": 0, "steps": 3, "momentum": 0.5},
    "data": {"name": "two_digits", "first": "digits", "second": "digits-4x4"},
}
LATENT = {"name": "latent", "widths": [8], "dimension": 4, "hidden": [6]}


def spaces(participation: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Clients of two feature spaces, whose embeddings are their own."""
    return values(participation, **SPACES, **more) | {"model": LATENT, "clients": 8}


def test_in_time_it_is_lg_fedavg_of_clients_with_other_features(solo: Any, tmp_path: Any) -> None:
    late = {"close": "deadline", "deadline": 1e6}
    runs = [play(solo, spaces({**late, "partial": word}), tmp_path / word, None) for word in ("layers", "discard")]
    same(*runs)


def test_own_layers_advance_where_the_visit_was_complete() -> None:
    job = Job.of(from_table(spaces(FIRST)), None, 1)
    task, shared = job.task, job.algorithm.init_server(job.task)
    chunk = next(chunk for chunk in job.chunks if len(chunk.clients) == 2)  # of one feature space
    ids, begun = chunk.clients, job.enter(chunk)
    visits = Visits(0, ids, np.array([1, 2]), task.federation.train_sizes[ids], np.ones((2, 2)))
    sent: dict[str, int] = {}
    after = drained(
        job.algorithm.client(task, shared, begun, visits),
        lambda message: sent.update({name: len(weight) for name, (_, weight) in message.items()}),
    )
    assert sent == {"loss": 2, "head.weight": 2, "head.bias": 2, "hidden1.weight": 1, "hidden1.bias": 1}
    assert [name.partition(".")[0] for name in sent] == ["loss", *2 * ["head"], *2 * ["hidden1"]]
    for name, value in after.items():
        assert [torch.equal(value[row], begun[name][row]) for row in range(2)] == [False, True], name


def test_without_a_deadline_nothing_stands_around_the_method() -> None:
    job = Job.of(from_table(values({"close": "all", "partial": "layers"})), None, 1)
    assert type(job.algorithm) is FedAvg
    assert job.planner.whole


def job_of(steps: int, **participation: Any) -> Job:
    algorithm = {"name": "fedavg", "batch": 0, "lr": 0.5, "epochs": 0, "steps": steps}
    model = {"name": "mlp", "hidden": [4]}
    config = from_table(values(participation or FIRST, algorithm=algorithm, clients=3) | {"model": model})
    config.check(None)
    return Job.of(config, None, 1)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_layer_is_what_all_steps_have_changed_of_it(steps: int) -> None:
    """By plain steps of autograd; client 2 comes to the last layer only, client 0 is not complete either."""
    job = job_of(steps)
    task, shared = job.task, job.algorithm.init_server(job.task)
    clients, depth = np.array([1, 2]), np.array([1, 2])
    visits = Visits(0, clients, depth, task.federation.train_sizes[clients], np.ones((2, 2)))
    sent: dict[str, Any] = {}
    for message in job.algorithm.client(task, shared, {}, visits):
        sent |= message
    assert {name: len(weight) for name, (_, weight) in sent.items()} == {
        **{"loss": 2, "fc2.weight": 2, "fc2.bias": 2},
        **{"fc1.weight": 1, "fc1.bias": 1},
    }
    for row, client in enumerate(clients.tolist()):
        params = {name: value.clone().requires_grad_() for name, value in shared.items()}
        data, losses = task.federation.client(client), []
        x, y = torch.from_numpy(data.train_features).flatten(1), torch.from_numpy(data.train_labels)
        for _ in range(steps):
            hidden = torch.relu(torch.nn.functional.linear(x, params["fc1.weight"], params["fc1.bias"]))
            output = torch.nn.functional.linear(hidden, params["fc2.weight"], params["fc2.bias"])
            loss = torch.nn.functional.cross_entropy(output, y)
            losses.append(float(loss.detach()))
            gradients = torch.autograd.grad(loss, list(params.values()))
            params = {
                name: (value - 0.5 * gradient).detach().requires_grad_()
                for (name, value), gradient in zip(params.items(), gradients)
            }
        assert float(sent["loss"][0][row]) == pytest.approx(np.mean(losses), rel=1e-5)
        for name, (value, weight) in sent.items():
            if name != "loss" and row < len(weight):
                change = params[name].detach() - shared[name]
                torch.testing.assert_close(value[row], change, rtol=1e-4, atol=1e-6)
                assert float(weight[row]) == len(y)


def test_momentum_is_kept_of_the_layers_that_were_reached() -> None:
    job = Job.of(from_table(values(FIRST, clients=3)), None, 1)
    task, shared, clients = job.task, job.algorithm.init_server(job.task), np.array([1, 2])
    personal = {name: torch.ones(2, *value.shape) for name, value in shared.items()}
    visits = Visits(0, clients, np.array([1, 2]), task.federation.train_sizes[clients], np.ones((2, 2)))
    work = job.algorithm.client(task, shared, personal, visits)
    after = drained(work, lambda message: None)
    advanced = {name: (value != 1).flatten(1).any(1).tolist() for name, value in after.items()}
    assert advanced == {
        **{"fc2.weight": [True, True], "fc2.bias": [True, True]},
        **{"fc1.weight": [True, False], "fc1.bias": [True, False]},
    }


@pytest.mark.parametrize(("steps", "expected"), [(1, [1.0, 0.5]), (4, [1.0, 0.875])])
def test_a_layer_is_ready_late_in_a_visit(steps: int, expected: list[float]) -> None:
    assert job_of(steps).planner.work_fractions.tolist() == expected


def test_layers_count_and_runs_are_resumed_and_replayed(solo: Any, tmp_path: Any) -> None:
    given = values({"close": "deadline", "deadline": 0.8, "partial": "layers"}, rounds=6)
    whole = play(solo, given, tmp_path / "whole", None)
    assert {1, 2, 3} <= set(store.open_run(whole)["depth"].values.flatten())
    half = play(solo, given, tmp_path / "half", None)
    resume(solo, half, 4, None)
    same(half, whole)
    trace = {**given, "speed": {"model": "trace", "run": str(whole)}}
    same(play(solo, {**trace, "participation": {"partial": "layers"}}, tmp_path / "again", None), whole)


@pytest.mark.mpi
def test_any_number_of_ranks_gives_the_same(world: Any, shared_dir: Any) -> None:
    run = play(world, values(FIRST), shared_dir / "run", world.comm)
    alone = play(world, values(FIRST), shared_dir / "alone", None)
    if world.rank == 0:
        same(run, alone)


@pytest.mark.mpi
def test_so_it_does_of_clients_with_other_features(world: Any, shared_dir: Any) -> None:
    given = spaces({**FIRST, "deadline": 1.5}, doubling={"when": "rounds", "rounds": 2})
    run, alone = (play(world, given, shared_dir / f"spaces{comm is None}", comm) for comm in (world.comm, None))
    if world.rank == 0:
        same(run, alone)


def test_which_methods_can() -> None:
    assert LgFedAvg(epochs=0, steps=2).splits_last
    assert not LgFedAvg(epochs=0, steps=2, newcomer="averaged").splits_last
    assert FedAvg(epochs=0, steps=2).splits_last
    assert with_last_step(FedAvg(epochs=0, steps=2)).layerwise
    for method in (FedAvg(), FedAvg(epochs=0, steps=2, optimizer="adam"), FedProx(epochs=0, steps=2, mu=0.1), Salf()):
        assert not method.splits_last
    assert not FedNova(epochs=0, steps=2).splits_last
    with pytest.raises(
        UsageError, match=r"^participation\.partial = 'layers': algorithm\.name = 'fedavg' .*epochs = 0"
    ):
        from_table(values(FIRST, algorithm={"name": "fedavg"})).check_values()
    from_table(values({**FIRST, "partial": "auto"}, algorithm={"name": "fedavg"})).check_values()
