"""Tables of numbers in CSV files, whose first line names the columns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.errors import VALUE, UsageError, cut
from hpcfl.data.formats.files import lines, reading

Columns = dict[str, NDArray[Any]]
Kinds = Sequence[Collection[str]]
"""The columns that a table may have, in any order: those of one of these kinds."""


def read_csv(key: str, path: Path, kinds: Kinds) -> Columns:
    """Return the columns of a file that a key names, float64 [rows] each; UsageError names the line that is wrong."""
    at, said = 1, ""

    def rows() -> Iterator[str]:
        nonlocal at, said
        for said in takewhile(str.strip, text):
            at += 1
            yield said

    with reading(path, "a CSV file", UnicodeDecodeError), path.open(encoding="utf-8-sig") as file, catch_warnings():
        simplefilter("ignore")  # without rows, too, it is a table
        text = lines(path, file)
        names = [name.strip(' "') for name in next(text, "").rstrip().split(",")]
        check_names(key, path, names, kinds)
        cells = [(name, np.float64) for name in names]
        try:
            table = np.loadtxt(rows(), cells, comments=None, delimiter=",", quotechar='"', ndmin=1)
        except ValueError:
            expected = f"expected numbers for {','.join(names)}, got {cut(repr(said.strip()), VALUE)}"
            raise UsageError(f"{key}: {path}: line {at}: {expected}") from None
        if any(map(str.strip, text)):
            raise UsageError(f"{key}: {path}: line {at + 1} is empty, expected a row in each")
    return {name: table[name] for name in names}


def check_names(key: str, path: Path, names: Collection[str], kinds: Kinds) -> None:
    """Refuse other columns than those of a kind of table."""
    if sorted(names) not in map(sorted, kinds):
        expected = " or ".join(",".join(kind) for kind in kinds)
        raise UsageError(f"{key}: {path}: expected columns {expected}, got {','.join(names) or 'none'}")
