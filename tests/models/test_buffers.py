"""Buffers that steps change: averaged, kept, or a client's own; beside a loop in plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hpcfl
from helpers.toys import Arriving, Rounds, federation, full_batch, planned, visits_of
from hpcfl.algorithms import Algorithm
from hpcfl.algorithms.buffered import with_buffers
from hpcfl.algorithms.fedasync import FedAsync
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.fedrep import FedRep
from hpcfl.algorithms.salf import Salf
from hpcfl.base.errors import UsageError
from hpcfl.commands.cli import main
from hpcfl.learning import batchnorm
from hpcfl.learning.config import TaskConfig
from hpcfl.learning.evaluate import client_scores
from hpcfl.learning.task import Task
from hpcfl.models import Model, model_class
from hpcfl.schedule.participation import Staleness
from hpcfl.testing.runs import play, resume, same, table, toml

SIZES, SHAPE = [7, 4, 9], (1, 4, 4)
NORMED, COUNTER = "helpers.modules:Normed", "helpers.modules:Counter"
COUNT, MEAN, DEVIATION = "bn1.num_batches_tracked", "bn1.running_mean", "bn2.running_var"
CLOSE = {"atol": 1e-6, "rtol": 1e-5}
ALL = [f"bn{n}.{name}" for n in (1, 2) for name in ("running_mean", "running_var", "num_batches_tracked")]


def task_of(buffers: Any = "mean", name: str = NORMED) -> Task:
    return Task(
        model_class(name).from_table({"name": name}, "model"),
        federation(SIZES, shape=SHAPE),
        0,
        kind=TaskConfig(buffers=buffers),
    )


def rounds(method: Algorithm, buffers: Any = "mean", per_chunk: int | None = None) -> Rounds:
    task = task_of(buffers)
    return Rounds(with_buffers(method, task), task, per_chunk)


def trained(task: Task, client: int, lr: float, round_: int = 0, start: dict[str, Tensor] | None = None) -> nn.Module:
    """One pass in plain PyTorch over a client's batches."""
    net = task.module(task.initial() | (start or {})).train()
    step = torch.optim.SGD(net.parameters(), lr)
    for batch in task.batches(visits_of(task, [client], round_=round_), 4, epochs=1):
        size = batch.sample_counts()[0]
        step.zero_grad()
        nn.functional.cross_entropy(net(batch.x[0, :size]), batch.y[0, :size]).backward()
        step.step()
    return net


@pytest.mark.parametrize("per_chunk", [1, 3])
def test_the_server_takes_their_mean(per_chunk: int) -> None:
    own = rounds(FedAvg(lr=0.1, batch=4), per_chunk=per_chunk)
    task = own.job.task
    for round_ in range(2):
        states = [trained(task, client, 0.1, round_, own.state).state_dict() for client in range(3)]
        own.step(planned([1, 1, 1], 3, round_))
        for name in [*task.initial(), MEAN, DEVIATION]:
            wanted = sum(size * state[name].double() for size, state in zip(SIZES, states)) / sum(SIZES)
            torch.testing.assert_close(own.state[name].double(), wanted, **CLOSE)
    assert float(own.state[COUNT]) == 3 + 3  # of 2, 1 and 3 steps a round
    module = task.module(own.state)
    assert module.bn1.num_batches_tracked.dtype == torch.int64
    assert module.bn1.num_batches_tracked == 6


def test_fedasync_mixes_them_as_the_rest() -> None:
    """w ← (1 − α s) w + α s w_i, of client 0 twice, then of client 1, which is two versions old: s = 3^−½."""
    task = task_of()
    method = with_buffers(FedAsync(lr=0.1, batch=4, alpha=0.5, mu=0.0), task)
    own = Arriving(method, task, [1.0, 2.5, 9.0], Staleness(weight="polynomial"), buffer=1)
    versions = [own.state]
    for client, version, share in ((0, 0, 0.5), (0, 1, 0.5), (1, 0, 0.5 * 3**-0.5)):
        before, found = own.state, trained(task, client, 0.1, version, versions[version]).state_dict()
        own.step()
        versions.append(own.state)
        for name in [*task.initial(), MEAN, DEVIATION]:
            wanted = (1 - share) * before[name].double() + share * found[name].double()
            torch.testing.assert_close(own.state[name].double(), wanted, **CLOSE)


