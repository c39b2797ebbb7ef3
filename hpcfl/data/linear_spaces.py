"""Linear regression in a latent space that each client sees in its own way: FLIC's Algorithm S3 and Theorem 1."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from hpcfl.base.errors import UsageError
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats
from hpcfl.data.base import Header, Source
from hpcfl.data.gaussians import drawn_width, extremes, ordered
from hpcfl.data.linear import LinearFederation, check_rank, representation
from hpcfl.data.whitening import spectrum


class Space(NamedTuple):
    """The law of a client's features: m ``[n]``, Σ ``[n, n]``, and Σ's spectrum D ``[n]``, P ``[n, n]``."""

    mean: Floats
    covariance: Floats
    values: Floats
    vectors: Floats


@dataclass(frozen=True, eq=False)
class SpacesFederation(LinearFederation):
    """Clients with feature spaces of their own that draw as many samples as they are asked for.

    Attributes
    ----------
    truth : float64 [k, d]
        A*, with orthonormal columns.
    heads : float64 [clients, d]
        β_i*, of length √d.
    signs : float64 [k]
        Diagonal of ±1 in front of every client's embedding.
    gap : float
        Least difference of two eigenvalues of a client's covariance.
    """

    signs: Floats
    gap: float
    _spaces: dict[int, Space] = field(default_factory=dict, init=False, repr=False)

    @property
    def target(self) -> Floats:
        """Q A* with Q the diagonal of signs, which embeddings from known moments alone cannot tell."""
        return self.signs[:, None] * self.truth

    def drawn(self, client: int, round_: int) -> tuple[Floats, Floats]:
        """Return a client's fresh samples of a round: features ``[m, k_i]`` and targets ``[m]``, float64."""
        space = self._space(client)
        rng = keyed(self.seed, "samples of spaces", round_, client)
        white = rng.standard_normal((int(self.train_sizes[client]), len(space.mean)))
        x = space.mean + (white * np.sqrt(space.values)) @ space.vectors.T
        latent = white[:, : len(self.truth)] * self.signs
        return x, latent @ (self.truth @ self.heads[client]) + self.noise * rng.standard_normal(len(x))

    def moments(self, client: int) -> tuple[Floats, Floats]:
        """Return the mean ``[k_i]`` and the covariance ``[k_i, k_i]`` of a client's features, which are known."""
        space = self._space(client)
        return space.mean, space.covariance

    def _space(self, client: int) -> Space:
        if client not in self._spaces:
            (width,), rng = self.shapes[client], keyed(self.seed, "moments of spaces", client=client)
            values = np.cumsum(self.gap * (1 + rng.random(width)))
            basis, _ = np.linalg.qr(rng.standard_normal((width, width)))
            covariance = (basis * values) @ basis.T
            covariance = (covariance + covariance.T) / 2
            # The spectrum of what is told, not `basis`: generator and clients then agree on the signs to the last bit.
            self._spaces[client] = Space(rng.standard_normal(width), covariance, *spectrum(covariance))
        return self._spaces[client]


class LinearSpaces(Source):
    """Linear regression after an embedding per client: ``y = β_i*ᵀ A*ᵀ φ_i*(x) + z``, ``x ~ N(m_i, Σ_i)`` in R^(k_i).

    ``φ_i*(x) = [diag(s) D_i^(k)-½ 0] P_iᵀ (x - m_i)`` with ``Σ_i = P_i D_i P_iᵀ``, eigenvalues descending and distinct.
    One ``s`` of ±1 serves all clients, and the entry of largest magnitude of each eigenvector is positive.

    Attributes
    ----------
    dimension : int
        Dimension of the latent space, k.
    rank : int
        Dimension of the shared representation, d.
    least, most : int
        Range of the number of features k_i, uniform over clients; at least `dimension`.
    samples : int
        Samples that a client draws anew in each round, m.
    noise : float
        Standard deviation of z.
    gap : float
        Least difference of two eigenvalues of Σ_i, and least eigenvalue; differences are uniform up to twice as much.
    """

    name: Literal["linear_spaces"] = "linear_spaces"
    dimension: int = Field(10, ge=1)
    rank: int = Field(2, ge=1)
    least: int = Field(10, ge=1)
    most: int = Field(30, ge=1)
    samples: int = Field(20, ge=1)
    noise: float = Field(1e-3, ge=0)
    gap: float = Field(0.1, gt=0)

    def header(self, data_dir: Path | None) -> Header:
        """Return the sizes of one client, and the narrowest and the widest shape that clients may have."""
        check_rank(self.rank, self.dimension)
        shapes = extremes(*ordered(self.least, self.most))
        if self.dimension > self.least:
            raise UsageError(
                f"data.dimension: expected at most data.least = {self.least}, got {self.dimension}; "
                f"did you mean {self.least}?"
            )
        return Header(None, self.samples, 0, shapes, 1, targets=True, fresh=True)

    def check(self, clients: int, data_dir: Path | None) -> Header:
        """Return the header of so many clients: the samples of one round."""
        return replace(super().check(clients, data_dir), train=clients * self.samples)

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> SpacesFederation:
        """Return the clients; A*, β_i*, the signs, and each client's moments are functions of the seed alone."""
        self.check(clients, data_dir)
        truth, heads = representation(self.dimension, self.rank, clients, keyed(seed, "truth of spaces"))
        return SpacesFederation(
            classes=1,
            train_sizes=np.full(clients, self.samples),
            test_sizes=np.zeros(clients, dtype=np.int64),
            shapes=[(drawn_width(self.least, self.most, i, seed),) for i in range(clients)],
            seed=seed,
            noise=self.noise,
            truth=truth,
            heads=heads,
            signs=keyed(seed, "signs of spaces").choice([-1.0, 1.0], self.dimension),
            gap=self.gap,
        )
