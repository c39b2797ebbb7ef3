"""Visits, which an algorithm's client side is given, and the batches of samples of their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from threading import Event
from typing import Literal

import numpy as np

from hpcfl.base.device_copy import on_device, refill
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.rng import StepKey, keyed_in_turn
from hpcfl.base.types import Floats, Ints, State
from hpcfl.learning.samples import Samples

PHASE_STEPS = 2**32  # more steps than a phase of a visit has
PHASES = 2**16  # more phases than a visit has
PICKED_BYTES = 2**28  # of samples that are picked at once on a device other than the CPU
PADDING = 4  # pixels around an image before it is cropped


class RoundClosed(Exception):  # noqa: N818
    """The round has closed: what is still being computed has lost its purpose."""


class Uneven(Exception):  # noqa: N818
    """Clients of a chunk have samples in different numbers of steps: in some of them nothing of theirs may move.

    Each of the `groups` are the rows of those who have equal ones.
    """

    def __init__(self, groups: list[Ints]) -> None:
        super().__init__(
            "clients of a chunk have samples in different numbers of steps: expected visits of equal ones, or "
            "`padded` batches for what lets clients rest"
        )
        self.groups = groups


@dataclass
class Training:
    """How far the training of some visits has come: what a snapshot of them is made of."""

    params: State = field(default_factory=dict)
    memory: State = field(default_factory=dict)
    loss: Tensor | None = None
    """The mean objective over the steps so far, ``[c]``; None: there was none."""
    buffers: State = field(default_factory=dict)

    def begin(self, params: State, memory: State) -> None:
        """Take what training will change in place."""
        self.params, self.memory = params, memory

    def note(self, loss: Tensor) -> None:
        self.loss = loss


EACH = "clients", "depth", "samples", "arrival", "steps", "step_chances"
"""What `Visits` know of each of their clients, row by row; None where nobody asks."""


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
    steps: Ints | None = None
    """Local steps that each one takes, ``[c]``, where they may be fewer than the method says; None: as it says. In real
    time they fall to those that were taken when a visit stops."""
    more: Callable[[], bool] | None = None
    """In real time: asked before each local step whether there is time for it; None: there is."""
    training: Training | None = None
    """In real time: told how far training has come, where snapshots are wanted."""
    trained: Training | None = None
    """What training has come to, of visits that are a snapshot of others: they train no more."""
    number: int = 0
    """How many visits these clients have begun before with the same state: each draws batches of its own."""
    step_chances: Floats | None = None
    """Chance that so many of each one's local steps, 1 … T, are done and count, ``[c, T]``; None: nobody asks."""
    rate: float = 1.0
    """By what the size of their steps is multiplied."""

    @classmethod
    def for_test(cls, round: int, clients: Ints) -> Visits:
        """Visits that send nothing: a test after `round` rounds."""
        return cls(round, clients, np.ones(0, int), np.ones(0, int), np.ones((0, 0)))

    def of(self, rows: Ints) -> Visits:
        """Return those at some rows."""
        each = {name: getattr(self, name) for name in EACH}
        known = {name: value for name, value in each.items() if value is not None and len(value) == len(self.clients)}
        return replace(self, **{name: value[rows] for name, value in known.items()})

    def after(self, steps: Ints) -> Visits:
        """The same with so many of each one's steps taken."""
        return self if self.steps is None else replace(self, steps=(self.steps - steps).clip(min=0))

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
    note: Callable[[Tensor], None] | None = None
    """Told the mean objective so far once the step is taken; None: nobody wants to know."""

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
        if self.valid is None or (self.sizes is not None and min(self.sizes) > 0):
            return None
        return self.valid.any(1)


Draw = Callable[[Visits], "Ints | None"]
"""What the host draws for some visits, int64 of one shape; None: they take other steps than those before."""


