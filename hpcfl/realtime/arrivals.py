"""Rounds that arrivals end, in real time: nobody is waited for, and the server steps with every K visits.

Each lane is one client rank, at work for one of its clients at a time. Visits go on over the server's steps, and over
evaluations and checkpoints. Who is asked for scores are the clients of lanes that have just reported: those of the
others are not known. Personal state comes from all, also in the middle of a visit: it is what their visits began with.

Where a rule says how many steps each client takes, and whose visits are merged when, what has come is kept until its
merge, also over the server's steps; its client waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from hpcfl.base.errors import Interrupted, RunError
from hpcfl.base.rng import keyed
from hpcfl.base.types import Ints
from hpcfl.engine.executor import acknowledgment
from hpcfl.engine.iterated import iterate
from hpcfl.engine.job import Job, Progress
from hpcfl.engine.received import Received, add_all, messages
from hpcfl.engine.record import Record
from hpcfl.mpi.waiting import idle
from hpcfl.realtime.lane import BUSY, Lane
from hpcfl.realtime.lanes import Lanes
from hpcfl.realtime.orders import Command, Op
from hpcfl.realtime.questions import SAVE_SECONDS
from hpcfl.realtime.server import Server
from hpcfl.schedule.plan import Fate, Plan
from hpcfl.schedule.planner import Came, check_fruitless, counts, over, planned
from hpcfl.sums.guard import NO_GROUP, NOT_FINITE, Rejection
from hpcfl.sums.message import ExactSums, Message, Sums


@dataclass(frozen=True)
class Flight:
    """The visit that a lane is at: when it was sent out, and when it ends at the latest, by the monotonic clock.

    It is of this version of the shared state, and its client's visit of this number.
    """

    client: int
    version: int
    number: int
    sent: float
    ends: float


@dataclass
class Step:
    """What has come since the server's last step; it is over when it is full, or at a second of the monotonic clock.

    Where clients count alike, however often each has reported, visits are `held` until it is known how often. What came
    `late` does not count, and its clients go on from there. For further sums messages are `kept`.
    """

    sums: ExactSums
    ends: float
    began: float
    came: list[Came] = field(default_factory=list)
    late: list[Came] = field(default_factory=list)
    held: list[Received] = field(default_factory=list)
    kept: list[Message] = field(default_factory=list)
    rejected: dict[int, Rejection] = field(default_factory=dict)  # by their places in `came`
    ended: dict[int, Fate] = field(default_factory=dict)  # what became of other visits, by client
    fruitless: int = 0
    full: bool = False
    over: float | None = None  # when it was, in seconds since the start of the run; None: with what came last


class ArrivalsServer(Server):
    """The server of rounds that arrivals end, see `Server`.

    Attributes
    ----------
    at_work : dict of Lane to Flight
        Visits under way, and those that have arrived since the last step was over.
    owed : list of int
        Clients that were at work when the run was stopped: they are sent out again with the state that they had.
    """

    def __init__(self, job: Job, lanes: Lanes, rest: Callable[[], None] = idle) -> None:
        super().__init__(job, lanes, rest)
        self.rules = job.config.participation
        self.lane = self._hosts()
        self.at_work: dict[Lane, Flight] = {}
        self.serials: dict[int, int] = {}  # of the shared states of versions
        self.owed: list[int] | None = None
        self.origin = 0.0  # second of the monotonic clock at which the run would have begun, had it never been stopped

    def gather(self, absent: Mapping[int, str]) -> None:
        super().gather(absent)
        self.lane = self._hosts()

    def _hosts(self) -> dict[int, Lane]:
        return {client: lane for lane in self.lanes.all for client in lane.hosted.tolist()}

    def exchange(self, now: Progress, record: Record) -> tuple[Plan, Sums]:
        if self.owed is None:
            self.owed, self.origin = now.flights.waiting.tolist(), time.monotonic() - now.flights.now
        self.saved = now.saved
        flights, start, began = now.flights, now.flights.now, time.monotonic()
        lasts = self.rules.closes_after(now.round, ())
        now.served[now.round] = now.shared
        self.serials[now.round], _ = self._served(now.shared)
        self.absences.look(now.round)
        due = self.origin + start + lasts  # what the server's step took is a part of the round, as in simulated time
        step = Step(ExactSums(self.job.layout), due if due > began else began + lasts, self.origin + start)
        before = deepcopy(flights)
        with record.timed("wait_seconds"):
            self._stop_stale(step, now)
            try:
                self._fill(step, now, record)
            except Interrupted:  # that ends the step with what has arrived, since it is acknowledged
                if not step.came and not step.late:  # no row will tell of what has ended since: it begins anew
                    vars(flights).update(vars(before))
                    raise
        last = step.over or (step.came[-1][3] if step.came else start)
        flights.now = last if step.full or time.monotonic() < step.ends else step.ends - self.origin
        ended = step.came + step.late
        plan = planned(self.job.planner, now.round, ended, flights, start, lasts, step.ended)
        whose, times = zip(*(visit[:4:3] for visit in ended)) if ended else ((), ())
        places = np.argsort(np.lexsort((times, whose))).tolist()  # of each in the cohort
        plan = self.job.planner.divided(plan) if step.held else plan
        factors = plan.arrivals.factors.tolist() if plan.arrivals else ()
        for one, place in zip(step.held, places):
            add_all(one, step.sums, factors=dict.fromkeys(self.job.changes, factors[place]))
            step.kept += messages(one, len(one.formats), self.job.keeps) if self.job.keeps else []
        record.rejected = {places[number]: rejection for number, rejection in step.rejected.items()}
        step.sums.cohort, step.sums.miss_probability = plan.invited, plan.miss_probability
        step.sums.arrived = now.arrived(plan)
        if self.job.iterated is not None:
            with record.timed("server_seconds"):
                step.sums.iterated = iterate(self.job.iterated, now.shared, step.kept, lambda responses: responses)
        now.served = {version: now.served[version] for version in set(flights.version[flights.waiting].tolist())}
        if now.round + 1 == self.job.config.rounds:
            self.halt()
            self.lanes.wait_for_all(SAVE_SECONDS, "ranks to stop their visits")
        return plan, step.sums

    def _fill(self, step: Step, now: Progress, record: Record) -> None:
        """Take what arrives and send clients out in its stead, until the step is over."""
        patience = max(self.lanes.patience, 3 * self.lasted) if step.ends == inf else inf
        began = time.monotonic()

        def owing() -> list[Lane]:
            return self.lanes.those(*BUSY) or (self.lanes.those("idle") if step.ends < inf else [])

        def left() -> float:
            return min(step.ends, *(flight.ends for flight in self.at_work.values()), inf) - time.monotonic()

        for _ in self.lanes.waiting(f"visits of round {now.round}", owing, self.rest, left, patience):
            with self.phases.phase("reduction"):
                self._take(step, now, record)
            if step.full or (time.monotonic() >= step.ends and self._closes(step, now)):
                break
            with self.phases.phase("broadcast"):
                self._send(step, now)
        else:
            lost = ", ".join(map(str, self.lanes.lost)) or "none"
            some = ", some of every client" if self.rules.every_client else ""
            wanted = f"participation.buffer = {self.rules.buffer} visits" if self.rules.buffer else "visits"
            raise RunError(
                f"round {now.round}: expected {wanted}{some}, but only "
                f"{len(step.came)} have come, and nobody is left to be sent out; lost ranks: {lost}"
            )
        self.lasted = time.monotonic() - began

    def _closes(self, step: Step, now: Progress) -> bool:
        """Return whether the step is over now that its time is up."""
        return True

    # what arrives

    def _take(self, step: Step, now: Progress, record: Record) -> None:
        """Take visits in the order in which they have come, then those whose time is up; forget those of the dead."""
        came = [lane for lane in self.at_work if lane.visits.arrived]
        for lane in sorted(came, key=arrival):
            if not step.full and arrival(lane)[0] <= step.ends:
                self._arrive(lane, step, now, record)
        for lane, flight in list(self.at_work.items()):
            if lane.state == "dead" and not lane.visits.arrived:
                now.flights.due[flight.client] = np.nan
                step.ended[flight.client] = Fate.LOST
                del self.at_work[lane]
            elif lane.state == "visiting" and not step.full and time.monotonic() >= flight.ends:
                self._arrive(lane, step, now, record)

    def _arrive(self, lane: Lane, step: Step, now: Progress, record: Record) -> None:
        """Take what a lane has sent of its visit, and close the visit where that is not all; leave word what counts."""
        flight, one, job, flights = self.at_work.pop(lane), lane.visits.pending, self.job, now.flights
        client, whole = flight.client, bool(lane.visits.arrived)
        when = arrival(lane)[0] if whole else time.monotonic()
        if not whole:
            lane.close(Command(Op.CLOSE))
        flights.due[client] = np.nan
        groups = 0 if one is None or (job.planner.whole and not whole) else len(one.times)
        if one is None or not groups:
            self._in_vain(client, step, now.round)
            return
        lane.worked[:, 0] += 1, one.seconds(0)
        bad, steps = int(one.rejected(groups)[0, 0]), one.steps(0, 0)
        depth = job.layers.reached[int(one.sent(groups)[0, 0])]
        version, reached = flight.version, depth if bad == NO_GROUP else 1
        counted = counts(job.planner, self.rules, now.round - version, reached, steps)
        if counted or (job.algorithm.goes_on and bad == NO_GROUP):
            lane.counted[lane.hosted == client] = acknowledgment(version, flight.number, depth)
        if not counted:
            self._in_vain(client, step, now.round)
            if job.algorithm.goes_on:
                visit = client, version, flight.number, when - self.origin, when - flight.sent
                step.late.append((*visit, job.planner.nothing, steps))
            return
        if bad != NO_GROUP:
            step.rejected[len(step.came)] = Rejection(depth, bad, NOT_FINITE)
        else:
            record.gradients = max(record.gradients, one.gradients(0, 0, groups))
        if self.rules.every_client:
            lane.visits.keep_pending()
            step.held.append(one)
        else:
            old, at_work = np.array([now.round - version]), self.rules.at_work(job.config.clients)
            factor = float(job.planner.staleness.factors(old, at_work)[0])
            add_all(one, step.sums, groups, dict.fromkeys(job.changes, factor))
            step.kept += messages(one, groups, job.keeps) if job.keeps else []
        ended = whole and (not self.rules.by_steps or steps == job.planner.visit_steps[0][client])
        seconds = when - flight.sent if ended else inf
        step.came.append((client, version, flight.number, when - self.origin, seconds, depth, steps))
        filled = when - step.began
        step.full, step.ends = over(job.planner, self.rules, step.came, when, step.ends, filled)

    def _in_vain(self, client: int, step: Step, round: int) -> None:
        step.ended[client] = Fate.LATE
        step.fruitless += 1
        check_fruitless(round, step.fruitless)

    def _stop_stale(self, step: Step, now: Progress) -> None:
        """Stop visits that are too old, where they shall be."""
        most, flights = self.rules.max_staleness, now.flights
        if most is None or not self.rules.stop_stale:
            return
        for client in flights.waiting[now.round - flights.version[flights.waiting] > most].tolist():
            lane = self.lane[client]
            flights.due[client], step.ended[client] = np.nan, Fate.CANCELLED
            if self.owed and client in self.owed:
                self.owed.remove(client)
                continue
            del self.at_work[lane]
            if lane.state == "visiting":
                lane.close(Command(Op.CLOSE))

    # who is sent out

    def _send(self, step: Step, now: Progress) -> None:
        """Send out clients of lanes that are idle: first those who were at work when the run was stopped."""
        assert self.owed is not None
        self._rehost()
        flights, free = now.flights, [lane for lane in self.lanes.those("idle") if lane not in self.at_work]
        for client in self.owed.copy():
            lane = self.lane[client]
            if lane.state == "dead":
                flights.due[client], step.ended[client] = np.nan, Fate.LOST
            elif lane in free:
                free.remove(lane)
                self._invite(lane, client, now)
            else:
                continue
            self.owed.remove(client)
        chosen = flights.chosen(self.job.config.seed, self.rules, self._candidates(free, now), now.round)
        self._leave(chosen, step, now)
        flights.leave(chosen, now.round)
        for client in chosen.tolist():
            self._invite(self.lane[client], client, now)

    def _leave(self, clients: Ints, step: Step, now: Progress) -> None:
        """Take note of who is about to be sent out."""

    def _candidates(self, lanes: list[Lane], now: Progress) -> Ints:
        """Return one client of each lane that may be sent out, drawn uniformly, ascending ids."""
        free = now.flights.free(self.rules, self.job.planner.members, now.round)
        found = []
        for lane in lanes:
            own = np.intersect1d(free, lane.hosted)
            if len(own) > 1:
                now.flights.drawn += 1
                own = keyed(self.job.config.seed, "lane", step=now.flights.drawn).choice(own, 1)
            found += own.tolist()
        return np.array(sorted(found), dtype=np.int64)

    def _invite(self, lane: Lane, client: int, now: Progress) -> None:
        version, number = int(now.flights.version[client]), int(now.flights.number[client])
        ends = self.rules.max_seconds or self.rules.closes_after(version, ())
        serial = self.serials.get(version, 0)
        cohort = np.array([client], dtype=np.int64)
        command = Command(Op.VISIT, version, number, ends, state=serial, work=self._work(client, now), cohort=cohort)
        sent = time.monotonic()
        lane.invite(command, self.packing.sent(now.served[version]))
        self.at_work[lane] = Flight(client, version, number, sent, sent + (self.rules.max_seconds or inf))

    def _work(self, client: int, now: Progress) -> tuple[int, int]:
        """Return `Command.work` of a client's visit."""
        return 0, 0

    # everything else

    def _rehost(self) -> None:
        before = len(self.lanes.events), [*self.lanes.all]
        super()._rehost()
        if before != (len(self.lanes.events), self.lanes.all):
            self.lane |= self._hosts()


