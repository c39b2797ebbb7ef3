"""Handwritten digits of two data sets whose images differ in size: clients without a common feature space (FLIC)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import floor
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from pydantic import Field

from hpcfl.base.errors import UsageError, refusal
from hpcfl.base.types import Ints
from hpcfl.data.base import ClientData, Federation, Header, Scale, Source
from hpcfl.data.bundled import Digits
from hpcfl.data.mnist import Mnist
from hpcfl.data.pooled import Pooled, PooledFederation
from hpcfl.data.usps import Usps

Domain = Literal["mnist", "usps", "digits", "digits-4x4"]
CLASSES = 10
SHARED = ("classes", "train_samples", "scale")  # keys that both pools take over
T = TypeVar("T")
QUARTERS = partial(Digits, side=4)
POOLS: dict[str, Callable[..., Pooled]] = {"mnist": Mnist, "usps": Usps, "digits": Digits, "digits-4x4": QUARTERS}


@dataclass(frozen=True, eq=False)
class TwoDomains(Federation):
    """Clients of two pools."""

    domains: Ints  # [clients]: 0 where a client holds images of the first domain, 1 where of the second
    pools: list[PooledFederation]  # each domain's own clients, in the order in which they come among all

    def client(self, i: int) -> ClientData:
        domain = int(self.domains[i])
        return self.pools[domain].client(int((self.domains[:i] == domain).sum()))


class TwoDigits(Source):
    """Each client holds digits of one of two domains, of some classes; FLIC's are MNIST (28 x 28) and USPS (16 x 16).

    Domains: ``mnist`` and ``usps`` of the data folder; ``digits``, scikit-learn's 8 x 8, and ``digits-4x4``, the means
    of 2 x 2 of their pixels with the same split, need none. Every domain is a pool of its own, cut like the source of
    its name with ``partition = "shards"``: test parts have the classes of the training parts. Clients of both domains
    alternate as evenly as `share` allows.
    """

    name: Literal["two_digits"] = "two_digits"
    published = Mnist.published
    first: Domain = "mnist"
    """Domain of a share of the clients."""
    second: Domain = "digits"
    """Another domain, of all other clients."""
    share: float = Field(0.5, gt=0, lt=1)
    """Share of the clients in the first domain."""
    classes: int = Field(3, ge=1, le=CLASSES)
    """Distinct classes per client (FLIC: 3 or 5)."""
    train_samples: int | None = Field(None, ge=1)
    """Use only so many training samples of each domain. By default all."""
    scale: Scale = "unit"
    """Range of the pixels. ``unit``: [0, 1]. ``centred``: [-1, 1]. ``mnist``: (``unit`` − 0.1307) / 0.3081."""

    def check(self, clients: int, data_dir: Path | None) -> Header:
        headers = self._in_each(clients, lambda source, number, place: source.check(number, data_dir))
        shapes = tuple(headers[domain].shapes[0] for domain in self._domains(clients))
        train, test = sum(header.train for header in headers), sum(header.test for header in headers)
        return Header(None, train, test, shapes, CLASSES)

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> TwoDomains:
        """Return the clients; both domains are cut by `seed`, independently of each other."""
        pools = self._in_each(clients, lambda source, number, place: source.cut(number, seed, data_dir, place))
        domains, sizes = self._domains(clients), np.zeros((2, clients), dtype=np.int64)
        for place, pool in enumerate(pools):
            sizes[:, domains == place] = pool.train_sizes, pool.test_sizes
        shapes = [pools[domain].shapes[0] for domain in domains]
        return TwoDomains(CLASSES, sizes[0], sizes[1], shapes, domains, pools)

    def _in_each(self, clients: int, do: Callable[[Pooled, int, int], T]) -> list[T]:
        """Return what `do` gives for each domain's source, clients and place; a refusal speaks of this domain alone."""
        if self.first == self.second:
            others = "', '".join(sorted(POOLS.keys() - {self.first}))
            raise refusal("data.second", f"another domain than data.first: '{others}'", self.second)
        if clients < 2:
            raise refusal("clients", "at least 2, one of each domain", clients)
        first = floor(self.share * clients + 0.5)
        if not 0 < first < clients:
            near = float(f"{(1 if first == 0 else clients - 1) / clients:.6g}")
            text = f"one with 1 to {clients - 1} of clients = {clients} in each domain"
            raise refusal("data.share", text, self.share, near)
        results = []
        for place, (key, number) in enumerate((("first", first), ("second", clients - first))):
            domain, keys = getattr(self, key), {name: getattr(self, name) for name in SHARED}
            try:
                results.append(do(POOLS[domain](partition="shards", **keys), number, place))
            except UsageError as error:
                raise UsageError(f"data.{key} = '{domain}': {error}") from error
        return results

    def _domains(self, clients: int) -> Ints:
        """Return each client's domain, int64 [clients]: the first i clients hold the rounded share of i."""
        counts = np.floor(self.share * np.arange(clients + 1) + 0.5)
        domains: Ints = (1 - np.diff(counts)).astype(np.int64)
        return domains
