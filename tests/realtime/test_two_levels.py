"""Two levels: leaders pass on what they are told and add up what they hear, and nothing else is any different."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.runs import after_each_round, job_in_real_time
from hpcfl import store
from hpcfl.base.errors import Stopped
from hpcfl.engine import stopping
from hpcfl.mpi.placement import tree
from hpcfl.testing.runs import play, resume
from realtime.test_rounds import RULES, SALF, agree, real, replay, rounds_are_sound, simulated

REPLAYS = ("parts", "whole", "newcomers", "first", "quorum")


@pytest.fixture
def several(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for answers however long they take."""
    if world.size == 1:
        pytest.skip("needs a server and a client")
    from hpcfl.realtime import lanes, questions

    for module, name in ((lanes, "ANSWER_SECONDS"), (questions, "SAVE_SECONDS")):
        monkeypatch.setattr(module, name, 1e6)


def led(world: Any, **more: Any) -> dict[str, Any]:
    """A small run over two levels: two leaders, or one on each of four and more client ranks, which are a tree."""
    leaders = world.size - 1 if world.size > 4 else min(2, world.size - 1)
    return real("two-level", leaders=leaders, fan_out=2, **more)


@pytest.mark.mpi
@pytest.mark.usefixtures("several")
def test_without_a_deadline_it_is_the_simulated_run(world: Any, shared_dir: Path) -> None:
    """With scores and personal state, and once it has gone on after a checkpoint."""
    values = led(world, algorithm=SALF)
    run = play(world, values, shared_dir / "run", world.comm)
    twin = play(world, simulated(values), shared_dir / "twin", None)
    if world.rank == 0:
        agree(run, twin, True, seconds=False)
        data = store.open_run(run)
        assert np.isfinite(data["client_accuracy"].values).all(1).tolist() == [False, True, False, True]
        assert data["visits"].values.sum(1).tolist() == [7] * 4
        assert (data["wire_bytes_out"].values[:, 1:] > 0).all()
    world.meet()
    resume(world, run, 2, world.comm)
    if world.rank == 0:
        agree(run, twin, True, seconds=False)


