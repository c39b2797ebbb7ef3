"""Linear regression with a shared representation: the problem on which SRPFL's theory is stated (Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from hpcfl.base.errors import UsageError
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats
from hpcfl.data.base import ClientData, Federation, Header, Source


@dataclass(frozen=True, eq=False)
class LinearFederation(Federation):
    """Clients that draw as many samples as they are asked for.

    Attributes
    ----------
    truth : float64 [d, k]
        B*, with orthonormal columns.
    heads : float64 [clients, k]
        w_i*, of length √k.
    """

    seed: int
    noise: float
    truth: Floats
    heads: Floats

    @property
    def target(self) -> Floats:
        """What a representation is to find, in the coordinates in which learners look for it, ``[d, k]``."""
        return self.truth

    def drawn(self, client: int, round_: int) -> tuple[Floats, Floats]:
        """Return a client's fresh samples of a round: features ``[m, d]`` and targets ``[m]``, float64."""
        rng = keyed(self.seed, "linear samples", round_, client)
        x = rng.standard_normal((int(self.train_sizes[client]), len(self.truth)))
        return x, x @ (self.truth @ self.heads[client]) + self.noise * rng.standard_normal(len(x))

    def client(self, i: int) -> ClientData:
        """Return the samples of round 0, for methods that keep what they have."""
        x, y = (part.astype(np.float32) for part in self.drawn(i, 0))
        return ClientData(x, y, x[:0], y[:0])

    def server_test(self) -> None:
        """Return None: there is no global test set."""


class Linear(Source):
    """Linear regression with a shared representation: ``y = w_i*ᵀ B*ᵀ x + z``, ``x ~ N(0, I_d)``, ``z ~ N(0, σ²)``.

    Attributes
    ----------
    dimension : int
        Features per sample, d.
    rank : int
        Dimension of the shared representation, k.
    samples : int
        Samples that a client draws anew in each round, m.
    noise : float
        σ.
    """

    name: Literal["linear"] = "linear"
    dimension: int = Field(20, ge=1)
    rank: int = Field(2, ge=1)
    samples: int = Field(10, ge=1)
    noise: float = Field(1e-3, ge=0)

    def header(self, data_dir: Path | None) -> Header:
        """Return the sizes of one client; UsageError where no representation has so many dimensions."""
        check_rank(self.rank, self.dimension)
        return Header(None, self.samples, 0, ((self.dimension,),), 1, targets=True, fresh=True)

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> LinearFederation:
        """Return the clients; B* and w_i* are functions of the seed alone."""
        self.check(clients, data_dir)
        truth, heads = representation(self.dimension, self.rank, clients, keyed(seed, "linear truth"))
        sizes = np.full(clients, self.samples)
        none = np.zeros(clients, dtype=np.int64)
        return LinearFederation(1, sizes, none, [(self.dimension,)] * clients, seed, self.noise, truth, heads)


def representation(dimension: int, rank: int, clients: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Draw B*, orthonormal columns ``[dimension, rank]``, and w_i*, rows of length ``√rank``, ``[clients, rank]``."""
    truth, _ = np.linalg.qr(rng.standard_normal((dimension, rank)))
    heads = rng.standard_normal((clients, rank))
    heads *= sqrt(rank) / np.linalg.norm(heads, axis=1, keepdims=True)
    return truth, heads


def check_rank(rank: int, dimension: int) -> None:
    """Raise UsageError where no representation has so many dimensions."""
    if rank > dimension:
        raise UsageError(
            f"data.rank: expected at most data.dimension = {dimension}, got {rank}; did you mean {dimension}?"
        )
