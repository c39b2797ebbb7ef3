"""Visits, which an algorithm's client side is given, and the batches of samples of their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hpcfl.base.rng import StepKey, keyed
from hpcfl.base.transfer import on_device
from hpcfl.base.types import Floats, Ints

STACKED_BYTES = 2**25  # most that is copied together for a visit
PHASE_STEPS = 2**32  # more steps than a phase of a visit has
PADDING = 4  # pixels around an image before it is cropped


class RoundClosed(Exception):  # noqa: N818
    """The round has closed: what is still being computed has lost its purpose."""


@dataclass(frozen=True)
class Visits:
    """The visits of one chunk of c clients in one round, deepest first."""

    round: int
    clients: Ints
    """Client ids, ``[c]``."""
    depth: Ints
    """First layer (1 … L) that each one delivers in time, ascending, ``[c]``."""
    samples: Ints
    """Training samples that each one holds, ``[c]``."""
    arrival: Floats
    """Chance that layer l counts, ``[c, L]``; NaN where unknown."""
    closed: Event | None = None
    """In real time: set when the round has closed."""

    @classmethod
    def for_test(cls, round: int, clients: Ints) -> Visits:
        """Visits that send nothing: a test after `round` rounds."""
        return cls(round, clients, np.ones(0, int), np.ones(0, int), np.ones((0, 0)))

    def raise_if_closed(self) -> None:
        if self.closed is not None and self.closed.is_set():
            raise RoundClosed

    def in_time(self, layer: int) -> int:
        """How many clients (the first ones) still have time for layer `layer` (1 … L)."""
        if self.closed is not None and self.closed.is_set():
            return 0
        return int(np.searchsorted(self.depth, layer, side="right"))

    def ones(self, rows: int) -> Tensor:
        """Weight 1 for the first `rows` visits."""
        return torch.ones(rows, dtype=torch.float64)

    def weights(self, by: Literal["samples", "uniform"]) -> Tensor:
        """The clients' weights in a mean, ``[c]``: their numbers of samples, or 1."""
        return torch.from_numpy(self.samples.astype(np.float64)) if by == "samples" else self.ones(len(self.clients))


class Samples(NamedTuple):
    """One client's training and test samples, on the device that computes."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Batch:
    """One step's samples of c clients, B each."""

    x: Tensor
    """Features, ``[c, B, …]``."""
    y: Tensor
    """Classes, int64 ``[c, B]``, or real targets."""
    valid: Tensor | None
    """Which samples are real, bool ``[c, B]``; None: all."""
    key: StepKey
    sizes: list[int] | None = None
    """How many samples of each client are real, known without asking the device; None: `valid` tells."""

    def sample_counts(self) -> list[int]:
        if self.sizes is None:
            return [self.x.shape[1]] * len(self.x) if self.valid is None else self.valid.sum(1).tolist()
        return self.sizes

    def first(self, count: int) -> Batch:
        """The same of the first `count` clients."""
        key = self.key._replace(clients=self.key.clients[:count])
        valid = None if self.valid is None else self.valid[:count]
        return Batch(self.x[:count], self.y[:count], valid, key, self.sizes and self.sizes[:count])

    def active(self) -> Tensor | None:
        """Which clients have any sample in this step, bool ``[c]``; None: all of them."""
        everybody = self.valid is None or (self.sizes is not None and min(self.sizes) > 0)
        return None if everybody or self.valid is None else self.valid.any(1)

    def active_weight(self) -> Tensor:
        """1 for each client that has a sample in this step, else 0, ``[c]``."""
        active = self.active()
        return self.x.new_ones(len(self.x)) if active is None else active.to(self.x.dtype)


