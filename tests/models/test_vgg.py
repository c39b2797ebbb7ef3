"""VGG with batch normalisation: the paper's sizes and names, its layers, and SALF's round with it by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from helpers.toys import Rounds, federation, planned, visits_of
from hpcfl.algorithms.buffered import with_buffers
from hpcfl.algorithms.salf import Salf
from hpcfl.base.errors import UsageError
from hpcfl.learning.task import Task
from hpcfl.models import model_class
from hpcfl.models.vgg import CONVOLUTIONS, Vgg

IMAGE = (3, 32, 32)


def vgg_task(sizes: list[int], **keys: object) -> Task:
    return Task(Vgg(width=1, **keys), federation(sizes, shape=IMAGE), 0)


def test_depth_11_is_the_papers() -> None:
    with torch.device("meta"):
        net = model_class("vgg")().module(IMAGE, 10)
    parts = [part for part in net if isinstance(part, nn.Conv2d | nn.MaxPool2d)]
    said = "64 M 128 M 256 256 M 512 512 M 512 512 M"
    assert " ".join(str(part.out_channels) if isinstance(part, nn.Conv2d) else "M" for part in parts) == said
    channels = [3, *(int(word) for word in said.split() if word != "M")]
    numbers = sum(9 * i * o + 3 * o for i, o in pairwise(channels)) + 512 * 10 + 10
    assert sum(value.numel() for value in net.parameters()) == numbers


@pytest.mark.parametrize("depth", CONVOLUTIONS)
def test_a_normalisations_parameters_belong_to_their_convolutions_layer(depth: int) -> None:
    task = vgg_task([4], depth=depth)
    layers = task.layer_names()
    assert len(layers) == depth - 2
    for number, names in enumerate(layers[:-1], start=1):
        assert names == tuple(f"{kind}{number}.{own}" for kind in ("conv", "norm") for own in ("weight", "bias"))
    assert layers[-1] == ("fc1.weight", "fc1.bias")
    assert len(task.buffer_names) == 3 * (depth - 3)


def test_images_that_are_too_small_are_refused() -> None:
    for shape in ((1, 28, 28), (784,)):
        with pytest.raises(UsageError, match=r"^model\.name = 'vgg' needs [^\n]*$"):
            Vgg().check(shape, 10)


def test_a_round_of_salf_by_hand() -> None:
    """Four users that reach layers 1, 5 and 9 and none, against a plain module; somebody reaches 1 with chance 3/4."""
    task, depths = vgg_task([6] * 4), [1, 5, 9, 10]
    salf = Salf(lr=0.1, batch=4, missing="exact")
    rounds = Rounds(with_buffers(salf, task), task)
    start, miss = dict(rounds.state), [0.25] + [0.0] * 8
    gradients, buffers = [], []
    for client in range(3):
        batch = next(task.batches(visits_of(task, [client]), 4, steps=1))
        net = task.module(task.initial()).train()
        nn.functional.cross_entropy(net(batch.x[0]), batch.y[0]).backward()
        gradients.append({name: value.grad for name, value in net.named_parameters()})
        buffers.append({name: value.double() for name, value in net.named_buffers()})
    rounds.step(planned(depths, 9, miss=miss))
    for level, names in enumerate(task.layer_names(), start=1):
        reached = [own for own, depth in zip(gradients, depths) if depth <= level]
        for name in names:
            mean = sum(own[name] for own in reached) / len(reached)
            wanted = start[name] - 0.1 / (1 - miss[level - 1]) * mean
            torch.testing.assert_close(rounds.state[name], wanted, atol=1e-6, rtol=1e-4)
    for name in task.buffer_names:  # of all that have sent anything, whichever layers they have reached
        wanted = 1.0 if name.endswith("tracked") else sum(own[name] for own in buffers) / 3
        torch.testing.assert_close(rounds.state[name].double(), torch.as_tensor(wanted).double(), atol=1e-6, rtol=1e-5)
