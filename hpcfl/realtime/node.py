"""A lane to a rank that leads others: what comes on it are sums over the visits of all ranks below that one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcfl.base.types import Floats, Ints
from hpcfl.engine.received import Received
from hpcfl.mpi.channel import Channel
from hpcfl.mpi.placement import Topology
from hpcfl.mpi.transfers import Transfer
from hpcfl.realtime.lane import Lane, PendingReceive
from hpcfl.realtime.orders import RANK_STATES, Command, Notice, Op
from hpcfl.realtime.questions import Question, Reply
from hpcfl.sums.frames import SumFormat
from hpcfl.sums.packing import Bytes

HERE_SECONDS = 1.0  # for one that has come to lead others to say that it is here


class PendingSums(PendingReceive):
    """One round of the ranks below a leader, as it is received: of each group its head, then what the head tells of.

    Attributes
    ----------
    start : float
        When the visits were asked for, in seconds of the monotonic clock.
    """

    def __init__(self, lane: NodeLane, clients: list[list[int]], formats: Sequence[Any]) -> None:
        Received.__init__(self, clients, formats, [[group.head()] for group in formats])
        self.lane = lane
        self.start = time.monotonic()
        self._begun = [[lane.receive(self.frames[0])]]  # of each group what is being received: its head, then the rest

    def poll(self) -> bool:
        while not self.complete and all(each.done for each in self._begun[len(self.times)]):
            number = len(self.times)
            group, frame = self.formats[number], self.frames[number]
            if len(self._begun[number]) == 1 and self._receive_rest(number, group.parts(frame)):
                continue
            self.arrive()
            if len(self._begun) == len(self.times) < len(self.formats):
                self._receive_head()
        return self.complete

    def announce(self, parts: Ints) -> None:
        """Begin to receive all that is to come, in how many `parts` each large block comes being known."""
        each = np.split(parts, np.cumsum([len(group.large) for group in self.formats])[:-1])
        for number in range(len(self.times), len(self.formats)):
            if number == len(self._begun):
                self._receive_head()
            if len(self._begun[number]) == 1:
                self._receive_rest(number, each[number].tolist())

    def _receive_head(self) -> None:
        self._begun.append([self.lane.receive(self.frames[len(self._begun)])])

    def _receive_rest(self, number: int, parts: list[int]) -> bool:
        if not any(parts):
            return False
        rest = self.formats[number].room(parts)
        self.frames[number] += rest
        self._begun[number].append(self.lane.receive(rest))
        return True

    @property
    def coming(self) -> int:
        """Bytes that are still to come, at most."""
        return sum(group.most_bytes for group in self.formats[len(self.times) :])

    def count(self, local_rank: int) -> int:
        return int(np.count_nonzero(self.signs[0][0, local_rank]))

    def seconds(self, local_rank: int) -> float:
        there = [signs[1, local_rank] for signs in self.signs[: len(self.times)]]
        if not there:
            return 0.0
        each = np.max(there, axis=0)
        return float(each.max() if self.lane.together else each.sum())

    def came(self, local_rank: int, place: int) -> float:
        return self.start + float(self.signs[-1][-1, local_rank, place])


class LedVisits:
    """The visits of one round below a leader: what it has told of them, and their sums as they come.

    Attributes
    ----------
    attempt : (int, int)
        The round, and the attempt at it, that they are of.
    done : dict of int to float
        Whose visits have come to the leader, and when that was heard.
    """

    has_next, turn = False, 0

    def __init__(self, lane: NodeLane) -> None:
        most = lane.topology.most(together=True)
        self.formats = [SumFormat(blocks, len(lane.topology.ranks), most) for blocks in lane.layout]
        self.lane, self.attempt = lane, (-1, -1)
        self.pending: PendingSums | None = None
        self.done: dict[int, float] = {}
        self.left: tuple[int, float] | None = None  # bytes that come after a closing, and since when

    def ask(self, command: Command) -> None:
        """Note whose visits are asked for from now on."""
        invited = set(command.cohort.tolist())
        self.attempt, self.done, self.left = (command.round, command.attempt), {}, None
        rows = [[client for client in clients if client in invited] for clients in self.lane.topology.hosted]
        self.pending = PendingSums(self.lane, rows, self.formats)

    @property
    def arrived(self) -> int:
        return len(self.done)

    @property
    def completed(self) -> list[tuple[float, int, int]]:
        rows = self.lane.topology.by_rank.items()
        return [(self.done[each], rank, each) for rank, clients in rows for each in clients if each in self.done]

    @property
    def awaited(self) -> int:
        if self.lane.state != "visiting" or self.pending is None:
            return 0
        rows = zip(self.pending.clients, self.lane.noticed.states())
        coming = {client for clients, state in rows if state != "dead" for client in clients}
        # ranks that were taken for free may have been late, which the leader knew alone
        none = self.lane.hosted[self.lane.noticed.came == Notice.NOT_ASKED].tolist() if self.lane.tells else []
        missing = len(coming.difference(self.done, none))
        return missing if self.lane.by_name else max(1, missing)

    @property
    def coming(self) -> int:
        return 0 if self.pending is None else self.pending.coming

    @property
    def flowing(self) -> bool:
        lane = self.lane
        return lane.tells and bool(lane.noticed.closing) and lane.state == "late" and lane.late_for() < 0

    @property
    def progress(self) -> tuple[Any, ...]:
        return len(self.done), self.lane.noticed, len(self.pending.times) if self.pending is not None else 0

    def take_note(self, new: Notice, now: float) -> None:
        """Take note of what a leader tells of this round, at a second of the monotonic clock."""
        for client, groups in zip(self.lane.hosted.tolist(), new.came.tolist()):
            if groups == len(self.formats):
                self.done.setdefault(client, now)
        if new.closing == 2 and self.pending is not None and self.left is None:
            self.left = new.left, now
            self.pending.announce(new.parts)

    def advance(self) -> bool:
        """Receive sums; True once all have come, and the leader's word that these were all."""
        if self.pending is None:
            return False
        before = len(self.pending.times)
        whole = self.pending.poll() and self.lane.noticed.over and self.lane.tells
        if self.left and len(self.pending.times) > before:  # it does come: the rest has as long as it takes
            self.lane.since = time.monotonic() + self.lane.bandwidth.allows(self.coming)
        if whole and self.left:
            self.lane.bandwidth.came(*self.left)
            self.left = None
        return whole


