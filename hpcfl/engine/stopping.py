"""Leaving early when asked to: signals, which are noted, and the file ``stop`` in a run folder, which asks.

Neither interrupts anything. The round loop looks for requests where a round ends, so that what is left behind is whole
and can be gone on with. Nothing heavy is imported with this module: until `install`, signals kill.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hpcfl.base.errors import RunError, UsageError
from hpcfl.base.terminal import say

if TYPE_CHECKING:
    from hpcfl.base.types import Floats

FILE = "stop"
ASKED = "hpcfl stop"
NAMES = ("TERM", "INT", "USR1")
LOOK_SECONDS = 0.2  # a look at a file costs a network file system a message
REPEAT_SECONDS = 2.0  # schedulers say TERM several times; a person who says it again waits longer
REACT_SECONDS = 1.0  # how long the main thread may take to see a signal
WAIT_SECONDS = 0.1

_signal = ""
_since = 0.0
_noted = 0.0
_before: dict[int, Any] = {}
_pipe: list[int] = []


def install() -> None:
    """Note TERM, INT and USR1 from now on; to be called before anything large is imported, in the main thread.

    A signal that comes while these are loaded is then not lost, nor deadly. One that is ignored stays so. In another
    thread nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for name in NAMES:
        number = signal.Signals[f"SIG{name}"]
        if number not in _before and signal.getsignal(number) is not signal.SIG_IGN:
            _before[number] = signal.signal(number, _note)
    if _before and not _pipe and (others := signal.set_wakeup_fd(-1)) == -1:
        _pipe.extend(os.pipe())
        os.set_blocking(_pipe[1], False)
        signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=_listen, args=(_pipe[0],), name="hpcfl signals", daemon=True).start()
    elif _before and not _pipe:
        signal.set_wakeup_fd(others)  # somebody else listens, as in a notebook


def uninstall() -> None:
    """Restore the signal handlers from before `install`, and forget what was noted."""
    global _signal
    for number, handler in _before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
    _before.clear()
    _signal = ""
    if _pipe:
        signal.set_wakeup_fd(-1)
        os.close(_pipe[1])  # the other end is the listener's
        _pipe.clear()


def disregard() -> None:
    """Ignore signals from now on, if they were noted until now: all is done but for the exit.

    A launcher ends the others when the first rank has left with other than 0, and their exit code is to be the same.
    """
    for number in _before:
        signal.signal(number, signal.SIG_IGN)


def _note(number: int, _: FrameType | None) -> None:
    """Keep the first signal; a second INT or TERM ends the process as if nothing had been installed."""
    global _signal, _since, _noted
    _noted = time.monotonic()
    if not _signal:
        _signal, _since = signal.Signals(number).name.removeprefix("SIG"), _noted
    elif number != signal.SIGUSR1 and time.monotonic() - _since > REPEAT_SECONDS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.raise_signal(number)


def _listen(pipe: int) -> None:
    """End the process at a second INT or TERM where the main thread does not come back to Python to do so.

    As in a call of MPI, or of torch. Python's handlers wait for it; what is written to the pipe does not.
    """
    first = 0.0
    while numbers := os.read(pipe, 64):
        number = next((each for each in numbers if each in (signal.SIGINT, signal.SIGTERM)), None)
        if number is None:
            continue
        now = time.monotonic()
        if first and now - first > REPEAT_SECONDS:
            time.sleep(REACT_SECONDS)
            # what the main thread has noted may be older than this thread's look: it waited for Python's lock
            if pipe in _pipe and _noted < now - REACT_SECONDS:
                os._exit(128 + number)
        first = first or now
    os.close(pipe)


class Stop:
    """Requests to stop that reach one rank: a signal that it was sent; at the server also the stop file in `folder`."""

    def __init__(self, folder: Path, serves: bool) -> None:
        self.folder, self.serves = folder, serves
        self.reason, self.due = "", -math.inf
        self.forwarded = False

    def requested(self) -> str:
        """Return why the run is to stop, as ``"signal USR1"`` or ``"hpcfl stop"``; "" where it is not."""
        if _signal:
            return f"signal {_signal}"
        now = time.monotonic()
        if self.serves and not self.reason and now >= self.due:
            self.reason = asked(self.folder)
            self.due = now + LOOK_SECONDS
        return self.reason