class Feeds:
    """What the steps of visits take from the host: how it is drawn, and its room on the device.

    Steps are taken twice before there is a graph. The first time each draw is noted, and its numbers copied; the second
    time, as they are recorded, the same draws find theirs in one tensor, which `fill` fills for each replay.
    """

    def __init__(self, visits: Visits, device: torch.device) -> None:
        self.visits, self.device = visits, device
        self._draws: list[tuple[Draw, Ints]] = []
        self._rooms: list[Tensor] = []
        self._room: Tensor | None = None

    def fed(self, draw: Draw) -> Tensor:
        """Return the numbers of a draw on the device."""
        if self._room is not None:
            return self._rooms.pop(0)
        drawn = draw(self.visits)
        if drawn is None:
            raise RuntimeError("samples of its clients lie in several places")
        self._draws.append((draw, drawn))
        return on_device(torch.from_numpy(drawn), self.device)

    def settle(self) -> None:
        """Let the same draws find their numbers in one tensor from now on."""
        each = [drawn for _, drawn in self._draws]
        self._room = on_device(torch.from_numpy(_flat(each)), self.device)
        parts = torch.split(self._room, [drawn.size for drawn in each])
        self._rooms = [part.view(drawn.shape) for part, drawn in zip(parts, each)]

    def fill(self, drawn: Ints) -> None:
        """Let the next replay find what was drawn for its visits."""
        if self._room is not None and drawn.size:
            refill(self._room, torch.from_numpy(drawn))

    def drawn(self, visits: Visits) -> Ints | None:
        """Return what the same steps of other visits take, in one array; None where they take others."""
        found = []
        for draw, first in self._draws:
            drawn = draw(visits)
            if drawn is None or drawn.shape != first.shape:
                return None
            found.append(drawn)
        return _flat(found)


def _flat(parts: Sequence[Ints]) -> Ints:
    return np.concatenate([part.ravel() for part in parts]) if parts else np.zeros(0, dtype=np.int64)


@dataclass
class Batches(Iterator[Batch]):
    """The batches of a chunk's steps, see `Task.batches`: ``next`` yields steps in which every client has samples.

    Where there are others it raises `Uneven` before the first one; `padded` yields these too.

    Attributes
    ----------
    held : callable
        Returns the samples of each of some clients, once the first batch is asked for.
    fill : float, optional
        Images are cropped and mirrored, and padded with it before.
    feeds : Feeds, optional
        Where steps are recorded: all that is drawn passes through it.
    """

    held: Callable[[Ints], Sequence[Samples]]
    visits: Visits
    seed: int
    size: int
    epochs: int = 0
    steps: int = 0
    phase: int = 0
    fill: float | None = None
    feeds: Feeds | None = None

    def __next__(self) -> Batch:
        return next(self._even)

    @cached_property
    def _even(self) -> Iterator[Batch]:
        steps = (self._index >= 0).any(2).sum(0)
        kinds = np.unique(steps)
        if len(kinds) > 1:
            raise Uneven([np.flatnonzero(steps == kind) for kind in kinds])
        return self.padded()

    @cached_property
    def _data(self) -> Sequence[Samples]:
        return self.held(self.visits.clients)

    @cached_property
    def _phase(self) -> int:
        return self.phase + PHASES * self.visits.number

    @cached_property
    def _index(self) -> Ints:
        sizes = [len(samples.y) for samples in self._data]
        return orders(self.visits, sizes, self.seed, self.size, self.epochs, self.steps, self._phase)

    def padded(self) -> Iterator[Batch]:
        """Yield all steps, also those in which some clients have no samples: `Batch.active` says who has."""
        index, visits = self._index, self.visits
        counts, width = (index >= 0).sum(2).tolist(), index.shape[2]
        (x, y), starts = _together(self._data)
        full = all(min(sizes) == width for sizes in counts)
        real = None
        if self.feeds is not None:
            rows = self.feeds.fed(self._rows)
            if not full:
                real, rows = rows >= 0, rows.clamp(min=0)
        else:
            rows = on_device(torch.from_numpy(index.clip(min=0) + starts), y.device)
            real = None if full else on_device(torch.from_numpy(index >= 0), y.device)
        for step, (sizes, (picked, labels)) in enumerate(zip(counts, _picked(x, y, rows))):
            visits.raise_if_closed()
            if visits.more is not None and not visits.more():
                return
            key = self._key(step)
            if self.feeds is not None:
                key = key._replace(fed=partial(self._seeds, step))
            if self.fill is not None:
                picked = crop_and_flip(picked, key, self.fill)
            note = None if visits.training is None else visits.training.note
            yield Batch(picked, labels, None if real is None or min(sizes) == width else real[step], key, sizes, note)

    def _key(self, step: int) -> StepKey:
        return StepKey(self.seed, self.visits.round, self._clients, step + PHASE_STEPS * self._phase)

    @cached_property
    def _clients(self) -> list[int]:
        return [int(client) for client in self.visits.clients]

    def _rows(self, visits: Visits) -> Ints | None:
        """Return where other visits' samples lie, ``[steps, c, size]``, −1: none; None where their steps are others."""
        other = replace(self, visits=visits)
        absent, (pool, starts) = other._index < 0, _together(other._data)
        alike = np.array_equal(absent, self._index < 0) and pool is self._data[0].pool
        return np.where(absent, -1, other._index + starts) if alike else None

    def _seeds(self, step: int, purpose: str, clients: Sequence[int]) -> Tensor:
        """Return seeds of some clients in a step that is recorded, on the device."""
        every = list(clients) == self._clients  # of whom one may be there several times
        places = slice(None) if every else [self._clients.index(client) for client in clients]
        assert self.feeds is not None
        return self.feeds.fed(lambda visits: replace(self, visits=visits)._key(step).seeds(purpose)[places])


