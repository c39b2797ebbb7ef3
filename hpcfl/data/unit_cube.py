"""Synthetic samples on the unit cube, between one law for all clients and a corner and a truth for each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from hpcfl.base.errors import check_within
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats
from hpcfl.data.base import ClientData, Features, Federation, Header, Labels, Served, check_clients
from hpcfl.data.partition import turns

NARROWEST = 0.2  # side of a client's box at heterogeneity 1
CHOICE = 10  # the server's samples are drawn from so many times as many, so that classes can take turns


@dataclass(frozen=True, eq=False)
class CubeFederation(Federation):
    """Clients whose samples are drawn when they are asked for."""

    source: UnitCube
    seed: int
    truth: Floats  # θ* [classes, 1 + d]
    server_samples: tuple[Features, Labels]  # what the server holds or what is dealt out, [r, d] and [r]

    def client(self, i: int) -> ClientData:
        """Return the samples of client `i`; those that it was dealt come last."""
        source, rng = self.source, keyed(self.seed, "client of the cube", client=i)
        side = 1 - (1 - NARROWEST) * source.heterogeneity
        corner = (1 - side) * rng.random(source.dimension)
        truth = self.truth + source.heterogeneity * rng.standard_normal(self.truth.shape)
        x = corner + side * rng.random((source.samples + source.test_samples, source.dimension))
        y = labelled(x, truth, source.noise, rng)
        train, test = np.split(np.arange(len(x)), [source.samples])  # indices: a view would keep all samples
        own, dealt = (x.astype(np.float32), y), slice(i, None if source.deal else 0, self.clients)
        whole = [np.concatenate([part[train], held[dealt]]) for part, held in zip(own, self.server_samples)]
        return ClientData(*whole, *(part[test] for part in own))

    def server_train(self) -> tuple[Features, Labels] | None:
        return self.server_samples if self.source.keeps else None

    def server_test(self) -> tuple[Features, Labels] | None:
        """Return all clients' test samples; None where there are none."""
        if not self.source.test_samples:
            return None
        drawn = map(self.client, range(self.clients))
        features, labels = zip(*((data.test_features, data.test_labels) for data in drawn))
        return np.concatenate(features), np.concatenate(labels)


class UnitCube(Served):
    """Features in [0, 1]^d, and classes or targets of a generalised linear law with the scores ``θ* (1, 2 x - 1)``.

    Classes are drawn from the softmax of the scores; targets are ``tanh`` of the one score and normal noise, which is
    not clipped. θ* is standard normal. The server's samples have θ*, and are drawn from ones uniform on the cube such
    that classes take turns. There are ``clients * samples + server`` training samples in all.
    """

    name: Literal["unit_cube"] = "unit_cube"
    dimension: int = Field(2, ge=1)
    """Features per sample, d."""
    labels: int = Field(2, ge=1)
    """Number of classes. 1: targets."""
    samples: int = Field(50, ge=1)
    """Training samples of each client, s."""
    test_samples: int = Field(20, ge=0)
    """Test samples of each client; the global test set is those of all."""
    heterogeneity: float = Field(0.0, ge=0, le=1)
    """How unlike clients are, h: features are uniform on a box of side 1 - 0.8 h at a random place in the cube, and a
    client's truth is θ* + h times standard normals."""
    noise: float = Field(0.0, ge=0)
    """Standard deviation of the targets' noise, or the chance of a class drawn uniformly instead."""

    def check(self, clients: int, data_dir: Path | None) -> Header:
        if self.labels > 1:
            check_within("data.noise", self.noise, 0.0, 1.0, f", a chance for data.labels = {self.labels} classes")
        check_clients(clients)
        total = clients * self.samples + self.server
        self.check_server(total)
        shapes, test = ((self.dimension,),), clients * self.test_samples
        return Header(None, total - self.keeps, test, shapes, self.labels, self.labels == 1, server=self.keeps)

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> CubeFederation:
        """Return the clients; only the server's samples are drawn already."""
        self.check(clients, data_dir)
        truth = keyed(seed, "truth of the cube").standard_normal((self.labels, 1 + self.dimension))
        sizes = np.full(clients, self.samples)
        if self.deal:
            sizes += [len(range(i, self.server, clients)) for i in range(clients)]
        rng = keyed(seed, "server of the cube")
        x = rng.random((CHOICE * self.server, self.dimension))
        y = labelled(x, truth, self.noise, rng)
        classes = y.astype(np.int64) if self.labels > 1 else np.zeros(len(y), dtype=np.int64)
        picked = turns(classes, self.server, rng)
        held = x[picked].astype(np.float32), y[picked]
        tests, shapes = np.full(clients, self.test_samples), [(self.dimension,)] * clients
        return CubeFederation(self.labels, sizes, tests, shapes, self, seed, truth, held)


def labelled(x: Floats, truth: Floats, noise: float, rng: np.random.Generator) -> Labels:
    """Draw classes int64 ``[n]`` of samples ``[n, d]``, targets float32 where the truth ``[C, 1 + d]`` is one row."""
    scores = truth[:, 0] + (2 * x - 1) @ truth[:, 1:].T
    if len(truth) == 1:
        targets: Features = (np.tanh(scores[:, 0]) + noise * rng.standard_normal(len(x))).astype(np.float32)
        return targets
    # the largest of scores with Gumbel noise has the law of their softmax
    drawn = (scores + rng.gumbel(size=scores.shape)).argmax(axis=1)
    return np.where(rng.random(len(x)) < noise, rng.integers(len(truth), size=len(x)), drawn)
