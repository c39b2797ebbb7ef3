"""The server's side of rounds in real time, with lanes that no rank is behind. (Marked for ranks: it needs mpi4py.)"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.runs import job_in_real_time
from hpcfl import store
from hpcfl.base.errors import RunError
from hpcfl.engine.executor import acknowledgment
from hpcfl.engine.job import Job, Progress
from hpcfl.mpi.placement import Topology
from hpcfl.mpi.transfers import complete
from hpcfl.realtime import questions
from hpcfl.realtime.orders import Command, Op
from hpcfl.realtime.outcome import RoundOutcome
from hpcfl.realtime.questions import QUESTIONS, Handover, Profile, Score, Table
from hpcfl.sums.frames import frame_formats
from hpcfl.sums.packing import Packing

pytestmark = pytest.mark.mpi


LOOKS = 3


class Rank:
    """The other end of a lane, within this process: what a rank of some clients says there, but for computing.

    Of the visits of a round it sends as many groups at the next look as its script says, and no more before the round
    is closed; its values are the client's number.

    Attributes
    ----------
    silent, stuck : bool
        Whether it says and hears nothing, or does not answer what it is asked.
    error : str
        What MPI tells of it.
    """

    def __init__(self, job: Job, transfers: Any, number: int, script: list[int], clients: tuple[int, ...]) -> None:
        from hpcfl.mpi.channel import within
        from hpcfl.realtime.lane import Lane

        near, (self.control, self.data) = within()
        self.job, self.clients, self.script, self.commands = job, clients, list(script), list[Command]()
        self.topology = Topology((number,), (tuple((client,) for client in clients),))
        self.lane = Lane(self.topology, near, job.layout, job.config.clients, transfers, job.together, job.parts)
        self.silent, self.error, self.stuck = False, "", False
        self.formats = frame_formats(job.layout, 1)
        self.posted = self.due = self.holds = 0
        self._listen()

    def late(self) -> None:
        """Be late from now on, and say nothing."""
        self.silent = True
        self.lane.ask(Command(Op.PROFILE), Profile(), Table(self.topology, 1))
        self.lane.give_up()

    def look(self) -> None:
        if self.silent or not complete(self._heard):
            self._send(self.due)
            return
        command = Command.unpacked(self._room, len(self.topology.clients))
        self.commands.append(command)
        if command.state and command.state != self.holds:
            self.holds, packing = command.state, Packing(self.job.algorithm.init_server(self.job.task))
            self._take(packing.received(packing.zeros()))
        if command.op is Op.VISIT:
            self.posted, self.due = 0, self.script.pop(0)
            self._send(self.due)
        elif command.op is Op.CLOSE:
            self.control.agree(np.array([self.posted]), np.zeros(1, np.int64))
            self._send(len(self.formats) * len(self.clients), nothing=True)
            self.control.meet()
        elif self.stuck:
            self.silent = True
            return
        else:
            self._answer(command)
        self._listen()

    def _listen(self) -> None:
        self._room = Command.empty(len(self.topology.clients), self.job.config.clients)
        self._heard = self.control.down(self._room)

    def _take(self, parts: Any) -> None:
        for part in parts:
            assert complete(self.data.down(part))

    def _send(self, groups: int, nothing: bool = False) -> None:
        while self.posted < groups:
            turn, number = divmod(self.posted, len(self.formats))
            group, client = self.formats[number], self.clients[turn]
            frame = group.zeros()
            for name in () if nothing else group.blocks:
                group.weigh(frame, 0, name, 1.0)
                group.value(frame, name).fill_(float(client))
            if not nothing:
                group.sign(frame, 0, 0.125)
            for data in frame:
                self.data.summed(data.numpy())
            self.posted += 1

    def _answer(self, command: Command) -> None:
        question = QUESTIONS[command.op]()
        reply, client = question.reply(self.job, self.topology), self.clients[0]
        if command.op is Op.SCORE:
            reply.put(0, np.full((len(reply.data), 1), client))
        elif command.op is Op.SAVE:
            like = self.job.algorithm.init_client(self.job.task, client)
            reply.put(0, {client: {name: torch.full_like(each, client) for name, each in like.items()}})
        elif command.op is Op.ADOPT:
            chunks = [each for each in self.job.chunks if set(each.clients.tolist()) & set(command.cohort.tolist())]
            handover = Handover(chunks, self.job.like)
            self._take(handover.received())
            self.adopted, self.topology = handover.states(), self.topology.with_more(chunks)
        reply.send(self.control if question.beside else self.data)


def ranks_of(job: Job, scripts: list[list[int]], clients: Sequence[tuple[int, ...]] = ()) -> list[Rank]:
    """Ranks of these clients, or of one each; so many groups come at the next look, and no more later."""
    from hpcfl.mpi.transfers import Transfers

    class At(Transfers):
        def look(self) -> dict[Any, str]:
            for rank in ranks:
                rank.look()
            return {**super().look(), **{rank.lane: rank.error for rank in ranks}}

    transfers = At()
    rows = zip(scripts, clients or [(number,) for number in range(len(scripts))])
    ranks = [Rank(job, transfers, number, *row) for number, row in enumerate(rows, start=1)]
    return ranks


def server_of(job: Job, ranks: list[Rank]) -> Any:
    """A server of these ranks."""
    from hpcfl.mpi.transfers import Transfers
    from hpcfl.realtime.lanes import Lanes
    from hpcfl.realtime.server import Server

    class AtOnce(Lanes):
        """One look takes all that there is."""

        def poll(self) -> bool:
            return sum(Lanes.poll(self) for _ in range(LOOKS)) > 0

    lanes = [rank.lane for rank in ranks]
    return Server(job, AtOnce(lanes, transfers=lanes[0].transfers if lanes else Transfers()))


def look(rank: Rank) -> None:
    """Let all lanes take what there is."""
    for _ in range(LOOKS):
        for lane in rank.lane.transfers.look():
            lane.poll()


SOON = {"close": "deadline", "deadline": 1e-6, "min_clients": 2}
EMPIRICAL = {"name": "salf", "missing": "empirical", "momentum": 0.5, "persist_optimizer": True}


def soon(**more: Any) -> Job:
    return job_in_real_time(4, clients=3, algorithm=EMPIRICAL, **{"participation": SOON, **more})


def test_a_round_with_too_few_visits_is_void_and_repeated() -> None:
    """Four groups: the loss and layers 3, 2, 1. Client 1 is complete in time, then 0 and 1 are and 2 is not."""
    job = soon()
    ranks = ranks_of(job, [[1, 4], [4, 4], [0, 3]])
    plan, sums = server_of(job, ranks).run_round(5, job.algorithm.init_server(job.task))
    assert (plan.round, plan.repeats, plan.closes_after) == (5, 1, 1e-6)
    assert (plan.cohort.tolist(), plan.depth.tolist()) == ([0, 1, 2], [1, 1, 2])
    assert np.isfinite(plan.seconds).tolist() == [True, True, False]
    weights = [sums.weight(next(iter(group))) for group in job.layout]
    assert weights == [3.0, 3.0, 3.0, 2.0]
    means = [sums.mean(next(iter(group))).flatten()[0].item() for group in job.layout]
    assert means == [1.0, 1.0, 1.0, 0.5]
    ranks[2].look()  # what was said last
    ops = [[command.op for command in rank.commands] for rank in ranks]
    assert ops == [[Op.VISIT, Op.CLOSE, Op.VISIT], [Op.VISIT, Op.VISIT], [Op.VISIT, Op.CLOSE, Op.VISIT, Op.CLOSE]]
    for rank in ranks:
        invited = [command for command in rank.commands if command.op is Op.VISIT]
        assert [command.attempt for command in invited] == [0, 1]
        assert [command.counted.tolist() for command in invited] == [[0], [0]]  # nothing of the void attempt is kept
        assert all(command.cohort.tolist() == [0, 1, 2] for command in invited)
    assert [rank.lane.counted.tolist() for rank in ranks] == [[acknowledgment(5, 1, depth)] for depth in (1, 1, 2)]


def test_a_part_of_a_visit_is_a_visit() -> None:
    job = soon()
    plan, _ = server_of(job, ranks_of(job, [[1], [4], [3]])).run_round(5, job.algorithm.init_server(job.task))
    assert (plan.repeats, plan.depth.tolist()) == (0, [4, 1, 2])


def test_what_is_discarded_does_not_count_nor_is_it_acknowledged() -> None:
    job = soon(participation={**SOON, "partial": "discard", "min_clients": 0})
    ranks = ranks_of(job, [[4], [3], [0]])
    plan, sums = server_of(job, ranks).run_round(0, job.algorithm.init_server(job.task))
    assert plan.depth.tolist() == [1, 4, 4]
    assert [sums.weight(name) for name in sums] == [1.0] * sum(len(group) for group in job.layout)
    assert [rank.lane.counted.tolist() for rank in ranks] == [[1], [0], [0]]


def test_a_loss_without_a_layer_does_not_count() -> None:
    job = soon(participation={**SOON, "min_clients": 0})
    plan, sums = server_of(job, ranks_of(job, [[1], [4], [2]])).run_round(0, job.algorithm.init_server(job.task))
    assert plan.depth.tolist() == [4, 1, 3]
    assert [sums.weight(next(iter(group))) for group in job.layout] == [2.0, 2.0, 1.0, 1.0]


def test_of_whole_visits_at_once_only_the_first_count() -> None:
    job = job_in_real_time(4, clients=3, participation={"close": "first", "first": 2, "partial": "discard"})
    ranks = ranks_of(job, [[4], [4], [4]])
    plan, sums = server_of(job, ranks).run_round(0, job.algorithm.init_server(job.task))
    assert plan.depth.tolist() == [1, 1, 4]  # the lanes are looked at in their order
    assert sums.weight("loss") == 2.0
    assert np.isfinite(plan.seconds).tolist() == [True, True, False]
    assert [rank.lane.counted.tolist() for rank in ranks] == [[1], [1], [0]]


def test_the_first_are_those_of_leaders_and_of_single_ranks_together() -> None:
    """All three are there at once, one of them by way of a leader, who was told to add it up."""
    job = job_in_real_time(4, clients=3, participation={"close": "first", "first": 2, "partial": "discard"})
    ranks = ranks_of(job, [[4], [4], [4]])
    lanes = [rank.lane for rank in ranks]
    lanes[0].leads = True
    outcome = RoundOutcome(job, job.planner.attempt(0), lanes, time.monotonic())
    for lane in lanes:
        lane.invite(Command(Op.VISIT, cohort=np.arange(3)), [])
    look(ranks[0])
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
    ranks = ranks_of(job, [[4], [3], [2]])
    plan, sums = server_of(job, ranks).run_round(0, job.algorithm.init_server(job.task))
    assert plan.depth.tolist() == depth
    weights = [float((plan.depth <= layer).sum()) for layer in (3, 3, 2, 1)]
    assert [sums.weight(next(iter(group))) for group in job.layout] == weights
    assert np.isfinite(plan.seconds).tolist() == [True, False, False]
    least = min(rules.get("grace", 0.0), rules.get("deadline", np.inf))
    assert least <= plan.duration
    assert [rank.lane.counted.tolist() for rank in ranks] == [[each % 4] for each in depth]  # 4: nothing
    assert np.isnan(plan.arrival).all()


def test_who_comes_within_the_grace_counts_and_nobody_is_waited_for_in_vain() -> None:
    """A quorum of three among whom one never comes waits for it; where all are there, a grace is over at once."""
    job = job_in_real_time(4, clients=3, participation={"close": "quorum", "quorum": 1, "grace": 1e6})
    ranks = ranks_of(job, [[4], [3], [4]])
    later, look = time.monotonic() + 0.1, ranks[1].look

    def looked() -> None:
        if ranks[1].posted == 3 and time.monotonic() >= later:
            ranks[1].due = 4
        look()

    ranks[1].look = looked  # type: ignore[method-assign]
    plan, _ = server_of(job, ranks).run_round(0, job.algorithm.init_server(job.task))
    assert plan.depth.tolist() == [1, 1, 1]
    assert plan.duration < 1e6


def test_who_is_late_is_not_asked() -> None:
    job = soon(participation={**SOON, "min_clients": 0})
    ranks = ranks_of(job, [[4], [4], [4]])
    ranks[1].late()
    plan, _ = server_of(job, ranks).run_round(0, job.algorithm.init_server(job.task))
    assert plan.cohort.tolist() == [0, 2]
    assert plan.depth.tolist() == [1, 1]
    assert ranks[1].commands == []


def test_with_too_few_left_the_run_ends(capfd: pytest.CaptureFixture[str]) -> None:
    job = soon()
    ranks = ranks_of(job, [[4], [4], [4]])
    for rank in ranks[1:]:
        rank.late()
        rank.error = "gone"
    with pytest.raises(RunError, match=r"expected at least 2 of the 3 clients .* only 1 are left; lost ranks: 2, 3$"):
        server_of(job, ranks).run_round(0, job.algorithm.init_server(job.task))
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("hpcfl: rank")]
    assert told == [f"hpcfl: rank {rank} is lost (gone), and with it client {rank - 1}" for rank in (2, 3)]


def test_scores_and_state_of_who_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are NaN, and personal state is that which was saved last: no checkpoint waits for anybody."""

    job = soon()
    ranks = ranks_of(job, [[], [], []])
    ranks[1].late()
    server, now = server_of(job, ranks), Progress(1, job.algorithm.init_server(job.task), {})
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
    ranks = ranks_of(job, [[], [], []])
    monkeypatch.setattr(questions, "SAVE_SECONDS", 0.01)
    ranks[1].stuck = True
    ranks[2].late()
    server, now = server_of(job, ranks), Progress(3, job.algorithm.init_server(job.task), {})
    server.apart = True
    assert [int(client) for clients, _ in server.personal(now) for client in clients] == [1, 2]
    assert (server.homes.tolist(), server.stale) == ([1, 0, 0], {1: 0, 2: 0})
    assert [[(each.op, each.round) for each in rank.commands] for rank in ranks] == [
        [(Op.WRITE, 3)],
        [(Op.WRITE, 3)],
        [],
    ]
    assert [rank.lane.state for rank in ranks] == ["idle", "late", "late"]


