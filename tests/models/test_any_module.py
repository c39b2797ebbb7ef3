"""Modules as users bring them: run, resumed and read back, traced, computed together or one by one, refused."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections import OrderedDict
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hpcfl
from helpers import modules
from helpers.toys import federation, full_batch, same_bits, visits_of
from hpcfl.base.errors import UsageError
from hpcfl.commands.cli import main
from hpcfl.config import from_table, load
from hpcfl.learning import layerwise
from hpcfl.learning.fused import Fused, formed
from hpcfl.learning.optim import Sgd
from hpcfl.learning.task import Task
from hpcfl.models import Model, model_class
from hpcfl.models.modules.module import Whole
from hpcfl.testing.runs import play, resume, same, table, toml

SIZES, SHAPE = [7, 4, 6], (1, 6, 8)
CLOSE = {"atol": 1e-5, "rtol": 1e-4}
LAYERS = {
    "two": (("0.1.weight", "0.1.bias"), ("0.3.weight", "0.3.bias"), ("2.weight", "2.bias")),
    "Residual": (
        ("stem.weight", "norm.weight", "norm.bias"),
        ("inner.weight", "inner.bias"),
        ("head.weight", "head.bias"),
    ),
    "Normed": (
        ("stem.weight", "bn1.weight", "bn1.bias"),
        ("inner.weight", "bn2.weight", "bn2.bias"),
        ("head.weight", "head.bias"),
    ),
    "Attention": (
        ("encoder.layers.0.self_attn.in_proj_weight", "encoder.layers.0.self_attn.in_proj_bias"),
        ("encoder.layers.0.self_attn.out_proj.weight", "encoder.layers.0.self_attn.out_proj.bias"),
        ("encoder.layers.0.norm1.weight", "encoder.layers.0.norm1.bias"),
        ("encoder.layers.0.linear1.weight", "encoder.layers.0.linear1.bias"),
        ("encoder.layers.0.linear2.weight", "encoder.layers.0.linear2.bias"),
        ("encoder.layers.0.norm2.weight", "encoder.layers.0.norm2.bias"),
        ("head.weight", "head.bias"),
    ),
    "Tied": (("first.weight", "first.bias"), ("second.bias",), ("head.weight", "head.bias")),
    "Recurrent": (
        ("lstm.weight_ih_l0", "lstm.weight_hh_l0", "lstm.bias_ih_l0", "lstm.bias_hh_l0"),
        ("head.weight", "head.bias"),
    ),
}
DRAWING = {"Attention": "dropout", "Noisy": "noise"}
WHO = ["two", "Residual", "Normed", "resnet18", "Attention", "Tied", "Branch", "Recurrent", "Noisy"]
VMAPPED = ["two", "Residual", "Normed", "resnet18", "Attention", "Tied", "Branch"]


def section(name: str, **keys: Any) -> dict[str, Any]:
    return {"name": f"helpers.modules:{name}", **keys}


def small(name: str, **more: Any) -> dict[str, Any]:
    """Return a small run's config."""
    return table("fedavg", "mlp", True, **more) | {"model": section(name)}


def task_of(name: str, computing: Any = None, precision: Any = "single", **keys: Any) -> Task:
    values = section(name, **keys)
    model = model_class(values["name"]).from_table(values, "model")
    return Task(model, federation(SIZES, shape=SHAPE), 0, precision=precision, computing=computing)


def own_params(task: Task, count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.stack([value + 0.1 * torch.randn(value.shape, generator=generator).to(value) for _ in range(count)])
        for name, value in task.initial().items()
    }


def row(params: dict[str, torch.Tensor], client: int) -> dict[str, torch.Tensor]:
    return {name: value[client : client + 1] for name, value in params.items()}


# ---- runs


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["Normed", "Attention", "Recurrent", "Noisy"])
def test_one_rank_equals_n_and_a_resumed_run(name: str, world: Any, solo: Any, shared_dir: Path) -> None:
    late = {"model": "uniform-depth", "stragglers": 0.7}
    method = {"algorithm": {"name": "salf"}, "speed": late, "participation": {"close": "deadline"}}
    values = small(name, **method)
    one = play(world, values, shared_dir / "one", None)
    same(play(world, values, shared_dir / "ranks", world.comm), one)
    world.meet()  # all have looked before it is taken up again
    resume(world, shared_dir / "ranks", 2, world.comm)
    same(shared_dir / "ranks", one)


