"""Rounds on a device that is not the CPU, where there is none: nothing mixed, and nothing waited for unseen."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import vmap

import hpcfl
from helpers.runs import after_each_round
from hpcfl import config as configs
from hpcfl.algorithms import algorithms
from hpcfl.base.device_copy import behind, on_host
from hpcfl.engine import chunk_batches
from hpcfl.engine.job import Job, Progress
from hpcfl.engine.loop import evaluate, step
from hpcfl.engine.record import Record
from hpcfl.engine.simulated import Simulated
from hpcfl.launch import host as launched
from hpcfl.learning.optim import Optimizer
from hpcfl.learning.task import Task
from hpcfl.mpi.transport import Transport, arrays
from hpcfl.schedule.plan import Plan
from hpcfl.sums import message
from hpcfl.sums.message import ExactSums
from hpcfl.testing import fake_device
from hpcfl.testing.runs import alike, play, resume, table
from hpcfl.testing.test_algorithms import values
from hpcfl.testing.world import World

pytestmark = pytest.mark.skipif(not fake_device.available(), reason="this torch has no back ends in Python")
if fake_device.available():  # as tests are collected: torch counts its devices in a process's first backward pass
    fake_device.registered()
ROUNDS = 3
REPLAYED = 3  # rounds after which steps are replayed: one is taken, one recorded, one compared


@pytest.fixture
def fake() -> Iterator[str]:
    torch.__future__.set_swap_module_params_on_conversion(True)  # as on a GPU, tied parameters stay tied
    yield fake_device.registered()
    torch.__future__.set_swap_module_params_on_conversion(False)


# the fake device itself


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "mixed": lambda x: x + torch.ones(3),
    "mixed-in-place": lambda x: x.mul_(torch.ones(3)),
    "mixed-under-vmap": lambda x: vmap(lambda a, b: a * b)(x, torch.ones(3)),
    "host-first": lambda x: torch.ones(3) @ x,
    "index-of-it": lambda x: torch.ones(3)[x.long()],
    "numpy": lambda x: x.numpy(),
    "as-array": lambda x: np.asarray(x),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_gpu_refuses_is_refused(what: str, fake: str) -> None:
    with pytest.raises(RuntimeError):
        REFUSED[what](torch.ones(3).to(fake, non_blocking=True))


COUNTED: dict[str, tuple[Callable[[torch.Tensor], object], int]] = {
    "add": (lambda x: (2 * x + torch.tensor(1.0)).sum(), 0),
    "float": (lambda x: float(x.sum()), 1),
    "if": (lambda x: bool(x.any()), 1),
    "cpu": (lambda x: x.cpu(), 1),
    "tolist": (lambda x: x.tolist(), 1),
    "mask": (lambda x: x[x > 0], 1),
    "where": (lambda x: torch.where(x > 0, x, 0.0), 0),
    "index": (lambda x: x[torch.zeros(1, dtype=torch.int64, device=x.device)], 0),
    "index-from-the-host": (lambda x: x[torch.zeros(1, dtype=torch.int64)], 1),
    "to-it": (lambda x: torch.ones(3).to(x.device), 1),
    "to-it-behind": (lambda x: torch.ones(3).to(x.device, non_blocking=True), 0),
    "new": (lambda x: x.new_tensor([1.0]), 1),
    "double": (lambda x: x.double(), 0),
}


@pytest.mark.parametrize("what", COUNTED)
def test_waits_are_counted(what: str, fake: str) -> None:
    x = torch.ones(3).to(fake, non_blocking=True)
    made, waits = COUNTED[what]
    with fake_device.counted() as found:
        made(x)
    assert found.total() == waits


def test_what_is_under_way_is_not_there_before_it_is_waited_for(fake: str) -> None:
    x = torch.ones(3).to(fake, non_blocking=True)
    room = behind(x)
    assert room.isnan().all()
    assert [part.tolist() for part in on_host([x, torch.zeros(1)])] == [[1, 1, 1], [0]]
    assert room.tolist() == [1, 1, 1]


LAUNCHED: dict[str, tuple[Callable[[torch.Tensor], object], int]] = {
    "add": (lambda x: x.add_(1), 1),
    "view": (lambda x: x.view(3, 1).transpose(0, 1)[0], 0),
    "two": (lambda x: (x + 1).sum(), 2),
    "memory": (lambda x: torch.empty(3, device=x.device), 0),
    "several": (lambda x: torch._foreach_add_([x, x.clone()], 1), 2),
}


@pytest.mark.parametrize("what", LAUNCHED)
def test_launches_are_counted(what: str, fake: str) -> None:
    x = torch.ones(3).to(fake, non_blocking=True)
    made, launches = LAUNCHED[what]
    with fake_device.launched() as found:
        made(x)
    assert found.total() == launches


def test_eigenvectors_have_other_signs(fake: str) -> None:
    matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    values, vectors = torch.linalg.eigh(matrix.to(fake))
    own, signs = torch.linalg.eigh(matrix)
    assert torch.equal(values.cpu(), own)
    assert torch.equal(vectors.cpu(), -signs)


def test_gradients_and_views(fake: str) -> None:
    x = torch.arange(6.0).to(fake).view(2, 3)
    x[0].add_(1)
    w = torch.ones(3, device=fake, requires_grad=True)
    (gradient,) = torch.autograd.grad((x @ w).square().sum(), [w])
    own, v = torch.tensor([[1.0, 2, 3], [3, 4, 5]]), torch.ones(3, requires_grad=True)
    (expected,) = torch.autograd.grad((own @ v).square().sum(), [v])
    assert gradient.device.type == "fake"
    assert torch.equal(gradient.cpu(), expected)


# rounds


def played(given: dict[str, Any], device: str) -> tuple[Job, Progress, list[Counter[str]], ExactSums, Plan]:
    """Some rounds by one process: the job, where they led, the waits of each, the last sums and plan."""
    job = Job.of(configs.from_table(given), None, 1, device)
    now, waits = job.begin(0), []
    rounds = Simulated(job, Transport(), 0)
    while now.round < ROUNDS:
        record = Record.open()
        with fake_device.counted() as counted:
            rounds.release(now, record)
            plan, record.sums = rounds.exchange(now, record)
            step(job, now, record, plan)
        now.round += 1
        waits.append(counted)
    return job, now, waits, record.sums, plan


def equal(one: Progress, other: Progress) -> None:
    """Assert that two runs have come to the same state, on the CPU and elsewhere, but for the rounding of sums.

    The CPU rounds the sum of a chunk to 2^-46, or 2^-80 in double precision, a device each product.
    """
    for left, right in ((one.shared, other.shared), *((one.personal[n], other.personal[n]) for n in one.personal)):
        ours, theirs = arrays(left), arrays(right)
        assert ours.keys() == theirs.keys()
        for name in ours:
            room = {"rtol": 2e-6, "atol": 1e-7} if ours[name].dtype == np.float32 else {"rtol": 1e-12, "atol": 1e-14}
            np.testing.assert_allclose(ours[name], theirs[name], err_msg=name, **room)


MORE = {
    "fedhenn": {"masked_select": 5, "_local_scalar_dense": 3},  # triangles of kernels; whose kernel this is
    "linear_fedrep": {"_to_copy": 1},  # the distance that is recorded
}
"""Waits of a round beside one per chunk, to judge what it sends, and one for the server's step and the loss."""


