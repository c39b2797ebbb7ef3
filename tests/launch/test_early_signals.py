"""A signal in a run's first moments, while libraries are loaded, is a wish to stop like any other."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from helpers.launcher import descendants, mpis
from helpers.live import Live, live
from hpcfl import store
from hpcfl.launch.request import resume_request
from hpcfl.launch.run import launch
from hpcfl.testing.runs import table, toml

pytestmark = pytest.mark.launch

RANKS = 2
RANK_SETTINGS = b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK="


def loading(job: Live) -> int:
    """How many of a job's ranks have loaded NumPy's library: the first large one that a run needs.

    A rank that is just starting a program is two processes of Python for a moment.
    """
    found = set()
    for pid in descendants(job.process.pid):
        place = Path(f"/proc/{pid}")
        try:
            python = (place / "cmdline").read_bytes().split(b"\0")[0] == sys.executable.encode()
            if python and b"_multiarray_umath" in (place / "maps").read_bytes():
                settings = (place / "environ").read_bytes().split(b"\0")
                found.add(next((each for each in settings if each.startswith(RANK_SETTINGS)), b""))
        except OSError:  # it has ended
            continue
    return len(found)


@pytest.mark.parametrize("mpi", ["", *mpis()], ids=lambda name: name or "alone")
def test_a_signal_while_libraries_are_loaded_stops_a_run(mpi: str, tmp_path: Path) -> None:
    """Without a launcher the process is signalled, else the launcher, whose ranks exist by then."""
    folder, ranks = tmp_path / "run", RANKS if mpi else 1
    file = toml(table("salf", "mlp", True), tmp_path / "run.toml")
    with live(mpi, ranks, ["-m", "hpcfl", "run", str(file), "--out", str(folder)], tmp_path) as job:
        job.until(lambda: loading(job) == ranks)
        os.kill(job.process.pid, signal.SIGUSR1)
        assert job.wait() == 85, job.err
    status = store.read_status(folder)
    assert status.state == "stopped"
    assert status.reason.startswith("signal USR1")
    assert "Traceback" not in job.err
    launch(lambda: resume_request(folder, None, quiet=True), None)
    assert store.read_status(folder).state == "done"