class ScheduledServer(ArrivalsServer):
    """The server of arrivals that a rule merges, see `ArrivalsServer`. Each client has a rank of its own.

    Attributes
    ----------
    unmerged : dict of int
        By client what has come of visits that wait for their merge, and which group of it was rejected.
    """

    def __init__(self, job: Job, lanes: Lanes, rest: Callable[[], None] = idle) -> None:
        super().__init__(job, lanes, rest)
        self.unmerged: dict[int, tuple[Came, Received, int]] = {}

    def exchange(self, now: Progress, record: Record) -> tuple[Plan, Sums]:
        plan, sums = super().exchange(now, record)
        assert plan.arrivals is not None
        rates = now.flights.known["rate"][plan.cohort]  # nobody has left again with another one
        return replace(plan, arrivals=replace(plan.arrivals, rates=rates)), sums

    def _fill(self, step: Step, now: Progress, record: Record) -> None:
        known = now.flights.known
        self.rule = self.job.planner.rule(known)
        if self.owed:  # what had come of their visits is not on file
            known["came"][self.owed] = np.nan
        step.ends = self.origin + self.rule.ends
        super()._fill(step, now, record)

    def _take(self, step: Step, now: Progress, record: Record) -> None:
        super()._take(step, now, record)
        if self.lanes.lost:  # clients of some of these may have gone on elsewhere
            self.rule.lost[:] = False
            self.rule.lost[[client for client, lane in self.lane.items() if lane.state == "dead"]] = True

    def _arrive(self, lane: Lane, step: Step, now: Progress, record: Record) -> None:
        flight, one, planner = self.at_work.pop(lane), lane.visits.pending, self.job.planner
        assert one is not None
        lane.visits.keep_pending()
        client, when = flight.client, arrival(lane)[0]
        lane.worked[:, 0] += 1, one.seconds(0)
        groups, steps = len(one.times), int(self.rule.known["steps"][client])
        bad, depth = int(one.rejected(groups)[0, 0]), self.job.layers.reached[int(one.sent(groups)[0, 0])]
        if bad == NO_GROUP:
            record.gradients = max(record.gradients, one.gradients(0, 0, groups))
        drawn = planner.attempt(flight.version, flight.number, cohort=planner.members)
        waited = float(planner.times.waits(drawn)[np.searchsorted(planner.members, client)])
        seconds = when - flight.sent
        came = client, flight.version, flight.number, when - self.origin, seconds, depth, steps
        self.unmerged[client] = came, one, bad
        merged = self.rule.arrive(client, when - self.origin, min(waited, seconds), max(seconds - waited, 0.0))
        if merged is None:  # it counts in the next merge, whoever's it is
            self._count(np.array([client]), step, now)
            if len(step.came) == len(planner.members):
                step.full, step.over = True, when - self.origin
        elif len(merged):
            self._merge(merged, step, now, when)
        step.ends = self.origin + self.rule.ends

    def _merge(self, clients: Ints, step: Step, now: Progress, when: float) -> None:
        self._count(clients, step, now)
        step.full, step.over = True, when - self.origin

    def _count(self, clients: Ints, step: Step, now: Progress) -> None:
        for client in clients.tolist():
            came, one, bad = self.unmerged.pop(client)
            _, version, number, _, _, depth, _ = came
            now.flights.due[client] = self.rule.known["came"][client] = np.nan  # it may be a while until it leaves
            lane = self.lane[client]
            lane.counted[lane.hosted == client] = acknowledgment(version, number, depth)  # only now it is sure to count
            if bad != NO_GROUP:
                step.rejected[len(step.came)] = Rejection(depth, bad, NOT_FINITE)
            step.came.append(came)
            step.held.append(one)

    def _closes(self, step: Step, now: Progress) -> bool:
        when = max(time.monotonic() - self.origin, self.rule.ends)
        if len(merged := self.rule.close(when)):
            self._merge(merged, step, now, self.origin + when)
        step.ends = self.origin + self.rule.ends
        return step.full

    def _leave(self, clients: Ints, step: Step, now: Progress) -> None:
        if len(clients):
            self.rule.depart(clients, time.monotonic() - self.origin)
            step.ends = self.origin + self.rule.ends

    def _work(self, client: int, now: Progress) -> tuple[int, int]:
        steps, rate = (float(self.rule.known[name][client]) for name in ("steps", "rate"))
        return int(steps), round(steps * rate)


def arrival(lane: Lane) -> tuple[float, int]:
    """Return when a complete visit has come, in seconds of the monotonic clock; who comes at once, by rank."""
    assert lane.visits.pending is not None
    return lane.visits.pending.times[-1], lane.topology.ranks[0]
