"""Rounds of FedAvg on a GPU as one would write them by hand: what `gpu.py` sets hpcfl's beside.

Five works; each round draws every client's batches, trains, leaves out what is not finite, takes the mean of the models
and the loss, and waits once for the loss. Written in these ways, each of which is faster somewhere:

- ``vmap``: all clients at once by `torch.func`, one operation after the other;
- ``written``: all clients at once, gradients written out (perceptrons only);
- ``vmap graph``, ``written graph``: the same steps captured in a CUDA graph;
- ``loop graph``: the steps of one client in a graph, replayed for one client after the other.

The first round takes the batches that hpcfl draws, so that both end it with the same loss.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

import hpcfl
from hpcfl import config as configs
from hpcfl.base.plugins import look_in
from hpcfl.learning.task import Task

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from gpt import GPT  # type: ignore[import-not-found]
from resnet import ResNet  # type: ignore[import-not-found]

SEED, CLASSES = 1, 10
State = dict[str, Tensor]
Step = Callable[[State, Tensor, Tensor, Tensor], None]
"""Lets the parameters ``[c, …]`` take a step on a batch ``[c, B, …]``, and adds the losses ``[c]`` to the last one."""


@dataclass(frozen=True)
class Work:
    """Clients of so many samples each, their model, and how it is trained."""

    clients: int
    samples: int
    shape: tuple[int, ...]
    batch: int
    lr: float
    model: dict[str, Any]
    classes: int = CLASSES
    ways: tuple[str, ...] = ("vmap", "vmap graph", "loop graph")

    def config(self, name: str, **more: Any) -> dict[str, Any]:
        """Return hpcfl's config of the same."""
        given = {
            "clients": self.clients,
            "seed": SEED,
            "algorithm": {"name": "fedavg", "lr": self.lr, "batch": self.batch},
            "data": {"name": "gpu_by_hand:Drawn", "work": name},
            "model": self.model,
            "speed": {"model": "none"},
            "evaluate": {"every": 10**6, "last": 1},
            "checkpoint": {"every": 10**6},
        }
        return given | more


def works(small: bool = False) -> dict[str, Work]:
    """Return what is computed; `small`: the same of few clients, samples and numbers."""
    image, perceptron = (3, 16, 16) if small else (3, 32, 32), ("vmap", "written", "vmap graph", "written graph")
    mlp = {"name": "mlp", "hidden": [4 if small else 200]}
    lenet = {"name": "cnn", "channels": [2, 2] if small else [64, 64], "hidden": [4] if small else [120, 64]}
    resnet = {"name": "resnet:ResNet", **({"width": 2, "blocks": [1]} if small else {})}
    gpt = {"name": "gpt:GPT", "dropout": 0.0, **({"layers": 1, "heads": 2, "width": 4} if small else {})}
    if small:
        return {
            "MLP-100": Work(6, 8, (5,), 4, 0.1, mlp, ways=perceptron),
            "LeNet-32": Work(3, 8, image, 4, 0.01, lenet),
            "ResNet-18": Work(2, 4, image, 4, 0.01, resnet),
            "GPT": Work(2, 4, (3,), 4, 0.1, gpt, 128),
        }
    return {
        "MLP-100": Work(100, 100, (784,), 10, 0.1, mlp, ways=perceptron),
        "MLP-1000": Work(1000, 100, (784,), 10, 0.1, mlp, ways=perceptron),
        "LeNet-32": Work(32, 100, image, 10, 0.01, lenet),
        "ResNet-18": Work(10, 100, image, 10, 0.01, resnet),
        "GPT": Work(8, 320, (32,), 32, 0.1, gpt, 128),
    }


class Drawn(hpcfl.Source):
    """Clients whose samples are drawn: numbers labelled by a linear teacher, or texts of a chain of letters."""

    work: str
    small: bool = False

    def check(self, clients: int, data_dir: Path | None) -> hpcfl.Header:
        """Return what there is."""
        work = works(self.small)[self.work]
        return hpcfl.Header(clients, clients * work.samples, 0, (work.shape,), work.classes)

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> hpcfl.Federation:
        """Return the clients' samples; nothing is held back for tests."""
        work = works(self.small)[self.work]
        x, y = drawn(work)
        parts = [hpcfl.ClientData(x[i], y[i], x[i, :0], y[i, :0]) for i in range(clients)]
        return hpcfl.InMemory.of(parts, work.classes)


