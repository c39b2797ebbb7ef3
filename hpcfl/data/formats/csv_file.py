"""Tables in CSV files, whose first line names the columns."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.errors import VALUE, UsageError, cut, did_you_mean
from hpcfl.base.types import Floats
from hpcfl.data.formats.files import lines, reading

UNITS = {"_ms": 1e-3, "_us": 1e-6, "_min": 60.0, "_h": 3600.0}
"""What names of columns end in, and how many seconds one of it is; others are seconds."""
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
            client = dict(zip(names, said.split(","))).get("client", "0").strip(' "')
            whole = (
                "" if client.isdigit() else "; clients are numbers, in the order of the names that save_data returns"
            )
            expected = f"expected numbers for {','.join(names)}, got {cut(repr(said.strip()), VALUE)}{whole}"
            raise UsageError(f"{key}: {path}: line {at}: {expected}") from None
        if any(map(str.strip, text)):
            raise UsageError(f"{key}: {path}: line {at + 1} is empty, expected a row in each")
    return {name: table[name] for name in names}


def check_names(key: str, path: Path, names: Collection[str], kinds: Kinds) -> None:
    """Refuse other columns than those of a kind of table."""
    if sorted(names) not in map(sorted, kinds):
        expected = " or ".join(",".join(kind) for kind in kinds)
        raise UsageError(f"{key}: {path}: expected columns {expected}, got {','.join(names) or 'none'}")


def read_seconds(
    column_key: str, by_key: str, path: Path, column: str | None, by: Sequence[str]
) -> tuple[str, dict[str, Floats]]:
    """Return the column's name, and its values in seconds by client, in the order of the file.

    Rows without a value, or with 0, are left out. UsageError where the file has no such column, or other values.
    """
    bad = UnicodeDecodeError, csv.Error
    with reading(path, "a CSV file", *bad), path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    known = [name for name in rows[0] if name is not None] if rows else []  # cells beyond the names have none
    guessed = column or next((name for name in known if name == "seconds" or name.endswith(("_s", *UNITS))), "seconds")
    clients = by or [name for name in known if name == "client"]
    ends = guessed.split("-") if guessed not in known else [guessed]  # of an interval: its end, less its beginning
    for key, name in (*((column_key, name) for name in ends), *((by_key, name) for name in clients)):
        if name not in known:
            raise UsageError(f"{key}: '{path}' has no column '{name}'{did_you_mean(name, known)}")
    unit = next((seconds for end, seconds in UNITS.items() if guessed.endswith(end)), 1.0)
    found: dict[str, list[float]] = {}
    for number, row in enumerate(rows, 2):
        texts = [(row[name] or "").strip() for name in ends]
        text = "-".join(texts)
        try:
            value = float(texts[0] or 0) - sum(float(each or 0) for each in texts[1:])
        except ValueError:
            value = -1.0
        if value < 0 or not np.isfinite(value):
            raise UsageError(f"'{path}', line {number}: {guessed} = {text!r}, expected seconds")
        if value:
            found.setdefault("/".join(str(row[name]) for name in clients) or str(number), []).append(value * unit)
    if sum(map(len, found.values())) < 3:
        raise UsageError(f"'{path}': expected three values of {guessed} above 0 at least")
    return guessed, {client: np.array(values) for client, values in found.items()}
