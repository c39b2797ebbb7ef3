"""Guarding the shared state: messages that are not finite, or far too large, count for nothing.

And a run that learns nothing does not end as if it had, see `Watch`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import hypot, inf, isfinite, isnan, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hpcfl.base.config import ConfigBase
from hpcfl.base.device_copy import on_host
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.types import Floats, Ints, State
from hpcfl.sums.message import Layers, Layout, Message

Part = tuple[str, Tensor, Tensor]
"""A block as it is sent: name, value and weight."""

WINDOW = 10  # rounds whose accepted messages say what a usual norm is
GROWTH = 1e3  # in one round no norm of a state that still learns rises so; networks of ReLUs die before they overflow
METRIC = "loss"  # the block that is no part of a message's norm, and the last to name where others are not finite too
NOT_FINITE, TOO_LARGE = 1, 2
SMALL = 1e18  # its square is finite in float32
IN_A_ROW = 3  # evaluations that show the same, before it is taken for what it seems
VOID_ROUNDS = 10  # in a row, before they are told of
GUESSING, LEARNT = 0.99, 0.9  # of the loss of guessing: from here on it is that, below here it was better
WARNINGS = ("void", "test-loss", "guessing")  # kinds of events
REASONS = {NOT_FINITE: "is not finite", TOO_LARGE: "has a norm beyond guard.max_norm"}
NO_GROUP = -1


class Guard(ConfigBase):
    """Which messages count for nothing, and when that ends the run.

    What is not finite, or so large that its square is not, never counts: of methods that send layers one by one the
    layer and all below it, else the whole visit. The client's personal state does not advance then, and nobody takes
    its place in the round.
    """

    max_norm: float | None = Field(None, gt=0)
    """Largest norm at which messages count: so many times the median Euclidean norm of those accepted in the last 10
    rounds (of the layer, where layers are sent one by one). By default all count."""

    most: float = Field(0.5, ge=0, le=1)
    """A round in which more than this share of the visits that arrived is rejected ends the run: it has diverged."""


@dataclass(frozen=True)
class Rejection:
    """What of a visit was rejected: the first layer that counts nevertheless (L + 1: none), by which group, and why."""

    depth: int
    group: int
    reason: int


class Norms:
    """Norms of the messages accepted in the last rounds, each [visits, units]: of layers or of whole visits, 0: not."""

    def __init__(self, rounds: Iterable[Floats] = ()) -> None:
        self.rounds: deque[Floats] = deque(rounds, maxlen=WINDOW)

    def limits(self, factor: float, units: int) -> Floats:
        """Return `factor` times the median of each unit, float64 [units]; inf where nothing is known yet."""
        known = np.concatenate([np.empty((0, units)), *self.rounds]).T
        return np.array([factor * np.median(unit[unit > 0]) if unit.any() else np.inf for unit in known])

    def saw(self, table: Floats) -> None:
        """Take note of a round's norms, [clients, units]; clients whose messages did not count have zeros."""
        if table.size:
            self.rounds.append(table[table.any(1)])

    def saved(self) -> dict[str, Floats | Ints]:
        if not self.rounds:
            return {}
        return {"norms": np.concatenate(self.rounds), "norm_counts": np.array([len(each) for each in self.rounds])}

    @classmethod
    def restored(cls, saved: Mapping[str, NDArray[Any]]) -> Norms:
        return cls(np.split(saved["norms"], np.cumsum(saved["norm_counts"])[:-1])) if "norms" in saved else cls()


