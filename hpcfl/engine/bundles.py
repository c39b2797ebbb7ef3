"""Chunks of a rank that are computed at once, though each is summed up by itself.

Chunks decide about the last bits of sums, and follow from the config alone. Where no bit of a visit depends on who is
computed with it, how many visits are is a matter of time only: as many as suit the caches of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch

from hpcfl.base.memory import LARGEST_BYTES, last_level_cache
from hpcfl.base.types import State
from hpcfl.comm.placement import Chunk
from hpcfl.learning.batches import Visits

if TYPE_CHECKING:
    from hpcfl.algorithms.base import Algorithm, Client
    from hpcfl.comm.message import Message
    from hpcfl.learning.task import Task

R = TypeVar("R")

CACHE_SHARE = 4  # a bundle's models take at most this part of the last-level cache, which others use too
MOST = 1024  # clients: more of a small model gain nothing
SHARE_BYTES = 2**23  # smaller models keep Python busier than the threads
FEWEST = 2  # a product for one client alone takes another way through the BLAS, and has other last bits


class Part(NamedTuple):
    """The visits of one chunk in a round, and the personal state that they begin with, ``{name: [c, …]}``."""

    chunk: Chunk
    personal: State
    visits: Visits


Kind = tuple[frozenset[tuple[int, int]], Hashable]
"""Numbers of samples and steps of a chunk's visits (0 steps: as the method says), and what their tensors are like."""
Sent = tuple[list["Message"], State]
"""All messages of some visits, and their state afterwards."""


class Bundles:
    """Computes visits, several chunks at once where that changes no bit.

    Whether it does is tried: the first chunk of each number and kind of visits is computed by itself as well. Of
    `kinds` [clients] are the clients' tensors, and only where it is `wanted` are chunks computed at once at all.
    """

    def __init__(self, task: Task, algorithm: Algorithm, kinds: Sequence[Hashable], wanted: bool) -> None:
        self.task, self.algorithm, self.kinds = task, algorithm, kinds
        self._same: dict[tuple[int, Kind], bool] = {}  # by a chunk's number of visits, and their kind
        able = wanted and task.device.type == "cpu" and algorithm.samples_per_step(1) > 0
        able = able and task.fused is not None and task.fused.rowwise
        self.bytes = min(LARGEST_BYTES, last_level_cache() // CACHE_SHARE) if able else 0

    def shares(self, chunks: list[Chunk]) -> list[list[Chunk]]:
        """Return the chunks of each of torch's threads: all in one share where they are better at dividing them.

        A thread that has chunks of its own waits for no other after each operation.
        """
        threads, clients = torch.get_num_threads(), sum(len(chunk.clients) for chunk in chunks)
        if threads == 1 or not self.bytes or clients * self.task.nbytes < threads * SHARE_BYTES:
            return [chunks]
        parts = np.array_split(np.arange(len(chunks)), min(threads, len(chunks)))
        return [[chunks[number] for number in part] for part in parts]

    def work(self, shared: State, parts: Iterable[Part]) -> Iterator[tuple[Part, Client]]:
        """Yield each part with what does its visits, a generator as `Algorithm.client` is; to be exhausted in turn."""
        for bundle, kind in self._cut(parts) if self.bytes else (([part], None) for part in parts):
            held = [part.chunk.clients for part in bundle]
            self.task.hold(np.concatenate(held) if len(held) > 1 else held[0])
            if kind and len(bundle) > 1 and (works := self._at_once(shared, bundle, kind)):
                yield from zip(bundle, works)
            else:
                yield from ((part, self._client(shared, part)) for part in bundle)

    def _client(self, shared: State, part: Part) -> Client:
        return self.algorithm.client(self.task, shared, part.personal, part.visits)

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
                kind, most = own, self._most(part.visits) if own else 0
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

    def _most(self, visits: Visits) -> int:
        """Return how many clients may be computed at once: those of which no tensor is too large."""
        samples, shape = int(visits.samples.max()), self.task.federation.shapes[int(visits.clients[0])]
        step = self.algorithm.samples_per_step(samples) * int(np.prod(shape)) * self.task.dtype.itemsize
        return min(MOST, self.bytes // max(step, self.task.nbytes))

    def _at_once(self, shared: State, bundle: Sequence[Part], kind: Kind) -> list[Client]:
        """Do all visits; return what hands them over part by part, nothing where that would change a bit."""
        whole = self._joined(bundle)
        calls, own = self.task.oracle_calls, whole.visits.clients  # other threads count those of other clients
        before = calls[own]
        sent = collected(self._client(shared, whole))
        done, start, parts = calls[own], 0, []
        for part in bundle:
            count = len(part.visits.clients)
            parts.append(rows_of(sent, slice(start, start + count)))
            start += count
            if (count, kind) not in self._same:
                begun = {name: value.clone() for name, value in part.personal.items()}  # a visit may change its state
                alone = collected(self._client(shared, part._replace(personal=begun)))
                self._same[count, kind] = same(alone, parts[-1])
        good = all(self._same[len(part.visits.clients), kind] for part in bundle)
        calls[own] = done if good else before
        return [told(each) for each in parts] if good else []

    def _joined(self, bundle: Sequence[Part]) -> Part:
        """Return all visits of a bundle as if they were those of one chunk; what they begin with is copied."""
        each = [part.visits for part in bundle]
        steps = [visits.steps for visits in each if visits.steps is not None]
        visits = replace(
            each[0],
            clients=np.concatenate([visits.clients for visits in each]),
            depth=np.concatenate([visits.depth for visits in each]),
            samples=np.concatenate([visits.samples for visits in each]),
            arrival=np.concatenate([visits.arrival for visits in each]),
            steps=np.concatenate(steps) if steps else None,
        )
        personal = {name: torch.cat([part.personal[name] for part in bundle]) for name in bundle[0].personal}
        return Part(bundle[0].chunk, personal, visits)


def in_threads(works: Sequence[Callable[[], R]]) -> list[R]:
    """Call all of them at once, each in a thread that torch does not divide; one alone is called as it is."""
    if len(works) == 1:
        return [works[0]()]
    threads = torch.get_num_threads()

    def undivided(work: Callable[[], R]) -> R:
        torch.set_num_threads(1)  # of this thread
        return work()

    others = [_workers(len(works) - 1).submit(undivided, work) for work in works[1:]]
    try:
        first = undivided(works[0])
    finally:
        wait(others)
        torch.set_num_threads(threads)
    return [first, *(other.result() for other in others)]


@cache
def _workers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "visits")


def collected(work: Client) -> Sent:
    """Let visits take place; return all that they send, and their state afterwards."""
    messages: list[Message] = []
    while True:
        try:
            messages.append(next(work))
        except StopIteration as end:
            return messages, end.value


def told(sent: Sent) -> Client:
    """Yield messages, return the state."""
    messages, state = sent
    yield from messages
    return state


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
