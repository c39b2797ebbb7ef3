"""The server's side of rounds in real time, with lanes that no rank is behind. (Marked for ranks: it needs mpi4py.)"""

from __future__ import annotations

import time
import weakref
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.runs import job_in_real_time
from hpcfl import store
from hpcfl.base.errors import RunError
from hpcfl.engine.job import Job, Progress
from hpcfl.mpi.placement import Topology
from hpcfl.mpi.waiting import Bandwidth
from hpcfl.realtime import questions
from hpcfl.realtime.frames import frame_formats
from hpcfl.realtime.orders import Command, Op
from hpcfl.realtime.outcome import RoundOutcome
from hpcfl.realtime.questions import Handover, Score, Table

pytestmark = pytest.mark.mpi


def lanes_of(job: Job, scripts: list[list[int]]) -> list[Any]:
    """Lanes of one client each; per invitation so many groups arrive at the next look, and no more later."""
    from hpcfl.realtime.lane import Lane, PendingReceive

    class Seen(PendingReceive):
        def __init__(self, lane: Any, clients: list[list[int]]) -> None:
            super().__init__(lane, clients, [group.zeros() for group in lane.formats])

        def arrive(self, number: int, client: int) -> None:
            group, frame = self.formats[number], self.frames[number]
            for name in group.blocks:
                group.weigh(frame, 0, name, 1.0)
                group.value(frame, name).fill_(float(client))
            group.sign(frame, 0, 0.125)

    class Stub:
        """A lane as the server uses it."""

        leads = by_name = False
        heirs = ()
        clients_in, busy, completed = Lane.clients_in, Lane.busy, Lane.completed
        traffic, has_replied = Lane.traffic, Lane.has_replied

        def __init__(self, rank: int, script: list[int]) -> None:
            self.topology = Topology((rank,), (((rank - 1,),),))
            self.hosted, self.formats, self.script = self.topology.clients, frame_formats(job.layout, 1), list(script)
            self.state, self.reason, self.commands = "idle", "", []
            self.counted, self.pending, self.due = np.zeros(1, np.int64), None, 0
            self.worked, self.sent, self.received, self.round_bytes = np.zeros((2, 1)), 0, 0, 0
            self.bandwidth = Bandwidth()
            self.has_next, self.answer, self.sending, self.stuck = False, None, 0, False
            self.gone: list[tuple[int, str]] = []

        def receive(self, frame: Any) -> None:
            return None

        def _noted(self, command: Command) -> None:
            self.commands.append(replace(command, counted=self.counted))
            self.counted = np.zeros(1, np.int64)

        def invite(self, command: Command, state: Any) -> None:
            self._noted(command)
            self.pending, self.due, self.state = Seen(self, [self.hosted.tolist()]), self.script.pop(0), "active"

        def close(self, command: Command) -> None:
            self._noted(command)
            self.state = "late"

        def ask(self, command: Command, question: Any, reply: Any, state: Any = ()) -> bool:
            if self.state != "idle":
                return False
            self._noted(command)
            if self.answer is not None:
                reply.receive(self.answer)
            self.state = "active"
            return True

        @property
        def owes_reply(self) -> bool:
            return self.state == "active" and self.pending is None

        def adopt(self, chunks: Any, state: Any) -> None:
            handover = Handover(chunks, job.like)
            for room, part in zip(handover.received(), state, strict=True):
                room[:] = part
            self.adopted = handover.states()
            self.topology = self.topology.with_more(chunks)
            self.hosted = self.topology.clients

        def give_up(self) -> None:
            self.state = "late" if self.state == "active" else self.state

        def poll(self) -> bool:
            if self.state == "late" and self.due >= 0:
                self.state = "idle"
            if self.owes_reply and not self.stuck:
                self.state = "idle"
            if self.state == "active" and self.pending is not None:
                for number in range(len(self.pending.times), self.due):
                    self.pending.arrive(number, int(self.hosted[0]))
                    self.pending.times.append(time.monotonic())
                if self.pending.complete:
                    self.state = "idle"
            return False

        def late_for(self) -> float:
            return inf

        def silent(self) -> float:
            return 0.0

        @property
        def arrived(self) -> int:
            return int(self.pending is not None and self.pending.complete)

        @property
        def awaited(self) -> int:
            return int(self.state == "active" and not self.arrived)

    return [Stub(rank, script) for rank, script in enumerate(scripts, start=1)]


