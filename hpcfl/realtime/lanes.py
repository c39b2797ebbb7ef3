"""All lanes together: moving them on while the server waits, and what becomes of those that lose a rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any

import numpy as np

from hpcfl.base.errors import Interrupted, listed
from hpcfl.base.terminal import say
from hpcfl.base.types import Ints
from hpcfl.engine.job import Job
from hpcfl.engine.profile import Phases
from hpcfl.mpi.transfers import Transfers
from hpcfl.mpi.waiting import REPEAT_SECONDS, SLACK, Patience, idle
from hpcfl.realtime.lane import BUSY, Lane
from hpcfl.realtime.orders import Command
from hpcfl.realtime.questions import QUESTIONS
from hpcfl.sums.packing import Bytes

GRACE_SECONDS = 0.05  # for lanes to become free after a closing, beyond what the bytes under way may take
ANSWER_SECONDS = 1.0  # least time for replies
LISTEN_SHARE = 0.02  # how often silence is noticed, in parts of what is allowed


@dataclass(frozen=True)
class Loss:
    """A rank that is gone, and with it its clients."""

    rank: int
    clients: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        clients = ", ".join(str(client) for client in self.clients)
        return f"rank {self.rank} is lost ({self.reason}), and with it client{'s' * (len(self.clients) > 1)} {clients}"


class Lanes:
    """The lanes of a run, and the ranks that were lost, in the order in which that was noticed.

    Parameters
    ----------
    spare : mapping of int to Lane
        A lane of its own for each rank that shares one, or is reached by way of another rank: where that is lost, a
        lane falls apart into these.
    lost_after : float
        Seconds of silence after which a lane that owes something counts as dead; None: never.
    patience : float
        Seconds of waiting after which a line says for whom.
    tells : bool
        Whether a line says who is lost; the server hears of it from leaders.
    haste : float
        By what the time for lanes to become free is divided: who waits here is waited for by others.

    Attributes
    ----------
    changes : int
        How often anything has changed on any lane.
    stirred : list of Lane
        Those on which the last look has found anything: something is complete, was begun, or has ended.
    events : list of tuple
        Who was lost, came to lead, went on elsewhere, was away or is back since this was emptied, as `Record.events`.
    """

    def __init__(
        self,
        lanes: list[Lane],
        spare: Mapping[int, Lane] | None = None,
        lost_after: float | None = None,
        patience: float = inf,
        phases: Phases | None = None,
        transfers: Transfers | None = None,
        tells: bool = True,
        haste: float = 1.0,
    ) -> None:
        self.tells, self.haste = tells, haste
        self.all, self.spare, self.lost_after, self.patience = lanes, spare or {}, lost_after, patience
        self.phases = phases or Phases()
        self.transfers, self._listened = transfers or Transfers(), 0.0
        self.lost: dict[int, Loss] = {}  # by rank
        self.changes = 0
        self.stirred: list[Lane] = []
        self.events: list[tuple[str, int, str]] = []
        self._sent, self._number = list[Any](), 0  # the tensors of the shared state that was sent last, and its number

    def those(self, *states: str) -> list[Lane]:
        """Return the lanes in these states."""
        return [lane for lane in self.all if lane.state in states]

    def hosting(self, cohort: Ints, *states: str) -> list[Lane]:
        """Return the lanes that have anybody of a cohort on ranks in these states."""
        wanted = set(cohort.tolist())
        return [lane for lane in self.all if not wanted.isdisjoint(lane.clients_in(*states).tolist())]

    def members(self, cohort: Ints, *states: str) -> Ints:
        """Return who of a cohort lives on ranks in these states, ascending."""
        hosted = [lane.clients_in(*states) for lane in self.all]
        return np.intersect1d(cohort, np.concatenate([cohort[:0], *hosted]), assume_unique=True)

    def numbered(self, tensors: list[Any]) -> int:
        """Return the number of a shared state: one more than the last one's, unless it is that, tensor by tensor."""
        same = len(tensors) == len(self._sent) and all(one is other for one, other in zip(tensors, self._sent))
        self._sent, self._number = tensors, self._number + (not same)
        return self._number

    # moving on

    def poll(self) -> bool:
        """Move on every lane where something is complete or has been begun; True if anything has happened."""
        moved, found = False, self.transfers.look()
        self.stirred = [*found]
        for lane, error in found.items():
            before = lane.state
            moved |= lane.poll()
            if error and before != "dead":
                lane.die(error)
            self._notice(lane, before)
        self._listen()
        self.changes += moved
        return moved

    def _listen(self) -> None:
        """Give up lanes that have been silent for too long; often enough, since it takes time with many lanes."""
        if self.lost_after is None or time.monotonic() < self._listened + self.lost_after * LISTEN_SHARE:
            return
        self._listened = now = time.monotonic()
        for lane in self.all:
            before = lane.state
            if before in BUSY and now - lane.heard > self.lost_after:
                lane.die(f"not heard of for {self.lost_after:g} s")
                self.stirred.append(lane)
            self._notice(lane, before)

    def _notice(self, lane: Lane, before: str) -> None:
        """Tell of a lane that is dead and was not `before`, unless it falls apart."""
        self.changes += lane.state != before
        if lane.state == "dead" and before != "dead" and not self._divisible(lane):
            self._report_lost(lane)
        for rank, reason in lane.gone:
            self._report(lane, rank, reason)
        lane.gone = []

    def reform(self) -> list[Lane]:
        """Let lanes that have lost a rank fall apart: the dead are found there; return the new lanes."""
        broken = [lane for lane in self.those("dead") if self._divisible(lane)]
        return [new for lane in broken for new in self.split(lane)]

    def split(self, lane: Lane) -> list[Lane]:
        """Let a lane fall apart into lanes of one rank each, and return these; their ranks are still to come."""
        lane.control.revoke()  # ranks that were not waiting for a dead one hear of it too
        lane.data.revoke()
        self.transfers.abandon(lane)
        new = [self.spare[rank] for rank in lane.topology.ranks]
        for local_rank, single in enumerate(new):
            single.host(lane.topology.single(local_rank))
            places = lane.topology.places(local_rank)
            single.expect(lane.counted[places])
            if lane.heard < inf:
                single.heard = time.monotonic()  # this rank has been here: it may not take its time again
        self.all.remove(lane)
        self.all += new
        return new

    def _divisible(self, lane: Lane) -> bool:
        return self.spare.get(lane.topology.ranks[0], lane) is not lane

    def lose(self, lane: Lane, reason: str) -> None:
        """Give up a lane for good, and tell of the ranks on it, unless they are lost already."""
        if self.lost.keys().isdisjoint(lane.topology.ranks):
            lane.die(reason)
            self._report_lost(lane)

    def _report_lost(self, lane: Lane) -> None:
        """Tell of the ranks that are lost with a lane: of those below a leader itself alone, where another may lead."""
        for rank in (lane.leader,) if {*lane.heirs} - self.lost.keys() else lane.topology.ranks:
            self._report(lane, rank, lane.reason)

    def _report(self, lane: Lane, rank: int, reason: str) -> None:
        if rank not in self.lost:
            self.lost[rank] = Loss(rank, lane.topology.by_rank[rank], reason)
            self.events += [("lost", client, f"on rank {rank}: {reason}") for client in self.lost[rank].clients]
            if self.tells:
                say(str(self.lost[rank]))

    # waiting

    def waiting(
        self,
        what: str,
        owing: Callable[[], Iterable[Lane]],
        rest: Callable[[], None] = idle,
        left: Callable[[], float] = lambda: inf,
        patience: float | None = None,
        closed: Sequence[Lane] = (),
    ) -> Iterator[float]:
        """Wait for `what`: yield the seconds so far, again and again, and look at all lanes in between.

        It ends when no lane is `owing`. After `patience` seconds, and every 5 minutes from then on, a line says who is.
        `rest` is called each time and may raise to end it; somebody wants to look in so many seconds as are `left`.
        What was under way on lanes that are `closed` is not slept over, and while it is flowing no core is given away:
        where cores are shared, it comes back milliseconds later.
        """
        pause, start = Patience(), time.monotonic()
        due = self.patience if patience is None else patience
        while True:
            seconds = time.monotonic() - start
            yield seconds
            if next(iter(owing()), None) is None:
                return
            if seconds >= due:
                due = seconds + REPEAT_SECONDS
                lanes = list(owing())
                ranks = sorted(rank for lane in lanes for rank in lane.topology.ranks)
                clients = sorted(int(client) for lane in lanes for client in lane.hosted)
                who = f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"
                whose = f"client{'s' * (len(clients) > 1)} {listed(clients)}"
                say(f"still waiting ({seconds:.1f} s) for {what}: {who} with {whose}")
            rest()
            with self.phases.phase("waiting"):
                sending, looked = self.transfers.outgoing, time.perf_counter()
                moved = self.poll()
                if moved or pause.has_moved(time.perf_counter() - looked):
                    self.phases.was("broadcast" if sending else "reduction")
                if moved:
                    pause.moved()
                if not any(lane.visits.flowing for lane in closed):
                    pause.pause(left(), self.transfers.outgoing + sum(lane.visits.coming for lane in closed))

    def wait_for_frames(self, lanes: Sequence[Lane], by_name: bool = False) -> None:
        """Wait for what was under way on lanes that have just been closed, for as long as that may take.

        So long a leader also has to say that it knows of the closing: its word may come after the sums. Where it is
        known `by_name` whose visits have come, no deadline presses, and it takes long before some are lost.
        """
        grace = (ANSWER_SECONDS if by_name else GRACE_SECONDS) / self.haste

        def owing() -> list[Lane]:
            return [lane for lane in lanes if (lane.visits.coming or lane.hangs) and lane.late_for() < grace]

        for _ in self.waiting("what was under way", owing, closed=lanes):
            pass

    def wait_for_late(self) -> None:
        """Give lanes that are late the time to become free: most of them do in a few milliseconds.

        Where most links are faster, one that is slow holds up nobody.
        """
        late = [lane for lane in self.all if lane.late_for() < GRACE_SECONDS]
        if not late:
            return
        rate = median(lane.bandwidth.rate for lane in self.all)
        most = GRACE_SECONDS + SLACK * max(lane.round_bytes for lane in self.all) / rate
        what = "lanes to be free"
        for seconds in self.waiting(what, lambda: [one for one in late if one.late_for() < GRACE_SECONDS]):
            if seconds > most:
                break

    def wait_for_all(self, limit: float, what: str = "ranks to be free", rest: Callable[[], None] = idle) -> None:
        """Wait at most `limit` seconds until no lane has anything under way; `rest` may raise to end it."""
        for seconds in self.waiting(what, lambda: [lane for lane in self.all if lane.busy], rest):
            if seconds >= limit:
                return

    def ask(
        self,
        job: Job,
        lanes: Sequence[Lane],
        command: Command,
        state: Sequence[Bytes] = (),
        what: str = "answers",
        rest: Callable[[], None] = idle,
        most: float = inf,
    ) -> dict[Lane, Any]:
        """Ask lanes, as far as they can be asked, and return what they have replied in time.

        They have as long as the question allows; where it does not say, three times as long as half of them took, and
        at most `most` seconds. Where `rest` raises Interrupted, who has had `ANSWER_SECONDS` is waited for no longer.
        """
        question = QUESTIONS[command.op]()
        replies = {lane: question.reply(job, lane.topology, lane.leads) for lane in lanes}
        asked = [lane for lane, reply in replies.items() if lane.ask(command, question, reply, state)]
        allowed = [lane.bandwidth.allows(replies[lane].nbytes) + question.seconds(job, lane.topology) for lane in asked]
        limit = max(allowed, default=0.0)
        for lane in asked if question.lasts else ():
            lane.heard = time.monotonic() + limit

        def owing() -> list[Lane]:
            return [lane for lane in asked if lane.owes_reply]

        with suppress(Interrupted):
            for seconds in self.waiting(what, owing):
                if limit == inf and len(owing()) <= len(asked) / 2:
                    limit = max(ANSWER_SECONDS, 3 * seconds)
                if seconds > min(limit, most):
                    break
                if seconds > ANSWER_SECONDS:
                    rest()
        for lane in owing():
            lane.give_up()
        return {lane: replies[lane] for lane in asked if lane.has_replied}
