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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcfl.base.errors import Stopped, UsageError
from hpcfl.comm.launcher import world
from hpcfl.commands.sweep import Run
from hpcfl.commands.sweep_board import Board
from hpcfl.engine.stopping import NAMES, REPEAT_SECONDS
from hpcfl.launch.request import check_writable

PROGRAM = (sys.executable, "-m", "hpcfl")
POLL_SECONDS = 0.1
TAIL_BYTES = 4096
FINISHED = ("done", "diverged")
"""States of a run that is not started again."""
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux

_prctl = getattr(ctypes.CDLL(None), "prctl", None)


@dataclass
class Child:
    """A run's process, and where in its log this start begins."""

    run: Run
    process: subprocess.Popen[bytes]
    begin: int


@dataclass
class Crew:
    """The processes that are running.

    Attributes
    ----------
    launcher : sequence of str
        What goes before each run's command, as ``mpirun -n 4``.
    asked : bool
        Whether somebody wants all of them to stop.
    """

    launcher: Sequence[str] = ()
    asked: bool = False

    def __post_init__(self) -> None:
        self.children: list[Child] = []
        self.since = 0.0

    def start(self, run: Run) -> None:
        """Start a run as a process group of its own, which stops in good order should this process be killed."""
        gentle, parent = self._gentle(signal.SIGTERM), os.getpid()
        with run.log.open("ab") as log:
            begin = log.tell()
            process = subprocess.Popen(
                [*self.launcher, *PROGRAM, *run.words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                preexec_fn=lambda: _tie(parent, gentle),  # safe: this process has no second thread
            )
        self.children.append(Child(run, process, begin))

    def _gentle(self, number: int) -> int:
        """Return the signal that asks for what `number` asks; some launchers kill at once for all but USR1."""
        return signal.SIGUSR1 if self.launcher else number

    def heed(self, noted: list[int]) -> None:
        """Hand signals on: the first one, and those of somebody who has become impatient."""
        while noted:
            number = noted.pop(0)
            if not self.asked:
                self.asked, self.since = True, time.monotonic()
                self._send(self._gentle(number))
            elif number != signal.SIGUSR1 and time.monotonic() - self.since > REPEAT_SECONDS:
                self._send(number)

    def _send(self, number: int) -> None:
        for child in self.children:
            child.process.send_signal(number)

    def ended(self) -> list[Child]:
        """Return the processes that have ended since the last call."""
        over = [child for child in self.children if child.process.poll() is not None]
        self.children = [child for child in self.children if child not in over]
        return over

    def leave(self) -> None:
        """Wait for whatever still runs, after a request to stop: something went wrong here."""
        if self.children:
            self._send(self._gentle(signal.SIGTERM))
        for child in self.children:
            child.process.wait()


def _tie(parent: int, number: int) -> None:
    """Let this process get the signal when its parent ends, however that ends; in the child, before its program."""
    if _prctl is not None:
        _prctl(PARENT_DEATH_SIGNAL, number)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Yield a list to which the requests to stop are added; one that is ignored stays so."""
    noted: list[int] = []
    numbers = [signal.Signals[f"SIG{name}"] for name in NAMES]
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda got, _: noted.append(got)) for number in heard}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def carry_out(runs: Sequence[Run], jobs: int = 1, launcher: Sequence[str] = ()) -> int:
    """Run what is not finished yet, `jobs` at a time; say how all ended, and return the exit code."""
    _make(runs[0].folder.parent)
    states = [run.state for run in runs]
    waiting = [run for run, state in zip(runs, states) if state not in FINISHED]
    crew, board = Crew(launcher), Board(len(runs), states.count("done"), states.count("diverged"))
    with signals() as noted:
        try:
            while crew.children or (waiting and not crew.asked):
                while waiting and not crew.asked and len(crew.children) < jobs:
                    _start(crew, waiting.pop(0), board)
                board.running([child.run.name for child in crew.children])
                time.sleep(POLL_SECONDS)
                crew.heed(noted)
                for child in crew.ended():
                    word = outcome(child.process.returncode, crew.asked, child.run.state)
                    board.over(child.run.name, word, failure(child) if word == "failed" else "")
        finally:
            crew.leave()
            board.close()
    board.total(len(waiting))
    return Stopped.code if board.counts["stopped"] or waiting else int(board.counts["failed"] > 0)


def _make(folder: Path) -> None:
    check_writable(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"'{folder}' cannot be written: {error.strerror}; expected a writable folder") from None


def _start(crew: Crew, run: Run, board: Board) -> None:
    """Start a run; one that cannot be started has failed."""
    try:
        crew.start(run)
    except OSError as error:
        board.over(run.name, "failed", f"cannot be started: {error}")


def outcome(code: int, asked: bool, state: str = "new") -> str:
    """Return how a run has ended; one that was asked to stop may have been ended by that before it could say so.

    Some launchers return a code of their own when they are told to end: the `state` of the run folder counts then.
    """
    if state == "diverged":
        return "diverged"
    if code == 0:
        return "done"
    if asked and state == "stopped":
        return "stopped"
    handed_on = {signal.Signals[f"SIG{name}"].value for name in NAMES}
    by_signal = asked and (-code in handed_on or code - 128 in handed_on)  # launchers and shells: 128 + n
    return "stopped" if code == Stopped.code or by_signal else "failed"


def failure(child: Child) -> str:
    """Return one line on why a run has failed: what it said last."""
    code = child.process.returncode
    how = f"exit code {code}" if code >= 0 else f"signal {_signal_name(-code)}"
    return f"{how}: {last_words(child.run.log, child.begin) or f'nothing was said in {child.run.log}'}"


def _signal_name(number: int) -> str:
    """Return a signal's name, or the number of one that has none, as most real-time signals."""
    try:
        return signal.Signals(number).name.removeprefix("SIG")
    except ValueError:
        return str(number)


def last_words(log: Path, begin: int) -> str:
    """Return the last error in a log after `begin` bytes, or its last line: launchers add lines of their own."""
    try:
        with log.open("rb") as file:
            file.seek(max(begin, log.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:  # somebody has removed it; the sweep goes on
        return ""
    if told := re.findall(r"^\W?hpcfl: (.+)$", text, re.MULTILINE):
        return str(told[-1])
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")


def check_alone() -> None:
    """Raise UsageError where a launcher started this process: each of its ranks would start every run."""
    if world() is not None:
        raise UsageError(
            "hpcfl sweep was started by an MPI launcher, which belongs before each of its runs: "
            "expected hpcfl sweep ... --launcher 'mpirun -n 4'"
        )


def launcher_words(text: str) -> list[str]:
    """Return the words of a launcher's command line.

    Raises
    ------
    UsageError
        If it cannot be read or there is no such command.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--launcher {text}: {str(error).lower()}; expected a command as in 'mpirun -n 4'") from None
    if words and shutil.which(words[0]) is None:
        raise UsageError(f"--launcher {words[0]}: no such command; expected one as in 'mpirun -n 4'")
    return words
