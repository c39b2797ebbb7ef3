"""What a data source promises: a header, a check that is cheap, and a federation of clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError
from hpcfl.base.types import Shape

Features = NDArray[np.float32]
Integers = NDArray[np.int64]
Labels = Integers | Features
Range = tuple[float, float]


@dataclass(frozen=True)
class Header:
    """What is known of a data set before its samples are read.

    Attributes
    ----------
    clients : int or None
        Number of clients the data comes with; None where any number can be cut from a pool.
    train, test : int
        Number of samples, over all clients.
    shapes : tuple of tuple of int
        Shape of one sample's features per client, or one entry where all are equal. Where the seed draws the
        clients' shapes, the narrowest and the widest that there may be, whatever the number of clients.
    classes : int
        Labels are ``0 .. classes - 1``; 1 for targets.
    targets : bool
        Whether labels are real numbers.
    fresh : bool
        Whether clients may draw new samples of a linear model in each round.
    server : int
        Training samples that the server itself holds; they are not among `train`.
    ranges : tuple of (float, float)
        Least and largest training feature of each client, where a source's `check` has read them all; else empty.
    """

    clients: int | None
    train: int
    test: int
    shapes: tuple[Shape, ...]
    classes: int
    targets: bool = False
    fresh: bool = False
    server: int = 0
    ranges: tuple[Range, ...] = ()


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's samples: features float32 ``[n, *shape]``, labels int64 ``[n]`` or targets float32 ``[n]``."""

    train_features: Features
    train_labels: Labels
    test_features: Features
    test_labels: Labels


@dataclass(frozen=True, eq=False)
class Federation(ABC):
    """The clients' data as the engine reads it.

    Attributes
    ----------
    classes : int
        Labels are ``0 .. classes - 1``; 1 for targets.
    train_sizes, test_sizes : int64 [clients]
        Samples of each client; a test size may be 0.
    shapes : list of tuple of int
        Shape of one sample's features, per client.
    augment : float, optional
        Batches of images are cropped and flipped at random, padded with this value; None: they are not.
    """

    classes: int
    train_sizes: Integers
    test_sizes: Integers
    shapes: list[Shape]
    augment: float | None = field(default=None, kw_only=True)

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.shapes)

    @abstractmethod
    def client(self, i: int) -> ClientData:
        """Return the samples of client `i`; only these are converted to float32."""

    def server_train(self) -> tuple[Features, Labels] | None:
        """Return the training samples that the server itself holds ``([n, *shape], [n])``; None: it holds none."""
        return None

    @abstractmethod
    def server_test(self) -> tuple[Features, Labels] | None:
        """Return the global test set ``([n, *shape], [n])``, or None where there is none."""


class Source(ConfigBase, ABC):
    """Base of the ``data`` sections of the config: where samples come from and how clients share them."""

    def header(self, data_dir: Path | None) -> Header:
        """Return the sizes, from file headers alone; what `check` needs, unless a source has a `check` of its own.

        Raises
        ------
        UsageError
            If a file is missing, or its header shows that it is not what it should be.
        """
        raise NotImplementedError(f"{type(self).__name__}: expected a method header or check")

    @abstractmethod
    def federate(self, clients: int, seed: int, data_dir: Path | None) -> Federation:
        """Return the data of `clients` clients, a function of `seed` and this section alone.

        Raises
        ------
        UsageError
            If `check` would, or if the samples turn out not to allow the partition.
        """

    def check(self, clients: int, data_dir: Path | None) -> Header:
        """Return the header after checking that the data suits so many clients.

        Raises
        ------
        UsageError
            If `header` does, or if the data cannot be shared by `clients` clients.
        """
        header = self.header(data_dir)
        if clients < 1:
            raise UsageError(f"clients = {clients}: expected at least 1")
        if header.clients is not None and header.clients != clients:
            raise UsageError(
                f"clients = {clients}, but the data holds {header.clients}: set clients = {header.clients}"
            )
        return header
