"""Training a part of a model: what is sent, what stays to the bit, what a run folder keeps, what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from gpt import GPT
from lora import LoraGPT
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hpcfl
from helpers.modules import Normed, Recurrent, Residual
from helpers.toys import federation, full_batch, visits_of
from hpcfl.base.errors import UsageError
from hpcfl.commands.cli import main
from hpcfl.launch.request import resume_request
from hpcfl.learning.task import Task
from hpcfl.models import model_class
from hpcfl.store import run_attributes
from hpcfl.testing.runs import cut_back, play, resume, same, table

MLP = {"name": "mlp", "hidden": [6, 5]}
CNN = {"name": "cnn", "channels": [3], "kernel": 3, "padding": "same", "hidden": [7]}
RECURRENT = {"name": "helpers.modules:Recurrent"}
RESIDUAL, NORMED = {"name": "helpers.modules:Residual"}, {"name": "helpers.modules:Normed"}
FEW: dict[str, Any] = {"rounds": 2, "clients": 2}
PLAIN: dict[str, Any] = {"speed": {"model": "none"}, "participation": {}}


def plain_mlp() -> nn.Module:
    parts = [[nn.Flatten(), nn.Linear(64, 6), nn.ReLU()], [nn.Linear(6, 5), nn.ReLU()], [nn.Linear(5, 10)]]
    return nn.Sequential(OrderedDict((f"fc{number}", nn.Sequential(*each)) for number, each in enumerate(parts, 1)))


def plain_cnn() -> nn.Module:
    conv = nn.Sequential(nn.Conv2d(1, 3, 3, padding="same"), nn.MaxPool2d(2), nn.ReLU())
    rest = {"fc1": nn.Sequential(nn.Flatten(), nn.Linear(48, 7), nn.ReLU()), "fc2": nn.Sequential(nn.Linear(7, 10))}
    return nn.Sequential(OrderedDict({"conv1": conv, **rest}))


def values(file: Path, model: dict[str, Any], train: list[str], **more: Any) -> dict[str, Any]:
    """A run that begins with a file and trains a part."""
    given = {**table("fedavg", "mlp", True), **PLAIN, "algorithm": {"name": "fedavg", "batch": 0}, **more}
    return {**given, "model": {**model, "initial": str(file), "train": train}}


def by_hand(net: nn.Module, train: str, run: hpcfl.Run, steps: int, lr: float) -> dict[str, Tensor]:
    """What one round of FedAvg makes of a module of which the parameters that match `train` learn."""
    begun = {name: value.clone() for name, value in net.state_dict().items()}
    data = [run.models.federation.client(client) for client in range(len(run.models))]
    weights = torch.tensor([float(len(each.train_labels)) for each in data])
    found = []
    for each in data:
        net.load_state_dict(begun)
        for name, value in net.named_parameters():
            value.requires_grad_(re.fullmatch(train, name) is not None)
        learning = [value for value in net.parameters() if value.requires_grad]
        x, y = torch.from_numpy(each.train_features), torch.from_numpy(each.train_labels)
        for _ in range(steps):
            for value, gradient in zip(learning, torch.autograd.grad(nn.functional.cross_entropy(net(x), y), learning)):
                value.data -= lr * gradient
        found.append({name: value.clone() for name, value in net.state_dict().items()})
    share = weights / weights.sum()
    return {name: sum(part * own[name] for part, own in zip(share, found)) for name in begun}  # type: ignore[misc]


CASES = {
    "a layer in the middle": (MLP, plain_mlp, ["fc2.*"], r"fc2\..*"),
    "the ends": (MLP, plain_mlp, ["fc1.*", "fc3.weight"], r"fc1\..*|fc3\.0\.weight"),
    "all biases": (MLP, plain_mlp, ["*.bias"], r".*bias"),
    "a convolution": (CNN, plain_cnn, ["conv1.*", "fc2.bias"], r"conv1\..*|fc2\.0\.bias"),
    "inner": (RESIDUAL, lambda: Residual((1, 8, 8), 10), ["inner.weight", "*orm.*"], r"inner\.weight|norm\..*"),
    "recurrent": (
        RECURRENT,
        lambda: Recurrent((1, 8, 8), 10),
        ["lstm.*_hh_l0", "head.bias"],
        r"lstm.*_hh_l0|head\.bias",
    ),
}


@pytest.mark.parametrize(
    ("case", "batched", "computing"),
    [
        ("a layer in the middle", 2, "vmapped"),
        ("the ends", 2, "vmapped"),
        ("all biases", 2, "vmapped"),
        ("a convolution", 2, "vmapped"),
        ("inner", 2, "vmapped"),
        ("inner", False, "vmapped"),
        ("recurrent", 2, "looped"),
    ],
)
def test_a_round_is_what_torch_makes_of_the_part(case: str, batched: Any, computing: str, tmp_path: Path) -> None:
    model, make, train, pattern = CASES[case]
    torch.manual_seed(1)
    net = make()
    torch.save(begun := {name: value.clone() for name, value in net.state_dict().items()}, tmp_path / "begun.pt")
    one = {"rounds": 1, "clients": 2, "evaluate": {}, "checkpoint": {}, "batch_clients": batched}
    keys = {"name": "fedavg", "batch": 0, "epochs": 0, "steps": 3, "lr": 0.2}
    run = hpcfl.run(values(tmp_path / "begun.pt", model, train, **one, algorithm=keys), out=tmp_path / "run")
    found, wanted = run.state_dict(), by_hand(net, pattern, run, 3, 0.2)
    places = {name.replace(".0.", ".").replace(".1.", "."): name for name in wanted}
    assert len(found) == len(wanted)
    for name, value in found.items():
        own = places[name.replace(".0.", ".").replace(".1.", ".")]
        if re.fullmatch(pattern, own):
            torch.testing.assert_close(value, wanted[own], atol=1e-6, rtol=0)
            assert not torch.equal(value, begun[own])
        else:
            assert torch.equal(value, begun[own])
    sent = sum(value.numel() for name, value in wanted.items() if re.fullmatch(pattern, name))
    assert run.data["message_bytes"].values.tolist() == [2 * 4 * sent]
    assert json.loads(run_attributes(run.folder)["computing"])["how"] == computing
    stored = load_file(hpcfl.export(run.folder, tmp_path / "model.safetensors"))
    assert all(torch.equal(stored[name], found[name]) for name in found)


def test_layers_that_count_one_by_one_are_the_trained_ones(tmp_path: Path) -> None:
    what = table("salf", "mlp", True)
    run = hpcfl.run({**what, "model": {**MLP, "train": ["fc1.bias", "fc3.*"]}}, out=tmp_path / "run")
    assert run.data["layer"].values.tolist() == ["fc1.bias", "fc3"]
    depth = run.data["depth"].values
    sent = 4 * (6 * (depth <= 1).sum(1) + 60 * (depth <= 2).sum(1))
    assert len({*sent.tolist()}) > 1
    assert run.data["message_bytes"].values.tolist() == sent.tolist()


@pytest.mark.parametrize("train", [["fc2.*"], ["fc1.*", "fc3.bias"], ["fc1.*", "fc2.weight"]])
def test_a_pass_that_ends_early_has_the_gradients_of_torch(train: list[str]) -> None:
    model = model_class("mlp").from_table({**MLP, "train": train}, "model")
    task = Task(model, federation([4, 4, 4], shape=(3,)), 0)
    params = task.replicate(task.initial(), visits := visits_of(task, [0, 1, 2]))
    layers = task.layer_names()
    rows = [1, 2, 3][-len(layers) :]
    batch = next(task.batches(visits, 0, steps=1))
    seen = [number for number, _, _ in task.backprop(params, batch, rows)]
    assert seen == [*reversed(range(len(layers)))]
    net = task.module(task.initial())
    by_name = {re.sub(r"\.\d\.", ".", name): value for name, value in net.named_parameters()}
    for number, gradients, losses in task.backprop(params, batch, rows):
        assert gradients.keys() == set(layers[number])
        for client in range(rows[number]):
            x, y = full_batch(task, client)
            loss = nn.functional.cross_entropy(net(x), y)
            torch.testing.assert_close(losses[client], loss.detach())
            for name, value in gradients.items():
                (wanted,) = torch.autograd.grad(loss, by_name[name], retain_graph=True)
                torch.testing.assert_close(value[client], wanted)


def test_a_frozen_tensor_is_there_once_for_all_clients() -> None:
    for keys in ({**MLP, "train": ["fc2.*"]}, {**RESIDUAL, "train": ["head.*"]}):
        shape = (3,) if keys["name"] == "mlp" else (1, 4, 4)
        task = Task(model_class(keys["name"]).from_table(keys, "model"), federation([4, 4], shape=shape), 0)
        params = task.replicate(task.initial(), visits_of(task, [0, 1]))
        assert task.frozen
        assert task.frozen.keys().isdisjoint(params)
        assert not any(value.requires_grad for value in task.frozen.values())
        assert task.parameter_count == sum(value[0].numel() for value in params.values())


def test_buffers_of_frozen_layers_follow_the_servers_rule(tmp_path: Path) -> None:
    torch.manual_seed(0)
    begun = {name: value for name, value in Normed((1, 8, 8), 10).state_dict().items() if "num_batches" not in name}
    torch.save(begun, tmp_path / "begun.pt")
    found = hpcfl.run(values(tmp_path / "begun.pt", NORMED, ["head.*"], rounds=1), out=tmp_path / "run").state_dict()
    assert (found["bn1.running_mean"] != begun["bn1.running_mean"]).any()
    assert found["bn1.num_batches_tracked"] > 0
    assert all(torch.equal(found[name], begun[name]) for name in ("stem.weight", "bn1.weight", "inner.weight"))


def test_personal_parts_are_among_the_trained_ones(tmp_path: Path) -> None:
    save_file(plain_mlp().state_dict(), tmp_path / "begun.safetensors")
    rep = {"algorithm": {"name": "fedrep", "batch": 0}, "rounds": 1}
    what = values(tmp_path / "begun.safetensors", MLP, ["fc2.*", "fc3.*"], **rep)
    models = hpcfl.run(what, out=tmp_path / "run").models
    assert models.state.keys() == {"fc2.weight", "fc2.bias"}
    heads = [model.params["fc3.bias"] for model in models]
    assert not torch.equal(heads[0], heads[1])
    begun = load_file(tmp_path / "begun.safetensors")
    assert torch.equal(models.module(3).state_dict()["fc1.1.weight"], begun["fc1.1.weight"])
    with pytest.raises(UsageError, match=r"^algorithm\.head_layers: expected 0 … 0 for this model, got 1"):
        hpcfl.run(values(tmp_path / "begun.safetensors", MLP, ["fc3.*"], **rep), out=tmp_path / "one")
    lg = values(tmp_path / "begun.safetensors", MLP, ["fc2.*", "fc3.*"], algorithm={"name": "lg_fedavg"})
    with pytest.raises(UsageError, match=r"shared_layers: expected fewer than the 2 layers that .* to train, got 2$"):
        hpcfl.run(lg, out=tmp_path / "one")


@pytest.mark.mpi
@pytest.mark.parametrize("model", [{**MLP, "train": ["fc2.*", "*.bias"]}, {**RESIDUAL, "train": ["head.*", "inner.*"]}])
def test_one_rank_equals_n(model: dict[str, Any], world: Any, solo: Any, shared_dir: Path) -> None:
    what = {**table("salf", "mlp", True), "model": model}
    one = play(world, what, shared_dir / "one", None)
    same(play(world, what, shared_dir / "ranks", world.comm), one)
    world.meet()
    resume(world, shared_dir / "ranks", 2, world.comm)
    same(shared_dir / "ranks", one)


# ---- what a run folder keeps

OWN = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU()), nn.Linear(5, 10)

    def forward(self, x):
        return self.head(self.body(x))
"""


