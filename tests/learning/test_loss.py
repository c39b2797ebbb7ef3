"""What is minimised and measured: our losses on labels of any shape, users' functions, what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import survival
import torch
import torch.nn.functional as F
from torch import Tensor

import hpcfl
from helpers.toys import federation, full_batch, visits_of
from hpcfl.base.errors import UsageError
from hpcfl.base.rng import StepKey
from hpcfl.commands.cli import main
from hpcfl.learning.batches import Batch
from hpcfl.learning.build import check_outputs
from hpcfl.learning.config import TaskConfig
from hpcfl.learning.evaluate import client_objectives, client_scores, server_scores
from hpcfl.learning.loss import PerSample, accuracy
from hpcfl.learning.task import Task
from hpcfl.models.mlp import Mlp
from hpcfl.testing.runs import cut_back, play, recorded, resume, same, table, toml

SIZES = [7, 4, 6]
OWN = {"loss": "helpers.losses:contrast", "metrics": ["accuracy", "helpers.losses:confidence"]}


def loss(name: str = "auto") -> PerSample:
    return PerSample("task.loss", name)


def task_of(**keys: Any) -> Task:
    return Task(Mlp(hidden=(4,)), federation(SIZES), 0, kind=TaskConfig.from_table(keys, "task"))


def batch(x: Tensor, y: Tensor, sizes: list[int] | None = None) -> Batch:
    valid = None if sizes is None else torch.arange(y.shape[1]) < torch.tensor(sizes)[:, None]
    return Batch(x, y, valid, StepKey(0, 0, list(range(len(y))), 0), sizes)


# ---- values


def test_labels_of_several_positions_by_either_axis_of_classes() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs, y = torch.randn(2, 3, 4, 5, generator=generator), torch.randint(5, (2, 3, 4), generator=generator)
    wanted = torch.tensor(
        [[F.cross_entropy(outputs[c, b], y[c, b]).item() for b in range(3)] for c in range(2)]
    )  # of one sample: the mean over its positions
    for given in (outputs, outputs.movedim(-1, 2)):
        torch.testing.assert_close(loss().each(given, y), wanted)
        right = (outputs.argmax(-1) == y).double().mean(-1)
        assert torch.equal(accuracy(given, y), right)
        assert 0 < right.mean() < 1


def test_squared_errors_of_several_numbers() -> None:
    outputs, y = torch.tensor([[[1.0, 2.0], [0.0, 0.0]]]), torch.tensor([[[0.0, 0.0], [3.0, 1.0]]])
    assert loss().each(outputs, y).tolist() == [[2.5, 5.0]]
    assert loss("squared-error").each(torch.tensor([[[1.0], [2.0]]]), torch.tensor([[3, 3]])).tolist() == [[4.0, 1.0]]
    assert accuracy(outputs, y).isnan().all()


def test_a_module_may_regress_on_classes() -> None:
    """Integers are then compared with a number, which has no accuracy."""
    number = torch.tensor([[[0.4], [1.4]]])
    assert accuracy(number, torch.tensor([[0, 1]])).isnan().all()
    check_outputs(loss("squared-error"), number[0], torch.tensor([0, 1]), 2, "here")
    with pytest.raises(UsageError, match="here: expected outputs of shape"):
        check_outputs(loss(), number[0], torch.tensor([0, 1]), 2, "here")


def test_coxs_likelihood_by_hand() -> None:
    """Three patients, of times 1, 2, 3 and risks log 1, log 2, log 4; the second one leaves."""
    outputs = torch.tensor([1.0, 2.0, 4.0]).log()[:, None]
    labels = torch.tensor([[1.0, 1.0], [2.0, 0.0], [3.0, 1.0]])
    wanted = torch.tensor([math.log(7), 0.0, 0.0])  # 1 of 1 + 2 + 4; not counted; alone
    torch.testing.assert_close(survival.cox(outputs, labels), wanted)
    assert survival.concordance(outputs, labels).tolist() == [0.0, 0.5, 0.5]  # lived shortest at the lowest risk
    two = torch.stack([outputs, outputs]), torch.stack([labels, labels])
    first = loss("survival:cox").mean(*(lambda x, y: (x, batch(x, y, [3, 1])))(*two))
    torch.testing.assert_close(first, torch.tensor([math.log(7) / 3, 0.0]))  # the second client has one patient


@pytest.mark.parametrize("name", ["helpers.losses:entropy", "cross-entropy"])
def test_a_users_cross_entropy_is_ours(name: str) -> None:
    ours, theirs = task_of(), task_of(loss=name)
    visits = visits_of(ours, [0, 1, 2])
    for own, other in zip(*(each.batches(visits, 3, 2).padded() for each in (ours, theirs))):
        params = ours.replicate(ours.initial(), visits)
        left, right = ours.gradients(params, own), theirs.gradients(params, other)
        torch.testing.assert_close(left[1], right[1])
        for key, value in left[0].items():
            torch.testing.assert_close(right[0][key], value)


def test_a_function_sees_one_clients_real_samples() -> None:
    """Batches of 5 of 7, 4 and 6 samples: the loss compares samples, and padding must not be among them."""
    task = task_of(**OWN)
    visits = visits_of(task, [0, 1, 2])
    params = task.replicate(task.initial(), visits)
    taken = 0
    for step in task.batches(visits, 5, 1).padded():
        _, losses = task.gradients(params, step)
        for row, size in enumerate(step.sample_counts()):
            if size:
                outputs = task.forward({k: v[row : row + 1] for k, v in params.items()}, step.x[row : row + 1, :size])
                each = F.cross_entropy(outputs[0], step.y[row, :size], reduction="none")
                weights = step.y[row, :size]
                wanted = (each * (1 + weights)).mean() - each.mean() * weights.float().mean()
                assert losses[row].item() == pytest.approx(wanted.item(), rel=1e-5)
                taken += 1
    assert taken == 5  # two batches, and no second one of the client with 4


def test_what_a_loss_draws_is_keyed_by_client_and_step() -> None:
    task = task_of(loss="helpers.losses:noisy")
    together = next(task.batches(visits_of(task, [2, 0]), 0, 1))
    shared = task.initial()
    _, both = task.gradients(task.replicate(shared, visits_of(task, [2, 0])), together)
    for row, client in enumerate([2, 0]):
        torch.manual_seed(row)
        alone = visits_of(task, [client])
        _, one = task.gradients(task.replicate(shared, alone), next(task.batches(alone, 0, 1)))
        assert one.item() == pytest.approx(both[row].item(), rel=1e-6)
    assert task_of(loss="helpers.losses:entropy").loss.mean(*outputs_of(task)) != task.loss.mean(*outputs_of(task))


def outputs_of(task: Task) -> tuple[Tensor, Batch]:
    x, y = full_batch(task, 0)
    return task.forward(task.replicate(task.initial(), visits_of(task, [0])), x[None]), batch(x[None], y[None])


def test_metrics_are_means_over_test_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(metrics=["helpers.losses:confidence", "accuracy"])
    for client, size in enumerate(SIZES):
        held = task.samples(client)
        task._samples[client] = held._replace(test_x=held.x[: size - 3], test_y=held.y[: size - 3])
    params = task.replicate(task.initial(), visits_of(task, [0, 1, 2]))
    sums = client_scores(task, params, np.arange(3))
    for client, size in enumerate(SIZES):
        held = task.samples(client)
        outputs = task.outputs({k: v[client : client + 1] for k, v in params.items()}, held.test_x)
        chances = outputs.softmax(-1).amax(-1)
        right = int((outputs.argmax(-1) == held.test_y).sum())
        wanted = [F.cross_entropy(outputs, held.test_y, reduction="sum").item(), chances.sum().item(), right]
        assert len(held.test_y) == size - 3
        np.testing.assert_allclose(sums[:, client], wanted, rtol=1e-5)
    x, y = full_batch(task, 0)
    monkeypatch.setattr(type(task.federation), "server_test", lambda _self: (x.numpy(), y.numpy()))
    monkeypatch.setattr("hpcfl.learning.evaluate.TEST_BATCH", 3)
    whole, size = server_scores(task, task.initial()) or (np.zeros(3), 0)
    chances = task.outputs({k: v[None] for k, v in task.initial().items()}, x).softmax(-1).amax(-1)
    assert (size, whole[1]) == (7, pytest.approx(chances.sum().item(), rel=1e-5))


def test_the_objective_is_of_the_users_loss() -> None:
    task = task_of(loss="helpers.losses:contrast")
    params = task.replicate(task.initial(), visits_of(task, [0, 1, 2]))
    _, means = task.gradients(params, next(task.batches(visits_of(task, [0, 1, 2]), 0, 1)))
    np.testing.assert_allclose(client_objectives(task, params, np.arange(3)), means.numpy() * SIZES, rtol=1e-5)


# ---- runs

EXAMPLES: dict[str, dict[str, Any]] = {
    "next-token": {
        "algorithm.steps": 2,
        "clients": 20,
        "data.length": 60,
        "model.layers": 1,
        "participation.invite": "uniform",
        "participation.size": 2,
    },
    "multi-label": {"data.pairs": 40, "clients": 4},
    "survival": {"data.patients": 30, "clients": 4},
}
FEW = {"rounds": 3, "evaluate.every": 1, "checkpoint.every": 1, "checkpoint.keep": 3}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_resumed_to_the_bit_and_learns(name: str, tmp_path: Path) -> None:
    run = hpcfl.run(name, settings=FEW | EXAMPLES[name], out=tmp_path / "run", quiet=True)
    lost = run.data["client_test_loss"].mean("client").values
    assert lost[-1] < lost[0]
    for metric in {"next-token": ["accuracy", "bits"], "multi-label": ["exact"]}.get(name, ["concordance"]):
        assert run.data[f"client_{metric}"].notnull().all()
    before = recorded(tmp_path / "run")
    cut_back(tmp_path / "run", 1)
    assert main(["resume", str(tmp_path / "run"), "--quiet"]) == 0
    after = recorded(tmp_path / "run")
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value, err_msg=key)


def test_other_metrics_are_told_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = FEW | EXAMPLES["survival"] | {"rounds": 2, "seed": 3}
    flat = [f"--set={key}={value}" for key, value in settings.items()]
    assert main(["run", "survival", *flat, "--out", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.startswith(f"round {k}/2  mean_client_concordance 0.") for k, line in zip((1, 2), told)] == [
        True,
        True,
    ]
    run = hpcfl.open_run(tmp_path / "run")
    mean = float(run["client_concordance"].mean("client").values[-1])
    assert f"concordance {mean:.4f}" in told[1]
    assert main(["show", str(tmp_path / "run"), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["metrics"] == {"concordance": pytest.approx(mean)}
    assert main(["show", str(tmp_path / "run")]) == 0
    assert f"{mean:.4f}" in capsys.readouterr().out
    picture = tmp_path / "a.png"
    assert main(["plot", str(tmp_path / "run"), "-o", str(picture), "--y", "concordance"]) == 0
    assert picture.stat().st_size > 0
    capsys.readouterr()
    assert main(["plot", str(tmp_path / "run"), "-o", str(picture)]) == 2
    said = "y: the runs recorded no 'accuracy': expected one of concordance, test_loss"
    assert said in capsys.readouterr().err


@pytest.mark.mpi
@pytest.mark.parametrize("method", ["fedavg", "salf"])
def test_one_rank_equals_n_with_a_loss_of_ones_own(method: str, world: Any, solo: Any, shared_dir: Path) -> None:
    values = table(method, "mlp", True, task=OWN)
    one = play(world, values, shared_dir / "one", None)
    same(play(world, values, shared_dir / "ranks", world.comm), one)
    world.meet()
    resume(world, shared_dir / "ranks", 2, world.comm)
    same(shared_dir / "ranks", one)


@pytest.mark.mpi
def test_in_real_time_too(world: Any, shared_dir: Path) -> None:
    if world.size == 1:
        pytest.skip("the wall clock needs a server and a client")
    values = table("fedavg", "mlp", False, task=OWN, clock="wall", speed={"model": "none"}, participation={}, rounds=2)
    play(world, values, shared_dir / "wall", world.comm)
    run = hpcfl.open_run(shared_dir / "wall")
    assert run["client_confidence"].values[1].min() > 0.1
    assert 0.1 < run["confidence"].values[1] <= 1
    assert np.isfinite(run["loss"].values).all()


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("salf", {}),
        ("fedprox", {}),
        ("fedrep", {"head_epochs": 1}),
        ("lg_fedavg", {"shared_layers": 1}),
        ("hf_maml", {}),
    ],
)
def test_methods_take_texts(method: str, keys: dict[str, Any], tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "rounds": 2,
        "clients": 20,
        "participation": {"invite": "uniform", "size": 2},
        "model": {"name": "gpt:GPT", "layers": 1, "heads": 1, "width": 8, "dropout": 0.0},
        "data": {"name": "next_token:Manual", "length": 60},
        "speed": {"model": "none"},
        "evaluate": {"last": 1},
    }
    if method == "salf":
        config["speed"] = {"model": "uniform-depth", "stragglers": 0.5}
        config["participation"]["close"] = "deadline"
    run = hpcfl.run(config | {"algorithm": {"name": method, "batch": 64, **keys}}, out=tmp_path / "run", quiet=True)
    assert np.isfinite(run.data["loss"].values).all()
    texts = run.models.federation.client(0).test_features[:2]
    assert run.models.module(client=0)(torch.from_numpy(texts)).shape == (2, 60, 128)
    assert next(iter(run.models)).predict(texts).shape == (2, 60)


def test_a_file_of_texts_and_one_of_flags(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, x, y in (
        ("texts", rng.integers(9, size=(8, 5)), rng.integers(9, size=(8, 5))),
        ("flags", rng.normal(size=(8, 5)).astype(np.float32), rng.integers(2, size=(8, 4)).astype(np.float32)),
    ):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["train/features"], file["train/labels"], file["test/features"], file["test/labels"] = x, y, x, y
    texts = {"name": "hdf5", "file": "texts.h5", "tokens": True}
    plain: dict[str, Any] = {"rounds": 2, "clients": 2, "algorithm": {"name": "fedavg"}, "speed": {"model": "none"}}
    gpt = {"name": "gpt:GPT", "layers": 1, "heads": 1, "width": 4}
    run = hpcfl.run(plain | {"data": texts, "model": gpt}, out=tmp_path / "a", data_dir=tmp_path, quiet=True)
    assert 0 <= run.data["accuracy"].values[-1] <= 1
    flags = {"data": {"name": "hdf5", "file": "flags.h5"}, "model": {"name": "mlp", "hidden": [3]}}
    keys = {"task": {"loss": "multi_label:loss", "metrics": ["multi_label:exact"]}}
    run = hpcfl.run(plain | flags | keys, out=tmp_path / "b", data_dir=tmp_path, quiet=True)
    assert 0 <= run.data["exact"].values[-1] <= 1
    assert next(iter(run.models)).predict(np.zeros((2, 5), np.float32)).shape == (2, 4)
    for data, said in (
        (texts | {"partition": "shards", "classes": 2}, "'iid' or 'file', since a sample has several labels"),
        (flags["data"] | {"tokens": True}, "data.tokens = true: expected integers, got float32"),
        (texts | {"scale": "unit"}, "data.scale = 'unit' has no meaning with data.tokens = true"),
    ):
        with pytest.raises(UsageError, match=said):
            hpcfl.run(plain | {"data": data, "model": gpt}, out=tmp_path / "c", data_dir=tmp_path, quiet=True)
    with pytest.raises(UsageError, match=r"^data: samples are tokens, model\.name = 'mlp' takes arrays"):
        hpcfl.run(plain | {"data": texts, "model": {"name": "mlp"}}, out=tmp_path / "c", data_dir=tmp_path, quiet=True)


# ---- refused

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "word": ({"loss": "cross-entropie"}, "or package.module:function, got 'cross-entropie'; did you mean task.loss = "),
    "metric": ({"metrics": ["acuracy"]}, "task.metrics: expected 'accuracy' or package.module:function, got 'acuracy'"),
    "no-module": ({"loss": "nowhere:loss"}, "task.loss: no module 'nowhere'; expected it in "),
    "no-name": ({"loss": "helpers.losses:entropi"}, "no 'entropi' in "),
    "no-function": ({"loss": "helpers.losses:NOTHING"}, "expected a function of outputs and labels, got 3"),
    "reduced": ({"loss": "helpers.losses:reduced"}, "expected a value per sample, a tensor [3], got []; did you mean "),
    "float": ({"metrics": ["helpers.losses:number"]}, "expected a value per sample, a tensor [3], got float"),
    "raises": ({"loss": "helpers.losses:failing"}, "outputs [3, 10] and labels [3]: RuntimeError: shape '[7, 7]' is "),
    "alone": (
        {"loss": "helpers.losses:entropy", "algorithm": "fedlrgd"},
        "takes each sample by itself",
    ),
    "column": ({"metrics": ["helpers.losses:loss"]}, "task.metrics: 'loss' is what another column is called"),
    "same": (
        {"metrics": ["accuracy", "accuracy"]},
        "task.metrics: expected a name of its own for each, got 'accuracy'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_one_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task, said = REFUSED[case]
    values = table("fedavg", "mlp", True)
    if name := (task := dict(task)).pop("algorithm", ""):
        held = {"name": "digits", "server": 100}
        values |= {
            "algorithm": {"name": name, "rank": 3},
            "data": held,
            "speed": {"model": "none"},
            "participation": {},
        }
        values["model"] = {"name": "glm", "link": "softmax"}
    file = toml(values | {"task": task}, tmp_path / "a.toml")
    for command in (["check", str(file)], ["run", str(file), "--out", str(tmp_path / "out")]):
        assert main(command) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert said in lines[0]
    assert not (tmp_path / "out").exists()


def test_a_loss_that_fails_in_a_step_ends_the_run_in_one_line(tmp_path: Path, capsys: Any) -> None:
    file = toml(table("fedavg", "mlp", True, task={"loss": "helpers.losses:late"}), tmp_path / "a.toml")
    assert main(["run", str(file), "--out", str(tmp_path / "out"), "--quiet"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "task.loss = 'helpers.losses:late': outputs [32, 10] and labels [32]: ValueError: too many" in line


def test_check_tells_the_loss(tmp_path: Path, capsys: Any) -> None:
    file = toml(table("fedavg", "mlp", True, task=OWN), tmp_path / "a.toml")
    assert main(["check", str(file)]) == 0
    said = "task          loss: helpers.losses:contrast; metrics: accuracy, helpers.losses:confidence"
    assert said in capsys.readouterr().out.splitlines()


def test_classes_that_could_be_in_two_axes_are_refused() -> None:
    with pytest.raises(UsageError, match="have their classes in axis 1 or 2"):
        loss().each(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, dtype=torch.int64))
    with pytest.raises(UsageError, match=r"expected outputs of the labels' shape, got outputs \[2, 3\] for labels"):
        loss().each(torch.zeros(1, 2, 3), torch.zeros(1, 2))


def test_targets_have_no_cross_entropy() -> None:
    header = hpcfl.Header(1, 4, 0, ((2,),), 1, targets=True)
    with pytest.raises(UsageError, match=r"^task\.loss: expected 'squared-error' or a function"):
        TaskConfig(loss="cross-entropy").check_labels(header)
    TaskConfig(loss="squared-error").check_labels(replace(header, targets=False))
