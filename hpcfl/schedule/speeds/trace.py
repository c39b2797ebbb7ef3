"""Rounds as an earlier run recorded them: who was invited, how far each visit came, when each round closed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import AfterValidator

from hpcfl.base.errors import RunError, UsageError, refusal
from hpcfl.base.types import Computing, Floats, Ints
from hpcfl.schedule.counterfactual import Counterfactual
from hpcfl.schedule.participation import Participation, Staleness
from hpcfl.schedule.plan import Arrivals, Attempt, Fate, Plan
from hpcfl.schedule.speeds.base import CLOSE, Costs, Speed
from hpcfl.schedule.tape import Tape


class Trace(Speed):
    """What an earlier run recorded, wall-clock or simulated, replayed in simulated time.

    Cohorts, depths, seconds, closing times, repeats and who is held out are the recorded ones, whatever
    ``[participation]`` says; of that only `partial` is obeyed. Probabilities, and what work is counted by (`costs`),
    are those of the recorded config.
    """

    model: Literal["trace"] = "trace"
    closing: Literal["recorded", "rule"] = "recorded"
    """Which rounds. ``recorded``: those of the run. ``rule``: those of this config's method, participation and
    deadline, by the seconds that visits took in the run; what is not known of these is drawn."""
    run: Annotated[str, AfterValidator(lambda run: str(Path(run).absolute()))]  # a resumption may start elsewhere
    """The run folder that is replayed; one that goes on counts with its rounds so far."""
    replays: ClassVar[bool] = True

    @classmethod
    def from_table(cls, table: Any, where: str) -> Speed:  # type: ignore[override]
        """Return the section in a table: with ``closing = "rule"`` another class."""
        if isinstance(table, dict) and table.get("closing") == "rule":
            return Counterfactual.from_table(table, where)
        return super().from_table(table, where)

    @cached_property
    def tape(self) -> Tape:
        return Tape.read(self.run)

    @property
    def chunk(self) -> int | None:  # type: ignore[override]
        return self.tape.chunk

    @property
    def computing(self) -> Computing | None:  # type: ignore[override]
        return self.tape.computing

    def check(self, participation: Participation, clock: str = "simulated") -> None:
        if clock != "simulated":
            raise refusal("speed.model = 'trace' replays in simulated time", "clock = 'simulated'", clock)
        held, then = participation.hold_out, self.rules(participation).hold_out
        if held and held != then:
            raise refusal("participation.hold_out", f"that of speed.run = '{self.run}'", held, then)

    def covers(self, rounds: int, clients: int, layers: int | None = None) -> None:
        """Refuse other clients or layers, fewer rounds (UsageError), and visits to older states (RunError)."""
        tape, (there_rounds, there_clients) = self.tape, self.tape.columns["cohort"].shape
        for name, there, wanted in (("clients", there_clients, clients), ("rounds", there_rounds, rounds)):
            if there < wanted or (there > wanted and name == "clients"):
                hint = f"did you mean {name} = {there}?"
                raise UsageError(f"speed.run: '{self.run}' recorded {there} {name}, got {wanted}; {hint}")
        if layers not in (None, tape.layers):
            here = f"the model of this config has {layers}"
            raise UsageError(f"speed.run: '{self.run}' recorded {tape.layers} layers, {here}")
        cohort, served = tape.columns["cohort"][:rounds] == 1, tape.columns["version"][:rounds]
        stale = np.flatnonzero((cohort & (served != np.arange(rounds)[:, None])).any(1))
        if len(stale) and not tape.arrivals:
            what = f"visits to older states in round {stale[0]}, which no replay can"
            raise RunError(f"speed.run: '{self.run}' used {what}")

    def known(self, clock: str) -> bool:
        return not self.tape.worlds and self.tape.config.speed.known(self.tape.config.clock)

    def rules(self, participation: Participation) -> Participation:
        """Return the recorded rules, with this config's `partial`."""
        then = self.tape.config.speed.rules(self.tape.config.participation)
        return then.model_copy(update={"partial": participation.partial})

    def counts(self) -> Costs:
        return self.tape.config.speed.counts()

    def recorded(self, attempt: Attempt) -> Attempt:
        tape, given = self.tape, float(self.tape.columns["deadline"][attempt.round])
        then = replace(
            attempt,
            seed=tape.config.seed,
            number=int(tape.columns["repeats"][attempt.round]),
            cohort=np.flatnonzero(tape.columns["cohort"][attempt.round] == 1),
            closes_after=np.inf if np.isnan(given) else given,
            quorum=tape.config.participation.enough,
            weights=None,
            grace=tape.config.participation.grace or 0.0,
        )
        return tape.config.speed.recorded(then)  # it may have been a replay itself

    def replayed(self, plan: Plan, whole: bool, steps: Ints | None) -> Plan:
        columns, own = self.tape.columns, (plan.round, plan.cohort)
        depth, duration = columns["depth"][own], float(columns["round_seconds"][plan.round])
        if whole:
            depth = np.where(depth > 1, plan.layers + 1, depth)
        if "steps" not in columns:
            steps = None if steps is None else np.where(depth == 1, steps, 0)
        elif steps is not None:
            steps = columns["steps"][own]
        else:  # what visits had done that were cut short at a step are no layers
            end = duration - self.tape.config.speed.communication
            depth = np.where(columns["visit_seconds"][own] <= end * (1 + CLOSE), depth, plan.layers + 1)
        return replace(plan, depth=depth, duration=duration, steps=steps, ended=self._ended(plan.round, Fate.LOST))

    def _ended(self, round: int, *kinds: Fate) -> dict[int, Fate]:
        """Return whose visits ended in one of these ways, as far as it was recorded."""
        fates = enumerate(self.tape.columns["fate"][round].tolist() if "fate" in self.tape.columns else ())
        return {client: Fate(fate) for client, fate in fates if fate in kinds}

    def arrived(self, first: int, staleness: Staleness, whole: bool, by_steps: bool) -> Iterator[Plan] | None:
        if not self.tape.arrivals:
            return None
        rounds = range(first, len(self.tape.columns["cohort"]))
        return (self._round(round_, staleness, whole, by_steps) for round_ in rounds)

    def slots(self) -> int | None:
        return self.tape.arrivals["client"].shape[1] if self.tape.arrivals else None

    def _round(self, round: int, staleness: Staleness, whole: bool, by_steps: bool) -> Plan:
        """Return a round that arrivals ended; who is still at work then is known of who has arrived later."""
        tape = self.tape
        there = np.flatnonzero(tape.arrivals["client"][round] >= 0)
        order = there[np.argsort(tape.arrivals["client"][round][there], kind="stable")]
        now = {name: values[round][order] for name, values in tape.arrivals.items()}
        cohort, depth, steps = now["client"], now["depth"], now.get("steps")
        rules = tape.config.speed.rules(tape.config.participation)
        if whole and steps is None:
            depth = np.where(depth > 1, tape.layers + 1, depth)
        later, version = (tape.arrivals[name][round + 1 :].ravel() for name in ("client", "version"))
        begun = (later >= 0) & (version <= round)
        waiting, places = np.unique(later[begun], return_index=True)
        others = np.setdiff1d(np.flatnonzero(tape.columns["cohort"][round] == 1), np.union1d(cohort, waiting))
        served = np.concatenate([version[begun][places], np.full(len(others), -1)])
        by_id = np.argsort(whom := np.concatenate([waiting, others]))
        at_work = rules.at_work(tape.columns["cohort"].shape[1])
        factors = staleness.factors(round - now["version"], at_work) * rules.evened(cohort)
        return Plan.of_arrivals(
            *(tape.layers, round, cohort, now["visit_seconds"], depth, float(tape.columns["round_seconds"][round])),
            arrivals=Arrivals(
                *(now["version"], now["number"], now["seconds"], factors),
                *(whom[by_id], served[by_id], now.get("rate")),
            ),
            closes_after=float(tape.columns["deadline"][round]),
            steps=steps if by_steps else None,
            ended=self._ended(round, Fate.LATE, Fate.LOST, Fate.CANCELLED),
        )

    def paces(self, seed: int, clients: int) -> Floats:
        return self.tape.config.speed.paces(self.tape.config.seed, clients)

    def order(self, seed: int, clients: int, members: Ints, invited: int) -> Floats:
        return self.tape.config.speed.order(self.tape.config.seed, clients, members, invited)

    def seconds(self, attempt: Attempt) -> Floats:
        seconds: Floats = self.tape.columns["visit_seconds"][attempt.round, attempt.cohort]
        return seconds

    def arrival(self, attempt: Attempt) -> Floats:
        return self.tape.config.speed.arrival(attempt)

    def reach(self, attempt: Attempt, share: Floats) -> Floats:
        return self.tape.config.speed.reach(attempt, share)

    def miss_probability(self, attempt: Attempt) -> Floats:
        return self.tape.config.speed.miss_probability(attempt)
