"""Channels: what one rank says to others over MPI arrives whole and in order, of whatever size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from hpcfl.mpi.channel import Pair

pytestmark = pytest.mark.mpi


@contextmanager
def lanes(comm: Any, width: int | str) -> Iterator[list[Pair]]:
    """Give this rank's lanes: all at rank 0, its own elsewhere."""
    from hpcfl.mpi.channel import connect

    made = connect(comm, width, ["here"] * comm.Get_size(), False)
    yield [*made.lanes.values()]
    made.free()


@pytest.mark.parametrize("width", [1, "all"])
@pytest.mark.parametrize("piece", [2**30, 24, 1])
def test_everything_arrives_in_pieces_of_any_size(width: int | str, piece: int, monkeypatch: Any) -> None:
    """The largest piece holds all, the second 3 numbers of 8 bytes, the last a single number."""
    from mpi4py import MPI

    from hpcfl.mpi import channel
    from hpcfl.mpi.waiting import wait

    monkeypatch.setattr(channel, "PIECE_BYTES", piece)
    comm = MPI.COMM_WORLD
    rank, others = comm.Get_rank(), comm.Get_size() - 1
    if not others:
        pytest.skip("nobody to talk to")
    with lanes(comm, width) as own_lanes:
        for each in [one for pair in own_lanes for one in pair]:
            down = np.arange(10.0) if rank == 0 else np.zeros(10)
            wait(each.down(down))
            assert down.tolist() == list(range(10))
            ranks = [each.peer] if isinstance(each, channel.Direct) else [*range(1, others + 1)]
            sizes = [rank + 2 for rank in ranks]
            wait(each.up(up := np.full(sum(sizes) if rank == 0 else rank + 2, float(rank)), sizes if rank == 0 else ()))
            if rank == 0:
                assert up.tolist() == [float(one) for one, size in zip(ranks, sizes) for _ in range(size)]
            wait(each.summed(total := np.arange(7, dtype=np.float32) * rank))
            if rank == 0:
                assert total.tolist() == [float(entry * sum(ranks)) for entry in range(7)]
            alone = isinstance(each, channel.Direct)  # then what is there is left as it is
            room = np.full(7, 5.0 if rank == 0 and alone else 0.0)
            wait(each.absent(room) if rank else each.summed(room))
            assert room.tolist() == [5.0 if rank == 0 and alone else 0.0] * 7
            own, found = np.array([rank * 10]), np.zeros(1, dtype=np.int64)
            wait(each.agree(own, found))
            agreed = max(int(own[0]), int(found[0]))
            assert agreed == 10 * max([rank] if rank and alone else ranks)
            wait(each.meet())


@pytest.mark.parametrize("entries", [0, 1, 5, 6])
@pytest.mark.parametrize("kind", [np.zeros, torch.zeros])
def test_pieces_are_views_and_at_least_one(entries: int, kind: Any, monkeypatch: Any) -> None:
    from hpcfl.mpi import channel

    monkeypatch.setattr(channel, "PIECE_BYTES", 2 * kind(1).itemsize)
    data = kind(entries)
    pieces = channel.in_pieces(data)
    assert [len(piece) for piece in pieces] == {0: [0], 1: [1], 5: [2, 2, 1], 6: [2, 2, 2]}[entries]
    for piece in pieces:
        piece += 1
    assert data.tolist() == [1.0] * entries


def test_a_meeting_waits_for_everybody() -> None:
    """Nobody has met before the last one has come, who is heard of otherwise."""
    from mpi4py import MPI

    from hpcfl.mpi.waiting import wait

    comm = MPI.COMM_WORLD
    if comm.Get_size() == 1:
        pytest.skip("nobody to meet")
    for width in (1, "all"):
        with lanes(comm, width) as own:
            for control, data in own:
                if comm.Get_rank() == 0:
                    met = control.meet()
                    assert not any(MPI.Request.Testall(met) for _ in range(100))
                    wait(data.down(np.ones(1)))
                    wait(met)
                else:
                    wait(data.down(np.zeros(1)))
                    wait(control.meet())


def test_lanes_of_one_rank_share_one_communicator() -> None:
    """At the server and at every client rank, however many lanes there are; those of several have two of their own."""
    from mpi4py import MPI

    from hpcfl.mpi.channel import connect

    comm = MPI.COMM_WORLD
    size, rank = comm.Get_size(), comm.Get_rank()
    if size < 3:
        pytest.skip("no lane can have two ranks")
    hosts = ["here"] * size
    made = connect(comm, 1, hosts, False)
    assert len(made.lanes) == (1 if rank else size - 1)
    assert len(made.comms) == 1
    made.free()
    together = connect(comm, "all", hosts, False)
    assert (list(together.lanes), len(together.comms)) == ([0], 2)
    together.free()
    spare = connect(comm, "all", hosts, True)
    assert list(spare.lanes) == [0, *([size + rank] if rank else range(size + 1, 2 * size))]
    assert len(spare.comms) == 3
    spare.free()