class Sieve:
    """Takes out of the messages of so many visits (`rows`) what must not count, before it is summed.

    A visit counts as a `whole` or not at all; else each group of the layout is judged by itself. `limits` [units] are
    the largest norms; None: any finite norm will do.
    """

    def __init__(self, rows: int, layout: Layout, whole: bool, limits: Floats | None = None) -> None:
        self.group = {name: number for number, blocks in enumerate(layout) for name in blocks}
        self.beside = {METRIC, *(name for blocks in layout for name, block in blocks.items() if block.mask)}
        self.whole, self.limits = whole, limits
        self.first: Ints = np.full(rows, NO_GROUP)  # the group by which each visit was rejected
        self.reason: Ints = np.zeros(rows, dtype=np.int64)  # NOT_FINITE, TOO_LARGE, or 0
        self.lengths: dict[str, Floats] = {}  # of the rows of each block that was looked at, 0 of what was rejected
        # norms of what was accepted; 0 elsewhere
        self.norms: Floats = np.zeros((rows, 0 if limits is None else len(limits)))

    def through(self, work: Generator[Message, None, State]) -> Generator[Message, None, State]:
        """Yield what `work` yields, what was rejected being 0 with weight 0; return what it returns.

        What counts together is held until all of it is there.
        """
        held: list[Part] = []
        lazy = False  # looking at a message waits for the device that has it: once, when all are there
        while True:
            try:
                message = next(work)
            except StopIteration as end:
                yield from self._released(held)
                state: State = end.value
                return state
            for name, (value, weight) in message.items():
                lazy = lazy or value.device.type != "cpu"
                if held and not lazy and self._unit(name) != self._unit(held[0][0]):
                    yield from self._released(held)
                    held = []
                held.append((name, value, weight))

    def _unit(self, name: str) -> int:
        return 0 if self.whole else self.group[name]

    def _released(self, held: Sequence[Part]) -> Generator[Message, None, None]:
        if self.limits is not None or not small(value for _, value, _ in held):
            sizes = lengths([(value, len(weight)) for _, value, weight in held])
            for _, unit in groupby(zip(held, sizes), lambda pair: self._unit(pair[0][0])):
                self._judge(*zip(*unit))
            self.lengths |= {
                name: np.where(self.first[: len(each)] == NO_GROUP, each, 0.0) for (name, *_), each in zip(held, sizes)
            }
        clean = not self.reason.any()
        for name, value, weight in held:
            bad = self.first[: len(weight)] != NO_GROUP
            yield {name: (value, weight) if clean or not bad.any() else without(value, weight, bad)}

    def judge(self, held: Sequence[Part]) -> None:
        """Judge what counts together: blocks of one group, or of the whole visit."""
        self._judge(held, lengths([(value, len(weight)) for _, value, weight in held]))

    def _judge(self, held: Sequence[Part], lengths: Sequence[Floats]) -> None:
        for (name, _, _), sizes in sorted(zip(held, lengths), key=lambda pair: pair[0][0] == METRIC):
            self._reject(~np.isfinite(sizes), self.group[name], NOT_FINITE)
        if self.limits is not None:
            unit, rows = self._unit(held[0][0]), max(len(weight) for _, _, weight in held)
            squares = np.zeros(rows)
            for (name, _, _), sizes in zip(held, lengths):
                if name not in self.beside:
                    squares[: len(sizes)] += sizes**2
            self._reject(np.sqrt(squares) > self.limits[unit], self.group[held[-1][0]], TOO_LARGE)
            good = np.flatnonzero(self.first[:rows] == NO_GROUP)
            self.norms[good, unit] = np.sqrt(squares[good])

    def _reject(self, which: NDArray[np.bool_], group: int, reason: int) -> None:
        if which.any():
            rows = np.flatnonzero(which & (self.first[: len(which)] == NO_GROUP))
            self.first[rows], self.reason[rows] = group, reason


