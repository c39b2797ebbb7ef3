"""The run folder: all of it comes back whole, while a run grows, after a kill and after sealing."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import textwrap
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray

from helpers import faults
from helpers.checkpoints import save
from helpers.recorded import restated
from hpcfl import store
from hpcfl.base.errors import RunError, UsageError
from hpcfl.store import atomic
from hpcfl.store.growing_file import Segment

COLUMNS = [
    store.Column("sim_seconds", (), "f8", "simulated seconds since the start", "s"),
    store.Column("accuracy", ("client",), "f4", "test accuracy"),
    store.Column("depth", ("client", "layer"), "i2", "weight of a layer"),
    store.Column("visits", ("rank",), "i8", "visits computed", "1"),
]
DTYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "bool", "S5"]
MISSING = {"f": np.nan, "i": -1, "b": -1, "S": b""}
COORDS = {"client": [3, 5, 8], "layer": ["body.0.weight", "tête"], "rank": [0, 1]}

# Writes rows until it is killed, and says which ones are on file; the value of a row follows from its round.
WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from hpcfl import store

run_dir, first, rounds, every = Path(sys.argv[1]), *map(int, sys.argv[2:])
if not (run_dir / "run.h5").exists():
    store.create(run_dir, {"config": "{}"})
store.write_status(run_dir, "running")
columns = [store.Column("loss", ("client",), "f8", "loss"), store.Column("n", (), "i4", "count"),
           store.Column("last", (), "i4", "written last")]
segment = store.begin(run_dir, columns, {"client": list(range(50))}, first, rounds)
for r in range(first, rounds):
    segment.write(r, {"n": r, "loss": np.full(50, r / 2), "last": -r})
    print("row", r, flush=True)
    if (r + 1) % every == 0:
        personal = (([c], {"head": np.full((1, 2000), r)}) for c in range(5))
        new = store.draft(run_dir, r + 1, "1")
        store.write_server(new, store.Checkpoint(r + 1, {"w": np.full(3, r)}, clock={"seconds": r}), [0] * 5)
        store.write_rank(new, 0, personal)
        store.publish(new, [0], lambda scores: sorted(scores)[-2:])
        print("checkpoint", r + 1, flush=True)
"""


def new_run(tmp_path: Path, columns=COLUMNS, coords=COORDS, first=0, rounds=10):
    run_dir = tmp_path / "run"
    if not run_dir.exists():
        store.create(run_dir, {"config": '{"seed": 1}', "versions": "{}"})
    return run_dir, store.begin(run_dir, columns, coords, first, rounds)


def row(value):
    return {
        "sim_seconds": value / 2,
        "accuracy": np.full(3, value),
        "depth": np.arange(6).reshape(3, 2) + value,
        "visits": value,
    }


