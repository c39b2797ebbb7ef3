"""Which method in which world of stragglers: the runs of jobs/atlas/grid.toml, one JSON line each.

    python analysis/atlas.py run digits [--shard 0/2] [--minutes 100] [--only pai-4/own/wait ...]
    python analysis/atlas.py cost digits
    python analysis/atlas.py again digits [--minutes 10] [--draw WORD]

A cell is a world, who holds which labels, and a method. The step size of a method in a world is the one of four with
which, on seeds of their own, the mean accuracy over the run's time is largest. A line is appended to
jobs/atlas/digits.jsonl as soon as a run is over, whatever its end; what is there is skipped. Runs follow one another in
one process. `cost` says how many runs there are and what those took that are done. `again` carries out some of them
anew, and holds them against their lines; its exit code is 1 where they differ. Each prints one JSON line last.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import study_lines
from study_lines import ROOT, Line

if TYPE_CHECKING:
    import xarray
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Settings = dict[str, Any]
Run = tuple[str, float, int]
"""A cell's key, a step size and a seed."""

FOLDER = ROOT / "jobs" / "atlas"
STUDIES = "digits", "mnist", "deep", "combined", "combined-mnist"
LABELS = "anyone", "own"
"""Who holds a third of the labels: anyone, or the third of the clients that is slowest."""
PLANNED = "rounds", "tests", "never_came", "megabytes", "goodput", "staleness", "jain"
LEARNT = "reached", "area", "accuracy", "clients", "slow", "decile", "never"
NAMES = "study", "world", "labels", "method"
DRAWN = 200  # visits of each client by which it is said which clients are slow


@dataclass(frozen=True)
class Cell:
    """A method in a world."""

    study: str
    world: str
    labels: str
    method: str

    @property
    def key(self) -> str:
        return f"{self.world}/{self.labels}/{self.method}"

    @property
    def until(self) -> float:
        return float(grid()[self.study]["seconds"])


@cache
def grid() -> dict[str, Any]:
    """Return what the grid's file holds."""
    return tomllib.loads((FOLDER / "grid.toml").read_text(encoding="utf-8"))


def pairs(study: str) -> list[tuple[Cell, Cell]]:
    """Return a study's cells, those two together that differ in who holds which labels alone."""
    own = grid()[study]
    worlds, methods = own.get("worlds", list(grid()["worlds"])), own.get("methods", list(grid()["methods"]))
    return [
        (Cell(study, world, LABELS[0], method), Cell(study, world, LABELS[1], method))
        for world in worlds
        for method in methods
    ]


def method_of(cell: Cell) -> dict[str, Any]:
    """Return what the grid has of a cell's method."""
    found: dict[str, Any] = {**grid()["methods"], **grid()["methods-of-spaces"]}[cell.method]
    return found


def settings(cell: Cell, lr: float, seed: int, place: Path) -> Settings:
    """Return the tables of a run's config; files that it needs are written to `place`."""
    from hpcfl.config.presets import merged

    study, world, method = grid()[cell.study], grid()["worlds"][cell.world], method_of(cell)
    given = merged(merged(study["set"], merged(overlay(cell.world), world.get("set", {}))), method["set"])
    if "name" in method["set"].get("algorithm", {}):
        given["algorithm"] = method["set"]["algorithm"]
    given["algorithm"] = {**given["algorithm"], "lr": lr}
    given["seed"] = seed
    steps = study["set"]["algorithm"]["steps"]
    given["speed"] = {**given["speed"], "scale": 1 / (steps * given["speed"]["mean"])}
    rules = given.get("participation", {})
    if rules.get("close") == "deadline" or rules.get("deadline") == "world":
        given["participation"] = {**rules, "deadline": world["deadline"]}
    if one := method.get("one", False):
        given["speed"] |= {"per": "visit", "mean": steps * given["speed"]["mean"]}
    if cell.labels == "own":
        given |= slow_last(cell, given["speed"], seed, steps if one else 1, place)
    return given


