"""Newcomers to a run that are in a file of their own, in the format of ``data.name = "hdf5"``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcfl.algorithms import algorithm_class, algorithms
from hpcfl.base.digests import origin
from hpcfl.base.errors import UsageError, listed
from hpcfl.base.types import Ints
from hpcfl.config import Config
from hpcfl.data import ClientData, Federation, Header
from hpcfl.data.base import Scale
from hpcfl.data.formats import hdf5_file
from hpcfl.data.formats.hdf5_file import Survey
from hpcfl.data.hdf5 import Hdf5, Hdf5Federation
from hpcfl.data.pooled import BLACK, Pooled


@dataclass(frozen=True, eq=False)
class Newcomers(Federation):
    """The run's clients, without samples, and after them those of the file: its i-th has the number `first` + i.

    This number keys what is random of a newcomer, so that it shares nothing with a client of the run, whoever else
    adapts.
    """

    first: int
    own: Hdf5Federation

    def client(self, i: int) -> ClientData:
        return self.own.client(i - self.first)


@dataclass(frozen=True)
class NewcomersFile:
    """A file of newcomers that suits a run; `ids` are in their natural order, `scale` is that of its features."""

    path: Path
    ids: list[str]
    scale: Scale | None

    @classmethod
    def judged(cls, path: Path, config: Config, header: Header) -> NewcomersFile:
        """Look at all of a file but large features; UsageError where it is damaged or its clients do not suit the run.

        `header` is that of the run's data. Features are to be as the run's model sees them: they are scaled only if the
        run's own come from such a file too.
        """
        contents = hdf5_file.survey(path)
        scale = config.data.scale if isinstance(config.data, Hdf5) else None
        file = cls(path, [part.group.split("/")[1] for part in contents.train], scale)
        file.source.check(len(file.ids), None)
        file._check_labels(contents, header)
        for name, part in zip(file.ids, contents.train):
            where = f"{path}: client '{name}' has {part.features}"
            if part.shape != header.shapes[0] and not config.algorithm.any_shape:
                shaped = [(other, kind) for other in algorithms() if (kind := algorithm_class(other)).any_shape]
                able = [other for other, kind in shaped if kind.model_construct(name=other).adapt_epochs > 0]
                one = f"algorithm '{config.algorithm.name}' shares one model"
                said = f"{where}, the run's have the shape {header.shapes[0]}: {one}"
                raise UsageError(f"{said}; expected the same, or a run of {', '.join(able)}")
            try:
                config.model.check(part.shape, header.classes)
            except UsageError as error:
                raise UsageError(f"{where}: {error}") from None
        return file

    @property
    def source(self) -> Hdf5:
        return Hdf5(file=str(self.path), scale=self.scale)

    def federate(self, config: Config, header: Header) -> Newcomers:
        own = self.source.federate(len(self.ids), config.seed, None)
        assert isinstance(own, Hdf5Federation)
        first, none = config.clients, np.zeros(config.clients, dtype=np.int64)
        train, test = (np.append(none, part) for part in (own.train_sizes, own.test_sizes))
        shapes = [header.shapes[0]] * first + list(own.shapes)
        augment = BLACK[config.data.scale] if isinstance(config.data, Pooled) and config.data.augment else None
        return Newcomers(header.classes, train, test, shapes, first, own, augment=augment)

    def picked(self, text: str | None) -> Ints:
        """Places of the ids in ``"w3,w5"``, ascending, or of all for ``"all"`` and None, int64 [n]."""
        if text is None or text.strip() == "all":
            return np.arange(len(self.ids))
        words = [word.strip() for word in text.split(",")]
        for word in words:
            if word not in self.ids:
                raise UsageError(f"--client {text}: expected ids in {self.path} ({listed(self.ids)}), got '{word}'")
        return np.array(sorted({self.ids.index(word) for word in words}))

    @property
    def facts(self) -> dict[str, str]:
        about = origin(self.path)
        return {"data": about["file"], "data_sha256": about["sha256"]}

    def _check_labels(self, contents: Survey, header: Header) -> None:
        parts = [part for pair in zip(contents.train, contents.test) for part in pair]
        if parts[0].real != header.targets:
            now, then = ("real targets", "classes") if parts[0].real else ("classes", "real targets")
            raise UsageError(f"{self.path}: {parts[0].group}/labels are {now}, those of the run {then}")
        if parts[0].label_shape != header.label_shape:
            got = f"{parts[0].group}/labels have shape {parts[0].label_shape} per sample"
            raise UsageError(f"{self.path}: {got}, those of the run {header.label_shape}")
        for part in parts if not header.targets else ():
            if part.largest >= header.classes:
                held, last = f"{part.group}/labels hold class {part.largest}", header.classes - 1
                raise UsageError(f"{self.path}: {held}, expected classes of the run: 0 … {last}")
