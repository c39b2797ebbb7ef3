"""The writer of a segment: what one start of a run records, one row a round, readable while it grows.

The file is in HDF5's single-writer-multiple-readers mode: after a kill, every acknowledged row is there. A row is one
record, as a write for each column takes milliseconds; sealing makes columns of them (table.py). Rare things that happen
to a run are events, rows of fixed width in a group of their own, ``log``, where readers of the rounds do not look.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfl.store.atomic import keep_open, sync_folder, temporary
from hpcfl.store.columns import Column, Coords, add_rows, add_scales, fill_of, row_type, values_of

EVENTS = 10_000
"""The most events of one segment."""
EVENT = np.dtype([("round", "i8"), ("time", "f8"), ("kind", "S16"), ("client", "i8"), ("text", "S200")])

# The oldest format that knows SWMR: "latest" is unreadable for every HDF5 older than the one that wrote it.
_FORMAT = ("v110", "v110")


class Segment:
    """An open segment, for rounds from `first` (from 0) up to the `rounds` of the whole run.

    Its file appears only when it can be read. ValueError if a column has an axis without coordinates, or if no round
    is left.
    """

    def __init__(self, path: Path, columns: Sequence[Column], coords: Coords, first: int, rounds: int) -> None:
        if not 0 <= first <= rounds:
            raise ValueError(f"a segment of rounds {first} to {rounds} cannot be")
        self.path, self.first, self.rounds = path, first, rounds
        hidden = temporary(path)
        self._file = h5py.File(hidden, "w", libver=_FORMAT)
        try:
            self._lay_out(columns, coords)
            self._file.swmr_mode = True
            hidden.replace(path)  # a reader never sees a segment that is half laid out
        except BaseException as error:
            hidden.unlink(missing_ok=True)
            if isinstance(error, (OSError, RuntimeError)):
                keep_open(self._file)
            else:
                self._file.close()
            raise
        sync_folder(path.parent)

    def _lay_out(self, columns: Sequence[Column], coords: Coords) -> None:
        """Create everything the file will ever hold: nothing can be added in SWMR mode."""
        file, rows = self._file, self.rounds - self.first
        file.attrs.update({"first": self.first, "rounds": self.rounds, "sealed": 0})
        add_scales(file, coords)
        self._row = np.zeros(1, row_type(columns, coords))
        self._fields = {name: value[0, ...] for name, value in values_of(self._row, columns, coords).items()}
        for column in columns:
            self._fields[column.name][...] = fill_of(column.stored)
        self._blank = self._row.copy()
        self._rows = add_rows(file, columns, self._row.dtype, rows)
        self._types = h5py.h5s.create_simple((1,)), self._rows.id.get_space(), h5py.h5t.py_create(self._row.dtype)
        self._events = file.create_dataset("log/events", (EVENTS,), EVENT, chunks=(min(EVENTS, 32),))
        self._event_count = file.create_dataset("log/count", data=np.zeros(1, np.int64))
        self._logged = 0

    def write(self, round: int, row: Mapping[str, Any]) -> None:
        """Record one round; it counts when this returns, and not before.

        The values in `row` have the shape of the column's axes or are broadcast to it; columns that are missing stay
        "not recorded".

        Raises
        ------
        KeyError, IndexError, ValueError, TypeError
            For an unknown column, a round of another segment, a wrong shape, a fraction for an integer
            column; the row does not count then.
        """
        if not self.first <= round < self.rounds:
            raise IndexError(f"round {round} is not one of {self.first} to {self.rounds - 1}")
        self._row[:] = self._blank
        for name, value in row.items():
            self._fit(name, value)
        self._row["done"] = round + 1
        self._put(round - self.first)

    def _fit(self, name: str, value: Any) -> None:
        """Put `value` into the row, in the column's dtype and shape."""
        if name not in self._fields:
            raise KeyError(f"no column '{name}'; known: {', '.join(self._fields)}")
        field, data = self._fields[name], np.asarray(value)
        if data.dtype.kind in "fc" and field.dtype.kind in "iu":
            raise TypeError(f"column {name} holds {field.dtype}, not {data.dtype}")
        field[...] = data

    def _put(self, place: int) -> None:
        """Write the row by HDF5's own call: h5py would describe the columns to it anew each time, for 0.6 ms."""
        memory, space, dtype = self._types
        space.select_hyperslab((place,), (1,))
        self._rows.id.write(memory, space, self._row, dtype)
        self._file.flush()

    def event(self, round: int, kind: str, client: int, text: str) -> None:
        """Log something that happened, on file when this returns; `client` is -1 where it concerns none.

        A log that is full says so in its last event and drops all others.
        """
        if self._logged >= EVENTS:
            return
        if self._logged == EVENTS - 1:
            kind, client, text = "log-full", -1, f"events after the first {EVENTS - 1} are not logged"
        record = (round, time.time(), _bytes(kind, 16), client, _bytes(text, 200))
        self._events[self._logged] = np.array(record, EVENT)
        self._file.flush()  # the record before the count: a reader trusts what is counted
        self._logged += 1
        self._event_count[0] = self._logged
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _bytes(text: str, width: int) -> bytes:
    """Return `text` in UTF-8, cut at a character so that it fits."""
    return text.encode()[:width].decode(errors="ignore").encode()
