"""``hpcfl`` and ``python -m hpcfl``."""

from __future__ import annotations

import sys

from hpcfl.cli import main as command


def main() -> None:
    """Carry out the command line and leave with its exit code."""
    code = command()
    if code and "mpi4py.MPI" in sys.modules:
        # a planned non-zero exit must come after MPI_Finalize on every rank, or the launcher kills the others
        from mpi4py import MPI

        MPI.Finalize()
    sys.exit(code)


if __name__ == "__main__":
    main()
