"""HeteroFL: every client trains as wide a part of the model as suits it (Diao, Ding & Tarokh, ICLR 2021).

A client of rate r holds the first ⌈r·C⌉ of the C units, or channels, of each hidden layer, and the inputs that follow
from them; the last layer keeps its classes. It trains this smaller model as such, and sends what has changed of it. The
server takes for each coordinate the mean over those who hold it, unweighted as the authors do; one that nobody holds
keeps its value. With rates of 1 and ``mask_labels = false`` this is FedAvg of equal weights.

Rates stay as they are from round to round (the authors' ``fix``) or are dealt anew in each (``redraw``: in exact
numbers, where the authors' ``dynamic`` draws each client's by itself). Batch normalisation is static: statistics of
sub-models of several widths have no mean, so that they need ``task.buffers = "static"``. Left open by the text, or left
out: a visit takes the seconds that the speed model says, whatever its rate; gradients are not clipped.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from hpcfl.algorithms.base import Batch, By, Client, Header, Model, Objective, Participation, Task, Visits
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.wrapped import changed
from hpcfl.base.device_copy import on_device
from hpcfl.base.errors import UsageError, refusal
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.rng import keyed
from hpcfl.base.types import Ints, Shape, State
from hpcfl.learning.optim import column
from hpcfl.models.modules import narrow
from hpcfl.sums.message import HELD, Layout, Message, masked

Rate = Annotated[float, Field(gt=0, le=1)]


class HeteroFl(FedAvg):
    """Averages sub-models, the first units of each hidden layer, coordinate by coordinate over those who hold it."""

    name: Literal["heterofl"] = "heterofl"  # type: ignore[assignment]
    needs_all: ClassVar[str] = "narrows every layer of the model"
    means_alone: ClassVar[bool] = False
    rates: tuple[Rate, ...] = Field((1.0, 0.5, 0.25, 0.125, 0.0625), min_length=1)
    """Widths of sub-models as shares of the whole model's, in (0, 1]."""
    assign: Literal["shares", "speed", "clients"] = "shares"
    """Who has which of the `rates`. ``shares``: the first clients the first one, and so on. ``speed``: those of the
    fewest expected seconds per visit the largest, and so on. ``clients``: client i has ``rates[i]``."""
    shares: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """How clients are divided among the `rates`, in numbers of any sum. By default equally."""
    redraw: bool = False
    """Deal the rates anew in each round, in the same numbers. Visits then compute and send the whole model, with 0 in
    what they do not hold."""
    scaler: bool = True
    """While training, what each hidden layer puts out, before activation and batch normalisation, is divided by the
    rate."""
    mask_labels: bool = True
    """A client's loss takes outputs of classes of which it has no training sample for 0, and the last layer's rows are
    averaged over holders of their class (masked cross-entropy)."""
    weights: Literal["samples", "uniform"] = "uniform"
    """Weight of a client in means over clients. ``samples``: its number of training samples. ``uniform``: 1."""
    persist_optimizer: Literal[False] = False
    """The optimiser's memory starts anew with each visit."""

    def check(self, participation: Participation, known: bool = True) -> None:
        super().check(participation, known)
        if self.shares and (self.assign == "clients" or len(self.shares) != len(self.rates) or not sum(self.shares)):
            wanted = "none where assign = 'clients'" if self.assign == "clients" else f"{len(self.rates)}, not all 0"
            raise refusal("algorithm.shares", wanted, list(self.shares))

    def check_model(self, model: Model, header: Header) -> None:
        if self.mask_labels and header.targets:
            raise refusal("algorithm.mask_labels", "false where labels are real numbers", True, False)

    @property
    def sends_whole(self) -> bool:
        """Whether visits send the whole model with a mask, and not the part that they hold."""
        return self.redraw

    def mean_weights(self) -> By:
        if self.mask_labels:
            why = "which rows of the last layer clients hold follows from their labels"
            raise UsageError(f"weighting.correct: algorithm.mask_labels = true: {why}: expected false")
        return self.weights

    @property
    def moves_parts(self) -> bool:
        return self.sends_whole

    def holders(self, task: Task, clients: Ints, round: int) -> State:
        axes, levels, found = narrow.hidden_axes(task.layers), self._dealt(task, round)[clients], State()
        weights = task.federation.train_sizes if self.weights == "samples" else np.ones(task.federation.clients)
        for name, value in task.initial().items():
            if self.narrows(shape := tuple(value.shape), axes[name]):
                found[name] = torch.zeros(shape, dtype=torch.float64)
                for level in np.unique(levels).tolist():
                    part = self.held(shape, axes[name], self.rates[level])
                    found[name][tuple(map(slice, part))] += float(weights[clients[levels == level]].sum())
        return found

    def holds(self, task: Task) -> Ints:
        levels = self._levels(task)
        return np.zeros_like(levels) if self.redraw else levels

    def _levels(self, task: Task) -> Ints:
        """Return which of the `rates` each client has before any redraw, int64 [clients]."""
        clients = np.arange(task.federation.clients)
        if self.assign == "clients":
            if len(self.rates) != len(clients):
                raise UsageError(f"algorithm.rates: expected {len(clients)}, one per client, got {len(self.rates)}")
            return clients
        ends = np.cumsum(self.shares or [1.0] * len(self.rates))
        levels: Ints = np.searchsorted(ends, (clients + 0.5) / len(clients) * ends[-1])
        if self.assign == "speed":
            if len(clients) > 1 and not np.ptp(task.paces):
                wanted = "'shares' or 'clients' where all are expected to be equally fast"
                raise refusal("algorithm.assign", wanted, "speed")
            levels = levels[np.argsort(-np.array(self.rates)[levels], kind="stable")]
            levels[np.argsort(task.paces, kind="stable")] = levels.copy()
        return levels

    def units(self, rate: float, whole: int) -> int:
        """Return how many of a layer's units a client of this rate holds."""
        return ceil(rate * whole - 1e-9)  # 0.07 · 100 is a little more than 7

    def held(self, shape: Shape, narrow: dict[int, int], rate: float) -> Shape:
        """Return the shape of the part of a tensor that a client of this rate holds."""
        sizes = {axis: shape[axis] // whole * self.units(rate, whole) for axis, whole in narrow.items()}
        return tuple(sizes.get(axis, size) for axis, size in enumerate(shape))

    def narrows(self, shape: Shape, narrow: dict[int, int]) -> bool:
        """Return whether anybody holds less than all of a tensor."""
        return any(self.held(shape, narrow, rate) != shape for rate in self.rates)

    def layout(self, task: Task) -> Layout:
        axes, last, groups = narrow.hidden_axes(task.layers), task.layer_names()[-1], []
        if min(self.rates) < 1 and not any(axes.values()):
            raise refusal("algorithm.rates", "1 for a model without hidden layers", list(self.rates))
        if min(self.rates) < 1 and task.buffer_names and task.buffers not in ("static", "keep"):
            raise refusal("task.buffers", "'static' where sub-models differ in width", task.buffers, "static")
        for group in super().layout(task):
            blocks = {}
            for name, block in group.items():
                narrower = self.narrows(block.shape, axes.get(name, {}))
                if narrower and not self.sends_whole:
                    block = replace(block, parts=tuple(self.held(block.shape, axes[name], r) for r in self.rates))
                blocks[name] = block
                if (self.mask_labels and name in last) or (narrower and self.sends_whole):
                    blocks[HELD + name] = replace(block, mask=True)
            groups.append(blocks)
        return tuple(groups)

    def placed(self, task: Task, shared: State, round: int) -> State:
        """Return the model with those units first that sub-models of this round hold."""
        return shared

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        axes, placed = narrow.hidden_axes(task.layers), self.placed(task, shared, visits.round)
        if not self.redraw:  # a chunk's clients are all of one rate
            rate = self._rates(task, visits)[0]
            parts = {name: self.held(value.shape, axes[name], rate) for name, value in shared.items()}
            placed = {name: value[tuple(map(slice, parts[name]))] for name, value in placed.items()}
            if task.whole is not None:  # buffers are as narrow as the model is
                shapes = {name: self.held(value.shape, axes[name], rate) for name, value in task.whole.buffers.items()}
                own = {name: task.whole.buffers[name][tuple(map(slice, shape))] for name, shape in shapes.items()}
                state = {name: value.expand(len(visits.clients), *value.shape) for name, value in own.items()}
                task.whole.begin(visits.clients.tolist(), state)
        work, masks = super().client(task, placed, personal, visits), self._masks(task, shared, visits)
        for name in task.layer_names()[-1] if self.mask_labels else ():
            rows = self._present(task, visits)
            rows = rows.view(*rows.shape, *[1] * (shared[name].dim() - 1))
            masks[name] = rows * masks[name] if name in masks else rows

        def sent(message: Message) -> Message:
            found = dict(message)
            for name, (value, weight) in message.items():
                if name in masks:
                    found |= masked(name, value, masks[name][: len(value)], weight)
            return found

        return (yield from changed(work, sent))

    def fixed(self, round: int) -> None:
        """What is minimised depends on whose labels and rates a chunk's are."""

    def minimised(self, task: Task, shared: State, personal: State, visits: Visits) -> Objective | None:
        present, rates = self._present(task, visits), self._rates(task, visits)
        if set(rates) == {1.0} and not self.mask_labels:
            return None
        divisor = on_device(torch.tensor(rates if self.scaler else [1.0], dtype=task.dtype), task.device)
        names = narrow.divided(task.layers)
        masks = self._masks(task, shared, visits)

        def local(params: State, batch: Batch) -> Tensor:
            held = {name: value * masks[name] if name in masks else value for name, value in params.items()}
            scaled = held | {name: held[name] / column(divisor, held[name]) for name in names & held.keys()}
            sizes = None if batch.valid is None else batch.sample_counts()
            outputs = task.forward(scaled, batch.x, batch.key, sizes=sizes) * present.unsqueeze(1)
            return task.loss.mean(outputs, batch) + (task.penalties(held) if task.penalty else 0)

        return local

    def _rates(self, task: Task, visits: Visits) -> list[float]:
        """Return the rates of some visits' clients."""
        return [self.rates[level] for level in self._dealt(task, visits.round)[visits.clients].tolist()]

    def _dealt(self, task: Task, round: int) -> Ints:
        """Return which of the `rates` each client has in a round, int64 [clients]."""
        levels = self._levels(task)
        return keyed(task.seed, "rates", round).permutation(levels) if self.redraw else levels

    def _masks(self, task: Task, shared: State, visits: Visits) -> State:
        """Return 1 where visits of rates dealt anew hold a tensor's coordinate, else 0, ``{name: [c, …]}``."""
        if not self.redraw:
            return {}
        axes, rates = narrow.hidden_axes(task.layers), self._rates(task, visits)
        masks = {name: value.new_zeros(len(rates), *value.shape) for name, value in shared.items() if axes[name]}
        for name, mask in masks.items():
            for row, rate in zip(mask, rates):
                row[tuple(map(slice, self.held(row.shape, axes[name], rate)))] = 1
        return masks

    def _present(self, task: Task, visits: Visits) -> Tensor:
        """Return 1 for each class of which a client has training samples, else 0, ``[c, classes]``."""
        shape = len(visits.clients), task.federation.classes
        present = torch.full(shape, 0.0 if self.mask_labels else 1.0, dtype=task.dtype, device=task.device)
        for row, client in zip(present, visits.clients.tolist() if self.mask_labels else ()):
            row[task.samples(client).y.flatten()] = 1
        return present
