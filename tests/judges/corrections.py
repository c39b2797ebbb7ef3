"""What the server makes of the changes Δ_i of those who arrived, tensor by tensor; v_i are the clients' weights.

Of a tensor that nobody sent nothing is returned, unless something is remembered of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from judges.plain import Params, mean

Holds = Callable[[int, int, Any], bool]
"""Whether a client holds a tensor, or one number of it, in a round."""
Correction = Callable[[int, dict[int, Params], dict[int, float]], Params]
"""What the model is to move by in a round, by its number, the changes that came, and the weights of all clients."""


def of(name: str, changes: dict[int, Params]) -> dict[int, float]:
    """The changes of one tensor, of those who sent it."""
    return {i: each[name] for i, each in changes.items() if name in each}


def names(changes: dict[int, Params]) -> set[str]:
    return {name for each in changes.values() for name in each}


def everybody_holds(round_: int, client: int, name: Any) -> bool:
    return True


def plain(round_: int, changes: dict[int, Params], v: dict[int, float]) -> Params:
    """FedAvg's mean over those who arrived."""
    return {name: mean(of(name, changes), v) for name in names(changes)}


class Known:
    """Horvitz-Thompson: ``Σ_S v_i Δ_i / π_i / Σ_I v_i``; `chance` is π by client and tensor, `invited` I by round."""

    def __init__(
        self, chance: Callable[[int, str], float], invited: list[list[int]], holds: Holds = everybody_holds
    ) -> None:
        self.chance, self.invited, self.holds = chance, invited, holds

    def __call__(self, round_: int, changes: dict[int, Params], v: dict[int, float]) -> Params:
        found = {}
        for name in names(changes):
            whole = sum(v[i] for i in self.invited[round_] if self.holds(round_, i, name))
            found[name] = sum(v[i] * d / self.chance(i, name) for i, d in of(name, changes).items()) / whole
        return found


class FedAU:
    """Wang & Ji, ICLR 2024, Algorithms 1 and 2: ``Σ_S v_i ω_i Δ_i / Σ_all v_i``.

    ω_i is the mean of the intervals that ended before this round, 1 without one. An interval ends when the client takes
    part, with this tensor or `of_visits` with anything, or after `cutoff` rounds.
    """

    def __init__(
        self, tensors: list[Any], cutoff: float = float("inf"), holds: Holds = everybody_holds, of_visits: bool = False
    ) -> None:
        self.cutoff, self.ended, self.missed, self.tensors = cutoff, {}, {}, tensors
        self.holds, self.of_visits = holds, of_visits

    def __call__(self, round_: int, changes: dict[int, Params], v: dict[int, float]) -> Params:
        found = {}
        for name in self.tensors:
            sent = of(name, changes)
            omega = {i: sum(self.ended.get((i, name), [1])) / len(self.ended.get((i, name), [1])) for i in sent}
            for i in v:
                self.missed[i, name] = self.missed.get((i, name), 0) + 1
                if i in (changes if self.of_visits else sent) or self.missed[i, name] >= self.cutoff:
                    self.ended.setdefault((i, name), []).append(self.missed.pop((i, name)))
            if sent:
                whole = sum(v[i] for i in v if self.holds(round_, i, name))
                found[name] = sum(v[i] * omega[i] * d for i, d in sent.items()) / whole
        return found


class Remembered:
    """FedVARP (Jhunjhunwala et al., UAI 2022), or MIFA (Gu et al., NeurIPS 2021), whose means are over `everybody`.

    ``mean_S (Δ_i − y_i) + mean_all y_i`` with the y of before the round, then ``y_i ← Δ_i`` for S. What is remembered
    is a gradient: Δ over the round's step size `lr`. A round in which nobody came moves along the memory.
    """

    def __init__(
        self, start: Params, lr: Callable[[int], float], everybody: bool, holds: Holds = everybody_holds
    ) -> None:
        self.start, self.lr, self.everybody, self.holds, self.y = start, lr, everybody, holds, {}

    def __call__(self, round_: int, changes: dict[int, Params], v: dict[int, float]) -> Params:
        found = {}
        for name, zero in self.start.items():
            y = {i: self.y.get((i, name), 0 * zero) for i in v if self.holds(round_, i, name)}
            sent = {i: d / self.lr(round_) for i, d in of(name, changes).items()}
            over = sum(v[i] for i in (y if self.everybody else sent))
            moved = sum(v[i] * (g - y[i]) for i, g in sent.items()) / over if sent else 0
            found[name] = self.lr(round_) * (moved + mean(y, v)) if y else 0 * zero
            self.y |= {(i, name): g for i, g in sent.items()}
        return found