@pytest.fixture(params=["file", "drawn"])
def moved(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, Tensor], Path]:
    """A run elsewhere, of whose model neither class nor file are there any more; its tensors; a copy of it."""
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    Path("mine_trained.py").write_text(OWN)
    names = {"body.1.weight": (5, 64), "body.1.bias": (5,), "head.weight": (10, 5), "head.bias": (10,)}
    torch.manual_seed(2)
    torch.save({name: torch.randn(shape) for name, shape in names.items()}, "begun.pt")
    own = {"name": "mine_trained:Net"}
    what = values(tmp_path / "mine/begun.pt", own, ["head.*"], **FEW, checkpoint={"every": 1})
    if request.param == "drawn":
        del what["model"]["initial"]
    run = hpcfl.run(what, out=tmp_path / "mine/run")
    wanted = run.state_dict()
    shutil.copytree("run", tmp_path / "whole")
    shutil.move("run", tmp_path / "run")
    Path("begun.pt").unlink()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run", wanted, tmp_path / "whole"


def test_a_run_has_all_tensors_without_class_and_file(
    moved: tuple[Path, dict[str, Tensor], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, wanted, _ = moved
    archive = hpcfl.export(run, tmp_path / "sent.zip")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "nobody"))  # here nothing of it has run
    (tmp_path / "mine/mine_trained.py").unlink()
    for place in (run, archive):
        found = hpcfl.Run(place).state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    stored = load_file(hpcfl.export(archive, tmp_path / "model.safetensors"))
    assert all(torch.equal(stored[name], wanted[name]) for name in wanted)
    assert main(["verify", str(run)]) == 0
    (kept,) = run.glob("initial-*")
    kept.write_bytes(kept.read_bytes()[:-1] + b"x")
    with pytest.raises(UsageError, match=r"initial-\w{8}\.\w+' has changed since the run began"):
        hpcfl.Run(run).state_dict()
    assert main(["verify", str(run)]) == 1


