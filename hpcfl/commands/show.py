"""What runs came to, a row for each config or run; and the digest that says whether two ended in the same state."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Column, Table

from hpcfl import store
from hpcfl.base.console import width_of
from hpcfl.base.errors import RunError, UserError, listed
from hpcfl.base.terminal import say
from hpcfl.results.run_table import ACCURACY, Group, Recorded, groups, last_figures, recorded_metrics
from hpcfl.store.inside import one_line
from hpcfl.sums.guard import WARNINGS

Rows = Sequence[Mapping[str, Any]]
QUIET_SECONDS = 60.0  # without a row, after which a running run is said to be quiet
LAST = 10  # evaluations that accuracy_last is the mean of
WRAP = 24  # characters of a line of a name, where a table is turned


def _last(values: Any, count: int = 1) -> float | None:
    """The mean of the last known values of a column by round."""
    known = values.dropna("round").values
    return float(np.mean(known[-count:])) if len(known) else None


def _arrived(data: Any) -> float | None:
    invited = float((data["cohort"] == 1).sum())
    return float((data["arrived"] == 1).sum()) / invited if invited else None


def _fates(data: Any) -> dict[str, int]:
    """Return how many visits ended how, by the meaning of the flag, in the order of the flags."""
    if "fate" not in data:
        return {}
    numbers, counts = np.unique(data["fate"].values[data["fate"].values >= 0], return_counts=True)
    meanings = data["fate"].attrs["flag_meanings"].split()
    return {meanings[number]: int(visits) for number, visits in zip(numbers.tolist(), counts.tolist())}


def _metrics(data: Any) -> dict[str, float | None]:
    found = dict[str, float | None]()
    for name in recorded_metrics(data):
        if name not in (ACCURACY, "test_loss"):
            both = _last(data[name]), _last(data[f"client_{name}"].mean("client"))
            found[name] = both[0] if both[0] is not None else both[1]
    return found


def _staleness(data: Any) -> float | None:
    if "arrival_staleness" not in data:
        return None
    return float(data["arrival_staleness"].where(data["arrival_client"] >= 0).mean())


FIGURES: dict[str, tuple[Any, Callable[[Any], Any] | None]] = {
    "reason": ("", None),  # of the status, where a run has not ended well
    "quiet_seconds": (None, None),  # since a run that is said to be running wrote anything
    "rounds": (0, lambda data: int(data.sizes["round"])),
    "accuracy": (None, lambda data: _last(data["accuracy"])),  # of the last evaluation
    "accuracy_last": (None, lambda data: _last(data["accuracy"], LAST)),
    "client_accuracy": (None, lambda data: _last(data["client_accuracy"].mean("client"))),  # mean over clients
    "metrics": ({}, _metrics),  # others, of the last evaluation: of the shared model, or the mean over clients
    "arrived": (None, _arrived),  # share of the invited
    "fates": ({}, _fates),  # visits, by what became of them
    "void": (0, lambda data: int((data["void"] == 1).sum())),  # rounds
    "repeats": (0, lambda data: int(data["repeats"].clip(min=0).sum()) if "repeats" in data else 0),  # void attempts
    "sim_seconds": (None, lambda data: _last(data["sim_seconds"])),
    "wall_seconds": (None, lambda data: _last(data["wall_seconds"])),
    "oracle": (None, lambda data: float(data["oracle"].sum()) if "oracle" in data else None),  # complexity so far
    "staleness": (None, _staleness),  # mean over the visits that counted, where arrivals ended rounds
    "lost": ([], None),  # clients, and how
    "rehosted": ([], None),  # clients of lost ranks, and where they went on
    "names": ([], None),  # clients', where they have any
    "absent": ([], None),  # which hosts and ranks were not heard of for some rounds, and when they were back
    "rejected": (0, lambda data: int((data["rejected"] == 1).sum()) if "rejected" in data else 0),  # visits, or parts
    "warnings": ({}, None),  # of the guard, by kind
    "state_sha256": (None, None),  # of the newest whole checkpoint
}
"""What a run is said to have come to that was killed before its first segment was there, and what is read of rows."""
HEADINGS = {
    "rounds": "rounds",
    "accuracy": "accuracy",
    "last 10": "accuracy_last",
    "clients": "client_accuracy",
    "arrived": "arrived",
    "void": "void",
    "simulated s": "sim_seconds",
    "wall s": "wall_seconds",
    "state": "state_sha256",
}
"""What stands in the table; of runs in real time, `sim_seconds` are the seconds that their rounds took."""


def digest(shared: Mapping[str, Any]) -> str:
    """SHA-256 of the shared state, in the order of the names."""
    sha256 = hashlib.sha256()
    for name in sorted(shared):
        sha256.update(np.ascontiguousarray(shared[name]).tobytes())
    return sha256.hexdigest()


def summaries(folders: Iterable[Path], by_group: bool = False) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the `summary` of each run that can be read, `by_group` its `last_figures` too; and lines of the others.

    UserError where none can be read.
    """
    rows, odd = [], []
    for folder in folders:
        try:
            row = summary(folder)
            rows.append({**row, "groups": last_figures(folder)} if by_group else row)
        except UserError as error:
            odd.append(error)
        except Exception as error:  # what an odd table makes xarray and h5py raise is not foreseen
            odd.append(unforeseen(f"'{folder}'", error))
    if odd and not rows:
        raise odd[0]
    return rows, [str(error) for error in odd]


