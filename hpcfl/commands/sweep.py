"""The runs of a sweep: every config with every value of every key, each with a folder and a command of its own.

They are processes: so many at a time, each with a log, and none left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from hpcfl import store
from hpcfl.base.errors import RunError, Stopped, UsageError, count_of, refusal
from hpcfl.base.terminal import plain, raw, say
from hpcfl.commands.verify import findings
from hpcfl.config import load
from hpcfl.data import Header
from hpcfl.engine.stopping import NAMES, REPEAT_SECONDS
from hpcfl.launch.request import check_same, check_writable
from hpcfl.mpi.launcher import packed

FINISHED = {**dict.fromkeys(store.DONE, "skipped"), "diverged": "diverged"}
"""States of a run that is not started again, and how it is counted."""
LONGEST = 200  # characters of a run's name; file systems take 255 bytes, and a log's name is longer


@dataclass(frozen=True)
class Run:
    """One run of a sweep: what follows ``hpcfl run`` on its command line, and where it lives."""

    index: int
    config: str
    settings: tuple[str, ...]
    folder: Path
    options: tuple[str, ...] = ()
    overlays: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def log(self) -> Path:
        """The file of what the run says."""
        return self.folder.with_name(f"{self.name}.log")

    @property
    def state(self) -> str:
        """``new``, or what the run's status says; a finished run may have lost its run.h5."""
        state = store.read_status(self.folder).state
        return state if state in FINISHED or (self.folder / "run.h5").exists() else "new"

    @property
    def words(self) -> list[str]:
        """The command line after ``hpcfl``; it begins the run, goes on with it, or finds that it is done."""
        return ["run", *self.what, "--out", str(self.folder), "--resume", *self.options]

    @property
    def what(self) -> list[str]:
        """The part of `words` that says what is run."""
        overlays = [word for overlay in self.overlays for word in ("--with", overlay)]
        return [self.config, *overlays, *(word for setting in self.settings for word in ("--set", setting))]

    def line(self, launcher: Sequence[str] = ()) -> str:
        """Index, state, folder and command, separated by tabs."""
        command = shlex.join([*launcher, "hpcfl", *self.words])
        return "\t".join([str(self.index), self.state, str(self.folder), command])


def runs(
    configs: Sequence[str],
    out: Path,
    settings: Sequence[str] = (),
    grid: Sequence[str] = (),
    seeds: str | None = None,
    data_dir: Path | None = None,
    overlays: Sequence[Sequence[str]] = (),
    **flags: bool,
) -> list[Run]:
    """List the runs of a sweep, in an order that follows from the arguments alone; the last key changes fastest.

    `settings` are ``key=value`` for all runs, `grid` ``key=v1,v2,…`` for as many as there are values, and `seeds`
    ``1,2,5-7`` is another axis of the grid. Each list among `overlays` is an axis too: a run has one overlay of each.
    `flags` are `force`, `trust` and `allow_mixed`, as ``hpcfl run`` has them.

    Raises
    ------
    UsageError
        If a list cannot be read, a key is set twice, or two runs would share a folder.
    """
    given, product = axes(settings, grid, seeds), itertools.product
    place = ("--data-dir", str(data_dir)) if data_dir else ()
    words = (f"--{name.replace('_', '-')}" for name in ("force", "trust", "allow_mixed") if flags.get(name))
    options = *place, *words
    by_name: dict[str, Run] = {}
    for config, each, values in product(configs, product(*overlays), product(*given.values())):
        varied = tuple(f"{key}={value}" for key, value in zip(given, values))
        folder = out / name_of(config, [*(Path(overlay).stem for overlay in each), *varied])
        run = Run(len(by_name), config, (*settings, *varied), folder, options, each)
        if (other := by_name.setdefault(run.name, run)) is not run:
            both = " and ".join(f"'{shlex.join(one.what)}'" for one in (other, run))
            raise UsageError(f"two runs would share the folder '{run.folder}': {both}; expected each once")
    return list(by_name.values())


def axes(settings: Sequence[str], grid: Sequence[str], seeds: str | None) -> dict[str, list[str]]:
    """The values of each key that varies."""
    once = {setting.partition("=")[0].strip() for setting in settings}
    lists = [_axis(text) for text in grid] + ([("seed", seed_list(seeds))] if seeds is not None else [])
    for key, _ in lists:
        if key in once:
            raise UsageError(f"{key}: set twice; expected each key in one of --set, --grid and --seeds")
        once.add(key)
    return dict(lists)


