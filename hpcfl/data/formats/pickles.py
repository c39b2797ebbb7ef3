"""Reader of pickled arrays of numbers and plain values that runs no code of the file's choosing.

Not even NumPy's: an array of objects could be made of any bytes. What a file says of an array is only noted, checked,
and made an array at the end.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.errors import UsageError

NUMBERS = re.compile(r"[biuf][1248]")
ORDERS = ("<", ">", "|", "=")


class Type:
    """What a file says of an array's type."""

    def __init__(self, code: Any) -> None:
        self.code, self.order = _text(code), "="
        if not NUMBERS.fullmatch(self.code):
            raise UsageError(f"holds an array of type {self.code[:40]!r}, expected numbers")

    def __setstate__(self, state: Any) -> None:
        """Take the byte order; all else is of types that are no plain numbers."""
        self.order = _text(state[1])
        if self.order not in ORDERS:
            raise UsageError(f"holds an array of byte order {self.order[:40]!r}, expected one of {', '.join(ORDERS)}")


class Array:
    """What a file says of an array."""

    def __init__(self) -> None:
        self.value: NDArray[np.generic] = np.zeros(0)

    def __setstate__(self, state: Any) -> None:
        """Take version, shape, type, memory order and bytes."""
        _, shape, kind, fortran, data = state
        if not isinstance(kind, Type) or not isinstance(data, bytes):
            raise UsageError("holds an array without a type of numbers, or without its bytes")
        dtype, sizes = np.dtype(kind.order + kind.code), [int(size) for size in shape]
        if any(size < 0 for size in sizes) or prod(sizes) * dtype.itemsize != len(data):
            raise UsageError(
                f"holds an array of shape {str(shape)[:40]} and {len(data)} bytes, which do not go together"
            )
        self.value = np.frombuffer(data, dtype).reshape(sizes, order="F" if fortran else "C")


class Admitted:
    """A global that a file may call; unlike a function it has nothing that a file could change."""

    __slots__ = ("make",)
    make: Callable[..., Any]

    def __init__(self, make: Callable[..., Any]) -> None:
        object.__setattr__(self, "make", make)

    def __call__(self, *given: Any) -> Any:
        return self.make(*given)

    def __setattr__(self, name: str, value: Any) -> None:
        raise UsageError("changes what it refers to")


def _text(given: Any) -> str:
    """Return a string that Python 2 may have written as bytes."""
    return given.decode("latin1") if isinstance(given, bytes) else str(given)


def _encoded(text: Any, encoding: Any) -> bytes:
    """Return bytes that Python 3 has written for Python 2."""
    if _text(encoding) != "latin1":
        raise UsageError(f"encodes text as {_text(encoding)[:40]!r}, expected latin1")
    return str(text).encode("latin1")


ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): Admitted(lambda *given: Array()),  # as old files say
    ("numpy._core.multiarray", "_reconstruct"): Admitted(lambda *given: Array()),
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): Admitted(lambda code, *flags: Type(code)),
    ("_codecs", "encode"): Admitted(_encoded),
}


class Restricted(pickle.Unpickler):
    """An unpickler that knows what arrays are made of, and nothing else: any other global could run anything."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            named = f"{module}.{name}"[:80]
            raise UsageError(f"refers to {named!r}, expected nothing but arrays of numbers and plain values: not read")
        return ADMITTED[module, name]


def _plain(value: Any) -> Any:
    """Return the value with its arrays."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(entry) for entry in value)
    return value.value if isinstance(value, Array) else value


def read(path: Path) -> Any:
    """Return what was pickled, by Python 2 or 3; strings of Python 2 come as bytes.

    UsageError if the file is missing, truncated or damaged, or refers to anything but arrays of numbers.
    """
    try:
        with path.open("rb") as file:
            return _plain(Restricted(file, encoding="bytes").load())
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except Exception as error:  # a damaged pickle raises anything
        raise UsageError(f"{path}: truncated or damaged, expected a pickle ({type(error).__name__})") from None
