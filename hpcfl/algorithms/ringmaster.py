"""Ringmaster ASGD: asynchronous SGD without old gradients (Maranjyan, Tyurin & Richtárik, ICML 2025).

Workers take single gradients. One that arrives counts, ``w ← w − γ g``, where fewer than R others have counted since
its point was sent: ``participation.max_staleness = R − 1``. Either way its worker goes on at the newest point. With
``participation.stop_stale`` workers are stopped and begin anew as soon as R others have counted, as the paper's
variant with stops has it. R = 1 uses undelayed gradients only; without a `max_staleness` this is plain asynchronous
SGD. Data of all clients are taken to be alike: fast ones count more often.
"""

from __future__ import annotations

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
