"""Data sources as users write them: some bring their clients, whatever number the config has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from hpcfl import ClientData, Federation, Header, InMemory, Source, keyed

CLASSES = 3


def federation(seed: int, clients: int, samples: int = 6) -> InMemory:
    """Return points of the plane around three centres."""
    parts = []
    for client in range(clients):
        rng = keyed(seed, "points", client=client)
        y = np.arange(2 * samples) % CLASSES
        x = (rng.normal(size=(len(y), 2)) + 3 * np.stack([y // 2, y % 2], 1)).astype(np.float32)
        parts.append(ClientData(x[:samples], y[:samples], x[samples:], y[samples:]))
    return InMemory.of(parts, CLASSES)


class Any(Source):
    """As many clients as are asked for."""

    def check(self, clients: int, data_dir: Path | None) -> Header:
        return federation(0, clients).header

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> Federation:
        return federation(seed, clients)


class Twelve(Any):
    """Twelve clients, and it says so."""

    def check(self, clients: int, data_dir: Path | None) -> Header:
        return federation(0, 12).header

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> Federation:
        return federation(seed, 12)


class Silent(Twelve):
    """Twelve clients, of which its header says nothing."""

    def check(self, clients: int, data_dir: Path | None) -> Header:
        return replace(super().check(clients, data_dir), clients=None)


class Shaped(Any):
    """Samples of any shape, whose first numbers tell the classes apart."""

    shape: tuple[int, ...] = (2,)

    def check(self, clients: int, data_dir: Path | None) -> Header:
        return self.federate(clients, 0, data_dir).header

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> InMemory:
        plain = federation(seed, clients)
        names = ("train_features", "test_features")
        return InMemory.of(
            [replace(each, **{name: self._as(getattr(each, name)) for name in names}) for each in plain.parts], CLASSES
        )

    def _as(self, x: np.ndarray) -> np.ndarray:
        return np.resize(x.T, (*self.shape[::-1], len(x))).T.astype(np.float32)