def slow_last(cell: Cell, speed: Settings, seed: int, steps: int, place: Path) -> Settings:
    """Return a section by which the slowest clients are the last ones, whose labels are their own."""
    by = grid()["worlds"][cell.world]["own"]
    if by == "sorted":
        return {"speed": {**speed, "sorted": True}}
    law = config(cell, seed)
    if by == "seconds":  # slow phases that never end
        lasts = enumerate((steps * np.sort(seconds(law, 1))).tolist())
        file = table(place / "seconds.csv", "client,seconds", lasts)
        return {"speed": {"model": "table", "file": file, "per": speed["per"], "scale": speed["scale"]}}
    order = np.argsort(-presence(law, cell.until), kind="stable").tolist()
    rows = ((order.index(client), start, end) for client, start, end in intervals(law, 2 * cell.until))
    return {"availability": {"model": "table", "file": table(place / "there.csv", "client,start,end", rows)}}


@cache
def overlay(world: str) -> dict[str, Any]:
    """Return the tables of a world."""
    file = FOLDER.parent / "presets" / "worlds" / "overlays" / f"{world}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


# a run


def carried_out(cell: Cell, lr: float, seed: int) -> dict[str, Any]:
    """Return the line of a run."""
    import hpcfl
    from hpcfl.base.errors import Diverged, Ended, UserError

    began, line = time.process_time(), {**vars(cell), "lr": lr, "seed": seed}
    with TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        try:
            keys = settings(cell, lr, seed, Path(folder))
            hpcfl.run(keys, out=out, quiet=True, on_round=lambda row: row["sim_seconds"] >= cell.until)
        except Ended:
            pass
        except (UserError, Diverged) as error:
            line |= {"status": type(error).__name__, "why": str(error).splitlines()[0].replace(folder, "")}
        if (out / "run.h5").is_file():
            data = hpcfl.open_run(out)
            told = data.attrs["config"].replace(folder, "")
            line = {"status": data.attrs["status"], **line, **figures(data, slow(cell, seed), cell.until)}
            line |= {"config": hashlib.sha256(told.encode()).hexdigest()[:12]}
    return line | {"seconds": round(time.process_time() - began, 2), **study_lines.origin()}


def figures(data: xarray.Dataset, slow: Ints, until: float) -> dict[str, Any]:
    """Return what a line says of a run, of what came before `until`."""
    from hpcfl.results.run_table import tenth

    ended = data["sim_seconds"].values
    data = data.isel(round=ended <= until)
    shared = data["accuracy"].notnull().any()  # else clients have models of their own
    every = data["accuracy" if shared else "mean_client_accuracy"].values
    seconds, known = data["sim_seconds"].values, np.isfinite(every)
    times, accuracy = seconds[known], every[known]
    found: dict[str, Any] = {"rounds": len(seconds), "tests": len(times)}
    if not len(times):
        return found
    found["reached"] = {
        f"{target:g}": round(float(times[there[0]]), 3) if (there := np.flatnonzero(accuracy >= target)).size else None
        for target in grid()["targets"]
    }
    lasts = np.diff(np.append(times, until))
    found["area"] = round(float(accuracy @ lasts / until), 4)
    found["accuracy"] = round(float(accuracy[-1]), 4)
    last = data["client_accuracy"].values[known][-1]
    visits, useful, staleness = counted(data)
    never = visits == 0
    groups = {"clients": slice(None), "slow": slow, "decile": np.argsort(last)[: tenth(len(last))], "never": never}
    for name, whose in groups.items():
        found[name] = round(float(last[whose].mean()), 4) if len(last[whose]) else None
    found["never_came"] = int(never.sum())
    found["megabytes"] = round(float(data["message_bytes"].clip(min=0).sum()) / 1e6, 3)
    found["goodput"] = round(useful / (seconds[-1] * len(last)), 4)
    found["staleness"] = staleness
    total = visits.sum()
    found["jain"] = round(float(total**2 / (len(visits) * (visits**2).sum())), 4) if total else None
    return found


