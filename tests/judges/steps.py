"""What loops share whose layers learn in parts, or by Adam: each client by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from judges.plain import Params

Loss = Callable[[Params], Tensor]


def mlp(w: Mapping[str, Tensor], x: Tensor, slope: float = 0.0) -> Tensor:
    """Linear layers as they come, with a ReLU between them, of this slope below 0."""
    layers = [name.removesuffix(".weight") for name in w if name.endswith(".weight")]
    for name in layers[:-1]:
        x = F.leaky_relu(x @ w[f"{name}.weight"].T + w[f"{name}.bias"], slope)
    return x @ w[f"{layers[-1]}.weight"].T + w[f"{layers[-1]}.bias"]


def mean_loss(x: Tensor, y: Tensor) -> Callable[[Mapping[str, Tensor]], Tensor]:
    return lambda w: F.cross_entropy(mlp(w, x), y)


def gradient(loss: Loss, w: Params, names: Iterable[str] | None = None) -> Params:
    """The gradient by the tensors named, or by all."""
    return graded(loss, w, names)[1]


def graded(loss: Loss, w: Params, names: Iterable[str] | None = None) -> tuple[float, Params]:
    """The loss, and its gradient by the tensors named, or by all."""
    asked = list(w if names is None else names)
    leaves = {name: value.detach().clone().requires_grad_(name in asked) for name, value in w.items()}
    value = loss(leaves)
    return float(value.detach()), dict(zip(asked, torch.autograd.grad(value, [leaves[name] for name in asked])))


def penalised(g: Params, w: Params, decay: float) -> Params:
    """With the gradient of ``decay/2 |w|²``, which takes weights and leaves biases."""
    return {name: value + decay * w[name] * name.endswith("weight") for name, value in g.items()}


class Sgd:
    """Heavy ball: ``v ← momentum·v + g``, ``w ← w − lr·v``. Steps return new tensors."""

    def __init__(self, lr: float, momentum: float = 0.0, decay: float = 0.0, memory: Params | None = None) -> None:
        self.lr, self.momentum, self.decay, self.v = lr, momentum, decay, dict(memory or {})

    def step(self, w: Params, g: Params) -> Params:
        for name, value in penalised(g, w, self.decay).items():
            self.v[name] = self.momentum * self.v[name] + value if name in self.v else value
        return w | {name: w[name] - self.lr * self.v[name] for name in g}


class Adam:
    """Adam with bias correction; `decoupled`: AdamW, weights shrink by ``lr·decay`` first."""

    def __init__(
        self, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, decay: float = 0.0,
        decoupled: bool = False,
    ) -> None:  # fmt: skip
        self.lr, self.betas, self.eps, self.decay, self.decoupled = lr, betas, eps, decay, decoupled
        self.t, self.m, self.v = 0, Params(), Params()

    def step(self, w: Params, g: Params) -> Params:
        self.t += 1
        if self.decoupled:
            w = w | {name: w[name] * (1 - self.lr * self.decay) for name in g if name.endswith("weight")}
        else:
            g = penalised(g, w, self.decay)
        new, (b1, b2) = dict(w), self.betas
        for name, value in g.items():
            self.m[name] = b1 * self.m.get(name, torch.zeros_like(value)) + (1 - b1) * value
            self.v[name] = b2 * self.v.get(name, torch.zeros_like(value)) + (1 - b2) * value * value
            m, v = self.m[name] / (1 - b1**self.t), self.v[name] / (1 - b2**self.t)
            new[name] = w[name] - self.lr * m / (v.sqrt() + self.eps)
        return new
