"""How ranks come to the same end: what rank 0 decides is everybody's, and one rank's error is everybody's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from hpcfl.base.errors import ErrorOnOtherRank, UserError
from hpcfl.comm.launcher import judged, launched
from hpcfl.launch.request import Order

T = TypeVar("T")


def first(comm: Any) -> bool:
    """Return whether this is rank 0, or the only process (None)."""
    return comm is None or comm.Get_rank() == 0


def told(comm: Any, judge: Callable[[], Order | None]) -> Order | None:
    """Return rank 0's judgement on every rank; its error becomes everybody's exit."""
    order = settled(comm, lambda: judge() if first(comm) else None)
    if comm is None:
        return order
    from hpcfl.comm.mpi import tell

    text = json.loads(tell(comm, json.dumps(asdict(order) if order else None)))
    return Order(**text) if text else None


def settled(comm: Any, make: Callable[[], T]) -> T:
    """Return what `make` returns, if no rank had an error; else raise on all."""
    if comm is None:
        return make()
    from hpcfl.comm.mpi import settle

    error: Exception | None = None
    made = None
    try:
        made = make()
    except Exception as caught:  # any: a rank that leaves alone would let the others wait for ever
        error = caught
    settle(comm, error)
    return made  # type: ignore[return-value]


def speaks(error: UserError) -> bool:
    """Return whether this rank is the one to tell of an error; where all ranks had it at once, the first is."""
    if error.settled or not launched():
        return True
    try:
        settled(judged()[0], lambda: _raised(error))
    except ErrorOnOtherRank:
        return False
    except UserError:
        return True
    return True


def _raised(error: UserError) -> None:
    raise error
