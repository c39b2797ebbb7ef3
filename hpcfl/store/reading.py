"""A run read back, in whatever state it is: growing, killed, sealed, and which of the recorded rows count.

A segment that holds rows supersedes the earlier ones from its first round on: what an earlier start recorded
after the checkpoint that was resumed belongs to a past that was given up.

What is read is checked: files by the manifest, the rows of a growing segment one by one. What is damaged is named, and
its rounds read as "not recorded".
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfl.base.errors import RunError, UsageError, UserError, listed
from hpcfl.base.lazy import xarray
from hpcfl.store import archive, growing_file, inside, manifest
from hpcfl.store import columns as table
from hpcfl.store.atomic import check_regular, number_of, numbered
from hpcfl.store.attributes import attributes_of
from hpcfl.store.checkpoints import damage, saved
from hpcfl.store.columns import CLIENT, Array, Column, Fact, fill_of, shape_of
from hpcfl.store.inside import RUN, of_another, one_line, tell
from hpcfl.store.status import read_status

INTERNAL = ("format", "segments", "sealed", "coordinates", "parts", "rows", "lost")
"""Attributes of run.h5 that are about the file rather than the run."""
HERE = "in this file too"
BESIDE = "in metrics/ beside this file; without that folder all of them read as not recorded"
"""Where the rows are, as run.h5 says."""
HEADER = "header"
"""A sealed segment's description of its columns and labels, as bytes of JSON."""
HDF5 = b"\x89HDF\r\n\x1a\n"
MOST_LOST = 1 << 24
"""Rounds that are not there and read as not recorded: more of them are a claim, which memory could not hold."""
MOST_BYTES = 1 << 30


def open_run(path: Path | str, *, chunks: Any = None) -> xarray.Dataset:
    """Return the acknowledged rounds of a finished, running or killed run, in memory, its files closed.

    Parameters
    ----------
    path : Path or str
        The run folder, the run.h5 of one, or an archive of `hpcfl.export`.
    chunks : int, dict or "auto", optional
        Read nothing until it is asked for, in pieces as `xarray.open_dataset` makes them with dask. The run must be
        sealed, as it is once it is done or stopped.

    Returns
    -------
    xarray.Dataset
        Dims round, client, layer, rank (those there are); NaN and -1 say "not recorded". What is known of each
        client has no round. Simulated seconds, wall seconds and message bytes are coordinates over the round, and
        clients' names, where they have any, over the client. The
        attributes are those of the run (config, versions, ...), its status and reason, and the rounds that are `lost`
        to damage, if there are any: nothing of them is recorded any more, and a line on stderr names the file.

    Raises
    ------
    UsageError
        If this is no run folder.
    RunError
        If run.h5 is damaged, or a segment that it names is missing.

    Examples
    --------
    >>> run = hpcfl.run("fedavg-digits", settings={"rounds": 2, "evaluate.every": 1}, out="runs/two", quiet=True)
    >>> rounds = hpcfl.open_run("runs/two")
    >>> rounds["arrived"].dims, rounds["arrived"].values.sum().item()
    (('round', 'client'), 20)
    """
    run_dir = run_folder(path)
    if chunks is not None:
        return _lazily(run_dir, chunks)
    known = promises(run_dir)
    parts = [read_part(segment, with_data=True) for segment in segment_paths(run_dir)] or _own_rows(run_dir)
    counted = counts(parts, reached(known, parts))
    for part, n in counted:
        tell_of(part, n)
    facts = read_facts(run_dir)
    if reason := other_clients(parts, facts):
        raise RunError(f"'{run_dir}' does not fit together: {reason}")
    coords = merged_coords(parts, facts)
    variables: dict[str, Any] = {name: (name, labels) for name, labels in coords.items()}
    rounds = [part.rounds[:n] for part, n in counted]
    variables["round"] = ("round", np.concatenate([np.empty(0, np.int64), *rounds]))
    columns = merged_columns(parts)
    needed = size(columns, coords, sum(map(len, rounds)))
    there = sum(part.path.stat().st_size for part in parts if part.path.is_file())
    if needed > max(MOST_BYTES, inside.RATIO * there):  # most of them being lost
        raise RunError(f"'{run_dir}' claims {needed} bytes of rows; its segments have {there}: expected what they hold")
    for column in columns:
        variables[column.name] = (("round", *column.dims), joined(column, coords, counted), column.attributes)
    if "fate" in variables and ((variables["cohort"][1] == 1) & (variables["fate"][1] < 0)).any():
        raise RunError(f"'{run_dir}' does not fit together: expected to hear what became of everyone who was invited")
    variables |= {fact.name: (CLIENT, fact.values, {"long_name": fact.long_name}) for fact in facts}
    for name in variables.keys() & table.LABELS.keys():
        variables[name] = (*variables[name], {"long_name": table.LABELS[name]})
    return _finished(xarray.Dataset(variables), run_dir, lost_rounds(counted))


