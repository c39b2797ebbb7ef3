"""A segment that grows, what one start of a run records: every row and event is checked, HDF5 is asked for nothing.

It begins with a header, one line and JSON, in what HDF5 calls the user block: columns, labels of the axes, and where
rows and events lie. An HDF5 file follows that is complete from its first moment (fixed extents, space that is reserved
and still a hole), so that any reader opens it at any time, and a kill leaves nothing open. Rows and events are written
in place. Each ends with 8 bytes that depend on all others of it and on its place; zeros say that it is not there. They
lie within one page, and files are written from front to back: what a kill has cut is not there. Each begins with 8
bytes that follow from its place: they tell what a kill has cut from damage to space that is still empty.

A row is one record; sealing makes columns of them (run_file.py). Events are rare things that happen to a run.

HDF5 may crash on a damaged file, so this module reads bytes at the places that the header names; the header has a
digest.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import h5py
import numpy as np

from hpcfl.base.errors import RunError, UsageError, listed
from hpcfl.store.atomic import created, naming, sync, sync_folder, temporary
from hpcfl.store.columns import Array, Column, Coords, add_scales, described, fill_of, row_type, table_in, values_of
from hpcfl.store.manifest import DamagedError

MAGIC = b"hpcfl segment: "
BEGUN, CHECK = "begun", "check"
LEAD = 8  # bytes with which a record begins
EVENT = np.dtype([("round", "i8"), ("time", "f8"), ("kind", "S16"), ("client", "i8"), ("text", "S200")])
FORMAT = ("v110", "v110")  # HDF5's; "latest" is unreadable for every HDF5 older than the one that wrote it

EVENTS = 10_000
"""The most events of one segment."""
MOST_ROUNDS = 2**31 - 1
ROWS = "rows"
"""The one dataset of a growing segment's rows."""

_WRITTEN = 1 << 32  # set in what every record begins and ends with: neither is zero
_PIECE = 1 << 24
_LINE = 128
_MOST = 1 << 30  # bytes of a header, so that a damaged number asks for no more


class Area(NamedTuple):
    """Where so many `records` of `each` bytes lie: from byte `at` of the file on."""

    at: int
    records: int
    each: int


@dataclass(frozen=True)
class Layout:
    """What the header of a file says.

    `sha256` is the digest of all its bytes behind the header but rows and events, `run` what its run calls itself.
    """

    first: int
    rounds: int
    columns: tuple[Column, ...]
    coords: Mapping[str, Array]
    rows: Area
    events: Area
    block: int
    size: int
    sha256: str
    run: str


@dataclass(frozen=True)
class Records:
    """Which records of an area are there: `end` of them, damaged ones included, which are in `lost`.

    `stray` are places behind them where something is that is neither a record nor what a kill has cut of the next one.
    """

    end: int
    lost: Array
    stray: Array


