"""A client rank that leads others: it passes on what it is told, and sums of what they send.

To the ranks below it is what the server is to ranks alone on their lanes; to the one above it is one lane
(`hpcfl.realtime.node`). Its main thread speaks MPI, and adds up layers as they come. Its own clients are those of a
client rank within this process, at the other end of one more lane. It sends a group's sum on when all visits that
it has asked for have come that far, or when it hears that the round is closed: what has come until then counts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from math import inf
from typing import Any

import numpy as np

from hpcfl.base.errors import Interrupted, RunError
from hpcfl.base.lazy import torch
from hpcfl.base.memory import freeze
from hpcfl.base.types import Ints
from hpcfl.engine.job import Job
from hpcfl.engine.profile import Phases
from hpcfl.engine.received import Received, add_group
from hpcfl.mpi.channel import Channel, in_pieces
from hpcfl.mpi.placement import Topology
from hpcfl.mpi.transfers import Transfer, Transfers
from hpcfl.mpi.waiting import Doze, Patience
from hpcfl.realtime.client import ClientRank, Wait
from hpcfl.realtime.lane import Lane
from hpcfl.realtime.lanes import Lanes
from hpcfl.realtime.node import NodeLane, PendingSums
from hpcfl.realtime.orders import RANK_STATES, Command, Notice, Op
from hpcfl.realtime.outcome import names_who_counts
from hpcfl.realtime.questions import QUESTIONS
from hpcfl.schedule.plan import Attempt
from hpcfl.sums.frames import SIGNS, SumFormat
from hpcfl.sums.message import ExactSums
from hpcfl.sums.packing import POOL, Bytes, Packing

TAKE_SECONDS = 0.001  # for adding up between two looks: a closing may be told of
ALIVE_SHARE = 0.25  # of the silence after which a rank counts as dead: so often a leader says something
HERE: Ints = np.ones(1, dtype=np.int64)


class Above:
    """What is under way between a leader and the rank above it; to `Lanes` it looks like a lane that never changes."""

    state, gone = "idle", ()

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def poll(self) -> bool:
        return True

    def die(self, reason: str) -> None:
        who = "the server (rank 0)" if self.rank == 0 else f"rank {self.rank}, which led this one,"
        raise RunError(f"{who} is lost ({reason})")


class PartialSums:
    """The sums of one round over the visits below a leader, as far as they have come.

    Parameters
    ----------
    lanes : list of Lane
        Those that were asked, and where the clients and ranks of each begin among all below the leader.
    began : float
        When the leader heard of the round, in seconds of the monotonic clock.
    """

    def __init__(
        self,
        job: Job,
        attempt: Attempt,
        lanes: Sequence[tuple[Lane, int]],
        asked: Sequence[Sequence[int]],
        formats: Sequence[SumFormat],
        began: float,
    ) -> None:
        self.lanes, self.began, self.formats = lanes, began, formats
        self.by_name = names_who_counts(attempt, job.planner.whole)
        self.sums = ExactSums(job.layout)
        some = np.array(job.layers.reached) <= attempt.layers
        self.least = len(formats) if job.planner.whole else int(some.argmax())  # groups: a loss alone is nothing
        self.frames = [[group.head()] for group in formats]  # of sums
        self.place = {client: (row, place) for row, clients in enumerate(asked) for place, client in enumerate(clients)}
        self.stirred = {lane for lane, _ in lanes}  # on which something may have come that is not added yet
        self.sent = 0  # groups that have left
        self.parts: list[int] = []  # in how many parts their large blocks come
        self.turns = {lane: 1 if lane.leads else len(lane.visits.asked) for lane, _ in lanes}
        self.added = {lane: np.zeros(len(formats), dtype=np.int64) for lane, _ in lanes}  # turns, by group
        self.held: dict[Lane, list[Received]] = {lane: [] for lane, _ in lanes}
        self.closed: list[tuple[Lane, int, Received, int]] = []  # and how many of their groups count

    @property
    def all_sent(self) -> bool:
        return self.sent == len(self.formats)

    def take(self) -> bool:
        """Add what has come, unless it has to be held, and let ranks go on to their next visits.

        True where `TAKE_SECONDS` were not enough for all of it.
        """
        until = time.monotonic() + TAKE_SECONDS
        for lane, row in self.lanes:
            one = lane.visits.pending
            if lane not in self.stirred or one is None or (self.by_name and lane.leads):
                continue
            if self.by_name and one.complete and one not in self.held[lane]:
                self.held[lane].append(one)
            for number in () if self.by_name else range(self._there(one)):
                if self.added[lane][number] <= lane.visits.turn:
                    if time.monotonic() > until:
                        return True
                    self._add(lane, row, one, number)
            if lane.visits.has_next:
                if self.by_name:
                    lane.visits.keep_pending()
                lane.visits.receive_next()
            self.stirred.remove(lane)
        return False

    def ready(self) -> bool:
        """Whether all visits that were asked for have brought the next group."""
        if self.by_name or self.all_sent:
            return False
        return all(lane.state == "dead" or self.added[lane][self.sent] == turns for lane, turns in self.turns.items())

    def close(self, counting: Ints, leaders: bool) -> None:
        """Fix what counts of what has come, of ranks alone on their lanes or of `leaders`; what comes later does not.

        Of complete visits that are held those count that hold any of the clients that are `counting`.
        """
        named = set(counting.tolist())
        for lane, row in self.lanes:
            if lane.leads is not leaders:
                continue
            if self.by_name and not leaders:
                counted = [one for one in self.held[lane] if not named.isdisjoint(chain(*one.clients))]
                self.closed += [(lane, row, one, len(self.formats)) for one in counted]
            elif (one := lane.visits.pending) is not None:
                self.closed.append((lane, row, one, self._there(one)))

    @property
    def behind(self) -> bool:
        """Whether anything that counts is still to be added, the round being closed."""
        return any(self._left(number) for number in range(self.sent, len(self.formats)))

    def last(self) -> Iterator[list[Any]]:
        """Yield the frames of all groups that have not left, once what counts of each is added."""
        while not self.all_sent:
            for lane, row, one in self._left(self.sent):
                self._add(lane, row, one, self.sent)
            yield self.frame()

    def _left(self, number: int) -> list[tuple[Lane, int, Received]]:
        return [
            (lane, row, one)
            for lane, row, one, groups in self.closed
            if number < groups and (self.by_name or self.added[lane][number] <= lane.visits.turn)
        ]

    def frame(self) -> list[Any]:
        """Return the frame of the next group, which has to leave as it is."""
        group, frame = self.formats[self.sent], self.frames[self.sent]
        self.sent += 1
        group.fill(frame, self.sums)
        self.parts += group.parts(frame)
        return frame

    def _there(self, one: Received) -> int:
        """Return how many groups of some visits have come: none yet where these would be nothing by themselves."""
        there = len(one.times)
        return there if there >= self.least else 0

    def _add(self, lane: Lane, row: int, one: Received, number: int) -> None:
        add_group(one, number, self.sums)
        self.added[lane][number] += 1
        group, to_send, frame = self.formats[number], self.frames[number], one.frames[number]
        signs, own = group.signs(to_send), one.signs[number]
        if isinstance(one, PendingSums):
            there = own[0] != 0
            ranks, most = there.shape
            signs[:, row : row + ranks, :most] = own
            signs[-1, row : row + ranks, :most][there] += one.start - self.began
            for name in group.kept:
                group.singles(to_send, name)[row : row + ranks, :most] = one.formats[number].singles(frame, name)
            return
        for place, client in enumerate(chain(*one.clients)):
            to = self.place[client]
            signs[(slice(SIGNS), *to)] = own[:, 0, place]
            signs[(SIGNS, *to)] = one.times[number] - self.began
            for name in group.kept:
                value, weight = one.formats[number].single(frame, name, 0, place)
                group.singles(to_send, name)[to] = np.append(weight, value)


class Below(Lanes):
    """The lanes of a leader: whenever it waits for them, it also does what else there is `beside`, a part at a time."""

    def __init__(self, lanes: list[Lane], beside: Callable[[], bool], **more: Any) -> None:
        super().__init__(lanes, tells=False, **more)
        self.beside = beside

    def poll(self) -> bool:
        moved = super().poll()
        return self.beside() or moved


class Leader:
    """One rank that leads others.

    Parameters
    ----------
    topology : Topology
        All ranks below it, and itself.
    above : (Channel, Channel, Channel)
        To the rank above it: commands, what is large, and notices.
    own : ClientRank
        Its own clients.
    lanes : sequence of Lane
        To the ranks below it, in the topology's order, the one to its own clients among them.
    depth : int
        How many leaders are above it.
    renewed : bool
        Whether it leads in the place of another one: ranks below it may still be busy, or hang, or be dead. Else it
        begins once all of them are there, unless the config says how long they are waited for.
    """

    def __init__(
        self,
        job: Job,
        topology: Topology,
        above: tuple[Channel, Channel, Channel],
        parent: int,
        own: ClientRank,
        lanes: Sequence[Lane],
        transfers: Transfers,
        rest: Callable[[], None],
        phases: Phases,
        depth: int = 0,
        renewed: bool = False,
    ) -> None:
        self.job, self.topology, self.own, self.phases, self.renewed = job, topology, own.steps(), phases, renewed
        self.control, self.data, self.notices = above
        self.above, self.watch = Above(parent), rest
        self.lanes = Below(
            list(lanes),
            self._beside,
            lost_after=job.config.lost_after,
            phases=phases,
            transfers=transfers,
            haste=2.0 ** (1 + depth),
        )
        self.transfers = transfers
        self.row, self.place, row, place = dict[Lane, int](), dict[Lane, slice](), 0, 0
        for lane in lanes:
            self.row[lane], self.place[lane] = row, slice(place, place + len(lane.hosted))
            row, place = row + len(lane.topology.ranks), place + len(lane.hosted)
        self.within = next(lane for lane in lanes if lane.topology.ranks == own.topology.ranks)
        self.formats = [SumFormat(blocks, len(topology.ranks), topology.most(True)) for blocks in job.layout]
        self.packing = Packing(job.algorithm.init_server(job.task))
        self.round: PartialSums | None = None
        self._own_wait: Wait | None = None  # at which its own clients are
        self._passing: deque[tuple[Transfer, Bytes, Sequence[Lane]]] = deque()  # pieces of state, and who expects them
        large = sum(len(group.large) for group in self.formats)
        self.notice = Notice(len(topology.ranks), len(topology.clients), large)
        self._said, self._said_at = self.notice.copy(), -inf
        self.notice.data[0] = -1  # which is to be told
        self._telling: Transfer | None = None
        self._sends: list[Transfer] = []
        self._state: list[tuple[Transfer, Bytes]] = []  # that was received last
        self.received = self.sent = self.holds = 0
        self.released = False
        self._unnoted = {*lanes}  # of which the notice may tell what is no more so

    def serve(self) -> Command:
        """Do what the rank above asks; return its last word, which is that the run is over."""
        for lane in self.lanes.all:
            lane.expect(lane.counted)
            if self.renewed:
                lane.heard = time.monotonic()
        if not self.renewed and self.job.config.start_within is None:
            self.lanes.wait_for_all(inf)
        freeze()
        self._send(self.data.up(HERE), HERE)
        self._listen()
        done = {Op.VISIT: self._visit, Op.CLOSE: self._close}
        while True:
            with self.phases.phase("waiting" if self.round is None else "compute"):
                self._until(lambda: self._heard.done)
            command = Command.unpacked(self._command, len(self.topology.clients))
            if command.op is not Op.LEAVE:
                self._listen()
            for lane in self.lanes.all:
                lane.counted = command.counted[self.place[lane]]
            done.get(command.op, self._ask)(command)
            if command.op is Op.LEAVE:
                self._until(lambda: self._telling is None or self._telling.done)
                self.notice.data[0] = Notice.LAST
                self._tell()
                self._until(lambda: all(each.done for each in self._sends))
                return command

    # rounds

    def _visit(self, command: Command) -> None:
        """Pass a round's state on to those who are invited, and who are free."""
        began = time.monotonic()
        if command.round != self.notice.data[0]:
            self.phases.begin()
        self.notice.data[: Notice.HEAD] = command.round, command.attempt, 0, 0, 0
        self.notice.came[:] = Notice.NOT_ASKED
        pieces = self._receive_state(command)
        nbytes = sum(piece.nbytes for _, piece in pieces)
        facts = command.round, command.attempt, command.stage, command.cohort, command.closes_after
        attempt = self.job.planner.attempt(*facts)
        invited = [] if self._heard.done else self.lanes.hosting(command.cohort, "idle")  # it may be over already
        for lane in invited:
            self.notice.came[self.place[lane]] = 0
            if isinstance(lane, NodeLane):
                lane.by_name = names_who_counts(attempt, self.job.planner.whole)
        lacking = [lane for lane in invited if lane.lacks(command)]
        for lane in invited:
            lane.invite(command, [], later=nbytes)
        self._passing += [(coming, piece, lacking) for coming, piece in pieces]
        cohort = set(command.cohort.tolist())
        asked = [[client for client in row if client in cohort] for row in self.topology.hosted]
        lanes = [(lane, self.row[lane]) for lane in invited]
        self.round = PartialSums(self.job, attempt, lanes, asked, self.formats, began)
        with self.phases.phase("broadcast"):
            self._until(lambda: not self._passing or self._heard.done, nbytes)

    def _beside(self) -> bool:
        """Do what there is to do whenever this rank looks at its lanes; True where some of it is left."""
        left = False
        while (wait := next(self.own, None)) is not self._own_wait:
            self._own_wait = wait
        while self._passing and self._passing[0][0].done:
            _, piece, lanes = self._passing.popleft()
            for lane in lanes:
                if lane.state != "dead":
                    lane.pass_on(piece)
        self._unnoted.update(self.lanes.stirred)
        if self.round is not None:
            with self.phases.phase("reduction"):
                self.round.stirred.update(lane for lane in self.lanes.stirred if lane in self.round.added)
                left = self.round.take()
                while self.round.ready():
                    self._send_frame(self.round.frame())
            if self.round.all_sent and not any(lane.leads and lane.state == "visiting" for lane, _ in self.round.lanes):
                self._end()
        self._tell()
        self.watch()
        return left

    def _close(self, command: Command) -> None:
        """Send what has come of the round that is closed."""
        if self.round is None:
            return
        closing, self.round = self.round, None
        closing.close(command.cohort, leaders=False)
        open_lanes = [lane for lane, _ in closing.lanes if lane.state == "visiting"]
        led = [lane for lane in open_lanes if lane.leads]
        if led or closing.behind:  # else it is known at once what comes
            self.notice.data[2 : Notice.HEAD] = 1, 0, sum(group.most_bytes for group in self.formats[closing.sent :])
            self._tell()
        for lane in open_lanes:
            lane.close(command)
        self._unnoted.update(open_lanes)  # a notice may leave before the next look
        with self.phases.phase("reduction"):
            self.lanes.wait_for_frames(led, closing.by_name)
            closing.close(command.cohort, leaders=True)
            frames = [*closing.last()]
        self.notice.parts[:] = closing.parts
        self.notice.data[2 : Notice.HEAD] = 2, 0, sum(data.nbytes for frame in frames for data in frame)
        self._tell(at_once=True)
        for frame in frames:
            self._send_frame(frame)
        self._end()

    def _end(self) -> None:
        self._note()
        self.round = None
        self.notice.data[3] = 1
        self._tell()

    def _send_frame(self, frame: list[Any]) -> None:
        for data in frame:
            self._send(self.data.summed(data.numpy()), frame, data.nbytes)

    def _receive_state(self, command: Command) -> list[tuple[Transfer, Bytes]]:
        """Begin to receive the shared state, piece by piece, unless it is here.

        Its memory is its own: ranks that are late may still be sent an older one.
        """
        if command.state and command.state == self.holds:
            return self._state
        self.holds = command.state
        buffer = POOL.empty((self.packing.nbytes,), torch.uint8)
        pieces = [piece for part in self.packing.received(buffer) for piece in in_pieces(part, down=True)]
        self.received += sum(piece.nbytes for piece in pieces)
        self._state = [(self.transfers.begin(self.above, self.data.down(piece), piece), piece) for piece in pieces]
        return self._state

    # everything else that is asked

    def _ask(self, command: Command) -> None:
        """Ask all who are free, until the rank above wants no more, and send on what they reply."""
        question = QUESTIONS[command.op]()
        pieces = self._receive_state(command) if question.with_state else []
        self._until(lambda: all(coming.done for coming, _ in pieces), self.packing.nbytes if pieces else 0)
        if question.dismisses:
            self.lanes.wait_for_all(question.seconds(self.job, self.topology))

        def hurry() -> None:
            if self._heard.done:
                raise Interrupted("")

        with self.phases.phase(question.phase):
            found = self.lanes.ask(self.job, self.lanes.all, command, [piece for _, piece in pieces], rest=hurry)
        each = [found.get(lane, question.reply(self.job, lane.topology, lane.leads)) for lane in self.lanes.all]
        whole = question.reply(self.job, self.topology, led=True)
        whole.merge(each, [lane in found for lane in self.lanes.all])
        self._send(whole.send(self.control if question.beside else self.data), whole)
        self.released |= command.op is Op.RELEASE

    # waiting

    def _listen(self) -> None:
        self._command = Command.empty(len(self.topology.clients), self.job.config.clients)
        self._heard = self.transfers.begin(self.above, self.control.down(self._command), self._command)

    def _send(self, requests: Any, kept: Any = None, nbytes: int = 0) -> Transfer:
        self.sent += nbytes
        self._sends = [each for each in self._sends if not each.done]
        self._sends.append(self.transfers.begin(self.above, requests, kept, nbytes))
        return self._sends[-1]

    def _until(self, over: Callable[[], bool], coming: int = 0) -> None:
        patience, doze = Patience(), Doze()
        while not over():
            if self.lanes.poll():
                patience.moved()
            (doze if self.released else patience).pause(coming=coming + self.transfers.outgoing)

    def _tell(self, at_once: bool = False) -> None:
        """Tell the rank above what has changed; as a rule not before it has been told of what was before.

        Where silence is counted, it hears that this rank is there though others below it are silent.
        """
        telling = self._telling is not None and not self._telling.done
        if self._said.data[0] == Notice.LAST or (telling and not at_once):
            return
        self._note()
        now, lost_after = time.monotonic(), self.lanes.lost_after or inf
        if not self.notice.tells_more(self._said, len(self.formats)) and now < self._said_at + ALIVE_SHARE * lost_after:
            return
        others = [lane for lane in self.lanes.all if lane is not self.within]
        received, sent = (sum(getattr(lane, way) for lane in others) for way in ("received", "sent"))
        self.notice.ranks[self.row[self.within], 1:] = self.received + received, self.sent + sent
        self._said, self._said_at = self.notice.copy(), now
        self._telling = self._send(self.notices.up(self._said.data), self._said)

    def _note(self) -> None:
        """Note the state of all ranks, and how far visits have come, where something may have changed since."""
        for lane in self.lanes.all:
            rows = slice(self.row[lane], self.row[lane] + len(lane.topology.ranks))
            if isinstance(lane, NodeLane):
                self.notice.ranks[rows] = lane.noticed.ranks
                self._note_states(lane, self.notice.ranks[rows, 0])
                if lane.noticed.attempt == self.notice.attempt:
                    self.notice.came[self.place[lane]] = lane.noticed.came
            elif lane in self._unnoted:
                self.notice.ranks[rows, 0] = RANK_STATES.index(lane.state)
                self.notice.ranks[rows, 1:] = lane.sent, lane.received
                if self.round is not None and lane in self.round.added:
                    self._note_visits(lane)
        self._unnoted.clear()

    def _note_states(self, lane: NodeLane, states: Ints) -> None:
        """Note how it is about the ranks below another leader that is late or dead: as long as one may lead, late."""
        if lane.state not in ("late", "dead"):
            return
        ranks, dead = lane.topology.ranks, RANK_STATES.index("dead")
        hopeful = any(states[ranks.index(rank)] != dead for rank in lane.heirs)
        states[states != dead] = RANK_STATES.index("late" if hopeful else lane.state)
        if lane.state == "dead":
            states[ranks.index(lane.leader)] = dead
        elif lane.hangs and self.notice.closing != 1:  # while a round is being closed, it is early to say so
            states[ranks.index(lane.leader)] = RANK_STATES.index("silent")

    def _note_visits(self, lane: Lane) -> None:
        groups, places = len(self.formats), {c: p for p, c in enumerate(lane.hosted.tolist())}
        came = self.notice.came[self.place[lane]]
        for number, turn in enumerate(lane.visits.asked[: lane.visits.turn + 1]):
            one = lane.visits.pending
            there = groups if number < lane.visits.turn else len(one.times) if one is not None else 0
            for client in chain(*turn):
                came[places[client]] = there