@dataclass
class Watch:
    """Whether a run learns anything, by what the server knows of it anyway: the one place that says so.

    It ends as diverged where in all rounds no visit counted or no training loss was known, where no output of any
    model is finite, or where nothing has moved over `IN_A_ROW` evaluations although visits counted, as where all
    gradients are 0, unless that is because it fits. It is warned of visits that do not count, of a loss that is back
    where it was without a model, and of a test loss that is not finite. What messages and the server's step lead out
    of all bounds `RunGuard` says.

    Attributes
    ----------
    invited, counted, known, ever : bool
        In some round somebody was invited, a visit counted, there was a training loss; something has moved.
    void : int
        Rounds in a row in which somebody was invited and nothing counted.
    worked, moved : bool
        Since the last evaluation a visit counted, and the shared state moved.
    total, number : float, int
        Sum of the training losses since then, and of how many rounds.
    first, least : float
        The first training loss, and the least mean of them between two evaluations.
    still, guessing : int
        Evaluations in a row by which nothing had moved, and by which the loss was back at that of guessing.
    shown : float64 [n]
        What the last evaluation gave.
    """

    invited: bool = False
    counted: bool = False
    known: bool = False
    ever: bool = False
    void: int = 0
    worked: bool = False
    moved: bool = False
    total: float = 0.0
    number: int = 0
    first: float = nan
    least: float = inf
    still: int = 0
    guessing: int = 0
    shown: Floats = field(default_factory=lambda: np.zeros(0))

    def saw(self, round: int, invited: bool, counted: bool, loss: float | None, moved: bool) -> dict[str, str]:
        """Take note of a round; return what is to be said of it, by kind."""
        self.invited |= invited
        self.counted |= counted
        self.worked |= counted
        self.moved |= moved
        self.ever |= moved
        if loss is not None:
            self.first = self.first if self.known else loss
            self.known, self.total, self.number = True, self.total + loss, self.number + 1
        if invited:
            self.void = 0 if counted else self.void + 1
        if self.void != VOID_ROUNDS:
            return {}
        return {"void": f"no visit counted in {VOID_ROUNDS} rounds in a row, {round - VOID_ROUNDS + 1} … {round}"}

    def tested(
        self, losses: Floats, test_loss: float, finite: Floats, shares: bool, chance: float, last: bool
    ) -> tuple[str, dict[str, str]]:
        """Take note of an evaluation; return why the run ends, "" where it does not, and what is to be said, by kind.

        Parameters
        ----------
        losses : float64 [n]
            The test losses: those of all clients, then that of the shared model; NaN where there is none.
        test_loss : float
            What stands for all of them.
        finite : float64 [n]
            Which share of these tests' samples have an output that is finite; NaN where there is none.
        shares : bool
            Whether something is shared that `moved` tells of.
        chance : float
            The loss of guessing; inf: not known.
        last : bool
            Whether this is the last evaluation of the run.
        """
        there = ~np.isnan(finite)
        told: dict[str, str] = {}
        if there.any() and not finite[there].any():
            return "no output of any model is finite", told
        if bad := int((~np.isfinite(losses[there])).sum()):
            told["test-loss"] = f"{bad} of {int(there.sum())} test losses are not finite"
        loss = self.total / self.number if self.number else nan
        self._compare(losses, shares)
        self.least = min(self.least, loss) if self.number else self.least
        guessed = loss >= GUESSING * chance and not test_loss < GUESSING * chance
        self.guessing = self.guessing + 1 if guessed and self.least < LEARNT * chance else 0
        if self.guessing >= IN_A_ROW or (self.guessing and last):
            told["guessing"] = f"the training loss was {self.least:.4g} and is {loss:.4g}, guessing has {chance:.4g}"
        self.worked, self.moved, self.total, self.number = False, False, 0.0, 0
        fits = self.ever and (isnan(loss) or loss < min(self.first, GUESSING * chance))
        if self.still < IN_A_ROW or fits:
            return "", told
        return f"nothing has moved over {self.still} evaluations, as where all gradients are 0 (loss {loss:.4g})", told

    def _compare(self, losses: Floats, shares: bool) -> None:
        """Count the evaluations by which nothing had moved, of those before which something should have."""
        both = np.isfinite(losses) & np.isfinite(self.shown) if len(self.shown) else np.zeros(len(losses), dtype=bool)
        changed = bool((losses[both] != self.shown[both]).any()) if both.any() else False
        self.ever |= changed
        if self.worked:
            resting = not self.moved and not changed and (shares or bool(both.any()))
            self.still = self.still + 1 if resting else 0
        self.shown = losses

    def ended(self) -> str:
        """Return why a run that has come to its last round has learnt nothing, "" where that is not known."""
        if self.invited and not self.counted:
            return "no visit counted in any round"
        if self.counted and not (self.known or self.ever):
            return "no round has a training loss, and nothing has moved"
        return ""

    def saved(self) -> dict[str, Floats]:
        """Return what a checkpoint remembers, arrays by name."""
        numbers = [float(value) for name, value in vars(self).items() if name != "shown"]
        return {"watch": np.array(numbers)} | ({"watch shown": self.shown} if len(self.shown) else {})

    @classmethod
    def restored(cls, saved: Mapping[str, NDArray[Any]]) -> Watch:
        """Return what a checkpoint remembers."""
        watch = cls(shown=saved.get("watch shown", np.zeros(0)))
        kinds = {name: type(value) for name, value in vars(watch).items() if name != "shown"}
        for (name, kind), value in zip(kinds.items(), saved["watch"].tolist()):
            setattr(watch, name, kind(value))
        return watch