def drawn(work: Work) -> tuple[np.ndarray, np.ndarray]:
    """Return all clients' features ``[clients, n, …]`` and labels ``[clients, n]``; texts' have a length too."""
    rng = np.random.default_rng(0)
    if work.classes > CLASSES:
        text = rng.integers(0, 8, (work.clients, work.samples, work.shape[0] + 1)).cumsum(-1) % work.classes
        return text[..., :-1], text[..., 1:]
    x = rng.standard_normal((work.clients, work.samples, *work.shape), dtype=np.float32)
    teacher = rng.standard_normal((int(np.prod(work.shape)), work.classes), dtype=np.float32)
    return x, (x.reshape(*x.shape[:2], -1) @ teacher).argmax(2)


class ByHand:
    """One work on one device, written one way."""

    def __init__(self, name: str, way: str, device: str, small: bool = False) -> None:
        self.work, self.way, self.device = works(small)[name], way, torch.device(device)
        given = self.work.config(name, rounds=1)
        given["data"] |= {"small": small}
        config = configs.from_table(given)
        model = module(self.work).to(self.device)
        self.together = 1 if way.startswith("loop") else self.work.clients
        look_in(Path(__file__).parent)
        task = Task(config.model, config.data.federate(self.work.clients, SEED, None), SEED)
        names, initial = [name for name, _ in model.named_parameters()], task.initial()
        ours = names if set(names) <= initial.keys() else initial  # built-in models name their layers
        self.state = {name: initial[own].to(device, copy=True) for name, own in zip(names, ours)}
        x, y = (torch.from_numpy(part) for part in drawn(self.work))
        self.x, self.y = x.flatten(0, 1).to(device), y.flatten(0, 1).to(device)
        self.step = written(self.work.lr) if "written" in way else several(model, self.work.lr)
        self.steps = self.work.samples // self.work.batch
        self.params = {key: value.new_empty(self.together, *value.shape) for key, value in self.state.items()}
        self.losses = torch.zeros(self.together, device=device)
        self.rows = torch.zeros(self.together, self.steps * self.work.batch, dtype=torch.int64, device=device)
        self.visit: Callable[[], None] = self._train
        if "graph" in way and self.device.type == "cuda":
            self.visit = captured(self._train, self._begin)

    def _begin(self) -> None:
        for key, value in self.params.items():
            value.copy_(self.state[key].expand_as(value))
        self.losses.zero_()

    def _train(self) -> None:
        self._begin()
        for places in torch.split(self.rows, self.work.batch, 1):
            x, y = (part[places] for part in (self.x, self.y))
            self.step(self.params, x, y, self.losses)

    def orders(self) -> Tensor:
        """Return an order of each client's samples ``[clients, n]``, drawn on the device."""
        return torch.rand(self.work.clients, self.work.samples, device=self.device).argsort(1)

    def keyed_orders(self) -> Tensor:
        """Return those that hpcfl draws in its first round."""
        each = [
            hpcfl.keyed(SEED, "batches", 0, client, 0).permutation(self.work.samples)
            for client in range(self.work.clients)
        ]
        return torch.from_numpy(np.stack(each)).to(self.device)

    @torch.no_grad()
    def round(self, orders: Tensor | None = None) -> float:
        """Take a round; return the mean loss."""
        orders = self.orders() if orders is None else orders
        starts = self.work.samples * torch.arange(self.work.clients, device=self.device)
        rows = orders[:, : self.rows.shape[1]] + starts[:, None]
        sums = {key: torch.zeros_like(value, dtype=torch.float64) for key, value in self.state.items()}
        losses, count = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        for part in torch.split(rows, self.together):
            self.rows.copy_(part)
            self.visit()
            sizes = torch.stack([value.flatten(1).norm(dim=1) for value in self.params.values()])
            good = (sizes.sum(0) + self.losses).isfinite()
            for key, value in self.params.items():
                mask = good.view(-1, *[1] * (value.dim() - 1))
                sums[key] += torch.where(mask, value, 0.0).sum(0, dtype=torch.float64)
            losses += torch.where(good, self.losses / self.steps, 0.0).sum()
            count += good.sum()
        for key, value in self.state.items():
            value.copy_(sums[key] / count)
        return float(losses / count)

    @torch.no_grad()
    def visit_of(self, clients: int, orders: Tensor) -> State:
        """Return what the first clients' parameters become in one visit, computed together, ``{name: [c, …]}``."""
        starts = self.work.samples * torch.arange(clients, device=self.device)
        self.rows = orders[:clients, : self.steps * self.work.batch] + starts[:, None]
        self.params = {key: value.new_empty(clients, *value.shape) for key, value in self.state.items()}
        self.losses = torch.zeros(clients, device=self.device)
        self._train()
        return self.params

    def seconds(self, rounds: int) -> tuple[float, float, float]:
        """Return a round's seconds, in the median and at best, and the loss of the first round."""
        loss = self.round(self.keyed_orders())
        self.round()
        took = []
        for _ in range(rounds):
            start = time.perf_counter()
            self.round()
            took.append(time.perf_counter() - start)
        return float(np.median(took)), min(took), loss


