"""The writer of a segment: what one start of a run records, one row a round, readable while it grows.

A row is one record, written at once and checked by every reader (growing_file.py says how it lies on file); sealing
makes columns of them (run_file.py). Rare things that happen to a run are events, records of fixed width in a place of
their own.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcfl.store.atomic import naming, sync_folder, temporary
from hpcfl.store.columns import Column, Coords, fill_of, row_type, values_of
from hpcfl.store.growing_file import EVENT, Area, checked, lay_out, sign

EVENTS = 10_000
"""The most events of one segment."""


class Segment:
    """An open segment, for rounds from `first` (from 0) up to the `rounds` of the whole run.

    Its file appears only when it can be read, and says of which `run` it is. ValueError if a column has an axis without
    coordinates, or if no round is left.
    """

    def __init__(
        self, path: Path, columns: Sequence[Column], coords: Coords, first: int, rounds: int, run: str = ""
    ) -> None:
        if not 0 <= first <= rounds:
            raise ValueError(f"a segment of rounds {first} to {rounds} cannot be")
        self.path, self.first, self.rounds = path, first, rounds
        self._row = np.zeros(1, checked(row_type(columns, coords)))
        self._fields = {name: value[0, ...] for name, value in values_of(self._row, columns, coords).items()}
        for column in columns:
            self._fields[column.name][...] = fill_of(column.stored)
        self._blank = self._row.tobytes()
        self._event, self._logged = np.zeros(1, checked(EVENT)), 0
        hidden = temporary(path)
        try:
            self._layout = lay_out(hidden, columns, coords, first, rounds, EVENTS, run)
            self._file = hidden.open("r+b", buffering=0)
            hidden.replace(path)  # a reader never sees a segment that is half laid out
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)

    def write(self, round: int, row: Mapping[str, Any]) -> None:
        """Record one round; it counts when this returns, and not before.

        The values in `row` have the shape of the column's axes or are broadcast to it; columns that are missing stay
        "not recorded".

        Raises
        ------
        KeyError, IndexError, ValueError, TypeError
            For an unknown column, a round of another segment, a wrong shape, a fraction for an integer
            column; the row does not count then.
        OSError
            If the disk refuses it, or the file has been removed from the folder.
        """
        if not self.first <= round < self.rounds:
            raise IndexError(f"round {round} is not one of {self.first} to {self.rounds - 1}")
        if not os.path.samestat(self.path.stat(), os.fstat(self._file.fileno())):  # rows would be lost in silence
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        self._row.view("u1")[:] = np.frombuffer(self._blank, "u1")
        for name, value in row.items():
            if name not in self._fields:
                raise KeyError(f"no column '{name}'; known: {', '.join(self._fields)}")
            field, data = self._fields[name], np.asarray(value)
            if data.dtype.kind in "fc" and field.dtype.kind in "iu":
                raise TypeError(f"column {name} holds {field.dtype}, not {data.dtype}")
            field[...] = data
        place = round - self.first
        sign(self._row, place)
        self._record(self._layout.rows, place, self._row)

    def _record(self, area: Area, place: int, record: Any) -> None:
        """Write a record from front to back, on file for every reader when this returns."""
        at, content = area.at + place * area.each, memoryview(record.view("u1"))
        with naming(self.path):
            while content:
                done = os.pwrite(self._file.fileno(), content, at)
                content, at = content[done:], at + done

    def event(self, round: int, kind: str, client: int, text: str) -> None:
        """Log something that happened, on file when this returns; `client` is -1 where it concerns none.

        A log that is full says so in its last event and drops all others.
        """
        if self._logged >= EVENTS:
            return
        if self._logged == EVENTS - 1:
            kind, client, text = "log-full", -1, f"events after the first {EVENTS - 1} are not logged"
        self._event[0] = (0, round, time.time(), _bytes(kind, 16), client, _bytes(text, 200), 0)
        sign(self._event, self._logged)
        self._record(self._layout.events, self._logged, self._event)
        self._logged += 1

    def sync(self) -> None:
        """Wait until all rows and events so far are on the disk, where a loss of power leaves them."""
        with naming(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _bytes(text: str, width: int) -> bytes:
    """Return `text` in UTF-8, cut at a character so that it fits."""
    return text.encode()[:width].decode(errors="ignore").encode()