def test_a_run_goes_on_elsewhere_without_the_file(moved: tuple[Path, dict[str, Tensor], Path], solo: Any) -> None:
    run, wanted, whole = moved
    cut_back(run, 1)
    assert main(["resume", str(run), "--quiet"]) == 0
    same(run, whole)
    found = hpcfl.Run(run).state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for kept in run.glob("initial-*"):
        kept.unlink()
    for refused in (hpcfl.Run(run).state_dict, lambda: resume_request(run, None, rounds=3)):
        with pytest.raises(UsageError, match=r"where the run found model\.initial, is not there"):
            refused()


def test_the_config_stays_the_users_and_a_new_run_takes_the_place(tmp_path: Path) -> None:
    torch.save(plain_mlp().state_dict(), tmp_path / "begun.pt")
    what = values(tmp_path / "begun.pt", MLP, ["fc3.*"], **FEW)
    hpcfl.run(what, out=tmp_path / "run")
    assert json.loads(run_attributes(tmp_path / "run")["config"])["model"]["initial"] == str(tmp_path / "begun.pt")
    hpcfl.run(what, out=tmp_path / "run", resume=True)  # the same config: done already
    before = [*(tmp_path / "run").glob("initial-*")]
    torch.save(plain_mlp().state_dict(), tmp_path / "begun.pt")
    hpcfl.run(what, out=tmp_path / "run", overwrite=True)
    after = [*(tmp_path / "run").glob("initial-*")]
    assert len(before) == len(after) == 1
    assert before != after