def run_python(code: str, *args, fault_at="") -> subprocess.Popen[str]:
    env = {**os.environ, faults.VARIABLE: fault_at, "PYTHONPATH": str(Path(store.__file__).parents[2])}
    command = [*faults.COMMAND, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def printed(process, word="row"):
    """What the process said before it died."""
    out, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL
    whole = [line for line in out.splitlines(keepends=True) if line.endswith("\n")]  # the last one may be cut
    return [int(line.split()[1]) for line in whole if line.startswith(word)]


def check_rows(dataset: xarray.Dataset, expected):
    """Every expected round is there, with the values that belong to it."""
    rounds = dataset["round"].values
    assert set(expected) <= set(rounds.tolist())
    assert dataset["n"].dtype == np.int32
    np.testing.assert_array_equal(rounds, np.arange(len(rounds)))
    np.testing.assert_array_equal(dataset["n"], rounds)
    np.testing.assert_array_equal(dataset["last"], -rounds)
    np.testing.assert_array_equal(dataset["loss"], np.repeat(rounds[:, None] / 2, 50, axis=1))


def check_all_readers(run_dir, expected):
    """open_run before sealing, and plain readers after it; nothing is damaged."""
    before = store.open_run(run_dir)
    check_rows(before, expected)
    assert store.verify(run_dir).damaged == {}
    store.seal(run_dir)
    assert store.verify(run_dir).damaged == {}
    with xarray.open_dataset(run_dir / "run.h5", engine="h5netcdf") as plain:
        check_rows(plain, expected)
        assert plain.sizes["round"] == before.sizes["round"]
    with h5py.File(run_dir / "run.h5") as file:
        assert set(expected) <= set(file["round"][:].tolist())


# ---- rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(), ("client", "layer")])
def test_every_dtype_comes_back(tmp_path, dtype, dims):
    column = store.Column("x", dims, dtype, "some quantity")
    run_dir, segment = new_run(tmp_path, [column])
    shape = (3, 2) if dims else ()
    values = np.random.default_rng(0).integers(0, 100, (4, *shape)).astype(dtype)
    for r in range(4):
        segment.write(r, {"x": values[r]})
    segment.write(4, {})
    stored = np.int8 if dtype == "bool" else np.dtype(dtype)
    missing = np.iinfo(stored).max if dtype.startswith("u") else MISSING[dtype[0]]
    for sealed in (False, True):
        if sealed:
            segment.close()
            store.seal(run_dir)
        found = store.open_run(run_dir)["x"]
        assert found.dtype == stored
        assert found.dims == ("round", *dims)
        np.testing.assert_array_equal(found[:4], values.astype(stored))
        np.testing.assert_array_equal(found[4], np.full(shape, missing, stored))
    with xarray.open_dataset(run_dir / "run.h5", engine="h5netcdf") as plain:
        np.testing.assert_array_equal(plain["x"][:4], values.astype(stored))


def test_axes_labels_and_attributes(tmp_path):
    run_dir, segment = new_run(tmp_path)
    for r in range(3):
        segment.write(r, row(r))
    segment.close()
    store.write_status(run_dir, "done", "all rounds")
    live = store.open_run(run_dir / "run.h5")
    store.seal(run_dir)
    with xarray.open_dataset(run_dir / "run.h5", engine="h5netcdf") as plain:
        xarray.testing.assert_identical(live.drop_attrs(), plain.drop_attrs().load())
        assert plain.attrs["config"] == '{"seed": 1}'
    assert live["layer"].values.tolist() == COORDS["layer"]
    assert live["accuracy"].sel(client=5, round=2) == 2
    assert live["accuracy"].assign_coords().swap_dims(round="sim_seconds").dims == ("sim_seconds", "client")
    assert live["sim_seconds"].attrs == {"long_name": "simulated seconds since the start", "units": "s"}
    assert live["visits"].dtype == np.int64
    assert (live.attrs["status"], live.attrs["reason"]) == ("done", "all rounds")


@pytest.mark.parametrize(
    ("round_", "bad", "error"),
    [
        (0, {"sims": 1.0}, KeyError),
        (10, {}, IndexError),
        (-1, {}, IndexError),
        (0, {"accuracy": np.zeros(4)}, ValueError),
        (0, {"visits": 0.5}, TypeError),
    ],
)
def test_a_bad_row_does_not_count(tmp_path, round_, bad, error):
    run_dir, segment = new_run(tmp_path)
    with pytest.raises(error):
        segment.write(round_, {"sim_seconds": 1.0, **bad})
    assert store.open_run(run_dir).sizes["round"] == 0
    segment.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda: store.Column("a/b", (), "f8", ""),
        lambda: store.Column("round", (), "f8", ""),
        lambda: store.Column("t", (), "f8", "", "seconds"),
        lambda: Segment(Path("x.h5"), [], {}, 5, 4),
    ],
)
def test_refused_columns(make):
    with pytest.raises(ValueError, match=r"column|segment"):
        make()