def server_of(job: Job, lanes: list[Any]) -> Any:
    """A server that moves on all of these lanes at each look."""
    from hpcfl.mpi.transfers import Transfers
    from hpcfl.realtime.lanes import Lanes
    from hpcfl.realtime.server import Server

    class All(Transfers):
        def look(self) -> dict[Any, str]:
            return dict.fromkeys(server.lanes.all, "")

    server = Server(job, Lanes(lanes, transfers=All()))
    return server


SOON = {"close": "deadline", "deadline": 1e-6, "min_clients": 2}
EMPIRICAL = {"name": "salf", "missing": "empirical", "momentum": 0.5, "persist_optimizer": True}


def soon(**more: Any) -> Job:
    return job_in_real_time(4, clients=3, algorithm=EMPIRICAL, **{"participation": SOON, **more})


def test_a_round_with_too_few_visits_is_void_and_repeated() -> None:
    """Four groups: the loss and layers 3, 2, 1. Client 1 is complete in time, then 0 and 1 are and 2 is not."""
    job = soon()
    lanes = lanes_of(job, [[1, 4], [4, 4], [0, 3]])
    plan, sums = server_of(job, lanes).run_round(5, job.algorithm.init_server(job.task))
    assert (plan.round, plan.repeats, plan.closes_after) == (5, 1, 1e-6)
    assert (plan.cohort.tolist(), plan.depth.tolist()) == ([0, 1, 2], [1, 1, 2])
    assert np.isfinite(plan.seconds).tolist() == [True, True, False]
    weights = [sums.weight(next(iter(group))) for group in job.layout]
    assert weights == [3.0, 3.0, 3.0, 2.0]
    means = [sums.mean(next(iter(group))).flatten()[0].item() for group in job.layout]
    assert means == [1.0, 1.0, 1.0, 0.5]
    ops = [[command.op for command in lane.commands] for lane in lanes]
    assert ops == [[Op.VISIT, Op.CLOSE, Op.VISIT], [Op.VISIT, Op.VISIT], [Op.VISIT, Op.CLOSE, Op.VISIT, Op.CLOSE]]
    for lane in lanes:
        invited = [command for command in lane.commands if command.op is Op.VISIT]
        assert [command.attempt for command in invited] == [0, 1]
        assert [command.counted.tolist() for command in invited] == [[0], [4]]  # nothing of the void attempt is kept
        assert all(command.cohort.tolist() == [0, 1, 2] for command in invited)
    assert [lane.counted.tolist() for lane in lanes] == [[1], [1], [2]]


def test_a_part_of_a_visit_is_a_visit() -> None:
    job = soon()
    plan, _ = server_of(job, lanes_of(job, [[1], [4], [3]])).run_round(5, job.algorithm.init_server(job.task))
    assert (plan.repeats, plan.depth.tolist()) == (0, [4, 1, 2])


def test_what_is_discarded_does_not_count_nor_is_it_acknowledged() -> None:
    job = soon(participation={**SOON, "partial": "discard", "min_clients": 0})
    lanes = lanes_of(job, [[4], [3], [0]])
    plan, sums = server_of(job, lanes).run_round(0, job.algorithm.init_server(job.task))
    assert plan.depth.tolist() == [1, 4, 4]
    assert [sums.weight(name) for name in sums] == [1.0] * sum(len(group) for group in job.layout)
    assert [lane.counted.tolist() for lane in lanes] == [[1], [4], [4]]


