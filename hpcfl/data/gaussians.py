"""Sources whose classes are Gaussians, and whose clients see them in feature spaces of their own.

The two toy problems of FLIC (Rakotomamonjy et al., appendix S4) derive from `Gaussians`: classes are dealt to clients,
every class is shared out evenly among those who hold it, and each client looks at its samples in its own way.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field

from hpcfl.base.errors import UsageError
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats, Shape
from hpcfl.data.base import ClientData, Federation, Header, Integers, Source
from hpcfl.data.partition import holders

WIDE, NARROW = (0.05, 1.0), (0.15, 0.35)  # shares of their training samples that clients keep, each for half of them


@dataclass(frozen=True, eq=False)
class GaussianFederation(Federation):
    """Clients whose samples are made when they are asked for.

    Attributes
    ----------
    seed : int
        Samples are keyed by it and by their client.
    counts : int64 [clients, classes]
        Samples that each client holds of each class, before any is put aside.
    centres : float64 [classes, informative]
        Means of the classes.
    deviations : float64 [informative]
        Standard deviations of all classes in each direction.
    view : callable
        ``view(latent, client, seed)`` turns samples ``[n, informative]`` into a client's features ``[n, k_i]``.
    thinning : bool
        Training samples are drawn, with replacement, from those that a client holds.
    """

    seed: int
    counts: Integers
    centres: Floats
    deviations: Floats
    view: Callable[[Floats, int, int], Floats]
    thinning: bool

    def client(self, i: int) -> ClientData:
        """Return the samples of client `i`: its test part, and what it keeps of the others."""
        rng = keyed(self.seed, "gaussian samples", client=i)
        labels = rng.permutation(np.repeat(np.arange(self.classes), self.counts[i]))
        drawn = rng.standard_normal((len(labels), self.centres.shape[1]))
        features = self.view(self.centres[labels] + self.deviations * drawn, i, self.seed).astype(np.float32)
        test, train = np.split(np.arange(len(labels)), [self.test_sizes[i]])
        if self.thinning:
            train = np.sort(keyed(self.seed, "thinned samples", client=i).choice(train, self.train_sizes[i]))
        return ClientData(features[train], labels[train], features[test], labels[test])

    def server_test(self) -> None:
        """Return None: clients have no feature space in common."""


class Gaussians(Source):
    """Keys of all sources whose classes are Gaussians.

    Attributes
    ----------
    labels : int
        How many classes there are, C.
    classes : int
        Classes per client; each is held by as many clients as any other, up to one.
    informative : int
        Dimension of the space in which the classes are drawn.
    spread : float
        Standard deviation of the classes' centres in each direction.
    samples_per_class : int
        Samples of a class, shared out evenly among its holders.
    test_share : float
        Part of a client's samples that is put aside for testing, before the others are thinned.
    thinning : bool
        Clients keep a random share of their training samples, uniform on 5 to 100 % for about half of them and on
        15 to 35 % for the others; the samples kept are drawn with replacement, and small clients may lose a class.
    """

    labels: int = Field(20, ge=1)
    classes: int = Field(3, ge=1)
    informative: int = Field(5, ge=1)
    spread: float = Field(gt=0)
    samples_per_class: int = Field(2000, ge=1)
    test_share: float = Field(0.2, ge=0, lt=1)
    thinning: bool = True

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

    def header(self, data_dir: Path | None) -> Header:
        """Return the sizes before thinning, and the narrowest and the widest shape that clients may have."""
        if self.classes > self.labels:
            raise UsageError(
                f"data.classes: expected at most data.labels = {self.labels}, got {self.classes}; "
                f"did you mean {self.labels}?"
            )
        return self._sized(self.labels)

    def check(self, clients: int, data_dir: Path | None) -> Header:
        """Return the header after checking that every holder of a class gets a sample of it."""
        super().check(clients, data_dir)
        dealt = clients * self.classes
        if dealt > self.labels * self.samples_per_class:
            most = -(-dealt // self.labels)
            raise UsageError(
                f"data.samples_per_class: expected at least {most}, since up to {most} of clients = {clients} hold "
                f"a class (data.classes = {self.classes} of data.labels = {self.labels} each), got "
                f"{self.samples_per_class}; did you mean {most}?"
            )
        return self._sized(min(self.labels, dealt))

    def _sized(self, used: int) -> Header:
        total = used * self.samples_per_class
        test = round(self.test_share * total)
        return Header(None, total - test, test, extremes(*self.widths()), self.labels)

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> GaussianFederation:
        """Return the clients; who holds what is known, no sample is drawn yet."""
        self.check(clients, data_dir)
        counts = self._dealt(clients, seed)
        sizes = counts.sum(axis=1)
        test = np.minimum(np.rint(self.test_share * sizes).astype(np.int64), sizes - 1)
        centres = self.spread * keyed(seed, "centres").standard_normal((self.labels, self.informative))
        return GaussianFederation(
            classes=self.labels,
            train_sizes=thinned(sizes - test, seed) if self.thinning else sizes - test,
            test_sizes=test,
            shapes=[(self.width(i, seed),) for i in range(clients)],
            seed=seed,
            counts=counts,
            centres=centres,
            deviations=self.deviations(seed),
            view=self.view,
            thinning=self.thinning,
        )

    def _dealt(self, clients: int, seed: int) -> Integers:
        """Return how many samples each client holds of each class, int64 [clients, C]."""
        pool = np.full(self.labels, self.samples_per_class)
        holds = holders(pool, clients, self.classes, keyed(seed, "partition"))
        share, rest = np.divmod(pool, np.maximum(holds.sum(axis=0), 1))
        counts: Integers = np.where(holds, share + (holds.cumsum(axis=0) <= rest), 0)
        return counts


def thinned(sizes: Integers, seed: int) -> Integers:
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


def ordered(least: int, most: int, keys: tuple[str, str] = ("least", "most")) -> tuple[int, int]:
    """Return the range; UsageError where it is reversed."""
    if least > most:
        raise UsageError(f"data.{keys[0]}: expected at most data.{keys[1]} = {most}, got {least}; did you mean {most}?")
    return least, most


def extremes(least: int, most: int) -> tuple[Shape, ...]:
    """Return the narrowest and the widest shape of features; one where these are equal."""
    return tuple((width,) for width in sorted({least, most}))
