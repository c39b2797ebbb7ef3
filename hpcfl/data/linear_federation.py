"""Linear regression with a shared representation: the problems of the theory of SRPFL (Algorithm 2) and FLIC (S3)."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from hpcfl.base.rng import keyed, keyed_in_turn
from hpcfl.base.types import Floats, Ints
from hpcfl.data.base import ClientData, Federation, Header, Source, check_clients, check_order
from hpcfl.data.gaussians import drawn_width, extremes


@dataclass(frozen=True, eq=False)
class LinearFederation(Federation):
    """Clients that draw as many samples as they are asked for."""

    source: Linear | LinearSpaces
    seed: int
    truth: Floats  # B* [d, k], with orthonormal columns
    heads: Floats  # w_i* [clients, k], of length √k

    @property
    def target(self) -> Floats:
        """What a representation is to find, in the coordinates in which learners look for it, ``[d, k]``."""
        return self.truth

    def drawn(self, client: int, round_: int) -> tuple[Floats, Floats]:
        """Return a client's fresh samples of a round: features ``[m, d]`` and targets ``[m]``, float64."""
        x, y = self.drawn_by(np.array([client]), round_)
        return x[0], y[0]

    def drawn_by(self, clients: Ints, round_: int) -> tuple[Floats, Floats]:
        """Return what `drawn` does for each of some clients, ``[c, m, d]`` and ``[c, m]``."""
        m, d = self.source.samples, len(self.truth)
        numbers = np.empty((len(clients), m * d + m))
        rngs = keyed_in_turn(self.seed, "linear samples", round_, clients.tolist())
        for row, rng in zip(numbers, rngs):
            rng.standard_normal(out=row)
        x = numbers[:, : m * d].reshape(len(clients), m, d)
        weights = np.stack([self.truth @ self.heads[client] for client in clients])[:, :, None]
        return x, (x @ weights)[:, :, 0] + self.source.noise * numbers[:, m * d :]

    def client(self, i: int) -> ClientData:
        """Return the samples of round 0, for methods that keep what they have."""
        x, y = (part.astype(np.float32) for part in self.drawn(i, 0))
        return ClientData(x, y, x[:0], y[:0])


class Linear(Source):
    """Linear regression with a shared representation: ``y = w_i*ᵀ B*ᵀ x + z``, ``x ~ N(0, I_d)``, ``z ~ N(0, σ²)``."""

    name: Literal["linear"] = "linear"
    dimension: int = Field(20, ge=1)
    """Features per sample, d."""
    rank: int = Field(2, ge=1)
    """Dimension of the shared representation, k."""
    samples: int = Field(10, ge=1)
    """Samples that a client draws anew in each round, m."""
    noise: float = Field(1e-3, ge=0)
    """Standard deviation of z, σ."""

    def check(self, clients: int, data_dir: Path | None) -> Header:
        check_order("data.rank", self.rank, "data.dimension", self.dimension)
        check_clients(clients)
        return Header(None, clients * self.samples, 0, ((self.dimension,),), 1, targets=True, fresh=True)

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> LinearFederation:
        self.check(clients, data_dir)
        truth, heads = representation(self.dimension, self.rank, clients, keyed(seed, "linear truth"))
        sizes, none = np.full(clients, self.samples), np.zeros(clients, dtype=np.int64)
        return LinearFederation(1, sizes, none, [(self.dimension,)] * clients, self, seed, truth, heads)


