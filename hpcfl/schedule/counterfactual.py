"""What visits would take under other rules or by another method: the seconds of an earlier run, and draws for the rest.

What a run by the wall clock has cut short, or did not ask for, is drawn from a law that is fitted to what it has seen:
log-normal, with a mean of each client's logarithm about a common one. A visit that was cut short is drawn from what is
longer than its round. Of a run in simulated time everything is known: its own speed model says the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import AfterValidator

from hpcfl.base.errors import UsageError, no_meaning, refusal
from hpcfl.base.lazy import Lazy
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats, Ints
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.plan import Attempt
from hpcfl.schedule.speeds.base import Costs, Speed
from hpcfl.schedule.tape import Tape

special = Lazy("scipy.special")
STEPS = 200
"""Of the fit, which is there long before."""


@dataclass(frozen=True)
class Fitted:
    """Log seconds: normal, about a mean of each client's own, float64 [clients]."""

    means: Floats
    spread: float

    @classmethod
    def to(cls, logs: Floats, least: Floats) -> Fitted:
        """Fit known log seconds, float64 [rounds, clients], NaN where they are not; there `least` may say a bound.

        By expectation and maximisation, the clients' means being normal themselves.
        """
        known, cut = np.isfinite(logs), np.isfinite(least) & ~np.isfinite(logs)
        counts = (known | cut).sum(0)
        seen = np.where(known, logs, np.where(cut, least, 0.0))
        center = float(seen.sum() / counts.sum())
        means = np.where(counts, seen.sum(0) / np.maximum(counts, 1), center)
        spread, between = 0.1, 0.1
        for _ in range(STEPS):
            a = (np.where(cut, least, 0.0) - means) / spread
            hazard = np.exp(-(a**2) / 2 - special.log_ndtr(-a)) / np.sqrt(2 * np.pi)
            filled = np.where(known, np.where(known, logs, 0.0), means + spread * hazard)
            square = np.where(cut, spread**2 * (1 + a * hazard - hazard**2), 0.0)
            there = known | cut
            precision = counts / spread**2 + 1 / between**2
            means = ((filled * there).sum(0) / spread**2 + center / between**2) / precision
            deviations = np.where(there, (filled - means) ** 2 + square + 1 / precision, 0.0)
            spread = max(float(np.sqrt(deviations.sum() / counts.sum())), 1e-6)
            center = float(means[counts > 0].mean())
            between = float(np.sqrt(((means - center) ** 2 + 1 / precision)[counts > 0].mean()))
            between = max(between, spread / 10)  # below that the means would hardly move from step to step
        return cls(means, spread)


