"""Federated oracle complexity: what a round costs in gradients and in vectors sent (Jadbabaie, Makur & Shah).

Definition 1 of "Federated Optimization of Smooth Loss Functions": ``Γ = Σ_t b_t + 1{clients send in epoch t} · φ τ m``,
with b_t gradients of single samples by each active client, or by the server, τm active clients, and φ the cost of
sending a vector of p numbers over that of computing a gradient, p being the size of a model. An epoch is of type A
where clients compute and send, of type B where the server computes, of type C where clients only send (eq. 25).

Where the paper leaves something open, docs/explanation/oracle.md says what is counted, method by method.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from pydantic import Field

from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError


class Oracle(ConfigBase):
    """What federated oracle complexity is reckoned with; nothing of a run depends on it."""

    record: bool = False
    """Record what each round costs: gradients, vectors sent, epochs, and all by `phi`."""
    phi: float | None = Field(None, ge=0)
    """φ, the cost of sending one model's numbers to the server over that of one sample's gradient: large, and the paper
    names no value; 0 counts gradients alone. `record` needs it."""

    def check(self) -> None:
        """Raise UsageError where costs are to be recorded that nothing is known of."""
        if self.record and self.phi is None:
            raise UsageError("oracle.record = true needs oracle.phi: expected a number of at least 0, such as 100.0")


@dataclass(frozen=True)
class Spent:
    """What one round took."""

    gradients: int  # b of the clients: the most that any active client computed
    server_gradients: int  # b of the server
    active: int  # τm, the clients whose visits counted
    numbers: int  # that they sent, all together
    parameters: int  # p, the numbers of one client's model
    continued: bool = False  # no clients in this round nor in the one before: the server's epoch goes on

    @property
    def vectors(self) -> float:
        return self.numbers / self.parameters

    @property
    def epochs(self) -> tuple[int, int, int]:
        """Epochs of type A, B and C.

        Each carries at most one vector per active client, the first of them what clients have computed. What the
        server computes in rounds without clients is one epoch, however many rounds it takes.
        """
        sent = -(-self.numbers // (self.active * self.parameters)) if self.active else 0
        first = int(self.gradients > 0)
        return first, int(self.server_gradients > 0 and not self.continued), max(0, sent - first)

    def complexity(self, phi: float) -> float:
        """Return the round's part of Γ (Definition 1)."""
        return self.gradients + self.server_gradients + phi * self.vectors

    def running_time(self, phi: float) -> float:
        """Return the expected running time with its constants (eq. 25), in the unit in which sending a vector takes φ.

        ``2b + log(τm)`` where clients computed, ``2b`` where the server did, and φ times the vectors that were sent.
        The first approximates the law that it comes from; analysis/running_time.py has both.
        """
        computing = 2 * self.gradients + log(self.active) if self.gradients else 0.0
        return computing + 2 * self.server_gradients + phi * self.vectors
