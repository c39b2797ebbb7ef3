"""Ending the whole job after an error in the middle of it: told once, written down, no rank left."""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path
from typing import Any

from hpcfl import store
from hpcfl.errors import RunError, Told

GIVE_UP_SECONDS = 30.0  # how long a failed rank waits for the one that speaks to end the job


def fail(comm: Any, folder: Path | None, error: BaseException) -> None:
    """Tell of the error, write the status, end all ranks; a foreseen error is one line, another has its traceback."""
    error = _explained(comm, error)
    who = "" if comm is None else f"rank {comm.Get_rank()} of {comm.Get_size()}: "
    line = f"{who}{error}" if isinstance(error, Told) else f"{who}{type(error).__name__}: {error}"
    text = "" if isinstance(error, Told) else "".join(traceback.format_exception(error))
    if not claimed(folder, f"{line}\n{text}"):
        time.sleep(GIVE_UP_SECONDS)  # another rank speaks and is about to end the job
    else:
        print(f"hpcfl: {line}\n{text}", end="", file=sys.stderr, flush=True)
        if folder is not None and (folder / "run.h5").exists():
            store.write_status(folder, "failed", line)
    if comm is not None:
        comm.Abort(1)
    raise SystemExit(1)


def _explained(comm: Any, error: BaseException) -> BaseException:
    """Return the error, or which ranks are dead where that is why MPI failed."""
    if comm is None or not type(error).__module__.startswith("mpi4py"):
        return error
    dead = comm.Get_failed().Translate_ranks(None, comm.Get_group())
    if not len(dead):
        return error
    names = ", ".join(f"rank {rank}" for rank in dead)
    return RunError(f"{names} {'are' if len(dead) > 1 else 'is'} lost; hpcfl resume goes on after the last checkpoint")


def claimed(folder: Path | None, text: str) -> bool:
    """Return whether this rank is the first to write down an error of the run, if there is a run yet."""
    if folder is None or not folder.is_dir():
        return True
    try:
        with (folder / "error.txt").open("x") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True


def forget(folder: Path) -> None:
    """Remove an earlier start's error: whoever writes one now is the first to fail."""
    (folder / "error.txt").unlink(missing_ok=True)
