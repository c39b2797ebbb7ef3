"""What a data source promises: a check, and a federation of clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError, check_within, refusal
from hpcfl.base.types import Ints, Shape

Features = NDArray[np.float32]
Inputs = Features | Ints
"""What a model takes: real numbers, or tokens."""
Labels = Ints | NDArray[np.float32]
Range = tuple[float, float]
Samples = tuple[Inputs, Labels]
Pixels = NDArray[np.uint8] | Inputs
Scale = Literal["unit", "centred", "mnist"]
MOMENTS = {"centred": (0.5, 0.5), "mnist": (0.1307, 0.3081)}
"""What is taken off pixels of [0, 1], and by what they are then divided; those of MNIST have mean 0 and deviation 1."""


CLASSES = 2**18
"""Classes that any data may have; more where there are more samples."""


FARTHEST = 100.0
"""Largest magnitude of a feature that raises no doubt.

The curvature along a weight grows with the square of its feature, and the step that is stable falls with it: at 100 it
is 10⁴ times shorter than for features of order 1, which usual step sizes suit. Pixels of 0 to 255 are beyond it. No
standardised feature is in fewer than 10⁴ samples: it is at most √n in n of them.
"""

UNSTATED = "not stated by its authors"


class Published(NamedTuple):
    """What others publish for a source; nothing is fetched."""

    files: tuple[str, ...]  # patterns below the data folder; of those with " or " between them one will do
    pages: tuple[str, ...]  # addresses
    licence: str  # as far as known


class Piece(NamedTuple):
    """One tensor of a sample that is a tuple of several."""

    shape: Shape
    tokens: bool  # its numbers are integers


EXACT = 2**24  # integers up to which float32 holds all


def packed(pieces: Sequence[NDArray[Any]]) -> tuple[Inputs, tuple[Piece, ...]]:
    """Return samples of several tensors ``[n, …]`` as rows of all their numbers, ``[n, numbers]``, and what is in them.

    Rows are of integers where all tensors are. UsageError where float32 cannot hold an integer beside real numbers.
    """
    kinds = tuple(Piece(tuple(piece.shape[1:]), piece.dtype.kind in "iub") for piece in pieces)
    flat = [piece.reshape(len(piece), prod(kind.shape)) for piece, kind in zip(pieces, kinds)]
    if all(kind.tokens for kind in kinds):
        return np.concatenate(flat, axis=1).astype(np.int64), kinds
    for number, (piece, kind) in enumerate(zip(flat, kinds)):
        if kind.tokens and np.abs(piece.astype(np.int64)).max(initial=0) > EXACT:
            raise UsageError(f"tensor {number} of a sample: expected integers of ±2^24 beside real numbers")
    return np.concatenate(flat, axis=1).astype(np.float32), kinds


@dataclass(frozen=True)
class Header:
    """What is known of a data set before a federation is made of it."""

    clients: int | None  # None: any number can be cut from a pool
    train: int  # samples, over all clients
    test: int
    shapes: tuple[Shape, ...]  # of one sample, per client; one where all are equal; the extremes if the seed draws them
    classes: int  # labels are 0 .. classes - 1; of targets, how many numbers the last axis of a label has
    targets: bool = False  # labels are real numbers
    label_shape: Shape = field(default=(), kw_only=True)  # of one sample's labels
    tokens: bool = field(default=False, kw_only=True)  # features are integers
    pieces: tuple[Piece, ...] = field(default=(), kw_only=True)  # what a sample's features are of, see `packed`
    fresh: bool = False  # clients may draw new samples of a linear model in each round
    server: int = 0  # training samples that the server itself holds, not among `train`
    ranges: tuple[Range, ...] = ()  # least and largest training feature of each client, where all have been read


def too_large(ranges: Sequence[Range], clients: str, source: object) -> str:
    """Return a warning of training features beyond `FARTHEST`, "" where none is; `clients` in words: whose they are."""
    farthest = [max(both, key=abs) for both in ranges]
    beyond = [client for client, value in enumerate(farthest) if not abs(value) <= FARTHEST]
    if not beyond:
        return ""
    pixels = all(least >= 0 and most <= 255 for least, most in ranges)
    unscaled = getattr(source, "scale", "no such key") is None
    standardised = "features standardised to mean 0 and deviation 1 (a column of ids is no feature)"
    remedy = "data.scale = 'unit'" if pixels and unscaled else standardised
    first = f"client {beyond[0]} holds {farthest[beyond[0]]:g}: beyond ±{FARTHEST:g}"
    text = f"as in {len(beyond)} of {clients}, training by gradients may diverge"
    return f"features: {first}, {text}: expected {remedy}"


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's samples: features float32 ``[n, *shape]`` (int64 if they are tokens), labels ``[n, …]``.

    Labels are int64 where they are classes, float32 where they are targets.
    """

    train_features: Inputs
    train_labels: Labels
    test_features: Inputs
    test_labels: Labels


