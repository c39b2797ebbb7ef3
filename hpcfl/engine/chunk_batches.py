"""Chunks of a rank that are computed at once, where no bit of a visit depends on who is computed with it.

Chunks follow from the config alone. How many visits are computed at once is then a matter of time only: on a CPU as
many as suit its caches, on another device as many as its memory takes, or as there are slots (`hpcfl.learning.slots`).
On a CPU each chunk is summed up by itself: it decides about the last bits of sums, which elsewhere have no chunks
(`hpcfl.sums.on_device`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hpcfl.algorithms.base import Client, Message, Visits
from hpcfl.algorithms.local_sgd import LocalTraining
from hpcfl.base.device_copy import memory_of
from hpcfl.base.lazy import torch
from hpcfl.base.memory import LARGEST_BYTES, last_level_cache
from hpcfl.base.types import State
from hpcfl.engine.border import Border
from hpcfl.engine.hangs import Moves
from hpcfl.engine.uneven import Sent, collected, told, visited
from hpcfl.learning.batches import EACH
from hpcfl.mpi.placement import Chunk

CACHE_SHARE = 4  # a bundle's models take at most this part of the last-level cache, which others use too;
SHARED = 2  # where several threads compute them, this one: they wait for each other after each operation
MEMORY_SHARE = 32  # and at most this part of another device's memory: steps and sums take ten times their room
MOST = 1024  # clients: more of a small model gain nothing
DATA_SHARE = 4  # and the samples of all that a rank hosts, beside them, this part
FEWEST = 2  # a product for one client alone takes another way through the BLAS, and has other last bits
LINE = 16  # numbers of a cache line: on some processors last bits depend on where in a line a matrix begins


class Part(NamedTuple):
    """The visits of one chunk in a round, and the personal state that they begin with, ``{name: [c, …]}``."""

    chunk: Chunk
    personal: State
    visits: Visits


Kind = tuple[frozenset[tuple[int, int]], Hashable]
"""Numbers of samples and steps of a chunk's visits (0 steps: as the method says), and what their tensors are like."""


