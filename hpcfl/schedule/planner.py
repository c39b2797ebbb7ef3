"""The one planner of both clocks: who is invited to a round, when it closes, how far each visit comes.

Where arrivals end rounds, it says who is at work with which state, and who arrives next, in simulated time by an event
queue. Clients are sent out with the newest state, in the order in which places become free, and report when they are
done; the server takes a step with every `buffer` visits, when all have reported often enough, or after a `deadline`,
and a round is such a step. All of it is a pure function of config and seed, so every rank keeps the same queue without
a word. Who arrives at the same time arrives in the order of the ids. A step is taken before anybody is sent out in its
stead, so that who arrives last begins with what it has brought about.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from math import ceil, inf, isfinite, nan
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from hpcfl import store
from hpcfl.base.errors import RunError, UsageError, listed, no_meaning, refusal
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats, Ints
from hpcfl.schedule.availability import Availability, Presence
from hpcfl.schedule.deadlines import planned as best_deadlines
from hpcfl.schedule.doubling import Doubling, Stage, Theory, entered, stages, wanted
from hpcfl.schedule.participation import Participation, Staleness
from hpcfl.schedule.plan import Arrivals, Attempt, Fate, Plan
from hpcfl.schedule.scheduler import RULES, Known, Rule, Scheduler
from hpcfl.schedule.speeds.base import CLOSE, Speed
from hpcfl.schedule.visit_times import VisitTimes

MOST_ATTEMPTS = 1000
"""After so many void attempts at one round it is given up."""


class Method(Protocol):
    """What a schedule depends on of an algorithm, see `hpcfl.algorithms.Algorithm`."""

    layerwise: ClassVar[bool]
    snapshots: ClassVar[bool]
    weighs_steps: ClassVar[bool]
    goes_on: ClassVar[bool]
    needs_members: ClassVar[str]
    needs_rounds: ClassVar[str]

    @property
    def splits_last(self) -> bool: ...
    @property
    def scales_steps(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def between_rounds(self) -> str: ...
    def invites(self, round: int) -> bool: ...
    def invites_all(self, round: int) -> bool: ...
    def clients_done(self, round: int) -> bool: ...
    def visit_steps(self, samples: int) -> tuple[int, int]: ...
    def mean_weights(self) -> str: ...


@dataclass(eq=False)
class Planner:
    """A run's rounds. In simulated time ask for `plans`; in real time for an `attempt`, and tell what it `saw`."""

    participation: Participation
    speed: Speed
    algorithm: Method
    sizes: Ints  # [clients]: training samples
    work_fractions: Floats  # [L], see `Attempt`
    seed: int = 0
    clock: str = "simulated"
    doubling: Doubling = field(default_factory=Doubling)
    staleness: Staleness = field(default_factory=Staleness)
    visit_times: VisitTimes | None = None
    availability: Availability = field(default_factory=Availability)
    scheduler: Scheduler = field(default_factory=Scheduler)
    weights: str = "uniform"  # of clients in means, where `Staleness.divisor` asks for them
    _seconds: deque[float] = field(init=False)  # of past visits

    def __post_init__(self) -> None:
        self._seconds = deque(maxlen=self.participation.adaptive_window)

    @property
    def clients(self) -> int:
        return len(self.sizes)

    @property
    def times(self) -> Speed | VisitTimes:
        """What says how long visits take."""
        return self.visit_times or self.speed

    @cached_property
    def presence(self) -> Presence | None:
        """Who is there when; None: everybody always."""
        return self.availability.presence(self.seed, self.clients, self.speed.scale)

    @property
    def rules(self) -> Participation:
        """The rules that rounds really follow; a replay has its own."""
        return self.speed.rules(self.participation)

    @cached_property
    def members(self) -> Ints:
        """The ids of the clients that take part in the run, ascending, int64 [n]; a replay has those of its trace."""
        return self.rules.taking_part(self.clients)

    @cached_property
    def visit_steps(self) -> tuple[Ints, Ints]:
        """The local steps of each client's whole visit, and the least that count, int64 [clients] each."""
        found = [self.algorithm.visit_steps(samples) for samples in self.sizes.tolist()]
        whole, least = np.array(found, dtype=np.int64).reshape(-1, 2).T
        if self.rules.work == "speed":
            paces = self.speed.paces(self.seed, self.clients)
            share = paces[self.members].min() / paces
            whole = np.maximum(least, np.floor(whole * share.clip(max=1.0) * (1 + CLOSE)).astype(np.int64))
        return whole, least

    @property
    def whole(self) -> bool:
        """Whether a visit counts as a whole or not at all."""
        return self.participation.whole(self.algorithm.layerwise)

    @property
    def nothing(self) -> int:
        """The depth of a visit of which no layer counts, L + 1."""
        return len(self.work_fractions) + 1

    def rule(self, known: Known) -> Rule:
        """Return the rule that sends clients out, which has `known` so much of them, and keeps it up to date."""
        most = int(self.visit_steps[0].max())
        return RULES[self.rules.dispatch](self.scheduler, most, self.clients, self.members, known)

    @property
    def slots(self) -> int:
        """How many visits may end in a round that arrivals end, and are recorded; 0 for other rounds.

        Of each client one may be too old. A replay has as many as its run.
        """
        if (taped := self.speed.slots()) is not None:
            return taped
        slots = self.rules.slots(self.clients)
        return slots + self.clients if slots and self.algorithm.goes_on else slots

    @property
    def warnings(self) -> dict[str, str]:
        """What the user should know before the run, by name."""
        rules = self.participation
        if not rules.by_steps or rules.close == "all" or rules.bound is not None or self.clock != "wall":
            return {}
        why = f"close = '{rules.close}' ends rounds in real time when nobody knows beforehand"
        then = "so nothing counts of visits that are not complete by then"
        return {"steps": f"participation.partial = 'steps': {why}, {then}"}

    def plans(
        self,
        first: int = 0,
        stage: Callable[[], int] = lambda: 0,
        flights: Flights | None = None,
        begun: float = 0.0,
    ) -> Iterator[Plan]:
        """Yield the plan of each simulated round from `first` on, without end; `stage` says where a run stands by then.

        The `first` one begins so many seconds after the start of the run. Where arrivals end rounds, `flights` says who
        is at work before the first one, and is kept up to date.

        Raises
        ------
        RunError
            Where too few visits ever count.
        """
        if self.rules.by_arrivals:
            taped = self.speed.arrived(first, self.staleness, self.whole, self.rules.sets_steps)
            queue = Scheduled if self.rules.scheduled else Queue
            plans = taped or queue(self, flights or Flights.none(self.clients)).plans(first)
            yield from map(self.divided, plans)
            return
        planner = replace(self)  # one that has seen nothing yet
        earlier = self.participation.adaptive  # such a rule must see what came before
        begins = 0.0 if earlier else begun
        for round_ in count(0 if earlier else first):
            plan = planner._planned(round_, stage(), begins)
            begins += plan.duration
            if round_ >= first:
                yield plan

    def divided(self, plan: Plan) -> Plan:
        """Return a round that arrivals have ended whose changes are divided as `Staleness.divisor` says.

        The server divides by the weights of the visits, so factors make up for the rest.
        """
        if self.staleness.divisor == "visits" or plan.arrivals is None or not len(plan.cohort):
            return plan
        factors = plan.arrivals.factors
        weights = np.ones(self.clients) if self.weights == "uniform" else self.sizes.astype(np.float64)
        own = weights[plan.cohort]
        divisor = weights[self.members].sum() if self.staleness.divisor == "clients" else own @ factors
        arrivals = replace(plan.arrivals, factors=factors * (own.sum() / divisor))
        return replace(plan, arrivals=arrivals)

    def _planned(self, round: int, stage: int, begins: float) -> Plan:
        if not self.algorithm.invites(round):
            return Plan.nobody(round, len(self.work_fractions))
        if self.speed.replays:
            return self.plan(self.attempt(round))
        duration, needed = 0.0, self.participation.min_clients
        for number in range(MOST_ATTEMPTS):
            now = self.somebody(round, begins + duration)
            duration = now - begins if now > begins + duration else duration
            attempt = self.attempt(round, number, stage, now=now)
            plan = self.plan(attempt)
            self.saw(plan.seconds, attempt.closing(plan.seconds))
            duration += plan.duration
            if plan.counted.sum() >= needed:
                return replace(plan, duration=duration)
        raise RunError(f"round {round}: given up after {self.void(MOST_ATTEMPTS, int(plan.counted.sum()))}")

    def somebody(self, round: int, now: float) -> float:
        """Return when a round can begin at the earliest, from `now` on: when as many are there as have to count.

        RunError where so many never are.
        """
        presence, need, start = self.presence, max(1, self.participation.min_clients), now
        while presence is not None and presence.at(now).there[self.members].sum() < need:
            if (now := presence.coming(self.members)) == inf:
                who = "nobody is" if need == 1 else f"fewer than participation.min_clients = {need} are"
                raise RunError(f"round {round}: {who} there from second {start:.6g} on, and nobody comes any more")
        return now

    def plan_deadlines(self, rounds: int) -> None:
        """Put planned deadlines into the rules, as a schedule."""
        keys = self.participation
        assert keys.planned_seconds is not None
        how = rounds, keys.planned_seconds, keys.planned_least, keys.planned_gamma
        ends = best_deadlines(self.missing, *how).tolist()
        self.participation = keys.model_copy(update={"deadline": tuple(enumerate(ends))})

    def missing(self, closes_after: float) -> Floats:
        """Return the chances that nobody reaches layer l by a deadline if all are there, float64 [L].

        Of a cohort that is drawn: geometric means over cohorts.
        """
        facts = self.seed, self.clients, self.work_fractions, 0, 0, self.members
        miss = self._chances(Attempt(*facts, closes_after))[1]
        chances: Floats = miss ** (self.participation.invited(self.clients) / len(self.members))
        return chances

    def void(self, attempts: int, counted: int) -> str:
        """Return what is said of a round with so many void attempts, where so many visits to the last one counted."""
        expected = f"expected at least participation.min_clients = {self.participation.min_clients}"
        return f"{attempts} void attempts: {counted} of the visits to the last one counted, {expected}"

    def attempt(
        self,
        round: int,
        number: int = 0,
        stage: int = 0,
        cohort: Ints | None = None,
        closes_after: float | None = None,
        now: float | None = None,
    ) -> Attempt:
        """Return an attempt at a round, of which `number` were void, in a stage of doubling participant sets.

        Parameters
        ----------
        cohort : int64 [n]
            Who is invited, ascending client ids: in real time those who are free; None: who is drawn.
        closes_after : float
            As the server says, which alone has seen all visits; None: as follows from what was seen here.
        now : float
            When it begins, in seconds since the start of the run, which says who is there; None: whoever it is.
        """
        presence = None if self.presence is None or now is None else self.presence.at(now)
        everyone = self.algorithm.invites_all(round)
        if cohort is None and everyone:
            cohort = self.members
        if cohort is None:
            there = None if presence is None else self.members[presence.there[self.members]]
            cohort = self.participation.cohort(self.seed, round, self.clients, number, there)
        if closes_after is None:
            closes_after = self.participation.closes_after(round, self._seconds)
        facts = self.seed, self.clients, self.work_fractions, round, number, cohort
        if everyone:
            return Attempt(*facts, begins=now or 0.0)
        quorum, weights = self.visits(stage), None
        if quorum is not None and self.doubling.by == "samples":
            last = quorum == self.participation.invited(self.clients)  # waits for all, whatever samples they have
            quorum = None if last else ceil(quorum * self.sizes[self.members].mean())
            weights = None if last else self.sizes[cohort]
        leaves = None
        if presence is not None and now is not None and self.availability.leave:
            leaves = presence.ends[cohort] - now
        return Attempt(*facts, closes_after, quorum, weights, self.participation.grace or 0.0, leaves, now or 0.0)

    def visits(self, stage: int) -> int | None:
        """Return the visits that a round of this stage waits for; None: all."""
        first = self.participation.enough
        if self.doubling.when == "never" or first is None:
            return first
        return wanted(first, self.participation.invited(self.clients), stage)

    def plan(self, attempt: Attempt) -> Plan:
        """Decide one attempt, however many visits may count in it; its `duration` is that of this attempt alone."""
        times, attempt = self.times, self.speed.recorded(attempt)
        if self.rules.by_time and len(attempt.cohort):
            seconds = times.seconds(attempt)
            late, depth, cut = self.cut_short(attempt, seconds)
            duration = attempt.closes_after if late.any() else float(seconds.max())
            if attempt.leaves is not None:  # who is late may have left before
                duration = min(attempt.closes_after, attempt.last(seconds))
            facts = attempt.round, attempt.cohort, seconds, depth, duration + times.communication
            chances = self._step_chances(attempt) if self.algorithm.weighs_steps else None
            plan = Plan(
                *facts, *self._chances(attempt), attempt.closes_after, attempt.number, cut, step_chances=chances
            )
        else:
            plan = self._by_visits(attempt)
        steps = self.visit_steps[0][attempt.cohort] if self.participation.by_steps else None
        return self.speed.replayed(plan, self.whole, steps)

    def _by_visits(self, attempt: Attempt) -> Plan:
        """Decide an attempt that closes when enough visits are there, or by its seconds at the latest."""
        end = attempt.closes_after if self.rules.by_time or isfinite(attempt.closes_after) else nan
        if not len(attempt.cohort):
            return Plan.nobody(attempt.round, attempt.layers, end, attempt.number)
        seconds = self.times.seconds(attempt)
        order = np.argsort(attempt.whole(seconds), kind="stable")
        needed, closes = attempt.needed(order), attempt.closing(seconds)
        steps = self._steps(attempt, seconds, closes)
        if steps is not None:
            depth = np.where(steps > 0, 1, attempt.layers + 1)
        elif self.whole:
            depth = np.where(seconds <= attempt.until(closes), 1, attempt.layers + 1)
            if not attempt.grace:
                depth[order[needed:]] = attempt.layers + 1  # of visits at once, no more than are waited for
        else:
            depth = self.times.depth(replace(attempt, closes_after=closes))
        self._lose(attempt, seconds, closes, depth, steps)
        arrival, miss = self._chances(attempt)
        if needed < len(seconds):
            arrival = np.full_like(arrival, nan)  # the chance to be among the first n has no closed form
        duration = min(closes, attempt.last(seconds)) + self.times.communication
        return Plan(attempt.round, attempt.cohort, seconds, depth, duration, arrival, miss, end, attempt.number, steps)

    def cut_short(self, attempt: Attempt, seconds: Floats) -> tuple[NDArray[np.bool_], Ints, Ints | None]:
        """Return whose visits, which take `seconds`, are not complete when the attempt closes by time, and what counts.

        That is the first layer of each, int64 [n], and its steps, see `_steps`.
        """
        depth = self.times.depth(attempt)
        late = depth > 1
        if self.whole:
            depth = np.where(late, attempt.layers + 1, depth)
        steps = self._steps(attempt, seconds, attempt.closes_after)
        if steps is not None:
            depth = np.where(steps > 0, 1, attempt.layers + 1)
        self._lose(attempt, seconds, attempt.closes_after, depth, steps)
        return late, depth, steps

    def _lose(self, attempt: Attempt, seconds: Floats, closes: float, depth: Ints, steps: Ints | None) -> None:
        """Let nothing count of visits whose clients leave before their end, where that is the rule."""
        if attempt.leaves is None or self.availability.leaves != "lost":
            return
        gone = (seconds > attempt.leaves) & (attempt.leaves <= closes)
        depth[gone] = attempt.layers + 1
        if steps is not None:
            steps[gone] = 0

    def _steps(self, attempt: Attempt, seconds: Floats, end: float) -> Ints | None:
        """Return how many local steps of visits that take `seconds` (float64 [n]) count at the `end`, int64 [n].

        None where visits are not cut short at a step.
        """
        if not self.participation.by_steps:
            return None
        whole, least = (each[attempt.cohort] for each in self.visit_steps)
        share = self.times.share(attempt, seconds, attempt.until(end))
        steps: Ints = np.floor(whole * share * (1 + CLOSE)).astype(np.int64)
        return np.where(steps < least, 0, steps)

    def _chances(self, attempt: Attempt) -> tuple[Floats, Floats]:
        """Return `Plan.arrival` and `Plan.miss_probability` of an attempt that only its seconds close, if they do.

        One that visits close earlier has all of these, so the latter are the same.
        """
        shape = len(attempt.cohort), attempt.layers
        if attempt.closes_after == inf and attempt.leaves is None:
            return np.ones(shape), np.zeros(attempt.layers)
        if attempt.leaves is not None or not self.times.known(self.clock):
            return np.full(shape, nan), np.full(attempt.layers, nan)
        if self.participation.by_steps:
            whole, least = self.visit_steps
            chance = self.times.reach(attempt, (least / whole)[attempt.cohort])
            miss: Floats = np.full(attempt.layers, np.prod(1.0 - chance))
            return np.repeat(chance[:, None], attempt.layers, axis=1), miss
        arrival, miss = self.times.arrival(attempt), self.times.miss_probability(attempt)
        if self.whole:
            arrival, miss = np.repeat(arrival[:, :1], attempt.layers, axis=1), np.repeat(miss[:1], attempt.layers)
        return arrival, miss

    def _step_chances(self, attempt: Attempt) -> Floats:
        """Return `Plan.step_chances`; of fewer steps than count at all, the chance that so many are done."""
        whole, least = (each[attempt.cohort] for each in self.visit_steps)
        done = [np.clip(number, least, whole) / whole for number in range(1, whole.max(initial=0) + 1)]
        return np.stack([self.times.reach(attempt, share) for share in done], axis=1)

    def saw(self, seconds: Floats, closes_after: float) -> None:
        """Take note of the seconds of an attempt's whole visits, void or not: an adaptive rule follows from them.

        One that had not ended when the attempt closed, or never does (`inf` or NaN), counts as twice as long as that:
        the rule can grow again.
        """
        self._seconds.extend(np.where(seconds <= closes_after, seconds, 2 * closes_after).tolist())

    def recall(self, run: Path, rounds: int) -> None:
        """Take note of the visits that an earlier start has recorded, where a rule follows from them.

        RunError where some of these are lost to damage.
        """
        if not self.participation.adaptive or not rounds:
            return
        data = store.open_run(run)
        known = {*data["round"].values.tolist()} - {*data.attrs.get("lost", ())}
        if lost := [round_ for round_ in range(rounds) if round_ not in known]:
            what = f"what visits took in rounds {listed(lost)}, from which its deadline follows"
            raise RunError(f"'{run}' has lost {what}: expected a copy of its metrics")
        columns = (data[name].values[:rounds] for name in ("cohort", "visit_seconds", "deadline"))
        for round_, (invited, seconds, closes_after) in enumerate(zip(*columns)):
            cohort = np.flatnonzero(invited == 1)
            attempt = self.attempt(round_, cohort=cohort, closes_after=float(closes_after))
            self.saw(seconds[cohort], attempt.closing(seconds[cohort]))

    # doubling participant sets

    @cached_property
    def stage_limits(self) -> list[float]:
        """The most rounds of each stage but the last."""
        doubling, first = self.doubling, self.participation.first
        if doubling.when == "never" or first is None:
            return []
        invited = self.participation.invited(self.clients)
        if doubling.when != "theory":
            most = float(doubling.rounds) if doubling.when == "rounds" else inf
            return [most] * (stages(first, invited) - 1)
        times = self.times.order(self.seed, self.clients, self.members, invited)
        theory = Theory(times, first, doubling.contraction, self.times.communication, doubling.distance)
        return [*map(float, theory.rounds_with_skips() if doubling.skip else theory.rounds())]

    @property
    def first_stage(self) -> Stage:
        return entered(0, self.stage_limits)

    def next_stage(self, round: int, stage: Stage, signal: float) -> Stage:
        """Return the stage of the round after `round`; one that was for everyone counts in no stage."""
        if not self.stage_limits or self.algorithm.invites_all(round):
            return stage
        return self.doubling.after(stage, self.stage_limits, signal)


