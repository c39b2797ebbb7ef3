"""What a run says while it goes on: a bar on a terminal, a line per evaluation in a log. Only the server speaks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hpcfl.base.terminal import install, plain, raw, say


class Reporter:
    """Tells of rounds that are safely on disk; `first` is the round that this start begins with.

    Seconds are called by the `clock` that they are of.
    """

    def __init__(self, rounds: int, first: int, clock: str, quiet: bool = False) -> None:
        self.rounds, self.clock, self.quiet = rounds, clock, quiet
        self.text = self.short = ""
        self.bar: Progress | None = None
        if sys.stderr.isatty() and not quiet:
            columns = BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
            self.bar = Progress(TextColumn("round"), *columns, console=Console(file=raw(sys.stderr)))
            self.task = self.bar.add_task("", total=rounds, completed=first)
            self.bar.start()
            install()  # what is printed meanwhile goes to the bar's console, until it stops

    def round(self, done: int, row: Mapping[str, Any]) -> None:
        """Tell of one round; in a log only where it was evaluated."""
        if "client_test_loss" in row:
            known, invited = tested(row), int(np.sum(row["cohort"]))
            self.short = plain(known)
            known += f"objective {row['objective']:.6g}  " if "objective" in row else ""
            loss = f"loss {row['loss']:.4f}  " if "loss" in row else "void  " if invited else ""
            arrived = f"{int(np.sum(row['arrived']))}/{invited} arrived" if invited else "nobody invited"
            self.text = f"{known}{loss}{arrived}  {self.clock} {row['sim_seconds']:.1f} s"
        if self.bar is not None:
            self.bar.update(self.task, completed=done, description=self.short)
        elif not self.quiet and "client_test_loss" in row:
            print(f"round {done}/{self.rounds}  {self.text}", flush=True)

    def warn(self, kind: str, text: str, always: bool = False) -> None:
        """Warn of something, also where the run is quiet if `always`."""
        if self.bar is not None:
            self.bar.console.print(plain(f"hpcfl: warning: {kind}: {text}"), markup=False, soft_wrap=True)
        elif always or not self.quiet:
            say(f"warning: {kind}: {text}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def tested(row: Mapping[str, Any]) -> str:
    """The metrics on the global test set, or where there is none the means over the clients' own, by their columns."""
    said = []
    for own in (key for key in row if key.startswith("client_") and key != "client_test_loss"):
        name = own.removeprefix("client_") if own.removeprefix("client_") in row else f"mean_{own}"
        if not np.isnan(row[name]):
            said.append(f"{name} {row[name]:.4f}  ")
    return "".join(said)
