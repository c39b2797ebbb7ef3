"""A federation that one process has read and others of its host map: the same pages, which are there once.

Where one of them writes to an array, it gets a copy of these pages of its own.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfl.base import memfd
from hpcfl.base.errors import RunError
from hpcfl.base.memfd import START
from hpcfl.data.base import Federation, Source

ALIGNED = 64  # bytes: where arrays begin


@contextmanager
def shared(federation: Federation, source: Source) -> Iterator[str]:
    """Put a federation that `source` made where others can `attach` to it, by the text that is yielded, in the block.

    The text is empty where that cannot be: the system has no such memory, or too little, or the federation has parts
    other than arrays, plain values and data classes of this package.
    """
    writer, file, words = Writer(source), None, ""
    try:
        writer.dump(federation)
        text = pickle.dumps(writer.places) + writer.text.getvalue()
        start = _aligned(START + 8 + len(text))
        file, words = memfd.created(start + writer.size)
        with os.fdopen(file, "wb", closefd=False) as room:
            room.seek(START)
            room.write(len(text).to_bytes(8, "little") + text)
            for array, (offset, *_) in zip(writer.arrays, writer.places):
                room.seek(start + offset)
                room.write(np.ascontiguousarray(array.transpose(_axes(array))).reshape(-1).view(np.uint8).data)
    except (TypeError, AttributeError, pickle.PicklingError, OSError):
        words = ""
    try:
        yield words
    finally:
        if file is not None:
            os.close(file)


def attach(text: str, source: Source) -> Federation:
    """Return the federation that another process, or this one, has put where `text` says.

    Raises
    ------
    RunError
        If it cannot be reached, see `hpcfl.base.memfd.opened`.
    """
    file = memfd.opened(text)
    try:
        memory = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise RunError(f"memory of process {text.split()[0]} cannot be mapped: {error.strerror}") from None
    finally:
        os.close(file)
    length = int.from_bytes(memory[START : START + 8], "little")
    words, start = BytesIO(memory[START + 8 : START + 8 + length]), _aligned(START + 8 + length)
    arrays = [
        np.ndarray(shape, kind, memory, start + offset, strides) if 0 not in shape else np.empty(shape, kind)
        for offset, kind, shape, strides in pickle.load(words)
    ]
    made: Federation = Reader(words, [*arrays, source]).load()
    return made


class Writer(pickle.Pickler):
    """Takes a federation apart: arrays, and a `text` that tells how they belong together.

    Attributes
    ----------
    places : list
        Of each array: offset, type, shape, and strides once there are no gaps.
    size : int
        Bytes that all arrays take.
    """

    def __init__(self, source: Source) -> None:
        self.text = BytesIO()
        super().__init__(self.text)
        self.source = source
        self.arrays: list[NDArray[Any]] = []
        self.places: list[tuple[int, str, tuple[int, ...], tuple[int, ...]]] = []
        self.size = 0
        self._known: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        """Return the place of an array among all, and -1 for the source, which others have; None for all else."""
        if value is self.source:
            return -1
        if type(value) is not np.ndarray:
            return None
        if id(value) not in self._known:  # it stays: `arrays` holds it
            repeated = value.size and any(n > 1 and not step for n, step in zip(value.shape, value.strides))
            if value.dtype.hasobject or value.dtype.names or repeated:
                raise TypeError(f"arrays of {value.dtype} and strides {value.strides} cannot be shared")
            strides, step = list(value.strides), value.itemsize  # without gaps; of axes of length 1 they say nothing
            for axis in reversed(_axes(value)):
                if value.shape[axis] > 1:
                    strides[axis] = step
                    step *= value.shape[axis]
            self._known[id(value)] = len(self.arrays)
            self.places.append((self.size, value.dtype.str, value.shape, tuple(strides)))
            self.arrays.append(value)
            self.size += _aligned(value.nbytes)
        return self._known[id(value)]

    def reducer_override(self, value: Any) -> Any:
        """Refuse with a TypeError what is neither plain nor a path, a type of numbers, or a data class of ours."""
        kind = value if isinstance(value, type) else type(value)
        ours = kind.__module__.startswith("hpcfl.") and (is_dataclass(kind) or hasattr(kind, "_fields"))
        if not ours and not issubclass(kind, (Path, np.dtype)):
            raise TypeError(f"{kind} cannot be shared")
        return NotImplemented


class Reader(pickle.Unpickler):
    """Puts together what a `Writer` took apart; `known` are the arrays, and the source."""

    def __init__(self, text: BytesIO, known: list[Any]) -> None:
        super().__init__(text)
        self.known = known

    def persistent_load(self, place: int) -> Any:
        return self.known[place]


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _axes(array: NDArray[Any]) -> list[int]:
    """Return the axes from the one of the longest steps in memory to that of the shortest."""
    return sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
