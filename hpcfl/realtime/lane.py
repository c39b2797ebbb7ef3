"""The server's end of one lane: what is under way on it, and what has arrived.

Its states, and what leads from one to another, are `TRANSITIONS`: ``idle`` (can be asked), ``visiting`` (asked for
visits), ``asked`` (for something else), ``late`` (nobody waits for it any longer, or not yet; requests and buffers are
kept until it has caught up) and ``dead``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from math import inf
from typing import Any, ClassVar

import numpy as np

from hpcfl.base.lazy import MPI
from hpcfl.base.types import Floats, Ints
from hpcfl.engine.received import Received
from hpcfl.mpi.channel import Pair, Requests
from hpcfl.mpi.placement import Topology
from hpcfl.mpi.transfers import Transfer, Transfers
from hpcfl.mpi.waiting import Bandwidth
from hpcfl.realtime.orders import Command
from hpcfl.realtime.questions import Question, Reply
from hpcfl.sums.frames import Frame, VisitFormats, zero_frames
from hpcfl.sums.message import Layout
from hpcfl.sums.packing import Bytes

TRANSITIONS: dict[str, dict[str, str]] = {
    "idle": {"invited": "visiting", "questioned": "asked", "expected": "late", "failed": "dead"},
    "visiting": {"complete": "idle", "closed": "late", "failed": "dead"},
    "asked": {"complete": "idle", "given up": "late", "failed": "dead"},
    "late": {"complete": "idle", "failed": "dead"},
    "dead": {"failed": "dead"},
}
"""The state that follows each, by what happens; nothing else may."""
BUSY = "visiting", "asked", "late"
"""The states in which a rank owes something."""


def visit_formats(layout: Layout, topology: Topology, together: bool, parts: Ints) -> VisitFormats:
    """Return the formats of visits on a lane; `parts` [clients] says which part of the blocks each client holds."""
    held = dict(zip(topology.clients.tolist(), parts[topology.clients].tolist()))
    return VisitFormats(layout, len(topology.ranks), topology.most(together), held)


class PendingReceive(Received):
    """One turn of a lane's ranks, as it is received: a frame per group, and when each of them was there."""

    def __init__(self, lane: Lane, clients: list[list[int]], formats: Sequence[Any], frames: list[Frame]) -> None:
        super().__init__(clients, formats, frames)
        self.lane = lane
        self.transfers = [lane.receive(frame) for frame in frames]

    def poll(self) -> bool:
        """Note what has arrived since; True once everything has."""
        while not self.complete and self.transfers[len(self.times)].done:
            self.arrive()
        return self.complete

    def arrive(self) -> None:
        """Note that the next group has come; from a rank alone on its lane no more than what it had."""
        number = len(self.times)
        frame = self.frames[number]
        self.lane.received += _nbytes(frame if self.lane.shared else self.formats[number].came(frame))
        self.times.append(time.monotonic())