class Bundles:
    """Computes visits, several chunks at once where that changes no bit.

    Whether it does is tried: the first chunk of each number and kind of visits at each place of a cache line is
    computed by itself as well. Of `kinds` [clients] are the clients' tensors, and only where it is `wanted` are chunks
    computed at once at all. What they send is handed over chunk by chunk, where it must be kept `apart`.
    """

    def __init__(self, border: Border, kinds: Sequence[Hashable], wanted: bool, apart: bool, moves: Moves) -> None:
        task, algorithm = border.task, border.algorithm
        self.task, self.algorithm, self.client, self.kinds, self.moves = task, algorithm, border.client, kinds, moves
        self._same: dict[tuple[int, Kind], bool] = {}  # by a chunk's number of visits, and their kind
        self._tried: set[tuple[int, Kind, int]] = set()  # where chunks of these began in a line
        self._widest: dict[Kind, int] = {}  # clients that may be computed at once on a device, where it was found out
        able = wanted and algorithm.samples_per_step(1) > 0
        self.apart = apart or task.device.type == "cpu"
        if task.device.type == "cpu":
            able = able and task.fused is not None and task.fused.rowwise
            share = CACHE_SHARE if torch.get_num_threads() == 1 else SHARED
            most = min(LARGEST_BYTES, last_level_cache() // share)
        else:
            able = able and not task.looped and not task.buffer_names
            most = memory_of(task.device) // MEMORY_SHARE
        self.bytes = most if able else 0
        self.slots = task.slots if isinstance(algorithm, LocalTraining) else None

    def hold(self, chunks: Sequence[Chunk]) -> None:
        """Read what all clients of some chunks hold, if visits are to fill slots: graphs pick from one array."""
        if self.slots is None or not chunks:  # the server hosts none
            return
        clients, federation = np.concatenate([chunk.clients for chunk in chunks]), self.task.federation
        sample = max(int(np.prod(shape)) for shape in federation.shapes) * self.task.dtype.itemsize
        if sample * int(federation.train_sizes[clients].sum()) <= memory_of(self.task.device) // DATA_SHARE:
            self.task.hold(clients)

    def work(self, shared: State, parts: Iterable[Part]) -> Iterator[tuple[list[Part], Visits, Client]]:
        """Yield parts with their visits and what does these, a generator as `Algorithm.client` is, to be exhausted.

        Several come together where they need not be kept apart.
        """
        if self.slots is not None:
            yield from self._in_slots(shared, parts, self.slots.width)
            return
        for bundle, kind in self._cut(parts) if self.bytes else (([part], None) for part in parts):
            held = [part.chunk.clients for part in bundle]
            self.task.hold(np.concatenate(held) if len(held) > 1 else held[0])
            self.moves.to(bundle[0].visits.round, np.concatenate([part.visits.clients for part in bundle]))
            done = self._at_once(shared, bundle, kind) if kind and len(bundle) > 1 else None
            if done and self.apart:
                yield from (([part], part.visits, told(own)) for part, own in zip(bundle, done[2]))
            elif done:
                yield bundle, done[0].visits, told(done[1])
            else:
                yield from (([part], part.visits, self._client(shared, part)) for part in bundle)

    def _in_slots(
        self, shared: State, parts: Iterable[Part], width: int
    ) -> Iterator[tuple[list[Part], Visits, Client]]:
        """Yield `work` in fillings of so many visits."""
        filling: list[Part] = []
        for part in parts:
            count, start = len(part.visits.clients), 0
            while start < count:
                room = width - sum(len(each.visits.clients) for each in filling)
                own = slice(start, min(start + room, count))
                personal = {name: value[own] for name, value in part.personal.items()}
                filling.append(Part(part.chunk, personal, part.visits.of(np.arange(count)[own])))
                start += room
                if start <= count:
                    yield self._filled(shared, filling)
                    filling = []
        if filling:
            yield self._filled(shared, filling)

    def _filled(self, shared: State, filling: list[Part]) -> tuple[list[Part], Visits, Client]:
        whole = self._joined(filling) if len(filling) > 1 else filling[0]
        self.moves.to(whole.visits.round, whole.visits.clients)
        return filling, whole.visits, self._client(shared, whole)

    def _client(self, shared: State, part: Part) -> Client:
        return visited(self.client, self.task, shared, part.personal, part.visits)

    def _cut(self, parts: Iterable[Part]) -> Iterator[tuple[list[Part], Kind | None]]:
        """Yield parts that follow one another and may be computed at once, and their kind."""
        bundle: list[Part] = []
        count, most = 0, 0
        kind: Kind | None = None
        for part in parts:
            own = self._kind(part.visits)
            count += len(part.visits.clients)
            if bundle and (own is None or own != kind or count > most):
                yield bundle, kind
                bundle, count = [], len(part.visits.clients)
            if not bundle:
                samples, shape = int(part.visits.samples.max()), self.task.federation.shapes[part.visits.clients[0]]
                step = self.algorithm.samples_per_step(samples) * int(np.prod(shape)) * self.task.dtype.itemsize
                fitting = min(MOST, self.bytes // max(step, self.task.nbytes))  # no tensor is too large then
                kind, most = own, min(fitting, self._widest.get(own, MOST)) if own else 0
            bundle.append(part)
        if bundle:
            yield bundle, kind

    def _kind(self, visits: Visits) -> Kind | None:
        """Return what chunks that are computed at once have in common; None: this one is computed by itself.

        In each step the operations depend on whether every client of the chunk has a full batch, or any at all, so
        chunks of the same numbers of samples and steps take the same ones, and so do all of them at once.
        """
        timed = visits.more or visits.training or visits.trained
        steps = np.zeros_like(visits.samples) if visits.steps is None else visits.steps
        kind = frozenset(zip(visits.samples.tolist(), steps.tolist())), self.kinds[int(visits.clients[0])]
        alone = timed or len(visits.clients) < FEWEST or not self._same.get((len(visits.clients), kind), True)
        return None if alone else kind

    def _at_once(self, shared: State, bundle: Sequence[Part], kind: Kind) -> tuple[Part, Sent, list[Sent]] | None:
        """Do all visits; return them, what they have sent, and that part by part; None where it would change a bit."""
        calls = self.task.oracle_calls
        before, whole = calls.copy(), self._joined(bundle)
        sent = collected(self._client(shared, whole))
        done, start, parts = calls.copy(), 0, []
        for part in bundle:
            count = len(part.visits.clients)
            parts.append(rows_of(sent, slice(start, start + count)))
            place = count, kind, start % LINE
            if place not in self._tried and self._same.get((count, kind), True):
                self._tried.add(place)
                begun = {name: value.clone() for name, value in part.personal.items()}  # a visit may change its state
                alone = collected(self._client(shared, part._replace(personal=begun)))
                self._same[count, kind] = same(alone, parts[-1])
            start += count
        good = all(self._same[len(part.visits.clients), kind] for part in bundle)
        calls[:] = done if good else before
        if not good and self.task.device.type != "cpu" and len(bundle) > 2:
            # libraries choose other ways for very many: half as many may be computed as a chunk is
            self._widest[kind] = start // 2
            self._same = {known: same for known, same in self._same.items() if known[1] != kind}
            self._tried = {tried for tried in self._tried if tried[1] != kind}
        return (whole, sent, parts) if good else None

    def _joined(self, bundle: Sequence[Part]) -> Part:
        """Return all visits of a bundle as if they were those of one chunk; what they begin with is copied."""
        each = [part.visits for part in bundle]
        there = [name for name in EACH if getattr(each[0], name) is not None]
        joined: dict[str, Any] = {name: np.concatenate([getattr(visits, name) for visits in each]) for name in there}
        visits = replace(each[0], **joined)
        personal = {name: torch.cat([part.personal[name] for part in bundle]) for name in bundle[0].personal}
        return Part(bundle[0].chunk, personal, visits)


def rows_of(sent: Sent, rows: slice) -> Sent:
    """Return what some of the clients have sent and kept."""
    messages, state = sent
    some: list[Message] = [
        {name: (value[rows], weight[rows]) for name, (value, weight) in each.items()} for each in messages
    ]
    return some, {name: value[rows] for name, value in state.items()}


def same(one: Sent, other: Sent) -> bool:
    """Return whether all numbers are the same to the bit."""
    (messages, state), (others, after) = one, other
    pairs = [
        pair
        for mine, theirs in zip(messages, others, strict=True)
        for name in mine
        for pair in zip(mine[name], theirs[name])
    ]
    return all(torch.equal(*pair) for pair in (*pairs, *((state[name], after[name]) for name in state)))
