"""Which clients live where: chunks of clients cut from the config alone, dealt whole to ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from hpcfl.errors import UsageError
from hpcfl.plan import Floats, Ints

CACHE_BYTES = 5_000_000  # a chunk's parameters should stay in a core's cache: 8 models of 640 kB ran fastest
MOST_PER_CHUNK = 32
CHUNKS_WANTED = 8  # "auto" leaves at least so many chunks, so that some ranks can share them


@dataclass(frozen=True)
class Chunk:
    """Clients that are computed together: number, ids int64 [c] (fast ones first), and the rank that hosts them."""

    number: int
    clients: Ints
    rank: int

    def places(self, clients: Ints) -> Ints:
        """Return the rows of this chunk at which `clients` stand."""
        order = np.argsort(self.clients, kind="stable")
        return order[np.searchsorted(self.clients, clients, sorter=order)]


def chunk_size(batch_clients: str | int | bool, clients: int, model_bytes: int, one_by_one: bool = False) -> int:
    """Return clients per chunk: as the config says, or by cache size and number of clients for "auto".

    Parameters
    ----------
    one_by_one : bool
        Let "auto" be 1: the wall clock computes visit by visit, and a replay must give the same bits.
    """
    if batch_clients is False or (one_by_one and batch_clients == "auto"):
        return 1
    if isinstance(batch_clients, int):
        return min(batch_clients, clients)
    fitting = max(1, CACHE_BYTES // max(1, model_bytes))
    return min(MOST_PER_CHUNK, fitting, -(-clients // CHUNKS_WANTED))


def cut(size: int, paces: Floats, ranks: int, kinds: Sequence[Hashable] | None = None) -> list[Chunk]:
    """Cut the clients, fastest expected pace first, into chunks of `size` and deal these to the client ranks.

    Dealt like cards, so that any fastest n are spread evenly. Rank 0 serves, and hosts clients only when alone.

    Parameters
    ----------
    kinds : sequence [clients], optional
        Clients of one chunk are of one kind: their tensors are stacked. None: all are.

    Raises
    ------
    UsageError
        If there are more client ranks than chunks: some would have nothing to do.
    """
    order = np.argsort(paces, kind="stable")
    parts = alike(size, order, kinds or [None] * len(order))
    if ranks - 1 > len(parts):
        fitting = max(1, len(order) // (ranks - 1))
        raise UsageError(
            f"{ranks} ranks are one server and {ranks - 1} client ranks, but there are only {len(parts)} chunks of "
            f"{size} clients; start at most {len(parts) + 1} ranks, or set batch_clients = {fitting} or less"
        )
    return [Chunk(number, part, 0 if ranks == 1 else 1 + number % (ranks - 1)) for number, part in enumerate(parts)]


def alike(size: int, order: Ints, kinds: Sequence[Hashable]) -> list[Ints]:
    """Cut clients into parts of at most `size` of one kind each, in the order of the first of each part."""
    full: list[list[int]] = []
    open_: dict[Hashable, list[int]] = {}
    for client in order.tolist():
        part = open_.get(kinds[client])
        if part is None or len(part) == size:
            part = open_[kinds[client]] = []
            full.append(part)
        part.append(client)
    return [np.array(part, dtype=np.int64) for part in full]


def device(local_rank: int, visible: int) -> str:
    """Return a rank's device: a GPU by its rank on the host, dealt like cards, or the CPU where none is visible.

    A launcher that shows each rank a GPU of its own shows one: that is ``cuda:0``, whatever the rank on the host.
    """
    return f"cuda:{local_rank % visible}" if visible else "cpu"
