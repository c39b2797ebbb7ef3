"""Fillings of slots and their replays, on a device that is none: what they compute, and what cannot be recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hpcfl
from hpcfl import config as configs
from hpcfl.engine.job import Job, Progress
from hpcfl.engine.loop import step
from hpcfl.engine.record import Record
from hpcfl.engine.simulated import Simulated
from hpcfl.learning import fused, slots
from hpcfl.learning.batches import Visits
from hpcfl.learning.task import Task
from hpcfl.mpi.transport import Transport, arrays
from hpcfl.testing import fake_device

pytestmark = pytest.mark.skipif(not fake_device.available(), reason="this torch has no back ends in Python")
if fake_device.available():  # as tests are collected: torch counts its devices in a process's first backward pass
    fake_device.registered()

ROUNDS = 6  # steps are taken in the first, recorded in the second, compared in the third, and replayed from then on
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"name": "mlp", "hidden": [8]},
    "dropout": {"name": "mlp", "hidden": [8], "dropout": 0.3},
    "cnn": {"name": "cnn", "channels": [3, 4], "kernel": 3, "padding": "same", "hidden": [6], "dropout": 0.2},
    "batch-norm": {"name": "helpers.modules:Normed"},
    "attention": {"name": "helpers.modules:Attention"},
}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"mu": 0.1},
    "scaffold": {},
    "lg_fedavg": {},
    "local": {},
    "momentum": {"name": "fedavg", "momentum": 0.9},
    "adam": {"name": "fedavg", "optimizer": "adam", "lr": 0.01},
    "weight decay": {"name": "fedavg", "weight_decay": 0.1},
    "persistent": {"name": "fedavg", "momentum": 0.9, "persist_optimizer": True},
}


@pytest.fixture(autouse=True)
def fake() -> Iterator[str]:
    torch.__future__.set_swap_module_params_on_conversion(True)  # as on a GPU, tied parameters stay tied
    yield fake_device.registered()
    torch.__future__.set_swap_module_params_on_conversion(False)


def given(model: str = "mlp", method: str = "fedavg", clients: int = 6, **more: Any) -> dict[str, Any]:
    """A config whose clients have equal numbers of samples; their last batches are not full."""
    algorithm = {"name": method, "batch": 8, "epochs": 1, **METHODS.get(method, {})}
    base = {"rounds": ROUNDS, "clients": clients, "seed": 2, "speed": {"model": "none"}, "model": MODELS[model]}
    return {**base, "algorithm": algorithm, "data": {"name": "test_slots:Equal"}, **more}


class Equal(hpcfl.Source):
    """Clients of 20 samples each."""

    def check(self, clients: int, data_dir: Any) -> hpcfl.Header:
        return hpcfl.Header(clients, 20 * clients, 0, ((1, 8, 8),), 10)

    def federate(self, clients: int, seed: int, data_dir: Any) -> hpcfl.Federation:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((clients, 20, 1, 8, 8)).astype(np.float32)
        y = rng.integers(0, 10, (clients, 20))
        parts = [hpcfl.ClientData(x[i], y[i], x[i, :0], y[i, :0]) for i in range(clients)]
        return hpcfl.InMemory.of(parts, 10)


def played(config: dict[str, Any], device: str, rounds: int = ROUNDS) -> tuple[Job, Progress, list[tuple[int, int]]]:
    """Return the job after some rounds by one process, where they led, and each one's launches and waits."""
    job = Job.of(configs.from_table(config), None, 1, device)
    now, simulated = job.begin(0), Simulated(job, Transport(), 0)
    costs = []
    for _ in range(rounds):
        record = Record.open()
        with fake_device.launched() as launches, fake_device.counted() as waits:
            plan, record.sums = simulated.exchange(now, record)
            step(job, now, record, plan)
        now.round += 1
        costs.append((launches.total(), waits.total()))
        gradients.append(record.gradients)
    return job, now, costs


gradients: list[int] = []
"""Of one sample, in each round that was `played`."""


def states(now: Progress) -> list[np.ndarray]:
    return [value for state in (now.shared, *now.personal.values()) for value in arrays(state).values()]


def replayed(job: Job) -> bool:
    assert job.task.slots is not None
    recorded = job.task.slots._recorded.values()
    return not job.task.slots.why and any(each is not None and each.sure for each in recorded)