@pytest.mark.parametrize("per_chunk", [1, 3])
def test_a_buffer_may_be_another_tensor_after_a_step(per_chunk: int) -> None:
    task = task_of(name="helpers.modules:Centred")
    own = Rounds(with_buffers(FedAvg(lr=0.1, batch=0), task), task, per_chunk)
    assert task.whole.found.computing == "vmapped"
    for round_ in range(2):
        means = [0.1 * full_batch(task, client)[0].flatten(1, -2).mean((0, 1)) for client in range(3)]
        step = sum(size * mean for size, mean in zip(SIZES, means)) / sum(SIZES)
        before = own.state["centre"]
        own.step(planned([1, 1, 1], 1, round_))
        torch.testing.assert_close(own.state["centre"], 0.9 * before + step, **CLOSE)


@pytest.mark.parametrize("per_chunk", [1, 2, 3])
def test_integers_rise_to_the_largest(per_chunk: int) -> None:
    task = task_of(name=COUNTER)
    own = Rounds(with_buffers(FedAvg(lr=0.1, batch=4), task), task, per_chunk)
    own.step(planned([1, 1, 5], 3))  # the visit of most samples does not count
    assert own.state["seen"].tolist() == [7, 0]
    own.step(planned([1, 1, 1], 3, 1))
    assert own.state["seen"].tolist() == [7 + 9, 0]
    own.step(planned([5, 5, 5], 3, 2))
    assert own.state["seen"].tolist() == [16, 0]
    assert task.module(own.state).seen.tolist() == [16, 0]


def test_salf_sends_them_with_the_loss() -> None:
    own = rounds(Salf(lr=0.1, batch=3))
    task = own.job.task
    own.step(planned([1, 3, 4], 3))  # the last one comes too late for any layer
    means = []
    for client in range(2):
        net = task.module(task.initial()).train()
        net(next(task.batches(visits_of(task, [client]), 3, steps=1)).x[0])
        means.append(net.bn1.running_mean)
    torch.testing.assert_close(own.state[MEAN], (means[0] + means[1]) / 2, **CLOSE)
    assert float(own.state[COUNT]) == 1
    assert list(own.job.layout[0]) == ["loss", *ALL]
    count = own.job.layout[0][COUNT]
    assert (count.size, count.numbers) == (3, 1)  # each client has a place


def test_kept_ones_stay_as_they_were_made() -> None:
    own = rounds(FedAvg(lr=0.1, batch=4), "keep")
    own.step(planned([1, 1, 1], 3))
    assert own.state.keys() == own.job.task.initial().keys()
    module = own.job.task.module(own.state)
    assert not module.bn1.running_mean.any()
    assert (module.bn2.running_var == 1).all()
    mean = rounds(FedAvg(lr=0.1, batch=4))
    mean.step(planned([1, 1, 1], 3))
    assert all(torch.equal(own.state[name], mean.state[name]) for name in own.state)  # steps do not ask for them


