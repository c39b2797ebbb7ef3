"""Ways to compute convolutions for a chunk of clients with parameters of their own, against a plain PyTorch loop.

    OMP_NUM_THREADS=1 python benchmarks/convolutions.py [--seconds 5]

- vmap: ``torch.func.vmap`` of a convolution, which makes a grouped one of it;
- im2col: patches as columns (`torch.nn.functional.unfold`), then a batched product of matrices;
- loop: a convolution per client, the rest for all clients together;
- hpcfl: the layers as they are, which choose.

A step is forward, backward and SGD on one batch, a test forward on one. The plain loop has a module, loads each
client's parameters and uses `torch.optim.SGD`. All take turns, `--seconds` for each table row; a figure is the median
of ratios to the plain loop, of the processor's time on one thread, of wall time on two. About 2 minutes. Prints one
JSON line last.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import launching
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from hpcfl.base.memory import keep_freed
from hpcfl.base.rng import StepKey
from hpcfl.base.types import State
from hpcfl.models.cnn import Cnn
from hpcfl.models.modules.layers import Layer

LR, CLASSES = 0.01, 10
LENET, MNIST = Cnn(channels=(64, 64), hidden=(120, 64)), Cnn()
DIGITS = Cnn(channels=(4, 8), kernel=3, padding="same", hidden=(16,))

Convolution = Callable[[nn.Conv2d, Tensor, Tensor, Tensor], Tensor]
"""Of images ``[c, B, …]`` with filters and biases ``[c, …]``."""


class Case(NamedTuple):
    """A model, the shape of its images, and how many clients take a step on how many samples."""

    model: Cnn
    shape: tuple[int, int, int]
    clients: int
    batch: int


CASES = {
    "lenet, batch 10": Case(LENET, (3, 32, 32), 10, 10),
    "lenet, batch 50": Case(LENET, (3, 32, 32), 10, 50),
    "mnist, 10 clients": Case(MNIST, (1, 28, 28), 10, 16),
    "mnist, 50 clients": Case(MNIST, (1, 28, 28), 50, 16),
    "digits, 50 clients": Case(DIGITS, (1, 8, 8), 50, 10),
}


def grouped(module: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return what vmap makes of it."""
    result: Tensor = vmap(module._conv_forward)(x, weight, bias)
    return result