def test_a_column_needs_its_axes(tmp_path):
    with pytest.raises(ValueError, match="no coordinates for its axis 'layer'"):
        Segment(tmp_path / "segment-000.h5", COLUMNS, {"client": [1], "rank": [0]}, 0, 3)
    assert list(tmp_path.iterdir()) == []


def test_no_rows_at_all(tmp_path):
    run_dir, segment = new_run(tmp_path)
    segment.close()
    assert store.open_run(run_dir).sizes["round"] == 0
    store.seal(run_dir)
    assert store.open_run(run_dir).sizes == {"round": 0, "client": 3, "layer": 2, "rank": 2}
    with xarray.open_dataset(run_dir / "run.h5", engine="h5netcdf") as plain:
        assert plain.sizes["round"] == 0


def test_events(tmp_path):
    run_dir, segment = new_run(tmp_path)
    segment.event(0, "lost-rank-and-more", 8, "é" * 150)
    assert store.events(run_dir)[0]["text"] == "é" * 100
    segment.close()
    store.seal(run_dir)
    (event,) = store.events(run_dir)
    assert {**event, "time": 0} == {
        "segment": 0, "round": 0, "time": 0, "kind": "lost-rank-and-mo", "client": 8, "text": "é" * 100,
    }  # fmt: skip


def test_a_full_log_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("hpcfl.store.growing_file.EVENTS", 3)
    run_dir, recorder = new_run(tmp_path)
    for n in range(5):
        recorder.event(n, "late", n, "")
    assert [event["kind"] for event in store.events(run_dir)] == ["late", "late", "log-full"]


# ---- several segments


def test_a_later_segment_supersedes(tmp_path):
    run_dir, segment = new_run(tmp_path)
    for r in range(7):
        segment.write(r, row(r))
    segment.close()
    _, segment = new_run(tmp_path, first=4)
    assert store.open_run(run_dir).sizes["round"] == 7  # nothing recorded yet: nothing superseded
    for r in range(4, 6):
        segment.write(r, row(r + 100))
    expected = [0, 1, 2, 3, 104, 105]
    np.testing.assert_array_equal(store.open_run(run_dir)["visits"].isel(rank=0), expected)
    segment.close()
    store.seal(run_dir)
    for found in (store.open_run(run_dir), xarray.load_dataset(run_dir / "run.h5", engine="h5netcdf")):
        np.testing.assert_array_equal(found["visits"].isel(rank=0), expected)
        np.testing.assert_array_equal(found["round"], np.arange(6))


def test_resumed_from_an_older_checkpoint_than_before(tmp_path):
    for first, last in [(0, 6), (4, 6), (2, 3)]:
        run_dir, segment = new_run(tmp_path, first=first)
        for r in range(first, last):
            segment.write(r, row(r + 10 * first))
        segment.close()
    store.seal(run_dir)
    for found in (store.open_run(run_dir), xarray.load_dataset(run_dir / "run.h5", engine="h5netcdf")):
        np.testing.assert_array_equal(found["visits"].isel(rank=0), [0, 1, 22])


def test_another_number_of_ranks_and_other_columns(tmp_path):
    run_dir, segment = new_run(tmp_path)
    segment.write(0, row(0))
    segment.close()
    more = [*COLUMNS, store.Column("late", ("rank",), "f4", "late seconds")]
    _, segment = new_run(tmp_path, more, {**COORDS, "rank": [0, 1, 2]}, first=1)
    segment.write(1, {**row(1), "late": 0.5})
    live = store.open_run(run_dir)
    segment.close()
    store.seal(run_dir)
    for found in (live, xarray.load_dataset(run_dir / "run.h5", engine="h5netcdf")):
        np.testing.assert_array_equal(found["visits"], [[0, 0, -1], [1, 1, 1]])
        np.testing.assert_array_equal(found["late"], [[np.nan] * 3, [0.5] * 3])
        assert found["visits"].dtype == np.int64
        assert found["rank"].values.tolist() == [0, 1, 2]


