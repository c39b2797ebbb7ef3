"""How ranks leave after an error: together before a run; in the middle of one by ending the job, told once."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hpcfl import store
from hpcfl.base.blame import blamed, blaming
from hpcfl.base.errors import ErrorOnOtherRank, RunError, TakenOver, UserError
from hpcfl.mpi.launcher import checked_world, end_job, launched
from hpcfl.mpi.waiting import settle
from hpcfl.store.atomic import keep_open, number_of

T = TypeVar("T")

GIVE_UP_SECONDS = 4.0  # how long a failed rank waits for the one that speaks to end the job, or for a disk that hangs
ERROR_FILE = "error.txt"  # in the run folder: written by the rank that is the first to fail, removed by the next start
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENOTCONN, errno.ENODEV, errno.ENXIO, errno.EHOSTDOWN)


def raise_together(comm: Any, make: Callable[[], T]) -> T:
    """Return what `make` returns if no rank has an error; else raise it on the first such rank.

    The others raise `ErrorOnOtherRank`.

    `comm` is None for a process alone.
    """
    if comm is None:
        with blaming():
            return make()
    error: Exception | None = None
    made = None
    try:
        with blaming():
            made = make()
    except Exception as caught:  # any: a rank that leaves alone would let the others wait for ever
        error = caught
    settle(comm, error)
    return made  # type: ignore[return-value]


def speaks(error: UserError) -> bool:
    """True on the one rank that tells of an error that is not settled: where all ranks had it at once, the first."""
    if not launched():
        return True
    try:
        comm = checked_world()[0]
        if comm is not None:
            settle(comm, error)
    except ErrorOnOtherRank:
        return False
    except UserError:  # this one, or MPI cannot be loaded
        return True
    return True


def fail(comm: Any, folder: Path | None, error: BaseException) -> None:
    """Tell of the error, write the status, end all ranks; a foreseen error is one line, another has its traceback.

    Whatever the disk does meanwhile: none of what is written here is needed to end the job, nor may it hold that up.
    """
    if comm is not None:
        late = threading.Timer(GIVE_UP_SECONDS, end_job, (comm, 1))
        late.daemon = True
        late.start()
    keep_open(error)
    folder = None if isinstance(error, TakenOver) else folder
    try:
        error = _explained(comm, folder, error)
        line = f"{'' if comm is None else f'rank {comm.Get_rank()} of {comm.Get_size()}: '}{_line(error)}"
        bare = isinstance(error, UserError) and "--debug" not in sys.argv
        text = "" if bare else "".join(traceback.format_exception(error))
        if not _claimed(folder, line, error):
            time.sleep(GIVE_UP_SECONDS)  # another rank speaks and is about to end the job
        else:
            print(f"hpcfl: {line}\n{text}", end="", file=sys.stderr, flush=True)
            if folder is not None and os.access(folder / "run.h5", os.F_OK):
                note(folder, line)
    finally:
        if comm is not None:
            end_job(comm, 1)
    raise SystemExit(1)


def noted(folder: Path | None, error: BaseException) -> BaseException:
    """Write the status of a run of this process alone that has failed; return the error, or what is behind it."""
    keep_open(error)
    folder = None if isinstance(error, TakenOver) else folder
    explained = _explained(None, folder, error)
    if folder is not None and os.access(folder / "run.h5", os.F_OK):
        _claimed(folder, _line(explained), explained)
        note(folder, _line(explained))
    return explained


def _line(error: BaseException) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def note(folder: Path, reason: str) -> None:
    """Write down that the run has failed, if the disk takes it: a full one may still let a word be changed in place."""
    try:
        store.write_status(folder, "failed", reason)
    except OSError:
        with contextlib.suppress(OSError):
            store.overwrite_status(folder, "failed", reason)


def _explained(comm: Any, folder: Path | None, error: BaseException) -> BaseException:
    """The error, or in one line what the disk refuses, or which ranks are dead where that is why MPI failed."""
    if folder is not None and (disk_error := refused(folder, error)):
        return disk_error
    if "use_deterministic_algorithms" in str(error):
        what = " ".join(str(error).split()).partition(", but you set")[0]
        line = f"deterministic: expected false, since {what}; did you mean deterministic = false?"
        return RunError(line).with_traceback(error.__traceback__)
    if comm is None or not type(error).__module__.startswith("mpi4py"):
        told = blamed(error)
        if told is not error:
            told.__cause__ = error
        return told
    dead = comm.Get_failed().Translate_ranks(None, comm.Get_group())
    if not len(dead):
        return error
    names = ", ".join(f"rank {rank}" for rank in dead)
    return RunError(f"{names} {'are' if len(dead) > 1 else 'is'} lost; hpcfl resume goes on after the last checkpoint")


def refused(folder: Path, error: BaseException) -> RunError | None:
    """What to say where a file of the run, or all of its folder, is behind an error; None where it is not.

    HDF5 tells of the system's error and of the file in its text alone, and not always as an OSError.
    """
    numbers = {getattr(error, "errno", None), *map(int, re.findall(r"errno = (\d+)", str(error)))}
    number = next((number for number in DISK if number in numbers), None)
    named = re.search(r"filename = '([^']+)'", str(error))
    file = named[1] if named else str(getattr(error, "filename", None) or folder)
    if isinstance(error, OSError) and number is None:
        ours = error.filename is not None and Path(file).absolute().is_relative_to(folder.absolute())
        number = error.errno if ours or isinstance(error, store.WriteError) else None
    if number is None:
        return None
    why = os.strerror(number)
    if number in GONE:
        there = file if os.access(folder / "run.h5", os.F_OK) else folder
        text = f"'{there}' is gone: it was deleted, moved or unmounted under the run ({why}); what was written there "
        text += "may be lost; where the folder is still whole, hpcfl resume goes on after its last checkpoint"
        return RunError(text).with_traceback(error.__traceback__)
    path = re.sub(r"\.tmp-\d+-", "", file)
    saved = store.saved(folder)
    safe = f", and the state after {number_of(saved[-1])} of them" if saved else ""
    text = f"'{path}' cannot be written: {why}; all rounds reported are safe{safe}"
    return RunError(f"{text}: hpcfl resume {folder} goes on").with_traceback(error.__traceback__)


def _claimed(folder: Path | None, line: str, error: BaseException) -> bool:
    """True where this rank is the first to write down an error of the run, or nobody can.

    Where it came from is written too, unless it was foreseen.
    """
    if folder is None or not os.access(folder, os.F_OK):  # a file system that has gone refuses even that
        return True
    foreseen = isinstance(error, UserError) and error.__cause__ is None
    try:
        with (folder / ERROR_FILE).open("x") as file:
            file.write(line + "\n" + ("" if foreseen else "".join(traceback.format_exception(error))))
    except FileExistsError:
        return False
    except OSError:  # a full disk takes no file, but a lock, which is there until this process ends
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # else locks are not known there
            return not isinstance(error, BlockingIOError)
    return True
