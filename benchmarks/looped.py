"""Local training of modules from outside, client after client, against a plain PyTorch loop on the same batches.

    OMP_NUM_THREADS=1 python benchmarks/looped.py [MODULE ...] [--pairs 15]

Per client 4 SGD steps on batches of 32. The plain loop: load what the server sent, then pick a batch, zero_grad,
forward, loss, backward, step; it is given the order of the samples, which hpcfl draws, as it keys what a module draws
and keeps buffers by client. The two take turns in one process, on one thread; what is taken is the processor's time,
and a module's ratio is the median of its pairs (above 1: hpcfl is slower). Nothing is sent or written. About 3 minutes.
Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfl.base.memory import keep_freed
from hpcfl.base.plugins import look_in
from hpcfl.base.rng import keyed
from hpcfl.data import ClientData, Federation
from hpcfl.learning.batches import Visits
from hpcfl.learning.optim import Sgd
from hpcfl.learning.task import Task
from hpcfl.models import model_class

CLIENTS, SAMPLES, BATCH, CLASSES, LR = 8, 128, 32, 10, 0.05


class Random(Federation):
    """Clients with random samples."""

    def client(self, i: int) -> ClientData:
        """Return client i's samples; its test part is empty."""
        rng = np.random.default_rng(i)
        x, y = rng.normal(size=(SAMPLES, *self.shapes[i])).astype(np.float32), rng.integers(CLASSES, size=SAMPLES)
        return ClientData(x, y, x[:0], y[:0])

    def server_test(self) -> None:
        """Return nothing: the benchmark does not evaluate."""


def normed(shape: tuple[int, ...], classes: int, width: int = 16) -> nn.Module:
    """Return three convolutions with batch normalisation."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((shape[0], width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))


class Recurrent(nn.Module):
    """An LSTM over the rows of an image."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 64) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(shape[-1], width, batch_first=True), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes."""
        states, _ = self.lstm(x.flatten(1, -2))
        scores: Tensor = self.head(states[:, -1])
        return scores


class Encoder(nn.Module):
    """A transformer's encoder over the rows of an image, with dropout."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True)
        self.rows, self.head = nn.Linear(shape[-1], width), nn.Linear(width, classes)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes."""
        scores: Tensor = self.head(self.encoder(self.rows(x.flatten(1, -2))).mean(1))
        return scores


MODULES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "normed": ("looped:normed", (1, 28, 28), {}),
    "lstm": ("looped:Recurrent", (1, 28, 28), {}),
    "encoder": ("looped:Encoder", (1, 28, 28), {}),
    "resnet": ("resnet:ResNet", (3, 32, 32), {"width": 8}),
    "resnet-digits": ("resnet:ResNet", (1, 8, 8), {"width": 8}),
}


def visits(client: int) -> Visits:
    """Return one client's visit."""
    one = np.ones(1, dtype=np.int64)
    return Visits(0, client * one, one, SAMPLES * one, np.ones((1, 1)))


def ours(task: Task) -> None:
    """Train all clients by hpcfl."""
    shared = task.initial()
    for client in range(CLIENTS):
        visit = visits(client)
        params = {name: value.clone() for name, value in task.replicate(shared, visit).items()}
        Sgd(LR).train(task, params, task.batches(visit, BATCH, epochs=1))


def plain(net: nn.Module, state: dict[str, Tensor], held: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Train all clients by PyTorch alone."""
    for x, y, order in held:
        net.load_state_dict(state)
        optimiser = torch.optim.SGD(net.parameters(), lr=LR)
        for rows in torch.split(order, BATCH):
            optimiser.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()


def seconds(function: Callable[[], None]) -> float:
    """Return what a call takes of the processor."""
    start = time.process_time()
    function()
    return time.process_time() - start


def measured(name: str, pairs: int) -> dict[str, float]:
    """Return medians over pairs: of a step's milliseconds by both, and of their ratio."""
    factory, shape, keys = MODULES[name]
    sizes = np.full(CLIENTS, SAMPLES), np.zeros(CLIENTS, dtype=np.int64)
    model = model_class(factory).from_table({"name": factory, **keys}, "model")
    task = Task(model, Random(CLASSES, *sizes, [shape] * CLIENTS), 0, computing="looped")
    net = task.module(task.initial()).train()
    state = {key: value.clone() for key, value in net.state_dict().items()}
    orders = [torch.from_numpy(keyed(0, "batches", 0, client, 0).permutation(SAMPLES)) for client in range(CLIENTS)]
    held = [(*task.samples(client)[:2], order) for client, order in enumerate(orders)]
    mine, reference = partial(ours, task), partial(plain, net, state, held)
    mine(), reference()  # warm up
    found = [(seconds(mine), seconds(reference)) for _ in range(pairs)]
    steps = CLIENTS * SAMPLES / BATCH
    hpcfl_ms, plain_ms = (1000 * median(each) / steps for each in zip(*found))
    ratio = median(own / other for own, other in found)
    print(f"{name:16}{hpcfl_ms:8.2f} ms{plain_ms:8.2f} ms{ratio:8.3f}", flush=True)
    return {"hpcfl_ms": round(hpcfl_ms, 3), "plain_ms": round(plain_ms, 3), "ratio": round(ratio, 3)}


def main() -> None:
    """Print a line per module, and all of them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=list(MODULES), metavar="MODULE", help=", ".join(MODULES))
    parser.add_argument("--pairs", type=int, default=15)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed()  # as every run of hpcfl does; it serves the reference as well
    look_in(Path(__file__).parents[1] / "examples")
    found = {name: measured(name, asked.pairs) for name in asked.modules}
    print(json.dumps({"pairs": asked.pairs, "threads": torch.get_num_threads(), "modules": found}))


if __name__ == "__main__":
    main()