def check(
    participation: Participation,
    doubling: Doubling,
    speed: Speed,
    algorithm: Method,
    rounds: int,
    clients: int,
    clock: str,
    availability: Availability,
) -> None:
    """Raise UsageError where the sections that rounds follow from do not go together."""
    if participation.by_arrivals:  # before keys that it would refuse for another reason
        _check_arrivals(algorithm)
    participation.check(clients)
    doubling.check(participation)
    speed.check(participation, clock)
    speed.covers(rounds, clients)
    partial, method = f"participation.partial = '{participation.partial}'", f"algorithm.name = '{algorithm.name}'"
    expected = "expected 'auto' or 'discard'; did you mean 'auto'?"
    if participation.by_steps and not algorithm.visit_steps(1)[1]:
        raise UsageError(f"{partial}: visits of {method} cannot be cut short after a step: {expected}")
    if participation.hold_out and algorithm.needs_members:
        raise refusal("participation.hold_out", f"0, since {algorithm.needs_members}", participation.hold_out, 0)
    if participation.work == "speed":
        if participation.partial == "layers":
            why = "shortens visits, and layers leave in the last step of whole ones"
            raise UsageError(f"participation.work = 'speed' {why}: expected partial = 'auto', 'steps' or 'discard'")
        if not algorithm.visit_steps(1)[1]:
            why = f"visits of {method} cannot be cut short after a step"
            raise UsageError(f"participation.work = 'speed': {why}: expected 'alike'")
        if speed.per != "step" or speed.replays:
            why = "which is worth it where a visit's seconds grow with its steps"
            raise UsageError(f"participation.work = 'speed', {why}: expected speed.per = 'step', and seconds by a law")
        if not np.ptp(speed.paces(0, clients)):
            raise no_meaning("participation.work", "speed", "a [speed] by which all are expected to be equally fast")
    if participation.partial == "layers" and not (algorithm.layerwise or algorithm.splits_last):
        why = "does not send its layers one by one (fedavg does with algorithm.epochs = 0, steps above 0 and sgd)"
        steps = (
            "expected 'auto', 'steps' or 'discard'; did you mean 'steps'?" if algorithm.visit_steps(1)[1] else expected
        )
        raise UsageError(f"{partial}: {method} {why}: {steps}")
    participation.check_only_for("participation.", "partial", {"snapshot": "steps"})
    if participation.snapshot and not algorithm.snapshots:
        raise no_meaning("participation.snapshot", participation.snapshot, f"{method}, which learns in several phases")
    if not speed.replays:  # which obeys its own rules
        handed_in = availability.leave and availability.leaves == "partial"
        participation.check_effect(algorithm.layerwise, clock == "simulated" and not availability.leave, handed_in)
    rules = speed.rules(participation)  # of a replay others
    if rules.by_arrivals:
        _check_arrivals(algorithm)
    if rules.every_client:  # changes are scaled so that clients count alike
        try:
            weights = algorithm.mean_weights()
        except UsageError:
            weights = ""
        if not weights:
            does = "does more with what clients send than to take weighted means of their changes"
            why = f"{method} {does}; did you mean algorithm.name = 'fedavg'?"
            raise UsageError(f"participation.every_client = true: {why}")
        if weights != "uniform":
            raise refusal("algorithm.weights", "'uniform' with participation.every_client = true", weights, "'uniform'")
    _check_availability(availability, participation, algorithm, clock)
    model, when = f"speed.model = '{speed.model}'", f"doubling.when = '{doubling.when}'"
    if algorithm.invites_all(0) and speed.needs_end:
        why = f"begins with a round that waits for everybody, but the times of {model} follow from the deadline"
        raise UsageError(f"{method} {why}; did you mean speed.model = 'exponential'?")
    if doubling.when != "never" and algorithm.clients_done(2):
        why = f"{method} invites clients once, so that nothing can double"
        raise UsageError(f"{when}: {why}; did you mean doubling.when = 'never'?")
    if doubling.when == "theory" and not speed.known("wall"):
        why = f"needs to know how long the first n visits take, which {model} does not tell"
        raise UsageError(f"{when} {why}; did you mean doubling.when = 'plateau'?")


