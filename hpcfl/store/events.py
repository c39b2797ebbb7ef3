"""The log of a segment: rare things that happen to a run, as rows of fixed width.

The table lies in a group of its own, ``log``, where readers of the rounds do not look.
"""

from __future__ import annotations

import time
from typing import Any

import h5py
import numpy as np

CAPACITY = 10_000
RECORD = np.dtype(
    [("round", "i8"), ("time", "f8"), ("kind", "S16"), ("client", "i8"), ("text", "S200")],
)


class Log:
    """The writer of a log: make it before the file goes into SWMR mode, then `add`."""

    def __init__(self, file: h5py.File, capacity: int = CAPACITY) -> None:
        self._file = file
        self._records = file.create_dataset("log/events", (capacity,), RECORD, chunks=(min(capacity, 32),))
        self._count = file.create_dataset("log/count", data=np.zeros(1, np.int64))
        self._capacity = capacity
        self._used = 0

    def add(self, round: int, kind: str, client: int, text: str) -> None:
        """Append one event, stamped with the time; it is dropped when full, and the last one says so."""
        if self._used >= self._capacity:
            return
        if self._used == self._capacity - 1:
            kind, client, text = "log-full", -1, f"events after the first {self._capacity - 1} are not logged"
        record = (round, time.time(), _bytes(kind, 16), client, _bytes(text, 200))
        self._records[self._used] = np.array(record, RECORD)
        self._file.flush()  # the record before the count: a reader trusts what is counted
        self._used += 1
        self._count[0] = self._used
        self._file.flush()


def read_log(file: h5py.File) -> list[dict[str, Any]]:
    """Return the events of an open segment: round, time (s since 1970), kind, client (-1: none) and text."""
    count = int(file["log/count"][0])
    records = file["log/events"][:count]
    return [{name: _plain(record[name]) for name in RECORD.names or ()} for record in records]


def copy_log(source: h5py.File, target: h5py.File) -> None:
    """Write the events of an open segment into another file, without the empty rows."""
    count = source["log/count"][:]
    target.create_dataset("log/events", data=source["log/events"][: int(count[0])])
    target.create_dataset("log/count", data=count)


def _bytes(text: str, width: int) -> bytes:
    """Return `text` in UTF-8, cut at a character so that it fits."""
    return text.encode()[:width].decode(errors="ignore").encode()


def _plain(value: Any) -> Any:
    """Return a NumPy scalar as str, int or float."""
    plain = value.item()
    return plain.decode() if isinstance(plain, bytes) else plain