def test_a_loss_without_a_layer_does_not_count() -> None:
    job = soon(participation={**SOON, "min_clients": 0})
    plan, sums = server_of(job, lanes_of(job, [[1], [4], [2]])).run_round(0, job.algorithm.init_server(job.task))
    assert plan.depth.tolist() == [4, 1, 3]
    assert [sums.weight(next(iter(group))) for group in job.layout] == [2.0, 2.0, 1.0, 1.0]


def test_of_whole_visits_at_once_only_the_first_count() -> None:
    job = job_in_real_time(4, clients=3, participation={"close": "first", "first": 2, "partial": "discard"})
    lanes = lanes_of(job, [[4], [4], [4]])
    plan, sums = server_of(job, lanes).run_round(0, job.algorithm.init_server(job.task))
    assert plan.depth.tolist() == [1, 1, 4]  # the lanes are looked at in their order
    assert sums.weight("loss") == 2.0
    assert np.isfinite(plan.seconds).tolist() == [True, True, False]
    assert [lane.counted.tolist() for lane in lanes] == [[1], [1], [4]]


def test_the_first_are_those_of_leaders_and_of_single_ranks_together() -> None:
    """All three are there at once, one of them by way of a leader, who was told to add it up."""
    job = job_in_real_time(4, clients=3, participation={"close": "first", "first": 2, "partial": "discard"})
    lanes = lanes_of(job, [[4], [4], [4]])
    lanes[0].leads = True
    outcome = RoundOutcome(job, job.planner.attempt(0), lanes, time.monotonic())
    for lane in lanes:
        lane.invite(Command(Op.VISIT), [])
        lane.poll()
    assert outcome.counting().tolist() == [0, 1]
    outcome.finish(inf)
    assert outcome.depth.tolist() == [1, 1, 4]


@pytest.mark.parametrize(
    ("rules", "depth"),
    [
        ({"close": "first", "first": 1}, [1, 2, 3]),
        ({"close": "first", "first": 1, "partial": "discard"}, [1, 4, 4]),
        ({"close": "quorum", "quorum": 1, "grace": 0.0}, [1, 2, 3]),
        ({"close": "quorum", "quorum": 1, "grace": 0.05}, [1, 2, 3]),
        ({"close": "quorum", "quorum": 1, "grace": 1e6, "deadline": 0.05}, [1, 2, 3]),
        ({"close": "quorum", "quorum": 1, "grace": 0.05, "partial": "discard"}, [1, 4, 4]),
    ],
)
def test_layers_of_those_who_are_not_complete_count(rules: dict[str, Any], depth: list[int]) -> None:
    """Four groups: the loss and layers 3, 2, 1; the second client stops before the last, the third before two."""
    job = job_in_real_time(4, clients=3, participation=rules)
    lanes = lanes_of(job, [[4], [3], [2]])
    plan, sums = server_of(job, lanes).run_round(0, job.algorithm.init_server(job.task))
    assert plan.depth.tolist() == depth
    weights = [float((plan.depth <= layer).sum()) for layer in (3, 3, 2, 1)]
    assert [sums.weight(next(iter(group))) for group in job.layout] == weights
    assert np.isfinite(plan.seconds).tolist() == [True, False, False]
    least = min(rules.get("grace", 0.0), rules.get("deadline", np.inf))
    assert least <= plan.duration
    assert [lane.counted.tolist() for lane in lanes] == [[each] for each in depth]
    assert np.isnan(plan.arrival).all()


def test_who_comes_within_the_grace_counts_and_nobody_is_waited_for_in_vain() -> None:
    """A quorum of three among whom one never comes waits for it; where all are there, a grace is over at once."""
    job = job_in_real_time(4, clients=3, participation={"close": "quorum", "quorum": 1, "grace": 1e6})
    lanes = lanes_of(job, [[4], [3], [4]])
    later = time.monotonic() + 0.1
    poll = lanes[1].poll

    def polled() -> bool:
        lanes[1].due = 4 if time.monotonic() >= later else 3
        return bool(poll())

    lanes[1].poll = polled
    plan, _ = server_of(job, lanes).run_round(0, job.algorithm.init_server(job.task))
    assert plan.depth.tolist() == [1, 1, 1]
    assert plan.duration < 1e6