def _check_availability(
    availability: Availability, participation: Participation, algorithm: Method, clock: str
) -> None:
    """Refuse clients that come and go where all are needed, or where nobody knows what they have done."""
    key = f"availability.model = '{availability.model}'"
    if availability.model == "always":
        return
    if algorithm.invites_all(0):
        raise UsageError(f"{key}: algorithm.name = '{algorithm.name}' begins with a round of all clients")
    if clock == "wall" and availability.leave:
        why = "in real time clients are asked who are there, and stay until they are done"
        raise UsageError(f"availability.leaves: {why}: expected 'stays', got '{availability.leaves}'")
    if participation.by_arrivals and participation.dispatch == "reporter":
        raise UsageError(
            f"{key}: participation.dispatch = 'reporter' sends out nobody who comes later; did you mean 'uniform'?"
        )
    if participation.by_arrivals and (clock == "wall" or availability.leaves == "partial"):
        what = f"{key} with clock = 'wall'" if clock == "wall" else "availability.leaves = 'partial'"
        raise UsageError(f"{what} does not go with participation.close = 'arrivals'; did you mean 'deadline'?")
    layers = participation.partial == "layers" or (algorithm.layerwise and participation.partial != "discard")
    if availability.leaves == "partial" and not (participation.by_steps or layers):
        method = f"algorithm.name = '{algorithm.name}', whose visits count as a whole"
        raise no_meaning("availability.leaves", "partial", method, "participation.partial = 'steps'")