def batches(
    data: Sequence[tuple[Tensor, Tensor]],
    visits: Visits,
    seed: int,
    size: int,
    epochs: int = 0,
    steps: int = 0,
    phase: int = 0,
    fill: float | None = None,
) -> Iterator[Batch]:
    """See `Task.batches`; `data` are each client's features and labels, with `fill` images are cropped and mirrored."""
    generators = [keyed(seed, "batches", visits.round, int(client), phase) for client in visits.clients]
    orders = [_order(rng, len(y), size, epochs, steps) for rng, (_, y) in zip(generators, data)]
    count, width = max(len(order) for order in orders), max(order.shape[1] for order in orders)
    index = np.full((len(orders), count, width), -1)
    for padded, order in zip(index, orders):
        padded[: order.shape[0], : order.shape[1]] = order
    clients, device = [int(client) for client in visits.clients], data[0][1].device
    real, rows = (on_device(torch.from_numpy(part), device) for part in (index >= 0, index.clip(min=0)))
    pick_x, pick_y = (_picker(part, count * width) for part in zip(*data))
    for step, sizes in enumerate((index >= 0).sum(2).T.tolist()):
        visits.raise_if_closed()
        x, y = pick_x(rows[:, step]), pick_y(rows[:, step])
        key = StepKey(seed, visits.round, clients, step + PHASE_STEPS * phase)
        if fill is not None:
            x = crop_and_flip(x, key, fill)
        yield Batch(x, y, None if min(sizes) == width else real[:, step], key, sizes)


def _order(rng: np.random.Generator, n: int, size: int, epochs: int, steps: int) -> Ints:
    """Sample indices ``[steps, size]`` of one client's visit, −1 where the last batch of a pass is not full."""
    size = min(size, n) if size else n
    if steps:
        passes = -(-steps * size // n)
        return np.concatenate([rng.permutation(n) for _ in range(passes)])[: steps * size].reshape(steps, size)
    orders = np.full((epochs, -(-n // size) * size), -1)
    for row in orders:
        row[:n] = rng.permutation(n)
    return orders.reshape(-1, size)


def _picker(parts: Sequence[Tensor], count: int) -> Callable[[Tensor], Tensor]:
    """What picks rows ``[c, B]`` of the clients' samples ``c × [n_i, …]``; `count` rows of each are picked in all."""
    if len(parts) == 1:
        return lambda rows: parts[0].index_select(0, rows[0]).unsqueeze(0)
    longest = max(len(part) for part in parts)
    if count < longest or len(parts) * longest * parts[0][:1].nbytes > STACKED_BYTES:
        return lambda rows: torch.stack([part.index_select(0, index) for part, index in zip(parts, rows)])
    # one tensor of all that is held costs a copy, and saves an operation per client and step
    whole = pad_sequence(list(parts), batch_first=True)
    clients = torch.arange(len(parts), device=whole.device)[:, None]
    return lambda rows: whole[clients, rows]


def crop_and_flip(x: Tensor, key: StepKey, fill: float) -> Tensor:
    """Images ``[c, B, C, H, W]`` cropped at random from copies padded with `fill`, mirrored with chance 1/2."""
    clients, batch, channels, height, width = x.shape
    # one row of draws per sample, so that a sample's do not depend on how many come after it
    drawn = np.stack([rng.random((batch, 3)) for rng in key.generators("augment")]).reshape(clients * batch, 3)
    corners = (drawn[:, :2] * (2 * PADDING + 1)).astype(np.int64)
    rows = corners[:, :1] + np.arange(height)
    columns = corners[:, 1:] + np.arange(width)
    columns = np.where(drawn[:, 2:] < 0.5, columns[:, ::-1], columns)
    down, across = (on_device(torch.from_numpy(index), x.device) for index in (rows, columns))
    padded = F.pad(x.flatten(0, 1), (PADDING,) * 4, value=fill)
    sample = torch.arange(len(padded), device=x.device)[:, None, None, None]
    colour = torch.arange(channels, device=x.device)[:, None, None]
    return padded[sample, colour, down[:, None, :, None], across[:, None, None, :]].view(x.shape)
