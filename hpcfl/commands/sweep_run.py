"""The runs of a sweep as processes: so many at a time, each with a log, and none left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from hpcfl.base.errors import Stopped, UsageError
from hpcfl.base.terminal import plain, raw
from hpcfl.commands.sweep import FINISHED, Run
from hpcfl.commands.verify import findings
from hpcfl.engine.stopping import NAMES, REPEAT_SECONDS
from hpcfl.launch.request import check_writable

PROGRAM = (sys.executable, "-m", "hpcfl")
POLL_SECONDS = 0.1
TAIL_BYTES = 4096
SIGNALS = tuple(signal.Signals[f"SIG{name}"] for name in NAMES)
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux

_prctl = getattr(ctypes.CDLL(None), "prctl", None)


@dataclass
class Child:
    """A run's process, and where in its log this start begins."""

    run: Run
    process: subprocess.Popen[bytes]
    begin: int


class Children:
    """The processes that are running; `launcher` goes before each run's command, as ``mpirun -n 4``."""

    def __init__(self, launcher: Sequence[str] = ()) -> None:
        self.launcher = launcher
        self.running: list[Child] = []
        self.asked, self.since = False, 0.0  # to stop, all of them

    def start(self, run: Run) -> None:
        """Start a run as a process group of its own, which stops in good order should this process be killed."""
        gentle, parent = self._gentle(signal.SIGTERM), os.getpid()

        def tied() -> None:
            """Let the child get the signal when this process ends, however that ends."""
            if _prctl is not None:
                _prctl(PARENT_DEATH_SIGNAL, gentle)
            if os.getppid() != parent:
                os._exit(1)

        with run.log.open("ab") as log:
            begin = log.tell()
            process = subprocess.Popen(
                [*self.launcher, *PROGRAM, *run.words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                preexec_fn=tied,  # safe: this process has no second thread
            )
        self.running.append(Child(run, process, begin))

    def _gentle(self, number: int) -> int:
        """The signal that asks for what `number` asks; some launchers kill at once for all but USR1."""
        return signal.SIGUSR1 if self.launcher else number

    def pass_on(self, noted: list[int]) -> None:
        """Hand signals on: the first one, and those that are repeated with impatience."""
        while noted:
            number = noted.pop(0)
            if not self.asked:
                self.asked, self.since = True, time.monotonic()
                self._send(self._gentle(number))
            elif number != signal.SIGUSR1 and time.monotonic() - self.since > REPEAT_SECONDS:
                self._send(number)

    def _send(self, number: int) -> None:
        for child in self.running:
            child.process.send_signal(number)

    def ended(self) -> list[Child]:
        """The processes that have ended since the last call."""
        over = [child for child in self.running if child.process.poll() is not None]
        self.running = [child for child in self.running if child not in over]
        return over

    def leave(self) -> None:
        """Wait for all that still run, after a request to stop: something went wrong here."""
        if self.running:
            self._send(self._gentle(signal.SIGTERM))
        for child in self.running:
            child.process.wait()


class Board:
    """Tells of runs, and counts how they end: a bar with the running ones on a terminal, a line each in a log."""

    def __init__(self, runs: int, skipped: int, diverged: int = 0) -> None:
        self.runs = runs
        self.counts = Counter(skipped=skipped, diverged=diverged)
        self.failures: list[str] = []
        self.bar: Progress | None = None
        if sys.stderr.isatty():
            running = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
            columns = TextColumn("runs"), BarColumn(20), MofNCompleteColumn(), running
            # refreshed by hand: a thread of its own would make it unsafe to start processes
            self.bar = Progress(*columns, console=Console(file=raw(sys.stderr)), auto_refresh=False, expand=True)
            self.task = self.bar.add_task("", total=runs, completed=skipped + diverged)
            self.bar.start()

    def running(self, names: Sequence[str]) -> None:
        if self.bar is not None:
            done = self.counts.total()
            self.bar.update(self.task, completed=done, description=plain(", ".join(names)), refresh=True)

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
        rare = {"diverged": self.counts["diverged"], "stopped": self.counts["stopped"], "not started": waiting}
        tally = {word: self.counts[word] for word in ("done", "skipped", "failed")}
        tally |= {word: count for word, count in rare.items() if count}
        said = ", ".join(f"{count} {word}" for word, count in tally.items())
        print(f"{self.runs} run{'s' * (self.runs != 1)}: {said}", flush=True)


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Yield a list to which the requests to stop are added; one that is ignored stays so."""
    noted: list[int] = []
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda got, _: noted.append(got)) for number in heard}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def carry_out(runs: Sequence[Run], jobs: int = 1, launcher: Sequence[str] = ()) -> int:
    """Run what is not finished yet, `jobs` at a time; say how all ended, and return the exit code.

    A finished run that is damaged has failed; its folder stays as it is.
    """
    folder = runs[0].folder.parent
    check_writable(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"'{folder}' cannot be written: {error.strerror}; expected a writable folder") from None
    states = {run: run.state for run in runs}
    waiting = [run for run, state in states.items() if state not in FINISHED]
    finished = [run for run, state in states.items() if state in FINISHED]
    counts = Counter(states.values())
    children, board = Children(launcher), Board(len(runs), counts["done"], counts["diverged"])
    with signals() as noted:
        try:
            while finished and not children.asked:
                run = finished.pop(0)
                if reason := damage(run):
                    board.counts[FINISHED[states[run]]] -= 1
                    board.over(run.name, "failed", reason)
                children.pass_on(noted)
            while children.running or (waiting and not children.asked):
                while waiting and not children.asked and len(children.running) < jobs:
                    run = waiting.pop(0)
                    try:
                        children.start(run)
                    except OSError as error:
                        board.over(run.name, "failed", f"cannot be started: {error}")
                board.running([child.run.name for child in children.running])
                time.sleep(POLL_SECONDS)
                children.pass_on(noted)
                for child in children.ended():
                    word = outcome(child.process.returncode, children.asked, child.run.state)
                    board.over(child.run.name, word, failure(child) if word == "failed" else "")
        finally:
            children.leave()
            board.close()
    board.total(len(waiting))
    return Stopped.code if board.counts["stopped"] or waiting or finished else int(board.counts["failed"] > 0)


def damage(run: Run) -> str:
    """The first file of a finished run that is not as it was written, and why; "" where all are."""
    damaged = findings(run.folder).damaged
    return next((f"{run.folder / name} is damaged: {reason}" for name, reason in damaged.items()), "")


def outcome(code: int, asked: bool, state: str = "new") -> str:
    """How a run has ended; one that was asked to stop may have been ended by that before it could say so.

    Some launchers return a code of their own when they are told to end: the `state` of the run folder counts then. And
    whatever ends the process with code 0, only a run that says so is done.
    """
    if state == "diverged":
        return "diverged"
    if code == 0:
        return "done" if state == "done" else "failed"
    by_signal = asked and (-code in SIGNALS or code - 128 in SIGNALS)  # launchers and shells: 128 + n
    return "stopped" if code == Stopped.code or by_signal or (asked and state == "stopped") else "failed"


def failure(child: Child) -> str:
    """One line on why a run has failed: what it said last."""
    code = child.process.returncode
    how = f"exit code {code}"
    if code == 0:
        how += f", but the run's state is {child.run.state}, expected done"
    if code < 0:
        names = {number.value: number.name.removeprefix("SIG") for number in signal.Signals}
        how = f"signal {names.get(-code, -code)}"  # most real-time signals have no name
    return f"{how}: {last_words(child.run.log, child.begin) or f'nothing was said in {child.run.log}'}"


def last_words(log: Path, begin: int) -> str:
    """The last error in a log after `begin` bytes, or its last line: launchers add lines of their own."""
    try:
        with log.open("rb") as file:
            file.seek(max(begin, log.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:  # somebody has removed it; the sweep goes on
        return ""
    if errors := re.findall(r"^\W?hpcfl: (.+)$", text, re.MULTILINE):
        return str(errors[-1])
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")


def launcher_words(text: str) -> list[str]:
    """The words of a launcher's command line; UsageError where it cannot be read or there is no such command."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--launcher {text}: {str(error).lower()}; expected a command as in 'mpirun -n 4'") from None
    if words and shutil.which(words[0]) is None:
        raise UsageError(f"--launcher {words[0]}: no such command; expected one as in 'mpirun -n 4'")
    return words
