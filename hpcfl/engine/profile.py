"""Where the time goes on one rank: every moment of its rounds belongs to one phase."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.table import Column, Table

from hpcfl.base.console import print_table
from hpcfl.base.types import Floats
from hpcfl.mpi.waiting import rows

PHASES = ("compute", "waiting", "broadcast", "reduction", "server", "evaluation", "store", "other")


class Phases:
    """The phases of one rank's rounds; they are measured where that is `wanted`.

    Attributes
    ----------
    rounds : list of dict of str to float
        Seconds by phase, for each round that was measured.
    """

    def __init__(self, wanted: bool = False) -> None:
        self.wanted = wanted
        self.rounds: list[dict[str, float]] = []
        self._measured: dict[str, float] | None = None
        self._now, self._since = "other", 0.0

    def begin(self) -> None:
        """Begin a round; what was before the first one belongs to none."""
        self._enter(self._now)
        if self.wanted:
            self._measured = dict.fromkeys(PHASES, 0.0)
            self.rounds.append(self._measured)

    def end(self) -> None:
        """End the last round; what comes now belongs to none."""
        self._enter(self._now)
        self._measured = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One of `PHASES`, without those within it."""
        before = self._now
        self._enter(name)
        try:
            yield
        finally:
            self._enter(before)

    def was(self, name: str) -> None:
        """Say that the time since a phase last began or ended belongs to this one."""
        now, self._now = self._now, name
        self._enter(now)

    def _enter(self, name: str) -> None:
        now = time.perf_counter()
        if self._measured is not None:
            self._measured[self._now] += now - self._since
        self._now, self._since = name, now

    def figures(self) -> Floats:
        """Return how many rounds there were; seconds, of all phases and of each; their medians over rounds; [19]."""
        seconds = np.array([[*each.values()] for each in self.rounds]).reshape(-1, len(PHASES))
        seconds = np.column_stack([seconds.sum(1), seconds])
        medians = np.median(seconds, axis=0) if len(seconds) else np.zeros(1 + len(PHASES))
        return np.concatenate([[len(seconds)], seconds.sum(0), medians])


COLUMNS = ("total", *PHASES)


def gathered(phases: Phases, comm: Any) -> dict[int, Floats]:
    """Return all ranks' figures at rank 0, none elsewhere; all ranks call it."""
    own = phases.figures()
    if comm is None:
        return {0: own}
    table = rows(comm, own)
    return dict(enumerate(table)) if comm.Get_rank() == 0 else {}


def report(ranks: Mapping[int, Floats]) -> None:
    """Print the ranks' figures, see `Phases.figures`, as a table and one JSON line last; nothing if there are none."""
    if ranks:
        print_table(table(ranks))
        print(json.dumps({"profile": facts(ranks)}), flush=True)


def table(ranks: Mapping[int, Floats]) -> Any:
    """The figures as a `rich` table, a row for each rank."""
    shown = Table(*(Column(name, justify="right") for name in ("rank", "", *COLUMNS)), show_lines=True)
    for rank, figures in sorted(ranks.items()):
        seconds, shares, medians = _parts(figures)
        lines = zip(seconds, 100 * shares, 1000 * medians)
        cells = (f"{second:.2f}\n{share:.1f}\n{median:.3g}" for second, share, median in lines)
        shown.add_row(str(rank), "s\n%\nms per round", *cells)
    return shown


def facts(ranks: Mapping[int, Floats]) -> list[dict[str, Any]]:
    """For each rank seconds, shares of them and medians over rounds in seconds, of all phases and of each."""
    names = "seconds", "shares", "medians"
    return [
        {"rank": rank, "rounds": int(figures[0])}
        | {name: dict(zip(COLUMNS, np.round(part, 6).tolist())) for name, part in zip(names, _parts(figures))}
        for rank, figures in sorted(ranks.items())
    ]


def _parts(figures: Floats) -> tuple[Floats, Floats, Floats]:
    seconds, medians = np.split(figures[1:], 2)
    return seconds, seconds / (seconds[0] or 1.0), medians