def unforeseen(what: str, error: Exception) -> RunError:
    """Return in one line that a table that can be read is not one of ours."""
    return RunError(f"{what} cannot be shown: {type(error).__name__}: {one_line(error)}")


def summary(path: Path) -> dict[str, Any]:
    """One run's figures: run, status, and the keys of `FIGURES`."""
    folder = store.run_folder(path)
    data = store.open_run(folder)
    status = store.read_status(folder)
    row: dict[str, Any] = {"run": str(folder), "status": status.state}
    row |= {key: nothing for key, (nothing, _) in FIGURES.items()}
    if status.state == "running":
        row["quiet_seconds"] = max(0.0, time.time() - store.last_written(folder))
    elif status.state not in ("done", "stopped"):
        row["reason"] = status.reason
    if "cohort" not in data:
        return row
    known = {key: how(data) for key, (_, how) in FIGURES.items() if how is not None}
    newest = None
    try:
        newest = store.latest(folder)
    except RunError as error:  # the other figures are there all the same
        say(str(error))
    known["state_sha256"] = digest(store.load(newest, personal=False).shared) if newest else None
    events, lost, rehosted = store.events(folder), dict[int, str](), dict[int, str]()
    for event in events:
        if event["kind"] == "lost":
            lost[event["client"]] = event["text"]
        elif event["kind"] == "rehosted":
            rehosted[event["client"]] = event["text"]
            lost.pop(event["client"], None)  # it is not lost for good
    warnings = {event["kind"]: event["text"] for event in reversed(events) if event["kind"] in WARNINGS}
    known |= {"lost": sorted(lost.items()), "rehosted": sorted(rehosted.items()), "warnings": warnings}
    away = (event["text"] for event in events if event["kind"] in ("absent", "returned"))
    known["absent"] = list(dict.fromkeys(away))  # there is an event for each client
    known["names"] = data["client_name"].values.tolist() if "client_name" in data.coords else []
    return row | known


