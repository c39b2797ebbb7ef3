"""What came of each result of the four papers: docs/studies/papers.md, of the lines in jobs/papers.

    python analysis/papers_page.py [--draft] [-o docs/studies/papers.md]

The page is jobs/papers/page.md, in which ``{{srpfl.md}}`` stands for another file of that folder, and ``{{ends("salf
table2/90/CNN-SALF")}}`` for what a function of `FUNCTIONS` says of lines. So each number of ours on it follows from the
lines. Exit code 1 where lines are missing; with --draft the page has ``?`` there. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import cache
from math import inf, isinf
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import papers
import srpfl_law
from study_lines import ROOT, Line, half_interval

ACCURACY = "accuracy", "mean_client_accuracy"


class MissingLinesError(Exception):
    """Lines that a page asks for, and that are not there."""


@cache
def lines(of: str) -> tuple[Line, ...]:
    """Return the lines of "paper study/case/arm", one per seed."""
    paper, _, name = of.partition(" ")
    asked = [run for run in papers.wanted(paper) if run.name.rpartition("/")[0] == name]
    known = {papers.identity(line): line for line in papers.known(paper)}
    if not asked:
        raise KeyError(of)
    if any(run not in known for run in asked):
        raise MissingLinesError(of)
    return tuple(known[run] for run in asked)


def measured(line: Line, column: str) -> list[float | None]:
    """Return what a line has of a column, by test; without a name, of the accuracy."""
    values: list[float | None] = line[column or next(name for name in ACCURACY if name in line)]
    return values


def ended(of: str, column: str = "", tests: int = 1) -> list[float]:
    """Return of each seed the mean over the last tests."""
    found = []
    for line in lines(of):
        found.append(fmean([value for value in measured(line, column) if value is not None][-tests:]))
    return found


def reached(of: str, level: float, cost: float = 0.0, unit: float = 1.0, column: str = "") -> list[float]:
    """Return of each seed the time at which a level is first reached, with `cost` units per round; inf: never."""
    found = []
    for line in lines(of):
        there = np.flatnonzero(np.array(measured(line, column), float) >= level)
        at = there[0] if len(there) else None
        found.append(inf if at is None else line["sim_seconds"][at] / unit + cost * line["rounds"][at])
    return found


# what pages say


def interval(values: list[float], digits: int = 3, scale: float = 1.0) -> str:
    """Return a mean and its 95 % interval over seeds, by Student's law."""
    scaled = [scale * value for value in values]
    return f"{fmean(scaled):.{digits}f} ± {half_interval(scaled):.{digits}f}"


def ends(of: str, column: str = "", tests: int = 1, digits: int = 3, scale: float = 1.0) -> str:
    """Return the mean over seeds of what the last tests say, and its interval."""
    return interval(ended(of, column, tests), digits, scale)


def differ(of: str, other: str, column: str = "", tests: int = 1, digits: int = 3, scale: float = 1.0) -> str:
    """Return by how much one arm ends above another, seed by seed, and its interval."""
    both = zip(ended(of, column, tests), ended(other, column, tests))
    return interval([one - two for one, two in both], digits, scale)


def time(of: str, level: float, cost: float = 0.0, unit: float = 1.0, column: str = "") -> str:
    """Return the median over seeds of the time to a level; "never" where half of them do not reach it."""
    value = median(reached(of, level, cost, unit, column))
    return "never" if isinf(value) else f"{value:.3g}"


def ratio(of: str, other: str, level: float, cost: float = 0.0, unit: float = 1.0, column: str = "") -> str:
    """Return the ratio of two arms' median times to a level."""
    one, two = (median(reached(each, level, cost, unit, column)) for each in (of, other))
    return "never" if isinf(one) else "0" if isinf(two) else f"{one / two:.2g}"


def value(of: str, path: str, form: str = ".3g") -> str:
    """Return a figure of a command's JSON line: ``bound.0.mean`` is the first bound's mean."""
    found: Any = lines(of)[0]["values"]
    for word in path.split("."):
        found = found[int(word)] if isinstance(found, list) else found[word]
    return f"{found:{form}}"


def best(of: str, column: str = "", digits: int = 3, scale: float = 1.0) -> str:
    """Return the mean over seeds of the highest test, and its interval."""
    found = [max(value for value in measured(line, column) if value is not None) for line in lines(of)]
    return interval(found, digits, scale)


def seeds(of: str) -> str:
    """Return how many seeds there are."""
    return str(len(lines(of)))


def gains(case: str, fast: str, slow: str, unit: float = 1.0, by: str = "") -> str:
    """Return ratios of two of SRPFL's arms' times to shares of what the second ends with, for each C.T.

    With `by` = "samples", of the first one's where samples double to that where clients do.
    """
    one, two = (f"srpfl figures/{case}/{arm}" for arm in (fast, slow))
    times = (f"srpfl samples/all/{fast}", one) if by else (one, two)
    levels = [share * fmean(ended(two, tests=3)) for share in (0.9, 0.97)]
    return "; ".join(" / ".join(ratio(*times, level, C, unit) for level in levels) for C in (0, 2, 10, 20, 100))


def law(say: str, constant: float = 1.2, cost: float = 0.0, start: str = "", least: int = 0) -> str:
    """Return what SRPFL's study of Theorem 4.9 says, of arms whose names end so, from N = `least` on."""
    cases = papers.studies("srpfl")["law"]["cases"].items()
    sizes = [N for N, about in cases if f"SRPFL{start}" not in about.get("without", []) and int(N) >= least]
    srpfl, fedrep = ([lines(f"srpfl law/{N}/{arm}{start}") for N in sizes] for arm in ("SRPFL", "FedRep"))
    both = zip(map(int, sizes), srpfl, fedrep)
    return srpfl_law.said(say, [srpfl_law.reached(*each, constant, cost) for each in both])


FUNCTIONS: dict[str, Callable[..., str]] = {
    each.__name__: each for each in (ends, differ, time, ratio, value, best, seeds, gains, law)
} | {"hours": lambda: f"{sum(line['seconds'] for paper in papers.PAPERS for line in papers.known(paper)) / 3600:.1f}"}


def filled(text: str, missing: list[str]) -> str:
    """Return a text with everything in ``{{…}}`` said; what is missing is added to a list."""

    def said(match: re.Match[str]) -> str:
        word = match[1]
        if word.endswith(".md"):
            return filled((papers.FOLDER / word).read_text(encoding="utf-8").rstrip("\n"), missing)
        try:
            return str(eval(word, {"__builtins__": {}}, {**FUNCTIONS}))
        except MissingLinesError as error:
            missing.append(str(error))
            return "?"

    return re.sub(r"\{\{(.+?)\}\}", said, text)


def page() -> tuple[str, list[str]]:
    """Return the page, and which lines are missing."""
    missing: list[str] = []
    return filled((papers.FOLDER / "page.md").read_text(encoding="utf-8"), missing), missing


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "studies" / "papers.md")
    parser.add_argument("--draft", action="store_true", help="write it though lines are missing")
    asked = parser.parse_args()
    text, missing = page()
    if not missing or asked.draft:
        asked.output.write_text(text, encoding="utf-8")
    print(json.dumps({"missing": sorted({*missing})}))
    sys.exit(1 if missing and not asked.draft else 0)


if __name__ == "__main__":
    main()
