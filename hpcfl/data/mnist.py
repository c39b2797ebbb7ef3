"""MNIST (LeCun et al. 1998): 60000 training and 10000 test images of digits, from IDX files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hpcfl.base.errors import UsageError
from hpcfl.data.base import Header
from hpcfl.data.formats import idx
from hpcfl.data.pooled import Pool, Pooled

CLASSES, SIDE, PEAK = 10, 28, 255


class Mnist(Pooled):
    """The folder ``mnist/`` of the data folder, as distributed: four IDX files, plain or gzipped."""

    name: Literal["mnist"] = "mnist"

    def pool_header(self, data_dir: Path | None) -> Header:
        """Return the sizes that the files' headers give."""
        counts = {}
        for part in ("train", "t10k"):
            images, labels = idx.find(_folder(data_dir), part)
            counts[part], *sides = idx.read_sizes(images, labels)
            if sides != [SIDE, SIDE]:
                raise UsageError(f"{images}: {sides[0]} x {sides[1]} pixels, expected {SIDE} x {SIDE}")
        return Header(None, counts["train"], counts["t10k"], ((1, SIDE, SIDE),), CLASSES)

    def verify(self, data_dir: Path | None) -> None:
        """Read all files to their ends."""
        for part in ("train", "t10k"):
            images, labels = idx.find(_folder(data_dir), part)
            idx.verify(images)
            idx.read_labels(labels, CLASSES)

    def load(self, seed: int, data_dir: Path | None) -> Pool:
        """Return the images as distributed; `seed` has no effect."""
        train_images, train_labels = idx.find(_folder(data_dir), "train")
        test_images, test_labels = idx.find(_folder(data_dir), "t10k")
        return Pool(
            idx.read_images(train_images)[:, None],
            idx.read_labels(train_labels, CLASSES),
            idx.read_images(test_images)[:, None],
            idx.read_labels(test_labels, CLASSES),
            PEAK,
        )


def _folder(data_dir: Path | None) -> Path:
    if data_dir is None:
        raise UsageError("data.name = 'mnist': --data-dir or HPCFL_DATA must name the folder of mnist/")
    return data_dir / "mnist"
