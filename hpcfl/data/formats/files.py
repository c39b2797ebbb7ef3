"""What readers have in common: where files lie, and a line that names one that is missing, damaged or wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.base.types import Ints


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
    path = next((path.resolve() for path in places if path.is_file()), None)
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
        yield
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (OSError, EOFError, *errors) as error:  # type: ignore[misc]
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise UsageError(f"{path}: truncated or damaged, expected {kind} ({said})") from None


@contextmanager
def opened_lines(path: Path, kind: str, encoding: str, newline: str, *errors: type[Exception]) -> Iterator[TextIO]:
    """Open a file of lines, of which the last must be complete, as `reading`."""
    with reading(path, kind, UnicodeDecodeError, *errors):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            if size and file.read(1) != b"\n":
                raise UsageError(f"{path}: truncated: its last line is not complete; expected a line break at its end")
        with path.open(encoding=encoding, newline=newline) as text:
            yield text


def check_labels(place: str, labels: Ints, first: int, classes: int) -> None:
    """Refuse labels other than `first` … ``first + classes - 1``, naming the place and the sample."""
    wrong = np.flatnonzero((labels < first) | (labels >= first + classes))
    if wrong.size:
        raise UsageError(
            f"{place}: label {labels[wrong[0]]} of sample {wrong[0]}, expected {first} to {first + classes - 1}"
        )