class NodeLane(Lane):
    """The end of a lane to a leader, see `Lane`; the topology is of all ranks below the `leader`, and itself.

    Its `notices` tell which ranks are free, and whose visits have come there. A round is over on it once all sums have
    come, and the leader's word that these were all; it needs no agreement on that, since it knows what it sends. The
    leader's `heirs` may lead in its place.
    """

    leads, receiver = True, LedVisits
    visits: LedVisits

    def __init__(
        self,
        topology: Topology,
        channels: tuple[Channel, Channel, Channel],
        leader: int,
        heirs: tuple[int, ...],
        *given: Any,
    ) -> None:
        self.leader, self.heirs = leader, heirs
        control, data, self.notices = channels
        super().__init__(topology, (control, data), *given)
        self.noticed = self._blank()
        self._since = 0.0  # when a rank below was first noticed to be late
        self._told = self._blank()
        self._hearing: Transfer | None = None
        self.slack = 1.0  # how many times as long as usually it may take to say that it is here
        self._leaves = self._silent = self._expected = False
        self._moved: Floats = np.zeros((2, len(topology.ranks)))  # bytes, when that was last asked

    def expect(self, counted: Ints) -> None:
        self.counted, here = counted, np.zeros(1, dtype=np.int64)
        self._reply, self._expected = self.begin(self.data.up(here), here), True
        self.noticed.ranks[:, 0] = RANK_STATES.index("late")  # until it tells
        self._since = time.monotonic()
        self._fall_behind("expected")
        self._listen()

    def close(self, command: Command) -> None:
        self._command(command)
        self._turn("closed")
        self._leaving, self._silent = None, True
        self.since = time.monotonic()  # until the leader says what is under way

    def ask(self, command: Command, question: Question, reply: Reply, state: Sequence[Bytes] = ()) -> bool:
        asked = self.state == "idle" and super().ask(command, question, reply, state)
        self._leaves |= asked and command.op is Op.LEAVE
        return asked

    def give_up(self) -> None:
        if self.state == "asked":
            self._command(Command(Op.CLOSE))  # it shall reply with what it has
        super().give_up()

    @property
    def hangs(self) -> bool:
        """Whether the leader has not said that it knows of a round's closing, or, in good time, that it is here."""
        if self.state != "late":
            return False
        return self._silent if self._reply is None else self._expected and self.late_for() > HERE_SECONDS * self.slack

    @property
    def tells(self) -> bool:
        """Whether it has said something of the current round."""
        return self.noticed.attempt == self.visits.attempt

    def traffic(self) -> Floats:
        now = self.noticed.ranks[:, 1:].T.astype(np.float64)
        since, self._moved = now - self._moved, now
        return since

    def clients_in(self, *states: str) -> Ints:
        found: list[int] = []
        for clients, state in zip(self.topology.hosted, self.noticed.states()):
            if self.state != "idle" and state != "dead":
                state = self.state
            elif state == "asked":
                state = "idle"  # the reply has overtaken the word that it has left
            if state in states:
                found += clients
        return np.array(found, dtype=np.int64)

    @property
    def busy(self) -> bool:
        return super().busy or (self.state == "idle" and "late" in self.noticed.states())

    def late_for(self) -> float:
        if self.state == "idle" and self.busy:
            return time.monotonic() - self._since
        return super().late_for()

    def _advance(self) -> None:
        if self._hearing is not None and self._hearing.done:
            self._hearing = None
            self._notice(self._told)
            if self.noticed.attempt[0] != Notice.LAST:
                self._listen()
        if self._reply is not None:
            if self._reply.done and (self._hearing is None or not self._leaves):
                self._reply, self._expected = None, False
                self._turn("complete")
        elif self.state in ("visiting", "late") and self.visits.advance():
            self._turn("complete")

    def _blank(self) -> Notice:
        return Notice(len(self.topology.ranks), len(self.hosted), sum(len(each.large) for each in self.visits.formats))

    def _listen(self) -> None:
        self._told = self._blank()
        data = self._told.data
        self._hearing = self.begin(self.notices.up(data), data)

    def _notice(self, new: Notice) -> None:
        now, before = time.monotonic(), self.noticed.states()
        if "late" not in before:
            self._since = now
        for rank, state, was in zip(self.topology.ranks, new.states(), before):
            if state == "dead" != was:
                self.gone.append((rank, f"rank {self.leader}, which leads it, has lost it"))
        self.noticed, self.heard = new, now
        if self.tells:
            self._silent &= not new.closing
            if new.closing and self.state == "late":
                self.since = now + self.bandwidth.allows(new.left)
            self.visits.take_note(new, now)
