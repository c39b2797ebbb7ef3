"""What a disk that takes no more does to a run, and a GPU that cannot repeat itself: one line, nothing lost."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from pathlib import Path

import pytest

from helpers.launcher import alone, job, mpis
from hpcfl import store
from hpcfl.base.errors import RunError
from hpcfl.launch import failure
from hpcfl.launch.failure import noted, refused
from hpcfl.testing.runs import table, toml

HELPERS = Path(__file__).parents[1] / "helpers"
HDF5 = (
    "Can't write data (file write failed: time = Sun Nov 22\n, filename = '{path}', file descriptor = 3, "
    "errno = {number}, error message = '…')"
)


@pytest.mark.launch
@pytest.mark.parametrize("mpi", ["", "openmpi", "mpich"])
def test_a_full_disk_ends_the_job(mpi: str, tmp_path: Path) -> None:
    if mpi and mpi not in mpis():
        pytest.skip(f"{mpi} is not installed")
    values = table("salf", "mlp", False, rounds=400, checkpoint={"every": 2, "keep": 2})
    values["algorithm"] = {"name": "helpers.strange.full:Full", "missing": "exact"}
    ulfm = mpi == "openmpi"  # where a job goes on without dead ranks, and a suspended one is two faults at once
    if ulfm:
        values |= {"clock": "wall", "threads": 1, "speed": {"model": "none"}}
        values["algorithm"]["missing"] = "none"
        values["participation"] = {"close": "deadline", "deadline": 0.3}
    folder = tmp_path / "out"
    command = [HELPERS / "driver.py", "run", toml(values, tmp_path / "my.toml"), "--out", folder]
    words = [str(word) for word in command]
    ended = job(mpi, 3, words, options=("--with-ft", "ulfm") if ulfm else ())
    assert ended.code == 1
    who = "rank 0 of 3: " if mpi else ""
    file = folder / "metrics" / "segment-000.h5"
    assert ended.said == [
        f"hpcfl: {who}'{file}' cannot be written: {os.strerror(errno.EFBIG)}; all rounds reported are safe, "
        f"and the state after 2 of them: hpcfl resume {folder} goes on"
    ]
    assert "Traceback" not in ended.err
    assert store.read_status(folder).state == "failed"
    data = store.open_run(folder)
    assert data["round"].values.tolist() == [0, 1, 2]
    assert not ulfm or data["cohort"].values[:, 0].tolist() == [1, 1, 0]


@pytest.mark.launch
@pytest.mark.parametrize("kilobytes", [30, 60, 90])
def test_wherever_the_disk_is_full_there_is_one_line(kilobytes: int, tmp_path: Path) -> None:
    """No file may be larger than so much: the table, the segment or a checkpoint fails, while written or closed."""
    file = toml(table("salf", "mlp", False, rounds=6, checkpoint={"every": 1}), tmp_path / "my.toml")
    limit = f"ulimit -f {2 * kilobytes}; exec"  # in blocks of 512 bytes
    words = [sys.executable, "-m", "hpcfl", "run", str(file), "--out", str(tmp_path / "out")]
    ended = alone(["sh", "-c", f"{limit} {shlex.join(words)}"])
    assert ended.code == 1
    assert ended.err.count("\n") == 1, ended.err
    assert "cannot be written: File too large; all rounds reported are safe" in ended.said[0]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_what_the_disk_refuses_is_told_in_one_line(number: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "segment-000.h5"
    text = HDF5.format(path=path.with_name(".tmp-123-segment-000.h5"), number=number)
    for error in (OSError(number, "no", str(path)), OSError(text), RuntimeError(text)):
        said = str(refused(tmp_path, error))
        assert said.startswith(f"'{path}' cannot be written: {os.strerror(number)}; all rounds reported are safe: ")
    assert refused(tmp_path, OSError(errno.ENOENT, "no")) is None
    assert refused(tmp_path, ArithmeticError("no luck")) is None


def test_an_operation_that_is_not_deterministic_is_told_in_one_line() -> None:
    text = "cumsum_cuda_kernel does not have a deterministic implementation, but you set "
    error = noted(None, RuntimeError(f"{text}'torch.use_deterministic_algorithms(True)'. You can turn it off"))
    why = "since cumsum_cuda_kernel does not have a deterministic implementation; did you mean deterministic = false?"
    assert (type(error), str(error)) == (RunError, f"deterministic: expected false, {why}")


def test_one_rank_speaks_where_the_disk_takes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "open", full)
    assert [failure._claimed(tmp_path, "a line", OSError()) for _ in range(3)] == [True, False, False]