def _finished(dataset: xarray.Dataset, run_dir: Path, lost: Array) -> xarray.Dataset:
    """Return a run's rows with what `open_run` says beside them."""
    attributes = {name: value for name, value in run_attributes(run_dir).items() if name not in INTERNAL}
    status = read_status(run_dir)
    dataset.attrs = {**attributes, "status": status.state, "reason": status.reason}
    if len(lost):
        dataset.attrs["lost"] = lost
    return dataset.set_coords([name for name in (*table.AXES, table.NAMES) if name in dataset])


def lost_rounds(counted: Sequence[tuple[Part, int]]) -> Array:
    """The rounds that count and are lost."""
    each = (np.intersect1d(part.lost, part.rounds[:n]) for part, n in counted)
    return np.concatenate([np.empty(0, np.int64), *each])


def _lazily(run_dir: Path, chunks: Any) -> xarray.Dataset:
    if not run_attributes(run_dir)["sealed"]:
        raise UsageError(f"'{run_dir}' is not sealed, so that its rows are read at once: expected no chunks")
    if not find_spec("dask"):
        raise UsageError("chunks: expected dask, which is not installed; without chunks all is read at once")
    segment_paths(run_dir)  # that none is missing
    plain: Any = {"decode_cf": False, "engine": "h5netcdf", "chunks": chunks}
    dataset = xarray.open_dataset(run_dir / "run.h5", **plain)
    return _finished(dataset, run_dir, _unpacked(json.loads(dataset.attrs.get("lost", "[]"))))


def size(columns: Sequence[Column], coords: Mapping[str, Array], rows: int) -> int:
    """The bytes of so many rows in memory."""
    return sum(prod(shape_of(each, coords, rows)) * each.stored.itemsize for each in columns)


def joined(column: Column, coords: Mapping[str, Array], counted: Sequence[tuple[Part, int]]) -> Array:
    """The values of a column in all rows that count; what a part lacks reads as "not recorded"."""
    shape, start = shape_of(column, coords, sum(n for _, n in counted)), 0
    whole = np.full(shape, fill_of(column.stored), column.stored)
    for part, n in counted:
        if (own := part.data.get(column.name)) is not None:
            stored = own[:n]
            whole[(slice(start, start + len(stored)), *map(slice, stored.shape[1:]))] = stored
        start += n
    return whole


def _own_rows(run_dir: Path) -> list[Part]:
    """The rows that run.h5 has itself, as one part; none where it has none."""
    with _table(run_dir) as file:
        if file.attrs.get("rows") != HERE:
            return []
        columns, coords = table.table_of(file)
        rounds, lost = table.values(file, "round", "i", (None,)), _unpacked(json.loads(file.attrs.get("lost", "[]")))
        shapes = {column.name: shape_of(column, coords, len(rounds)) for column in columns}
        data = {name: table.values(file, name, "biufS", shape) for name, shape in shapes.items()}
    return [Part(run_dir / "run.h5", 0, len(rounds), rounds, columns, coords, len(rounds), data, lost)]