class Turns:
    """The visits of one round on a lane, while its clients are the same.

    Attributes
    ----------
    asked : list of list of list of int
        Whose visits are asked for, ``[turn][local rank][place]``.
    begun : int
        How many turns have been received, the current one included.
    pending : PendingReceive, optional
        The current turn.
    coming : int
        Bytes of it that have not arrived.
    flowing : bool
        Whether a leader has said how much comes of a round that is closed, which is still in good time.
    progress : tuple
        Something that differs once anything has come.
    """

    flowing = False

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.formats = visit_formats(lane.layout, lane.topology, lane.together, lane.parts)
        self.asked: list[list[list[int]]] = []
        self.begun = 0
        self.pending: PendingReceive | None = None
        self._frames: list[Frame] = []
        self._cleared = 0
        self._closing: list[Transfer] = []  # the agreement on what was begun, then the ranks' word that they are free
        self._target: Ints = np.zeros(1, dtype=np.int64)
        self._drained: list[Transfer] = []
        self._draining: tuple[int, float] | None = None  # bytes that come after a closing, and since when

    @property
    def turn(self) -> int:
        """The turn whose visits are being received."""
        return max(0, self.begun - 1)

    @property
    def arrived(self) -> int:
        """Complete visits that are not yet summed up."""
        return self.pending.visits if self.pending is not None and self.pending.complete else 0

    @property
    def completed(self) -> list[tuple[float, int, int]]:
        """When each of them was there, its rank, and its client."""
        one = self.pending
        if one is None or not one.complete:
            return []
        rows = zip(self.lane.topology.ranks, one.clients)
        return [(one.times[-1], rank, client) for rank, clients in rows for client in clients]

    @property
    def awaited(self) -> int:
        """Visits of this round that may still come."""
        if self.lane.state != "visiting":
            return 0
        current = self.pending.visits if self.pending is not None and not self.pending.complete else 0
        return current + sum(len(clients) for turn in self.asked[self.begun :] for clients in turn)

    @property
    def has_next(self) -> bool:
        """Whether visits are complete and others are to follow."""
        return self.arrived > 0 and self.lane.state == "visiting" and self.begun < len(self.asked)

    @property
    def coming(self) -> int:
        return 0 if self.pending is None else sum(map(_nbytes, self.pending.frames[len(self.pending.times) :]))

    @property
    def progress(self) -> tuple[Any, ...]:
        return self.begun, len(self.pending.times) if self.pending is not None else 0

    def ask(self, command: Command) -> None:
        """Note whose visits are asked for from now on."""
        turns = self.lane.topology.turns(command.cohort, self.lane.together)
        self.asked = [[list(chain(*chunks)) for chunks in turn] for turn in turns]
        self.begun, self.pending = 0, None

    def receive_next(self) -> None:
        """Begin to receive the next visits, into the frames of those before, which must have been summed up."""
        while self._clear_next():
            pass
        self._cleared = 0
        formats = self.formats.of(self.asked[self.begun])
        frames = [
            [data[:size] for data, (size, _) in zip(frame, group.sizes())]
            for frame, group in zip(self._frames, formats)
        ]
        self.pending = PendingReceive(self.lane, self.asked[self.begun], formats, frames)
        self.begun += 1

    def keep_pending(self) -> None:
        """Leave what has come to those who hold it: the next visits are received into other memory."""
        self._frames = []

    def advance(self, sending: bool) -> bool:
        """Receive visits, but not before the state has been sent: both at once take a third longer.

        True once all have come.
        """
        if self.pending is None and sending:
            if self._clear_next():
                self.lane.transfers.stir(self.lane)  # with the next frame
        elif self.pending is None:
            self.receive_next()
        return self.pending is not None and self.pending.poll() and self.begun == len(self.asked)

    def close(self) -> None:
        """Begin to agree with the ranks on what they had begun to send when they heard of the closing."""
        begun = np.array([self.begun * len(self.formats.all)], dtype=np.int64)
        agreed = self.lane.control.agree(begun, self._target)
        self._closing, self._drained = [self.lane.begin(agreed, (begun, self._target))], []

    def catch_up(self) -> bool:
        """Receive what they had begun, then wait until they are free; True once they are."""
        if self.pending is not None:
            self.pending.poll()
        if len(self._closing) == 1:
            if self._closing[0].done:
                self._drain()
            return False
        whole = self.pending is None or self.pending.complete
        if not whole or not all(each.done for each in self._drained):
            return False
        if self._draining:  # from the agreement on nobody computes for what came
            self.lane.bandwidth.came(*self._draining)
            self._draining, self.lane.since = None, min(self.lane.since, time.monotonic())
        return self._closing[1].done

    def _drain(self) -> None:
        """Begin to receive what goes beyond the current visits, and to wait until the ranks are free."""
        frames, first, posted = [], self.begun * len(self.formats.all), int(self._target[0])
        for index in range(first, posted):
            turn, group = divmod(index, len(self.formats.all))
            frames.append(self.formats.of(self.asked[turn])[group].zeros())
        self._drained = [self.lane.receive(frame) for frame in frames]
        self._closing.append(self.lane.begin(self.lane.control.meet()))
        self.lane.received += sum(map(_nbytes, frames))
        if self.pending is not None:
            absent = 0 if self.lane.shared else max(0, first - posted)  # of these no more than heads come
            frames += self.pending.frames[len(self.pending.times) : len(self.pending.frames) - absent]
        self._draining = sum(map(_nbytes, frames)), time.monotonic()

    def _clear_next(self) -> bool:
        """Set the next frame to zero, the server's own part of a sum; True if there was any left."""
        self._frames = self._frames or zero_frames(self.formats.all)
        if not self.lane.shared or self._cleared == len(self._frames):
            return False
        for data in self._frames[self._cleared]:
            data.zero_()
        self._cleared += 1
        return True