def gathered(task: Task, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Statistics as torch accumulates them with equal weights, in batches of one client each."""
    net = task.module(state)
    for part in (net.bn1, net.bn2):
        part.train().momentum = None
        part.reset_running_stats()
    with torch.no_grad():
        for client in range(task.federation.clients):
            x = task.samples(client).x
            for rows in x.tensor_split(-(-len(x) // batchnorm.BATCH)):
                net(rows)
    return dict(net.named_buffers())


def test_static_ones_are_gathered_for_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcfl.learning.batchnorm.BATCH", 4)
    own = rounds(FedAvg(lr=0.1, batch=4), "static", per_chunk=1)
    task, kept = own.job.task, rounds(FedAvg(lr=0.1, batch=4), "keep", per_chunk=1)
    for round_ in range(2):
        own.step(planned([1, 1, 1], 3, round_))
        kept.step(planned([1, 1, 1], 3, round_))
    assert all(torch.equal(own.state[name], kept.state[name]) for name in task.initial())
    assert own.job.layout[0].keys() == {"loss"}
    parts = [batchnorm.client_statistics(task, own.state, np.array([client])) for client in range(3)]
    found = batchnorm.with_statistics(task, own.state, np.concatenate(parts, axis=1))
    wanted = gathered(task, own.state)
    assert wanted[COUNT] == 2 + 1 + 3
    for name in ALL:
        torch.testing.assert_close(found[name].double(), wanted[name].double(), **CLOSE)
    x = torch.randn((2, *SHAPE), generator=torch.Generator().manual_seed(0))
    params = own.job.algorithm.model(task, found, {}, visits_of(task, [0, 1]))
    torch.testing.assert_close(task.forward(params, torch.stack([x, x]))[1], task.module(found)(x), **CLOSE)


def test_static_ones_are_batch_normalisations_of_a_shared_model() -> None:
    with pytest.raises(UsageError, match=r"buffer seen, which is no batch normalisation's: expected task\.buffers"):
        task_of("static", COUNTER)
    with pytest.raises(UsageError, match=r"^task\.buffers: expected 'mean' or 'local' where layers are personal"):
        rounds(FedRep(lr=0.1, batch=4, head_epochs=1, head_layers=2), "static")


def test_ones_own_are_personal() -> None:
    own = rounds(FedAvg(lr=0.1, batch=4), "local")
    task = own.job.task
    own.step(planned([1, 1, 5], 3))  # the last client's visit does not count
    personal = own.now.personal[0]
    assert set(personal) == set(ALL)
    assert own.state.keys() == task.initial().keys()
    assert not own.job.algorithm.evaluates_shared
    for row, client in enumerate(own.job.chunks[0].clients.tolist()):
        wanted = trained(task, client, 0.1).bn2.running_var if client < 2 else torch.ones(4)
        torch.testing.assert_close(personal[DEVIATION][row], wanted, **CLOSE)


def test_a_personal_layers_are_personal() -> None:
    own = rounds(FedRep(lr=0.1, batch=4, head_epochs=1, head_layers=2))
    assert own.job.task.layer_names()[1] == ("inner.weight", "bn2.weight", "bn2.bias")
    assert {name for name in own.now.personal[0] if name in ALL} == set(ALL[3:])
    assert {name for name in own.state if name in ALL} == set(ALL[:3])


@pytest.mark.parametrize("buffers", ["mean", "local", "keep"])
def test_a_test_leaves_no_trace(buffers: Any) -> None:
    own = rounds(FedAvg(lr=0.1, batch=4), buffers)
    task, clients = own.job.task, np.arange(3)
    own.step(planned([1, 1, 1], 3))
    params = own.job.algorithm.model(task, own.state, own.now.personal[0], visits_of(task, clients, round_=1))
    x = torch.randn((3, 5, *SHAPE), generator=torch.Generator().manual_seed(0))
    outputs = task.forward(params, x)
    client_scores(task, params, clients)
    assert torch.equal(task.forward(params, x), outputs)
    for row in range(3):
        plain = task.module({name: value[row] for name, value in params.items()})
        torch.testing.assert_close(outputs[row], plain(x[row]), **CLOSE)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("buffers", "name"), [("mean", NORMED), ("local", NORMED), ("mean", COUNTER), ("static", NORMED)]
)
def test_one_rank_equals_n_and_a_resumed_run(buffers: str, name: str, world: Any, shared_dir: Path) -> None:
    values = table("fedavg", "mlp", True, task={"buffers": buffers}) | {"model": {"name": name}}
    one = play(world, values, shared_dir / "one", None)
    same(play(world, values, shared_dir / "ranks", world.comm), one)
    world.meet()  # all have looked before it is taken up again
    resume(world, shared_dir / "ranks", 2, world.comm)
    same(shared_dir / "ranks", one)


@pytest.mark.parametrize("buffers", ["mean", "local", "keep", "static"])
def test_a_runs_models_have_them(buffers: str, tmp_path: Path) -> None:
    values = table("fedavg", "mlp", True, task={"buffers": buffers}) | {"model": {"name": NORMED}}
    run = hpcfl.run(values, out=tmp_path / "run", quiet=True)
    state = run.state_dict(client=2)
    assert (float(state[COUNT]) > 0) == (buffers != "keep")
    assert bool(run.state_dict()[MEAN].any()) == (buffers in ("mean", "static"))
    assert np.isnan(run.data["test_loss"].values[-1]) == (buffers == "local")


class Stage(Model):
    """A chain with a batch normalisation."""

    name: str = "stage"

    def build(self, shape: tuple[int, ...], classes: int) -> list[tuple[str, nn.Sequential]]:
        return [("a", nn.Sequential(nn.Flatten(), nn.Linear(16, classes), nn.BatchNorm1d(classes)))]


def test_what_is_too_much_to_tell_or_cannot_be_kept_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcfl.learning.build.MOST", 5)
    said = r"integer buffer seen of 2 numbers, of which 3 clients tell all theirs: expected at most 5 .* = 'local'\?"
    with pytest.raises(UsageError, match=said):
        task_of("mean", COUNTER)
    assert task_of("local", COUNTER).whole.buffers["seen"].tolist() == [0, 0]
    with pytest.raises(UsageError, match=r"layer a has the buffer 2\.running_mean, which a chain"):
        Task(Stage(), federation(SIZES, shape=SHAPE), 0)
    file = toml(table("fedavg", "mlp", True, task={"buffers": "keep"}), tmp_path / "a.toml")
    assert main(["check", str(file)]) == 2
    assert capsys.readouterr().err.startswith("hpcfl: task.buffers = 'keep' has no meaning with model.name = 'mlp'")