@pytest.mark.parametrize("name", sorted(algorithms()))
def test_a_round_on_a_device(name: str, fake: str) -> None:
    given = values(name) | ({"speed": {"model": "none"}} if name == "salf" else {})
    on_cpu = played(given, "cpu")[1]
    job, now, waits, sums, plan = played(given, fake)
    equal(on_cpu, now)
    there = [*now.shared.values(), *(value for state in now.personal.values() for value in state.values())]
    there += [part for client in job.task._samples for part in job.task.samples(client)[:4]]
    there += [sums.total(block) for block in sums]
    assert {value.device.type for value in there} <= {"fake"}
    if name in ("decoupled_diloco", "flic", "fedlrgd"):
        return  # these look at what they compute, to decide what to compute, or take further sums on the host
    if name == "linear_fedrep":
        waits[-1].pop("equal", None)  # norms of its rotations may be as before, to the last bit
    if job.task.slots is not None:
        waits[-1].pop("equal", None)  # a replay is compared with steps
    visited = sum(bool(len(part.rows(each.clients))) for part in plan.parts() for each in job.chunks)
    assert waits[-1] == Counter({"synchronize": visited + 1} | MORE.get(name, {}))


def test_what_looks_at_its_numbers_does_not_look_more_often(fake: str) -> None:
    """FLIC by classes in a batch, by anchors and by iterations of barycenters; FedLRGD by steps of its safeguard."""
    most = {"flic": 57, "fedlrgd": 8}
    assert {name: max(each.total() for each in played(values(name), fake)[2]) for name in most} == most