def events(path: Path | str) -> list[dict[str, Any]]:
    """Return the log, oldest first: segment, round, time (s since 1970), kind, client (-1: none) and text.

    Events of rounds that a later segment superseded are among them: they did happen. Of those that are damaged one
    line tells. Errors as `open_run`.
    """
    rows = []
    for segment in segment_paths(run_folder(path)):
        for record in read_events(segment).tolist():
            plain = [value.decode() if isinstance(value, bytes) else value for value in record]
            rows.append({"segment": number_of(segment), **dict(zip(growing_file.EVENT.names or (), plain))})
    return rows


def run_folder(path: Path | str) -> Path:
    """Return the run folder for a folder, its run.h5, whatever its name, or an archive; UsageError where it is none."""
    given = Path(path)
    if given.suffix in (".zip", ".h5") and given.name != "run.h5" and given.is_file():
        return archive.unpacked(given)
    folder = given.parent if given.name == "run.h5" else given
    if not (folder / "run.h5").is_file():
        lacks = "is no file" if os.path.lexists(folder / "run.h5") else "does not exist"
        raise UsageError(f"'{given}' is no run folder: {folder / 'run.h5'} {lacks}")
    inside.check_folder(folder)
    return folder


def run_attributes(run_dir: Path) -> dict[str, Any]:
    """The attributes of run.h5; UsageError where it cannot be read, or has another format, RunError where damaged."""
    with _table(run_dir) as file:
        attributes = attributes_of(file)
    if not _alone(run_dir) and not (run_dir / manifest.NAME).exists():
        tell(f"{run_dir / manifest.NAME} is missing: what is read of this run is not checked")
    return attributes


def _alone(run_dir: Path) -> bool:
    """Whether run.h5 was taken out of its run folder."""
    return not any((run_dir / name).exists() for name in ("metrics", "checkpoints", manifest.NAME))


@contextmanager
def _table(run_dir: Path) -> Iterator[h5py.File]:
    """Open run.h5 once its bytes are known to be right; UsageError where what is read there is not as it should be."""
    path = run_dir / "run.h5"
    if reason := file_damage(run_dir, "run.h5"):
        raise RunError(f"{path} cannot be read: {reason}; expected a copy of the one that was written")
    try:
        with inside.opened(path) as file:
            yield file
    except UserError:
        raise
    except Exception as error:  # h5py raises almost anything on a damaged file
        raise UsageError(f"{path} cannot be read: {one_line(error)}") from error


def file_damage(run_dir: Path, name: str) -> str:
    """What is wrong with a file that the manifest lists; "" also where none can be asked, of which a line tells."""
    if not (run_dir / manifest.NAME).exists():
        return ""
    try:
        return manifest.damage_of(run_dir, name)
    except RunError as error:
        tell(f"{error}; what is read of this run is not checked")
        return ""


def data_folder(attributes: Mapping[str, str], data_dir: Path | None) -> Path | None:
    """The folder of the data sets that is asked for, or where the run with these attributes found them."""
    return data_dir or (Path(attributes["data_dir"]) if attributes["data_dir"] else None)


def read_facts(run_dir: Path) -> list[Fact]:
    """What run.h5 knows of each client."""
    with _table(run_dir) as file:
        return table.facts_of(file)


def last_written(run_dir: Path) -> float:
    """Return when a run last began, wrote a row or a checkpoint, in seconds as files have them; 0: never.

    Its status does not tell: the server touches it while it lives, whether or not it gets on.
    """
    times = [0.0]
    for path in (run_dir / "checkpoints", *segment_paths(run_dir)):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def segment_paths(run_dir: Path) -> list[Path]:
    """Return the segments of a run, oldest first.

    RunError if run.h5 names one that is not there: its rows would read as "not recorded" in silence.
    """
    present = numbered(run_dir / "metrics", "segment", ".h5")
    names = {path.name for path in present}
    attributes = run_attributes(run_dir)
    missing = [name for name in json.loads(attributes["segments"]) if name not in names]
    if _alone(run_dir) and attributes.get("rows") == HERE:
        return []
    if missing and _alone(run_dir):
        beside = f"expected metrics/{missing[0]} beside it; copy the whole run folder"
        raise RunError(f"'{run_dir / 'run.h5'}' is a table of rows that lie elsewhere: {beside}")
    if missing:
        raise RunError(f"run folder '{run_dir}' lacks metrics/{', metrics/'.join(missing)}: expected a copy there")
    return present