def table(rows: Sequence[Mapping[str, Any]], each: bool = False, width: int | None = None) -> list[Any]:
    """The rows of several runs as `rich` tables: one line for each config, over its seeds, or for `each` run.

    One table has a line for each; where it is wider than `width`, several have a column for each, as many as fit.
    """
    runs = [Recorded.of(Path(row["run"])) for row in rows]
    found = groups(runs)
    clocks = {run.keys.get("clock", "simulated") for run in runs}
    if each or all(len(group.runs) == 1 for group in found):
        found = [Group(run.name, (), (run,)) for run in runs]
    own = [[rows[runs.index(run)] for run in group.runs] for group in found]
    seeds = len(found) < len(runs)
    lines = [dict(_cells(group, its, rows, clocks, seeds)) for group, its in zip(found, own)]
    whole = Table(*(Column(name, justify="left" if name in ("run", "status") else "right") for name in lines[0]))
    for line in lines:
        whole.add_row(*line.values())
    if width is None or width_of(whole) <= width:
        return [whole]
    for count in range(len(lines), 0, -1):
        parts = []
        for some in (lines[start : start + count] for start in range(0, len(lines), count)):
            columns = (Column(line["run"], justify="right", overflow="fold", max_width=WRAP) for line in some)
            parts.append(Table("run", *columns))
            for heading in list(some[0])[1:]:
                parts[-1].add_row(heading, *(line[heading] for line in some))
        if all(width_of(part) <= width for part in parts):
            break
    return parts


def _cells(group: Group, rows: Rows, everyone: Rows, clocks: set[str], seeds: bool) -> Iterator[tuple[str, str]]:
    states = Counter(row["status"] for row in rows)
    yield "run", group.label
    if seeds:
        yield "seeds", str(len(rows))
    yield "status", next(iter(states)) if len(states) == 1 else ", ".join(f"{n} {name}" for name, n in states.items())
    for heading, key in HEADINGS.items():
        cell = _cell(key, [row[key] for row in rows])
        if key == "sim_seconds" and clocks != {"simulated"}:
            clock = group.runs[0].keys.get("clock", "simulated")
            heading, cell = ("wall s in rounds", cell) if clocks == {"wall"} else ("s in rounds", f"{cell} {clock}")
        yield heading, cell
        if key == "client_accuracy":
            for name in dict.fromkeys(name for row in everyone for name in row["metrics"]):
                yield name, _cell(name, [row["metrics"].get(name) for row in rows])


def remarks(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What does not fit into a table: why a run ended, whether one moves, who was lost, what the guard says."""
    for row in rows:
        name = Path(row["run"]).name
        if row["reason"]:
            yield f"{name}: {row['status']}: {row['reason']}"
        if (row["quiet_seconds"] or 0.0) > QUIET_SECONDS:
            yield f"{name}: running, but has written nothing for {row['quiet_seconds']:.0f} s"
        if row["names"]:
            yield f"{name}: clients: {listed(row['names'])}"
        who = {client: f"{client} ({called})" for client, called in enumerate(row["names"])}
        yield from (f"{name}: client {who.get(client, client)} was lost {how}" for client, how in row["lost"])
        yield from (f"{name}: client {who.get(client, client)} went on {how}" for client, how in row["rehosted"])
        yield from (f"{name}: {text}" for text in row["absent"])
        if set(row["fates"]) - {"counted", "under_way"}:
            told = ", ".join(f"{visits} {fate.replace('_', ' ')}" for fate, visits in row["fates"].items())
            yield f"{name}: visits: {told}"
        if row["rejected"]:
            yield f"{name}: {row['rejected']} visits were rejected, in whole or in part"
        yield from (f"{name}: warning: {kind}: {text}" for kind, text in row["warnings"].items())


def _cell(key: str, values: Sequence[Any]) -> str:
    """The one value that there is, or mean ± standard deviation, and of how many where some have none."""
    known = [value for value in values if value is not None]
    if not known or (key == "state_sha256" and len(known) > 1):
        return "-"
    if key == "state_sha256":
        return str(known[0])[:12]
    if isinstance(known[0], int) and len(set(known)) == 1:
        return str(known[0])
    digits = 1 if key.endswith("seconds") or isinstance(known[0], int) else 4
    text = f"{np.mean(known):.{digits}f}"
    if len(known) > 1:
        text += f" ± {np.std(known, ddof=1):.{digits}f}"
    return text if len(known) == len(values) else f"{text} ({len(known)})"
