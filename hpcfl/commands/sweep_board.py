"""What a sweep says: a bar with the running runs on a terminal, a line per run that ends in a log."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column


class Board:
    """Tells of runs, and counts how they end.

    Parameters
    ----------
    runs, skipped, diverged : int
        How many there are, how many of them were done before, and how many had diverged.
    """

    def __init__(self, runs: int, skipped: int, diverged: int = 0) -> None:
        self.runs = runs
        self.counts = Counter(skipped=skipped, diverged=diverged)
        self.failures: list[str] = []
        self.bar: Progress | None = None
        if sys.stderr.isatty():
            running = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
            columns = TextColumn("runs"), BarColumn(20), MofNCompleteColumn(), running
            # refreshed by hand: a thread of its own would make it unsafe to start processes
            self.bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False, expand=True)
            self.task = self.bar.add_task("", total=runs, completed=skipped + diverged)
            self.bar.start()

    def running(self, names: Sequence[str]) -> None:
        """Show which runs are running."""
        if self.bar is not None:
            done = self.counts.total()
            self.bar.update(self.task, completed=done, description=", ".join(names), refresh=True)

    def over(self, name: str, outcome: str, reason: str = "") -> None:
        """Tell of a run that has ended, and keep the reason if it has failed."""
        self.counts[outcome] += 1
        if outcome == "failed":
            self.failures.append(f"{name} failed: {reason}")
        if self.bar is None:
            print(f"{self.counts.total()}/{self.runs}  {outcome}  {name}", flush=True)

    def close(self) -> None:
        """Leave the bar as it is at the end."""
        self.running([])
        if self.bar is not None:
            self.bar.stop()

    def total(self, waiting: int) -> None:
        """Say what has failed and the sum of it all; what is rare only where there was any."""
        for line in self.failures:
            print(f"hpcfl: {line}", file=sys.stderr, flush=True)
        found = {word: self.counts[word] for word in ("done", "skipped", "failed")}
        rare = {"diverged": self.counts["diverged"], "stopped": self.counts["stopped"], "not started": waiting}
        found |= {word: count for word, count in rare.items() if count}
        said = ", ".join(f"{count} {word}" for word, count in found.items())
        print(f"{self.runs} run{'s' * (self.runs != 1)}: {said}", flush=True)