@pytest.mark.parametrize("name", WHO)
def test_what_a_run_leaves_loads_strictly_into_the_plain_module(name: str, tmp_path: Path) -> None:
    values = small(name, algorithm={"name": "fedavg", "epochs": 1}, rounds=2)
    run = hpcfl.run(values, out=tmp_path / "run", quiet=True)
    plain = getattr(modules, name)(shape=(1, 8, 8), classes=10)
    plain.load_state_dict(run.state_dict(), strict=True)
    data = run.models.federation.client(0)
    model = next(iter(run.models))
    with torch.no_grad():
        outputs = plain.eval()(torch.from_numpy(data.test_features))
    np.testing.assert_array_equal(model.predict(data.test_features), outputs.argmax(1).numpy())
    learned = {key for key, value in run.state_dict().items() if key in model.params}
    assert learned == set(model.params)
    if name == "Tied":
        assert plain.second.weight is plain.first.weight
        assert torch.equal(plain.scale, model.untrained.task.module(model.params).scale)
    layers = [names[0].rpartition(".")[0] if len(names) > 1 else names[0] for names in LAYERS.get(name, ())]
    assert not layers or run.data["layer"].values.tolist() == layers


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("fedprox", "two"),
        ("fedrep", "Recurrent"),
        ("lg_fedavg", "Residual"),
        ("hf_maml", "Recurrent"),
        ("local", "Tied"),
    ],
)
def test_methods_that_split_or_differentiate_twice(method: str, name: str, tmp_path: Path) -> None:
    keys = {"fedrep": {"head_epochs": 1}, "lg_fedavg": {"shared_layers": 1}}
    values = small(name, algorithm={"name": method, **keys.get(method, {})}, rounds=2)
    run = hpcfl.run(values, out=tmp_path / "run", quiet=True)
    assert np.isfinite(run.data["loss"].values).all()
    personal = {"fedrep": {"head.weight", "head.bias"}, "local": set(run.models.task.initial())}
    if method in personal:
        assert run.models.algorithm.personal(run.models.task) == personal[method]


# ---- how it is computed


@pytest.mark.parametrize("name", [*WHO, "twice"])
def test_gradients_are_the_plain_modules(name: str) -> None:
    task = task_of(name, **({DRAWING[name]: 0.0} if name in DRAWING else {}))
    params = own_params(task, 3)
    batch = next(task.batches(visits_of(task, range(3)), 0, steps=1))
    together, losses = task.gradients(params, batch)
    parts: dict[str, torch.Tensor] = {}
    for number, found, _ in task.backprop(params, batch, [3] * len(task.layer_names())):
        assert tuple(found) == task.layer_names()[number]
        parts |= formed(found)
    for client in range(3):
        net = task.module({key: value[0] for key, value in row(params, client).items()}).train()
        x, y = full_batch(task, client)
        loss = nn.functional.cross_entropy(net(x), y)
        torch.testing.assert_close(losses[client], loss, **CLOSE)
        loss.backward()
        wanted = {key: value.grad for key, value in net.named_parameters() if value.requires_grad}
        assert wanted.keys() == together.keys() == parts.keys()
        for key, gradient in wanted.items():
            torch.testing.assert_close(together[key][client], gradient, **CLOSE)
            assert torch.equal(parts[key], together[key])