@dataclass(frozen=True, eq=False)
class Federation(ABC):
    """The clients' data as the engine reads it."""

    classes: int  # as in `Header`
    train_sizes: Ints  # [clients]
    test_sizes: Ints  # [clients], may be 0
    shapes: Sequence[Shape]  # one sample's features, per client
    augment: float | None = field(default=None, kw_only=True)  # images are padded with it, cropped and flipped
    pieces: tuple[Piece, ...] = field(default=(), kw_only=True)  # as in `Header`
    names: tuple[str, ...] = field(default=(), kw_only=True)  # of the clients, where they have other than numbers

    @property
    def clients(self) -> int:
        return len(self.shapes)

    @abstractmethod
    def client(self, i: int) -> ClientData:
        """Return the samples of client `i`; only these are converted to float32."""

    def server_train(self) -> Samples | None:
        """Return the server's own training samples ``([n, *shape], [n])``, classes taking turns; None: it has none."""
        return None

    def server_test(self) -> Samples | None:
        """Return the global test set ``([n, *shape], [n])``; None where there is none."""
        return None

    def loaded_samples(self) -> Iterator[tuple[str, Pixels, Labels, Shape]]:
        """Yield samples that are there already: what they are called, features and labels, and the shape of one."""
        return iter(())

    def save_split(self, path: Path | str) -> None:
        """Write an HDF5 file of who holds which samples, for ``data.partition = "file"`` or for other programs.

        Raises
        ------
        UsageError
            If the clients are not cut from a source's pool.
        """
        raise UsageError("save_split: these clients are not cut from one pool: expected a source with data.partition")


@dataclass(frozen=True, eq=False)
class InMemory(Federation):
    """Clients whose samples are arrays that are there already."""

    parts: Sequence[ClientData] = field(kw_only=True)

    @classmethod
    def of(cls, parts: Sequence[ClientData], classes: int) -> InMemory:
        """Return the federation of some clients' samples; `classes` as in `Header`.

        Real numbers become float32, integers int64. Features may be tuples of arrays ``[n, …]``; a model from outside
        is called with as many tensors.
        """
        features, pieces = ("train_features", "test_features"), tuple[Piece, ...]()
        if isinstance(parts[0].train_features, tuple):
            pieces = packed(parts[0].train_features)[1]
            parts = [replace(part, **{name: packed(getattr(part, name))[0] for name in features}) for part in parts]
        names = (*features, "train_labels", "test_labels")
        parts = [replace(part, **{name: _plain(getattr(part, name)) for name in names}) for part in parts]
        train, test = ([getattr(part, f"{name}_labels") for part in parts] for name in ("train", "test"))
        shapes = [part.train_features.shape[1:] for part in parts]
        return cls(classes, lengths(train), lengths(test), shapes, parts=parts, pieces=pieces)

    @property
    def header(self) -> Header:
        """What `Source.check` returns of it."""
        first = self.parts[0]
        shapes = tuple(self.shapes[:1] if len(set(self.shapes)) == 1 else self.shapes)
        sizes = int(self.train_sizes.sum()), int(self.test_sizes.sum())
        targets, tokens = first.train_labels.dtype.kind == "f", first.train_features.dtype.kind == "i"
        more = Header(self.clients, *sizes, shapes, self.classes, targets)
        return replace(more, label_shape=first.train_labels.shape[1:], tokens=tokens, pieces=self.pieces)

    def client(self, i: int) -> ClientData:
        return self.parts[i]

    def loaded_samples(self) -> Iterator[tuple[str, Pixels, Labels, Shape]]:
        for number, (own, shape) in enumerate(zip(self.parts, self.shapes)):
            yield f"training samples of client {number}", own.train_features, own.train_labels, shape
            yield f"test samples of client {number}", own.test_features, own.test_labels, shape


class Source(ConfigBase, ABC):
    """Base of the ``data`` sections of the config: where samples come from and how clients share them.

    `only_for` names keys that have a meaning beside one word of another key alone: ``{key: (other key, word)}``.
    `published` says where the files come from that it reads; None: it reads none, or the user's own.
    """

    only_for: ClassVar[Mapping[str, tuple[str, str]]] = {}
    published: ClassVar[Published | None] = None

    @abstractmethod
    def check(self, clients: int, data_dir: Path | None) -> Header:
        """Return what is known without the seed, after reading files as far as that is cheap.

        Raises
        ------
        UsageError
            If a file is missing or not what it should be, or the data cannot be shared by `clients` clients.
        """

    @abstractmethod
    def federate(self, clients: int, seed: int, data_dir: Path | None) -> Federation:
        """Return the data of `clients` clients, a function of `seed` and this section alone.

        Raises
        ------
        UsageError
            If `check` would, or if the samples turn out not to allow the partition.
        """

    def number_of_clients(self, data_dir: Path | None) -> int | None:
        """Return how many clients there are where the config says nothing of it; None where it has to.

        By default as many as `check` returns whatever number it is asked for. UsageError as there.
        """
        one, two = (self.check(asked, data_dir).clients for asked in (1, 2))
        return one if one == two else None