def test_other_clients_are_refused(tmp_path):
    _, segment = new_run(tmp_path)
    segment.close()
    with pytest.raises(UsageError, match="other labels on axis 'client'"):
        new_run(tmp_path, coords={**COORDS, "client": [1, 2, 3]}, first=1)


def test_a_missing_segment_is_named(tmp_path):
    run_dir, segment = new_run(tmp_path)
    segment.close()
    (run_dir / "metrics" / "segment-000.h5").unlink()
    for read in (store.open_run, store.events, store.seal):
        with pytest.raises(RunError, match=r"lacks metrics/segment-000\.h5"):
            read(run_dir)


def test_no_run_folder(tmp_path):
    with pytest.raises(UsageError, match="is no run folder"):
        store.open_run(tmp_path)
    (tmp_path / "run.h5").write_text("something else")
    with pytest.raises(UsageError, match="cannot be read"):
        store.open_run(tmp_path)


def test_what_is_known_of_clients_stays_from_start_to_start(tmp_path):
    facts = [store.Fact("train_samples", np.array([30, 50, 80]), "training samples of the client")]
    run_dir = tmp_path / "run"
    store.create(run_dir, {"config": "{}"}, facts)
    assert store.open_run(run_dir)["train_samples"].sel(client=1) == 50
    for first in (0, 1):
        _, segment = new_run(tmp_path, COLUMNS, {**COORDS, "client": [0, 1, 2]}, first)
        segment.write(first, row(first))
        segment.close()
    found = store.open_run(run_dir)
    store.seal(run_dir)
    with xarray.open_dataset(run_dir / "run.h5", engine="h5netcdf") as plain:
        for data in (found, plain):
            assert data["train_samples"].dims == ("client",)
            assert data["train_samples"].dtype == np.int64
            assert data["train_samples"].values.tolist() == [30, 50, 80]
            assert data["train_samples"].attrs["long_name"] == "training samples of the client"
            assert data.sizes == {"round": 2, "client": 3, "layer": 2, "rank": 2}


def test_a_run_that_knows_nothing_of_clients_opens(tmp_path):
    run_dir, segment = new_run(tmp_path)
    segment.close()
    assert store.read_facts(run_dir) == []
    assert "train_samples" not in store.open_run(run_dir)


def test_a_run_is_not_overwritten(tmp_path):
    store.create(tmp_path / "run", {})
    with pytest.raises(UsageError, match="already holds a run"):
        store.create(tmp_path / "run", {})


def test_a_moved_folder_still_opens(tmp_path):
    run_dir, segment = new_run(tmp_path)
    segment.write(0, row(7))
    segment.close()
    store.seal(run_dir)
    moved = run_dir.rename(tmp_path / "elsewhere")
    assert store.open_run(moved)["visits"][0, 0] == 7
    with xarray.open_dataset(moved / "run.h5", engine="h5netcdf") as plain:
        assert plain["visits"][0, 0] == 7


def test_sealing_twice_changes_nothing(tmp_path):
    run_dir, segment = new_run(tmp_path)
    segment.write(0, row(0))
    segment.close()
    store.seal(run_dir)
    files = [run_dir / "run.h5", run_dir / "metrics" / "segment-000.h5"]
    before = [file.stat().st_ino for file in files]
    store.seal(run_dir)
    assert [file.stat().st_ino for file in files] == before


# ---- kills


def test_reading_while_another_process_writes(tmp_path):
    process = run_python(WRITER, tmp_path / "run", 0, 100_000, 1_000_000)
    for _ in range(30):
        said = int(process.stdout.readline().split()[1])
        check_rows(store.open_run(tmp_path / "run"), [said])
    with pytest.raises(UsageError, match="is still running as process"):
        store.seal(tmp_path / "run")
    process.kill()
    check_all_readers(tmp_path / "run", printed(process))


