"""The server's side of rounds in real time: it asks the lanes, and closes the round when its rule says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from hpcfl import store
from hpcfl.base.errors import Interrupted, RunError
from hpcfl.base.memory import freeze
from hpcfl.base.terminal import say
from hpcfl.base.types import Floats, Ints, State
from hpcfl.engine.iterated import iterate
from hpcfl.engine.job import Job, Progress
from hpcfl.engine.received import ReceivedSums
from hpcfl.engine.record import Record, released
from hpcfl.engine.rounds import Rounds
from hpcfl.engine.watchdog import LEAVE_SECONDS
from hpcfl.learning import batchnorm
from hpcfl.mpi.channel import Connected
from hpcfl.mpi.placement import check_there
from hpcfl.mpi.transport import Saved, arrays, as_chunk
from hpcfl.mpi.waiting import idle
from hpcfl.realtime.lane import BUSY, Lane
from hpcfl.realtime.lanes import Lanes
from hpcfl.realtime.membership import Absences, Orphans
from hpcfl.realtime.orders import Command, Op
from hpcfl.realtime.outcome import RoundOutcome, names_who_counts
from hpcfl.realtime.questions import SAVE_SECONDS
from hpcfl.realtime.succession import Succession
from hpcfl.schedule.plan import Attempt, Plan
from hpcfl.schedule.planner import MOST_ATTEMPTS
from hpcfl.sums.message import Sums
from hpcfl.sums.packing import Bytes, Packing


class Server(Rounds):
    """The rounds of a run over lanes, on rank 0.

    Where clients are needed no more, their ranks forget what they hold and sleep until the end, and the server keeps
    the personal state for checkpoints. Nobody tests the clients' models then: their scores are not known. `rest` is
    called while the server waits; it raises Interrupted where the run is to stop.
    """

    serves = True
    connected: Connected
    succession: Succession | None = None
    at_work: Container[Lane] = ()  # lanes from which something is still to be taken though they are idle
    apart = False  # whether each rank writes its own clients' personal state: all see the same run folder

    def __init__(self, job: Job, lanes: Lanes, rest: Callable[[], None] = idle) -> None:
        self.job, self.lanes, self.rest, self.phases = job, lanes, rest, lanes.phases
        self.wrote: dict[int, int] = {}  # clients whose personal state is in the checkpoint that is begun; their ranks
        self.began = time.monotonic()  # when the run would have begun, had nothing of it been without this process
        self.lasted, self.scoring = 0.0, inf  # how long the last round took, and tests may take at most
        self.packing = Packing(job.algorithm.init_server(job.task))
        self.size = 1 + sum(len(lane.topology.ranks) for lane in lanes.all)
        self.orphans = Orphans(job, lanes)
        self.absences = Absences(lanes)
        self.saved: Path | None = None  # the checkpoint whose personal state clients of lost ranks go on with
        self.kept: list[Saved] | None = None

    def gather(self, absent: Mapping[int, str]) -> None:
        """Wait until every rank is there, unless the run is to stop: they start at different speeds.

        Those that are `absent`, for the reason that is given, are lost; where the config says how long to wait, also
        those that are not there by then, and others lead in the place of those who should.
        """
        for lane in self.lanes.all:
            if missing := absent.keys() & lane.topology.ranks:  # some of it, where it cannot fall apart
                self.lanes.lose(lane, absent[min(missing)])
            else:
                lane.expect(lane.counted)
        config, what = self.job.config, "ranks to start"
        limit = config.start_within or inf
        self.lanes.wait_for_all(limit, what, self.rest)
        if limit < inf:
            why = f"not there within {limit:g} s"
            if self.succession is not None:
                self.succession.replace_late(self.lanes)
                self.lanes.wait_for_all(limit, what, self.rest)
                self.succession.leave_out_late(self.lanes, why)
            else:
                for lane in self.lanes.those("late"):
                    lane.die(why)
                self.lanes.reform()
            self.lanes.wait_for_all(limit, what, self.rest)
            for lane in self.lanes.those("late", "dead"):
                self.lanes.lose(lane, lane.reason or why)
            check_there(config.min_ranks, self.size, [*self.lanes.lost], limit)
        freeze()

    # rounds

    def exchange(self, now: Progress, record: Record) -> tuple[Plan, Sums]:
        """Run the next round until its rule closes it; an iterated reduction is done by the server alone."""
        self.saved, self.began = now.saved, time.monotonic() - now.clock["sim_seconds"]
        if not self.job.algorithm.invites(now.round):
            plan = Plan.nobody(now.round, len(self.job.layers.tensors))
            sums = ReceivedSums(self.job.layout, 0, plan.miss_probability, [])
        else:
            with record.timed("wait_seconds"):
                try:
                    limits = self.job.guard.limits(now.norms)
                    plan, sums = self.run_round(now.round, now.shared, now.stage.number, limits)
                except Interrupted:  # lanes that are free soon will take part in what follows
                    self.halt()
                    raise
        record.gradients, record.rejected, record.norms = sums.gradients, sums.rejected, sums.norms
        sums.phases = self.phases
        if self.job.iterated is not None:
            with record.timed("server_seconds"):
                messages = sums.messages(self.job.keeps)
                sums.iterated = iterate(self.job.iterated, now.shared, messages, lambda responses: responses)
        return plan, sums

    def run_round(
        self, round: int, shared: State, stage: int = 0, limits: Floats | None = None
    ) -> tuple[Plan, ReceivedSums]:
        """Run one round: invite, wait until the rule says that it is over, return what happened and the sums.

        A round in which fewer than ``min_clients`` visits counted is void, and repeated; `limits` as `RunGuard.limits`.
        Raises RunError after as many void attempts as in simulated time.
        """
        began, repeats = time.monotonic(), 0
        while True:
            outcome = self._attempt(round, repeats, shared, stage, limits)
            self.job.planner.saw(outcome.seconds, outcome.attempt.closing(outcome.seconds))
            if outcome.enough:
                break
            repeats += 1
            what = self.job.planner.void(repeats, outcome.count)
            outcome.void()
            if repeats == MOST_ATTEMPTS:
                raise RunError(f"round {round}: given up after {what}")
            if repeats in (MOST_ATTEMPTS // 100, MOST_ATTEMPTS // 10):
                say(f"round {round}: {what}")
        plan = outcome.plan(time.monotonic() - began, repeats)
        return plan, outcome.sums(plan)

    def halt(self) -> None:
        """Stop all visits: this round comes to no end, or no more rounds are to come."""
        for lane in self.lanes.those("visiting"):
            lane.close(Command(Op.CLOSE))

    def _attempt(self, round: int, number: int, shared: State, stage: int, limits: Floats | None) -> RoundOutcome:
        attempt = self._invited(round, number, stage)
        self.absences.look(round)
        serial, state = self._served(shared)
        invited = self.lanes.hosting(attempt.cohort, "idle")
        start = time.monotonic()
        with self.phases.phase("broadcast"):
            for lane in invited:
                lane.by_name = names_who_counts(attempt, self.job.planner.whole)
                lane.invite(self._command(Op.VISIT, attempt, stage, state=serial), state)
        outcome = RoundOutcome(self.job, attempt, invited, start, limits)
        self._wait_for_visits(outcome)
        self.lanes.poll()
        closed = time.monotonic()
        unfinished, counting = self.lanes.those("visiting"), outcome.counting()
        for lane in unfinished:
            lane.close(self._command(Op.CLOSE, attempt, stage, counting if lane.leads else None))
        several = [lane for lane in unfinished if lane.leads or len(lane.topology.ranks) > 1]
        self.lanes.wait_for_frames(several, any(lane.leads and lane.by_name for lane in several))
        outcome.finish(closed)
        if outcome.enough:
            outcome.acknowledge()
        if self.succession is not None:
            self.succession.round_over(self.lanes)
        return outcome

    def _invited(self, round: int, number: int, stage: int) -> Attempt:
        """Return an attempt with those who are drawn and free; wait until there are enough of them."""
        drawn = self._drawn(round, number, stage)
        need = max(1, self.job.planner.participation.min_clients)
        self.lanes.wait_for_late()
        what = f"{need} free client{'s' * (need > 1)} for round {round}"

        def owing() -> list[Lane]:
            return self.lanes.hosting(np.union1d(drawn.cohort, self.orphans.hosted), *BUSY)

        for _ in self.lanes.waiting(what, owing, self.rest):
            self._rehost()
            free = self.lanes.members(drawn.cohort, "idle")
            if len(free) >= need:
                break
            left = self.lanes.members(drawn.cohort, "idle", *BUSY)
            left = np.union1d(left, np.intersect1d(drawn.cohort, self.orphans.hopeful))
            if len(left) < need:
                ranks = ", ".join(map(str, self.lanes.lost))
                raise RunError(
                    f"round {round}: expected at least {need} of the {len(drawn.cohort)} clients invited, "
                    f"but only {len(left)} are left; lost ranks: {ranks}"
                )
        return self.job.planner.attempt(round, number, stage, free)

    def _drawn(self, round: int, number: int, stage: int) -> Attempt:
        """Return an attempt with those who are drawn, of who is there; wait until somebody is."""
        planner = self.job.planner
        if planner.presence is None:
            return planner.attempt(round, number, stage)
        comes = planner.somebody(round, time.monotonic() - self.began)

        def left() -> float:
            return self.began + comes - time.monotonic()

        def owing() -> list[Lane]:
            return self.lanes.all if left() > 0 else []

        for _ in self.lanes.waiting(f"a client to come for round {round}", owing, self.rest, left, inf):
            pass
        return planner.attempt(round, number, stage, now=comes)

    def _rehost(self) -> None:
        """Let lanes that have lost a rank fall apart, and clients of lost ranks go on at others where they may."""
        if self.succession is not None:
            self.succession.look(self.lanes)
        busy = self.lanes.reform()
        if self.job.config.lost_clients == "drop":
            return

        def owing() -> list[Lane]:
            return [lane for lane in busy if lane.state in BUSY]

        for seconds in self.lanes.waiting("clients to go on at other ranks", owing):
            if self.orphans.waiting or self.lanes.those("dead"):
                self.settle()
            busy += self.lanes.reform() + self.orphans.place(self.at_work, self.saved)
            if seconds > SAVE_SECONDS:
                break
        for lane in busy:
            lane.give_up()

    def _served(self, shared: State) -> tuple[int, list[Bytes]]:
        """Return the number of a shared state, one more for each new one, and what is sent of it.

        That is the tensors' own memory: they are never changed in place.
        """
        return self.lanes.numbered([*shared.values()]), self.packing.sent(shared)

    def _command(self, op: Op, attempt: Attempt, stage: int, cohort: Ints | None = None, state: int = 0) -> Command:
        head = op, attempt.round, attempt.number, attempt.closes_after, stage
        return Command(*head, state=state, cohort=attempt.cohort if cohort is None else cohort)

    def _wait_for_visits(self, outcome: RoundOutcome) -> None:
        """Wait until the round's rule says that it is over.

        Where no timer ends it, a round that lasts much longer than the one before is spoken of. All lanes are asked
        how far they are after something has changed alone: most looks find nothing.
        """
        patience = max(self.lanes.patience, 3 * self.lasted) if outcome.ends == inf else inf

        def owing() -> Iterator[Lane]:
            return (lane for lane in outcome.lanes if lane.state == "visiting")

        def left() -> float:
            return outcome.ends - (time.monotonic() - outcome.start)

        seen = -1
        for _ in self.lanes.waiting(f"visits of round {outcome.attempt.round}", owing, self.rest, left, patience):
            seconds = time.monotonic() - outcome.start
            if seen == self.lanes.changes and seconds < outcome.ends:
                continue
            seen = self.lanes.changes
            if outcome.over(seconds):
                break
            with self.phases.phase("reduction"):
                for lane in outcome.lanes:
                    if lane.visits.has_next:
                        outcome.sum_up(lane)
        self.lasted = seconds

    # everything else that is asked of the lanes

    def scores(self, now: Progress) -> Floats:
        """Ask the ranks that are free; the others' scores are NaN."""
        if self.job.task.gathers:
            found = self.job.statistics(now.shared, np.arange(self.job.config.clients))
            now.shared = batchnorm.with_statistics(self.job.task, now.shared, found)
        scores = np.full((self.job.scores, self.job.config.clients), np.nan)
        if self.kept is not None:
            return scores
        self.lanes.wait_for_late()
        (serial, state), asked, start = self._served(now.shared), self.lanes.those("idle"), time.monotonic()
        command = Command(Op.SCORE, now.round, state=serial)
        told = self.lanes.ask(self.job, asked, command, state, "scores", self.rest, self.scoring)
        if asked and len(told) == len(asked):
            self.scoring = max(self.lanes.patience, 3 * (time.monotonic() - start))
        for lane, reply in told.items():
            scores[:, lane.hosted] = reply.data
        return scores

    def personal(self, now: Progress) -> Iterator[Saved]:
        """Have the ranks write the acknowledged state, or ask lane by lane for it where they do not see the run folder.

        Of a client of whom nothing comes, repeat what was saved last, or its state before the first visit.
        """
        self.wrote = {}
        if self.kept is not None:
            yield from self.kept
            return
        self.settle()
        self.lanes.wait_for_late()
        command, what = Command(Op.WRITE, now.round), "personal state"
        for lane, reply in self.lanes.ask(self.job, self.lanes.all, command, what=what).items() if self.apart else ():
            self.wrote |= {client: rank for rank in reply.did for client in lane.topology.by_rank[rank]}
        missed: list[int] = []
        for lane in self.lanes.all:
            left = [client for client in lane.hosted.tolist() if client not in self.wrote]
            if left and not self.apart:
                for reply in self.lanes.ask(self.job, [lane], Command(Op.SAVE), what=what).values():
                    yield from reply.saved()
                    left = reply.lacking()
            missed += left
        missed += self.orphans.clients.tolist()
        known = store.load_personal(now.saved, missed, check=True) if now.saved and missed else {}
        for client in missed:
            yield as_chunk(client, known.get(client) or arrays(self.job.algorithm.init_client(self.job.task, client)))
        self.stale = store.personal_rounds(now.saved, missed) if now.saved else dict.fromkeys(missed, 0)

    @property
    def homes(self) -> Ints:
        homes = super().homes
        homes[[*self.wrote]] = [*self.wrote.values()]
        return homes

    def release(self, now: Progress, record: Record) -> bool:
        """Fetch the personal state for good; let the ranks that are free forget all and sleep until they leave.

        Who is late then goes on, and is not asked again.
        """
        if self.kept is not None or not self.job.algorithm.clients_done(now.round):
            return False
        self.lanes.wait_for_all(SAVE_SECONDS, "ranks to be released")
        self.kept = list(self.personal(now)) if self.job.personal_bytes else []
        asked = self.lanes.those("idle")
        self.lanes.ask(self.job, asked, Command(Op.RELEASE), what="ranks to be released")
        record.events.append(released(sum(len(lane.topology.ranks) for lane in asked)))
        return False

    def profiles(self) -> dict[int, Floats]:
        """Ask where the ranks' time went, see `Phases.figures`: who does not reply in time is left out."""
        self.halt()
        self.lanes.reform()
        what = "ranks to tell where their time went"
        self.lanes.wait_for_all(SAVE_SECONDS, what)
        own = self.phases.figures()
        told = self.lanes.ask(self.job, self.lanes.all, Command(Op.PROFILE), what=what)
        rows = [row for lane, reply in told.items() for row in zip(lane.topology.ranks, reply.data.T)]
        return {0: own} | {rank: row for rank, row in rows if not np.isnan(row).any()}

    def leave(self, round: int, stopped: int, without_dead: bool) -> tuple[list[int], bool]:
        """Dismiss all ranks at once, when the late ones are back: MPI's own farewell spins until everybody is there.

        A wish to stop that comes meanwhile ends the waiting. Return the ranks that did not come back, and whether all
        ranks are to end without that farewell: where MPI cannot take it `without_dead` ranks, and there are any.
        """
        self.halt()
        self.lanes.reform()
        rest = self.rest
        try:
            rest()
        except Interrupted:  # a wish that was there before has been obeyed, or came too late
            rest = idle
        with suppress(Interrupted):
            self.lanes.wait_for_all(LEAVE_SECONDS, "ranks to come back and leave", rest)
        hard = bool(self.lanes.lost) and not without_dead
        command, found, asked = Command(Op.LEAVE, round, stopped=stopped, hard=hard), dict[Lane, Any](), set[Lane]()
        for _ in range(2):  # who was led by one that has died meanwhile has to hear of the end
            if self.succession is not None:
                self.succession.look(self.lanes)
                with suppress(Interrupted):
                    self.lanes.wait_for_all(SAVE_SECONDS, "ranks to lead and leave", rest)
            left = [lane for lane in self.lanes.all if lane not in asked]
            asked.update(left)
            found |= self.lanes.ask(self.job, left, command, what="ranks to leave", rest=rest)
        there = {rank for lane in self.lanes.all if lane.state != "dead" for rank in lane.topology.ranks}
        came = {rank for reply in found.values() for rank in reply.did}
        return sorted(there - came - self.lanes.lost.keys()), hard

    def together(self, record: Record, reason: str) -> str:
        """Take the ranks' figures from what they have sent, and tell who is lost."""
        record.by_rank = self.figures()
        record.by_rank[2, 0] = record.seconds.get("wait_seconds", 0.0)  # none where nobody was invited
        record.events += self.lanes.events
        self.lanes.events = []
        return reason

    def figures(self) -> Floats:
        """Return and reset, per rank, visits, seconds of computing and waiting (0), bytes received and sent."""
        figures = np.zeros((5, self.size))
        for lane in self.lanes.all:
            ranks = list(lane.topology.ranks)
            figures[:2, ranks] = lane.worked
            figures[3:, 0] += lane.received, lane.sent
            figures[3:, ranks] = lane.traffic()
            lane.worked[:] = 0
            lane.sent = lane.received = 0
        return figures
