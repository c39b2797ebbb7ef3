"""Running one layer of a model for a chunk of clients: parameters ``[c, …]``, activations ``[c, B, …]``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from hpcfl.base.errors import UsageError
from hpcfl.base.rng import StepKey
from hpcfl.base.types import State
from hpcfl.models.modules.dropout import keyed, seeds_of
from hpcfl.models.modules.tracing import seeded

KINKED = nn.ReLU, nn.LeakyReLU, nn.Hardtanh, nn.MaxPool1d, nn.MaxPool2d
DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
SMALL_IMAGE = 64  # pixels up to which a convolution costs less than its call
LARGE_FILTERS = 2**16  # numbers from which on its call costs nothing beside it


class Layer:
    """One named layer of a model: its modules, its tensors by name, and how to run it.

    Attributes
    ----------
    tensors, frozen : State
        Those that are trained, and others, which stay as the modules have them, once for all clients.
    """

    def __init__(self, name: str, modules: nn.Sequential, number: int) -> None:
        self.name = name
        self.number = number
        # which names belong to which module, found once: looking through modules costs as much as a small layer
        self.modules = list(modules)
        self.names = _names(name, self.modules)
        self.drawing = [type(module) not in DROPOUTS and _draws(module) for module in self.modules]
        pairs = zip(self.names, self.modules)
        self.tensors: State = {names[key]: value for names, m in pairs for key, value in m.named_parameters()}
        self.frozen: State = {}
        if buffers := [key for key, _ in modules.named_buffers()]:
            where = f"model: layer {name} has the buffer {buffers[0]}, which a chain of layers cannot keep"
            other = "model.name = 'package.module:factory' that makes the whole"
            raise UsageError(f"{where}: expected a module without, or {other}")

    def freeze(self, names: Collection[str]) -> None:
        self.frozen = {name: value.requires_grad_(False) for name, value in self.tensors.items() if name in names}
        self.tensors = {name: value for name, value in self.tensors.items() if name not in names}

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The names of its tensors, as layers."""
        return (tuple(self.tensors),) if self.tensors else ()

    @property
    def unbatched(self) -> bool:
        """True for a module with dropout inside, which clients take one by one."""
        return any(self.drawing)

    @property
    def heavy(self) -> bool:
        """True with a convolution so large that clients computed together take as long as one by one."""
        filters = (module.weight.numel() for module in self.modules if isinstance(module, nn.Conv2d))
        return any(numbers >= LARGE_FILTERS for numbers in filters)

    @property
    def nonsmooth(self) -> list[str]:
        """Kinds of modules that are continuous, but whose gradients are not Lipschitz."""
        return rough(self.modules)

    @property
    def random(self) -> bool:
        """True where the layer gives something else in each training step."""
        return self.unbatched or any(type(module) in DROPOUTS for module in self.modules)

    def module(self, params: State) -> nn.Sequential:
        """Return the layer as plain modules with copies of one client's parameters."""
        copies = []
        for original, names in zip(self.modules, self.names):
            copied = deepcopy(original)
            for own, name in names.items():
                if name in self.frozen:
                    continue
                place, _, last = own.rpartition(".")
                setattr(copied.get_submodule(place), last, nn.Parameter(params[name].detach().clone()))
            copies.append(copied)
        return nn.Sequential(*copies)

    def __call__(self, params: dict[str, Tensor], x: Tensor, key: StepKey | None) -> Tensor:
        """Return the layer's output ``[c, B, …]``; `key` is None outside training."""
        seeds = seeds_of(key, x.device) if key is not None and self.random else None
        for place, (module, names, drawing) in enumerate(zip(self.modules, self.names, self.drawing)):
            own = {own: params[name] for own, name in names.items() if name not in self.frozen}
            if self.frozen and own:
                kept = {key: self.frozen[name] for key, name in names.items() if key not in own}
                own |= {key: value.expand(len(x), *value.shape) for key, value in kept.items()}
            if drawing:
                x = self._drawn(module, own, x, key, seeds, self.first_place(place))
            elif type(module) in DROPOUTS:
                if seeds is not None:
                    with keyed(seeds, self.first_place(place)):
                        x = module.train()(x)
            elif own:
                x = _with_parameters(module, own, x)
            else:
                x = module(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return x

    def first_place(self, module: int) -> int:
        """Return the number of the first place at which the layer's module drops."""
        return (self.number << 16) + (module << 8)

    def _drawn(
        self, module: nn.Module, params: State, x: Tensor, key: StepKey | None, seeds: Tensor | None, first: int
    ) -> Tensor:
        """Run a module with dropout inside client by client, under a generator of its own for what else it draws.

        In tests too: there a transformer's layer is one operation of torch's, which vmap would loop over and warn of.
        """
        module.train(key is not None)
        rows = []
        for row in range(len(x)):
            own = {name: value[row : row + 1] for name, value in params.items()}
            drawn = 0 if key is None else key.as_seed(f"dropout {self.number}", row)
            with seeded(drawn, x.device), keyed(None if seeds is None else seeds[row], first):
                rows.append(_with_parameters(module, own, x[row : row + 1]))
        return torch.cat(rows)


def rough(parts: Iterable[nn.Module]) -> list[str]:
    """Return the kinds of modules that are continuous, but whose gradients are not Lipschitz."""
    smooth = {part: getattr(part, "smoothness", inf) for part in parts}
    kinked = [part for part, eta in smooth.items() if isinstance(part, KINKED) or (isinstance(eta, float) and eta <= 1)]
    return sorted({type(part).__name__ for part in kinked})


def _draws(module: nn.Module) -> bool:
    """Return whether there is torch's dropout in a module, as a part of it or as a chance that it is given."""
    parts = list(module.modules())
    return any(isinstance(part, nn.modules.dropout._DropoutNd) for part in parts) or any(
        isinstance(chance := getattr(part, "dropout", 0), float) and chance > 0 for part in parts
    )


def _names(stage: str, modules: Sequence[nn.Module]) -> list[dict[str, str]]:
    """Return which name each module's own names have in the model; by its place too, where two would have one name.

    A tensor that is used twice has one name.
    """
    own = [list(module.named_parameters()) for module in modules]
    holders: dict[str, set[int]] = {}
    for key, value in (pair for pairs in own for pair in pairs):
        holders.setdefault(key, set()).add(id(value))
    first: dict[int, str] = {}
    for place, pairs in enumerate(own):
        for key, value in pairs:
            inner = key if len(holders[key]) == 1 else f"{place}.{key}"
            first.setdefault(id(value), f"{stage}.{inner}")
    return [{key: first[id(value)] for key, value in pairs} for pairs in own]


def _with_parameters(module: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Run a module with one set of parameters per client."""
    large = isinstance(module, nn.Conv2d) and x.device.type == "cpu" and x.shape[-2:].numel() > SMALL_IMAGE
    if large:  # channels next to each other in memory: what follows pools an image with all its channels at once
        x = x.movedim(2, 4).contiguous().movedim(4, 2)
    if len(x) == 1:  # no batching rules in between; squeezed, not indexed: the gradient of an index is a second copy
        return _call(module, {key: value.squeeze(0) for key, value in params.items()}, x.squeeze(0)).unsqueeze(0)
    if large:  # client by client: vmap would make a grouped convolution of it, which a CPU computes more slowly
        clients = zip(x.unbind(), *(value.unbind() for value in params.values()))
        outputs = [_call(module, dict(zip(params, state)), rows) for rows, *state in clients]
        return torch.stack([rows.movedim(1, 3) for rows in outputs]).movedim(4, 2)
    if isinstance(module, nn.Linear) and "bias" in params and x.dim() == 3:
        # weight times x, so that the weight's gradient comes in the weight's own memory order
        return torch.baddbmm(params["bias"].unsqueeze(2), params["weight"], x.transpose(1, 2)).transpose(1, 2)
    return vmap(lambda state, rows: _call(module, state, rows))(params, x)


def _call(module: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
    """`functional_call`; the common modules go without its detour."""
    if isinstance(module, nn.Linear):
        return F.linear(x, params["weight"], params.get("bias"))
    if isinstance(module, nn.Conv2d):
        result: Tensor = module._conv_forward(x, params["weight"], params.get("bias"))
    else:
        result = functional_call(module, params, (x,))
    return result


@dataclass(frozen=True)
class Tape:
    """What one layer's backward pass needs."""

    params: State
    x: Tensor
    tracked: Tensor
    """Output of the clients that go through the backward pass, with its graph."""
    output: Tensor
    """Output of all clients."""

    @classmethod
    def record(cls, layer: Layer, params: State, x: Tensor, count: int, key: StepKey, onward: bool) -> Tape:
        """Run the layer for all clients, building a graph only for the first `count`: the others stop before it.

        With `onward` there is a gradient of what the layer is given, too.
        """
        tensors = {name: params[name] for name in layer.tensors}
        leaves = {name: value[:count].detach().requires_grad_() for name, value in tensors.items()}
        inputs = x[:count].detach().requires_grad_(onward)
        parts = []
        if count:
            parts.append(layer(leaves, inputs, key._replace(clients=key.clients[:count])))
        if count < len(x):
            with torch.no_grad():
                rest = {name: value[count:] for name, value in tensors.items()}
                parts.append(layer(rest, x[count:].detach(), key._replace(clients=key.clients[count:])))
        tracked = parts[0] if count else x.new_zeros(0)
        return cls(leaves, inputs, tracked, parts[0] if len(parts) == 1 else torch.cat(parts))

    def backward(self, target: Tensor, upstream: Tensor | None) -> tuple[Tensor | None, State]:
        """Return the gradient at the layer's input (None where it is not wanted) and those of its tensors."""
        wanted = [*self.params.values(), *([self.x] if self.x.requires_grad else [])]
        root = target if upstream is None else _Seeded.apply(target, upstream[: len(target)])  # type: ignore[no-untyped-call]
        gradients = list(torch.autograd.grad(root, wanted))
        onward = gradients.pop() if self.x.requires_grad else None
        return onward, dict(zip(self.params, gradients))


class _Seeded(torch.autograd.Function):
    """A number whose gradient at `target` is `seed`.

    So says ``grad(target, …, grad_outputs=seed)`` too, but torch's check of shapes there loads a library of symbolic
    algebra: .6 s in every process.
    """

    @staticmethod
    def forward(ctx: Any, target: Tensor, seed: Tensor) -> Tensor:
        ctx.save_for_backward(seed)
        return target.new_zeros(())

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (seed,) = ctx.saved_tensors
        return seed, None