def _check_arrivals(algorithm: Method) -> None:
    """Refuse a method that cannot do without rounds."""
    why = algorithm.needs_rounds
    if algorithm.invites_all(0):
        why = "it begins with a round of all clients"
    elif algorithm.clients_done(2):
        why = "clients are invited once, and all are waited for"
    elif algorithm.between_rounds:
        why = f"{algorithm.between_rounds} lets all clients learn after each one"
    if why:
        needs = f"algorithm.name = '{algorithm.name}' needs rounds: {why}"
        raise UsageError(f"participation.close = 'arrivals': {needs}; did you mean participation.close = 'all'?")


MOST_FRUITLESS = 100_000
"""After so many arrivals in a row of which nothing counts, a run is given up."""
Came = tuple[int, int, int, float, float, int, int]
"""Client, version, number, time of arrival, seconds of a whole visit, depth, steps."""
PREFIX, KNOWN = "flight ", "known "  # begin the names of what a checkpoint remembers


@dataclass
class Flights:
    """Who is at work, with which state: what checkpoints hold of rounds that arrivals end.

    Attributes
    ----------
    version : int64 [clients]
        The round whose state each client was last sent out with; -1: none yet.
    number : int64 [clients]
        How many visits it had begun before with the same.
    due : float64 [clients]
        When it reports, in seconds since the start of the run; inf: never; NaN: it is not at work. In real time
        nobody knows, and 0 stands for all who are at work.
    now : float
        Seconds since the start of the run.
    drawn : int
        How often it was drawn who is sent out: each draw has a key of its own.
    leaves : bool [clients]
        Whether, when it is due, it leaves without having done its visit.
    known : Known
        What a rule of dispatch knows of clients, see `hpcfl.schedule.scheduler`.
    """

    version: Ints
    number: Ints
    due: Floats
    leaves: NDArray[np.bool_]
    now: float = 0.0
    drawn: int = 0
    known: Known = field(default_factory=dict)

    @classmethod
    def none(cls, clients: int) -> Flights:
        """Nobody has been sent out yet."""
        none = np.zeros(clients, dtype=np.int64)
        return cls(np.full(clients, -1), none, np.full(clients, np.nan), none.astype(np.bool_))

    @property
    def waiting(self) -> Ints:
        """Who is at work, ascending ids."""
        return np.flatnonzero(~np.isnan(self.due))

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint remembers, arrays by name; nothing where nobody was ever sent out."""
        if (self.version < 0).all():
            return {}
        own = {name: np.asarray(value) for name, value in vars(self).items() if name not in ("leaves", "known")}
        own |= {"leaves": self.leaves} if self.leaves.any() else {}
        own |= {KNOWN + name: value.copy() for name, value in self.known.items()}
        return {PREFIX + name: value for name, value in own.items()}

    @classmethod
    def restored(cls, saved: Mapping[str, Any], clients: int) -> Flights:
        """Return what a checkpoint remembers; nobody has been sent out where it remembers nothing."""
        if PREFIX + "now" not in saved:
            return cls.none(clients)
        version, number, due = (saved[PREFIX + name].copy() for name in ("version", "number", "due"))
        leaves = np.zeros(clients, dtype=np.bool_)  # checkpoints of runs whose clients stay do not have it
        leaves |= saved.get(PREFIX + "leaves", leaves).astype(np.bool_)
        start = PREFIX + KNOWN
        known = {name.removeprefix(start): value.copy() for name, value in saved.items() if name.startswith(start)}
        return cls(version, number, due, leaves, float(saved[PREFIX + "now"]), int(saved[PREFIX + "drawn"]), known)

    def chosen(self, seed: int, rules: Participation, members: Ints, round: int) -> Ints:
        """Return who of the `members` is sent out now, with the state of this round, ascending ids."""
        places = rules.at_work(len(self.due)) - len(self.waiting)
        free = self.free(rules, members, round)
        if places >= len(free):
            return free
        self.drawn += 1
        return np.sort(keyed(seed, "dispatch", step=self.drawn).choice(free, places, replace=False))

    def free(self, rules: Participation, members: Ints, round: int) -> Ints:
        """Return which of the `members` may be sent out with the state of this round, if there is a place."""
        free = members[np.isnan(self.due[members])]
        if rules.most_per_version is not None:
            begun = np.where(self.version[free] == round, self.number[free] + 1, 0)
            free = free[begun < rules.most_per_version]
        if rules.dispatch == "reporter" and (self.version >= 0).any():
            free = free[self.version[free] >= 0]  # others have never begun, and do not now
        return free

    def leave(self, clients: Ints, round: int) -> None:
        """Send clients out with the state of a round; when they are due is still to be said."""
        self.number[clients] = np.where(self.version[clients] == round, self.number[clients] + 1, 0)
        self.version[clients], self.due[clients] = round, 0.0


class Queue:
    """The arrivals of a run in simulated time.

    Parameters
    ----------
    flights : Flights
        Where it begins; it is kept up to date, and is that of a round's end once the round is planned.
    """

    def __init__(self, run: Planner, flights: Flights) -> None:
        self.run, self.flights = run, flights
        self.rules = run.rules
        self.depth: Ints = np.ones(run.clients, dtype=np.int64)
        self.steps: Ints = run.visit_steps[0].copy() if self.rules.by_steps else self.depth.copy()
        self.seconds: Floats = np.full(run.clients, np.nan)
        there = flights.waiting  # how far those come who are at work follows from when they began
        for kind in np.unique(np.stack([flights.version[there], flights.number[there]]), axis=1).T:
            self._draw(there[(flights.version[there] == kind[0]) & (flights.number[there] == kind[1])])

    def plans(self, first: int) -> Iterator[Plan]:
        """Return the plan of each round from `first` on, without end.

        Raises
        ------
        RunError
            Where nobody ever arrives, or nothing ever counts.
        """
        return map(self._planned, count(first))

    def _planned(self, round: int) -> Plan:
        rules, flights, start = self.rules, self.flights, self.flights.now
        end = start + self.run.participation.closes_after(round, ())
        ended = dict[int, Fate]()
        if rules.stop_stale and rules.max_staleness is not None:
            stale = flights.waiting[round - flights.version[flights.waiting] > rules.max_staleness]
            flights.due[stale] = np.nan
            ended = dict.fromkeys(stale.tolist(), Fate.CANCELLED)
        self._send(round)
        came: list[Came] = []
        late: list[Came] = []  # that do not count, and are kept
        fruitless, full, stop = 0, False, end
        while not full:
            client = int(np.nanargmin(flights.due)) if len(flights.waiting) else -1
            due, comes = float(flights.due[client]) if client >= 0 else inf, self._comes(round)
            if min(due, comes) > stop * (1 + CLOSE):  # ends are sums of many deadlines
                flights.now = stop
                break
            if comes < due:
                flights.now = comes
                self._send(round)
                continue
            if due == inf:
                why = (
                    "every visit that is under way takes for ever" if client >= 0 else "nobody is there, or ever comes"
                )
                raise RunError(f"round {round}: nobody arrives any more: {why}")
            flights.now, flights.due[client] = due, np.nan
            version, number = int(flights.version[client]), int(flights.number[client])
            depth, steps = int(self.depth[client]), int(self.steps[client])
            left, lasted = bool(flights.leaves[client]), float(self.seconds[client])
            if not left and counts(self.run, rules, round - version, depth, steps):
                came.append((client, version, number, due, lasted, depth, steps))
                full, stop = over(self.run, rules, came, due, stop, due - start)
            else:
                ended[client] = Fate.LOST if left else Fate.LATE
                if self.run.algorithm.goes_on and not left:
                    late.append((client, version, number, due, lasted, self.run.nothing, steps))
                fruitless += 1
                check_fruitless(round, fruitless)
            if not full and due < stop * (1 - CLOSE):
                self._send(round)
        return planned(self.run, round, came + late, flights, start, end - start, ended)

    def _send(self, round: int) -> None:
        """Send clients out for all free places."""
        run, flights, members = self.run, self.flights, self.run.members
        if run.presence is not None:
            members = members[run.presence.at(flights.now).there[members]]
        chosen = flights.chosen(run.seed, self.rules, members, round)
        flights.leave(chosen, round)
        for number in np.unique(flights.number[chosen]).tolist():
            some = chosen[flights.number[chosen] == number]
            self._draw(some)
            lasts = np.minimum(self.seconds[some], self.rules.max_seconds or inf)
            flights.due[some] = flights.now + run.times.communication + lasts
        if run.presence is not None and run.availability.leave:
            ends = run.presence.ends[chosen]
            flights.leaves[chosen] = flights.due[chosen] > ends
            flights.due[chosen] = np.minimum(flights.due[chosen], ends)

    def _comes(self, round: int) -> float:
        """Return when the next client comes for whom there is a place; inf: never."""
        run, flights = self.run, self.flights
        if run.presence is None or len(flights.waiting) >= self.rules.at_work(run.clients):
            return inf
        return run.presence.at(flights.now).coming(flights.free(self.rules, run.members, round))

    def _draw(self, clients: Ints) -> None:
        """Say how long the visits of clients that begin alike take, and how far they come."""
        if not len(clients):
            return
        run, rules = self.run, self.rules
        attempt = self._attempt(clients)
        places = np.searchsorted(run.members, clients)
        seconds = run.times.seconds(attempt)
        self.seconds[clients] = seconds[places]
        if rules.max_seconds is not None:
            _, depth, steps = run.cut_short(attempt, seconds)
            self.depth[clients] = depth[places]
            if steps is not None:
                self.steps[clients] = steps[places]

    def _attempt(self, clients: Ints) -> Attempt:
        """Return that by which visits are drawn which begin alike: of all members, since models may draw for all."""
        run, flights = self.run, self.flights
        round_, number = int(flights.version[clients[0]]), int(flights.number[clients[0]])
        ends = self.rules.max_seconds or run.participation.closes_after(round_, ())
        return Attempt(run.seed, run.clients, run.work_fractions, round_, number, run.members, ends)


class Scheduled(Queue):
    """Arrivals where a rule says how many steps each client takes, and whose visits are merged when."""

    def __init__(self, run: Planner, flights: Flights) -> None:
        self.rule = run.rule(flights.known)
        self.waits: Floats = np.zeros(run.clients)
        super().__init__(run, flights)

    def _planned(self, round: int) -> Plan:
        flights, rule, start = self.flights, self.rule, self.flights.now
        self._depart(self.run.members[np.isnan(flights.due[self.run.members])], round)
        merged: Ints = np.zeros(0, dtype=np.int64)
        came: list[Came] = []  # what has missed its merge counts in the next one
        while not len(merged) and len(came) < len(self.run.members):
            client = int(np.nanargmin(flights.due))
            flights.now = min(float(flights.due[client]), rule.ends)
            if flights.due[client] == inf and not rule.there.any():
                raise RunError(f"round {round}: nobody arrives any more: every visit that is under way takes for ever")
            if flights.due[client] > rule.ends:
                merged = rule.close(flights.now)
                continue
            flights.due[client] = inf  # until it is merged
            waited = float(self.waits[client])
            took = self.run.times.communication + float(self.seconds[client]) - waited
            found = rule.arrive(client, flights.now, waited, took)
            if found is None:
                came.append(self._row(client))
                self._depart(np.array([client]), round)
            else:
                merged = found
        came += map(self._row, merged.tolist())
        flights.due[merged] = np.nan
        plan = planned(self.run, round, came, flights, start, inf, {})
        assert plan.arrivals is not None
        return replace(plan, arrivals=replace(plan.arrivals, rates=flights.known["rate"][plan.cohort]))

    def _row(self, client: int) -> Came:
        flights, known = self.flights, self.flights.known
        begun = int(flights.version[client]), int(flights.number[client])
        return client, *begun, float(known["came"][client]), float(self.seconds[client]), 1, int(known["steps"][client])

    def _depart(self, clients: Ints, round: int) -> None:
        """Send clients out with the state of a round."""
        flights = self.flights
        if not len(clients):
            return
        self.rule.depart(clients, flights.now)
        flights.leave(clients, round)
        for number in np.unique(flights.number[clients]).tolist():
            self._draw(clients[flights.number[clients] == number])
        flights.due[clients] = flights.now + self.run.times.communication + self.seconds[clients]

    def _draw(self, clients: Ints) -> None:
        run, attempt = self.run, self._attempt(clients)
        places = np.searchsorted(run.members, clients)
        share = (self.flights.known["steps"] / run.visit_steps[0])[run.members]
        self.seconds[clients] = run.times.lasting(attempt, share)[places]
        self.waits[clients] = run.times.waits(attempt)[places]


def counts(run: Planner, rules: Participation, staleness: int, depth: int, steps: int) -> bool:
    """Return whether a visit counts that has reached this layer, after so many steps where they may be fewer."""
    fresh = rules.max_staleness is None or staleness <= rules.max_staleness
    return fresh and depth <= len(run.work_fractions) and (steps > 0 or not rules.by_steps)


def over(
    run: Planner, rules: Participation, came: Sequence[Came], when: float, ends: float, filled: float
) -> tuple[bool, float]:
    """Return whether the step is over now that a visit has come, and when it `ends` at the latest, with its grace.

    It has taken so many seconds until it was `filled`, if it is.
    """
    full = enough(run, rules, came)
    if full and (rules.grace or rules.slack):
        steps = [visit[4] / max(1, int(run.visit_steps[0][visit[0]])) for visit in came if isfinite(visit[4])]
        grace = rules.goes_on_for(sum(steps) / max(1, len(steps)), filled, run.times.communication)
        return len(came) >= rules.slots(run.clients), min(ends, when + grace)
    return full, ends


def enough(run: Planner, rules: Participation, came: Sequence[Came]) -> bool:
    """Return whether the server takes its step with the visits that have come and count.

    Where every client is waited for, with B_i visits of client i of n: when (1/n Σ 1/B_i)⁻¹ ≥ buffer/n.
    """
    if rules.buffer is None:
        return False
    if not rules.every_client:
        return len(came) >= rules.buffer
    visits, clients = np.unique([visit[0] for visit in came], return_counts=True)[1], len(run.members)
    return len(visits) == clients and bool(rules.buffer * (1 / visits).sum() <= clients**2 * (1 + CLOSE))


def check_fruitless(round: int, visits: int) -> None:
    """Raise RunError where so many visits of a round have been in vain that it will never end."""
    if visits > MOST_FRUITLESS:
        hint = "did you mean a larger participation.max_seconds or participation.max_staleness?"
        raise RunError(f"round {round}: given up after {MOST_FRUITLESS} visits of which nothing counted; {hint}")


def planned(
    run: Planner,
    round: int,
    came: list[Came],
    flights: Flights,
    start: float,
    closes_after: float,
    ended: Mapping[int, Fate],
) -> Plan:
    """Return the round that these visits have ended, some of which may not count: it began at `start`, and is over now.

    So many seconds later it would have in any case; inf: it would not. Others have `ended` in it too.
    """
    layers, waiting = len(run.work_fractions), flights.waiting
    table = np.array(sorted(came, key=lambda each: (each[0], each[3])), dtype=np.float64).reshape(-1, 7).T
    cohort, versions, numbers, depth, steps = (table[row].astype(np.int64) for row in (0, 1, 2, 5, 6))
    times, seconds = table[3], table[4]
    rules = run.participation
    factors = run.staleness.factors(round - versions, rules.at_work(run.clients)) * rules.evened(cohort)
    return Plan.of_arrivals(
        *(layers, round, cohort, seconds, depth, flights.now - start),
        arrivals=Arrivals(versions, numbers, times, factors, waiting, flights.version[waiting]),
        closes_after=closes_after if closes_after < inf else np.nan,
        steps=steps if rules.sets_steps else None,
        ended=ended,
    )
