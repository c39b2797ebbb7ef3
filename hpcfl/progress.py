"""What a run says while it goes on: a bar on a terminal, a line per evaluation in a log. Only the server speaks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Speaker:
    """Tells of rounds that are safely on disk.

    Parameters
    ----------
    rounds, first : int
        The run's rounds, and the round that this start begins with.
    quiet : bool
        Say nothing.
    """

    def __init__(self, rounds: int, first: int, quiet: bool = False) -> None:
        self.rounds, self.quiet = rounds, quiet
        self.text = ""
        self.bar: Progress | None = None
        if sys.stderr.isatty() and not quiet:
            columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
            self.bar = Progress(TextColumn("round"), *columns, console=Console(stderr=True))
            self.task = self.bar.add_task("", total=rounds, completed=first)
            self.bar.start()

    def round(self, done: int, row: Mapping[str, Any]) -> None:
        """Tell of one round; in a log only where it was evaluated."""
        if "client_accuracy" in row:
            self.text = describe(row)
        if self.bar is not None:
            self.bar.update(self.task, completed=done, description=self.text)
        elif not self.quiet and "client_accuracy" in row:
            print(f"round {done}/{self.rounds}  {self.text}", flush=True)

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.stop()


def describe(row: Mapping[str, Any]) -> str:
    """Return a row's headline figures."""
    import numpy as np

    accuracy = row.get("accuracy", np.nanmean(row["client_accuracy"]))
    arrived = f"{int(np.sum(row['arrived']))}/{int(np.sum(row['cohort']))} arrived"
    loss = f"loss {row['loss']:.4f}" if "loss" in row else "void"
    return f"accuracy {accuracy:.4f}  {loss}  {arrived}  simulated {row['sim_seconds']:.1f} s"