def test_who_is_late_is_not_asked() -> None:
    job = soon(participation={**SOON, "min_clients": 0})
    lanes = lanes_of(job, [[4], [4], [4]])
    lanes[1].state, lanes[1].due = "late", -1
    plan, _ = server_of(job, lanes).run_round(0, job.algorithm.init_server(job.task))
    assert plan.cohort.tolist() == [0, 2]
    assert plan.depth.tolist() == [1, 1]
    assert lanes[1].commands == []


def test_with_too_few_left_the_run_ends(capfd: pytest.CaptureFixture[str]) -> None:
    job = soon()
    lanes = lanes_of(job, [[4], [4], [4]])

    def dies(lane: Any) -> bool:
        lane.state, lane.reason = "dead", "gone"
        return True

    for lane in lanes[1:]:
        lane.state, lane.poll = "late", lambda lane=lane: dies(lane)
    with pytest.raises(RunError, match=r"expected at least 2 of the 3 clients .* only 1 are left; lost ranks: 2, 3$"):
        server_of(job, lanes).run_round(0, job.algorithm.init_server(job.task))
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("hpcfl: rank")]
    assert told == [f"hpcfl: rank {rank} is lost (gone), and with it client {rank - 1}" for rank in (2, 3)]


def test_scores_and_state_of_who_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are NaN, and personal state is that which was saved last: no checkpoint waits for anybody."""

    class Answer:
        """What a lane answers: its client's number in every entry."""

        def __init__(self, client: int) -> None:
            self.client = client

        def summed(self, data: Any) -> list[Any]:
            data[:] = self.client
            return []

        def up(self, data: Any, sizes: Any) -> list[Any]:
            data.view(np.float32)[:] = self.client
            return []

    job = soon()
    lanes = lanes_of(job, [[], [], []])
    for lane in lanes:
        lane.answer = Answer(int(lane.hosted[0]))
    lanes[1].state, lanes[1].due = "late", -1
    server, now = server_of(job, lanes), Progress(1, job.algorithm.init_server(job.task), {})
    np.testing.assert_array_equal(server.scores(now), [[0.0, np.nan, 2.0]] * 3)
    like = job.algorithm.init_client(job.task, 0)

    def load(path: Path, clients: list[int], check: bool = False) -> dict[int, Any]:
        assert path == Path("saved")
        return {client: {name: np.full(value.shape, 7.0) for name, value in like.items()} for client in clients}

    monkeypatch.setattr(store, "load_personal", load)
    monkeypatch.setattr(store, "personal_rounds", lambda path, clients: dict.fromkeys(clients, 3))
    for now.saved, expected, round_ in ((Path("saved"), 7.0, 3), (None, 0.0, 0)):
        found = {
            int(client): {name: value[row] for name, value in state.items()}
            for clients, state in server.personal(now)
            for row, client in enumerate(clients)
        }
        assert sorted(found) == [0, 1, 2]
        assert server.stale == {1: round_}
        for client, value in ((0, 0.0), (1, expected), (2, 2.0)):
            assert found[client].keys() == like.keys()
            assert all((each == value).all() for each in found[client].values())
            assert all(each.shape == like[name].shape for name, each in found[client].items())