@dataclass(frozen=True)
class Part:
    """What a segment holds: `rounds` [n] are its acknowledged rounds, `data` their rows, [n, ...] each.

    Of these rounds some may be `lost` to damage, and rows of the file, `stored`, fewer than rounds. `reason` is what is
    wrong with the file as a whole, "" where nothing is; `layout` is that of a file that is not sealed.
    """

    path: Path
    first: int
    total: int
    rounds: Array
    columns: tuple[Column, ...]
    coords: Mapping[str, Array]
    stored: int
    data: dict[str, Array] = field(default_factory=dict)
    lost: Array = field(default_factory=lambda: np.empty(0, np.int64))
    reason: str = ""
    layout: growing_file.Layout | None = None


def is_closed(path: Path) -> bool:
    """True for a segment that begins as HDF5 does: it is sealed."""
    check_regular(path)
    with path.open("rb") as file:
        return file.read(len(HDF5)) == HDF5


@contextmanager
def opened_segment(path: Path) -> Iterator[tuple[Any, growing_file.Layout | None]]:
    """Open a segment: its bytes and their layout, or the HDF5 file that it is once it is sealed.

    `DamagedError` where it cannot be read, OSError where it cannot be opened.
    """
    check_regular(path)
    with path.open("rb", buffering=0) as raw:
        head = raw.read(len(growing_file.MAGIC))
        if head == growing_file.MAGIC:
            layout = growing_file.read_layout(raw)
            if reason := of_another(layout.run, path.parents[1]):
                raise manifest.DamagedError(reason)
            yield raw, layout
            return
    if reason := file_damage(path.parents[1], f"metrics/{path.name}"):
        raise manifest.DamagedError(reason)
    if not head.startswith(HDF5):
        raise manifest.DamagedError("it does not begin as a segment does")
    try:
        with inside.opened(path) as file:
            yield file, None
    except Exception as error:  # h5py raises almost anything on a damaged file, where there is no digest
        raise manifest.DamagedError(one_line(error)) from error


def read_part(path: Path, with_data: bool = False) -> Part:
    """Read what a segment holds, and its acknowledged rows if wanted."""
    try:
        with opened_segment(path) as (file, layout):
            if layout is None:
                return _closed_part(path, file, with_data)
            found = growing_file.survey(file, layout.rows)
            rounds, lost = layout.first + np.arange(found.end), layout.first + found.lost
            about = layout.first, layout.rounds, rounds, layout.columns, layout.coords, found.end
            part = Part(path, *about, lost=lost, reason=growing_file.size_damage(file, layout), layout=layout)
            return replace(part, data=live_rows(part, file, 0, found.end)) if with_data else part
    except FileNotFoundError as error:
        raise UsageError(f"segment {path} cannot be read: {error}") from error
    except OSError as error:
        reason = f"it cannot be read: {error.strerror}"
    except manifest.DamagedError as error:
        reason = str(error)
    with _table(path.parents[1]) as file:  # what run.h5 knows of it
        columns, coords = table.table_of(file)
        known = json.loads(attributes_of(file).get("parts", "{}")).get(path.name, {"first": 0, "rounds": 0, "rows": []})
        rounds = _unpacked(known["rows"])
    return Part(path, known["first"], known["rounds"], rounds, columns, coords, 0, lost=rounds, reason=reason)


def live_rows(part: Part, file: Any, start: int, stop: int) -> dict[str, Array]:
    """The columns' values in some rows of a growing segment, "not recorded" in those that are lost."""
    assert part.layout is not None
    lost = part.lost[(part.lost >= part.first + start) & (part.lost < part.first + stop)] - part.first
    content = growing_file.read(file, part.layout.rows, start, stop, lost)
    rows = content.reshape(-1).view(growing_file.checked(table.row_type(part.columns, part.coords)))
    values = table.values_of(rows, part.columns, part.coords)
    for column in part.columns:
        values[column.name][lost - start] = fill_of(column.stored)
    return values