MODELS: dict[str, dict[str, Any]] = {
    "cnn": {"name": "cnn", "channels": [3, 4], "kernel": 3, "padding": "same", "hidden": [12], "dropout": 0.2},
    "part": {"name": "cnn", "channels": [3], "kernel": 3, "hidden": [12], "train": ["conv1.bias", "fc1.*"]},
    "batch-norm": {"name": "helpers.modules:Normed"},
    "drawing": {"name": "helpers.modules:Attention"},
    "tied": {"name": "helpers.modules:Tied"},
    "branch": {"name": "helpers.modules:Branch"},
}


@pytest.mark.parametrize(
    ("model", "method"), [*((model, method) for model in MODELS for method in ("fedavg", "salf")), ("cnn", "fedrep")]
)
def test_models_on_a_device(model: str, method: str, fake: str) -> None:
    given = table(method if method != "fedrep" else "fedavg", "mlp", True)
    given |= {"model": MODELS[model], "algorithm": {"name": method, "batch": 16}}
    on_cpu = played(given, "cpu")[1]
    job, now, waits, _, _ = played(given, fake)
    equal(on_cpu, now)
    assert waits[-1].total() == waits[-1]["synchronize"] <= len(job.chunks) + 1


# what a step and a round cost there


def perceptron(clients: int, steps: int, **more: Any) -> dict[str, Any]:
    """A config of local steps on a perceptron with one hidden layer, all batches full."""
    method = {"name": "fedavg", "epochs": 0, "steps": steps, "batch": 4}
    given = {"rounds": ROUNDS, "clients": clients, "seed": 1, "algorithm": method, "data": {"name": "digits"}}
    return given | {"model": {"name": "mlp", "hidden": [8]}, "speed": {"model": "none"}} | more


def cost(given: dict[str, Any], device: str) -> tuple[int, int]:
    """How many launches and how many waits the last of some rounds takes: in the first ones ways are tried."""
    job = Job.of(configs.from_table(given), None, 1, device)
    now = job.begin(0)
    rounds = Simulated(job, Transport(), 0)
    for _ in range(REPLAYED + 1):
        record = Record.open()
        with fake_device.launched() as launches, fake_device.counted() as waits:
            plan, record.sums = rounds.exchange(now, record)
            step(job, now, record, plan)
        now.round += 1
    return launches.total(), waits.total()


def test_a_step_of_a_stack_takes_few_launches(fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fake_device._Device, "CUDAGraph")
    four, five = (cost(perceptron(24, steps), fake)[0] for steps in (4, 5))
    assert five - four <= 18


def test_launches_and_waits_of_a_round_do_not_depend_on_how_many_clients_there_are(fake: str) -> None:
    """Eight chunks of 3 and of 8 are computed and summed up at once; a wait for their norms, one for the server's."""
    few, many = (cost(perceptron(clients, 2), fake) for clients in (24, 64))
    assert few == many
    assert few[1] == 2


