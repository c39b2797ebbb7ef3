"""Who sits on which lane, and in what order a lane's visits are done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpcfl.errors import UsageError
from hpcfl.plan import Ints
from hpcfl.ranks import Chunk

SINGLE_RANKS = 64  # up to so many ranks every client rank has a lane of its own


@dataclass(frozen=True)
class Bench:
    """The client ranks of one lane, and the clients that each of them hosts."""

    ranks: tuple[int, ...]
    hosted: tuple[tuple[int, ...], ...]

    @property
    def clients(self) -> Ints:
        """All clients of the lane, in the order of the seats, int64 [h]."""
        return np.array([client for own in self.hosted for client in own], dtype=np.int64)

    def places(self, seat: int) -> slice:
        """Return where the clients of a seat stand among `clients`."""
        start = sum(len(own) for own in self.hosted[:seat])
        return slice(start, start + len(self.hosted[seat]))

    def slots(self, cohort: Ints) -> list[list[int]]:
        """Return who is visited in which slot, ``[slot][seat]``, −1 for nobody.

        Each rank serves its invited clients in the order in which it hosts them; the ranks with fewer of them
        send nothing in the last slots, but take part in the sums.
        """
        invited = set(cohort.tolist())
        rows = [[client for client in own if client in invited] for own in self.hosted]
        count = max(len(row) for row in rows)
        return [[row[slot] if slot < len(row) else -1 for row in rows] for slot in range(count)]

    def single(self, seat: int) -> Bench:
        """Return the lane of one of the ranks by itself."""
        return Bench((self.ranks[seat],), (self.hosted[seat],))


def benches(width: int | str, hosts: Sequence[str], chunks: Sequence[Chunk]) -> list[Bench]:
    """Cut the client ranks into lanes.

    Parameters
    ----------
    width : int or {"auto", "node", "all"}
        Client ranks per lane; ``node``: those of one host; ``auto``: 1 up to 64 ranks, then ``node``.
    hosts : sequence of str [ranks]
        The host of each rank.

    Raises
    ------
    UsageError
        If `width` is larger than the number of client ranks.
    """
    ranks = range(1, len(hosts))
    if width == "auto":
        width = 1 if len(hosts) <= SINGLE_RANKS else "node"
    if width == "node":
        rows = [[rank for rank in ranks if hosts[rank] == host] for host in dict.fromkeys(hosts)]
    else:
        step = len(ranks) if width == "all" else int(width)
        rows = [list(ranks[start : start + step]) for start in range(0, len(ranks), step)]
    return [Bench(tuple(row), tuple(_hosted(rank, chunks) for rank in row)) for row in rows if row]


def check_width(width: int | str, ranks: int) -> None:
    """Raise UsageError where there is nobody to be on a lane, or a lane would be wider than the world."""
    if ranks < 2:
        raise UsageError(
            "clock = 'wall' needs a server and client ranks: expected at least 2 ranks, got 1; nearest: mpirun -n 2 …"
        )
    if isinstance(width, int) and width > ranks - 1:
        raise UsageError(
            f"lane_width: expected 1 … {ranks - 1} (the client ranks of this job), 'node' or 'all', got {width}; "
            f"nearest: {ranks - 1}"
        )


def check_single(who: str, width: int | str, rows: Sequence[Bench] = ()) -> None:
    """Raise UsageError where ranks would share a lane although single messages are looked at.

    Parameters
    ----------
    who : str
        Which key looks at them, and how.
    rows : sequence of Bench
        The lanes, once they are known.
    """
    if width == "all" or (isinstance(width, int) and width > 1) or any(len(bench.ranks) > 1 for bench in rows):
        raise UsageError(
            f"lane_width: {who} single messages, which ranks that share a lane add up on the way: "
            f"expected 1, got {width!r}; nearest: 1"
        )


def _hosted(rank: int, chunks: Sequence[Chunk]) -> tuple[int, ...]:
    return tuple(int(client) for chunk in chunks if chunk.rank == rank for client in chunk.clients)