def checked(record: np.dtype[Any]) -> np.dtype[Any]:
    """The type of a record with what it begins with and its check, each 8 bytes on a multiple of 8."""
    fields = [(name, *record.fields[name][:2]) for name in record.names or ()] if record.fields else []
    at, number = LEAD + -(-record.itemsize // 8) * 8, np.dtype("u8")
    inner = [(name, kind, LEAD + offset) for name, kind, offset in fields]
    names, formats, offsets = zip((BEGUN, number, 0), *inner, (CHECK, number, at))
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": at + 8})


def sign(record: Array, place: int) -> None:
    """Complete the only record of an array, of a type of `checked`, for a place."""
    record[BEGUN] = _begun(place)
    record[CHECK] = _check(record.view("u1")[:-8], place)


def _begun(place: int) -> int:
    return (place + 1) | _WRITTEN


def _check(record: Any, place: int) -> int:
    """The check of a record, its bytes before the check; never 0."""
    return zlib.crc32(record, place) | _WRITTEN


# ---- writing


def lay_out(
    path: Path, columns: Sequence[Column], coords: Coords, first: int, rounds: int, events: int, run: str
) -> Layout:
    """Write a file in which no row and no event is there yet; UsageError for more columns than HDF5 takes."""
    row, event = checked(row_type(columns, coords)), checked(EVENT)
    about = {"run": run, "first": first, "rounds": rounds, **described(columns, coords)}
    room = len(json.dumps(about)) + 1024  # numbers and a digest are to come
    block = 1 << max(9, (room - 1).bit_length())
    with created(path, libver=FORMAT, userblock_size=block) as file:
        file.attrs.update({"first": first, "rounds": rounds, "sealed": 0})
        add_scales(file, coords)
        try:
            rows = _reserve(file, ROWS, rounds - first, row)
        except ValueError as error:
            line = f"a row of {len(columns)} columns, {row.itemsize} bytes, cannot be stored: {error}"
            raise UsageError(line) from error
        areas = {"rows": rows, "events": _reserve(file, "log/events", events, event)}
    with path.open("r+b") as raw:
        size = raw.seek(0, os.SEEK_END)
        about |= {**areas, "block": block, "size": size}
        about["sha256"] = _rest(raw, block, size, areas.values())
        text = json.dumps(about).encode().ljust(block - _LINE)
        raw.seek(0)
        raw.write(_line(text) + text)
    sync(path)
    return _layout(about)


def _reserve(file: h5py.File, name: str, count: int, record: np.dtype[Any]) -> Area:
    """Create a dataset whose bytes are all there, and never touched by HDF5."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    group, _, leaf = name.rpartition("/")
    where = file.require_group(group) if group else file
    space, kind = h5py.h5s.create_simple((count,)), h5py.h5t.py_create(record, logical=True)
    dataset = h5py.h5d.create(where.id, leaf.encode(), kind, space, plist)
    return Area(dataset.get_offset() or 0, count, record.itemsize)


def _line(text: bytes) -> bytes:
    """The first line of the file, for the JSON behind it."""
    digest = hashlib.sha256(text).hexdigest()
    return MAGIC + f"{len(text)} bytes of JSON with sha256 {digest}".encode().ljust(_LINE - len(MAGIC) - 1) + b"\n"


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
        self._event[0] = (0, round, time.time(), _cut(kind, 16), client, _cut(text, 200), 0)
        sign(self._event, self._logged)
        self._record(self._layout.events, self._logged, self._event)
        self._logged += 1

    def sync(self) -> None:
        """Wait until all rows and events so far are on the disk, where a loss of power leaves them."""
        with naming(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _cut(text: str, width: int) -> bytes:
    """Return `text` in UTF-8, cut at a character so that it fits."""
    return text.encode()[:width].decode(errors="ignore").encode()


# ---- reading


def read_layout(file: BinaryIO) -> Layout:
    """Return what the header says; `DamagedError` where it is not whole."""
    file.seek(0)
    line = file.read(_LINE)
    digits = line[len(MAGIC) :].split(b" ")[0]
    text = file.read(min(int(digits), _MOST)) if digits.isdigit() else b""
    if _line(text) != line:
        raise DamagedError("its header is not what was written")
    try:
        layout = _layout(json.loads(text))
        first, rounds, size = layout.first, layout.rounds, layout.size
        if not 0 <= first <= rounds <= MOST_ROUNDS:
            raise ValueError(f"expected rounds from 0 to at most {MOST_ROUNDS}, got {first} to {rounds}")
        for area, record in ((layout.rows, row_type(layout.columns, layout.coords)), (layout.events, EVENT)):
            each = checked(record).itemsize
            if area.each != each or min(area) < 0 or area.at + area.records * each > size:
                raise ValueError(f"expected records of {each} bytes within {size} bytes, got {area}")
        if layout.rows.records != rounds - first:
            raise ValueError(f"expected {rounds - first} rows, got {layout.rows}")
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise DamagedError(f"its header describes no segment: {type(error).__name__}: {error}") from None
    return layout


def size_damage(file: BinaryIO, layout: Layout) -> str:
    """Return that a file has another size than when it was made, "" where it has not."""
    size = os.fstat(file.fileno()).st_size
    return "" if size == layout.size else f"it has {size} bytes instead of {layout.size}"


def _layout(about: Mapping[str, Any]) -> Layout:
    columns, coords = table_in(about)
    first, rounds, *plain = (about[name] for name in ("first", "rounds", "block", "size", "sha256", "run"))
    return Layout(first, rounds, columns, coords, Area(*about["rows"]), Area(*about["events"]), *plain)


def survey(file: BinaryIO, area: Area) -> Records:
    """Find out which records are there; what seems damaged is read again, as it may have been written meanwhile."""
    there = (os.fstat(file.fileno()).st_size - area.at) // area.each
    area = area._replace(records=max(0, min(area.records, there)))
    whole, written, touched = np.zeros(area.records, bool), np.zeros(area.records + 1, bool), list[int]()
    for start, records in _pieces(file, area):
        places = start + np.flatnonzero(records[:, -8:].any(axis=1))
        written[places] = True
        whole[[place for place in places.tolist() if _is_whole(records[place - start], place)]] = True
        touched += (start + np.flatnonzero(records.view("u8").any(axis=1))).tolist()
    last = int(np.flatnonzero(whole).max(initial=-1)) + 1
    end = last + int(np.argmin(written[last:]))
    doubtful = np.flatnonzero(~whole[:end])
    again = [_is_whole(_bytes(file, area, place, 1)[0], place) for place in doubtful.tolist()]
    stray = [place for place in touched if place >= end and not _may_come(file, area, place, end)]
    return Records(end, doubtful[~np.array(again, bool)], np.array(stray, np.int64))


def _may_come(file: BinaryIO, area: Area, place: int, end: int) -> bool:
    """Whether what lies behind the last record is written just now, or is what a kill has cut of the next one."""
    record = _bytes(file, area, place, 1)[0]
    begun = int.from_bytes(record[:LEAD].tobytes(), "little") == _begun(place)
    is_next = place == end or _is_whole(_bytes(file, area, place - 1, 1)[0], place - 1)
    return _is_whole(record, place) or (is_next and begun and not record[-8:].any())


def read(file: BinaryIO, area: Area, start: int, stop: int, lost: Array) -> Array:
    """Return the bytes of some records, uint8 [n, each]; zeros for those that are `lost`.

    RunError where another one is damaged.
    """
    records = _bytes(file, area, start, stop - start)
    gone = set(lost.tolist())
    for place in range(start, stop):
        if place in gone:
            records[place - start] = 0
        elif not _is_whole(records[place - start], place):
            raise RunError(f"record {place} has changed while it was read")
    return records


def damage(file: BinaryIO) -> str:
    """Return what is wrong with a file, "" where nothing is: every byte counts, of records yet to come too."""
    try:
        layout = read_layout(file)
    except RunError as error:
        return str(error)
    try:
        rest = _rest(file, layout.block, layout.size, (layout.rows, layout.events))
        reason = "" if rest == layout.sha256 else "what it has for other HDF5 readers is not what was written"
    except RunError as error:
        reason = str(error)
    reasons = [size_damage(file, layout), reason]
    for what, area, first in (("round", layout.rows, layout.first), ("event", layout.events, 0)):
        found = survey(file, area)
        if bad := [first + place for place in (*found.lost.tolist(), *found.stray.tolist())]:
            reasons.append(f"{what}{'s' * (len(bad) > 1)} {listed(bad)}: not as written")
    return "; ".join(filter(None, reasons))


def _rest(file: BinaryIO, start: int, size: int, areas: Iterable[Area]) -> str:
    """The digest of all bytes from `start` on that are in no area."""
    sha256 = hashlib.sha256()
    for area in (*sorted(area for area in areas if area.records), Area(size, 0, 0)):
        for at in range(start, area.at, _PIECE):
            sha256.update(_pread(file, at, min(_PIECE, area.at - at)))
        start = area.at + area.records * area.each
    return sha256.hexdigest()


def _pieces(file: BinaryIO, area: Area) -> Iterator[tuple[int, Array]]:
    """Yield ``(place of the first, uint8 [n, each])`` of all records, but for those that are holes in the file."""
    step, place = max(1, _PIECE // area.each), 0
    while place < area.records:
        try:
            data = os.lseek(file.fileno(), area.at + place * area.each, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole from here on
                return
            data = 0  # this file system does not tell
        place = max(place, (data - area.at) // area.each)
        if place < area.records:
            count = min(step, area.records - place)
            yield place, _bytes(file, area, place, count)
            place += count


def _bytes(file: BinaryIO, area: Area, place: int, count: int) -> Array:
    content = _pread(file, area.at + place * area.each, count * area.each)
    return np.frombuffer(content, np.uint8).reshape(count, area.each)


def _pread(file: BinaryIO, at: int, count: int) -> bytearray:
    """Return `count` bytes as they are on file now; RunError if it ends before."""
    content = bytearray(count)
    view = memoryview(content)
    while view:
        done = os.preadv(file.fileno(), [view], at)
        if not done:
            raise RunError(f"it ends at byte {at}")
        view, at = view[done:], at + done
    return content


def _is_whole(record: Array, place: int) -> bool:
    return int.from_bytes(record[-8:].tobytes(), "little") == _check(record[:-8], place)
