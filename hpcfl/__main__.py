"""``hpcfl`` and ``python -m hpcfl``."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from hpcfl.base import terminal
from hpcfl.engine import stopping

NOTED = ("run", "resume")  # the commands that end in an orderly way when they are signalled; others are interrupted
FREED = "Can't decrement id ref count"


def main() -> None:
    """Carry out the command line and leave with its exit code."""
    if next((word for word in sys.argv[1:] if not word.startswith("-")), "") in NOTED:
        stopping.install()
    from hpcfl.commands.cli import carry_out  # only now: this takes a good part of a second

    hush()
    terminal.install()
    code = carry_out()
    if code and "mpi4py.MPI" in sys.modules:
        # a planned non-zero exit must come after MPI_Finalize on every rank, or the launcher kills the others
        from mpi4py import MPI

        if MPI.Is_initialized():  # not where the launch was refused before
            MPI.Finalize()
    stopping.disregard()
    if code == 1:  # not by way of Python's own end: HDF5 crashes there when it closes a file that it cannot write
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def hush() -> None:
    """Let HDF5's objects go in silence: where a file cannot be written, each says so once more when it is freed.

    The error itself is raised where the file was to be written or closed.
    """
    shown, unraised = sys.excepthook, sys.unraisablehook

    def show(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if FREED not in str(error):
            shown(kind, error, frames)

    def ignore(unraisable: sys.UnraisableHookArgs) -> None:
        if FREED not in str(unraisable.exc_value):
            unraised(unraisable)

    sys.excepthook, sys.unraisablehook = show, ignore


if __name__ == "__main__":
    main()