def encode(reason: str) -> int:
    """Return a reason to stop as a number that ranks can exchange: 0 for none, a signal's own, -1 for any other."""
    if not reason:
        return 0
    name = reason.removeprefix("signal ")
    return int(signal.Signals[f"SIG{name}"]) if name in NAMES else -1


def decode(numbers: Floats) -> str:
    """Return the first rank's reason in words, "" where no rank has one; `numbers` [ranks] are those of `encode`."""
    for rank in numbers.nonzero()[0]:
        number = int(numbers[rank])
        return ASKED if number < 0 else f"signal {signal.Signals(number).name.removeprefix('SIG')} on rank {rank}"
    return ""


def request(folder: Path, reason: str = ASKED) -> None:
    """Ask the run in `folder` to stop, from any process; UsageError if the folder cannot be written."""
    from hpcfl.store.atomic import write_text

    try:
        try:
            write_text(folder / FILE, reason + "\n")
        except FileNotFoundError:  # a run that just begins clears temporary files away
            write_text(folder / FILE, reason + "\n")
    except OSError as error:
        raise UsageError(f"'{folder}' cannot be asked to stop: {FILE} cannot be written: {error.strerror}") from None


def forward(stop: Stop, folder: Path) -> None:
    """Ask the server to stop because this rank was asked to.

    In real time, and where the rank was released, ranks do not agree round by round. Where the disk refuses, a warning
    says so, and it is tried again: the server may be about to end the job for the same reason.
    """
    reason, now = stop.requested(), time.monotonic()
    if not reason or stop.forwarded or now < stop.due:
        return
    try:
        request(folder, reason)
        stop.forwarded = True
    except UsageError as error:
        if stop.due == -math.inf:
            say(f"warning: {error}; trying again")
        stop.due = now + LOOK_SECONDS


def withdraw(folder: Path) -> None:
    """Take a request back: it was honoured, or meant for an earlier start."""
    (folder / FILE).unlink(missing_ok=True)


def asked(folder: Path) -> str:
    """Return the reason in the file of a request, "" where there is none."""
    with suppress(FileNotFoundError):  # a file made by hand may be empty
        return " ".join((folder / FILE).read_text(encoding="utf-8", errors="replace").split()) or ASKED
    return ""


def waits(folder: Path) -> bool:
    """True in a batch job that has been queued again, if somebody has asked its run to stop since it ran last.

    What a signalled rank has written is not meant: that was over with the job.
    """
    restarted = any(os.environ.get(name, "0") != "0" for name in ("SLURM_RESTART_COUNT", "HPCFL_RESTARTED"))
    return restarted and asked(folder) == ASKED


def stop(paths: Iterable[Path], patience: float | None = None) -> None:
    """Ask runs to stop, as ``hpcfl stop``; with `patience` wait for those that run, see `wait_until_stopped`.

    One that waits in a queue to be started again ends when it is. UsageError, before any is asked, if a folder holds no
    run, or one that is over.
    """
    from hpcfl import store

    states = {folder: store.read_status(folder).state for folder in map(store.run_folder, paths)}
    for folder, state in states.items():
        if state not in ("running", "stopped", "killed"):
            raise UsageError(f"'{folder}' cannot be stopped: expected a running run, this one is {state}")
    for folder, state in states.items():
        request(folder)
        if state != "running":
            say(f"'{folder}' is {state}: if its batch job is queued again, that ends when it starts")
    for folder, state in states.items():
        if patience is not None and state == "running":
            wait_until_stopped(folder, patience)


def wait_until_stopped(folder: Path, patience: float) -> None:
    """Wait until a run that was asked to stop has stopped.

    Raises
    ------
    RunError
        If it ends otherwise, or has written nothing for `patience` seconds; a line says so before, when a tenth of
        these are over.
    """
    from hpcfl import store

    written, since, told = -1.0, time.monotonic(), False
    while (status := store.read_status(folder)).state == "running":
        if (last := store.last_written(folder)) != written:
            written, since, told = last, time.monotonic(), False
        quiet = time.monotonic() - since
        if quiet > patience:
            raise RunError(
                f"'{folder}' did not stop: it has written nothing for {quiet:.0f} s; its process is {status.pid} on "
                f"{status.host}, which a second signal TERM ends"
            )
        if quiet > patience / 10 and not told:
            told = True
            say(f"'{folder}' has written nothing for {quiet:.0f} s; it stops after the round that it is in")
        time.sleep(WAIT_SECONDS)
    if status.state != "stopped":
        raise RunError(f"'{folder}' did not stop: expected it to be stopped, it is {status.state}")
