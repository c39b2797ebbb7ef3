"""Federated oracle complexity: what a round costs in gradients and in vectors sent (Jadbabaie, Makur & Shah).

Definition 1 of "Federated Optimization of Smooth Loss Functions": ``Γ = Σ_t b_t + 1{clients send in epoch t} · φ τ m``,
with b_t gradients of single samples by each active client, or by the server, τm active clients, and φ the cost of
sending a vector of p numbers over that of computing a gradient, p being the size of a model. An epoch is of type A
where clients compute and send, of type B where the server computes, of type C where clients only send (eq. 25).

Conventions where the paper leaves them open. Active clients are those whose visits counted. b_t is the most that any of
them computed (so the remark after Definition 1). A gradient by some of the parameters is one like that by all; a
product of a Hessian and a vector is two. A message of fewer or more than p numbers costs its part of a vector, so a
round's Γ takes φ times the vectors that were sent; in counting epochs, a part of a vector is an epoch like a whole one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from pydantic import Field

from hpcfl.base.config import ConfigBase


class Oracle(ConfigBase):
    """What federated oracle complexity is reckoned with; nothing of a run depends on it."""

    phi: float | None = Field(None, ge=0)
    """φ, the cost of sending the numbers of one model to the server over that of one sample's gradient. It is large
    (φ ≫ 1), and the paper names no value; 0 counts gradients alone. By default oracle complexity is not recorded."""


@dataclass(frozen=True)
class Spent:
    """What one round took."""

    gradients: int  # b of the clients: the most that any active client computed
    server_gradients: int  # b of the server
    active: int  # τm, the clients whose visits counted
    numbers: int  # that they sent, all together
    parameters: int  # p, the numbers of one client's model

    @property
    def vectors(self) -> float:
        return self.numbers / self.parameters

    @property
    def epochs(self) -> tuple[int, int, int]:
        """Epochs of type A, B and C.

        Each carries at most one vector per active client, the first of them what clients have computed.
        """
        sent = -(-self.numbers // (self.active * self.parameters)) if self.active else 0
        first = int(self.gradients > 0)
        return first, int(self.server_gradients > 0), max(0, sent - first)

    def complexity(self, phi: float) -> float:
        """Return the round's part of Γ (Definition 1)."""
        return self.gradients + self.server_gradients + phi * self.vectors

    def running_time(self, phi: float) -> float:
        """Return the expected running time with its constants (eq. 25), in the unit in which sending a vector takes φ.

        ``2b + log(τm)`` where clients computed, ``2b`` where the server did, and φ times the vectors that were sent.
        """
        computing = 2 * self.gradients + log(self.active) if self.gradients else 0.0
        return computing + 2 * self.server_gradients + phi * self.vectors