@pytest.mark.parametrize("limit", [message.RANGE, 1.0])
def test_they_do_not_depend_on_how_large_sums_are(limit: float, fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on the number of chunks: with 1.0 no sum fits into whole numbers."""
    monkeypatch.setattr(message, "RANGE", limit)
    few, many = (cost(perceptron(clients, 2), fake) for clients in (100, 1000))
    assert few == many
    assert few[1] == 2


def test_an_evaluation_waits_once_for_the_clients_and_once_for_the_server(fake: str) -> None:
    job = Job.of(configs.from_table(perceptron(24, 2, batch_clients=3)), None, 1, fake)
    now, rounds = job.begin(0), Simulated(job, Transport(), 0)
    evaluate(job, rounds, now, Record.open())  # ways are tried
    with fake_device.counted() as waits:
        scores = evaluate(job, rounds, now, Record.open())
    assert waits.total() == 2
    assert job.task.server_test is not None
    assert job.task.server_test[0].device.type == "fake"
    cpu = Job.of(configs.from_table(perceptron(24, 2, batch_clients=3)), None, 1, "cpu")
    alike = evaluate(cpu, Simulated(cpu, Transport(), 0), cpu.begin(0), Record.open())
    for name, value in scores.items():
        np.testing.assert_array_equal(value, alike[name], name)


def test_visits_of_several_chunks_send_one_sum(fake: str) -> None:
    """Sums of whole numbers have no chunks: one by one, chunk by chunk and all at once come to the same bits."""
    runs = [played(perceptron(24, 2, batch_clients=size), fake)[1].shared for size in ("auto", 3, 8, 24)]
    for other in runs[1:]:
        for name, value in runs[0].items():
            assert torch.equal(value.cpu(), other[name].cpu()), name


def test_fewer_are_computed_at_once_where_very_many_are_computed_otherwise(
    fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight chunks of 3: half of 24 is tried next, then 6, which is not too many; the rest of a round is by chunks."""
    monkeypatch.setattr(Job, "slots", lambda _: None)
    widths = list[int]()
    joined, same = chunk_batches.Bundles._joined, chunk_batches.same

    def noted(self: chunk_batches.Bundles, parts: Any) -> Any:
        widths.append(sum(len(part.visits.clients) for part in parts))
        return joined(self, parts)

    monkeypatch.setattr(chunk_batches.Bundles, "_joined", noted)
    monkeypatch.setattr(chunk_batches, "same", lambda one, other: widths[-1] <= 6 and same(one, other))
    played(perceptron(24, 1), fake)
    assert widths == [24, 12, 6, 6, 6, 6, 6, 6]


@pytest.mark.parametrize("model", ["mlp", "cnn", "batch-norm"])
def test_nothing_sorts_within_a_step(model: str, fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Optimizer.step

    def strict(*given: Any) -> torch.Tensor:
        with fake_device.nothing_sorted():
            return taken(*given)

    monkeypatch.setattr(Optimizer, "step", strict)
    given = perceptron(8, 2) if model == "mlp" else perceptron(8, 2, model=MODELS[model] | {"dropout": 0.0})
    if model == "batch-norm":
        given["model"] = MODELS[model]
    assert played(given, fake)[1].round == ROUNDS


def test_what_sorts_within_a_step_is_found(fake: str) -> None:
    rows, index = torch.ones(3).to(fake), torch.zeros(3, dtype=torch.int64).to(fake)
    with fake_device.nothing_sorted(), pytest.raises(RuntimeError, match=r"scatter_add_.*sorts"):
        rows.scatter_add_(0, index, rows.clone())


# whole runs


def on(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Let runs compute on a device whose name no config knows."""
    monkeypatch.setattr(launched, "chosen", lambda wanted, key, number: device)


def test_a_run_with_tests_and_checkpoints(
    fake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = table("salf", "mlp", True)
    expected = hpcfl.run(given, out=tmp_path / "cpu")
    on(monkeypatch, fake)
    strict: list[bool] = []
    after_each_round(monkeypatch, lambda done, _: strict.append(torch.are_deterministic_algorithms_enabled()))
    found = hpcfl.run(given, out=tmp_path / "fake")
    alike(expected.folder, found.folder)
    assert json.loads(found.data.attrs["devices"]) == [fake]
    assert strict == [True] * given["rounds"]
    assert not torch.are_deterministic_algorithms_enabled()
    resume(World(alone=True), expected.folder, 2, None)
    said = "began on cpu and goes on with fake:0: last bits will differ from one whole run's"
    assert f"hpcfl: '{expected.folder}' {said}\n" in capsys.readouterr().err
    strict.clear()
    hpcfl.run({**given, "deterministic": False}, out=tmp_path / "free")
    assert strict == [False] * given["rounds"]


@pytest.mark.mpi
@pytest.mark.parametrize("method", ["fedavg", "salf", "flic"])
def test_ranks_on_a_device(method: str, world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_device.registered()
    given = values(method) | {"ranks_per_device": 64}
    alone = play(world, given, shared_dir / "cpu", None)
    on(monkeypatch, fake)
    alike(alone, play(world, given, shared_dir / "fake", world.comm))


def test_a_trial_asks_for_the_same_bits_where_the_device_has_to_give_them(
    fake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of a GPU's operations round otherwise each time, unless `deterministic` forbids them."""
    on(monkeypatch, fake)
    plain, times = Task.gradients, count()

    def rounded(self: Task, *given: Any) -> Any:
        found, losses = plain(self, *given)
        return {name: value * (1 + 1e-6 * next(times)) for name, value in found.items()}, losses

    monkeypatch.setattr(Task, "gradients", rounded)
    given = table("fedavg", "mlp", True, rounds=1) | {"model": {"name": "helpers.modules:Residual"}}
    hpcfl.run(given | {"deterministic": False}, out=tmp_path / "free", quiet=True)
    with pytest.raises(hpcfl.RunError, match="gradients of the same batch differ when computed again"):
        hpcfl.run(given, out=tmp_path / "strict", quiet=True)
