"""Who leads next over two levels, decided from what leaders tell; no rank is behind the lanes. (Marked for ranks.)"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from helpers.runs import job_in_real_time
from hpcfl.mpi.placement import tree

if TYPE_CHECKING:
    from hpcfl.realtime.lanes import Lanes
    from hpcfl.realtime.node import NodeLane
    from hpcfl.realtime.succession import Succession

pytestmark = pytest.mark.mpi
RANKS = 8
NODES = (1, 2, 7), (3, 4), (5, 6)
"""Ranks 1 and 3 are led by the server, rank 5 by rank 1."""


class Nowhere:
    """A communicator on which everything is sent, and nothing comes."""

    def __init__(self) -> None:
        self.told: dict[int, list[list[int]]] = {rank: [] for rank in range(1, RANKS)}

    def Get_size(self) -> int:  # noqa: N802
        return RANKS

    def Isend(self, data: Any, rank: int, tag: int) -> None:  # noqa: N802
        if np.shape(data) == (4,):
            self.told[rank].append(np.asarray(data).tolist())

    def Irecv(self, data: Any, rank: int, tag: int) -> None:  # noqa: N802
        pass


@pytest.fixture
def server() -> tuple[Succession, Lanes, Nowhere]:
    """The server of a job of three nodes, all of whose ranks are there."""
    from hpcfl.mpi.transfers import Transfers
    from hpcfl.realtime.lanes import Lanes
    from hpcfl.realtime.succession import Succession

    job, comm, transfers = job_in_real_time(RANKS), Nowhere(), Transfers()
    hosts = ["", *(str(next(n for n, row in enumerate(NODES) if rank in row)) for rank in range(1, RANKS))]
    facts = job.layout, job.config.clients, transfers, job.together, job.parts
    made = Succession(job, comm, tree("node", 2, hosts), facts)  # type: ignore[arg-type]
    lanes = Lanes(made.lanes(), transfers=transfers, tells=False)
    for lane in lanes.all:
        tell(lane)
    return made, lanes, comm


def tell(lane: Any, state: str = "idle", **others: str) -> None:
    """Let a leader be here, and tell of all below it that they are in a state, of others (``rank_5``) in another."""
    from hpcfl.realtime.orders import RANK_STATES

    lane.state, lane._reply, new = "idle", None, lane._blank()
    for row, rank in enumerate(lane.topology.ranks):
        new.ranks[row, 0] = RANK_STATES.index(others.get(f"rank_{rank}", state))
    lane._notice(new)


def leaders(lanes: Lanes) -> list[tuple[int, str, tuple[int, ...]]]:
    return [(lane.leader, lane.state, lane.topology.ranks) for lane in lanes.all]


def test_a_leader_below_another_is_followed_after_two_rounds(server: tuple[Succession, Lanes, Nowhere]) -> None:
    succession, lanes, comm = server
    first, second = lanes.all
    for silent in (True, False, True):
        tell(first, rank_5="silent" if silent else "idle", rank_6="late")
        succession.round_over(lanes)
    assert lanes.all == [first, second]  # never twice in a row
    succession.round_over(lanes)
    assert leaders(lanes) == [(1, "late", (1, 2, 7, 5, 6)), (3, "idle", (3, 4))]
    assert first.state == "dead"
    assert succession.tree.leaders == (1, 3, 6)
    assert succession.tree.epochs == (1, 0, 1)
    assert all(words == [[2, 6, 1, 0]] for words in comm.told.values())
    assert [text for kind, _, text in lanes.events if kind == "succeeded"] == [
        "rank 6 leads in place of rank 5, which has not replied for 2 rounds"
    ]
    assert not lanes.lost


def test_the_dead_are_followed_at_once_and_by_those_who_are_free(server: tuple[Succession, Lanes, Nowhere]) -> None:
    succession, lanes, comm = server
    tell(lanes.all[0], rank_2="late")
    lanes.lose(lanes.all[0], "killed")
    assert [*lanes.lost] == [1]
    succession.look(lanes)
    assert leaders(lanes) == [(7, "late", (1, 2, 7, 5, 6)), (3, "idle", (3, 4))]
    assert comm.told == {1: [], **{rank: [[0, 7, 1, 0]] for rank in range(2, RANKS)}}
    tell(lanes.all[0], rank_1="dead", rank_5="dead", rank_6="late")
    succession.look(lanes)
    assert succession.tree.leaders == (7, 3, 6)
    assert succession.tree.epochs == (2, 0, 2)
    tell(lanes.all[0], rank_5="dead", rank_6="dead")
    lanes._notice(lanes.all[0], "idle")
    before = [*lanes.all]
    succession.look(lanes)
    assert lanes.all == before  # nobody is left to lead
    assert {*lanes.lost} == {1, 5, 6}


def test_a_new_leader_has_its_time_to_come(
    server: tuple[Succession, Lanes, Nowhere], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpcfl.realtime import node

    succession, lanes, _ = server
    old: NodeLane = lanes.all[1]  # type: ignore[assignment]
    monkeypatch.setattr(type(old), "hangs", property(lambda lane: lane is old))
    for _ in range(2):
        succession.round_over(lanes)
    monkeypatch.undo()
    (new,) = [lane for lane in lanes.all if lane.leader == 4]
    assert isinstance(new, node.NodeLane)
    assert not new.hangs  # just now
    monkeypatch.setattr(node, "HERE_SECONDS", -1.0)
    assert new.hangs
    for _ in range(2):
        succession.round_over(lanes)
    assert lanes.all[1].leader == 3
    assert succession.tree.epochs == (0, 2, 0)


def test_a_job_starts_without_those_who_are_late(server: tuple[Succession, Lanes, Nowhere]) -> None:
    succession, lanes, comm = server
    tell(lanes.all[0], rank_2="late", rank_5="late", rank_6="late")
    lanes.all[1].state = "late"
    succession.replace_late(lanes)
    assert succession.tree.leaders == (1, 4, 6)
    assert [lane.state for lane in lanes.all] == ["late", "late"]
    tell(lanes.all[0], rank_2="late", rank_5="late", rank_6="late")
    tell(lanes.all[1], rank_3="late")
    succession.leave_out_late(lanes, "not there")
    assert succession.tree.nodes == ((1, 7), (4,), ())
    assert leaders(lanes)[:2] == [(1, "late", (1, 7)), (4, "late", (4,))]
    assert [(lane.state, lane.topology.ranks) for lane in lanes.all[2:]] == [("dead", (rank,)) for rank in (2, 5, 6, 3)]
    assert {rank: loss.reason for rank, loss in lanes.lost.items()} == dict.fromkeys((2, 5, 6, 3), "not there")
    hosted = sorted(client for lane in lanes.all for client in lane.hosted.tolist())
    assert hosted == list(range(len(hosted)))  # all clients are known, those of the lost too
    assert comm.told[7] == [[2, 6, 1, 0], [1, 4, 1, 0], *([0, 1, 2, 2], [2, 6, 3, 5], [2, 6, 4, 6]), [1, 4, 2, 3]]
    assert comm.told[2][-1] == [2, 6, 4, 6]  # it hears that it is left out, and of those who are with it
