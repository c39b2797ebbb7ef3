"""Paces, or how far visits come, from a table: those of a published run, or of measurements."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hpcfl.base.errors import UsageError
from hpcfl.base.types import Floats, Ints
from hpcfl.data.formats.csv_file import Columns, check_names, read_csv
from hpcfl.data.formats.hdf5_file import dataset, opened
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.plan import Attempt
from hpcfl.schedule.speeds.base import Speed, check_together
from hpcfl.schedule.speeds.drawn import check_end, reaching, seconds_at

KINDS = (
    *(("client", "seconds"), ("round", "client", "seconds"), ("time", "client", "seconds")),
    ("round", "client", "depth"),
)
HDF5 = (".h5", ".hdf5")
MOST = 2**31 - 1  # rounds and clients


class Table(Speed):
    """Seconds per visit, or how far visits come by the deadline, as a table says."""

    model: Literal["table"] = "table"
    file: str = Field(min_length=1)
    """A CSV file, or an HDF5 file (.h5) with a data set per column. ``client,seconds``: a visit takes so long;
    ``round,client,seconds``: in this round; ``time,client,seconds``: in rounds from this second on, until the client's
    next row; ``round,client,depth``: the first layer that is there at the deadline, 1 … L, or L + 1 for none. Rounds
    and clients count from 0, and all must be there."""
    paths: ClassVar[tuple[str, ...]] = ("file",)

    @cached_property
    def columns(self) -> Columns:
        """What the file holds, by column, row by row."""
        path = Path(self.file)
        if path.suffix not in (".csv", *HDF5):
            raise UsageError(f"speed.file: {path}: expected a name that ends in .csv, .h5 or .hdf5")
        columns = _read_hdf5(path) if path.suffix in HDF5 else read_csv("speed.file", path, KINDS)
        return {name: self._checked(name, columns.pop(name)) for name in [*columns]}  # of two copies one goes at once

    def _checked(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        """Return a column as int64, or float64 for seconds; refuse what cannot be."""
        numbers, least = values.astype(np.float64, copy=False), int(name == "depth")
        if name in ("seconds", "time"):
            expected = "seconds above 0" if name == "seconds" else "seconds from 0 on"
            right = numbers > 0 if name == "seconds" else numbers >= 0
            self._check_rows(name, values, np.isfinite(numbers) & right, expected)
            return numbers
        right = (numbers >= least) & (numbers <= MOST) & (numbers == np.rint(numbers))
        self._check_rows(name, values, right, f"a whole number from {least} on")
        return numbers.astype(np.int64)

    def _check_rows(self, name: str, values: NDArray[Any], right: NDArray[np.bool_], expected: str) -> None:
        for row in np.flatnonzero(~right)[:1]:
            raise UsageError(f"{self._row(row)}: {name} is {values[row]:g}, expected {expected}")

    def _row(self, row: int) -> str:
        """Return where a row is: in CSV by its line, the first one being the header."""
        return f"speed.file: {self.file}: " + (f"row {row}" if self.file.endswith(HDF5) else f"line {row + 2}")

    @property
    def needs_end(self) -> bool:  # type: ignore[override]
        return "depth" in self.columns

    @property
    def by_time(self) -> bool:
        """Whether rows are those of seconds of the run, not of rounds."""
        return "time" in self.columns

    @cached_property
    def _order(self) -> Ints:
        """The rows of a table by time, client by client and there in the order of time, int64 [rows]."""
        order = np.lexsort((self.columns["time"], self.columns["client"]))
        clients, times = (self.columns[name][order] for name in ("client", "time"))
        for place in np.flatnonzero((np.diff(clients) == 0) & (np.diff(times) == 0))[:1]:
            row = order[place + 1]
            raise UsageError(f"{self._row(row)}: client {clients[place]} at second {times[place]:g} is there twice")
        for place in np.flatnonzero((np.diff(clients, prepend=-1) > 0) & (times > 0))[:1]:
            raise UsageError(
                f"{self._row(order[place])}: expected a row at second 0 before it for client {clients[place]}"
            )
        return order

    def _at(self, seconds: float, cohort: Ints) -> Floats:
        """Return what a table by time says at a second of the run, float64 [n]."""
        last = float(self.columns["time"].max())
        rows = np.searchsorted(self._keys, cohort + min(seconds, last) / (last + 1.0), side="right") - 1
        return np.asarray(self.columns["seconds"][self._order[rows]])

    @cached_property
    def _keys(self) -> Floats:
        """What the rows of a table by time are found by, in their `_order`: the client, and within it the time."""
        clients, times = (self.columns[name][self._order] for name in ("client", "time"))
        return np.asarray(clients + times / (times.max() + 1.0))

    @cached_property
    def values(self) -> NDArray[Any]:
        """Seconds or depths by round and client, ``[rounds, clients]``; one round where all are alike."""
        clients = self.columns["client"]
        rounds = self.columns.get("round", np.zeros_like(clients))
        shape = rounds.max(initial=-1) + 1, clients.max(initial=-1) + 1
        cells = rounds * shape[1] + clients
        there, order = np.unique(cells, return_index=True)
        for row in np.delete(np.arange(len(cells)), order)[:1]:
            raise UsageError(f"{self._row(row)}: client {clients[row]}{self._in(rounds[row])} is there twice")
        missing = np.append(np.flatnonzero(there != np.arange(len(there))), len(there))[0]
        if missing < shape[0] * shape[1]:
            round_, client = divmod(missing, shape[1])
            raise UsageError(f"speed.file: {self.file}: no row for client {client}{self._in(round_)}")
        return self.columns["depth" if self.needs_end else "seconds"][order].reshape(shape)

    def _in(self, round_: int) -> str:
        return f" in round {round_}" if "round" in self.columns else ""

    def check(self, participation: Participation, clock: str = "simulated") -> None:
        if self.by_time:
            why = "says how long visits of rounds take that begin at some time"
            check_together(f"speed.file = {self.file!r} {why}", participation, clock)
        if not self.needs_end:
            return
        check_end(participation, f"speed.file = {self.file!r} says how far visits are")
        if clock != "simulated":
            why = "has depths, which simulated time alone can keep: expected clock = 'simulated', or seconds"
            raise UsageError(f"speed.file = {self.file!r} {why}; got clock = '{clock}'")

    def covers(self, rounds: int, clients: int, layers: int | None = None) -> None:
        """Refuse other clients, fewer rounds, and depths that the model does not have."""
        known = self.columns["client"]
        self._check_rows("client", known, known < clients, f"0 … {clients - 1} (clients = {clients})")
        there_rounds, there = (0, len(np.unique(known[self._order]))) if self.by_time else self.values.shape
        if self.by_time and there < clients:
            lost = np.setdiff1d(np.arange(clients), known)[0]
            raise UsageError(f"speed.file: {self.file}: no row for client {lost} (clients = {clients})")
        if there < clients:
            raise UsageError(f"speed.file: {self.file}: no row for client {there}{self._in(0)} (clients = {clients})")
        if "round" in self.columns and there_rounds < rounds:
            wanted = f"client 0 in round {there_rounds}; did you mean rounds = {there_rounds}?"
            raise UsageError(f"speed.file: {self.file}: no row for {wanted}")
        if self.needs_end and layers is not None:
            depths, most = self.columns["depth"], f"1 … {layers + 1}: the model has {layers} layers"
            self._check_rows("depth", depths, depths <= layers + 1, most)

    def paces(self, seed: int, clients: int) -> Floats:
        """Return each client's mean seconds, or, which orders them alike, its mean depth, float64 [clients]."""
        if self.by_time:
            owners = self.columns["client"]
            return np.asarray(np.bincount(owners, self.columns["seconds"]) / np.bincount(owners))
        means: Floats = self.values.mean(0, dtype=np.float64)
        return means

    def seconds(self, attempt: Attempt) -> Floats:
        return seconds_at(attempt, self._now(attempt)) if self.needs_end else self._now(attempt)

    def depth(self, attempt: Attempt) -> Ints:
        return self._now(attempt) if self.needs_end else super().depth(attempt)

    def arrival(self, attempt: Attempt) -> Floats:
        """Return 1 where layer l arrives in time, else 0: nothing is drawn, float64 [n, L]."""
        return (self.depth(attempt)[:, None] <= np.arange(1, attempt.layers + 1)).astype(np.float64)

    def reach(self, attempt: Attempt, share: Floats) -> Floats:
        return self.arrival(attempt)[reaching(attempt, share)] if self.needs_end else super().reach(attempt, share)

    def _now(self, attempt: Attempt) -> NDArray[Any]:
        """Return what the table says of the invited, ``[n]``; rounds that only `order` draws begin again."""
        if self.by_time:
            return self._at(attempt.begins, attempt.cohort)
        now: NDArray[Any] = self.values[attempt.round % len(self.values), attempt.cohort]
        return now


def _read_hdf5(path: Path) -> Columns:
    with opened(path) as file:
        check_names("speed.file", path, [*file], KINDS)
        stored = {name: dataset(file, name) for name in file}
        for name, column in stored.items():
            if column.dtype.kind not in "fiu" or column.ndim != 1:
                what = f"{column.dtype} of shape {list(column.shape)}"
                raise UsageError(f"speed.file: {path}: {name} is {what}, expected one number in each row")
        if len({len(column) for column in stored.values()}) > 1:
            sizes = ", ".join(f"{name} {len(column)}" for name, column in stored.items())
            raise UsageError(f"speed.file: {path}: expected columns of one length, got {sizes}")
        return {name: column[()] for name, column in stored.items()}
