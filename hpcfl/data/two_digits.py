"""Handwritten digits of two data sets whose images differ in size: clients without a common feature space (FLIC)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import floor
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from hpcfl.base.errors import UsageError
from hpcfl.data.base import ClientData, Federation, Header, Integers, Source
from hpcfl.data.digits import Digits
from hpcfl.data.mnist import Mnist
from hpcfl.data.pixels import Scale
from hpcfl.data.pooled import Pooled, PooledFederation
from hpcfl.data.usps import Usps

Domain = Literal["mnist", "usps", "digits", "digits-4x4"]
CLASSES = 10
POOLS: dict[str, Callable[..., Pooled]] = {
    "mnist": Mnist,
    "usps": Usps,
    "digits": Digits,
    "digits-4x4": partial(Digits, side=4),
}


@dataclass(frozen=True, eq=False)
class TwoDomains(Federation):
    """Clients of two pools.

    Attributes
    ----------
    domains : int64 [clients]
        0 where a client holds images of the first domain, 1 where of the second.
    dealt : pair of PooledFederation
        Each domain's own clients, in the order in which they come among all.
    """

    domains: Integers
    dealt: tuple[PooledFederation, PooledFederation]

    def client(self, i: int) -> ClientData:
        """Return the samples of client `i`."""
        domain = int(self.domains[i])
        return self.dealt[domain].client(int((self.domains[:i] == domain).sum()))

    def server_test(self) -> None:
        """Return None: no test set suits the models of both domains."""


class TwoDigits(Source):
    """Each client holds digits of one of two domains, of some classes; FLIC's are MNIST (28 x 28) and USPS (16 x 16).

    Domains: ``mnist`` and ``usps`` of the data folder; ``digits``, scikit-learn's 8 x 8, and ``digits-4x4``, the means
    of 2 x 2 of their pixels with the same split, need none. Every domain is a pool of its own, cut like the source of
    its name with ``partition = "shards"``: test parts have the classes of the training parts. Clients of both domains
    alternate as evenly as `share` allows.
    """

    name: Literal["two_digits"] = "two_digits"
    first: Domain = Field("mnist", description="domain of a share of the clients: mnist, usps, digits, digits-4x4")
    second: Domain = Field("digits", description="another domain, of all other clients")
    share: float = Field(0.5, gt=0, lt=1, description="share of the clients in the first domain")
    classes: int = Field(3, ge=1, le=CLASSES, description="distinct classes per client (FLIC: 3 or 5)")
    train_samples: int | None = Field(None, ge=1, description="use only so many training samples of each domain")
    scale: Scale = Field("unit", description="pixels to [0, 1] (unit) or [-1, 1] (centred)")

    def check(self, clients: int, data_dir: Path | None) -> Header:
        """Return the header, a shape for each client, after reading all files of both domains."""
        found = []
        for at, number in enumerate(self._numbers(clients)):
            with self._named(at):
                found.append(self._pool(at).check(number, data_dir))
        shapes = tuple(found[domain].shapes[0] for domain in self._domains(clients))
        return Header(None, sum(own.train for own in found), sum(own.test for own in found), shapes, CLASSES)

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> TwoDomains:
        """Return the clients; both domains are cut by `seed`, independently of each other."""
        dealt = []
        for at, number in enumerate(self._numbers(clients)):
            with self._named(at):
                dealt.append(self._pool(at).cut(number, seed, data_dir, at))
        domains, sizes = self._domains(clients), np.zeros((2, clients), dtype=np.int64)
        for at, own in enumerate(dealt):
            sizes[:, domains == at] = own.train_sizes, own.test_sizes
        shapes = [dealt[domain].shapes[0] for domain in domains]
        return TwoDomains(CLASSES, sizes[0], sizes[1], shapes, domains, (dealt[0], dealt[1]))

    def _numbers(self, clients: int) -> tuple[int, int]:
        """Return how many clients each domain has; UsageError where it has none."""
        if self.first == self.second:
            others = "', '".join(sorted(POOLS.keys() - {self.first}))
            raise UsageError(f"data.second = '{self.second}' is data.first too; expected one of '{others}'")
        if clients < 2:
            raise UsageError(f"clients = {clients}: expected at least 2, one of each domain")
        first = floor(self.share * clients + 0.5)
        if not 0 < first < clients:
            raise UsageError(
                f"data.share = {self.share} of clients = {clients} are {first}; expected 1 to {clients - 1}, so that "
                f"each domain has some; did you mean {(1 if first == 0 else clients - 1) / clients:.6g}?"
            )
        return first, clients - first

    def _domains(self, clients: int) -> Integers:
        """Return each client's domain, int64 [clients]: the first i clients hold the rounded share of i."""
        counts = np.floor(self.share * np.arange(clients + 1) + 0.5)
        domains: Integers = (1 - np.diff(counts)).astype(np.int64)
        return domains

    def _pool(self, at: int) -> Pooled:
        """Return the source of the first (0) or second (1) domain."""
        keys: dict[str, Any] = {key: getattr(self, key) for key in ("classes", "train_samples", "scale")}
        return POOLS[(self.first, self.second)[at]](partition="shards", **keys)

    @contextmanager
    def _named(self, at: int) -> Iterator[None]:
        """Say of which domain a refusal speaks: its numbers of clients and samples are not those of all."""
        try:
            yield
        except UsageError as error:
            key, domain = (("first", self.first), ("second", self.second))[at]
            raise UsageError(f"data.{key} = '{domain}': {error}") from error
