"""All that is under way, looked at in one call: whose it is that is complete, and how long memory lives."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.mpi


def sent(number: int, tag: int) -> Any:
    """Send a number to oneself; return the request."""
    from mpi4py import MPI

    return MPI.COMM_SELF.Isend(np.array([float(number)]), 0, tag)


def test_who_has_something_complete_is_told_once() -> None:
    """Three owners: of one both requests arrive, of one only the first, of one nothing."""
    from mpi4py import MPI

    from hpcfl.mpi.transfers import Transfers

    transfers = Transfers()
    rooms = {owner: np.zeros((2, 1)) for owner in "abc"}
    held = {}
    for tag, (owner, room) in enumerate(rooms.items()):
        requests = [MPI.COMM_SELF.Irecv(part, 0, tag) for part in room]
        held[owner] = transfers.begin(owner, requests, room)
    assert transfers.look() == dict.fromkeys("abc", "")  # they are new
    assert transfers.look() == {}
    away = [sent(1, 0), sent(2, 0), sent(3, 1)]
    found: dict[str, str] = {}
    while held["a"].left or held["b"].left > 1:
        found |= transfers.look()
    assert found == {"a": ""}
    assert [held[owner].done for owner in "abc"] == [True, False, False]
    assert rooms["a"].tolist() == [[1.0], [2.0]]
    transfers.stir("c")
    assert transfers.look() == {"c": ""}
    away += [sent(4, 1), sent(5, 2), sent(6, 2)]
    while not (held["b"].done and held["c"].done):
        transfers.look()
    assert [rooms[owner].ravel().tolist() for owner in "bc"] == [[3.0, 4.0], [5.0, 6.0]]
    MPI.Request.Waitall(away)


def test_bytes_that_leave_are_counted_until_they_have_left() -> None:
    from mpi4py import MPI

    from hpcfl.mpi.transfers import Transfers

    transfers, data, room = Transfers(), np.ones(3), np.zeros(3)
    one = transfers.begin("a", [MPI.COMM_SELF.Isend(data, 0, 7)], data, data.nbytes)
    assert (transfers.outgoing, one.outgoing) == (24, 24)
    coming = transfers.begin("b", [MPI.COMM_SELF.Irecv(room, 0, 7)], room)
    while not (one.done and coming.done):
        transfers.look()
    assert (transfers.outgoing, one.outgoing) == (0, 0)
    assert room.tolist() == [1.0] * 3


def test_memory_lives_until_it_is_not_needed() -> None:
    """That of what is complete is let go, that of what was abandoned is not: MPI may still write into it."""
    from mpi4py import MPI

    from hpcfl.mpi.transfers import Transfers

    transfers, rooms = Transfers(), [np.zeros(1), np.zeros(1)]
    seen = [weakref.ref(room) for room in rooms]
    for tag, owner in enumerate("ab"):
        transfers.begin(owner, [MPI.COMM_SELF.Irecv(rooms[tag], 0, tag)], rooms[tag], 8)
    del rooms
    transfers.abandon("b")
    assert transfers.outgoing == 8
    assert transfers.look() == {"a": ""}
    away = [sent(1, 0), sent(2, 1)]
    while transfers.outgoing:
        transfers.look()
    assert seen[0]() is None
    kept = seen[1]()
    while kept is not None and kept[0] != 2.0:
        transfers.look()  # nobody hears of it, but it comes
    assert kept is not None
    MPI.Request.Waitall(away)