@pytest.mark.mpi
@pytest.mark.usefixtures("several")
def test_leaders_pass_on_pieces_of_a_state(world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last piece leaves the server once a leader has passed on the first one; all is there in the end."""
    from hpcfl.mpi import channel
    from hpcfl.realtime.lane import Lane

    monkeypatch.setattr(channel, "DOWN_BYTES", 1000)
    flag, carried, pass_on = shared_dir / "passed-on", channel.Direct._carried, Lane.pass_on

    def held(self: channel.Direct, data: Any, sends: bool) -> Any:
        if world.rank == 0 and sends and self.tag % channel.TAGS == channel.DATA and data.nbytes < 1000:
            end = time.monotonic() + 60.0
            while not flag.exists() and time.monotonic() < end:
                time.sleep(0.001)
            assert flag.exists()
        return carried(self, data, sends)

    def passed_on(self: Lane, piece: Any) -> None:
        if world.rank:
            assert piece.nbytes <= 1000
            flag.touch()
        pass_on(self, piece)

    monkeypatch.setattr(channel.Direct, "_carried", held)
    monkeypatch.setattr(Lane, "pass_on", passed_on)
    values = led(world, algorithm=SALF)
    run = play(world, values, shared_dir / "run", world.comm)
    twin = play(world, simulated(values), shared_dir / "twin", None)
    if world.rank == 0:
        assert flag.exists()
        agree(run, twin, True, seconds=False)


@pytest.mark.mpi
@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("rule", REPLAYS)
def test_a_replay_ends_in_the_same_state(world: Any, shared_dir: Path, rule: str) -> None:
    values = led(world, **RULES[rule])
    run = play(world, values, shared_dir / "run", world.comm)
    again = play(world, replay(values, run), shared_dir / "again", None)
    if world.rank == 0:
        agree(run, again, True)
        rounds_are_sound(run)
        data = store.open_run(run)
        depth, arrived = data["depth"].values, data["arrived"].values == 1
        if rule == "parts":  # the speed model sees to it that some visits come only part of the way
            assert (depth[arrived] > 1).any()
        if rule == "first":
            assert (arrived.sum(1) == np.minimum(3, (data["cohort"].values == 1).sum(1))).all()


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("leaders", [2, 3, "all"])
def test_another_rank_leads_where_a_leader_hangs(
    world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], leaders: Any
) -> None:
    """A leader is suspended after round 2, and wakes up when its node has been led by another one for some rounds.

    It is led by the server, or by the leader of the first node; or it is alone on this, and leads two others.
    """
    leaders, number = world.size - 1 if leaders == "all" else leaders, 2 if leaders == 3 else 0
    if leaders >= world.size:
        pytest.skip("needs more ranks")
    nodes = tree(leaders, 2, [""] * world.size)
    if len(nodes.ranks_under(number)) < 2:
        pytest.skip("needs a node of two ranks, or one with another one below")
    old, new = nodes.ranks_under(number)[:2]
    pids, folder, clients = np.zeros(world.size, dtype=np.int64), shared_dir / "run", world.size - 1
    world.comm.Allgather(np.array([os.getpid()]), pids)

    def act(done: int, row: Any) -> None:
        if done == 2:
            os.kill(pids[old], signal.SIGSTOP)
        if done == 8:
            os.kill(pids[old], signal.SIGCONT)
        if done > 8 and (row["arrived"] == 1).sum() == clients:
            stopping.request(folder)

    after_each_round(monkeypatch, act)
    monkeypatch.setattr(stopping, "LOOK_SECONDS", 0.0)
    more: dict[str, Any] = {"clients": clients, "rounds": 400, "algorithm": SALF, "evaluate": {"every": 1}}
    more |= {"participation": {"close": "deadline", "deadline": 0.5}, "checkpoint": {"every": 400}}
    values = real("two-level", leaders=leaders, fan_out=2, **more)
    with pytest.raises(Stopped) as caught:
        play(world, values, folder, world.comm)
    world.meet()
    again = play(world, replay(values, folder, rounds=caught.value.round), shared_dir / "again", None)
    if world.rank:
        return
    agree(folder, again, True, clients=clients)
    line = f"hpcfl: rank {new} leads the node of rank {old}, which has not replied for 2 rounds"
    assert capfd.readouterr().err.splitlines().count(line) == 1
    (event,) = [event for event in store.events(folder) if event["kind"] == "succeeded"]
    assert event["text"] == f"rank {new} leads in place of rank {old}, which has not replied for 2 rounds"
    arrived = store.open_run(folder)["arrived"].values == 1
    chunks = job_in_real_time(world.size, clients=clients).chunks
    rank = {int(chunk.clients[0]): chunk.rank for chunk in chunks}
    node = [client for client in range(clients) if rank[client] in nodes.ranks_under(number)]
    of_leader = [client for client in node if rank[client] == old]
    assert not arrived[2:4, node].any()  # nobody below it for two rounds, in which the others count
    assert np.delete(arrived, node, axis=1).any(1).all()
    assert arrived[:8, list({*node} - {*of_leader})][4:].any()  # the others count while it sleeps
    assert not arrived[2:8, of_leader].any()
    assert arrived[-1].all()


def test_who_leads_whom() -> None:
    """Three nodes of two ranks and one of one, of which each leader leads two at most."""
    hosts = ["a", "a", "b", "b", "c", "c", "a", "d"]
    nodes = tree("node", 2, hosts)
    assert nodes.nodes == ((1, 6), (2, 3), (4, 5), (7,))
    assert [(one.peer, one.ranks) for one in nodes.below(0)] == [(1, (1, 6, 4, 5, 7)), (2, (2, 3))]
    assert [(one.peer, one.leads) for one in nodes.below(1)] == [(1, False), (6, False), (4, True), (7, True)]
    assert nodes.below(6) == []
    assert [nodes.above(rank)[0] for rank in range(1, 8)] == [0, 0, 2, 1, 4, 1, 1]
    after = nodes.led_by(0, 6, 1)
    assert [(one.peer, one.ranks, one.epoch) for one in after.below(0)] == [(6, (1, 6, 4, 5, 7), 1), (2, (2, 3), 0)]
    assert [after.above(rank) for rank in (1, 4, 6, 7)] == [(6, 1), (6, 1), (0, 1), (6, 1)]
    deep = after.led_by(2, 5, 2)  # below rank 6: all lanes of its branch are made anew
    assert [(one.peer, one.ranks, one.epoch) for one in deep.below(0)] == [(6, (1, 6, 4, 5, 7), 2), (2, (2, 3), 0)]
    assert [(one.peer, one.epoch, one.heirs) for one in deep.below(6)][2:] == [(5, 2, (4,)), (7, 2, ())]
    assert [one.heirs for one in deep.below(0)] == [(1, 4, 5, 7), (3,)]
    assert [deep.above(rank) for rank in (1, 4, 5, 6, 7)] == [(6, 2), (5, 2), (6, 2), (0, 2), (6, 2)]
    assert [deep.branch(node) for node in range(4)] == [0, 1, 0, 0]
    assert [deep.depth(node) for node in range(4)] == [0, 0, 1, 1]
    assert tree(3, 32, [""] * 8).nodes == ((1, 2, 3), (4, 5), (6, 7))


def test_where_none_of_a_node_is_left_one_of_a_node_below_leads() -> None:
    """Seven nodes of one rank each, of which each leads two at most: 1 leads 3 and 4, 2 leads 5 and 6, 3 leads 7."""
    nodes = tree(7, 2, [""] * 8)
    assert [nodes.ranks_under(number) for number in range(4)] == [(1, 3, 7, 4), (2, 5, 6), (3, 7), (4,)]
    after = nodes.led_by(0, 3, 1)
    assert after.nodes == ((1, 3), (2,), (7,), (4,), (5,), (6,), ())
    assert [(one.peer, one.ranks) for one in after.below(0)] == [(3, (1, 3, 7, 4)), (2, (2, 5, 6))]
    assert [[one.peer for one in after.below(rank)] for rank in (3, 7, 4, 1)] == [[1, 3, 7, 4], [7], [4], []]
    assert [after.above(rank) for rank in (3, 1, 7, 4, 2)] == [(0, 1), (3, 1), (3, 1), (3, 1), (0, 0)]
    other = nodes.led_by(0, 7, 1)  # past rank 3, which it may have to find dead
    assert [(one.peer, one.ranks) for one in other.below(0)] == [(7, (1, 7, 3, 4)), (2, (2, 5, 6))]
    assert [one.peer for one in other.below(7)] == [1, 7, 3, 4]


def test_all_of_a_node_can_be_left_out() -> None:
    left = tree(2, 2, [""] * 5).led_by(0, 1, 1, out=1).led_by(0, 1, 2, out=2)
    assert left.nodes == ((), (3, 4))
    assert [one.ranks for one in left.below(0)] == [(), (3, 4)]
