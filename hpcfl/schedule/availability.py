"""Who is there: clients come and go, in intervals that laws draw, that recur every day, or that a table has.

All is a function of the seed and of the seconds since the start of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError
from hpcfl.base.lazy import Lazy
from hpcfl.base.rng import uniforms
from hpcfl.base.types import Floats, Ints
from hpcfl.data.formats.csv_file import Columns, read_csv
from hpcfl.schedule.speeds import speed_class
from hpcfl.schedule.speeds.laws import Law, weibull_of

special = Lazy("scipy.special")
Bools = NDArray[np.bool_]
Following = Callable[[Ints, Ints, Bools, Floats], Floats]
"""Of clients, the number of the interval that each begins, whether it is there in it, and since when: until when."""
COLUMNS = "client", "start", "end"
DAY = 86_400.0


@dataclass(eq=False)
class Presence:
    """Who is there as time goes on; what has gone by is reckoned once, as long as nobody asks for what was before.

    Attributes
    ----------
    there : bool [clients]
        Who is there at the last second that was asked for.
    ends : float64 [clients]
        When that changes, in seconds since the start of the run; inf: never.
    """

    first: tuple[Bools, Floats]
    following: Following
    scale: float = 1.0
    there: Bools = field(init=False)
    ends: Floats = field(init=False)
    _now: float = inf

    def at(self, seconds: float) -> Presence:
        """Return this, as it is so many seconds after the start of the run."""
        if seconds < self._now:
            self.there, self._numbers = self.first[0].copy(), np.zeros(len(self.first[0]), dtype=np.int64)
            self.ends = self.first[1] * self.scale
        self._now = seconds
        while len(late := np.flatnonzero(self.ends <= seconds)):
            self.there[late] = ~self.there[late]
            self._numbers[late] += 1
            since = self.ends[late] / self.scale
            self.ends[late] = self.following(late, self._numbers[late], self.there[late], since) * self.scale
        return self

    def coming(self, clients: Ints) -> float:
        """Return when the next of some clients comes who are not there; inf: never."""
        return float(self.ends[clients[~self.there[clients]]].min(initial=inf))


class Availability(ConfigBase):
    """Who can be invited to a round, and who leaves in the middle of a visit."""

    model: Literal["always", "on-off", "diurnal", "table"] = "always"
    """``always``: everybody is there. ``on-off``: clients come and go by a law. ``diurnal``: each is there for the same
    part of every day. ``table``: a file says who is there when."""
    leaves: Literal["lost", "partial", "stays"] = "lost"
    """What becomes of a visit whose client leaves. ``lost``: nothing counts. ``partial``: what it has sent counts as
    ``participation.partial`` says. ``stays``: nobody leaves during a visit."""
    law: Literal["lognormal", "gamma", "weibull"] = "lognormal"
    """The law of the intervals (``on-off``); ``gamma`` with a spread of 1 is exponential."""
    on: float = Field(3600.0, gt=0)
    """Mean seconds for which a client is there (``on-off``)."""
    off: float = Field(3600.0, gt=0)
    """Mean seconds for which it is not: it is there for on/(on + off) of the time (``on-off``)."""
    on_spread: float = Field(1.0, gt=0)
    """Spread of the seconds for which a client is there, as in ``[speed]`` (``on-off``)."""
    off_spread: float = Field(1.0, gt=0)
    """Spread of the seconds for which it is not (``on-off``)."""
    rhythm: float = Field(0.0, ge=0, lt=1)
    """How much faster clients come, and more slowly go, at noon of each day than on average; the other way round at its
    beginning (``on-off``)."""
    period: float | None = Field(None, gt=0)
    """Seconds of a day, by default 86,400; a ``table`` begins anew after so many, by default never."""
    share: float = Field(0.5, gt=0, lt=1)
    """Part of the day for which a client is there (``diurnal``)."""
    phases: float = Field(1.0, ge=0, le=1)
    """How far the clients' days lie apart, as a part of a day: 0 all begin at once, 1 anywhere (``diurnal``)."""
    file: str | None = None
    """A CSV file with columns ``client,start,end``, the seconds from and until which a client is there (``table``,
    which needs it). Whom it does not have is never there."""
    paths: ClassVar[tuple[str, ...]] = ("file",)

    @property
    def leave(self) -> bool:
        """Whether clients leave in the middle of a visit."""
        return self.model != "always" and self.leaves != "stays"

    def check(self, clients: int) -> None:
        """Raise UsageError where keys do not go together, or the file is not that of so many clients."""
        only: dict[str, Any] = dict.fromkeys(("law", "on", "off", "on_spread", "off_spread", "rhythm"), "on-off")
        only |= {"share": "diurnal", "phases": "diurnal", "file": "table"}
        only |= dict.fromkeys(("leaves", "period"), ("on-off", "diurnal", "table"))
        self.check_only_for("availability.", "model", only)
        if self.model != "table":
            return
        if self.file is None:
            raise UsageError("availability.file: model = 'table' needs it")
        client, start, end = (self.columns[name] for name in COLUMNS)
        if not len(client):
            raise UsageError(f"availability.file: {self.file}: expected an interval at least, got none")
        most = inf if self.period is None else self.period
        for wrong, expected in (
            ((client != np.rint(client)) | (client < 0) | (client >= clients), f"a client from 0 to {clients - 1}"),
            (~(start >= 0), "a start of 0 or more"),
            (~(end > start), "an end after the start"),
            (end > most, f"an end within availability.period = {most:g}"),
        ):
            for row in np.flatnonzero(wrong)[:1]:
                raise UsageError(f"{self._row(row)}: expected {expected}, got {self._said(row)}")
        order = np.lexsort((start, client))
        over = (client[order][1:] == client[order][:-1]) & (start[order][1:] < end[order][:-1])
        for place in np.flatnonzero(over)[:1]:
            one, other = order[place : place + 2]
            raise UsageError(f"{self._row(other)}: {self._said(other)} overlaps {self._said(one)} of line {one + 2}")

    def _row(self, row: int) -> str:
        return f"availability.file: {self.file}: line {row + 2}"

    def _said(self, row: int) -> str:
        return ",".join(f"{self.columns[name][row]:g}" for name in COLUMNS)

    @cached_property
    def columns(self) -> Columns:
        """What the file holds, float64 [intervals] each."""
        return read_csv("availability.file", Path(str(self.file)), [COLUMNS])

    def presence(self, seed: int, clients: int, scale: float) -> Presence | None:
        """Return who of the `clients` is there when, all seconds multiplied by `scale`; None: everybody always."""
        if self.model == "on-off":
            return Presence(*self._on_off(seed, clients), scale)
        if self.model == "diurnal":
            return Presence(*self._diurnal(seed, clients), scale)
        return Presence(*self._tabled(clients), scale) if self.model == "table" else None

    def _on_off(self, seed: int, clients: int) -> tuple[tuple[Bools, Floats], Following]:
        """Return alternating intervals that look alike at any time, the start of the run among them."""
        everybody = np.arange(clients)
        law = speed_class(self.law).from_table({"model": self.law}, "availability")
        assert isinstance(law, Law)

        def following(clients: Ints, numbers: Ints, there: Bools, since: Floats) -> Floats:
            u, lasts = uniforms("interval", seed, clients, numbers), np.empty(len(clients))
            lasts[there] = self.on * law.factor(u[there], self.on_spread)
            lasts[~there] = self.off * law.factor(u[~there], self.off_spread)
            return self._later(since, lasts, there)

        there = uniforms("there", seed, everybody) < self.on / (self.on + self.off)
        u, passed = uniforms("interval", seed, everybody, 0), uniforms("passed", seed, everybody)
        whole = np.where(there, self.on * self._long(u, self.on_spread), self.off * self._long(u, self.off_spread))
        return (there, self._later(np.zeros(clients), (1 - passed) * whole, there)), following

    def _later(self, since: Floats, lasts: Floats, there: Bools) -> Floats:
        """Return when intervals end that last so long on average over the hours of a day."""
        if not self.rhythm:
            return since + lasts
        day = self._day
        # an interval ends when ∫ (1 ± r cos 2πt/day) dt is what it lasts: + where they are there, - where they are not
        sway = np.where(there, 1.0, -1.0) * self.rhythm * day / (2 * np.pi)
        low, high = since + lasts / (1 + self.rhythm), since + lasts / (1 - self.rhythm)
        for _ in range(60):
            middle = (low + high) / 2
            behind = middle - since + sway * (np.sin(2 * np.pi * middle / day) - np.sin(2 * np.pi * since / day))
            low, high = np.where(behind < lasts, middle, low), np.where(behind < lasts, high, middle)
        return np.asarray(high)

    @property
    def _day(self) -> float:
        return DAY if self.period is None else self.period

    def _long(self, survival: Floats, spread: float) -> Floats:
        """Return what is exceeded with these chances by the interval that a moment falls into: long ones hold more."""
        if self.law == "lognormal":
            return np.asarray(np.exp(spread**2 / 2 - spread * special.ndtri(survival)))
        if self.law == "gamma":
            return np.asarray(special.gammainccinv(spread**-2 + 1, survival) * spread**2)
        shape, scale = weibull_of(spread)
        return np.asarray(scale * special.gammainccinv(1 + 1 / shape, survival) ** (1 / shape))

    def _diurnal(self, seed: int, clients: int) -> tuple[tuple[Bools, Floats], Following]:
        day = self._day
        begins = self.phases * day * uniforms("phase", seed, np.arange(clients))  # its day, within the first one
        on = self.share * day
        yesterday = begins - day + on  # until when it is there of the day before
        there = (yesterday > 0) | (begins == 0)
        ends = np.where(begins == 0, on, np.where(yesterday > 0, yesterday, begins))

        def following(clients: Ints, numbers: Ints, there: Bools, since: Floats) -> Floats:
            return since + np.where(there, on, day - on)

        return (there, ends), following

    def _tabled(self, clients: int) -> tuple[tuple[Bools, Floats], Following]:
        rows = [self.columns[name] for name in COLUMNS]
        order = np.lexsort((rows[1], rows[0]))
        client, starts, ends = (row[order] for row in rows)
        changes = [self._changes(starts[client == each], ends[client == each]) for each in range(clients)]
        counts = np.array([len(each) for each in changes])
        offsets, flat = np.cumsum(counts) - counts, np.append(np.concatenate(changes), inf)

        def nth(clients: Ints, numbers: Ints) -> Floats:
            count = np.maximum(counts[clients], 1)
            times, place = np.divmod(numbers, count)
            value = np.where(counts[clients] > 0, flat[np.minimum(offsets[clients] + place, len(flat) - 1)], inf)
            if self.period is None:
                return np.where(times > 0, inf, value)
            return np.asarray(value + times * self.period)

        there = np.zeros(clients, dtype=bool)
        there[client[starts == 0].astype(np.int64)] = True
        return (there, nth(np.arange(clients), np.zeros(clients, dtype=np.int64))), lambda some, numbers, *_: nth(
            some, numbers
        )

    def _changes(self, starts: Floats, ends: Floats) -> Floats:
        """Return when a client comes or goes, of a whole period; what touches is one interval."""
        found = np.stack([starts, ends], 1).ravel()
        apart = np.append(True, np.repeat(starts[1:] != ends[:-1], 2))
        found = found[np.append(apart, True)] if len(found) else found
        if not len(found) or found[0]:
            return found
        if self.period is None:
            return found[1:]
        return found[1:-1] if found[-1] == self.period else np.append(found[1:], self.period)
