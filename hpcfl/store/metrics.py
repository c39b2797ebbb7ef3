"""The writer of a segment: what one start of a run records, one row a round, readable while it grows.

The file is in HDF5's single-writer-multiple-readers mode: after a kill, every acknowledged row is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfl.store import fault
from hpcfl.store.atomic import sync_folder, temporary
from hpcfl.store.columns import Array, Column, add_column, add_scales, make_scale, name_axes, shape_of
from hpcfl.store.events import Log

# The oldest format that knows SWMR: "latest" is unreadable for every HDF5 older than the one that wrote it.
_FORMAT = ("v110", "v110")
_unclosed: list[h5py.File] = []  # HDF5 may crash when it closes a file that the disk refuses: these stay open


class Segment:
    """An open segment.

    Parameters
    ----------
    path : Path
        the new file; it appears only when it can be read.
    columns : sequence of Column
        all that can be recorded.
    coords : mapping
        the labels of each axis: client ids, layer names, ranks.
    first, rounds : int
        the first round of this segment (from 0), and the number of rounds of the whole run.

    Raises
    ------
    ValueError
        if a column has an axis without coordinates, or no round is left.
    """

    def __init__(
        self,
        path: Path,
        columns: Sequence[Column],
        coords: Mapping[str, Sequence[int | str]],
        first: int,
        rounds: int,
    ) -> None:
        if not 0 <= first <= rounds:
            raise ValueError(f"a segment of rounds {first} to {rounds} cannot be")
        self.path, self.first, self.rounds = path, first, rounds
        hidden = temporary(path)
        self._file = h5py.File(hidden, "w", libver=_FORMAT)
        try:
            self._build(columns, coords)
            self._file.swmr_mode = True
            hidden.replace(path)  # a reader never sees a segment that is half laid out
        except BaseException as error:
            hidden.unlink(missing_ok=True)
            if isinstance(error, (OSError, RuntimeError)):
                _unclosed.append(self._file)
            else:
                self._file.close()
            raise
        sync_folder(path.parent)

    def _build(self, columns: Sequence[Column], coords: Mapping[str, Sequence[int | str]]) -> None:
        """Create everything the file will ever hold: nothing can be added in SWMR mode."""
        file, rows = self._file, self.rounds - self.first
        file.attrs.update({"first": self.first, "rounds": self.rounds, "sealed": 0})
        options = {"chunks": (min(rows, 1024),)} if rows else {}
        self._rounds = file.create_dataset("round", (rows,), np.int64, fillvalue=-1, **options)
        make_scale(self._rounds, "round")
        add_scales(file, coords)
        self._columns = {c.name: add_column(file, c, shape_of(c, coords, rows)) for c in columns}
        name_axes(file, columns)
        self._log = Log(file)

    def write(self, round: int, row: Mapping[str, Any]) -> None:
        """Record one round; it counts when this returns, and not before.

        Parameters
        ----------
        round : int
            from `first` to `rounds` - 1.
        row : mapping
            values by column, of the shape of the column's axes or broadcast to it; what is missing stays
            "not recorded".

        Raises
        ------
        KeyError, IndexError, ValueError, TypeError
            for an unknown column, a round of another segment, a wrong shape, a fraction for an integer
            column; the row does not count then.
        """
        if not self.first <= round < self.rounds:
            raise IndexError(f"round {round} is not one of {self.first} to {self.rounds - 1}")
        ready = {name: self._fit(name, value) for name, value in row.items()}
        for place, (name, value) in enumerate(ready.items()):
            if place == len(ready) // 2:
                fault.reach("metrics")
            self._columns[name][round - self.first] = value
        self._file.flush()
        self._rounds[round - self.first] = round
        self._file.flush()

    def _fit(self, name: str, value: Any) -> Array:
        """Return `value` in the column's dtype and shape."""
        if name not in self._columns:
            raise KeyError(f"no column '{name}'; known: {', '.join(self._columns)}")
        column, data = self._columns[name], np.asarray(value)
        if data.dtype.kind in "fc" and column.dtype.kind in "iu":
            raise TypeError(f"column {name} holds {column.dtype}, not {data.dtype}")
        return np.broadcast_to(data.astype(column.dtype), column.shape[1:])

    def event(self, round: int, kind: str, client: int, text: str) -> None:
        """Log something that happened, on file when this returns; `client` is -1 where it concerns none."""
        self._log.add(round, kind, client, text)

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        self._file.close()