class RunGuard:
    """The guard's rules in one run: which norms are accepted, what was rejected, when the run has diverged."""

    def __init__(self, rules: Guard, layers: Layers, layout: Layout, whole: bool) -> None:
        self.rules, self.layers, self.layout, self.whole = rules, layers, layout, whole

    def limits(self, seen: Norms) -> Floats | None:
        """Return the largest norms that are accepted: of each group, or of a visit; None: any will do."""
        factor = self.rules.max_norm
        return None if factor is None else seen.limits(factor, 1 if self.whole else len(self.layout))

    def sieve(self, rows: int, limits: Floats | None) -> Sieve:
        return Sieve(rows, self.layout, self.whole, limits)

    def rejections(self, places: Ints, sieve: Sieve) -> dict[int, Rejection]:
        """Return which visits a sieve has rejected, its rows being those at `places` of the round's cohort."""
        rejected = {}
        for place, group, reason in zip(places.tolist(), sieve.first.tolist(), sieve.reason.tolist()):
            if reason:
                rejected[place] = Rejection(self.layers.reached[0 if self.whole else group], group, reason)
        return rejected

    def why(self, rejection: Rejection) -> str:
        return f"layer '{self.layers.name(self.layers.of_groups[rejection.group])}' {REASONS[rejection.reason]}"

    def diverged(self, arrived: int, rejected: Mapping[int, Rejection]) -> str:
        """Return in words that too many of the visits that arrived were rejected, "" where they were not."""
        if len(rejected) <= self.rules.most * arrived:
            return ""
        first = rejected[min(rejected)]
        return f"{len(rejected)} of {arrived} visits that arrived were rejected: {self.why(first)}"

    def stepped(self, before: State, after: State, loss: Tensor) -> tuple[str, bool, float]:
        """Return in words how a round's step has led the shared state out of all bounds, "" where it has not.

        And whether the step has moved it; single numbers may count rounds, and tell nothing. And the round's loss as a
        number: a device is waited for once for all of this, but where all norms are as before.
        """
        states = [(value, 1) for value in (*before.values(), *after.values())]
        *norms, found = fetched([*row_norms(states), loss.reshape(1)])
        sizes = iter(norms)
        held = {name: size[0] for name, size in zip(before, sizes)}
        new = {name: size[0] for name, size in zip(after, sizes)}
        large = [name for name, value in after.items() if value.numel() > 1]
        moved = any(new[name] != held.get(name) for name in large)
        # a rotation keeps norms: as of orthonormal representations
        moved = moved or not all(torch.equal(before[name], after[name]) for name in large)
        grown = {name: size for name, size in new.items() if held.get(name) or not isfinite(size)}
        fault, old, size = "", hypot(*held.values()), hypot(*grown.values())
        if not size <= (GROWTH * old if old >= 1.0 else sys.float_info.max):  # from nothing, any norm may be right
            worst = max(grown, key=lambda name: inf if isnan(grown[name]) else grown[name])
            layer = self.layers.name(self.layers.of[worst]) if worst in self.layers.of else worst
            fault = f"the shared state's norm rose from {old:.3g} to {size:.3g}, most in layer '{layer}'"
            if not isfinite(grown[worst]):
                fault = f"layer '{layer}' of the shared state is not finite"
        return fault, moved, float(found[0])


def lengths(values: Iterable[tuple[Tensor, int]]) -> list[Floats]:
    """Return the `row_norms` of several values, with one wait for the device that has them."""
    return fetched(row_norms(values))


def row_norms(values: Iterable[tuple[Tensor, int]]) -> list[Tensor]:
    """Return the Euclidean norms of each value's so many rows where it is, finite where the row is.

    In the tensor's own precision, in which its square overflows beyond 1.8e19 (float32): such numbers are no more use
    than infinite ones, since gradients are products of them. Behind what a device still does.
    """
    return [torch.linalg.vector_norm(value.detach().reshape(rows, -1), dim=1) for value, rows in values]


def fetched(few: Sequence[Tensor]) -> list[Floats]:
    """Return some short tensors as float64 arrays, with one wait for the device that has any of them."""
    found = list(few)
    if there := [each for each in found if each.device.type != "cpu"]:  # in one piece: each copy costs its launch
        (together,) = on_host([torch.cat(there)])
        came = iter(torch.split(together, [len(each) for each in there]))
        found = [each if each.device.type == "cpu" else next(came) for each in found]
    return [each.numpy().astype(np.float64) for each in found]


def small(values: Iterable[Tensor]) -> bool:
    """True where all values are finite, and so is the square of any part of them: nobody need look at their rows.

    On a CPU only: elsewhere the second look, where there is one, would be a second wait.
    """
    return all(
        value.device.type == "cpu" and float(torch.linalg.vector_norm(value.detach())) < SMALL for value in values
    )


def without(value: Tensor, weight: Tensor, bad: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
    """Return copies in which the `bad` rows are 0 and have weight 0."""
    value, weight = value.detach().clone(), weight.clone()
    for row in np.flatnonzero(bad):
        value[row], weight[row] = 0, 0
    return value, weight
