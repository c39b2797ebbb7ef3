"""The server's side of rounds in real time: it asks the lanes, and closes the round when its rule says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from hpcfl.base.errors import Interrupted, RunError
from hpcfl.base.memory import freeze
from hpcfl.base.types import Floats, Ints, State
from hpcfl.comm.packing import Bytes, Packing
from hpcfl.comm.transport import Arrays, Saved, idle
from hpcfl.engine.wall.lane import Lane
from hpcfl.engine.wall.lanes import Fleet
from hpcfl.engine.wall.outcome import Tally
from hpcfl.engine.wall.protocol import Call, Op
from hpcfl.engine.wall.replies import Saving, Scoring, alone
from hpcfl.engine.wall.sums import Held
from hpcfl.engine.wall.watchdog import LEAVE_SECONDS
from hpcfl.schedule.plan import Attempt, Plan

if TYPE_CHECKING:
    from hpcfl.engine.job import Job

SAVE_SECONDS = 5.0  # for personal state to begin to come, beyond what its bytes may take


class Server:
    """All lanes, seen from the server.

    Parameters
    ----------
    fleet : Fleet
    rest : callable
        Called while the server waits; it raises Interrupted where the run is to stop.

    Attributes
    ----------
    missed : list of int
        The clients of whom `personal` had to repeat what was saved before.
    """

    def __init__(self, job: Job, fleet: Fleet, rest: Callable[[], None] = idle) -> None:
        self.job, self.fleet, self.rest = job, fleet, rest
        self.missed: list[int] = []
        self.lasted, self.scoring = 0.0, inf  # how long the last round took, and tests may take at most
        self.planner = job.planner
        self.packing = Packing(job.algorithm.init_server(job.task))
        self.limits: Floats | None = None
        self.size = 1 + sum(len(lane.bench.ranks) for lane in fleet.lanes)

    def gather(self) -> None:
        """Wait until every rank is there: they start at different speeds, and the first round is for all.

        Raises
        ------
        Interrupted
            If the run is to stop before.
        """
        for lane in self.fleet.lanes:
            lane.expect(lane.counted)
        self.fleet.settled(inf, "ranks to start", self.rest)
        freeze()

    # rounds

    def exchange(self, round_: int, shared: State, stage: int = 0, limits: Floats | None = None) -> tuple[Plan, Held]:
        """Run one round: invite, wait until the rule says that it is over, return what happened and the sums.

        A round in which fewer than ``min_clients`` visits counted is void, and repeated; `limits` as `RunGuard.limits`.
        """
        began, repeats, self.limits = time.monotonic(), 0, limits
        while True:
            tally = self._attempt(round_, repeats, shared, stage)
            self.planner.saw(tally.seconds, tally.attempt.closes_after)
            if tally.count >= self.planner.participation.min_clients:
                break
            tally.void()
            repeats += 1
        plan = tally.plan(time.monotonic() - began, repeats)
        return plan, tally.sums(plan)

    def _attempt(self, round_: int, number: int, shared: State, stage: int) -> Tally:
        attempt = self._invited(round_, number, stage)
        state = self._state(shared)
        invited = self._hosting(attempt.cohort, "idle")
        start = time.monotonic()
        for lane in invited:
            lane.invite(self._call(Op.VISIT, lane, attempt, stage), state)
        tally = Tally(self.job, attempt, invited, start, self.limits)
        self._until_over(tally)
        self.fleet.poll()
        closed = time.monotonic()
        self._close(attempt, stage)
        tally.finish(closed)
        return tally

    def _invited(self, round_: int, number: int, stage: int) -> Attempt:
        """Return an attempt with those who are drawn and free; wait until there are enough of them."""
        drawn = self.planner.attempt(round_, number, stage)
        need = max(1, self.planner.participation.min_clients)
        self.fleet.caught_up()
        what = f"{need} free client{'s' * (need > 1)} for round {round_}"
        for _ in self.fleet.looks(what, lambda: self._hosting(drawn.cohort, "active", "late"), self.rest):
            self.fleet.reform()
            free = np.intersect1d(drawn.cohort, self.fleet.hosted("idle"), assume_unique=True)
            if len(free) >= need:
                break
            left = np.intersect1d(drawn.cohort, self.fleet.hosted("idle", "active", "late"), assume_unique=True)
            if len(left) < need:
                ranks = ", ".join(str(loss.rank) for loss in self.fleet.lost)
                raise RunError(
                    f"round {round_}: expected at least {need} of the {len(drawn.cohort)} clients invited, "
                    f"but only {len(left)} are left; lost ranks: {ranks}"
                )
        return self.planner.attempt(round_, number, stage, free)

    def _hosting(self, cohort: Ints, *states: str) -> list[Lane]:
        """Return the lanes in these states that host anybody of a cohort."""
        wanted = set(cohort.tolist())
        return [lane for lane in self.fleet.those(*states) if not wanted.isdisjoint(lane.hosted.tolist())]

    def _until_over(self, tally: Tally) -> None:
        """Wait until the round's rule says that it is over.

        Where no timer ends it, a round that lasts much longer than the one before is spoken of.
        """
        ends = tally.attempt.closes_after - (time.monotonic() - tally.start)
        patience = max(self.fleet.patience, 3 * self.lasted) if ends == inf else inf

        def owing() -> list[Lane]:
            return [lane for lane in tally.lanes if lane.state == "active"]

        for _ in self.fleet.looks(f"visits of round {tally.attempt.round}", owing, self.rest, ends, patience):
            seconds = time.monotonic() - tally.start
            if tally.attempt.over(*tally.progress(), seconds):
                break
            for lane in tally.lanes:
                if lane.turns:
                    tally.turn(lane)
        self.lasted = seconds

    def _close(self, attempt: Attempt, stage: int) -> None:
        """Tell the lanes that are not complete; those of several ranks get the time to hand in what they have."""
        unfinished = self.fleet.those("active")
        for lane in unfinished:
            lane.close(self._call(Op.CLOSE, lane, attempt, stage))
        self.fleet.handed_in([lane for lane in unfinished if len(lane.bench.ranks) > 1])

    def _call(self, op: Op, lane: Lane, attempt: Attempt, stage: int) -> Call:
        head = op, attempt.round, attempt.number, attempt.closes_after, stage
        return Call(*head, counted=lane.counted, cohort=attempt.cohort)

    def _state(self, shared: State) -> list[Bytes]:
        """Return the shared state as it is sent: the tensors' own memory, so they are never changed in place."""
        return self.packing.sent(shared)

    # everything else that is asked of the lanes

    def scores(self, round_: int, shared: State) -> Floats:
        """Return every client's scores, ``[scores, clients]``, see `Job.scores`; NaN: no answer."""
        self.fleet.caught_up()
        found = np.full((self.job.scores, self.job.config.clients), np.nan)
        state, asked = self._state(shared), self.fleet.those("idle")
        replies = {}
        for lane in asked:
            replies[lane] = Scoring(self.job.scores, len(lane.hosted))
            lane.ask(Call(Op.SCORE, round_, counted=lane.counted), state, replies[lane].receive)
        start = time.monotonic()
        self.fleet.answered(asked, what="scores", rest=self.rest, most=self.scoring)
        if asked and all(lane.state == "idle" for lane in asked):
            self.scoring = max(self.fleet.patience, 3 * (time.monotonic() - start))
        for lane in asked:
            if lane.state == "idle":
                found[:, lane.hosted] = replies[lane].data
        return found

    def personal(self, last: Callable[[Ints], dict[int, Arrays]]) -> Iterator[Saved]:
        """Yield the acknowledged personal state lane by lane; of a lane that does not answer, what `last` knows."""
        self.fleet.caught_up()
        self.missed = []
        for lane in self.fleet.lanes:
            reply = Saving(lane.bench, self.job.like)
            if lane.state == "idle":
                lane.ask(Call(Op.SAVE, counted=lane.counted), [], reply.receive)
                limit = SAVE_SECONDS + self.fleet.bandwidth.allows(sum(reply.counts))
                self.fleet.answered([lane], limit, "personal state")
                if lane.state == "idle":
                    yield from reply.saved()
                    continue
            self.missed += lane.hosted.tolist()
            for client, state in last(lane.hosted).items():
                yield alone(client, state)

    def release(self, last: Callable[[Ints], dict[int, Arrays]]) -> tuple[list[Saved], int]:
        """Fetch the personal state for good; let the ranks that are free forget all and sleep until they leave.

        Returns
        -------
        kept : list of Saved
            As `personal` yields it.
        ranks : int
            How many were free.
        """
        self.fleet.settled(SAVE_SECONDS, "ranks to be released")
        kept = list(self.personal(last)) if self.job.personal_bytes else []
        asked = self.fleet.those("idle")
        for lane in asked:
            lane.ask(Call(Op.RELEASE, counted=lane.counted), [], lambda data: data.Ibarrier())
        self.fleet.answered(asked, SAVE_SECONDS, "ranks to be released")
        return kept, sum(len(lane.bench.ranks) for lane in asked)

    def leave(self, round_: int, stopped: int, bereft: bool) -> tuple[list[Lane], bool]:
        """Dismiss all ranks at once, when the late ones are back: MPI's own farewell spins until everybody is there.

        A wish to stop that comes meanwhile ends the waiting.

        Parameters
        ----------
        stopped : int
            The exit code of a run that did not come to its end, else 0.
        bereft : bool
            Whether MPI cannot take its farewell without the dead.

        Returns
        -------
        missing : list of Lane
            Those that did not come back.
        hard : bool
            Whether all ranks are to end without MPI's farewell.
        """
        self.fleet.reform()
        rest = self._rest_anew()
        with suppress(Interrupted):
            self.fleet.settled(LEAVE_SECONDS, "ranks to come back and leave", rest)
        hard, asked = bereft and bool(self.fleet.lost), self.fleet.those("idle")
        for lane in asked:
            lane.dismiss(round_, stopped, hard)
        self.fleet.answered(asked, LEAVE_SECONDS, "ranks to leave", rest)
        return self.fleet.those("active", "late"), hard

    def _rest_anew(self) -> Callable[[], None]:
        """Return what to call while ranks leave: a wish that was there before has been obeyed, or came too late."""
        try:
            self.rest()
        except Interrupted:
            return idle
        return self.rest

    def abandon(self) -> None:
        """Give up the round that is under way; lanes that are free soon will take part in what follows."""
        for lane in self.fleet.those("active"):
            lane.close(Call(Op.CLOSE, counted=lane.counted))

    def figures(self) -> Floats:
        """Return and reset, per rank, visits, seconds of computing and of waiting, bytes received and sent.

        float64 ``[5, ranks]``; seconds of waiting are left to who measures them.
        """
        found = np.zeros((5, self.size))
        for lane in self.fleet.lanes:
            ranks = list(lane.bench.ranks)
            found[:2, ranks] = lane.worked
            found[3:, 0] += lane.received, lane.sent
            found[3, ranks], found[4, ranks] = lane.sent, lane.received
            lane.worked[:] = 0
            lane.sent = lane.received = 0
        return found
