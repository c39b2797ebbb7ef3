"""How the cores of a host are shared out among its ranks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence


def cores() -> list[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def share_of_cores(local_size: int) -> int:
    """Return the cores per rank where `local_size` ranks see the same ones; at least 1.

    Where a launcher binds ranks to cores of their own, `shares` is right and this too small.
    """
    return shares([cores()] * local_size)[0]


def shares(seen: Sequence[Sequence[int]]) -> list[int]:
    """Return each rank's part of the cores of one host, at least 1: a core is divided among all who see it.

    Parameters
    ----------
    seen : sequence of sequence of int
        The cores that each rank of the host may use.
    """
    users = Counter(core for each in seen for core in each)
    return [max(1, int(sum(1 / users[core] for core in each) + 1e-6)) for each in seen]