# ---- what is said, and what is refused


def test_check_says_how_many_are_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "model.hidden=[16]", "--set", "model.train=['fc2.*']"]
    assert main(["check", "fedavg-digits", *words]) == 0
    said = capsys.readouterr().out
    assert "trained       170 of 1,210 parameters (2 of 4 tensors); the others are drawn, not of a file\n" in said
    assert re.search(r"^message +680 bytes per whole visit", said, re.MULTILINE)


THERE = "; parameters: fc1.weight, fc1.bias, fc2.weight, fc2.bias, fc3.weight, fc3.bias"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "typo": ({"train": ["fc1.*", "fd3.*"]}, f"model.train: 'fd3.*' matches no parameter; did you mean 'fc3.*'?{THERE}"),
    "strange": ({"train": ["lora_?"]}, f"model.train: 'lora_?' matches no parameter{THERE}"),
    "nothing": ({"train": []}, f"model.train = []: it leaves nothing to train: expected at least one pattern{THERE}"),
    "text": ({"train": "fc3.*"}, "model.train: expected"),
}


@pytest.mark.parametrize("case", BAD)
def test_patterns_that_leave_nothing_are_one_line(case: str, tmp_path: Path) -> None:
    keys, said = BAD[case]
    with pytest.raises(UsageError) as caught:
        hpcfl.run({**table("fedavg", "mlp", True), "model": MLP | keys}, out=tmp_path / "run")
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("heterofl-digits", "algorithm.name = 'heterofl' narrows every layer of the model"),
        ("flic-toy", "algorithm.name = 'flic' trains embeddings and what is above them"),
        ("srpfl-linear", "algorithm.name = 'linear_fedrep' computes heads and representation, and nothing else"),
    ],
)
def test_methods_that_need_the_whole_model_say_so(
    config: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", config, "--set", "model.train=['a.*']", "--out", str(tmp_path / "run")]) == 2
    line = f"hpcfl: model.train: {said}: expected all to be trained, got ['a.*']; did you mean ['*']?\n"
    assert capsys.readouterr().err.endswith(line)
    assert not (tmp_path / "run").exists()


def test_shapes_that_differ_train_all(tmp_path: Path) -> None:
    data = {"name": "linear_mapping", "labels": 3, "informative": 3, "least": 4, "most": 5, "samples_per_class": 20}
    what = {"rounds": 1, "clients": 5, "algorithm": {"name": "local"}, "data": data | {"thinning": False}}
    with pytest.raises(UsageError, match=r"^model\.train: clients have features of different shapes: expected all"):
        hpcfl.run({**what, "model": {**MLP, "train": ["fc3.*"]}}, out=tmp_path / "run")


def test_a_file_may_lack_what_is_trained_and_nothing_else(tmp_path: Path) -> None:
    state = plain_mlp().state_dict()
    file = tmp_path / "begun.pt"
    torch.save({name: value for name, value in state.items() if not name.startswith("fc3")}, file)
    assert hpcfl.run(values(file, MLP, ["fc3.*"], rounds=1), out=tmp_path / "run").data.sizes["round"] == 1
    with pytest.raises(UsageError, match=r"begun\.pt: there is no fc3\.weight; expected one of shape \[10, 5\]$"):
        hpcfl.run(values(file, MLP, ["fc2.*"]), out=tmp_path / "a")
    torch.save({**state, "fc9.bias": torch.zeros(1)}, file)
    with pytest.raises(UsageError, match=r"begun\.pt: fc9\.bias: no such tensor"):
        hpcfl.run(values(file, MLP, ["fc3.*"]), out=tmp_path / "a")


# ---- low-rank adapters


def test_adapters_of_a_gpt_learn_on_top_of_another_run(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "texts.h5", "w") as file:
        for part, count in (("train", 24), ("test", 8)):
            walk = (rng.integers(6, size=(count, 1)) + np.arange(6) * rng.integers(1, 3, size=(count, 1))) % 6
            file[f"{part}/features"], file[f"{part}/labels"] = walk[:, :-1], walk[:, 1:]
    what: dict[str, Any] = {
        **{"rounds": 3, "clients": 2, "speed": {"model": "none"}, "evaluate": {"every": 1}},
        "algorithm": {"name": "fedavg", "batch": 0, "epochs": 0, "steps": 4, "lr": 0.03, "optimizer": "adam"},
        "data": {"name": "hdf5", "file": str(tmp_path / "texts.h5"), "tokens": True},
    }
    gpt = {"layers": 1, "heads": 1, "width": 8, "dropout": 0.0}
    first = hpcfl.run({**what, "rounds": 1, "model": {"name": "gpt:GPT", **gpt}}, out=tmp_path / "first")
    begun = first.state_dict()
    assert torch.equal(begun["head.weight"], begun["tokens.weight"])  # one matrix by two names
    file = hpcfl.export(first.folder, tmp_path / "first.safetensors")
    lora = {"name": "lora:LoraGPT", **gpt, "rank": 2, "train": ["*.lora_*"], "initial": str(file)}
    second = hpcfl.run({**what, "model": lora}, out=tmp_path / "second")
    found = second.state_dict()
    trained = {name for name in found if ".lora_" in name}
    assert found.keys() - trained == begun.keys()
    assert all(torch.equal(found[name], begun[name]) for name in begun)
    assert all((found[name] != 0).any() for name in trained)
    assert second.data["message_bytes"].values[0] == 2 * 4 * sum(found[name].numel() for name in trained)
    lost = second.data["test_loss"].values
    assert lost[-1] < lost[0] < first.data["test_loss"].values[-1]
    preset = LoraGPT((1,), 128, layers=2, heads=2, width=32)
    assert sum(value.numel() for name, value in preset.named_parameters() if ".lora_" in name) == 4096
    net = GPT((5,), 6, **gpt).eval()  # W x + (alpha / rank) B A x is a linear layer too
    merged = {name: value.clone() for name, value in begun.items()}
    for place in {name.rpartition(".")[0] for name in trained}:
        merged[f"{place}.weight"] += 8.0 / 2 * found[f"{place}.lora_b"] @ found[f"{place}.lora_a"]
    net.load_state_dict(merged)
    x = torch.arange(5)[None]
    torch.testing.assert_close(second.module()(x), net(x), atol=1e-5, rtol=1e-5)
    save_file(begun | {"head.weight": begun["head.weight"] + 1}, file)
    with pytest.raises(UsageError, match=r"first\.safetensors: head\.weight is tied or never changes: expected the"):
        hpcfl.run({**what, "model": lora}, out=tmp_path / "third")