@pytest.mark.parametrize("seed", range(4))
def test_kill_at_random_moments_and_resume(tmp_path, seed):
    chance, first, run_dir = random.Random(seed), 0, tmp_path / "run"
    for _ in range(3):
        process = run_python(WRITER, run_dir, first, 100_000, 7)
        for _ in range(chance.randrange(2, 60)):
            process.stdout.readline()
        process.kill()
        said = process.communicate()[0].rpartition("\n")[0].splitlines()  # the kill may have cut the last line
        rows = [int(line.split()[1]) for line in said if line.startswith("row")]
        check_rows(store.open_run(run_dir), rows)
        newest = store.latest(run_dir)
        first = store.load(newest).round if newest else 0
    assert store.read_status(run_dir).state == "killed"
    check_all_readers(run_dir, rows)


@pytest.mark.parametrize(
    ("fault_at", "rows", "checkpoints"),
    [
        ("metrics:1", 0, []),
        ("metrics:17", 16, [5, 10, 15]),
        ("checkpoint:1", 5, []),
        ("checkpoint:3", 15, [5, 10]),
    ],
)
def test_kill_inside_a_write(tmp_path, fault_at, rows, checkpoints):
    process = run_python(WRITER, tmp_path / "run", 0, 50, 5, fault_at=fault_at)
    said = printed(process)
    assert said == list(range(rows))
    newest = store.latest(tmp_path / "run")
    assert [store.load(newest).round] == checkpoints[-1:] if newest else not checkpoints
    check_all_readers(tmp_path / "run", said)
    assert store.open_run(tmp_path / "run").sizes["round"] == rows


def test_kill_before_the_table_is_visible(tmp_path):
    run_dir = tmp_path / "run"
    printed(run_python(WRITER, run_dir, 0, 50, 5, fault_at="table:1"))
    with pytest.raises(UsageError, match="is no run folder"):
        store.open_run(run_dir)
    printed(run_python(WRITER, run_dir, 0, 50, 5, fault_at="table:2"))
    assert store.open_run(run_dir).sizes["round"] == 0
    said = printed(run_python(WRITER, run_dir, 0, 50, 5, fault_at="metrics:20"))
    printed(run_python(WRITER, run_dir, 15, 50, 5, fault_at="table:1"))
    check_rows(store.open_run(run_dir), said)
    said += printed(run_python(WRITER, run_dir, 15, 50, 5, fault_at="metrics:20"))
    assert [p for p in run_dir.rglob(f"{atomic.PREFIX}*") if "metrics" in str(p.parent)] == []
    check_all_readers(run_dir, said)


def test_kill_while_sealing(tmp_path):
    run_dir = tmp_path / "run"
    said = printed(run_python(WRITER, run_dir, 0, 50, 5, fault_at="metrics:20"))
    sealer = "import sys, pathlib; from hpcfl import store; store.seal(pathlib.Path(sys.argv[1]))"
    printed(run_python(sealer, run_dir, fault_at="table:1"))
    check_all_readers(run_dir, said)


@pytest.mark.parametrize("setting", ["metric:3", "metrics:0", "checkpoint-seconds:x", "checkpoint-seconds:inf"])
def test_a_wrong_fault_is_refused(setting):
    with pytest.raises(ValueError, match=r"HPCFL_FAULT: expected|could not convert"):
        faults.install(setting)


def test_a_failed_replacement_leaves_the_old_file(tmp_path):
    atomic.write_text(tmp_path / "a", "old")

    def fail():
        with atomic.replace(tmp_path / "a") as new:
            new.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


@pytest.mark.parametrize(("code", "borne"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)])
def test_a_folder_that_is_not_on_the_disk_is_told_of(tmp_path, monkeypatch, code, borne):
    fsync = os.fsync

    def refused(handle):
        if os.path.samestat(os.fstat(handle), tmp_path.stat()):
            raise OSError(code, os.strerror(code))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refused)
    with contextlib.nullcontext() if borne else pytest.raises(OSError, match=str(tmp_path)):
        atomic.write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"


# ---- checkpoints