def check_alike(config: dict[str, Any], fake: str) -> Job:
    """Assert that a run on the device, which ends in replays, is that on the CPU up to rounding."""
    gradients.clear()
    job, there, _ = played(config, fake)
    here = played(config, "cpu")[1]
    for one, other in zip(states(there), states(here), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert gradients[:ROUNDS] == gradients[ROUNDS:]
    return job


@pytest.mark.parametrize("model", MODELS)
def test_replays_compute_what_steps_do(model: str, fake: str) -> None:
    assert replayed(check_alike(given(model), fake))


@pytest.mark.parametrize("method", METHODS)
def test_methods_are_replayed(method: str, fake: str) -> None:
    assert replayed(check_alike(given("mlp", method), fake))


@pytest.mark.parametrize("batch_clients", [False, 2, 4])
def test_fillings_of_any_width_are_replayed(batch_clients: int | bool, fake: str) -> None:
    """4: a round of 6 clients has a filling with two empty slots."""
    job = check_alike(given(batch_clients=batch_clients), fake)
    assert replayed(job)
    assert job.task.slots is not None
    assert job.task.slots.width == (batch_clients or 1)


def test_who_comes_may_change(fake: str) -> None:
    assert replayed(check_alike(given(participation={"invite": "uniform", "size": 4}), fake))


def test_a_visit_does_not_depend_on_its_neighbours(fake: str) -> None:
    """Nor on whether it is replayed: to the bit."""
    job, now, _ = played(given("dropout", batch_clients=4), fake, ROUNDS)
    task, method = job.task, job.algorithm
    assert replayed(job)

    def after(clients: list[int]) -> dict[str, Tensor]:
        ids = np.array(clients)
        visits = Visits(ROUNDS, ids, np.ones(len(ids), int), np.full(len(ids), 20), np.ones((len(ids), 1)))
        params = task.replicate(now.shared, visits)
        assert task.slots is not None
        task.slots.trained(method.train, task, now.shared, params, {}, visits, method.fixed(ROUNDS))  # type: ignore[attr-defined]
        return {name: value.held.clone() for name, value in params.items()}  # type: ignore[attr-defined]

    alone, several = after([3]), after([5, 3, 0, 1])
    for name, value in alone.items():
        assert torch.equal(value[0], several[name][1]), name


def test_launches_of_a_round_depend_on_neither_steps_nor_clients(fake: str) -> None:
    few, many = (
        played(given(clients=clients, algorithm={"name": "fedavg", "batch": batch}), fake)[2][-1]
        for clients, batch in ((4, 20), (40, 5))
    )
    assert few == many
    assert few[0] <= 60
    assert few[1] == 2


# what cannot be recorded, or must not


def refused(monkeypatch: pytest.MonkeyPatch, fake: str, loss: Any) -> str:
    """Return why a run with another loss is not replayed; it is as on the CPU nevertheless."""
    plain = Task.losses
    monkeypatch.setattr(Task, "losses", lambda self, params, batch: loss(plain(self, params, batch), batch))
    monkeypatch.setattr(fused.Fused, "of", lambda *_: None)
    job = check_alike(given(), fake)
    assert job.task.slots is not None
    assert not replayed(job)
    return job.task.slots.why


def test_a_number_that_the_host_reads_is_not_recorded(fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    why = refused(monkeypatch, fake, lambda losses, batch: losses * (1 + 0 * float(losses.detach()[0])))
    assert why == ("its steps cannot be recorded (_local_scalar_dense: what the host waits for cannot be recorded)")


def test_a_copy_from_the_host_is_not_recorded(fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    why = refused(
        monkeypatch,
        fake,
        lambda losses, batch: losses * torch.full((1,), 2.0).to(losses.device, non_blocking=True),
    )
    assert why == "its steps cannot be recorded (a copy between host and device cannot be recorded)"


def test_a_number_that_changes_by_round_is_found(fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(monkeypatch, fake, lambda losses, batch: losses * (1 + batch.key.round)) == (
        "a replay of the steps differs from them"
    )


def test_a_step_size_that_falls_is_not_replayed(fake: str) -> None:
    algorithm = {"name": "fedavg", "batch": 8, "decay": 0.5}
    assert not replayed(check_alike(given(algorithm=algorithm), fake))


def test_a_tensor_that_is_replaced_instead_of_filled_is_found(fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one forgets that a graph works on the tensors that it was recorded with."""

    def replacing(self: slots.Recorded, inputs: list[Tensor], drawn: Any) -> list[Tensor]:
        self.inputs = inputs
        self.graph.replay()
        return self.outputs

    monkeypatch.setattr(slots.Recorded, "replayed", replacing)
    job, *_ = played(given(), fake)
    assert job.task.slots is not None
    assert job.task.slots.why == "a replay of the steps differs from them"


def test_what_is_recorded_is_not_computed(fake: str) -> None:
    graph, x = fake_device._Graph(), torch.ones(3).to(fake)
    with fake_device._recorded(graph):
        y = x + 1
    assert y.held.isnan().all()  # type: ignore[attr-defined]
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [5, 5, 5]


def test_steps_that_look_at_the_clock_are_taken_one_by_one(fake: str) -> None:
    """In real time visits end between steps."""
    assert Job.of(configs.from_table(given(clock="wall")), None, 2, fake).task.slots is None


def test_unequal_clients_are_computed_by_chunks(fake: str) -> None:
    job = Job.of(
        configs.from_table(
            {
                **given(clients=7),
                "data": {"name": "digits", "partition": "dirichlet", "sizes": "log-normal", "spread": 0.5},
            }
        ),
        None,
        1,
        fake,
    )
    assert len(set(job.task.federation.train_sizes.tolist())) > 1
    assert job.task.slots is None
