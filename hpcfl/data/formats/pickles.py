"""Reader of pickled arrays of numbers and plain values that runs no code of the file's choosing.

Not even Python's unpickler, which takes memory and time as a file says: an integer of any length, a table of any size,
a key whose hash takes a day. Not even NumPy's functions: an array of objects could be made of any bytes. Here a few of
the opcodes are known, those with which Python 2 and 3 and NumPy write arrays, lists, dictionaries, text and numbers
(`pickletools` in Python's library says what each does). What a file says of an array is only noted, checked, and made
an array of the file's own bytes at the end.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.errors import UsageError
from hpcfl.data.formats.files import reading

NUMBERS = re.compile(r"[biuf][1248]")
ORDERS = ("<", ">", "|", "=")
STEPS = 1_000_000
"""Opcodes that a file may have; CIFAR-100's have about 250,000."""
TEXT = 1000
"""Bytes up to which data become text or bytes of Python's; longer ones stay where they are, for arrays."""
AXES = 64
"""Axes that NumPy's arrays may have."""
EXPECTED = "expected nothing but arrays of numbers and plain values: not read"


class Type:
    """What a file says of an array's type."""

    def __init__(self, code: Any) -> None:
        self.code, self.order = _text(code), "="
        if not NUMBERS.fullmatch(self.code):
            raise UsageError(f"holds an array of type {self.code[:40]!r}, expected numbers")

    def take(self, state: Any) -> None:
        """Take the byte order; all else is of types that are no plain numbers."""
        self.order = _text(state[1])
        if self.order not in ORDERS:
            raise UsageError(f"holds an array of byte order {self.order[:40]!r}, expected one of {', '.join(ORDERS)}")


class Array:
    """What a file says of an array."""

    def __init__(self) -> None:
        self.value: NDArray[np.generic] = np.zeros(0)

    def take(self, state: Any) -> None:
        """Take version, shape, type, memory order and bytes."""
        _, shape, kind, fortran, data = state
        if not isinstance(kind, Type) or not isinstance(data, bytes | memoryview):
            raise UsageError("holds an array without a type of numbers, or without its bytes")
        if not isinstance(shape, tuple) or len(shape) > AXES or not all(type(size) is int for size in shape):
            raise UsageError(f"holds an array whose shape is no tuple of up to {AXES} integers")
        dtype = np.dtype(kind.order + kind.code)
        if any(size < 0 for size in shape) or prod(shape) * dtype.itemsize != len(data):
            raise UsageError(
                f"holds an array of shape {str(shape)[:40]} and {len(data)} bytes, which do not go together"
            )
        self.value = np.frombuffer(data, dtype).reshape(shape, order="F" if fortran is True else "C")


def _text(given: Any) -> str:
    """Return a string that Python 2 may have written as bytes."""
    if not isinstance(given, bytes | str):
        raise UsageError(f"names something by a {type(given).__name__}, expected text")
    return given.decode("latin1") if isinstance(given, bytes) else given


def _array(given: tuple[Any, ...]) -> Array:
    return Array()


def _type(given: tuple[Any, ...]) -> Type:
    return Type(given[0])


def _encoded(given: tuple[Any, ...]) -> bytes:
    """Return bytes that Python 3 has written for Python 2."""
    text, encoding = map(_text, given)
    if encoding != "latin1":
        raise UsageError(f"encodes text as {encoding[:40]!r}, expected latin1")
    return text.encode("latin1")


Makes = Callable[[tuple[Any, ...]], Any]
ADMITTED: dict[tuple[str, str], Makes | None] = {
    ("numpy.core.multiarray", "_reconstruct"): _array,  # as old files say
    ("numpy._core.multiarray", "_reconstruct"): _array,
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): _type,
    ("_codecs", "encode"): _encoded,
}
CALLED = (_array, _type, _encoded)


