"""The server's side of rounds in real time: it asks the lanes, and closes the round when its rule says so."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from hpcfl.deadlines import Deadlines
from hpcfl.errors import RunError
from hpcfl.message import State
from hpcfl.packing import Bytes, Packing, public
from hpcfl.plan import Floats, Ints, Invitation, Plan
from hpcfl.transport import Arrays, Saved
from hpcfl.wall.answers import Saving, Scoring
from hpcfl.wall.call import Call, Op
from hpcfl.wall.closing import Closing
from hpcfl.wall.held import Held
from hpcfl.wall.lane import Lane
from hpcfl.wall.tally import Tally
from hpcfl.wire import Patience

if TYPE_CHECKING:
    from hpcfl.job import Job

GRACE_SECONDS = 0.05  # after a closing, for lanes to hand in what they have and to become free again
ANSWER_SECONDS = 1.0  # least time for answers other than visits
SAVE_SECONDS = 5.0
LEAVE_SECONDS = 60.0


@dataclass(frozen=True)
class Loss:
    """A rank that is gone, and with it its clients."""

    rank: int
    clients: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        clients = ", ".join(str(client) for client in self.clients)
        return f"rank {self.rank} is lost ({self.reason}), and with it client{'s' * (len(self.clients) > 1)} {clients}"


class Server:
    """All lanes, seen from the server.

    Parameters
    ----------
    lanes : list of Lane
    rest : callable
        Called while the server waits; it may raise to end the run.
    spare : mapping of int to Lane
        A lane of its own for each rank that shares one: where MPI tells of dead ranks, a lane that has lost one falls
        apart into these.

    Attributes
    ----------
    lost : list of Loss
        The dead, in the order in which they were noticed.
    """

    def __init__(
        self,
        job: Job,
        lanes: list[Lane],
        rest: Callable[[], None] = lambda: None,
        spare: Mapping[int, Lane] | None = None,
    ) -> None:
        self.job, self.lanes, self.rest, self.spare = job, lanes, rest, spare or {}
        self.participation = job.config.participation
        self.deadlines = Deadlines(self.participation)
        self.packing = Packing(public(job.algorithm.start(job.task)))
        self.lost: list[Loss] = []
        self.lost_after = job.config.lost_after
        self.size = 1 + sum(len(lane.bench.ranks) for lane in lanes)

    # rounds

    def exchange(self, round_: int, shared: State) -> tuple[Plan, Held]:
        """Run one round: invite, wait until the rule says that it is over, return what happened and the sums.

        A round in which fewer than ``min_clients`` visits counted is void, and repeated.
        """
        began, attempt = time.monotonic(), 0
        while True:
            tally = self._attempt(round_, attempt, shared)
            self.deadlines.saw(tally.seconds, tally.asked.deadline)
            if tally.count >= self.participation.min_clients:
                break
            tally.void()
            attempt += 1
        plan = tally.plan(time.monotonic() - began, attempt)
        return plan, tally.sums(plan)

    def _attempt(self, round_: int, attempt: int, shared: State) -> Tally:
        asked = self._asked(round_, attempt)
        state = self._state(shared)
        invited = [lane for lane in self._in("idle") if np.isin(lane.hosted, asked.cohort).any()]
        tally = Tally(self.job, asked, invited, time.monotonic())
        for lane in invited:
            lane.invite(self._call(Op.VISIT, lane, asked), state)
        self._until_over(tally)
        self._poll()
        closed = time.monotonic()
        self._close(asked)
        tally.finish(closed)
        return tally

    def _asked(self, round_: int, attempt: int) -> Invitation:
        """Return the invitation of whoever is drawn and free; wait until there are enough of them."""
        deadline = self.deadlines.seconds(round_)
        drawn = self.job.asked(round_, deadline=deadline, attempt=attempt)
        need, patience = max(1, self.participation.min_clients), Patience()
        self._caught_up()
        while True:
            self._reform()
            free = np.intersect1d(drawn.cohort, self._hosted("idle"))
            if len(free) >= need:
                return self.job.asked(round_, cohort=free, deadline=deadline, attempt=attempt)
            left = np.intersect1d(drawn.cohort, self._hosted("idle", "active", "late"))
            if len(left) < need:
                raise RunError(
                    f"round {round_}: expected at least {need} of the {len(drawn.cohort)} clients invited, "
                    f"but only {len(left)} are left; lost: {self._lost_ranks()}"
                )
            self.rest()
            self._look(patience)

    def _until_over(self, tally: Tally) -> None:
        """Wait until the round's rule says that it is over."""
        closing, patience = Closing.of(self.participation, tally.asked.deadline), Patience()
        while True:
            seconds = time.monotonic() - tally.start
            if closing.over(*tally.progress(), seconds):
                return
            for lane in tally.lanes:
                if lane.turns:
                    tally.turn(lane)
            self.rest()
            self._look(patience, closing.ends - seconds)

    def _close(self, asked: Invitation) -> None:
        """Tell the lanes that are not complete; those of several ranks get a moment to hand in what they have."""
        unfinished = self._in("active")
        for lane in unfinished:
            lane.close(self._call(Op.CLOSE, lane, asked))
        self._caught_up([lane for lane in unfinished if len(lane.bench.ranks) > 1])

    def _call(self, op: Op, lane: Lane, asked: Invitation) -> Call:
        return Call(op, asked.round, asked.attempt, asked.deadline, counted=lane.counted, cohort=asked.cohort)

    def _state(self, shared: State) -> list[Bytes]:
        """Return the shared state as it is sent: the tensors' own memory, so they are never changed in place."""
        return self.packing.sent(public(shared))

    # everything else that is asked of the lanes

    def scores(self, round_: int, shared: State) -> Floats:
        """Return loss sums and correct answers of every client's own test part, ``[2, clients]``; NaN: no answer."""
        self._caught_up()
        found = np.full((2, self.job.config.clients), np.nan)
        state, asked = self._state(shared), self._in("idle")
        replies = {}
        for lane in asked:
            replies[lane] = Scoring(len(lane.hosted))
            lane.ask(Call(Op.SCORE, round_, counted=lane.counted), state, replies[lane].receive)
        self._answered(asked)
        for lane in asked:
            if lane.state == "idle":
                found[:, lane.hosted] = replies[lane].data
        return found

    def personal(self, like: State, last: Callable[[Ints], Arrays]) -> Iterator[Saved]:
        """Yield the acknowledged personal state lane by lane; of a lane that does not answer, what `last` knows."""
        self._caught_up()
        for lane in self.lanes:
            reply = Saving(lane.bench, like)
            if lane.state == "idle":
                lane.ask(Call(Op.SAVE, counted=lane.counted), [], reply.receive)
                self._answered([lane], SAVE_SECONDS)
                if lane.state == "idle":
                    yield from reply.saved()
                    continue
            yield lane.hosted, last(lane.hosted)

    def leave(self, round_: int, stopped: bool, hard: bool) -> list[Lane]:
        """Dismiss all ranks at once, when the late ones are back; return the lanes that did not come back.

        At once, since MPI's own farewell spins until everybody is there; `hard`: the ranks are to do without it.
        """
        self._reform()
        self._settled(LEAVE_SECONDS)
        asked = self._in("idle")
        for lane in asked:
            lane.dismiss(round_, stopped, hard)
        self._answered(asked, LEAVE_SECONDS)
        return [lane for lane in self.lanes if lane.state in ("active", "late")]

    def abandon(self) -> None:
        """Give up the round that is under way; lanes that are free soon will take part in what follows."""
        for lane in self._in("active"):
            lane.close(Call(Op.CLOSE, counted=lane.counted))

    def figures(self) -> Floats:
        """Return and reset, per rank, visits, seconds of computing and of waiting, bytes received and sent.

        float64 ``[5, ranks]``; seconds of waiting are left to who measures them.
        """
        found = np.zeros((5, self.size))
        for lane in self.lanes:
            ranks = list(lane.bench.ranks)
            found[:2, ranks] = lane.worked
            found[3:, 0] += lane.received, lane.sent
            found[3, ranks], found[4, ranks] = lane.sent, lane.received
            lane.worked[:] = 0
            lane.sent = lane.received = 0
        return found

    def _caught_up(self, lanes: Sequence[Lane] | None = None) -> None:
        """Give lanes that have just been closed a moment to become free: most of them do in a few milliseconds."""
        patience = Patience()
        while any(
            lane.state == "late" and lane.silent() < GRACE_SECONDS for lane in (self.lanes if lanes is None else lanes)
        ):
            self._look(patience, GRACE_SECONDS)

    def _answered(self, lanes: Sequence[Lane], limit: float = inf) -> None:
        """Wait for answers: at most `limit` seconds, or three times as long as half of the lanes took."""
        patience, start = Patience(), time.monotonic()
        while waiting := [lane for lane in lanes if lane.state == "active"]:
            seconds = time.monotonic() - start
            if limit == inf and len(waiting) <= len(lanes) / 2:
                limit = max(ANSWER_SECONDS, 3 * seconds)
            if seconds > limit:
                break
            self._look(patience)
        for lane in waiting:
            lane.give_up()

    def _settled(self, limit: float) -> None:
        """Wait at most `limit` seconds until no lane has anything under way."""
        patience, start = Patience(), time.monotonic()
        while (self._in("active") or self._in("late")) and time.monotonic() - start < limit:
            self._look(patience)

    # waiting

    def _look(self, patience: Patience, most: float = 1.0) -> None:
        """Move everything on, then pause for a moment."""
        if self._poll():
            patience.moved()
        patience.pause(most)

    def _poll(self) -> bool:
        """Move every lane on; return whether anything has happened."""
        moved = False
        for lane in self.lanes:
            before = lane.state
            moved |= lane.poll()
            if self.lost_after is not None and lane.state == "late" and lane.silent() > self.lost_after:
                lane.die(f"not heard of for {self.lost_after:g} s")
            if lane.state == "dead" and before != "dead" and not self._divisible(lane):
                self._mourn(lane)
        return moved

    def _divisible(self, lane: Lane) -> bool:
        return len(lane.bench.ranks) > 1 and lane.bench.ranks[0] in self.spare

    def _reform(self) -> None:
        """Let lanes that have lost a rank fall apart into lanes of one rank each: the dead are found there."""
        for lane in [lane for lane in self._in("dead") if self._divisible(lane)]:
            lane.control.Revoke()  # those who were not waiting for the dead one hear of it too
            lane.data.Revoke()
            for seat, rank in enumerate(lane.bench.ranks):
                self.spare[rank].expect(lane.counted[lane.bench.places(seat)])
            self.lanes.remove(lane)
            self.lanes += [self.spare[rank] for rank in lane.bench.ranks]

    def _mourn(self, lane: Lane) -> None:
        """Say which ranks and clients are lost."""
        for rank, clients in zip(lane.bench.ranks, lane.bench.hosted):
            self.lost.append(Loss(rank, clients, lane.reason))
            print(f"hpcfl: {self.lost[-1]}", file=sys.stderr, flush=True)

    def _in(self, *states: str) -> list[Lane]:
        return [lane for lane in self.lanes if lane.state in states]

    def _hosted(self, *states: str) -> Ints:
        found = [lane.hosted for lane in self._in(*states)]
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)

    def _lost_ranks(self) -> str:
        return ", ".join(f"rank {loss.rank}" for loss in self.lost) or "nobody"
