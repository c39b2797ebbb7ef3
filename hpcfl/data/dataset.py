"""Any PyTorch ``Dataset`` as a pool, which is cut into clients: ``data.name = "package.module:Dataset"``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, create_model

from hpcfl.base.errors import UsageError, refusal
from hpcfl.base.lazy import torch
from hpcfl.base.plugins import callable_of, outside, reason
from hpcfl.base.rng import key_as_seed, keyed
from hpcfl.data.base import Labels, Piece, Pixels, check_largest, packed
from hpcfl.data.formats.hdf5_file import PEAK
from hpcfl.data.pooled import Pool, Pooled

FORM = "package.module:Class"
MOST, MOST_SAID = 2**22, 2**28
"""Samples of a dataset that does not say how many it has, which may be without end, and of one that does."""
PARTS: tuple[tuple[str, Any, Any], ...] = (("train", True, False), ("split", "train", "test"))
"""Parameters by which datasets tell training from test samples, and what they then are."""


class TorchDataset(Pooled):
    """A PyTorch ``Dataset``, or a function that makes one: samples ``(features, label)``, all of equal shapes.

    It is called with `arguments`, and with ``root``, the data folder, if it takes that. If it takes ``train`` or
    ``split``, there is a test pool. Features are arrays, tensors, images or numbers, or a tuple of several; bytes are
    pixels, other integers tokens. A label is a class, a real number, or an array of either.
    """

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    """What the dataset is called with, by name."""
    test_share: float = Field(0.0, ge=0, lt=1)
    """Share of the samples that is the test pool, drawn by the seed, of a dataset that has no test part itself."""

    def load(self, seed: int, data_dir: Path | None) -> Pool:
        """Return the pool after reading each sample once; what torch draws for that is keyed by the seed."""
        parts = self._made(data_dir)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key_as_seed(seed, "dataset"))
            where = f"data.name = '{self.name}'"
            both = [read(part, where) for part in parts]
        x, y, pieces = both[0]
        if self.augment and (pieces or x.ndim != 4):
            raise refusal("data.augment", f"false, since samples of {self.name} are no images [C, H, W]", True, False)
        rows = keyed(seed, "test").permutation(len(y))
        held, kept = map(np.sort, np.split(rows, [int(len(y) * self.test_share)]))
        train, test = ((x, y), both[1][:2]) if len(both) > 1 else ((x[kept], y[kept]), (x[held], y[held]))
        peak = PEAK if x.dtype == np.uint8 else 0
        if y.dtype.kind == "f":
            classes = y.shape[-1] if y.ndim > 1 else 1
        else:
            classes = 1 + max(int(labels.max(initial=-1)) for _, labels, _ in both)
            check_largest(f"{where}: labels", classes - 1, sum(len(labels) for _, labels, _ in both))
        return Pool(*train, *test, peak, classes, pieces)

    def _made(self, data_dir: Path | None) -> list[Any]:
        """Return the training part, and the test part if there is one."""
        where, make = f"data.name = '{self.name}'", outside(self.name, "data.name", FORM)
        known = inspect.signature(make).parameters
        own = dict(self.arguments)
        if "root" in known and "root" not in own:
            own["root"] = str(data_dir or ".")
        parts = [[{key: train}, {key: test}] for key, train, test in PARTS if key in known and key not in own]
        both: list[dict[str, Any]] = parts[0] if parts else [{}]
        if len(both) > 1 and self.test_share:
            raise refusal("data.test_share", f"0.0, since {self.name} has a test part", self.test_share, 0.0)
        try:
            return [make(**own, **part) for part in both]
        except Exception as error:
            raise UsageError(f"{where}: {reason(error)}") from error


def section(spec: str, found: object) -> type[TorchDataset]:
    """Return the section of a dataset; UsageError where it is nothing that can be called."""
    from torch.utils.data import Dataset

    return _section(spec, callable_of(spec, "data.name", found, "a Source, a Dataset or what makes one", Dataset))


@functools.cache
def _section(spec: str, found: Callable[..., Any]) -> type[TorchDataset]:
    doc = (inspect.getdoc(found) or f"What {spec} holds.").partition("\n\n")[0]
    field: dict[str, Any] = {"name": (Literal[spec], spec)}
    return create_model("TorchDataset", __base__=TorchDataset, __module__=__name__, __doc__=doc, **field)


def read(dataset: Any, where: str) -> tuple[Pixels, Labels, tuple[Piece, ...]]:
    """Return all samples' features and labels ``[n, …]``; those of several tensors as `packed` has them."""
    try:
        count = len(dataset) if hasattr(dataset, "__len__") else None
        if count is None:
            samples = list(islice(dataset, MOST + 1))
        else:
            samples = [dataset[i] for i in range(count)] if count <= MOST_SAID else []
    except Exception as error:
        raise UsageError(f"{where}: {reason(error)}") from error
    if (count or len(samples)) > (most := MOST if count is None else MOST_SAID):
        raise UsageError(f"{where}: expected at most {most} samples, got {'more' if count is None else count}")
    if not samples:
        raise UsageError(f"{where}: it has no samples, expected at least 1")
    if not all(isinstance(sample, Sequence) and len(sample) == 2 for sample in samples):
        raise UsageError(f"{where}: expected samples (features, label), got {samples[0]!r:.80}")
    features, labels = zip(*samples)
    y = _stacked(labels, f"{where}: labels")
    if isinstance(features[0], tuple | list):
        tensors = [_stacked(tensor, f"{where}: features") for tensor in zip(*features)]
        x, pieces = packed([tensor / np.float32(PEAK) if tensor.dtype == np.uint8 else tensor for tensor in tensors])
    else:
        x, pieces = _stacked(features, f"{where}: features"), ()
    return x if x.ndim > 1 else x[:, None], y.astype(np.int64) if y.dtype.kind == "u" else y, pieces


def _stacked(values: Sequence[Any], where: str) -> NDArray[Any]:
    """Return arrays of equal shapes as one: bytes as they are, other integers int64, real numbers float32."""
    arrays = [np.asarray(value) for value in values]
    if hasattr(values[0], "getbands"):  # images of Pillow, whose channels are last, or left out where there is one
        arrays = [array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0) for array in arrays]
    for number, array in enumerate(arrays):
        if array.shape != arrays[0].shape or array.dtype.kind not in "fiub":
            wanted, got = f"numbers of shape {arrays[0].shape}", f"{array.dtype} of shape {array.shape}"
            raise UsageError(f"{where}: sample {number}: expected {wanted} as the first one's, got {got}")
    stacked = np.stack(arrays)
    if stacked.dtype.kind == "f":
        return stacked.astype(np.float32)
    return stacked if stacked.dtype == np.uint8 else stacked.astype(np.int64)