def test_clients_of_lost_ranks_go_on_where_the_fewest_are(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where that rank is not free yet, or is lost in its turn, and from a checkpoint where there is one."""
    job = job_in_real_time(5, clients=4, algorithm=EMPIRICAL, lost_clients="rehost")
    ranks = ranks_of(job, [[], [], [], []])
    lanes = [rank.lane for rank in ranks]
    server, like = server_of(job, ranks), job.algorithm.init_client(job.task, 0)
    found = {client: {name: np.full(value.shape, client) for name, value in like.items()} for client in range(4)}
    monkeypatch.setattr(store, "load_personal", lambda path, clients, check: {each: found[each] for each in clients})
    monkeypatch.setattr(store, "personal_rounds", lambda path, clients: {each: 6 - each for each in clients})
    ranks[0].late()
    lanes[1].die("gone")
    server._rehost()
    assert server.orphans.clients.tolist() == server.orphans.hopeful.tolist() == [1]  # rank 1 is first, but not free
    assert server.orphans.hosted.tolist() == [0]
    lanes[2].die("gone")
    server._rehost()
    assert lanes[3].hosted.tolist() == [3, 2]  # rank 1 is to have two
    assert [value.abs().max().item() for value in ranks[3].adopted[2].values()] == [0.0] * len(like)
    assert server.orphans.clients.tolist() == [1]
    lanes[0].die("gone")
    server.saved = Path("saved")
    server._rehost()
    assert lanes[3].hosted.tolist() == [3, 2, 0, 1]
    for client, state in ranks[3].adopted.items():
        assert all((value == client).all() and value.shape == like[name].shape for name, value in state.items())
    assert server.orphans.clients.tolist() == []
    lanes[3].die("gone")
    server._rehost()
    assert server.orphans.clients.tolist() == [0, 1, 2, 3]
    assert server.orphans.hopeful.tolist() == []
    since = {2: "the state before the first visit", 0: "the state after round 6", 1: "the state after round 5"}
    lost = {2: 3, 0: 1, 1: 2}
    events = [("rehosted", c, f"at rank 4 in place of rank {lost[c]}, with {since[c]}") for c in since]
    assert [each for each in server.lanes.events if each[0] == "rehosted"] == events
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