class Served(Source, ABC):
    """Keys of all sources whose server may hold training samples of its own."""

    server: int = Field(0, ge=0)
    """Training samples that the server holds itself, beside the clients'."""
    deal: bool = False
    """Deal the server's samples out to the clients in turn, for methods whose server holds none."""

    @property
    def keeps(self) -> int:
        """Training samples that the server holds in the end."""
        return 0 if self.deal else self.server

    def check_server(self, total: int) -> None:
        """Refuse a server that leaves none of `total` training samples to the clients, or has none to deal out."""
        check_within("data.server", self.server, 0, total - 1, f" of {total} training samples in all")
        if self.deal and not self.server:
            raise refusal("data.server", "at least 1 to deal out (data.deal = true)", 0, 1)


def check_samples(where: str, made: Federation, any_features: bool, any_labels: bool) -> None:
    """Raise UsageError where samples that are there already do not fit one another, or what is said of them.

    With `any_features` a model of the user's knows what they mean, with `any_labels` a loss.
    """
    if not isinstance(made, Federation):
        raise UsageError(f"{where}: federate returned a {type(made).__name__}, expected a Federation, such as InMemory")
    if not made.train_sizes.any():
        raise UsageError(f"{where}: no client has training samples, expected some")
    for part, x, y, shape in made.loaded_samples():
        if len(x) != len(y) or tuple(x.shape[1:]) != tuple(shape):
            raise UsageError(f"{where}: {part}: {len(y)} labels for features {[*x.shape]}, expected {[len(y), *shape]}")
        if not any_features and not np.isfinite(x).all():
            raise UsageError(f"{where}: {part}: features are not finite")
        if any_labels:
            continue
        wanted, least, most = y.shape[-1] if y.ndim > 1 else 1, y.min(initial=0), y.max(initial=-1)
        if y.dtype.kind == "f" and made.classes != wanted:
            why = f"expected classes = {wanted}, got {made.classes}; or integers"
            raise UsageError(f"{where}: {part}: labels are real numbers, hence targets: {why}")
        if y.dtype.kind == "f" and not np.isfinite(y).all():
            raise UsageError(f"{where}: {part}: labels are not finite")
        if y.dtype.kind != "f" and (least < 0 or most >= made.classes):
            raise UsageError(f"{where}: {part}: labels are {least} … {most}, expected 0 … {made.classes - 1}")


def check_clients(clients: int, there: int | None = None, where: str = "the data") -> None:
    """Refuse a number of clients below 1, or other than that which the data comes with."""
    if clients < 1:
        raise refusal("clients", "at least 1", clients)
    if there not in (None, clients):
        raise refusal("clients", f"{there}, which {where} holds", clients, there)


def check_largest(where: str, largest: int, samples: int, instead: str = "") -> None:
    """Refuse a class that no number of classes explains: tables and layers are as long as there are classes."""
    most = max(CLASSES, samples)
    if largest >= most:
        raise UsageError(f"{where} hold {largest} among {samples} samples, expected labels below {most}{instead}")


def check_order(key: str, value: float, limit_key: str, limit: float) -> None:
    """Refuse a key's value above another key's."""
    if value > limit:
        raise refusal(key, f"at most {limit_key} = {limit}", value, limit)


def _plain(values: NDArray[Any]) -> Inputs:
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiub":
        got = getattr(values, "dtype", type(values).__name__)
        raise TypeError(f"expected arrays of real numbers or of integers, got {got}")
    return values.astype(np.float32, copy=False) if values.dtype.kind == "f" else values.astype(np.int64, copy=False)


def lengths(parts: Sequence[Labels]) -> Ints:
    return np.array([len(part) for part in parts], dtype=np.int64)


def scaled(pixels: Pixels, peak: int, scale: Scale | None) -> Inputs:
    """Return pixels of ``0 .. peak`` as new float32 numbers of [0, 1] (unit), moved and scaled by `MOMENTS`.

    Without a peak or a scale the numbers stay as they are, and tokens always do.
    """
    if pixels.dtype == np.int64:
        return pixels.astype(np.int64)
    features: Features = pixels.astype(np.float32)
    if not peak or scale is None:
        return features
    features /= peak
    if scale in MOMENTS:
        mean, deviation = MOMENTS[scale]
        features -= mean
        features /= deviation
    return features
