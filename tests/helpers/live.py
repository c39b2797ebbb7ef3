"""Jobs that a test looks at while they run."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from helpers.launcher import LIMIT, end, start, under


@dataclass(frozen=True)
class Live:
    """A job that was started, and what it has said so far."""

    process: subprocess.Popen[str]
    here: Path

    @property
    def out(self) -> str:
        return (self.here / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.here / "err").read_text(errors="replace")

    def until(self, seen: Callable[[], object]) -> None:
        """Wait until something is seen of a job that still runs."""
        end = time.monotonic() + LIMIT
        while not seen():
            assert self.process.poll() is None, f"over with {self.process.returncode}:\n{self.out}\n{self.err}"
            assert time.monotonic() < end, f"not seen:\n{self.out}\n{self.err}"
            time.sleep(0.002)

    def wait(self) -> int:
        return self.process.wait(timeout=LIMIT)


@contextmanager
def live(mpi: str, ranks: int, words: Sequence[str], here: Path) -> Iterator[Live]:
    """Start Python on ranks of the named MPI, or alone (""); nobody is left when the block ends."""
    command, settings = under(mpi, ranks, words)
    with (here / "out").open("w") as out, (here / "err").open("w") as err:
        process = start(command, settings, stdout=out, stderr=err)
    try:
        yield Live(process, here)
    finally:
        end(process)
        process.wait()