class Machine:
    """What an unpickler does, for the `OPCODES` alone: stack, marks and memo are those that `pickletools` speaks of."""

    def __init__(self, content: bytes) -> None:
        self.content, self.view, self.place = content, memoryview(content), 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.encoded = 0  # bytes that were made of text

    def run(self) -> Any:
        """Return what was pickled; arrays are still an `Array`. Any error where the file is damaged."""
        for _ in range(STEPS):
            opcode = bytes(self.take(1))
            if opcode == b".":
                return self.stack.pop()
            if opcode not in OPCODES:
                raise UsageError(f"uses the opcode 0x{opcode.hex()}, {EXPECTED}")
            name, argument = OPCODES[opcode]
            getattr(self, name)(argument(self))
        raise UsageError(f"has more than {STEPS} opcodes, {EXPECTED}")

    # arguments

    def take(self, count: int) -> memoryview:
        piece = self.view[self.place : self.place + count]
        if len(piece) < count:
            raise EOFError("it ends within a value")
        self.place += count
        return piece

    def number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def sized(self, size: int) -> memoryview:
        """Return as many bytes as a number of `size` bytes says."""
        return self.take(self.number(size))

    def line(self) -> bytes:
        end = self.content.index(b"\n", self.place)
        if end - self.place > TEXT:
            raise UsageError(f"holds a line of {end - self.place} bytes, expected at most {TEXT}")
        line = self.content[self.place : end]
        self.place = end + 1
        return line

    # what is done with them

    def nothing(self, given: Any) -> None:
        """Go on."""

    def push(self, given: Any) -> None:
        self.stack.append(given)

    def raw(self, given: memoryview) -> None:
        self.stack.append(bytes(given) if len(given) <= TEXT else given)

    def mark(self, given: Any) -> None:
        self.marks.append(len(self.stack))

    def _marked(self) -> list[Any]:
        """Take what is above the last mark off the stack."""
        start = self.marks.pop()
        above = self.stack[start:]
        del self.stack[start:]
        return above

    def marked_tuple(self, given: Any) -> None:
        self.stack.append(tuple(self._marked()))

    def short_tuple(self, size: int) -> None:
        above = [self.stack.pop() for _ in range(size)]
        self.stack.append(tuple(reversed(above)))

    def marked_list(self, given: Any) -> None:
        self.stack.append(self._marked())

    def marked_dict(self, given: Any) -> None:
        above = self._marked()
        self.stack.append({})
        self._set(above)

    def append(self, given: Any) -> None:
        self._list([self.stack.pop()])

    def appends(self, given: Any) -> None:
        self._list(self._marked())

    def _list(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise UsageError(f"appends to a {type(self.stack[-1]).__name__}, expected a list")
        self.stack[-1].extend(values)

    def item(self, given: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def items(self, given: Any) -> None:
        self._set(self._marked())

    def _set(self, values: list[Any]) -> None:
        keys, held = values[::2], self.stack[-1]
        if not isinstance(held, dict) or not all(isinstance(key, bytes | str) for key in keys):
            raise UsageError("holds a dictionary whose keys are no names, expected text")
        held.update(zip(keys, values[1::2], strict=True))

    def put(self, given: int) -> None:
        self.memo[given] = self.stack[-1]

    def memoize(self, given: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def get(self, given: int) -> None:
        self.stack.append(self.memo[given])

    def named(self, given: tuple[bytes, bytes]) -> None:
        self._global(*(part.decode() for part in given))

    def named_above(self, given: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._global(_text(module), _text(name))

    def _global(self, module: str, name: str) -> None:
        if (module, name) not in ADMITTED:
            raise UsageError(f"refers to {f'{module}.{name}'[:80]!r}, {EXPECTED}")
        self.stack.append(ADMITTED[module, name])

    def call(self, given: Any) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not any(function is known for known in CALLED) or not isinstance(arguments, tuple):
            raise UsageError(f"calls what makes no array, {EXPECTED}")
        made = function(arguments)
        self.encoded += len(made) if isinstance(made, bytes) else 0
        if self.encoded > len(self.content):
            raise UsageError("encodes more text than it has")
        self.stack.append(made)

    def build(self, given: Any) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, Array | Type) or not isinstance(state, tuple):
            raise UsageError(f"changes what is no array, {EXPECTED}")
        made.take(state)


def _integer(line: bytes) -> int | bool:
    """Return an integer in digits, of which 00 and 01 are false and true."""
    text = line.decode().removesuffix("L")
    return text == "01" if text in ("00", "01") else int(text)


Argument = Callable[[Machine], Any]


def _none(machine: Machine) -> None:
    return None


def _constant(value: Any) -> Argument:
    return lambda machine: value


def _number(size: int, signed: bool = False) -> Argument:
    return lambda machine: machine.number(size, signed)


def _sized(size: int) -> Argument:
    return lambda machine: machine.sized(size)


def _utf8(size: int) -> Argument:
    return lambda machine: str(machine.sized(size), "utf-8", "surrogatepass")


OPCODES: dict[bytes, tuple[str, Argument]] = {
    b"\x80": ("nothing", _number(1)),  # the protocol
    b"\x95": ("nothing", _number(8)),  # the length of a frame
    b"N": ("push", _none),
    b"\x88": ("push", _constant(True)),
    b"\x89": ("push", _constant(False)),
    b"I": ("push", lambda machine: _integer(machine.line())),
    b"L": ("push", lambda machine: _integer(machine.line())),
    b"J": ("push", _number(4, True)),
    b"K": ("push", _number(1)),
    b"M": ("push", _number(2)),
    b"\x8a": ("push", lambda machine: int.from_bytes(machine.sized(1), "little", signed=True)),
    b"G": ("push", lambda machine: struct.unpack(">d", machine.take(8))[0]),
    b"U": ("raw", _sized(1)),
    b"T": ("raw", _sized(4)),
    b"C": ("raw", _sized(1)),
    b"B": ("raw", _sized(4)),
    b"\x8e": ("raw", _sized(8)),
    b"V": ("push", lambda machine: str(machine.line(), "raw-unicode-escape")),
    b"\x8c": ("push", _utf8(1)),
    b"X": ("push", _utf8(4)),
    b"\x8d": ("push", _utf8(8)),
    b"}": ("push", lambda machine: {}),
    b"]": ("push", lambda machine: []),
    b")": ("push", _constant(())),
    b"(": ("mark", _none),
    b"t": ("marked_tuple", _none),
    b"\x85": ("short_tuple", _constant(1)),
    b"\x86": ("short_tuple", _constant(2)),
    b"\x87": ("short_tuple", _constant(3)),
    b"l": ("marked_list", _none),
    b"d": ("marked_dict", _none),
    b"a": ("append", _none),
    b"e": ("appends", _none),
    b"s": ("item", _none),
    b"u": ("items", _none),
    b"p": ("put", lambda machine: int(machine.line())),
    b"q": ("put", _number(1)),
    b"r": ("put", _number(4)),
    b"\x94": ("memoize", _none),
    b"g": ("get", lambda machine: int(machine.line())),
    b"h": ("get", _number(1)),
    b"j": ("get", _number(4)),
    b"c": ("named", lambda machine: (machine.line(), machine.line())),
    b"\x93": ("named_above", _none),
    b"R": ("call", _none),
    b"b": ("build", _none),
}


def _plain(value: Any) -> Any:
    """Return the value with the arrays that it holds itself: a list may hold one list a thousand times."""
    if isinstance(value, dict):
        return {key: _made(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_made(entry) for entry in value)
    return _made(value)


def _made(value: Any) -> Any:
    return value.value if isinstance(value, Array) else value


def read(path: Path) -> Any:
    """Return what was pickled, by Python 2 or 3; strings of Python 2 come as bytes.

    UsageError if the file is missing, truncated or damaged, or refers to anything but arrays of numbers.
    """
    with reading(path, "a pickle"):
        content = path.read_bytes()
    try:
        return _plain(Machine(content).run())
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle raises anything
        raise UsageError(f"{path}: truncated or damaged, expected a pickle ({type(error).__name__})") from None