def _closed_part(path: Path, file: h5py.File, with_data: bool) -> Part:
    if reason := of_another(str(file.attrs.get(RUN, "")), path.parents[1]):
        raise manifest.DamagedError(reason)
    first, total = table.whole(file, "first"), table.whole(file, "rounds")
    rounds = table.values(file, "round", "i", (None,))
    if not np.array_equal(rounds, np.unique(rounds.clip(first, total - 1))):
        raise ValueError(f"/round: expected rising numbers from {first} to {total - 1}, got {listed(rounds)}")
    columns, coords = table.table_in(json.loads(table.values(file, HEADER, "u", (None,)).tobytes()))
    data = dict[str, Array]()
    for column in columns if with_data else ():
        item, shape = file.get(column.name), shape_of(column, coords, len(rounds))
        if not isinstance(item, h5py.Dataset) or item.dtype != column.stored or item.shape != shape:
            raise ValueError(f"/{column.name}: expected a dataset of {column.stored} and the shape {shape}, got {item}")
        data[column.name] = item[()]
    lost, reason = _unpacked(json.loads(file.attrs.get("lost", "[]"))), str(file.attrs.get("damage", ""))
    return Part(path, first, total, rounds, columns, coords, len(rounds), data, lost, reason)


def read_events(path: Path) -> Array:
    """The events of a segment; a line tells of those that are lost."""
    with suppress(Exception), opened_segment(path) as (file, layout):
        if layout is None:
            events: Array = file["log/events"][:]
            if events.dtype == growing_file.EVENT:
                return events
        else:
            found = growing_file.survey(file, layout.events)
            if len(found.lost):
                tell(f"{path} is damaged: {len(found.lost)} of its {found.end} events are lost")
            content = growing_file.read(file, layout.events, 0, found.end, found.lost)
            records = np.delete(content, found.lost, axis=0)[:, growing_file.LEAD :][:, : growing_file.EVENT.itemsize]
            return np.ascontiguousarray(records).reshape(-1).view(growing_file.EVENT)
    if not any(str(path) in line for line in inside.told):  # else a line has told of the whole file
        tell(f"{path} is damaged: its events are lost")
    return np.empty(0, growing_file.EVENT)


def tell_of(part: Part, rows: int | None = None) -> None:
    """Warn of what is lost of a segment, see `loss`."""
    if what := loss(part, rows):
        tell(f"{part.path} is damaged: {what}")


def loss(part: Part, rows: int | None = None) -> str:
    """What is lost of a segment; `rows`: among the first so many of its rounds, which are those that count."""
    lost = part.lost if rows is None else np.intersect1d(part.lost, part.rounds[:rows])
    said = [f"{first} to {end - 1}" if end - first > 1 else str(first) for first, end in packed(lost)]
    several = len(lost) > 1
    gone = [f"round{'s' * several} {listed(said)} read{'s' * (not several)} as not recorded"] if said else []
    return "; ".join([part.reason, *gone] if part.reason else gone)


def packed(rounds: Array) -> list[list[int]]:
    """Rising numbers as ``[[first, last + 1], ...]``."""
    runs = np.split(rounds, np.flatnonzero(np.diff(rounds) > 1) + 1)
    return [[int(run[0]), int(run[-1]) + 1] for run in runs if len(run)]


def _unpacked(runs: Sequence[Sequence[int]]) -> Array:
    if (lost := sum(last - first for first, last in runs)) > MOST_LOST:
        raise ValueError(f"{lost} rounds are said to be there, expected at most {MOST_LOST} that are not")
    return np.concatenate([np.empty(0, np.int64), *(np.arange(first, last) for first, last in runs)])