class Lane:
    """One lane, as the server sees it.

    It leads its client ranks over two `channels`: `control` for commands, `data` for everything large. The run has so
    many `clients`, which hold these `parts` of the blocks; `together`: a rank sends one sum over all its chunks. What
    the lane has under way is among the `transfers` of all: they tell when it is to be polled.

    Attributes
    ----------
    leads : bool
        Whether a rank at its other end, the `leader`, leads others.
    by_name : bool
        Whether that one holds visits until it hears who counts.
    gone : list of (int, str)
        Ranks that such a one has lost, and why, until somebody takes note of it.
    counted : int64 [h]
        What of each client's last visit counted, as far as that is known, see `acknowledgment`: each command says it.
    """

    leads = by_name = False
    leader = 0
    heirs: tuple[int, ...] = ()
    checked = False  # whether each look is followed by `validate`
    receiver: ClassVar[type[Any]] = Turns
    visits: Any

    def __init__(
        self,
        topology: Topology,
        channels: Pair,
        layout: Layout,
        clients: int,
        transfers: Transfers,
        together: bool = False,
        parts: Ints | None = None,
    ) -> None:
        (self.control, self.data), self.run_clients = channels, clients
        self.bandwidth, self.transfers, self.layout, self.together = Bandwidth(), transfers, layout, together
        self.parts = np.zeros(clients, dtype=np.int64) if parts is None else parts
        self.state, self.reason = "idle", ""
        self.since, self.heard = 0.0, inf  # a rank that has never been heard of may take its time to start
        self.sent = self.received = self.round_bytes = self.holds = 0
        self.worked: Floats = np.zeros((2, len(topology.ranks)))
        self.gone: list[tuple[int, str]] = []
        self._sends: list[Transfer] = []
        self._leaving: tuple[int, float] | None = None  # bytes of the state, and since when
        self._owed = 0  # bytes of it that are still to be passed on
        self._reply: Transfer | None = None
        self._beside: Transfer | None = None  # the reply that comes beside a visit
        self.host(topology)

    def host(self, topology: Topology) -> None:
        """Have these clients on the lane's ranks, while nothing is under way."""
        self.topology, self.hosted = topology, topology.clients
        self.shared = len(topology.ranks) > 1
        self.counted: Ints = np.zeros(len(self.hosted), dtype=np.int64)
        self.visits = self.receiver(self)

    # what the server asks

    def invite(self, command: Command, state: Sequence[Bytes], later: int = 0) -> None:
        """Ask for a round's visits and send the shared state (in parts, kept until they are sent).

        So many bytes of it are passed on `later`, piece by piece.
        """
        self._command(command, state, later)
        self.visits.ask(command)
        self._turn("invited")

    def pass_on(self, piece: Bytes) -> None:
        """Send a piece of the shared state, whatever has become of the round: the ranks expect all of it."""
        self._owed -= piece.nbytes
        self._sends.append(self.begin(self.data.down(piece), piece, piece.nbytes))
        self.sent += piece.nbytes

    def close(self, command: Command) -> None:
        """Tell a lane that is not complete that the round is over, and let it catch up."""
        self._command(command)
        self.visits.close()
        self._leaving = None
        self._fall_behind("closed", sum(each.outgoing for each in self._sends) + self._owed + self.visits.coming)

    def ask(self, command: Command, question: Question, reply: Reply, state: Sequence[Bytes] = ()) -> bool:
        """Ask something, where that can be asked for now: of a lane at a visit only what is replied to beside it.

        A reply that nobody waits for any longer is still received: its buffer must live until then, and mpi4py's
        requests do not hold the buffers of reductions.
        """
        idle = self.state == "idle"
        if not idle and (self.state != "visiting" or not question.beside or self.owes_reply):
            return False
        self._command(command, state)
        coming = self.begin(reply.receive(self.control if question.beside else self.data), reply)
        if idle:
            self._reply = coming
            self._turn("questioned")
        else:
            self._beside = coming
        return True

    def give_up(self) -> None:
        """Do not wait for a reply any longer; it is dropped when it comes."""
        if self.state == "asked":
            self._fall_behind("given up")
            self.transfers.stir(self)

    def expect(self, counted: Ints) -> None:
        """Wait until the ranks are there; some come from a lane that has fallen apart, `counted` being known of it."""
        self.counted, nothing = counted, np.zeros((2, 1), dtype=np.int64)
        self._reply = self.begin(self.control.agree(*nothing), nothing)  # that they are there is all
        self._fall_behind("expected")

    def die(self, reason: str) -> None:
        """Give the lane up for good; what has arrived stays."""
        self._turn("failed")
        self.reason = reason
        self.transfers.abandon(self)

    # what goes on by itself

    def poll(self) -> bool:
        """Move on as far as possible without waiting; True if anything has happened.

        A lane whose channel fails is dead.
        """
        if self.state == "dead":
            return False
        before = self.state, *self.visits.progress
        self._sends = [each for each in self._sends if not each.done]
        if self._leaving and not self._sends and not self._owed:
            self.bandwidth.went(*self._leaving)
            self._leaving = None
        try:
            self._advance()
        except MPI.Exception as error:
            self.die(" ".join(error.Get_error_string().split()))
        moved = before != (self.state, *self.visits.progress)
        if moved:  # a visit's frame does not shorten the time that a rank is given to reply beside it
            self.heard = max(time.monotonic(), self.heard if self.owes_reply else 0.0)
        if self.checked:
            self.validate()
        return moved

    def validate(self) -> None:
        """Raise AssertionError where what is under way does not fit the state."""
        assert (self.state == "asked") <= (self._reply is not None) <= (self.state in ("asked", "late", "dead"))
        assert self._owed >= 0
        if self.state == "idle":
            assert self.visits.pending is None or self.visits.pending.complete

    @property
    def owes_reply(self) -> bool:
        """Whether a reply is awaited that is not there yet."""
        return self.state == "asked" or (self.state != "dead" and self._beside is not None)

    @property
    def has_replied(self) -> bool:
        """Whether what was asked last has been replied to, in time."""
        return self.state in ("idle", "visiting") and not self.owes_reply

    def traffic(self) -> Floats:
        """Return bytes that each rank has received and sent since this was last asked, [2, ranks]."""
        return np.array([[self.sent], [self.received]], dtype=np.float64)

    def clients_in(self, *states: str) -> Ints:
        """Return who lives on ranks in these states."""
        return self.hosted if self.state in states else self.hosted[:0]

    @property
    def hangs(self) -> bool:
        """Whether a leader owes word that it is there; no other rank does."""
        return False

    @property
    def busy(self) -> bool:
        """Whether a rank owes something."""
        return self.state in BUSY

    def late_for(self) -> float:
        """Seconds since bytes under way should have come; below 0: they still may; inf where the lane is not late."""
        return time.monotonic() - self.since if self.state == "late" else inf

    def lacks(self, command: Command) -> bool:
        """Whether the shared state of a command has to come along: the ranks, who hear the same, conclude the same."""
        return not command.state or command.state != self.holds

    def receive(self, frame: Frame) -> Transfer:
        """Start to receive one frame: from one rank as it is, from several added on the way to what is there."""
        return self.begin([request for data in frame for request in self.data.summed(data.numpy())], frame)

    def begin(self, requests: Requests, kept: Any = None, outgoing: int = 0) -> Transfer:
        """Have requests looked at with all else, see `Transfers.begin`."""
        return self.transfers.begin(self, requests, kept, outgoing)

    def _advance(self) -> None:
        if self._beside is not None and self._beside.done:
            self._beside, self.heard = None, time.monotonic()
        if self._reply is not None:
            if self._reply.done:
                self._reply = None
                self._turn("complete")
        elif (self.state == "late" and self.visits.catch_up()) or (
            self.state == "visiting" and self.visits.advance(bool(self._sends or self._owed))
        ):
            self._turn("complete")

    def _command(self, command: Command, state: Sequence[Bytes] = (), later: int = 0) -> None:
        """Send a command, with what has counted, and what comes along."""
        if self.state == "idle":
            self.heard = time.monotonic()
        packed = replace(command, counted=self.counted).packed(len(self.hosted), self.run_clients)
        self._sends.append(self.begin(self.control.down(packed), packed, packed.nbytes))
        self.sent += packed.nbytes
        if (state or later) and self.lacks(command):
            self.holds = command.state or self.holds
            self._owed += later + sum(part.nbytes for part in state)
            self._leaving = self._owed, time.monotonic()
            self.round_bytes = 2 * self._owed  # as much comes up
            for part in state:
                self.pass_on(part)

    def _fall_behind(self, event: str, under_way: int = 0) -> None:
        """Be late, from when bytes that are under way should be there at the latest."""
        self._turn(event)
        self.since = time.monotonic() + self.bandwidth.allows(under_way)

    def _turn(self, event: str) -> None:
        """Pass to the state that follows what has happened."""
        self.state = TRANSITIONS[self.state][event]


def _nbytes(frame: Frame) -> int:
    return sum(data.nbytes for data in frame)