def same(a, b):
    """Equal to the bit, NaN payloads included."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_a_checkpoint_comes_back_to_the_bit(tmp_path):
    rng = np.random.default_rng(1)
    dtypes = ("f2", "f4", ">f4", "f8", "i8", "u1")
    shared = {f"layer.{d}.weight": rng.integers(0, 255, 48, np.uint8).view(d) for d in dtypes}
    shared |= {"scalar": np.float32(0.1), "z": np.array(1j)}
    shared |= {"empty": np.zeros((0, 3)), "flag": np.array([True, False])}
    chunks = [
        (np.array([7, 2]), {"head.w": rng.random((2, 4, 3)), "head.b": np.zeros((2, 0), np.float32)}),
        (np.array([5]), {"head.w": rng.random((1, 4, 3)), "head.b": np.zeros((1, 0), np.float32)}),
        (np.array([1, 9]), {"head.w": rng.random((2, 6, 3)).astype("f4")}),
        (np.array([4]), {}),
    ]
    path = save(tmp_path, 12, shared, iter(chunks), {"seconds": 0.1, "inf": np.inf}, keep=1)
    found = store.load(path)
    assert (found.round, found.clock) == (12, {"seconds": 0.1, "inf": np.inf})
    assert found.shared.keys() == shared.keys()
    assert all(same(found.shared[name], np.asarray(value)) for name, value in shared.items())
    assert sorted(client for ids, _ in found.personal for client in ids) == [1, 2, 4, 5, 7, 9]
    some = store.load_personal(path, [9, 5, 2, 4, 1000])
    assert sorted(some) == [2, 4, 5, 9]
    for ids, tensors in chunks:
        for place, client in enumerate(ids):
            for name, values in tensors.items():
                assert client not in some or same(some[client][name], values[place])


def test_personal_state_of_a_checkpoint_that_may_be_damaged(tmp_path):
    path = save(tmp_path, 12, {"w": np.zeros(3)}, [([1, 2], {"v": np.ones((2, 9))})], {}, keep=1)
    assert sorted(store.load_personal(path, [2], check=True)) == [2]
    for name in ("rank-0000.h5", "server.h5"):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(RunError, match=f"checkpoint .*/round-000012/{name} is damaged: its bytes are not those"):
            store.load_personal(path, [2], check=True)
        (path / name).write_bytes(content)


def test_extras_come_back_with_their_types(tmp_path):
    extras = {"weights": np.arange(6.0).reshape(2, 3), "taken": 30.0, "least": np.inf, "phase": "descent", "": 0.0}
    with pytest.raises(ValueError, match="no tensor can be named"):
        save(tmp_path, 1, {}, [], {}, keep=1, extras=extras)
    del extras[""]
    found = store.load(save(tmp_path, 1, {"taken": np.ones(2)}, [], {}, keep=1, extras=extras))
    assert found.shared.keys() == {"taken"}
    assert same(found.extras.pop("weights"), extras.pop("weights"))
    assert {name: value if isinstance(value, str) else float(value) for name, value in found.extras.items()} == extras


@pytest.mark.parametrize("width", [2, 200_000])  # small ones are gathered, large ones are not
def test_chunks_are_taken_one_at_a_time(tmp_path, width):
    def chunks():
        buffer = np.empty((1, width))
        for client in range(5):
            buffer[:] = client
            yield [client], {"w": buffer, "b": np.zeros((1, 1 + client // 3))}

    personal = store.load(save(tmp_path, 1, {}, chunks(), {}, keep=1)).personal
    assert [ids.tolist() for ids, _ in personal] == [[0, 1, 2], [3, 4]]
    for ids, tensors in personal:
        np.testing.assert_array_equal(tensors["w"], np.repeat(ids[:, None], width, axis=1))


@pytest.mark.parametrize(
    ("shared", "personal", "match"),
    [
        ({"a/b": np.zeros(1)}, [], "no tensor can be named"),
        ({}, [([1], {}), ([1], {})], "given twice"),
        ({}, [([1, 2], {"w": np.zeros(3)})], "for 2 clients"),
    ],
)
def test_a_bad_checkpoint_does_not_appear(tmp_path, shared, personal, match):
    with pytest.raises(ValueError, match=match):
        save(tmp_path, 1, shared, personal, {}, keep=1)
    assert store.saved(tmp_path) == []


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_ones_are_kept(tmp_path, keep):
    due = [10, 20, 999_999, 1_000_000]
    for r in due:
        newest = save(tmp_path, r, {}, [], {}, keep=keep)
    assert store.latest(tmp_path) == newest
    rounds = sorted(int(path.stem.removeprefix("round-")) for path in (tmp_path / "checkpoints").iterdir())
    assert rounds == due[-keep:]


def test_an_unreadable_newest_checkpoint_is_passed_over(tmp_path, caplog):
    assert store.latest(tmp_path) is None
    good = save(tmp_path, 10, {"w": np.arange(3)}, [], {}, keep=1)
    bad = good.with_name("round-000020")
    shutil.copytree(good, bad)
    (bad / "server.h5").write_bytes((good / "server.h5").read_bytes()[:100])
    assert store.latest(tmp_path) == good
    assert "round-000020" in caplog.text
    with pytest.raises(RunError, match="cannot be read"):
        store.load(bad)
    assert save(tmp_path, 15, {}, [], {}, keep=1).exists()


def test_a_damaged_tensor_is_noticed(tmp_path):
    path = save(tmp_path, 1, {"w": np.arange(1000)}, [], {}, keep=1)
    content = bytearray((path / "server.h5").read_bytes())
    place = content.index(np.arange(500, 510).tobytes())
    content[place] ^= 1
    (path / "server.h5").write_bytes(content)
    with pytest.raises(RunError, match="cannot be read"):
        store.load(path)


# ---- status


def test_status_roundtrip(tmp_path):
    assert store.read_status(tmp_path).state == "unknown"
    store.write_status(tmp_path, "failed", "loss is nan:\nround 3")
    status = store.read_status(tmp_path)
    assert (status.state, status.reason, status.pid) == ("failed", "loss is nan: round 3", os.getpid())
    assert (tmp_path / "status").read_text().splitlines()[0] == "failed"
    store.write_status(tmp_path, "running")
    assert store.read_status(tmp_path).state == "running"
    with pytest.raises(ValueError, match="not 'killed'"):
        store.write_status(tmp_path, "killed")


def edited(tmp_path, key, value):
    rest = (tmp_path / "status").read_text().partition(f"{key}: ")[2].partition("\n")[0]
    restated(tmp_path, f"{key}: {rest}", f"{key}: {value}")


def test_a_dead_process_reads_as_killed(tmp_path):
    code = """
    import sys, pathlib
    from hpcfl import store
    store.write_status(pathlib.Path(sys.argv[1]), "running")
    """
    process = run_python(code, tmp_path)
    process.communicate()
    assert store.read_status(tmp_path).state == "killed"
    store.write_status(tmp_path, "running")
    edited(tmp_path, "started", "1")  # the number was given to another process since
    assert store.read_status(tmp_path).state == "killed"


def test_a_run_on_another_host_is_not_sealed_unless_forced(tmp_path):
    run_dir, segment = new_run(tmp_path)
    segment.write(0, row(0))
    segment.close()
    store.write_status(run_dir, "running")
    edited(run_dir, "host", "nowhere")
    assert store.read_status(run_dir).state == "running"
    with pytest.raises(UsageError, match="on nowhere, or was killed there"):
        store.seal(run_dir)
    store.seal(run_dir, force=True)
    assert store.open_run(run_dir).sizes["round"] == 1


def test_importing_the_store_is_light():
    code = "import sys, hpcfl.store; print(*{'torch', 'xarray', 'mpi4py', 'pandas'} & set(sys.modules))"
    out, _ = run_python(code).communicate()
    assert out.strip() == ""
