"""The modules of examples/: the sizes of the papers, small ones that learn, and the preset beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpt
import pytest
import resnet
import torch
import vgg
from torch import Tensor, nn

from helpers.toys import federation, full_batch, visits_of
from hpcfl.base import plugins
from hpcfl.config import load
from hpcfl.config.presets import presets
from hpcfl.learning.task import Task
from hpcfl.models import model_class

LARGE, SMALL = (3, 224, 224), (3, 32, 32)
SIZES = [  # as torchvision's documentation counts its own, and those of GPT-2's small model
    (resnet.ResNet, LARGE, 1000, {"stem": "imagenet"}, 11_689_512),
    (resnet.ResNet, SMALL, 10, {}, 11_173_962),
    (resnet.ResNet, LARGE, 1000, {"stem": "imagenet", "blocks": (3, 4, 6, 3)}, 21_797_672),
    (vgg.VGG, LARGE, 1000, {"depth": 11, "hidden": (4096, 4096)}, 132_868_840),
    (vgg.VGG, LARGE, 1000, {"depth": 13, "hidden": (4096, 4096)}, 133_053_736),
    (vgg.VGG, LARGE, 1000, {"depth": 16, "hidden": (4096, 4096)}, 138_365_992),
    (vgg.VGG, LARGE, 1000, {"depth": 19, "hidden": (4096, 4096)}, 143_678_248),
    (gpt.GPT, (1024,), 50257, {"layers": 12, "heads": 12, "width": 768}, 124_439_808),
]


def numbers(module: nn.Module) -> int:
    return sum(value.numel() for value in module.parameters())


@pytest.mark.parametrize(("cls", "shape", "classes", "keys", "wanted"), SIZES)
def test_they_have_the_sizes_that_are_known(
    cls: type[nn.Module], shape: tuple[int, ...], classes: int, keys: dict[str, Any], wanted: int
) -> None:
    with torch.device("meta"):
        assert numbers(cls(shape, classes, **keys)) == wanted


@pytest.mark.parametrize(("stem", "sides"), [("cifar", [32, 32, 16, 8, 4]), ("imagenet", [8, 8, 4, 2, 1])])
def test_a_resnets_stages(stem: str, sides: list[int]) -> None:
    net = resnet.ResNet(SMALL, 7, width=4, stem=stem)
    found: list[tuple[int, ...]] = []
    for name in ("maxpool", "layer1", "layer2", "layer3", "layer4"):
        net.get_submodule(name).register_forward_hook(lambda _, __, output: found.append(tuple(output.shape[1:])))
    assert net(torch.zeros(2, *SMALL)).shape == (2, 7)
    assert found == [(width, side, side) for width, side in zip((4, 4, 8, 16, 32), sides)]
    assert {"conv1.weight", "layer2.0.downsample.1.running_var", "layer4.1.bn2.bias", "fc.bias"} < set(net.state_dict())


def test_a_vggs_depth_is_that_of_its_name() -> None:
    for depth in vgg.CONVOLUTIONS:
        net = vgg.VGG(SMALL, 7, depth=depth, width=1, hidden=(3, 4))
        assert sum(isinstance(part, nn.Conv2d | nn.Linear) for part in net.modules()) == depth
        assert net(torch.zeros(2, *SMALL)).shape == (2, 7)


def texts() -> tuple[gpt.GPT, Tensor]:
    torch.manual_seed(0)
    net = gpt.GPT((6,), 11, layers=2, heads=2, width=8).eval()
    return net, torch.randint(11, (3, 6))


def test_a_gpt_looks_at_no_later_token() -> None:
    net, x = texts()
    outputs = net(x)
    assert outputs.shape == (3, 6, 11)
    other = x.clone()
    other[:, 3] = (x[:, 3] + 1) % 11
    changed = (net(other) - outputs).abs().amax((0, 2))
    assert (changed[:3] == 0).all()
    assert (changed[3:] > 0).all()
    torch.testing.assert_close(net(x[:, :4]), outputs[:, :4])


def test_a_gpt_drops_in_training_only_and_learns_a_text() -> None:
    net, x = texts()
    assert torch.equal(net(x), net(x))
    assert not torch.equal(net.train()(x), net(x))
    assert net.head.weight is net.tokens.weight
    step = torch.optim.Adam(net.parameters(), 0.01)
    losses = []
    for _ in range(60):
        loss = nn.functional.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        step.zero_grad()
        loss.backward()
        step.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_a_vgg_is_a_model() -> None:
    name = "vgg:VGG"
    keys = {"name": name, "depth": 11, "width": 2, "hidden": [5], "dropout": 0.0}
    task = Task(model_class(name).from_table(keys, "model"), federation([4, 4], shape=SMALL), 0)
    layers = task.layer_names()
    assert layers[0] == ("features.0.weight", "features.0.bias", "features.1.weight", "features.1.bias")
    assert len(layers) == 10
    assert layers[-1] == ("classifier.3.weight", "classifier.3.bias")
    visits = visits_of(task, [0, 1])
    gradients, _ = task.gradients(task.replicate(task.initial(), visits), next(task.batches(visits, 0, steps=1)))
    net = task.module(task.initial()).train()
    x, y = full_batch(task, 1)
    nn.functional.cross_entropy(net(x), y).backward()
    for key, value in net.named_parameters():
        torch.testing.assert_close(gradients[key][1], value.grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(("cls", "keys"), [(resnet.ResNet, {"stem": "mnist"}), (vgg.VGG, {"depth": 12})])
def test_other_words_are_refused(cls: type[nn.Module], keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        cls(SMALL, 10, **keys)


def test_a_preset_finds_the_module_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_folders", [])
    there = presets()["resnet-digits"].parent
    assert load("resnet-digits").model.model_dump()["width"] == 8
    assert plugins.places()[1:] == [there]
    monkeypatch.setattr(plugins, "_folders", [])
    (tmp_path / "mine.toml").write_text("base = 'resnet-digits'\nrounds = 3")
    assert load(tmp_path / "mine.toml").model.name == "resnet:ResNet"
    assert plugins.places()[1:] == [tmp_path, there]  # what lies beside one's own config is found first