class Counterfactual(Speed):
    """The seconds of an earlier run under this config's own rules: ``model = "trace"`` with ``closing = "rule"``."""

    model: Literal["trace"] = "trace"
    closing: Literal["rule"] = "rule"
    """The rounds are those of this config."""
    run: Annotated[str, AfterValidator(lambda run: str(Path(run).absolute()))]
    """The run folder whose seconds are taken."""
    slows: ClassVar[bool] = True

    @cached_property
    def tape(self) -> Tape:
        return Tape.read(self.run)

    @property
    def simulated(self) -> bool:
        """Whether the seconds of the run were drawn, so that its speed model knows all of them."""
        return self.tape.config.clock == "simulated"

    def check(self, participation: Participation, clock: str = "simulated") -> None:
        if self.tape.config.speed.needs_end:
            why = "times follow from the deadline, and are none under another rule"
            raise UsageError(f"speed.run: in '{self.run}' {why}; did you mean closing = 'recorded'?")
        then = self.tape.config.speed
        if then.replays:
            raise UsageError(f"speed.run: '{self.run}' is a replay itself: expected the run that it replays")
        if self.tape.config.participation.scheduled:
            why = "says how many steps each visit took, and what whole ones take is not known"
            raise UsageError(f"speed.run: '{self.run}' {why}; did you mean closing = 'recorded'?")
        if self.costs != type(self).model_fields["costs"].default:
            raise no_meaning("speed.costs", self.costs, "speed.model = 'trace', which has those of the recorded run")
        if self.simulated and then.per != self.per:
            raise refusal(
                f"speed.per: seconds of '{self.run}'", f"'{then.per}', as recorded", self.per, f"'{then.per}'"
            )
        sections = [name for name in self.tape.worlds if name.startswith("[")]
        if sections and not self.simulated:
            why = f"has {', '.join(sections)}, and what of its seconds by the wall clock is computing is not known"
            raise UsageError(f"speed.run: '{self.run}' {why}; did you mean closing = 'recorded'?")

    def covers(self, rounds: int, clients: int, layers: int | None = None) -> None:
        there = self.tape.columns["cohort"].shape[1]
        if there != clients:
            raise UsageError(f"speed.run: '{self.run}' recorded {there} clients, got {clients}; did you mean {there}?")
        if self.simulated:
            self.tape.config.speed.covers(rounds, clients, layers)
        if not self.simulated and not np.isfinite(self.seen).any():
            raise UsageError(f"speed.run: '{self.run}' has no visit that was complete")

    def counts(self) -> Costs:
        return self.tape.config.speed.counts()

    @cached_property
    def seen(self) -> Floats:
        """Seconds of whole visits by round and client; NaN where they are not known."""
        columns, arrivals = self.tape.columns, self.tape.arrivals
        asked = columns["cohort"] == 1
        if arrivals:
            asked = np.zeros(asked.shape)
            first = (arrivals["client"] >= 0) & (arrivals["number"] == 0)
            place = arrivals["version"][first], arrivals["client"][first]
            asked[place] = arrivals["visit_seconds"][first]
            return np.where(asked > 0, asked, np.nan)
        seconds = columns["visit_seconds"]
        return np.where(asked & np.isfinite(seconds) & (seconds > 0), seconds, np.nan)

    @cached_property
    def least(self) -> Floats:
        """What visits have taken at least that were cut short, by round and client; else NaN."""
        asked = (self.tape.columns["cohort"] == 1) & np.isnan(self.seen)
        if self.tape.arrivals:
            return np.full(asked.shape, np.nan)
        columns = self.tape.columns  # the seconds of void attempts are among those of a round
        ends = np.where(columns["repeats"] > 0, columns["deadline"], columns["round_seconds"])
        return np.where(asked, ends[:, None], np.nan)

    @cached_property
    def fitted(self) -> Fitted:
        """The law of what is not known."""
        return Fitted.to(np.log(self.seen), np.log(self.least))

    def paces(self, seed: int, clients: int) -> Floats:
        if self.simulated:
            return self.tape.config.speed.paces(self.tape.config.seed, clients)
        return np.exp(self.fitted.means + self.fitted.spread**2 / 2)

    def seconds(self, attempt: Attempt) -> Floats:
        if self.simulated:
            return self.tape.config.speed.seconds(self._then(attempt))
        place, cohort, law = min(attempt.round, len(self.seen) - 1), attempt.cohort, self.fitted
        u = keyed(attempt.seed, "time", attempt.round, step=attempt.number).random(attempt.clients)[cohort]
        least = (np.log(self.least[place, cohort]) - law.means[cohort]) / law.spread
        is_it = attempt.round == place and attempt.number == self.tape.columns["repeats"][place]
        beyond = special.ndtr(-np.where(np.isnan(least) | (not is_it), -np.inf, least))  # chance of what is longer
        drawn = np.exp(law.means[cohort] - law.spread * special.ndtri(u * beyond))
        known = self.seen[place, cohort]
        return np.asarray(np.where(np.isfinite(known) & is_it, known, drawn))

    def arrival(self, attempt: Attempt) -> Floats:
        if self.simulated:
            return self.tape.config.speed.arrival(self._then(attempt))
        return super().arrival(attempt)

    def miss_probability(self, attempt: Attempt) -> Floats:
        if self.simulated:
            return self.tape.config.speed.miss_probability(self._then(attempt))
        return super().miss_probability(attempt)

    def reach(self, attempt: Attempt, share: Floats) -> Floats:
        if self.simulated:
            return self.tape.config.speed.reach(self._then(attempt), share)
        return super().reach(attempt, share)

    def order(self, seed: int, clients: int, members: Ints, invited: int) -> Floats:
        if self.simulated:
            return self.tape.config.speed.order(self.tape.config.seed, clients, members, invited)
        return super().order(seed, clients, members, invited)

    @property
    def redrawn(self) -> bool:
        return not self.simulated or self.tape.config.speed.redrawn

    def in_time(self, attempt: Attempt, limits: Floats) -> Floats:
        if self.simulated:
            return self.tape.config.speed.in_time(self._then(attempt), limits)
        with np.errstate(divide="ignore"):
            least = np.log(np.maximum(0.0, limits)) - self.fitted.means[attempt.cohort, None]
        return np.asarray(special.ndtr(least / self.fitted.spread))

    def _then(self, attempt: Attempt) -> Attempt:
        return replace(attempt, seed=self.tape.config.seed)
