"""What judges read, runs that `judges.outside.write` has written, and the line that they leave. No hpcfl here."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

BOUND = 1e-6
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Visit:
    """A visit that counted in a `step`, and what it sent of each block: the change of the state that it began with."""

    step: int
    client: int
    version: int
    change: Arrays
    weights: dict[str, float]

    @property
    def staleness(self) -> int:
        return self.step - self.version

    @property
    def weight(self) -> float:
        """That of all its blocks."""
        (weight,) = set(self.weights.values())
        return weight


@dataclass(frozen=True)
class Run:
    """The states before and after each step, and the visits of each, as they arrived."""

    settings: dict[str, Any]
    states: list[Arrays]
    steps: list[list[Visit]]

    @property
    def visits(self) -> list[Visit]:
        return [visit for step in self.steps for visit in step]

    def model(self, visit: Visit) -> Arrays:
        """Return what the client had in the end."""
        return {name: value + visit.change[name] for name, value in self.states[visit.version].items()}


def read(path: Path) -> Run:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}

    def of(kind: str) -> Arrays:
        return {name.removeprefix(kind): value for name, value in arrays.items() if name.startswith(kind)}

    def rows(kind: str) -> list[Any]:
        return [dict(zip(of(kind), row)) for row in zip(*of(kind).values())]

    numbers = (arrays[name].tolist() for name in ("step", "client", "version"))
    visits = [Visit(*row) for row in zip(*numbers, rows("change:"), rows("weight:"))]
    states = rows("state:")
    steps = [[visit for visit in visits if visit.step == step] for step in range(len(states) - 1)]
    return Run(json.loads(str(arrays["settings"])), states, steps)


Row = dict[str, Any]


def compare(what: str, by: str, found: Iterable[Any], wanted: Iterable[Any], **more: int) -> Row:
    """Return a row of what was compared: the largest difference, and of how many numbers."""
    pairs = [(np.asarray(one), np.asarray(other)) for one, other in zip(found, wanted, strict=True)]
    assert all(one.shape == other.shape for one, other in pairs)
    worst = float(np.max([abs(one - other).max() for one, other in pairs]))  # NaN stays NaN
    return {"what": what, "by": by, **more, "numbers": sum(one.size for one, _ in pairs), "worst": worst}


def stepped(what: str, by: str, found: Iterator[Arrays], run: Run) -> Row:
    """Compare the state after each step."""
    states = list(found)
    each = ([state[name] for state in some for name in run.states[0]] for some in (states, run.states[1:]))
    return compare(what, by, *each, steps=len(run.steps), visits=len(run.visits))


def judge(packages: list[str], rows: Callable[[Path], Iterator[Row]]) -> None:
    """Print each row, append a line to a file, and exit with 1 where a bound is broken: ``FOLDER [FILE]``."""
    folder, began, found = Path(sys.argv[1]), time.perf_counter(), []
    for row in rows(folder):
        found.append(row)
        print(
            f"{row['what']:30} {row['by']:34} {row['numbers']:6} numbers, off by {row['worst']:.1e} at most", flush=True
        )
    line = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": (folder / "commit").read_text(),
        "versions": {package: version(package) for package in packages},
        "seconds": round(time.perf_counter() - began, 1),
        "bound": BOUND,
        "worst": max(row["worst"] for row in found),
        "compared": found,
    }
    for path in sys.argv[2:]:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    sys.exit(not all(row["worst"] <= BOUND for row in found))
