"""Ringmaster ASGD: asynchronous SGD without old gradients (Maranjyan, Tyurin & Richtárik, ICML 2025).

Workers take single gradients. One that arrives counts, ``w ← w − γ g``, where fewer than R others have counted since
its point was sent: ``participation.max_staleness = R − 1``. Either way its worker goes on at the newest point. With
``participation.stop_stale`` workers are stopped and begin anew as soon as R others have counted, as the paper's
variant with stops has it. R = 1 uses undelayed gradients only; without a `max_staleness` this is plain asynchronous
SGD. Data of all clients are taken to be alike: fast ones count more often.

`threshold` and `step_size` are those of the paper's theorem as we remember it, not read again. Its time law is
`optimal_time`, which Tyurin & Richtárik (NeurIPS 2023) found for Rennala SGD and as a lower bound, up to constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import ClassVar, Literal

from pydantic import Field

from hpcfl.algorithms.base import Participation
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.local_sgd import check_alone, check_plain
from hpcfl.base.errors import refusal


class Ringmaster(FedAvg):
    """Asynchronous SGD: a step with each gradient that arrives, but for those that are too old."""

    steps_alone: ClassVar[bool] = True
    name: Literal["ringmaster"] = "ringmaster"  # type: ignore[assignment]
    epochs: int = Field(0, ge=0, le=0)
    """No passes: a visit is one gradient."""
    steps: int = Field(1, ge=1, le=1)
    """A visit is one gradient."""

    def check(self, participation: Participation, known: bool = True) -> None:
        super().check(participation, known)
        check_plain(self, "optimizer", "momentum", "persist_optimizer")
        check_alone(self.name, participation, "gradient")
        if participation.dispatch != "reporter":
            wanted = f"'reporter' with algorithm.name = '{self.name}', whose workers go on at once"
            raise refusal("participation.dispatch", wanted, participation.dispatch, "reporter")


def threshold(noise: float, accuracy: float) -> int:
    """Return R = max(1, ⌈σ²/ε⌉).

    Parameters
    ----------
    noise : float
        σ², the variance of a gradient.
    accuracy : float
        ε, above 0: the mean of ``|∇f|²`` that is wanted.
    """
    return max(1, ceil(noise / accuracy))


def step_size(threshold: int, smooth: float, noise: float, accuracy: float) -> float:
    """Return γ = min(1/(2RL), ε/(4Lσ²)) for R = `threshold`, L = `smooth`, σ² = `noise` and ε = `accuracy`."""
    steady = 1 / (2 * threshold * smooth)
    return min(steady, accuracy / (4 * smooth * noise)) if noise else steady


def optimal_time(seconds: Sequence[float], smooth: float, gap: float, noise: float, accuracy: float) -> float:
    """Return the least seconds until ``E|∇f|² ≤ ε``, up to a constant, by workers of fixed pace.

    ``min_m (1/m Σ_(i≤m) 1/τ_i)⁻¹ (LΔ/ε + σ²LΔ/(mε²))``, workers in the order of their seconds τ_i per gradient: the
    bound holds for all methods that ask for gradients at points of their choice, and Rennala SGD and Ringmaster reach
    it (Tyurin & Richtárik, NeurIPS 2023; Maranjyan et al., ICML 2025; from memory).

    Parameters
    ----------
    gap : float
        Δ = f(w_0) − inf f.
    """
    rates, found = 0.0, []
    for count, pace in enumerate(sorted(seconds), start=1):
        rates += 1 / pace
        found.append(count / rates * smooth * gap / accuracy * (1 + noise / (count * accuracy)))
    return min(found)
