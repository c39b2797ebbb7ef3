"""Clients as unequal as a method may meet them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hpcfl.base.rng import keyed
from hpcfl.data import ClientData, Header, InMemory, Source

SIZES = 1, 3, 60, 7, 300
CLASSES, FEATURES, TESTED = 4, 5, 8


class Unequal(Source):
    """Gaussian blobs of four classes: of five clients the first holds one sample, and nobody a sample of the last."""

    def check(self, clients: int, data_dir: Path | None) -> Header:
        return self.federate(clients, 0, data_dir).header

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> InMemory:
        return InMemory.of([_client(seed, number, SIZES[number % len(SIZES)]) for number in range(clients)], CLASSES)


def _client(seed: int, number: int, size: int) -> ClientData:
    """Return so many training samples of at most two of the first three classes, and test samples of both."""
    rng, count = keyed(seed, "unequal", client=number), size + TESTED
    y = (number + rng.integers(2, size=count)) % (CLASSES - 1)
    x = rng.normal(size=(count, FEATURES)).astype(np.float32) + 2 * np.eye(CLASSES, FEATURES, dtype=np.float32)[y]
    return ClientData(x[:size], y[:size], x[size:], y[size:])
