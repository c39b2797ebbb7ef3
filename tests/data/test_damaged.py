"""Files are data: whatever they say of their sizes, types and numbers, a reader answers in one line and soon."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import sklearn.datasets  # noqa: F401  modules, too, take memory when they are first asked for
from test_sources import idx_bytes, refused, sound, store

from hpcfl.data import femnist, mnist, sent140, usps
from hpcfl.data.cifar import Cifar100
from hpcfl.data.formats import files, hdf5_file
from hpcfl.data.hdf5 import Hdf5
from hpcfl.data.partition import read_split
from hpcfl.data.sent140 import Sent140
from hpcfl.learning.initial_values import InitialFile
from hpcfl.schedule.speeds.table import Table

MINE = Hdf5(file="mine.h5")
GROUP = "clients/a10/train"
VAST = 2**40


@pytest.mark.launch
def test_damaged_files_are_refused_or_read() -> None:
    """Some of the trials of `damage`, in a process of their own, which a library could end."""
    script = Path(__file__).with_name("damage.py")
    ended = subprocess.run([sys.executable, script, "--trials", "98"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    kinds = json.loads(ended.stdout)["kinds"]
    assert len(kinds) == 14
    assert all(sum(outcomes.values()) == 7 for outcomes in kinds.values())


# --- what is no file

READERS: dict[str, Callable[[Path], Any]] = {
    "idx": lambda path: mnist.read_idx(path, 1),
    "leaf": lambda path: femnist.read_leaf(path.parent),
    "libsvm": lambda path: files.check_labels(str(path), usps.read_libsvm(path, 256)[1], 1, 10),
    "glove": lambda path: sent140.read_glove(path, {"good"}),
    "hdf5": hdf5_file.survey,
    "split": lambda path: read_split(path, 2, (20, 10)),
    "initial": lambda path: InitialFile(path, 2, "single"),
    "speeds.csv": lambda path: Table(file=str(path)).columns,
    "speeds.h5": lambda path: Table(file=str(path)).columns,
}
PLACES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "folder": (Path.mkdir, "is a folder, expected"),
    "pipe": (os.mkfifo, "is a device or pipe, expected"),
    "dangling link": (lambda path: path.symlink_to("none"), "none: no such file, to which"),
    "link to itself": (lambda path: path.symlink_to(path.name), "truncated or damaged, expected"),
    "empty": (Path.touch, ""),
    "noise": (lambda path: path.write_bytes(np.random.default_rng(0).bytes(5000)), ""),
    "zeros": (lambda path: path.write_bytes(bytes(5000)), ""),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_of_the_kind_is_refused(reader: str, place: str, tmp_path: Path) -> None:
    make, said = PLACES[place]
    path = tmp_path / {"leaf": "users.json"}.get(reader, reader)
    make(path)
    line = refused(READERS[reader], path)
    assert str(tmp_path) in line
    assert said in line
    assert line.isprintable()


# --- sizes


@pytest.mark.parametrize("packed", [bytes, gzip.compress], ids=["plain", "gz"])
@pytest.mark.parametrize("count", [2**31, 2**32 - 1, 100_000_000])
def test_idx_sizes_beyond_the_file_take_no_memory(count: int, packed: Any, tmp_path: Path) -> None:
    head = bytes((0, 0, 8, 3)) + np.array([count, 28, 28], ">u4").tobytes()
    (tmp_path / "x").write_bytes(packed(head + bytes(100)))
    line = refused(lambda: peak(lambda: mnist.read_idx(tmp_path / "x", 3), 1 << 20))
    assert line.endswith(f"x: truncated, 116 bytes; its header says {16 + 784 * count}")


def test_packed_files_unpack_to_a_bounded_multiple(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SMALL", 50_000)
    (tmp_path / "x").write_bytes(gzip.compress(idx_bytes(np.zeros(100_000))))
    assert f"x unpacks to {files.PART} bytes from" in refused(mnist.read_idx, tmp_path / "x", 1)
    (tmp_path / "y").write_bytes(bz2.compress(b"1\n" * 1000))
    assert "y: as a table unpacks to 1024000 bytes from" in refused(usps.read_libsvm, tmp_path / "y", 256)
    (tmp_path / "y").write_bytes(bz2.compress(b"1" * 100_000))
    assert f"y unpacks to {files.PART} bytes from" in refused(usps.read_libsvm, tmp_path / "y", 256)
    with h5py.File(tmp_path / "z", "w") as file:
        file.create_dataset("x", data=np.zeros(100_000, np.uint8), chunks=(100_000,), compression="gzip")
    assert "z: x unpacks to 100000 bytes from" in refused(opened, tmp_path / "z", "x")


def opened(path: Path, name: str) -> Any:
    with hdf5_file.opened(path) as file:
        return hdf5_file.dataset(file, name)[()]


def vast(name: str, shape: tuple[int, ...], **how: Any) -> Callable[[h5py.File], None]:
    """A data set of a shape that was never written."""

    def change(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, shape, **{"dtype": "f4", **how})

    return change


def typed(name: str, values: Any, dtype: Any = None) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, data=values, dtype=dtype)

    return change


def clock(file: h5py.File) -> None:
    """A type that NumPy lacks."""
    del file[f"{GROUP}/labels"]
    space = h5py.h5s.create_simple((4,))
    h5py.h5d.create(file[GROUP].id, b"labels", h5py.h5t.UNIX_D32LE, space)


def maps(file: h5py.File) -> None:
    """Virtual data sets, each of two halves that are the one before."""
    file["level0"] = np.zeros((1, 5))
    for level in range(1, 30):
        layout = h5py.VirtualLayout((2, 5), "f8")
        for row in range(2):
            layout[row : row + 1] = h5py.VirtualSource(".", f"level{level - 1}", (min(level, 2), 5))[:1]
        file.create_virtual_dataset(f"level{level}", layout)
    file.move(f"{GROUP}/features", "moved")
    layout = h5py.VirtualLayout((4, 5), "f8")
    for row in range(4):
        layout[row : row + 1] = h5py.VirtualSource(".", "level29", (2, 5))[:1]
    file.create_virtual_dataset(f"{GROUP}/features", layout)


X, Y = f"{GROUP}/features", f"{GROUP}/labels"
HOSTILE: dict[str, tuple[Callable[[h5py.File], None], str]] = {
    "vast rows": (vast(X, (VAST, 5)), f"{X} unpacks to {20 * VAST} bytes from 0, expected at most"),
    "2^33 features": (vast(X, (4, 2**33)), f"{X} unpacks to {2**37} bytes"),
    "a product that wraps": (vast(X, (2**32, 2**29), chunks=(4, 4)), f"{X} unpacks to {2**63} bytes"),
    "vast labels": (vast(Y, (VAST,), dtype="i8"), f"{Y} unpacks to {8 * VAST} bytes"),
    "vast chunks": (vast(X, (4, 5), chunks=(2**10, 2**20), maxshape=(None, None)), f"{X}: a chunk unpacks to {2**32}"),
    "no rows of 2^62": (vast(X, (0, 2**62), chunks=(1, 1), maxshape=(None, None)), X.removesuffix("/features")),
    "compound": (
        typed(X, np.zeros(4, [("x", "f4"), ("y", "f4")])),
        f"{X} are [('x', '<f4'), ('y', '<f4')], expected num",
    ),
    "vlen": (vast(X, (4,), dtype=h5py.vlen_dtype("f4")), f"{X} are object, expected numbers"),
    "text": (typed(X, ["a"] * 4, h5py.string_dtype()), f"{X} are object, expected numbers"),
    "references": (vast(Y, (4,), dtype=h5py.ref_dtype), f"{Y} are object, expected integers"),
    "complex": (typed(X, np.zeros((4, 5), "c8")), f"{X} are complex64, expected numbers"),
    "truths": (typed(Y, np.zeros(4, bool)), f"{Y} are bool, expected integers or real targets"),
    "seconds since 1970": (clock, "mine.h5: truncated or damaged, expected an HDF5 file"),
    "label 10^9": (typed(Y, [0, 10**9, 0, 0]), f"{Y} hold 1000000000 among 18 samples, expected labels below 262144"),
    "label 2^62": (typed(Y, [0, 2**62, 0, 0]), f"{Y} hold {2**62}, expected labels from 0 to 2147483647"),
    "label 2^64 - 1": (
        typed(Y, np.array([0, 2**64 - 1, 0, 0], "u8")),
        f"{Y} hold {2**64 - 1}, expected labels from 0 to",
    ),
    "maps of maps": (maps, "is virtual, as are 3 that lead to it"),
    "a name of digits": (lambda file: file.move("clients/a10", f"clients/{'9' * 5000}"), "expected ids of at most 255"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hdf5_sizes_and_types_are_judged_before_anything_is_read(case: str, tmp_path: Path) -> None:
    change, said = HOSTILE[case]
    store(tmp_path, sound())
    with h5py.File(tmp_path / "mine.h5", "r+") as file:
        change(file)
    for call in (lambda: MINE.check(3, tmp_path), lambda: MINE.federate(3, 0, tmp_path)):
        line = refused(peak, call, 32 << 20)
        assert said in line
        assert "mine.h5" in line


def test_half_precision_and_stated_classes_are_taken(tmp_path: Path) -> None:
    store(tmp_path, sound())
    with h5py.File(tmp_path / "mine.h5", "r+") as file:
        typed(X, np.full((4, 5), 0.5, "f2"))(file)
        typed(Y, [0, 10**6, 0, 0])(file)
    assert "mine.h5: clients/a10/train/labels hold 1000000" in refused(MINE.check, 3, tmp_path)
    stated = Hdf5(file="mine.h5", labels=2_000_000)
    assert stated.check(3, tmp_path).classes == 2_000_000
    assert stated.federate(3, 0, tmp_path).client(2).train_features[0, 0] == 0.5


@pytest.mark.parametrize("chunks", [None, (1, 2), (2, 5), (4, 5)])
def test_samples_are_counted_through_all_chunks(chunks: tuple[int, int] | None, tmp_path: Path) -> None:
    numbers = np.arange(20.0).reshape(4, 5)
    names = [f"clients/a/{part}/{kind}" for part in ("train", "test") for kind in ("features", "labels")]
    with h5py.File(tmp_path / "mine.h5", "w") as file:
        for name in names:
            file.create_dataset(name, data=numbers, chunks=chunks)
    train, labels, *_ = vars(MINE.federate(1, 0, tmp_path).client(0)).values()
    np.testing.assert_array_equal(train, numbers.astype("f4"))
    np.testing.assert_array_equal(labels, numbers.astype("f4"))
    for name, said in zip(names, ("holds nan, expected finite", "holds nan, expected finite")):
        with h5py.File(tmp_path / "mine.h5", "r+") as file:
            file[name][3, 1] = np.nan
        assert f"{name}: sample 3 {said}" in refused(MINE.check, 1, tmp_path)
        with h5py.File(tmp_path / "mine.h5", "r+") as file:
            file[name][3, 1] = 0.0


def test_tokens_beyond_any_table_are_refused(tmp_path: Path) -> None:
    rows = {name: v.astype("u8") for name, v in sound().items()}
    rows[X][3, 1] = 2**63 + 5
    store(tmp_path, rows)
    said = f"{X}: sample 3 holds {2**63 - 1}, expected integers from 0 to 2147483647 as data.tokens = true"
    assert said in refused(Hdf5(file="mine.h5", tokens=True).check, 3, tmp_path)


# --- text


def users(x: str, y: str = "[3]") -> bytes:
    return f'{{"users": ["f"], "num_samples": [1], "user_data": {{"f": {{"x": {x}, "y": {y}}}}}}}'.encode()


ROW = f"[[{'0, ' * 783}0]]"
TEXTS: dict[str, tuple[str, bytes, str]] = {
    "deep lists": ("leaf", users("[" * 100_000), "truncated or damaged, expected JSON (maximum recursion depth"),
    "deep objects": ("leaf", b'{"users":' * 100_000, "truncated or damaged, expected JSON (maximum recursion depth"),
    "digits": ("leaf", users(ROW, f"[{'9' * 5000}]"), "truncated or damaged, expected JSON (Exceeds the limit"),
    "many labels": ("leaf", users(ROW, f"[{'1,' * 2**21}1]"), "user 'f': 1 samples in 'x', 2097153 labels in 'y', but"),
    "many errors": ("leaf", users(f"[{'7,' * 2**20}7]"), "user 'f': x: 0: Input should be a valid list, got 7"),
    "many users": ("leaf", b'{"users": [%b7]}' % (b"7," * 2**20), "users: 0: Input should be a valid string, got 7"),
    "a row of errors": (
        "leaf",
        users(f"[[{'7,' * 783}7]]"),
        "user 'f': x: 0: 0: Input should be less than or equal to",
    ),
    "a comma more": ("leaf", users(ROW, "[3,]"), "truncated or damaged, expected JSON"),
    "two texts": ("leaf", users(ROW) * 2, "truncated or damaged, expected JSON (Extra data"),
    "a long name": ("leaf", users(ROW).replace(b'"f"', b'"%b"' % (b"f" * 5000)).replace(b"[3]", b"3"), "user 'ffff"),
    "index 2^33": ("libsvm", b"1 8589934592:0.5\n", "(value too large to convert to int)"),
    "index 257": ("libsvm", b"1 1:0 257:0.5\n", "(n_features was set to 256, but input file contains 257"),
    "index 0": ("libsvm", b"1 0:0.5\n", "(Invalid index 0 in SVMlight/LibSVM data file.)"),
    "label 2^62": (
        "libsvm",
        b"4611686018427387904 1:0\n",
        "sample 0 holds 4.611686018427388e+18, expected a label of 1 to 10",
    ),
    "a label without end": ("libsvm", b"1" * 2**20, "sample 0 holds inf, expected a label of 1 to 10"),
    "a word without end": ("glove", b"good " + b"0" * 2**20 + b"\n", "line 1 has 1048576 characters or more"),
    "no UTF-8": ("glove", b"good 1.0\n\xff\xfe 2\n", "truncated or damaged, expected text in UTF-8"),
    "a number of 5000": ("speeds.csv", b"client,seconds\n0,%b\n" % (b"9" * 5000), "line 2: seconds is inf, expected"),
    "a word of 5000": (
        "speeds.csv",
        b"client,seconds\n0,%b\n" % (b"x" * 5000),
        "line 2: expected numbers for client,seconds, got '0,xxxxx",
    ),
    "a column of 5000": ("speeds.csv", b"client,%b\n0,1\n" % (b"x" * 5000), "round,client,depth, got client,xxxxx"),
    "a client beyond": ("speeds.csv", b"client,seconds\n9223372036854775807,1\n", "client is 9.22337e+18, expected"),
    "a line in between": ("speeds.csv", b"client,seconds\n0,1\n\n1,1\n", "line 3 is empty, expected a row in each"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_text_is_judged_before_it_is_kept(case: str, tmp_path: Path) -> None:
    reader, content, said = TEXTS[case]
    path = tmp_path / {"leaf": "users.json"}.get(reader, reader)
    path.write_bytes(bz2.compress(content) if reader == "libsvm" else content)
    line = refused(peak, lambda: READERS[reader](path), 64 << 20)
    assert said in line
    assert line.isprintable()
    assert len(line) <= 1000


# --- memory: so many times the file, unpacked, or what is made of it, whichever is larger

RNG = np.random.default_rng(0)


def of_images(folder: Path, packed: Callable[[bytes], bytes]) -> int:
    (folder / "x").write_bytes(packed(idx_bytes(RNG.integers(0, 256, (2000, 28, 28)))))
    return 2000 * 28 * 28


def of_records(folder: Path) -> int:
    (folder / "cifar-100-binary").mkdir()
    records = RNG.integers(0, 100, (500, 3074)).astype(np.uint8).tobytes()
    return sum((folder / f"cifar-100-binary/{name}.bin").write_bytes(records) for name in ("train", "test"))


def of_users(folder: Path) -> int:
    names = [f"f{number}" for number in range(10)]
    data = {name: {"x": RNG.random((10, 784)).round(2).tolist(), "y": [3] * 10} for name in names}
    content = json.dumps({"users": names, "num_samples": [10] * 10, "user_data": data})
    return (folder / "x.json").write_text(content)


def of_lines(folder: Path) -> int:
    rows = ["".join(f" {i}:{v:.5f}" for i, v in enumerate(row, start=1)) for row in RNG.random((100, 256))]
    content = "".join(f"1{row}\n" for row in rows).encode()
    (folder / "x").write_bytes(bz2.compress(content))
    return len(content)


def of_vectors(folder: Path) -> int:
    words = [f"w{number} {' '.join(f'{v:.4f}' for v in RNG.random(100))}\n" for number in range(500)]
    return (folder / "x").write_text("".join(words))


def of_speeds(folder: Path) -> int:
    rows = [f"{number // 100},{number % 100},{RNG.random() + 0.1:.6f}\n" for number in range(10_000)]
    (folder / "x.csv").write_text("".join(["round,client,seconds\n", *rows]))
    return 3 * 8 * len(rows)


def of_clients(folder: Path) -> int:
    store(folder, {name: value.astype("f4") for name, value in sound({"a": 40_000}).items()})
    return (folder / "mine.h5").stat().st_size


def of_tweets(folder: Path) -> int:
    (folder / "sent140").mkdir()
    row = '"4","{}","Mon Apr 06 22:19:45 PDT 2009","NO_QUERY","user{}","' + "day " * 20 + '{}"\n'
    rows = [row.format(number, number // 20, number) for number in range(1000)]
    (folder / "sent140" / Sent140().glove).write_text("day 1.0\n")
    return (folder / "sent140" / Sent140().file).write_text("".join(rows))


MEMORY: dict[str, tuple[Callable[[Path], int], Callable[[Path], Any]]] = {
    "idx": (lambda folder: of_images(folder, bytes), lambda folder: mnist.read_idx(folder / "x", 3)),
    "idx.gz": (lambda folder: of_images(folder, gzip.compress), lambda folder: mnist.read_idx(folder / "x", 3)),
    "cifar": (of_records, lambda folder: Cifar100().load(0, folder)),
    "leaf": (of_users, lambda folder: femnist.read_leaf(folder)),
    "libsvm": (of_lines, lambda folder: usps.read_libsvm(folder / "x", 256)),
    "glove": (of_vectors, lambda folder: sent140.read_glove(folder / "x", {f"w{number}" for number in range(500)})),
    "speeds": (of_speeds, lambda folder: Table(file=str(folder / "x.csv")).columns),
    "hdf5": (of_clients, lambda folder: MINE.federate(1, 0, folder).client(0)),
    "sent140": (of_tweets, lambda folder: Sent140().check(50, folder)),
}


TIMES = {"leaf": 8, "libsvm": 4}
"""What libraries make of a file first takes more than twice of it."""


@pytest.mark.parametrize("kind", MEMORY)
def test_readers_take_a_few_times_the_file(kind: str, tmp_path: Path) -> None:
    make, read = MEMORY[kind]
    size = make(tmp_path)
    read(tmp_path)  # modules, too, take memory when they are first asked for
    peak(lambda: read(tmp_path), TIMES.get(kind, 2) * size)


def of_rows(features: Any, **how: Any) -> Callable[[Path, int], int]:
    """Write a client with so many thousand numbers; return the bytes that they become."""

    def write(folder: Path, thousands: int) -> int:
        folder.mkdir()
        rows = features(thousands)
        labels = np.zeros(len(rows), np.int64)
        with h5py.File(folder / "mine.h5", "w") as file:
            file.create_dataset("clients/a/train/features", data=rows, **how)
            file["clients/a/train/labels"] = labels
            file["clients/a/test/features"], file["clients/a/test/labels"] = rows[:1], labels[:1]
        return (8 if rows.dtype.kind == "i" else 4) * rows.size + labels.nbytes

    return write


PACKED: Any = {"chunks": (2500, 100), "compression": "gzip", "compression_opts": 1}
GROWTH: dict[str, tuple[Callable[[Path, int], int], int]] = {
    "contiguous": (of_rows(lambda thousands: RNG.random((thousands * 10, 100))), 16),
    "tokens": (of_rows(lambda thousands: RNG.integers(0, 100, (thousands * 10, 100))), 16),
    "chunks": (of_rows(lambda thousands: RNG.random((thousands * 10, 100)), **PACKED), 32),
    "labels": (of_rows(lambda thousands: RNG.random((thousands * 1000, 1))), 32),
}
MEASURE = """
import re, sys
from pathlib import Path

from hpcfl.data.hdf5 import Hdf5

def most():  # getrusage would begin with that of the process that started this one
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

for name in ("small", "large"):
    before = most()
    Hdf5(file="mine.h5", tokens=sys.argv[2] == "tokens").federate(1, 0, Path(sys.argv[1]) / name).client(0)
print(most() - before)
"""


@pytest.mark.launch
@pytest.mark.parametrize("kind", GROWTH)
def test_hdf5_data_take_a_piece_more_than_what_is_made_of_them(kind: str, tmp_path: Path) -> None:
    """By the memory of a process, for HDF5 has buffers of its own."""
    make, beside = GROWTH[kind]
    make(tmp_path / "small", 250)
    made = make(tmp_path / "large", 6000)
    ended = subprocess.run([sys.executable, "-c", MEASURE, tmp_path, kind], capture_output=True, text=True, check=True)
    assert 0 < int(ended.stdout) << 10 <= made + (beside << 20)


def peak(call: Callable[[], Any], most: float) -> Any:
    """Return what a call gives, or raise what it raises; it takes at most so many bytes meanwhile."""
    tracemalloc.start()
    try:
        return call()
    finally:
        taken = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert taken <= most, f"{taken} bytes, expected at most {most}"
