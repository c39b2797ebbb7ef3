"""A row of a growing segment is one record: whole or not there, read alike before and after it is sealed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray

from hpcfl import store
from hpcfl.base.errors import UsageError
from hpcfl.store import Column, reading
from hpcfl.store.columns import row_type
from hpcfl.store.growing_file import Segment, checked

COLUMNS = [
    Column("sim_seconds", (), "f8", "simulated seconds since the start", "s"),
    Column("depth", ("client", "layer"), "i2", "first layer that counted"),
    Column("arrived", ("client",), "bool", "something counted"),
    Column("visits", ("rank",), "i8", "visits computed"),
]
COORDS = {"client": [3, 5, 8], "layer": ["a", "b"], "rank": [0]}


def begun(folder: Path, first: int = 0, rounds: int = 300, coords: Any = COORDS) -> Segment:
    if not folder.exists():
        store.create(folder, {"config": "{}"})
    return store.begin(folder, COLUMNS, coords, first, rounds)


def row(number: int) -> dict[str, Any]:
    return {"sim_seconds": number / 2, "depth": np.arange(6).reshape(3, 2) + number, "arrived": 1, "visits": [-number]}


def plain(folder: Path) -> xarray.Dataset:
    return xarray.load_dataset(folder / "run.h5", engine="h5netcdf")


def check(data: xarray.Dataset, rounds: int) -> None:
    """The first so many rounds are there, with the values of `row`."""
    assert data["round"].values.tolist() == list(range(rounds))
    assert data["sim_seconds"].values.tolist() == [number / 2 for number in range(rounds)]
    expected = np.arange(6).reshape(3, 2) + np.arange(rounds)[:, None, None]
    np.testing.assert_array_equal(data["depth"], expected)
    assert (data["depth"].dtype, data["arrived"].dtype) == (np.int16, np.int8)
    assert (data["arrived"] == 1).all()
    assert data["visits"].values.tolist() == [[-number] for number in range(rounds)]


def test_the_bytes_of_a_row() -> None:
    found = row_type(COLUMNS, COORDS)
    assert found.itemsize == 8 + 6 * 2 + 3 + 8
    whole = checked(found)
    assert whole.fields is not None
    assert whole.fields["values"][0].names == ("sim_seconds", "depth", "arrived", "visits")
    assert [whole.fields[name][1] for name in ("begun", "values", "check")] == [0, 8, 40]
    assert whole.itemsize == 48  # the check are the last 8 bytes, within one page


def test_a_row_that_is_cut_anywhere_is_not_there(tmp_path: Path, monkeypatch: Any) -> None:
    """A kill cuts a write between two pages, which is between two records of 8 bytes."""
    segment, record = begun(tmp_path / "run"), Segment._record
    for cut in range(0, 49, 8):

        def part(self: Segment, area: Any, place: int, row: Any, cut: int = cut) -> None:
            row.view("u1")[cut:] = 0
            record(self, area, place, row)

        monkeypatch.setattr(Segment, "_record", part)
        segment.write(0, row(0))
        found = reading.read_part(segment.path)
        assert (found.rounds.tolist(), found.lost.tolist()) == ([0] if cut == 48 else [], []), cut
        assert store.verify(tmp_path / "run").damaged == {}, cut
    segment.close()


def test_the_file_is_any_hdf5_readers_while_it_grows_and_after_a_kill(tmp_path: Path) -> None:
    segment = begun(tmp_path / "run", rounds=10**6)
    segment.write(0, row(0))
    with h5py.File(segment.path) as file:
        segment.write(1, row(1))
        assert file["rows"]["values"]["sim_seconds"][:3].tolist() == [0.0, 0.5, 0.0]
        assert file["rows"]["check"][:3].astype(bool).tolist() == [True, True, False]
        assert file["layer"].asstr()[:].tolist() == ["a", "b"]
    assert 512 * segment.path.stat().st_blocks < 1e5  # 40 MB of rounds to come are a hole
    segment.close()


def test_a_wrong_value_leaves_the_rows_as_they_were(tmp_path: Path) -> None:
    segment = begun(tmp_path / "run")
    segment.write(0, row(0))
    with pytest.raises(ValueError, match="broadcast"):
        segment.write(1, {**row(7), "visits": [1, 2]})
    segment.write(1, row(1))
    segment.write(2, {})
    data = store.open_run(tmp_path / "run")
    check(data.isel(round=slice(2)), 2)
    assert np.isnan(data["sim_seconds"][2])
    assert (data["depth"][2] == -1).all()
    segment.close()


def test_run_h5_has_the_rows_of_sealed_segments(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for first, last in ((0, 3), (2, 5)):
        segment = begun(folder, first)
        for number in range(first, last):
            segment.write(number, row(number))
        found = plain(folder)
        assert found["depth"].dims == ("round", "client", "layer")
        check(found, 0 if first == 0 else 3)
        check(store.open_run(folder), last)
        segment.close()
    store.seal(folder)
    check(plain(folder), 5)
    with h5py.File(folder / "metrics" / "segment-001.h5") as file:
        assert file["depth"][:].tolist() == [(np.arange(6).reshape(3, 2) + number).tolist() for number in (2, 3, 4)]
        assert "rows" not in file


def test_an_axis_without_labels(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    segment = begun(folder, coords={**COORDS, "layer": []})
    segment.write(0, {**row(0), "depth": np.zeros((3, 0), int)})
    segment.close()
    for sealed in (False, True):
        if sealed:
            store.seal(folder)
        found = store.open_run(folder)
        assert found["depth"].shape == (1, 3, 0)
        assert found["depth"].dtype == np.int16
        assert found["visits"].values.tolist() == [[0]]


def test_more_columns_than_hdf5_takes_are_refused_in_one_line(tmp_path: Path) -> None:
    many = [Column(f"column_{number}", ("client",), "f8", "") for number in range(2000)]
    with pytest.raises(UsageError, match=r"a row of 2000 columns, 48016 bytes, cannot be stored: .*too large"):
        Segment(tmp_path / "segment-000.h5", many, COORDS, 0, 3)
    assert list(tmp_path.iterdir()) == []


# ---- rows so wide that a kill often strikes inside one

WIDE = """
import sys
from pathlib import Path
import numpy as np
from hpcfl import store

folder, clients = Path(sys.argv[1]), int(sys.argv[2])
store.create(folder, {"config": "{}"})
columns = [store.Column(name, ("client",), "i8", "the round") for name in "ab"]
segment = store.begin(folder, columns, {"client": range(clients)}, 0, 100)
for number in range(100):
    segment.write(number, dict.fromkeys("ab", number))
    print("row", number, flush=True)
"""


@pytest.mark.parametrize("clients", [40_000, 200_000])  # in HDF5's cache of chunks, or too large for it
def test_wide_rows_are_whole_or_not_there(tmp_path: Path, clients: int) -> None:
    chance = random.Random(clients)
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        words = [sys.executable, "-c", WIDE, str(folder), str(clients)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(chance.randrange(2, 10)):
                process.stdout.readline()
            time.sleep(chance.random() * 0.01)
            process.kill()
            said = process.stdout.read().splitlines()
            assert process.wait() in (0, -signal.SIGKILL)
        for sealed in (False, True):
            if sealed:
                store.seal(folder)
            data = store.open_run(folder)
            count = data.sizes["round"]
            assert data["round"].values.tolist() == list(range(count))
            assert count > int(said[-1].split()[1]) if said else count >= 2
            for name in "ab":
                np.testing.assert_array_equal(data[name], np.arange(count)[:, None] * np.ones(clients, int))