@pytest.mark.parametrize("name", [*VMAPPED, "twice"])
def test_vmapped_is_looped_to_rounding(name: str) -> None:
    found = []
    for computing in ("vmapped", "looped"):
        task = task_of(name, computing, "double")  # normalising two numbers makes much of how they were rounded
        params = own_params(task, 3)
        loss = Sgd(0.1).train(task, params, task.batches(visits_of(task, range(3)), 4, epochs=1))
        scores = task.forward(
            params | task.whole.now(range(3)), full_batch(task, 0)[0].to(task.dtype).expand(3, -1, *SHAPE)
        )
        found.append({**params, **task.whole.now(range(3)), "loss": loss, "scores": scores})
    for key, value in found[0].items():
        torch.testing.assert_close(
            value, found[1][key], atol=1e-9, rtol=1e-9, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_who_is_vmapped() -> None:
    found = {name: task_of(name).whole.found for name in WHO}
    assert [name for name in WHO if found[name].computing == "vmapped"] == VMAPPED
    assert found["Noisy"].why == "it draws random numbers, by client"
    assert "lstm" in found["Recurrent"].why
    assert [name for name in WHO if found[name].mixes or found[name].state] == ["Normed", "resnet18"]


@pytest.mark.parametrize("name", WHO)
def test_layers_are_in_the_order_in_which_they_are_ready(name: str) -> None:
    task = task_of(name)
    net, ready = task.module(task.initial()).train(), []
    for key, value in net.named_parameters():
        if value.requires_grad:
            value.register_post_accumulate_grad_hook(lambda _, key=key: ready.append(key))
    net(full_batch(task, 0)[0]).sum().backward()
    layers = task.layer_names()
    times = [max(ready.index(key) for key in names) for names in layers]
    assert times == sorted(times, reverse=True)
    assert layers == LAYERS.get(name, layers)
    assert sorted(key for names in layers for key in names) == sorted(ready)


def test_users_with_less_time_give_the_last_layers() -> None:
    task = task_of("Residual")
    params = own_params(task, 3)
    batch = next(task.batches(visits_of(task, range(3)), 0, steps=1))
    whole, _ = task.gradients(params, batch)
    found = list(task.backprop(params, batch, [0, 1, 2]))
    assert [number for number, _, _ in found] == [2, 1]
    for (_, gradients, losses), count in zip(found, (2, 1)):
        assert len(losses) == 2
        for name, value in gradients.items():
            torch.testing.assert_close(value, whole[name][:count], **CLOSE)


@pytest.mark.parametrize(("name", "how"), [("two", "fused"), ("Residual", "vmapped")])
def test_how_it_is_computed_is_decided_once(
    name: str, how: str, tmp_path: Path, solo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = play(solo, small(name), tmp_path / "whole", None)
    half = shutil.copytree(whole, tmp_path / "half")
    recorded = json.loads(hpcfl.open_run(whole).attrs["computing"])
    assert recorded["how"] == how
    monkeypatch.setattr("hpcfl.models.modules.tracing._vmap_fails", lambda *_: "this is another machine")
    monkeypatch.setattr(Fused, "apart", lambda *_: 1.0)
    assert task_of(name).computing == "looped"
    assert hpcfl.open_models(half).task.computing == how
    resume(solo, half, 2, None)
    same(half, whole)
    assert json.loads(hpcfl.open_run(half).attrs["computing"]) == recorded


# ---- in real time


def test_layers_leave_when_they_are_ready_and_a_closed_round_ends_the_pass() -> None:
    task = task_of("Waiting")
    params, batch = own_params(task, 1), next(task.batches(visits_of(task, [1]), 0, steps=1))
    closed = Event()
    modules.GO.clear()
    layers = task.backprop(params, batch, [1, 1], closed)
    assert next(layers)[0] == 1  # there although the pass has come no further
    closed.set()
    modules.GO.set()
    assert not list(layers)
    assert not any(thread.name.startswith("hpcfl backward") for thread in threading.enumerate())


@pytest.mark.parametrize("name", WHO)
def test_layers_arrive_in_the_traced_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(name)
    layers = task.layer_names()
    level = {key: number for number, names in enumerate(layers) for key in names}
    asked = [Event() for _ in layers]  # no gradient is ready before all layers above its own have arrived
    asked[-1].set()

    class Held(SimpleQueue[Any]):
        def put(self, told: Any, *more: Any) -> None:
            assert told not in level or asked[level[told]].wait(60), told
            super().put(told, *more)

    monkeypatch.setattr(layerwise, "SimpleQueue", Held)
    batch, arrived = next(task.batches(visits_of(task, [0]), 0, steps=1)), []
    for number, _, _ in task.backprop(own_params(task, 1), batch, [1] * len(layers), Event()):
        arrived.append(number)
        asked[number - 1].set()
    assert arrived == [*reversed(range(len(layers)))]


@pytest.mark.parametrize("name", [*WHO, "Waiting"])
def test_real_times_gradients_are_simulated_times(name: str) -> None:
    one, other = task_of(name), task_of(name)
    params, batch = own_params(one, 1), next(one.batches(visits_of(one, [1]), 3, epochs=1))
    wanted = list(one.backprop(params, batch, [1] * len(one.layer_names())))
    found = list(other.backprop(params, batch, [1] * len(one.layer_names()), Event()))
    for (number, gradients, loss), (wanted_number, values, wanted_loss) in zip(found, wanted, strict=True):
        assert number == wanted_number
        assert torch.equal(loss, wanted_loss)
        assert same_bits(formed(gradients), formed(values))
    assert all(torch.equal(value, other.whole.now([1])[key]) for key, value in one.whole.now([1]).items())


# ---- randomness and modes


def steps(task: Task, clients: list[int], round_: int = 0, step: int = 0) -> torch.Tensor:
    visits = visits_of(task, clients, round_=round_)
    batch = list(task.batches(visits, 4, steps=step + 1))[step]
    params = {name: value[clients] for name, value in own_params(task, 3).items()}
    return task.losses(params, batch)


@pytest.mark.parametrize("name", [*DRAWING, "Again"])
def test_what_is_drawn_is_keyed_by_seed_round_client_and_step(name: str) -> None:
    key = DRAWING.get(name, "dropout")
    task = task_of(name, **{key: 0.5})
    both = steps(task, [0, 2])
    torch.testing.assert_close(both[1], steps(task, [2])[0], **CLOSE)
    assert torch.equal(both, steps(task, [0, 2]))
    still = task_of(name, **{key: 0.0})
    assert not torch.allclose(both, steps(still, [0, 2]))
    visits = visits_of(task, [0])
    batch = next(task.batches(visits, 0, steps=1))
    params = own_params(task, 1)
    keys = [batch.key, batch.key._replace(round=1), batch.key._replace(step=1), batch.key._replace(clients=[1])]
    outputs = [task.forward(params, batch.x, key) for key in (*keys, batch.key._replace(seed=1))]
    assert not any(torch.equal(one, other) for n, one in enumerate(outputs) for other in outputs[:n])


@pytest.mark.parametrize("name", WHO)
def test_neither_step_nor_test_leaves_a_trace(name: str) -> None:
    task, untested = task_of(name), task_of(name)
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    params, x = own_params(task, 2), full_batch(task, 0)[0].expand(2, -1, *SHAPE)
    before = task.forward(params, x)
    for step in range(2):
        assert torch.equal(steps(task, [0, 2], step=step), steps(untested, [0, 2], step=step))
        assert torch.equal(task.forward(params, x), before)
    for key, value in untested.whole.now([0, 2]).items():
        assert torch.equal(task.whole.now([0, 2])[key], value)
        assert not torch.equal(value[0], task.whole.buffers[key])
    assert torch.equal(torch.get_rng_state(), kept[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == kept[1:]


def test_nothing_is_dropped_in_a_test() -> None:
    task, bare = task_of("Attention", dropout=0.5), task_of("Attention", dropout=0.0)
    params, x = own_params(task, 2), full_batch(task, 0)[0].expand(2, -1, *SHAPE)
    torch.testing.assert_close(bare.forward(params, x), task.forward(params, x), **CLOSE)


class Stages(Model):
    """A chain one of whose stages has two linear layers, and another dropout inside a module."""

    name: str = "stages"

    def build(self, shape: tuple[int, ...], classes: int) -> list[tuple[str, nn.Sequential]]:
        first = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 12, 0.5, batch_first=True)
        return [
            ("rows", nn.Sequential(nn.Flatten(1, 2), *first)),
            ("encoder", nn.Sequential(layer)),
            ("head", Head(classes)),
        ]


class Head(nn.Sequential):
    """The mean over rows, and a linear layer."""

    def __init__(self, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(48, classes))


def test_modules_of_one_stage_have_names_of_their_own() -> None:
    task = Task(Stages(), federation(SIZES, shape=SHAPE), 0)
    names = task.layer_names()
    assert names[0] == ("rows.1.weight", "rows.1.bias", "rows.3.weight", "rows.3.bias")
    assert names[2] == ("head.weight", "head.bias")
    built = nn.Sequential(OrderedDict(Stages().build(SHAPE, 3)))
    assert task.parameter_count == sum(value.numel() for value in built.parameters())


@pytest.mark.filterwarnings("error")
def test_dropout_inside_a_chains_module_is_keyed_and_off_in_tests() -> None:
    task = Task(Stages(), federation(SIZES, shape=SHAPE), 0)
    both = steps(task, [0, 2])
    assert torch.equal(both, steps(task, [0, 2]))
    torch.testing.assert_close(both[1], steps(task, [2])[0], **CLOSE)
    assert not torch.allclose(both, steps(task, [0, 2], step=1))
    params, x = own_params(task, 2), full_batch(task, 0)[0].expand(2, -1, *SHAPE)
    assert torch.equal(task.forward(params, x), task.forward(params, x))


# ---- keys, and what is refused


def test_the_factorys_parameters_are_keys() -> None:
    config = from_table(small("two") | {"model": section("two", width=9)})
    assert '"width": 9' in config.text()
    assert '"width": 6' in from_table(small("two")).text()
    assert load(config, ["model.width=11"]).model.model_dump()["width"] == 11
    task = task_of("two", width=9)
    assert task.initial()["0.1.weight"].shape == (9, 48)
    with pytest.raises(UsageError, match=r"^model\.width: expected integer, got '9'"):
        task_of("two", width="9")


CASES = {
    "no-module": ("nowhere:net", "model.name: no module 'nowhere'; expected it in "),
    "no-name": ("helpers.modules:Branches", "model.name = 'helpers.modules:Branches': no 'Branches' in "),
    "form": ("helpers.modules:a b", "model.name: expected package.module:factory, got 'helpers.modules:a b'"),
    "not-callable": (
        "helpers.modules:NOTHING",
        "model.name = 'helpers.modules:NOTHING': expected a class or ",
    ),
    "makes-none": ("helpers.modules:no_module", "expected a factory of a torch.nn.Module, got one of 3"),
    "raises": ("helpers.modules:refusing", "model.name = 'helpers.modules:refusing': ArithmeticError: no such width ("),
    "features": ("helpers.modules:wrong_features", "features of shape (1, 8, 8): RuntimeError: mat1 and mat2 shapes "),
    "outputs": ("helpers.modules:wrong_outputs", "expected outputs of shape [3, 10] for 3 samples, got [3, 11]"),
    "unused": ("helpers.modules:Unused", "idle.weight, idle.bias: the outputs do not depend on it; expected that"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, said = CASES[case]
    file = toml(small("two") | {"model": {"name": name}}, tmp_path / "a.toml")
    for command in (["check", str(file)], ["run", str(file), "--out", str(tmp_path / "out")]):
        assert main(command) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert said in lines[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "first"), [("of_shape", "shape = (1, 8, 8)"), ("of_nothing", "nothing")])
def test_a_factory_is_given_what_it_takes(name: str, first: str, tmp_path: Path) -> None:
    file = toml(small("two") | {"model": {"name": f"helpers.modules:{name}"}}, tmp_path / "a.toml")
    assert load(file).model.module((1, 8, 8), 10).given == first


def test_keys_that_no_factory_has_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = toml(small("two") | {"model": section("two", widht=3)}, tmp_path / "a.toml")
    assert main(["check", str(file)]) == 2
    assert capsys.readouterr().err == "hpcfl: model.widht: unknown key; did you mean 'width'?\n"


def test_a_method_that_needs_an_embedding_refuses_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for method in ("fedhenn", "flic"):
        file = toml(small("two", algorithm={"name": method}), tmp_path / "a.toml")
        assert main(["check", str(file)]) == 2
        assert "embed" in capsys.readouterr().err
    task = task_of("two")
    params, x = own_params(task, 1), full_batch(task, 0)[0][None]
    with pytest.raises(UsageError, match="the submodule at whose outputs"):
        task.forward(params, x, last=1)


def test_check_names_the_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = toml(small("Residual"), tmp_path / "a.toml")
    assert main(["check", str(file)]) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("model ")]
    assert "vmapped (vmap gives what the loop does); layers 1 … 3: stem.weight, norm.weight, norm.bias (44); " in line


def test_a_module_is_one_unit() -> None:
    assert isinstance(task_of("two").layers[0], Whole)