def _axis(text: str) -> tuple[str, list[str]]:
    """Key and values of ``key=v1,v2,…``; commas within brackets or quotes are part of a value."""
    key, _, rest = text.partition("=")
    values, held = [], ""
    for part in rest.split(","):
        held += part
        closed = all(held.count(left) == held.count(right) for left, right in ("[]", "{}"))
        if closed and not any(held.count(quote) % 2 for quote in "\"'"):
            values.append(held.strip())
            held = ""
        else:
            held += ","
    if not key.strip() or held or not all(values):
        raise UsageError(f"--grid {text}: expected KEY=V1,V2,...")
    return key.strip(), values


def seed_list(text: str) -> list[str]:
    """The seeds of ``1,2,5-7``."""
    seeds: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise UsageError(f"--seeds {text}: expected numbers as in 1,2,3 or 1-3, got '{part.strip()}'")
        seeds += [str(seed) for seed in range(first, last + 1)]
    return seeds


def name_of(config: str, varied: Sequence[str]) -> str:
    """A name that tells what the run differs in, of characters that any file system takes."""
    bare = [re.sub(r"[\[\]{}\"'\s]", "", text) for text in (Path(config).stem, *varied)]
    name = "_".join(re.sub(r"[^A-Za-z0-9_.=+-]+", "-", text) for text in bare)
    if len(name) <= LONGEST:
        return name
    mark = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: LONGEST - 1 - len(mark)]}-{mark}"


def picked(sweep: list[Run], only: int | None) -> list[Run]:
    """The one run that is asked for, or all; UsageError where there is no such index."""
    if only is None:
        return sweep
    if not 0 <= only < len(sweep):
        raise refusal("--only", f"0 to {len(sweep) - 1}", only, min(max(only, 0), len(sweep) - 1))
    return [sweep[only]]


def check(chosen: Sequence[Run], data_dir: Path | None) -> None:
    """Raise UsageError for the first run whose config is wrong, or whose folder holds a run of another config.

    A run.h5 that is damaged says nothing of its config: that run fails when its turn comes.
    """
    headers: dict[tuple[str, int], Header] = {}  # data that several runs share are read only once
    for run in chosen:
        try:
            config = load(run.config, run.settings, run.overlays, data_dir=data_dir)
            config.check_values()
            key = config.data.model_dump_json(), config.clients
            headers[key] = headers.get(key) or config.data.check(config.clients, data_dir)
            config.check_shapes(headers[key])
            if (run.folder / "run.h5").exists():
                with suppress(RunError):
                    check_same(run.folder, config)
        except UsageError as error:
            raise UsageError(f"run {run.index} ({run.name}): {error}") from None


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
            self.bar.update(self.task, completed=self.counts.total(), description=plain(", ".join(names)), refresh=True)

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
            say(line)
        rare = {"diverged": self.counts["diverged"], "stopped": self.counts["stopped"], "not started": waiting}
        tally = {word: self.counts[word] for word in ("done", "skipped", "failed")}
        tally |= {word: count for word, count in rare.items() if count}
        said = ", ".join(f"{count} {word}" for word, count in tally.items())
        print(f"{count_of(self.runs, 'run')}: {said}", flush=True)


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
        return "done" if state in store.DONE else "failed"
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


def started_by(launcher: str, pack: int | None, jobs: int | None) -> tuple[list[str], int]:
    """The words before each run's command, and how many runs there are at a time; UsageError as of what says them."""
    if launcher and pack:
        raise UsageError("hpcfl sweep: --pack has a launcher of its own: expected it without --launcher")
    words, room = packed(pack, os.environ) if pack else (launcher_words(launcher), jobs or 1)
    return words, min(jobs or room, room)


def launcher_words(text: str) -> list[str]:
    """The words of a launcher's command line; UsageError where it cannot be read or there is no such command."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--launcher {text}: {str(error).lower()}; expected a command as in 'mpirun -n 4'") from None
    if words and shutil.which(words[0]) is None:
        raise UsageError(f"--launcher {words[0]}: no such command; expected one as in 'mpirun -n 4'")
    return words