def promises(run_dir: Path) -> tuple[bool, list[Path]]:
    """Return whether a run says that it is done, and its checkpoints by rising round.

    To be asked before the rows are read, since a run may go on.
    """
    return read_status(run_dir).state == "done", saved(run_dir)


def reached(known: tuple[bool, Sequence[Path]], parts: Sequence[Part]) -> int:
    """Return how many rounds must be on record, by the `promises` of a run: those of a checkpoint that is whole."""
    done, checkpoints = known
    end = next((int(part.rounds[-1]) + 1 for part in reversed(parts) if len(part.rounds)), 0)
    if done and parts:
        return max(end, parts[-1].total)
    for path in reversed(checkpoints):
        if number_of(path) <= end:
            break
        if not damage(path):
            return number_of(path)
    return end


def counts(parts: Sequence[Part], done: int = 0) -> list[tuple[Part, int]]:
    """Return the parts, each with how many of its first rounds count.

    Where one holds fewer rounds than it must have had, by the next one's first or since so many are `done`, those are
    among its lost ones: each row is written before a checkpoint of its round is.
    """
    held = [part.rounds.size > 0 for part in parts]
    firsts = [part.first if holds else np.inf for part, holds in zip(parts, held)]
    limits = np.minimum.accumulate([np.inf, *firsts[:0:-1]])[::-1]  # from which round on a later one supersedes each
    last = max(np.flatnonzero(held if any(held) else [bool(part.reason) for part in parts]), default=-1)
    counted = []
    for place, (part, limit) in enumerate(zip(parts, limits)):
        begin = int(part.rounds[-1]) + 1 if len(part.rounds) else part.first
        end = int(limit) if limit < np.inf else done if place == last else 0
        if end - begin > MOST_LOST:
            lacks = f"{end - begin} rounds that are said to be done"
            raise RunError(f"{part.path} lacks {lacks}: expected at most {MOST_LOST}")
        if end > begin:
            more = np.arange(begin, end)
            part = replace(part, rounds=np.append(part.rounds, more), lost=np.append(part.lost, more))
        counted.append((part, int(np.count_nonzero(part.rounds < limit))))
    return counted


def merged_columns(parts: Sequence[Part]) -> list[Column]:
    """The columns of all parts, each once; the newest part says what a column is.

    UsageError if it is another thing in an earlier part, of other axes or values that cannot stand beside these.
    """
    newest = {column.name: column for part in parts for column in part.columns}
    for part in parts:
        for column in part.columns:
            other = newest[column.name]
            if column.dims != other.dims or not np.can_cast(column.stored, other.stored, "same_kind"):
                raise UsageError(f"{part.path} has another column '{column.name}' than other segments")
    return list(newest.values())


def merged_coords(parts: Sequence[Part], facts: Sequence[Fact] = ()) -> dict[str, Array]:
    """Return the labels of every axis: the longest of all parts (the number of ranks may have changed).

    Before there is any part, clients that something is known of have their numbers as labels. UsageError if one part's
    labels do not begin the longest ones: its rows then belong to other clients or layers.
    """
    longest: dict[str, Array] = {CLIENT: np.arange(len(facts[0].values))} if facts and not parts else {}
    for part in parts:
        for name, labels in part.coords.items():
            longest[name] = max(longest.get(name, labels), labels, key=len)
    for part in parts:
        for name, labels in part.coords.items():
            if not np.array_equal(longest[name][: len(labels)], labels):
                raise UsageError(f"{part.path} has other labels on axis '{name}' than other segments")
    return longest


def other_clients(parts: Sequence[Part], facts: Sequence[Fact]) -> str:
    """Return where segments have another number of clients than run.h5 knows of, "" where none has."""
    known = {len(fact.values) for fact in facts}
    if len(known) > 1:
        return f"run.h5 knows of {listed(sorted(known))} clients"
    for part in parts:
        if CLIENT in part.coords and known - {len(part.coords[CLIENT])}:
            return f"run.h5 knows of {listed(known)} clients, metrics/{part.path.name} of {len(part.coords[CLIENT])}"
    return ""
