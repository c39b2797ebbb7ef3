"""A federation that one process has read and others of its host map: the same pages, which are there once.

Where one of them writes to an array, it gets a copy of these pages of its own.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from importlib import import_module
from operator import attrgetter
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
        text = json.dumps([writer.parts(federation), writer.places]).encode()
        start = _aligned(START + 8 + len(text))
        file, words = memfd.created(start + writer.size)
        with os.fdopen(file, "wb", closefd=False) as room:
            room.seek(START)
            room.write(len(text).to_bytes(8, "little") + text)
            for array, (offset, *_) in zip(writer.arrays, writer.places):
                room.seek(start + offset)
                room.write(np.ascontiguousarray(array.transpose(_axes(array))).reshape(-1).view(np.uint8).data)
    except (TypeError, AttributeError, OSError):
        words = ""
    writer.arrays.clear()
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
    parts, places = json.loads(memory[START + 8 : START + 8 + length])
    start = _aligned(START + 8 + length)
    arrays = [
        np.ndarray(shape, kind, memory, start + offset, strides) if 0 not in shape else np.empty(shape, kind)
        for offset, kind, shape, strides in places
    ]
    made: Federation = _made(parts, arrays, source)
    return made


class Writer:
    """Takes a federation apart: arrays, and what tells how they belong together, which JSON can hold.

    Attributes
    ----------
    places : list
        Of each array: offset, type, shape, and strides once there are no gaps.
    size : int
        Bytes that all arrays take.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.arrays: list[NDArray[Any]] = []
        self.places: list[tuple[int, str, tuple[int, ...], tuple[int, ...]]] = []
        self.size = 0
        self._known: dict[int, int] = {}

    def parts(self, value: Any) -> Any:
        """Return plain values as they are, and all else as a list of its kind and its parts; TypeError if unknown."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if value is self.source:
            return ["source"]
        if type(value) is np.ndarray:
            return ["array", self._place(value)]
        if type(value) in (list, tuple):
            return [type(value).__name__, *map(self.parts, value)]
        if type(value) is dict:
            return ["dict", *([self.parts(key), self.parts(each)] for key, each in value.items())]
        if isinstance(value, Path):
            return ["path", str(value)]
        if isinstance(value, np.dtype) and value.names is None:
            return ["dtype", value.str]
        kind = type(value)
        if not kind.__module__.startswith("hpcfl.") or not (is_dataclass(kind) or hasattr(kind, "_fields")):
            raise TypeError(f"{kind} cannot be shared")
        named = value._asdict() if hasattr(kind, "_fields") else vars(value)
        return ["object", kind.__module__, kind.__qualname__, {name: self.parts(each) for name, each in named.items()}]

    def _place(self, array: NDArray[Any]) -> int:
        repeated = array.size and any(n > 1 and not step for n, step in zip(array.shape, array.strides))
        if array.dtype.hasobject or array.dtype.names or repeated:
            raise TypeError(f"arrays of {array.dtype} and strides {array.strides} cannot be shared")
        if id(array) not in self._known:  # it stays: `arrays` holds it
            self._known[id(array)] = len(self.arrays)
            self.places.append((self.size, array.dtype.str, array.shape, _dense(array)))
            self.arrays.append(array)
            self.size += _aligned(array.nbytes)
        return self._known[id(array)]


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _axes(array: NDArray[Any]) -> list[int]:
    """Return the axes from the one of the longest steps in memory to that of the shortest."""
    return sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))


def _dense(array: NDArray[Any]) -> tuple[int, ...]:
    """Return an array's strides as they are without gaps; those of axes of length 1, which say nothing, stay."""
    strides, step = list(array.strides), array.itemsize
    for axis in reversed(_axes(array)):
        if array.shape[axis] > 1:
            strides[axis] = step
            step *= array.shape[axis]
    return tuple(strides)


def _made(parts: Any, arrays: list[NDArray[Any]], source: Source) -> Any:
    """Return what `Writer.parts` took apart."""
    if not isinstance(parts, list):
        return parts
    kind, *rest = parts
    if kind == "source":
        return source
    if kind == "array":
        return arrays[rest[0]]
    if kind in ("path", "dtype"):
        return Path(rest[0]) if kind == "path" else np.dtype(rest[0])
    if kind == "dict":
        return {_made(key, arrays, source): _made(value, arrays, source) for key, value in rest}
    if kind == "object":
        module, name, named = rest
        values = {name: _made(each, arrays, source) for name, each in named.items()}
        owner: Any = attrgetter(name)(import_module(module))
        if hasattr(owner, "_fields"):
            return owner(**values)
        whole = object.__new__(owner)
        vars(whole).update(values)
        return whole
    made = [_made(each, arrays, source) for each in rest]
    return tuple(made) if kind == "tuple" else made