def columns(module: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return it as a product of matrices."""
    size = module.kernel_size[0]
    padding = size // 2 if module.padding == "same" else 0
    patches = F.unfold(x.flatten(0, 1), size, padding=padding)
    patches = patches.view(*x.shape[:2], *patches.shape[1:]).transpose(1, 2)
    product = torch.baddbmm(bias.unsqueeze(2), weight.flatten(2), patches.flatten(2))
    sides = tuple(side + 2 * padding - size + 1 for side in x.shape[-2:])
    return product.view(*product.shape[:2], x.shape[1], *sides).transpose(1, 2)


def looped(module: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return it client by client."""
    return torch.stack([module._conv_forward(*each) for each in zip(x.unbind(), weight.unbind(), bias.unbind())])


WAYS: dict[str, Convolution] = {"vmap": grouped, "im2col": columns, "loop": looped}


def forward(layers: list[nn.Sequential], convolve: Convolution, params: list[Tensor], x: Tensor) -> Tensor:
    """Return the outputs of all clients, ``[c, B, classes]``."""
    values = iter(params)
    for module in (module for layer in layers for module in layer):
        if isinstance(module, nn.Conv2d):
            x = convolve(module, x, next(values), next(values))
        elif isinstance(module, nn.Linear):
            weight, bias = next(values), next(values)
            x = torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))
        else:
            x = module(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    return x


def chosen(layers: list[Layer], key: StepKey, params: list[Tensor], x: Tensor) -> Tensor:
    """Return the outputs of hpcfl's layers."""
    state: State = dict(zip((name for layer in layers for name in layer.tensors), params))
    for layer in layers:
        x = layer(state, x, key)
    return x


def step(run: Callable[[list[Tensor], Tensor], Tensor], params: list[Tensor], x: Tensor, y: Tensor) -> None:
    """Let all clients take a step."""
    leaves = [value.detach().requires_grad_() for value in params]
    losses = F.cross_entropy(run(leaves, x).flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)
    for value, gradient in zip(params, torch.autograd.grad(losses.sum(), leaves)):
        value.add_(gradient, alpha=-LR)


def plain(net: nn.Module, states: list[State], x: Tensor, y: Tensor, training: bool) -> None:
    """Let all clients take a step, or test them, by PyTorch alone."""
    with torch.set_grad_enabled(training):
        for state, features, labels in zip(states, x, y):
            net.load_state_dict(state)
            loss = F.cross_entropy(net(features), labels)
            if training:
                optimiser = torch.optim.SGD(net.parameters(), lr=LR)
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                optimiser.zero_grad()


def sides(case: Case, training: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the plain loop, then all ways, by name."""
    named = case.model.build(case.shape, CLASSES)
    modules = [part for _, part in named]
    x, y = torch.randn(case.clients, case.batch, *case.shape), torch.randint(CLASSES, (case.clients, case.batch))
    usual = nn.Sequential(*(part for layer in modules for part in rectified_first(layer)))
    states = [{name: value.clone() for name, value in usual.state_dict().items()} for _ in x]
    yield "plain", partial(plain, usual, states, x, y, training)
    params = [value.detach().expand(case.clients, *value.shape).clone() for value in usual.parameters()]
    runs = {name: partial(forward, modules, convolve) for name, convolve in WAYS.items()}
    layers = [Layer(name, part, number) for number, (name, part) in enumerate(named)]
    for name, run in (runs | {"hpcfl": partial(chosen, layers, StepKey(0, 0, list(range(case.clients)), 0))}).items():
        yield name, partial(step, run, params, x, y) if training else torch.no_grad()(partial(run, params, x))


def rectified_first(layer: nn.Sequential) -> list[nn.Module]:
    """Return a layer's modules as they are usually written: pooling comes last."""
    return sorted(layer, key=lambda module: isinstance(module, nn.MaxPool2d))


def measured(case: Case, training: bool, seconds: float, clock: Callable[[], float]) -> dict[str, float]:
    """Return the plain loop's milliseconds per client, and the ratios to it."""
    runs = dict(sides(case, training))
    found: list[dict[str, float]] = []
    end = time.perf_counter() + seconds
    while len(found) < 4 or time.perf_counter() < end:
        found.append({})
        for name, run in runs.items():
            start = clock()
            run()
            found[-1][name] = clock() - start
    kept = found[1:]  # the first turn warms up
    ratios = {name: round(median(each[name] / each["plain"] for each in kept), 3) for name in runs if name != "plain"}
    return {"plain_ms": round(1000 * median(each["plain"] for each in kept) / case.clients, 3)} | ratios


def main() -> None:
    """Print a line per case, and all of them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    asked = parser.parse_args()
    keep_freed()  # as every run of hpcfl does; it serves the reference as well
    print(f"{'':32}{'plain ms':>10}" + "".join(f"{name:>8}" for name in (*WAYS, "hpcfl")))
    found: dict[str, Any] = {}
    for threads, clock in ((1, time.process_time), (2, time.perf_counter)):
        torch.set_num_threads(threads)
        for name, case in CASES.items():
            for kind, training in (("step", True), ("test", False)):
                where = f"{threads} {name}, {kind}"
                found[where] = row = measured(case, training, asked.seconds, clock)
                print(f"{where:32}{row['plain_ms']:10.3f}" + "".join(f"{row[way]:8.2f}" for way in (*WAYS, "hpcfl")))
    print(json.dumps({"load": launching.load(), "cases": found}))


if __name__ == "__main__":
    main()
