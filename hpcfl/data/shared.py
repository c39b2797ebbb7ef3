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
from functools import partial
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
    try:
        file, words = _written(federation, source)
    except (TypeError, AttributeError, OSError):
        file, words = None, ""
    try:
        yield words
    finally:
        if file is not None:
            os.close(file)


def _written(federation: Federation, source: Source) -> tuple[int, str]:
    """Write a federation to memory of its own; return its file, and the words by which others open it."""
    known = dict[int, tuple[int, NDArray[Any]]]()
    parts = _parts(federation, source, known)
    arrays = [array for _, array in known.values()]
    *offsets, size = np.cumsum([0, *(_aligned(array.nbytes) for array in arrays)]).tolist()
    places = [(at, array.dtype.str, array.shape, _dense(array)) for at, array in zip(offsets, arrays)]
    text = json.dumps([parts, places]).encode()
    start = _aligned(START + 8 + len(text))
    file, words = memfd.created(start + size)
    try:
        with os.fdopen(file, "wb", closefd=False) as room:
            room.seek(START)
            room.write(len(text).to_bytes(8, "little") + text)
            for array, at in zip(arrays, offsets):
                room.seek(start + at)
                room.write(array.ravel(order="K").view(np.uint8).data)
    except OSError:
        os.close(file)
        raise
    return file, words


def _parts(value: Any, source: Source, known: dict[int, tuple[int, NDArray[Any]]]) -> Any:
    """Return plain values as they are, and all else as a list of its kind and its parts; TypeError if unknown.

    Arrays are `known` by their identities, each with its number: one that is met twice is there once.
    """
    inner, kind = partial(_parts, source=source, known=known), type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if value is source:
        return ["source"]
    if kind is np.ndarray:
        repeated = value.size and any(n > 1 and not step for n, step in zip(value.shape, value.strides))
        if value.dtype.hasobject or value.dtype.names or repeated:
            raise TypeError(f"arrays of {value.dtype} and strides {value.strides} cannot be shared")
        return ["array", known.setdefault(id(value), (len(known), value))[0]]
    if kind in (list, tuple):
        return [kind.__name__, *map(inner, value)]
    if kind is dict:
        return ["dict", *([inner(key), inner(each)] for key, each in value.items())]
    if isinstance(value, Path):
        return ["path", str(value)]
    if isinstance(value, np.dtype) and value.names is None:
        return ["dtype", value.str]
    if not kind.__module__.startswith("hpcfl.") or not (is_dataclass(kind) or hasattr(kind, "_fields")):
        raise TypeError(f"{kind} cannot be shared")
    named = value._asdict() if hasattr(kind, "_fields") else vars(value)
    return ["object", kind.__module__, kind.__qualname__, {name: inner(each) for name, each in named.items()}]


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


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _dense(array: NDArray[Any]) -> tuple[int, ...]:
    """Return an array's strides as they are without gaps; those of axes of length 1, which say nothing, stay."""
    steps = zip(array.shape, array.strides, np.empty_like(array, subok=False).strides)
    return tuple(own if length == 1 else dense for length, own, dense in steps)


def _made(parts: Any, arrays: list[NDArray[Any]], source: Source) -> Any:
    """Return what `_parts` took apart."""
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
