"""Stacks of linear layers, differentiated by hand: no graph is built, and a weight takes its step within the product.

All clients of a chunk are computed together: activations ``[c, B, n]``. Of a weight the gradient is ``Dᵀ X``, of a bias
the sum of D over the batch, X being what the layer was given and D the loss's gradient by what it gave.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpcfl.base.rng import StepKey
from hpcfl.base.types import State
from hpcfl.learning.batches import Batch
from hpcfl.learning.loss import PerSample
from hpcfl.models.modules.dropout import kept, seeds_of
from hpcfl.models.modules.layers import Layer
from hpcfl.models.modules.module import Whole
from hpcfl.models.modules.tracing import share_apart

backwards = torch.ops.aten


class Pointwise(NamedTuple):
    """A function of each number of ``[c, B, n]``, or of a sample's n numbers."""

    forward: Callable[[Any, Tensor], Tensor]
    backward: Callable[[Any, Tensor, Tensor, Tensor], Tensor]
    """From the module, the gradient by what it gave, what it was given, and what it gave."""


POINTWISE: dict[type[nn.Module], Pointwise] = {
    nn.Identity: Pointwise(lambda _, x: x, lambda _, d, x, y: d),
    nn.Flatten: Pointwise(lambda _, x: x.flatten(2), lambda _, d, x, y: d.view(x.shape)),
    nn.ReLU: Pointwise(lambda _, x: x.relu(), lambda _, d, x, y: backwards.threshold_backward(d, y, 0)),
    nn.Tanh: Pointwise(lambda _, x: x.tanh(), lambda _, d, x, y: backwards.tanh_backward(d, y)),
    nn.Sigmoid: Pointwise(lambda _, x: x.sigmoid(), lambda _, d, x, y: backwards.sigmoid_backward(d, y)),
    nn.LeakyReLU: Pointwise(
        lambda m, x: F.leaky_relu(x, m.negative_slope),
        lambda m, d, x, y: backwards.leaky_relu_backward(d, x, m.negative_slope, False),
    ),
    nn.GELU: Pointwise(
        lambda m, x: F.gelu(x, approximate=m.approximate),
        lambda m, d, x, y: backwards.gelu_backward(d, x, approximate=m.approximate),
    ),
    nn.SiLU: Pointwise(lambda _, x: F.silu(x), lambda _, d, x, y: backwards.silu_backward(d, x)),
    nn.Softmax: Pointwise(
        lambda _, x: x.softmax(-1), lambda _, d, x, y: backwards._softmax_backward_data(d, y, -1, y.dtype)
    ),
}


NO_CLASS = -(2**63)  # no sample is left out

EXACT = (nn.Linear, nn.Dropout, nn.Identity, nn.Flatten, nn.ReLU, nn.LeakyReLU, nn.Softmax)
"""What computes a client's numbers alike with whomever it is computed; others may round the last ones otherwise."""


class Unit(NamedTuple):
    """A module of the stack, the number of its layer, the names of weight and bias if any, the place where it drops."""

    module: nn.Module
    layer: int
    names: dict[str, str]
    place: int = 0


Notes = list[tuple[Unit, Tensor, Tensor]]
"""Of each unit what it was given, and what it gave or multiplied by."""


@dataclass(frozen=True)
class Product:
    """A weight's gradient ``Dᵀ X`` that is not formed yet, D being ``[c, B, o]`` and X ``[c, B, i]``."""

    d: Tensor
    x: Tensor

    def formed(self) -> Tensor:
        """Return the gradient, ``[c, o, i]``."""
        return torch.bmm(self.d.transpose(1, 2), self.x)

    def __len__(self) -> int:
        return len(self.d)

    def __getitem__(self, clients: slice) -> Product:
        return Product(self.d[clients], self.x[clients])

    def added_to(self, value: Tensor, kept: float, factor: float) -> Tensor:
        """Make ``kept · value + factor · Dᵀ X`` of a value, in place, and return it."""
        return value.baddbmm_(self.d.transpose(1, 2), self.x, beta=kept, alpha=factor)


Gradients = Mapping[str, Tensor | Product]
"""Of each client of a chunk, ``{name: [c, …]}``; see `formed`."""


def formed(gradients: Gradients) -> State:
    """Return the gradients, ``{name: [c, …]}``."""
    return {name: each.formed() if isinstance(each, Product) else each for name, each in gradients.items()}