def module(work: Work) -> nn.Module:
    """Return the model as PyTorch has it, whose batch norms take the batch's own statistics."""
    given = {key: value for key, value in work.model.items() if key != "name"}
    if work.model["name"] == "mlp":
        (width,), inputs = given["hidden"], int(np.prod(work.shape))
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, work.classes))
    if work.model["name"] == "cnn":
        channels, hidden = [work.shape[0], *given["channels"]], given["hidden"]
        convolutions = [(nn.Conv2d(*pair, 5), nn.MaxPool2d(2), nn.ReLU()) for pair in pairwise(channels)]
        dense = [
            (nn.Linear(*pair), nn.ReLU()) for pair in pairwise([pooled(work.shape[1]) ** 2 * channels[-1], *hidden])
        ]
        parts = [*chain(*convolutions), nn.Flatten(), *chain(*dense), nn.Linear(hidden[-1], work.classes)]
        return nn.Sequential(*parts)
    if work.model["name"] == "gpt:GPT":
        gpt: nn.Module = GPT(work.shape, work.classes, **given)
        return gpt
    made: nn.Module = ResNet(work.shape, work.classes, **given)
    for part in made.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.track_running_stats, part.running_mean, part.running_var = False, None, None
            part.num_batches_tracked = None
    return made


def pooled(side: int) -> int:
    """Return the side of an image after two convolutions 5x5, each with a pooling 2x2."""
    return ((side - 4) // 2 - 4) // 2


def several(model: nn.Module, lr: float) -> Step:
    """Return a step of all clients by `torch.func`."""

    def loss(params: State, x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(model, params, (x,))
        return F.cross_entropy(outputs.flatten(0, -2), y.flatten())

    gradients = vmap(grad_and_value(loss), randomness="different")

    def step(params: State, x: Tensor, y: Tensor, losses: Tensor) -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            found, loss = gradients(params, x, y)
        torch._foreach_add_(list(params.values()), [found[key] for key in params], alpha=-lr)
        losses += loss

    return step


def written(lr: float) -> Step:
    """Return a step of perceptrons with one hidden layer, whose updates are formed within the products."""

    def step(params: State, x: Tensor, y: Tensor, losses: Tensor) -> None:
        w1, b1, w2, b2 = params.values()
        classes = torch.arange(w2.shape[1], device=x.device)
        hidden = torch.baddbmm(b1.unsqueeze(1), x, w1.transpose(1, 2)).relu_()
        logs = torch.baddbmm(b2.unsqueeze(1), hidden, w2.transpose(1, 2)).log_softmax(2)
        losses -= logs.gather(2, y.unsqueeze(2)).mean((1, 2))
        d2 = (logs.exp_() - (y.unsqueeze(2) == classes).to(logs.dtype)).div_(x.shape[1])
        d1 = torch.bmm(d2, w2).mul_(hidden > 0)
        w2.baddbmm_(d2.transpose(1, 2), hidden, alpha=-lr)
        b2.sub_(d2.sum(1), alpha=lr)
        w1.baddbmm_(d1.transpose(1, 2), x, alpha=-lr)
        b1.sub_(d1.sum(1), alpha=lr)

    return step


def captured(work: Callable[[], None], begin: Callable[[], None]) -> Callable[[], None]:
    """Return what replays some work on the tensors that it works on."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(2):  # libraries take their room and choose their ways before
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        work()
    return graph.replay


@contextmanager
def timed_steps() -> Iterator[list[float]]:
    """Note within the block when the server's steps of FedAvg begin."""
    found: list[float] = []
    before = hpcfl.FedAvg.server

    def server(self: Any, task: Any, shared: Any, sums: Any) -> Any:
        found.append(time.perf_counter())
        return before(self, task, shared, sums)

    hpcfl.FedAvg.server = server  # type: ignore[method-assign]
    try:
        yield found
    finally:
        hpcfl.FedAvg.server = before  # type: ignore[method-assign]