def representation(dimension: int, rank: int, clients: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Draw B*, orthonormal columns ``[dimension, rank]``, and w_i*, rows of length ``√rank``, ``[clients, rank]``."""
    truth, _ = np.linalg.qr(rng.standard_normal((dimension, rank)))
    heads = rng.standard_normal((clients, rank))
    heads *= sqrt(rank) / np.linalg.norm(heads, axis=1, keepdims=True)
    return truth, heads


class Space(NamedTuple):
    """The law of a client's features: m ``[n]``, Σ ``[n, n]``, and Σ's spectrum D ``[n]``, P ``[n, n]``."""

    mean: Floats
    covariance: Floats
    values: Floats
    vectors: Floats


@dataclass(frozen=True, eq=False)
class SpacesFederation(LinearFederation):
    """Clients with feature spaces of their own that draw as many samples as they are asked for.

    Here the truth is A* ``[k, d]``, with orthonormal columns, and heads are β_i* ``[clients, d]``, of length √d.
    """

    signs: Floats  # [k]: diagonal of ±1 in front of every client's embedding
    gap: float  # least difference of two eigenvalues of a client's covariance
    _spaces: dict[int, Space] = field(default_factory=dict, init=False, repr=False)

    @property
    def target(self) -> Floats:
        """Q A* with Q the diagonal of signs, which embeddings from known moments alone cannot tell."""
        return self.signs[:, None] * self.truth

    def drawn_by(self, clients: Ints, round_: int) -> tuple[Floats, Floats]:
        x, y = zip(*(self.drawn(client, round_) for client in clients.tolist()))
        return np.stack(x), np.stack(y)

    def drawn(self, client: int, round_: int) -> tuple[Floats, Floats]:
        """Return a client's fresh samples of a round: features ``[m, k_i]`` and targets ``[m]``, float64."""
        space = self._space(client)
        rng = keyed(self.seed, "samples of spaces", round_, client)
        white = rng.standard_normal((int(self.train_sizes[client]), len(space.mean)))
        x = space.mean + (white * np.sqrt(space.values)) @ space.vectors.T
        latent = white[:, : len(self.truth)] * self.signs
        return x, latent @ (self.truth @ self.heads[client]) + self.source.noise * rng.standard_normal(len(x))

    def moments(self, client: int) -> tuple[Floats, Floats]:
        """Return the mean ``[k_i]`` and the covariance ``[k_i, k_i]`` of a client's features, which are known."""
        return self._space(client)[:2]

    def _space(self, client: int) -> Space:
        if client not in self._spaces:
            (width,), rng = self.shapes[client], keyed(self.seed, "moments of spaces", client=client)
            values = np.cumsum(self.gap * (1 + rng.random(width)))
            basis, _ = np.linalg.qr(rng.standard_normal((width, width)))
            covariance = (basis * values) @ basis.T
            covariance = (covariance + covariance.T) / 2
            # The covariance's spectrum, not `basis`: generator and clients then agree on the signs to the last bit.
            self._spaces[client] = Space(rng.standard_normal(width), covariance, *spectrum(covariance))
        return self._spaces[client]


class LinearSpaces(Source):
    """Linear regression after an embedding per client: ``y = β_i*ᵀ A*ᵀ φ_i*(x) + z``, ``x ~ N(m_i, Σ_i)`` in R^(k_i).

    ``φ_i*(x) = [diag(s) D_i^(k)-½ 0] P_iᵀ (x - m_i)`` with ``Σ_i = P_i D_i P_iᵀ``, eigenvalues descending and distinct.
    One ``s`` of ±1 serves all clients, and the entry of largest magnitude of each eigenvector is positive.
    """

    name: Literal["linear_spaces"] = "linear_spaces"
    dimension: int = Field(10, ge=1)
    """Dimension of the latent space, k."""
    rank: int = Field(2, ge=1)
    """Dimension of the shared representation, d."""
    least: int = Field(10, ge=1)
    """Least number of features k_i, which is uniform over clients; at least `dimension`."""
    most: int = Field(30, ge=1)
    """Largest number of features."""
    samples: int = Field(20, ge=1)
    """Samples that a client draws anew in each round, m."""
    noise: float = Field(1e-3, ge=0)
    """Standard deviation of z."""
    gap: float = Field(0.1, gt=0)
    """Least eigenvalue of Σ_i, and least difference of two; differences are uniform up to twice as much."""

    def check(self, clients: int, data_dir: Path | None) -> Header:
        check_order("data.rank", self.rank, "data.dimension", self.dimension)
        check_order("data.least", self.least, "data.most", self.most)
        check_order("data.dimension", self.dimension, "data.least", self.least)
        check_clients(clients)
        return Header(None, clients * self.samples, 0, extremes(self.least, self.most), 1, targets=True, fresh=True)

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> SpacesFederation:
        """Return the clients; A*, β_i*, the signs, and each client's moments are functions of the seed alone."""
        self.check(clients, data_dir)
        truth, heads = representation(self.dimension, self.rank, clients, keyed(seed, "truth of spaces"))
        sizes, none = np.full(clients, self.samples), np.zeros(clients, dtype=np.int64)
        shapes = [(drawn_width(self.least, self.most, i, seed),) for i in range(clients)]
        signs = keyed(seed, "signs of spaces").choice([-1.0, 1.0], self.dimension)
        return SpacesFederation(1, sizes, none, shapes, self, seed, truth, heads, signs, self.gap)


def spectrum(covariance: Floats) -> tuple[Floats, Floats]:
    """Return eigenvalues ``[n]``, descending, and eigenvectors ``[n, n]`` in columns.

    An eigenvector's sign is not determined: here the entry of largest magnitude is positive (the first of equals).
    All who must agree on coordinates take their eigenvectors from this function.
    """
    values, vectors = np.linalg.eigh(covariance)
    values, vectors = values[::-1].copy(), vectors[:, ::-1].copy()
    largest = np.abs(vectors).argmax(axis=0)
    vectors *= np.where(vectors[largest, np.arange(len(values))] < 0, -1.0, 1.0)
    return values, vectors


def whitening(mean: Floats, covariance: Floats, dimension: int) -> tuple[Floats, Floats]:
    """Return W ``[k, n]`` and b ``[k]`` of ``W x + b = D^(k)-½ P^(k)ᵀ (x - m)``, of mean 0 and covariance I.

    This is the embedding of FLIC's Algorithm S3. ``Σ = P D Pᵀ`` with descending eigenvalues, of which the first
    k = `dimension` must be distinct for W to be determined; ValueError if fewer than k are positive.
    """
    values, vectors = spectrum(covariance)
    if dimension > (values > 0).sum():
        raise ValueError(f"expected a covariance of at least {dimension} positive eigenvalues, got {values}")
    weight = vectors[:, :dimension].T / np.sqrt(values[:dimension, None])
    return weight, -weight @ mean
