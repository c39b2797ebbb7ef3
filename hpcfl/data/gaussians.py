"""FLIC's toy problems (Rakotomamonjy et al., appendix S4): Gaussian classes, each client with its own feature space.

Classes are dealt to clients, every class is shared out evenly among those who hold it, and each client looks at its
samples in its own way: with noisy features appended, or through a linear map.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from hpcfl.base.errors import refusal
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats, Ints, Shape
from hpcfl.data.base import ClientData, Federation, Header, Source, check_clients, check_order
from hpcfl.data.partition import holders

WIDE, NARROW = (0.05, 1.0), (0.15, 0.35)  # shares of their training samples that clients keep, each for half of them


@dataclass(frozen=True, eq=False)
class GaussianFederation(Federation):
    """Clients whose samples are made when they are asked for, keyed by the seed and the client."""

    source: Gaussians
    seed: int
    counts: Ints  # [clients, classes]: samples that each client holds of each class, for training and testing
    centres: Floats  # [classes, informative]: means of the classes
    deviations: Floats  # [informative]: of all classes in each direction

    def client(self, i: int) -> ClientData:
        rng = keyed(self.seed, "gaussian samples", client=i)
        labels = rng.permutation(np.repeat(np.arange(self.classes), self.counts[i]))
        drawn = rng.standard_normal((len(labels), self.centres.shape[1]))
        latent = self.centres[labels] + self.deviations * drawn
        features = self.source.view(latent, i, self.seed).astype(np.float32)
        test, train = np.split(np.arange(len(labels)), [self.test_sizes[i]])
        if self.source.thinning:
            train = np.sort(keyed(self.seed, "thinned samples", client=i).choice(train, self.train_sizes[i]))
        return ClientData(features[train], labels[train], features[test], labels[test])


class Gaussians(Source):
    """Keys of all sources whose classes are Gaussians."""

    labels: int = Field(20, ge=1)
    """Number of classes, C."""
    classes: int = Field(3, ge=1)
    """Classes per client; each is held by as many clients as any other, up to one."""
    informative: int = Field(5, ge=1)
    """Dimension of the space in which the classes are drawn."""
    spread: float = Field(gt=0)
    """Standard deviation of the classes' centres in each direction."""
    samples_per_class: int = Field(2000, ge=1)
    """Samples of a class, shared out evenly among its holders."""
    test_share: float = Field(0.2, ge=0, lt=1)
    """Part of a client's samples that is put aside for testing, before thinning."""
    thinning: bool = True
    """Clients keep a random share of their training samples, uniform on 5 to 100 % for about half and on 15 to 35 % for
    the others, drawn with replacement; small clients may lose a class."""

    @abstractmethod
    def widths(self) -> tuple[int, int]:
        """Return the least and the largest number of features that a client may have; UsageError if reversed."""

    @abstractmethod
    def view(self, latent: Floats, client: int, seed: int) -> Floats:
        """Return samples ``[n, informative]`` as a client sees them, ``[n, k_i]``."""

    def deviations(self, seed: int) -> Floats:
        """Return the standard deviations of all classes in each direction, ``[informative]``."""
        return np.ones(self.informative)

    def width(self, client: int, seed: int) -> int:
        """Return how many features a client has, k_i."""
        return drawn_width(*self.widths(), client, seed)

    def check(self, clients: int, data_dir: Path | None) -> Header:
        check_order("data.classes", self.classes, "data.labels", self.labels)
        shapes = extremes(*self.widths())
        check_clients(clients)
        dealt = clients * self.classes
        if dealt > self.labels * self.samples_per_class:
            most = -(-dealt // self.labels)
            dealt_out = f"(data.classes = {self.classes} of data.labels = {self.labels} each)"
            text = f"at least {most}, since up to {most} of clients = {clients} hold a class {dealt_out}"
            raise refusal("data.samples_per_class", text, self.samples_per_class, most)
        total = min(self.labels, dealt) * self.samples_per_class
        test = round(self.test_share * total)
        return Header(None, total - test, test, shapes, self.labels)  # before thinning

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> GaussianFederation:
        self.check(clients, data_dir)
        pool = np.full(self.labels, self.samples_per_class)
        holds = holders(pool, clients, self.classes, keyed(seed, "partition"))
        share, rest = np.divmod(pool, np.maximum(holds.sum(axis=0), 1))
        counts = np.where(holds, share + (holds.cumsum(axis=0) <= rest), 0)
        sizes = counts.sum(axis=1)
        test = np.minimum(np.rint(self.test_share * sizes).astype(np.int64), sizes - 1)
        train = thinned(sizes - test, seed) if self.thinning else sizes - test
        shapes = [(self.width(i, seed),) for i in range(clients)]
        centres = self.spread * keyed(seed, "centres").standard_normal((self.labels, self.informative))
        return GaussianFederation(self.labels, train, test, shapes, self, seed, counts, centres, self.deviations(seed))


class NoisyFeatures(Gaussians):
    """FLIC's toy problem "noisy features": to each client's samples a number of standard normal features is appended.

    Classes are ``N(centre, I)``.
    """

    name: Literal["noisy_features"] = "noisy_features"
    spread: float = Field(0.8, gt=0)
    """Standard deviation of the classes' centres in each direction."""
    least_noise: int = Field(1, ge=0)
    """Least number of appended features, which is uniform over clients."""
    most_noise: int = Field(10, ge=0)
    """Largest number of appended features."""

    def widths(self) -> tuple[int, int]:
        check_order("data.least_noise", self.least_noise, "data.most_noise", self.most_noise)
        return self.informative + self.least_noise, self.informative + self.most_noise

    def view(self, latent: Floats, client: int, seed: int) -> Floats:
        spurious = self.width(client, seed) - self.informative
        noise = keyed(seed, "spurious features", client=client).standard_normal((len(latent), spurious))
        return np.hstack([latent, noise])


class LinearMapping(Gaussians):
    """FLIC's toy problem "linear mapping": each client sees ``x M_i``, M_i a matrix of standard normal entries.

    Its width is the client's own, too.
    """

    name: Literal["linear_mapping"] = "linear_mapping"
    spread: float = Field(0.5, gt=0)
    """Standard deviation of the classes' centres in each direction."""
    covariance: Literal["diagonal", "identity"] = "diagonal"
    """Covariance of all classes. ``diagonal``: independent directions, their variances drawn by the seed. ``identity``:
    I."""
    least_variance: float = Field(0.5, gt=0)
    """Least of the variances (diagonal), which are uniform over directions."""
    most_variance: float = Field(1.5, gt=0)
    """Largest of the variances (diagonal)."""
    least: int = Field(5, ge=1)
    """Least number of features, which is uniform over clients."""
    most: int = Field(50, ge=1)
    """Largest number of features."""

    def widths(self) -> tuple[int, int]:
        check_order("data.least_variance", self.least_variance, "data.most_variance", self.most_variance)
        check_order("data.least", self.least, "data.most", self.most)
        return self.least, self.most

    def deviations(self, seed: int) -> Floats:
        if self.covariance == "identity":
            return super().deviations(seed)
        rng = keyed(seed, "variances")
        return np.sqrt(rng.uniform(self.least_variance, self.most_variance, self.informative))

    def matrix(self, client: int, seed: int) -> Floats:
        """Return a client's matrix M_i, ``[informative, k_i]``."""
        return keyed(seed, "linear map", client=client).standard_normal((self.informative, self.width(client, seed)))

    def view(self, latent: Floats, client: int, seed: int) -> Floats:
        return latent @ self.matrix(client, seed)


def thinned(sizes: Ints, seed: int) -> Ints:
    """Return how many of their training samples clients keep, at least one each.

    As in the code that FLIC's authors released: a share drawn from `WIDE` or from `NARROW`, with equal chances.
    """
    kept = sizes.copy()
    for i, size in enumerate(sizes):
        rng = keyed(seed, "thinning", client=i)
        kept[i] = max(1, round(size * rng.uniform(*(WIDE if rng.random() < 0.5 else NARROW))))
    return kept


def drawn_width(least: int, most: int, client: int, seed: int) -> int:
    """Return how many features a client has: uniform on the range, a function of the seed and the client."""
    return int(keyed(seed, "features", client=client).integers(least, most, endpoint=True))


def extremes(least: int, most: int) -> tuple[Shape, ...]:
    """Return the narrowest and the widest shape of features; one where these are equal."""
    return tuple((width,) for width in sorted({least, most}))
