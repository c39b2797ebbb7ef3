"""Running one layer of a model for a chunk of clients, each with parameters of its own.

Everything here has a leading client axis: parameters ``[c, …]``, activations ``[c, B, …]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from hpcfl.base.rng import StepKey, key_as_seed
from hpcfl.base.types import State

KINKED = nn.ReLU, nn.LeakyReLU, nn.Hardtanh, nn.MaxPool1d, nn.MaxPool2d


class Dropout(nn.Module):
    """Dropout whose mask is keyed by (seed, round, client, step, layer), so it is the same on any rank.

    ``torch.nn.functional.dropout`` takes no generator. Called as an ordinary module it changes nothing.
    """

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        """Return x: outside a training step nothing is dropped."""
        return x

    def dropped(self, x: Tensor, key: StepKey, number: int) -> Tensor:
        """Return x ``[c, B, …]`` with units dropped and the rest scaled by 1/(1 − chance)."""
        kept = [rng.random(x.shape[1:], dtype="float32") >= self.chance for rng in key.generators(f"dropout {number}")]
        mask = torch.stack([torch.from_numpy(rows) for rows in kept]).to(x.device)
        return x * mask / (1.0 - self.chance)


class Layer:
    """One named layer: its modules, its tensors' names, and how to run it for a chunk."""

    def __init__(self, name: str, modules: nn.Sequential, number: int) -> None:
        self.name = name
        self.number = number
        # which names belong to which module, found once: looking through modules costs as much as a small layer
        self.names = [{key: f"{name}.{key}" for key, _ in m.named_parameters()} for m in modules]
        self.modules = list(modules)
        self.tensors = {f"{name}.{key}": value for m in modules for key, value in m.named_parameters()}
        if any(True for _ in modules.buffers()):
            raise NotImplementedError(f"layer {name}: modules with buffers are not supported")

    @property
    def unbatched(self) -> bool:
        """Whether the layer has a dropout that cannot be batched."""
        return any(isinstance(module, nn.modules.dropout._DropoutNd) for module in self.modules)

    @property
    def nonsmooth(self) -> list[str]:
        """Kinds of modules that are continuous, but whose gradients are not Lipschitz."""
        return [
            type(module).__name__
            for module in self.modules
            if isinstance(module, KINKED) or getattr(module, "smoothness", inf) <= 1
        ]

    @property
    def random(self) -> bool:
        """Whether the layer has a dropout, and so gives something else in each training step."""
        return self.unbatched or any(isinstance(module, Dropout) for module in self.modules)

    def __call__(self, params: dict[str, Tensor], x: Tensor, key: StepKey | None) -> Tensor:
        """Return the layer's output ``[c, B, …]``; `key` is None outside training."""
        for module, names in zip(self.modules, self.names):
            if names:
                x = _own_parameters(module, {key: params[name] for key, name in names.items()}, x)
            elif isinstance(module, Dropout):
                x = x if key is None else module.dropped(x, key, self.number)
            elif isinstance(module, nn.modules.dropout._DropoutNd):
                x = x if key is None else _foreign_dropout(module, x, key, self.number)
            else:
                x = module(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return x


def _own_parameters(module: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Run a module with one set of parameters per client."""
    if len(x) == 1:  # the plain loop: no batching rules in between
        # squeezed, not indexed: the gradient of an index is a second copy
        return _call(module, {key: value.squeeze(0) for key, value in params.items()}, x.squeeze(0)).unsqueeze(0)
    if isinstance(module, nn.Linear) and "bias" in params and x.dim() == 3:
        # weight times x, so that the weight's gradient comes in the weight's own memory order
        return torch.baddbmm(params["bias"].unsqueeze(2), params["weight"], x.transpose(1, 2)).transpose(1, 2)
    return vmap(lambda own, rows: _call(module, own, rows))(params, x)


def _call(module: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Run a module with other parameters; the common modules without the detour of functional_call."""
    if isinstance(module, nn.Linear):
        return F.linear(x, params["weight"], params.get("bias"))
    if isinstance(module, nn.Conv2d):
        result: Tensor = module._conv_forward(x, params["weight"], params.get("bias"))
    else:
        result = functional_call(module, params, (x,))
    return result


def _foreign_dropout(module: nn.Module, x: Tensor, key: StepKey, number: int) -> Tensor:
    """Run a dropout that takes no generator client by client, each under a keyed global seed."""
    seed, round_, clients, step = key
    rows = []
    for client, row in zip(clients, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key_as_seed(seed, f"dropout {number}", round_, client, step))
            rows.append(module.train()(row))
    return torch.stack(rows)


@dataclass(frozen=True)
class Tape:
    """What one layer's backward pass needs: its leaves, and the output of the clients that will go through it."""

    params: State
    x: Tensor
    tracked: Tensor
    whole: Tensor

    @classmethod
    def record(cls, layer: Layer, params: State, x: Tensor, count: int, key: StepKey) -> Tape:
        """Run the layer for all rows, building a graph only for the first `count`: the others stop before it."""
        own = {name: params[name] for name in layer.tensors}
        leaves = {name: value[:count].detach().requires_grad_() for name, value in own.items()}
        inputs = x[:count].detach().requires_grad_(layer.number > 0)
        parts = []
        if count:
            parts.append(layer(leaves, inputs, key._replace(clients=key.clients[:count])))
        if count < len(x):
            with torch.no_grad():
                rest = {name: value[count:] for name, value in own.items()}
                parts.append(layer(rest, x[count:].detach(), key._replace(clients=key.clients[count:])))
        tracked = parts[0] if count else x.new_zeros(0)
        return cls(leaves, inputs, tracked, parts[0] if len(parts) == 1 else torch.cat(parts))

    def backward(self, target: Tensor, upstream: Tensor | None) -> tuple[Tensor | None, State]:
        """Return the gradient at the layer's input (None for the first layer) and those of its tensors."""
        wanted = [*self.params.values(), *([self.x] if self.x.requires_grad else [])]
        seeds = None if upstream is None else upstream[: len(target)]
        found = list(torch.autograd.grad(target, wanted, seeds))
        onward = found.pop() if self.x.requires_grad else None
        return onward, dict(zip(self.params, found))
