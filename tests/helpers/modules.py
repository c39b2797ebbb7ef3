"""Modules as users bring them: none of them knows of hpcfl."""

from __future__ import annotations

from math import prod
from threading import Event
from typing import Any

import torch
import torch.nn.functional as F
from resnet import ResNet
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def two(shape: tuple[int, ...], classes: int, width: int = 6) -> nn.Module:
    """Two linear layers in one block."""
    block = nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), width), nn.ReLU(), nn.Linear(width, width))
    return nn.Sequential(block, nn.ReLU(), nn.Linear(width, classes))


def twice(shape: tuple[int, ...], classes: int, width: int = 6) -> nn.Module:
    """One linear layer in two places."""
    again = nn.Linear(width, width)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(prod(shape), width), nn.Tanh(), again, nn.Tanh(), again, nn.Linear(width, classes)
    )


class Residual(nn.Module):
    """Convolutions, around one of which the input goes too."""

    def __init__(self, shape: tuple[int, ...], classes: int, channels: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(shape[0], channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, channels)
        self.inner = nn.Conv2d(channels, channels, 3, padding=1)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return self.head(F.relu(x + self.inner(x)).mean((2, 3)))


class Normed(nn.Module):
    """A residual network with batch normalisation."""

    def __init__(self, shape: tuple[int, ...], classes: int, channels: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(shape[0], channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.inner = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.stem(x)))
        return self.head(F.relu(x + self.bn2(self.inner(x))).mean((2, 3)))


def resnet18(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The example's, of few channels."""
    return ResNet(shape, classes, width=4)


def normed_chain(shape: tuple[int, ...], classes: int, channels: int = 4, eps: float = 1.0) -> nn.Module:
    """Convolutions with batch normalisations that show by what their inputs were divided."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(shape[0], channels, 3), nn.BatchNorm2d(channels, eps), nn.ReLU()),
        nn.Sequential(nn.Conv2d(channels, channels, 3), nn.BatchNorm2d(channels, eps), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(channels * ((shape[1] - 4) // 2) * ((shape[2] - 4) // 2), classes),
    )


class Counter(nn.Module):
    """Counts the samples that it has seen in steps, up and down."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(shape[-1], classes)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += torch.tensor([1, -1]) * (len(x) * self.training)
        return self.head(x.flatten(1, -2).mean(1))


class Centred(nn.Module):
    """Puts another tensor in a buffer's place in each step, where others change it."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(shape[-1], classes)
        self.register_buffer("centre", torch.zeros(shape[-1]))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1, -2).mean(1)
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * x.mean(0)
        return self.head(x - self.centre.detach())


class Attention(nn.Module):
    """A transformer's encoder over the rows of an image."""

    def __init__(self, shape: tuple[int, ...], classes: int, dropout: float = 0.1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(shape[-1], 2, 12, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(shape[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.flatten(1, -2)).mean(1))


class Noisy(nn.Module):
    """Adds noise that no function of dropout's draws."""

    def __init__(self, shape: tuple[int, ...], classes: int, noise: float = 0.1) -> None:
        super().__init__()
        self.noise, self.head = noise, nn.Linear(prod(shape), classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(x + self.noise * torch.randn_like(x) * self.training)


class Again(nn.Module):
    """Computes a part with dropout once more where it is differentiated, to save memory."""

    def __init__(self, shape: tuple[int, ...], classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), 6), nn.Dropout(dropout), nn.Tanh())
        self.head = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.part, x, use_reentrant=False))


class Tied(nn.Module):
    """One weight in two places, and one that is frozen."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(shape[-1], shape[-1])
        self.second = nn.Linear(shape[-1], shape[-1])
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.rand(shape[-1]), requires_grad=False)
        self.head = nn.Linear(shape[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1, -2) * self.scale)))).mean(1))


class Branch(nn.Module):
    """Two ways that meet again; one of their modules is used twice."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(prod(shape), 5), nn.Linear(prod(shape), 5)
        self.twice = nn.Linear(5, 5)
        self.head = nn.Linear(5, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        wide = self.twice(self.twice(F.relu(self.wide(x))))
        return self.head(F.relu(self.narrow(x)) * torch.sigmoid(wide))


class Recurrent(nn.Module):
    """torch's LSTM over the rows of an image."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(shape[-1], 5, batch_first=True)
        self.head = nn.Linear(5, classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x.flatten(1, -2))
        return self.head(states[:, -1])


GO = Event()


class Wait(torch.autograd.Function):
    """Nothing, which takes until `GO` in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert GO.wait(60)
        return gradient


class Waiting(nn.Module):
    """Two layers between which the backward pass waits."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(prod(shape), 5), nn.Linear(5, classes)
        GO.set()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Wait.apply(self.first(x.flatten(1))))


class Unused(nn.Module):
    """A part that nothing depends on."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.head, self.idle = nn.Linear(prod(shape), classes), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))


def no_module(shape: tuple[int, ...], classes: int) -> int:
    """Make no module."""
    return 3


def of_shape(shape: tuple[int, ...]) -> nn.Module:
    """Take the shape alone of what the data give."""
    made = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    made.given = f"{shape = }"
    return made


def of_nothing() -> nn.Module:
    """Take nothing of it, as most modules do."""
    made = of_shape(())
    made.given = "nothing"
    return made


def refusing(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Refuse to make anything."""
    raise ArithmeticError("no such\nwidth")


def wrong_features(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Take other features."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3, classes))


def wrong_outputs(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Give other outputs."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes + 1))


NOTHING = 3


class Encoded(nn.Module):
    """An embedding and a classifier, as hpcfl's latent model has them; `besides` lets features go around."""

    def __init__(self, shape: tuple[int, ...], classes: int, besides: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        size = prod(shape)
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(size, 8), nn.ReLU(), nn.Linear(8, 4))
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(4, classes))
        self.besides = besides

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.encoder(x))
        return outputs + x.flatten(1).sum(1, keepdim=True) if self.besides else outputs


class Mute(nn.Module):
    """Learns, and says nothing in tests."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(prod(shape), classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.linear(x.flatten(1))
        return outputs if self.training else outputs * torch.nan