def _picked(x: Tensor, y: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield features and labels step by step, of rows ``[steps, …]``.

    On a CPU each step's are picked when it comes, into its caches; elsewhere those of many steps by one operation.
    """
    x_shape, y_shape = ((*rows.shape[1:], *part.shape[1:]) for part in (x, y))
    if x.device.type == "cpu":
        for places in rows.flatten(1).unbind():
            yield x.index_select(0, places).view(x_shape), y.index_select(0, places).view(y_shape)
        return
    step_bytes = sum(part[:1].nbytes * rows[:1].numel() for part in (x, y))
    count = max(1, PICKED_BYTES // max(1, step_bytes))
    for start in range(0, len(rows), count):
        places = rows[start : start + count].flatten()
        yield from zip(x.index_select(0, places).view(-1, *x_shape), y.index_select(0, places).view(-1, *y_shape))


def orders(
    visits: Visits, held: Sequence[int], seed: int, size: int, epochs: int = 0, steps: int = 0, phase: int = 0
) -> Ints:
    """Return which of the `held` samples of each client make up its steps, ``[steps, c, size]``; −1: none.

    Its steps are fewer where it holds less or its visit is cut short, and the last batch of a pass may not be full.
    """
    parts = {}
    for n in sorted(set(held)):
        places = np.flatnonzero(np.equal(held, n))
        width = min(size, n) if size else n
        passes = epochs or -(-steps * width // n)
        drawn = np.empty((len(places), passes, n), dtype=np.int64)
        generators = keyed_in_turn(seed, "batches", visits.round, visits.clients[places], phase)
        for own, rng in zip(drawn, generators):
            for order in own:
                order[:] = rng.permutation(n)
        if steps:
            cut = drawn.reshape(len(places), passes * n)[:, : steps * width]
        else:
            cut = np.full((len(places), passes, -(-n // width) * width), -1)
            cut[:, :, :n] = drawn
        parts[n] = places, cut.reshape(len(places), -1, width)
    shapes = [part.shape[1:] for _, part in parts.values()]
    index = np.full((max(count for count, _ in shapes), len(held), max(width for _, width in shapes)), -1)
    for places, part in parts.values():
        index[: part.shape[1], places, : part.shape[2]] = part.transpose(1, 0, 2)
    if visits.steps is not None:
        index[np.arange(len(index))[:, None] >= visits.steps] = -1
        index = index[: visits.steps.max()]
    return index


def _together(data: Sequence[Samples]) -> tuple[tuple[Tensor, Tensor], Ints]:
    """Return features and labels of several clients in one array each, and where each one's begin, ``[c, 1]``."""
    pool, starts = data[0].pool, [samples.start for samples in data]
    if any(samples.pool is not pool for samples in data):  # they were read at different times
        pool = torch.cat([samples.x for samples in data]), torch.cat([samples.y for samples in data])
        starts = np.cumsum([0, *(len(samples.y) for samples in data[:-1])]).tolist()
    return pool, np.array(starts, dtype=np.int64)[:, None]


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
    padded = torch.nn.functional.pad(x.flatten(0, 1), (PADDING,) * 4, value=fill)
    sample = torch.arange(len(padded), device=x.device)[:, None, None, None]
    colour = torch.arange(channels, device=x.device)[:, None, None]
    return padded[sample, colour, down[:, None, :, None], across[:, None, None, :]].view(x.shape)