def test_who_has_not_written_its_state_in_time_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 writes at once, 2 never, 3 is late."""
    job = soon()
    lanes = lanes_of(job, [[], [], []])
    monkeypatch.setattr(questions, "SAVE_SECONDS", 0.01)
    lanes[1].stuck, lanes[2].state, lanes[2].due = True, "late", -1
    server, now = server_of(job, lanes), Progress(3, job.algorithm.init_server(job.task), {})
    server.apart = True
    assert [int(client) for clients, _ in server.personal(now) for client in clients] == [1, 2]
    assert (server.homes.tolist(), server.stale) == ([1, 0, 0], {1: 0, 2: 0})
    assert [[(each.op, each.round) for each in lane.commands] for lane in lanes] == [
        [(Op.WRITE, 3)],
        [(Op.WRITE, 3)],
        [],
    ]
    assert [lane.state for lane in lanes] == ["idle", "late", "late"]


def test_clients_of_lost_ranks_go_on_where_the_fewest_are(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where that rank is not free yet, or is lost in its turn, and from a checkpoint where there is one."""
    job = job_in_real_time(5, clients=4, algorithm=EMPIRICAL, lost_clients="rehost")
    lanes = lanes_of(job, [[], [], [], []])
    server, like = server_of(job, lanes.copy()), job.algorithm.init_client(job.task, 0)
    found = {client: {name: np.full(value.shape, client) for name, value in like.items()} for client in range(4)}
    monkeypatch.setattr(store, "load_personal", lambda path, clients, check: {each: found[each] for each in clients})
    monkeypatch.setattr(store, "personal_rounds", lambda path, clients: {each: 6 - each for each in clients})
    lanes[0].state, lanes[0].due, lanes[1].state = "late", -1, "dead"
    server._rehost()
    assert server.orphans.clients.tolist() == server.orphans.hopeful.tolist() == [1]  # rank 1 is first, but not free
    assert server.orphans.hosted.tolist() == [0]
    lanes[2].state = "dead"
    server._rehost()
    assert lanes[3].hosted.tolist() == [3, 2]  # rank 1 is to have two
    assert [value.abs().max().item() for value in lanes[3].adopted[2].values()] == [0.0] * len(like)
    assert server.orphans.clients.tolist() == [1]
    lanes[0].state, server.saved = "dead", Path("saved")
    server._rehost()
    assert lanes[3].hosted.tolist() == [3, 2, 0, 1]
    for client, state in lanes[3].adopted.items():
        assert all((value == client).all() and value.shape == like[name].shape for name, value in state.items())
    assert server.orphans.clients.tolist() == []
    lanes[3].state = "dead"
    server._rehost()
    assert server.orphans.clients.tolist() == [0, 1, 2, 3]
    assert server.orphans.hopeful.tolist() == []
    since = {2: "the state before the first visit", 0: "the state after round 6", 1: "the state after round 5"}
    lost = {2: 3, 0: 1, 1: 2}
    events = [("rehosted", c, f"at rank 4 in place of rank {lost[c]}, with {since[c]}") for c in since]
    assert server.orphans.events == events
    lines = [f"hpcfl: client {c} of rank {lost[c]} goes on at rank 4, with {since[c]}" for c in since]
    assert capfd.readouterr().err.splitlines() == lines


def test_a_reply_that_was_given_up_has_room_until_it_has_come() -> None:
    """MPI goes on writing it: were the room free, it would write into what is there by then."""
    from mpi4py import MPI

    from hpcfl.mpi.channel import direct
    from hpcfl.mpi.transfers import Transfers
    from hpcfl.realtime.lane import Lane

    job = soon()
    transfers = Transfers()
    lane = Lane(Topology((1,), (((0,),),)), direct(MPI.COMM_SELF, 0, True), job.layout, 3, transfers)
    _, data = direct(MPI.COMM_SELF, 0, False)
    reply, sent = Table(lane.topology, 2), Table(lane.topology, 2)
    room = weakref.ref(reply.data)
    lane.ask(Command(Op.SCORE), Score(), reply)
    del reply
    lane.give_up()
    assert not lane.poll()
    assert lane.state == "late"
    assert room() is not None
    heard = np.zeros_like(Command(Op.SCORE).packed(1, 3))
    requests = [*direct(MPI.COMM_SELF, 0, False)[0].down(heard), *sent.send(data)]
    while lane.state == "late":
        transfers.look()
        lane.poll()
    MPI.Request.Waitall(requests)
    assert lane.state == "idle"
    assert room() is None