def counted(data: xarray.Dataset) -> tuple[Floats, float, float | None]:
    """Return how many visits of each client counted, the seconds of theirs that did, and their mean staleness."""
    layers = data.sizes["layer"]
    visits = np.zeros(data.sizes["client"])
    if "arrival_client" in data:
        depth, client = data["arrival_depth"].values, data["arrival_client"].values
        there = (client >= 0) & (depth <= layers)
        np.add.at(visits, client[there], 1)
        took = np.where(there, data["arrival_visit_seconds"].values, 0.0)
        stale = data["arrival_staleness"].values[there]
        return visits, float(took.sum()), round(float(stale.mean()), 3) if len(stale) else None
    came = data["arrived"].values == 1
    took = np.where(came, data["visit_seconds"].values, 0.0)
    # what was cut short has lasted until the round closed; of its layers those count that came
    took = np.minimum(took, data["round_seconds"].values[:, None])
    if "steps" not in data:
        took = took * data["blocks"].values / layers
    return came.sum(0).astype(float), float(took.sum()), None


# who is slow


@cache
def slow(cell: Cell, seed: int) -> Ints:
    """Return the third of the clients that can make the fewest visits; where labels are their own, the last third."""
    law = config(cell, seed)
    third = law.clients // grid()["groups"]
    if cell.labels == "own":
        return np.arange(law.clients - third, law.clients)
    return np.sort(np.argsort(presence(law, cell.until) / seconds(law, DRAWN), kind="stable")[:third])


def config(cell: Cell, seed: int) -> Any:
    """Return the config of a world in which anyone has any label, with FedAvg."""
    from hpcfl.config.config import from_table

    return from_table(settings(Cell(cell.study, cell.world, "anyone", "wait"), 0.1, seed, Path()))


def seconds(law: Any, rounds: int) -> Floats:
    """Return the mean seconds of what the speeds of a config say of each client, in the first rounds."""
    from hpcfl.schedule.plan import Attempt

    who = law.seed, law.clients, np.ones(1)
    drawn = [law.speed.seconds(Attempt(*who, round_, 0, np.arange(law.clients))) for round_ in range(rounds)]
    return np.asarray(np.mean(drawn, 0))


def intervals(law: Any, until: float) -> list[tuple[int, float, float]]:
    """Return clients and from when until when they are there, in the seconds of `[availability]`, for a while."""
    until /= law.speed.scale
    now = law.availability.presence(law.seed, law.clients, 1.0).at(0.0)
    since, found = np.zeros(law.clients), list[tuple[int, float, float]]()
    while (second := float(now.ends.min())) < until:
        here = now.there.copy()
        now.at(second)
        changed = np.flatnonzero(here != now.there)
        found += [(client, float(since[client]), second) for client in changed[here[changed]].tolist()]
        since[changed] = second
    return found + [(client, float(since[client]), until) for client in np.flatnonzero(now.there).tolist()]


def presence(law: Any, until: float) -> Floats:
    """Return the share of a run for which each client is there."""
    if law.availability.model == "always":
        return np.ones(law.clients)
    share = np.zeros(law.clients)
    for client, start, end in intervals(law, until):
        share[client] += (end - start) * law.speed.scale / until
    return share


def table(file: Path, columns: str, rows: Iterable[tuple[Any, ...]]) -> str:
    """Write a table, and return its name."""
    with file.open("w", encoding="utf-8", newline="") as opened:
        csv.writer(opened).writerows([columns.split(","), *rows])
    return str(file)


# lines


def known_of(study: str) -> list[Line]:
    """Return what is there of a study."""
    return study_lines.read(FOLDER / f"{study}.jsonl")


def cell_of(line: Mapping[str, Any]) -> Cell:
    return Cell(*(line[name] for name in NAMES))


def chosen(pair: Sequence[Cell], known: Mapping[Run, dict[str, Any]]) -> float | None:
    """Return the step size with the largest mean accuracy over time on the tuning seeds; None: no run has any."""
    found = {
        lr: sum(known[cell.key, lr, grid()["tuning"][cell.labels]].get("area", 0.0) for cell in pair)
        for lr in method_of(pair[0])["lr"]
    }
    best = max(found, key=lambda lr: found[lr])
    return best if found[best] else None


