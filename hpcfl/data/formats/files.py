"""What readers have in common: where files lie, and a line that names one that is missing, damaged or wrong.

A file is data, and nothing that it says of itself is believed: sizes are held against the bytes that are there before
anything is allocated, and what is packed may unpack to a bounded multiple of these.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Any, AnyStr

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.digests import is_file
from hpcfl.base.errors import UsageError, cut

SMALL, RATIO = 64 << 20, 100
"""Packed bytes may unpack to so many, or to so many times as many as they are."""
LINE = 1 << 20
"""Characters, or bytes, that a line of a text file may have."""
PART = 1 << 16
"""Bytes that are unpacked at a time."""
SAID = 100
"""Characters of what a library says of a file."""


def folder(source: str, data_dir: Path | None, *names: str) -> Path:
    """Return the first of the folders `names` that is there in the data folder; UsageError where there is none."""
    wanted = " or ".join(f"{name}/" for name in names)
    if data_dir is None:
        raise UsageError(f"data.name = '{source}': --data-dir or HPCFL_DATA must name the folder of {wanted}")
    for name in names:
        if (data_dir / name).is_dir():
            return data_dir / name
    raise UsageError(f"data.name = '{source}': {data_dir} has no folder {wanted}")


def found(key: str, name: str, data_dir: Path | None) -> Path:
    """Return the file that a key names, in the data folder or the working directory; UsageError where there is none."""
    places = [Path(name)] if data_dir is None else [data_dir / name, Path(name)]
    path = next((path.resolve() for path in places if is_file(path)), None)
    if path is None:
        tried = " or ".join(str(place.parent) for place in dict.fromkeys(places))
        raise UsageError(f"{key} = {name!r}: no such file in {tried}")
    return path


@contextmanager
def reading(path: Path, kind: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn what goes wrong inside, the file being missing or damaged, into a UsageError that names it.

    `kind` is what the file should be; `errors` are raised where it is not, beside OSError and EOFError.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe may take forever
            raise UsageError(f"{path}: is a {'folder' if path.is_dir() else 'device or pipe'}, expected {kind}")
        yield
    except FileNotFoundError:
        lost = f", to which {path} is a link" if path.is_symlink() else ""
        raise UsageError(f"{path.resolve() if lost else path}: no such file{lost}") from None
    except MemoryError:
        raise UsageError(f"{path}: expected {kind} that fits into memory") from None
    except (OSError, EOFError, *errors) as error:  # type: ignore[misc]
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise UsageError(f"{path}: truncated or damaged, expected {kind} ({cut(said, SAID)})") from None


def check_unpacked(where: str, unpacked: int, packed: int) -> None:
    """Refuse what says that it unpacks to more bytes than its packed ones may."""
    most = max(SMALL, RATIO * packed)
    if unpacked > most:
        limit = f"at most {most}: {SMALL >> 20} MiB, or {RATIO} times as many"
        raise UsageError(f"{where} unpacks to {unpacked} bytes from {packed}, expected {limit}")


def unpacked(path: Path, source: BufferedIOBase) -> bytearray:
    """Return all that a packed file holds, read from what unpacks it; UsageError where that is more than it may be."""
    content, packed = bytearray(), path.stat().st_size
    while part := source.read(PART):
        content += part
        check_unpacked(str(path), len(content), packed)
    return content


@contextmanager
def opened_lines(
    path: Path, kind: str, encoding: str, newline: str, *errors: type[Exception]
) -> Iterator[Iterator[str]]:
    """Open a file of lines, of which the last must be complete, as `reading`."""
    with reading(path, kind, UnicodeDecodeError, *errors):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            if size and file.read(1) != b"\n":
                raise UsageError(f"{path}: truncated: its last line is not complete; expected a line break at its end")
        with path.open(encoding=encoding, newline=newline) as text:
            yield lines(path, text)


def lines(path: Path, text: IO[AnyStr], signs: str = "characters") -> Iterator[AnyStr]:
    """Yield the lines of a file; UsageError where one is no line's length, as in a file of something else."""
    for number, line in enumerate(iter(lambda: text.readline(LINE), text.read(0)), start=1):
        if len(line) == LINE:
            raise UsageError(f"{path}: line {number} has {LINE} {signs} or more, expected fewer")
        yield line


def check_all(name: str, values: NDArray[Any], right: NDArray[np.bool_], expected: str, what: str = "sample") -> None:
    """Refuse values unless all are right, naming the first sample, or what the first axis counts, with one that is not.

    `right` has the shape of the values.
    """
    if not right.all():
        place = np.unravel_index(right.argmin(), right.shape)
        raise UsageError(f"{name}: {what} {place[0]} holds {values[place]}, expected {expected}")


def check_labels(place: str, labels: NDArray[Any], first: int, classes: int) -> None:
    """Refuse labels other than `first` … ``first + classes - 1``, naming the place and the sample."""
    known = np.isin(labels, np.arange(first, first + classes))
    check_all(place, labels, known, f"a label of {first} to {first + classes - 1}")