class Fused:
    """A stack with cross-entropy or squared error, which are differentiated together."""

    def __init__(self, units: Sequence[Unit], loss: str) -> None:
        self.units, self.loss = units, loss

    @classmethod
    def of(cls, layers: Sequence[Layer] | Sequence[Whole], loss: PerSample, x: Tensor, y: Tensor) -> Fused | None:
        """Return the stack that a model is, judged with samples ``[B, …]``; None where it is another kind of model."""
        units = [unit for layer in layers for unit in _units(layer)]
        linear = [unit.layer for unit in units if unit.names]
        names = sorted(name for unit in units for name in unit.names.values())
        if names != sorted(name for layer in layers for name in layer.tensors) or linear != sorted(set(linear)):
            return None  # another kind of module is among them, one is frozen, or a tensor or a layer has two places
        flat = x.dim() == 2 or isinstance(units[0].module, nn.Flatten)
        labels = y.dim() == 1 or y.is_floating_point()
        return cls(units, loss.name) if loss.ours and flat and labels else None

    @property
    def rowwise(self) -> bool:
        """Whether a client's numbers are the same to the bit with whomever it is computed, at least one other."""
        return all(type(unit.module) in EXACT for unit in self.units)

    def above(self, layer: int) -> Fused:
        """Return the part of the stack from a layer on."""
        return Fused([unit for unit in self.units if unit.layer >= layer], self.loss)

    def backward(
        self, params: State, batch: Batch, names: Collection[str], rows: Sequence[int] | None = None
    ) -> tuple[Tensor, Iterator[tuple[int, Gradients]]]:
        """Return each client's mean loss ``[c]``, and the gradients by `names` layer by layer, last first.

        Each layer comes with its number l, of the first ``rows[l]`` clients (None: of all), before anything is computed
        for the next one. So the parameters may change once all layers are there.
        """
        tape: Notes = []
        x = batch.x
        for unit in self.units:
            given = x
            if isinstance(unit.module, nn.Dropout):  # multiplies by 0, or by 1 over the chance that a number is kept
                seeds, p = seeds_of(batch.key, x.device), float(unit.module.p)
                got = kept(seeds, unit.place, x.shape[1:], p).to(x.dtype).mul_(1 / (1 - p) if p < 1 else 0.0)
                x = given * got
            elif unit.names:
                weight = params[unit.names["weight"]].transpose(1, 2)
                bias = params[unit.names["bias"]].unsqueeze(1) if "bias" in unit.names else None
                x = got = torch.bmm(given, weight) if bias is None else torch.baddbmm(bias, given, weight)
            else:
                x = got = POINTWISE[type(unit.module)].forward(unit.module, given)
            tape.append((unit, given, got))
        losses, d = self._loss(x, batch)
        return losses, _backward(tape, d, params, names, rows)

    def apart(self, gradients: State, params: State, batch: Batch) -> float:
        """Return by how much its gradients differ from these, as a share of the largest number; 1: not finite."""
        _, layers = self.backward(params, batch, params)
        found = {name: each for _, layer in layers for name, each in formed(layer).items()}
        return max(share_apart(found[name], wanted) for name, wanted in gradients.items())

    def _loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return each client's mean loss ``[c]``, and D of the outputs."""
        y = batch.y
        if self.loss == "squared-error" or (self.loss == "auto" and y.is_floating_point()):
            apart = outputs - (y if y.dim() == outputs.dim() else y.unsqueeze(-1))
            each, d = apart.square().mean(-1), apart * (2 / outputs.shape[-1])
        else:
            logs, classes = outputs.log_softmax(-1), y.unsqueeze(-1)
            if logs.device.type == "cpu":
                each = logs.gather(-1, classes).squeeze(-1).neg_()
            else:  # one operation less for the host to start, though it costs a CPU more than two
                flat = logs.flatten(0, -2), y.flatten()
                each = F.nll_loss(*flat, reduction="none", ignore_index=NO_CLASS).view(y.shape)
            # not scatter_add_, whose deterministic form on a GPU sorts: some 25 launches
            d = logs.exp_().add_(classes == _classes(logs.shape[-1], y.device), alpha=-1)
        if batch.valid is None:
            return each.mean(1), d.div_(y.shape[1])
        share = batch.valid / batch.valid.sum(1, keepdim=True).clamp(min=1).to(d.dtype)
        return (each * share).sum(1), d.mul_(share.unsqueeze(-1))


def one_client(initial: State, x: Tensor, y: Tensor, seed: int) -> tuple[State, Batch]:
    """Return parameters ``{name: [1, …]}`` of which few are 0, also where they begin so, and samples ``[1, B, …]``."""
    params = {}
    for name, value in initial.items():
        ramp = torch.linspace(-0.1, 0.1, value.numel(), dtype=value.dtype, device=value.device)
        params[name] = ramp.view(1, *value.shape).add_(value)
    return params, Batch(x[None], y[None], None, StepKey(seed, 0, [0], 0))


@cache
def _classes(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


def _backward(
    tape: Notes, d: Tensor, params: State, names: Collection[str], rows: Sequence[int] | None
) -> Iterator[tuple[int, Gradients]]:
    lowest = next(unit.layer for unit, _, _ in tape if any(name in names for name in unit.names.values()))
    for unit, given, got in reversed(tape):
        if rows is not None:
            given, got = given[: len(d)], got[: len(d)]
        if unit.names:
            wanted = {own: name for own, name in unit.names.items() if name in names}
            yield unit.layer, {name: Product(d, given) if own == "weight" else d.sum(1) for own, name in wanted.items()}
            if unit.layer == lowest:
                return
            weight = params[unit.names["weight"]]
            if rows is not None:
                count = rows[unit.layer - 1]
                if not count:
                    return
                d, weight = d[:count], weight[:count]
            d = torch.bmm(d, weight)
        elif isinstance(unit.module, nn.Dropout):
            d = d * got
        else:
            d = POINTWISE[type(unit.module)].backward(unit.module, d, given, got)


def _units(layer: Layer | Whole) -> list[Unit]:
    """Return the modules of a layer, or of a module that is a chain; none where another kind is among them."""
    if isinstance(layer, Layer):
        pairs = enumerate(zip(layer.modules, layer.names))
        found = [Unit(module, layer.number, names, layer.first_place(place)) for place, (module, names) in pairs]
    else:
        numbers = {name: number for number, names in enumerate(layer.groups) for name in names}
        found, number, place = [], 0, 0
        for module, names in layer.chain():
            number = max((numbers.get(name, 0) for name in names.values()), default=number)
            found.append(Unit(module, number, names, place))
            place += isinstance(module, nn.Dropout) and module.p > 0
    return found if all(type(unit.module) in (nn.Linear, nn.Dropout, *POINTWISE) for unit in found) else []