def still(pair: Sequence[Cell], known: Mapping[Run, dict[str, Any]]) -> Iterator[tuple[Cell, float, int]]:
    """Yield the runs that are not there yet, with step size and seed; `known` gets each before the next."""
    for lr in method_of(pair[0])["lr"]:
        for cell in pair:
            seed = grid()["tuning"][cell.labels]
            if (cell.key, lr, seed) not in known:
                yield cell, lr, seed
            if known[cell.key, lr, seed]["status"] == "UsageError":  # the method is none for this world
                return
    if (best := chosen(pair, known)) is None:
        return
    for seed in grid()[pair[0].study]["seeds"]:
        for cell in pair:
            if (cell.key, best, seed) not in known:
                yield cell, best, seed


def run(study: str, part: tuple[int, int], minutes: float, only: list[str]) -> dict[str, Any]:
    """Carry out what is not there yet of a shard, for so many minutes."""
    began, runs, spent = time.monotonic(), 0, 0.0
    known = {(cell_of(each).key, each["lr"], each["seed"]): each for each in known_of(study)}
    number, count = part
    mine = [pair for pair in pairs(study)[number::count] if not only or {cell.key for cell in pair} & {*only}]
    for pair in mine:
        for cell, lr, seed in still(pair, known):
            if time.monotonic() - began > 60 * minutes:
                return {"study": study, "shard": f"{number}/{count}", "runs": runs, "seconds": round(spent, 1)}
            line = known[cell.key, lr, seed] = carried_out(cell, lr, seed)
            runs, spent = runs + 1, spent + line["seconds"]
            study_lines.append(FOLDER / f"{study}.jsonl", line)
        print(f"{pair[0].world}, {pair[0].method}: {runs} runs, {spent:.0f} s", file=sys.stderr, flush=True)
    return {"study": study, "shard": f"{number}/{count}", "runs": runs, "seconds": round(spent, 1), "complete": True}


def cost(study: str) -> dict[str, Any]:
    """Return how many runs there are at most, how many are done, and the processor-hours of these."""
    done, tries = known_of(study), 0
    for pair in pairs(study):
        tries += 2 * (len(method_of(pair[0])["lr"]) + len(grid()[study]["seeds"]))
    spent = sum(each["seconds"] for each in done)
    return {"study": study, "runs": tries, "done": len(done), "hours": round(spent / 3600, 2)}


def again(study: str, minutes: float, draw: str) -> dict[str, Any]:
    """Carry out anew some lines that are drawn, which took so many minutes; return where they differ.

    What follows from the plan has to be the same anywhere, what was learnt where the processor and the versions are.
    """
    known = sorted(known_of(study), key=lambda line: hashlib.sha256(f"{draw} {identity(line)}".encode()).digest())
    spent, runs, exact, differ = 0.0, 0, 0, list[str]()
    for line in known:
        if line["status"] == "UsageError" or spent + line["seconds"] > 60 * minutes:
            continue
        new = carried_out(cell_of(line), line["lr"], line["seed"])
        same = (line.get("processor"), line.get("versions")) == (new["processor"], new["versions"])
        spent, runs, exact = spent + line["seconds"], runs + 1, exact + same
        differ += [
            f"{identity(line)}: {name}: {line.get(name)} before, now {new.get(name)}"
            for name in PLANNED + LEARNT * same
            if line.get(name) != new.get(name)
        ]
    return {"study": study, "runs": runs, "same_processor": exact, "seconds": round(spent, 1), "differ": differ}


def identity(line: Mapping[str, Any]) -> str:
    """Return which run a line is of."""
    return "/".join(str(line[name]) for name in (*NAMES, "lr", "seed"))


def main() -> None:
    """Run, or say what is to be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "cost", "again"))
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--shard", type=study_lines.shard, default=(0, 1), help="of how many, and which one")
    parser.add_argument("--minutes", type=float, default=100.0, help="begin no run after so many")
    parser.add_argument("--draw", default="", help="which lines are run again")
    parser.add_argument("--only", nargs="*", default=[], help="cells: world/labels/method")
    asked = parser.parse_args()
    if asked.command == "cost":
        told = cost(asked.study)
    elif asked.command == "again":
        told = again(asked.study, asked.minutes, asked.draw)
    else:
        told = run(asked.study, asked.shard, asked.minutes, asked.only)
    print(json.dumps(told))
    sys.exit(1 if told.get("differ") else 0)


if __name__ == "__main__":
    main()
