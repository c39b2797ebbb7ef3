"""Small sound files of every format, damaged at random and read: what comes of it is one line, or what a file can say.

    python tests/data/damage.py --trials 1000 [--seed 0] [--kind hdf5] [--verbose]

A trial damages one file: bits flip, a run of bytes is lost, overwritten or doubled, or the file ends early. The reader
must then refuse it in one printable line that names a file, or return what has the shapes, types and ranges that the
reader promises. Formats without checksums (IDX, CIFAR's records, text, most of HDF5) cannot tell a flipped pixel, and
nothing here asks them to. Anything else ends the trials with the number of the one that failed: another exception, a
result of a wrong shape or type, `SECONDS` of computing without an answer, `MEMORY` bytes taken, a death of the process.
"""

from __future__ import annotations

import argparse
import bz2
import csv
import faulthandler
import gzip
import io
import json
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from hpcfl import config
from hpcfl.base.errors import UserError
from hpcfl.data import partition
from hpcfl.data.cifar import Cifar100
from hpcfl.data.femnist import Femnist
from hpcfl.data.hdf5 import Hdf5
from hpcfl.data.mnist import Mnist
from hpcfl.data.partition import Split
from hpcfl.data.sent140 import Sent140
from hpcfl.data.usps import Usps
from hpcfl.learning.initial_values import InitialFile
from hpcfl.schedule.speeds.table import Table

SECONDS, MEMORY = 20, 400 << 20
RNG = np.random.default_rng(0)
TOML = """# a run
rounds = 3
clients = 4
[algorithm]
name = "fedavg"
lr = 0.1
[participation]
close = "first"
first = 2
[speed]
model = "exponential"
[data]
name = "digits"
partition = "shards"
classes = 2
[model]
name = "mlp"
hidden = [8]
"""


class Kind(NamedTuple):
    """A kind of files: what writes them into a folder, and what reads them and looks at what has come of it."""

    write: Callable[[Path], object]
    read: Callable[[Path], object]


# --- what is written


def idx_bytes(values: Any) -> bytes:
    return bytes((0, 0, 8, values.ndim)) + np.array(values.shape, ">u4").tobytes() + values.astype(np.uint8).tobytes()


def mnist(folder: Path, packed: Callable[[bytes], bytes]) -> None:
    for part, n in (("train", 6), ("t10k", 3)):
        write(folder / f"mnist/{part}-images-idx3-ubyte", packed(idx_bytes(RNG.integers(0, 256, (n, 28, 28)))))
        write(folder / f"mnist/{part}-labels-idx1-ubyte", packed(idx_bytes(np.arange(n))))


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def cifar_records(folder: Path) -> None:
    for part in ("train", "test"):
        records = RNG.integers(0, 100, (3, 3074)).astype(np.uint8)
        write(folder / f"cifar-100-binary/{part}.bin", records.tobytes())


def femnist(folder: Path) -> None:
    for part in ("train", "test"):
        users = {name: {"x": RNG.random((2, 784)).round(2).tolist(), "y": [3, 61]} for name in ("f1", "f2")}
        content = {"users": ["f1", "f2"], "num_samples": [2, 2], "user_data": users, "hierarchies": [{"a": ["b"]}]}
        write(folder / f"femnist/{part}/all_data_0.json", json.dumps(content).encode())


def libsvm(folder: Path) -> None:
    for name in ("usps.bz2", "usps.t.bz2"):
        rows = RNG.uniform(-1, 1, (4, 256)).round(3)
        lines = [f"{n + 1} " + " ".join(f"{i + 1}:{v}" for i, v in enumerate(row)) for n, row in enumerate(rows)]
        write(folder / f"usps/{name}", bz2.compress("\n".join([*lines, ""]).encode()))


def usps(folder: Path) -> None:
    (folder / "usps").mkdir()
    with h5py.File(folder / "usps/usps.h5", "w") as file:
        for part in ("train", "test"):
            file[f"{part}/data"], file[f"{part}/target"] = RNG.random((4, 256)), np.arange(4)


def clients(folder: Path) -> None:
    """Contiguous, chunked, packed and checked data sets."""
    ways: list[dict[str, Any]] = [{}, {"chunks": (2, 3), "compression": "gzip"}, {"chunks": (4, 3), "fletcher32": True}]
    with h5py.File(folder / "own.h5", "w") as file:
        for name, way in zip("abc", ways):
            for part in ("train", "test"):
                file.create_dataset(f"clients/{name}/{part}/features", data=RNG.random((4, 3)), **way)
                file[f"clients/{name}/{part}/labels"] = np.arange(4)


def pool(folder: Path) -> None:
    with h5py.File(folder / "own.h5", "w", libver="latest") as file:
        for part in ("train", "test"):
            images = RNG.integers(0, 256, (8, 1, 3, 3), np.uint8)
            file.create_dataset(f"{part}/features", data=images, chunks=(4, 1, 3, 3))
            file[f"{part}/labels"] = np.arange(8) % 3


def initial(folder: Path) -> None:
    with h5py.File(folder / "initial.h5", "w") as file:
        file["fc1.weight"], file["clients/1/fc2.weight"] = RNG.random((4, 3)), RNG.random((2, 4)).astype("f4")


def speeds(folder: Path) -> None:
    rows = [f"{round_},{client},{RNG.random() + 0.1:.3f}\n" for round_ in range(3) for client in range(4)]
    write(folder / "speeds.csv", "".join(["round,client,seconds\n", *rows]).encode())


def depths(folder: Path) -> None:
    columns = zip(*[(round_, client, 1 + client % 3) for round_ in range(3) for client in range(4)])
    with h5py.File(folder / "depths.h5", "w") as file:
        file.update(dict(zip(("round", "client", "depth"), map(list, columns))))


def sent140(folder: Path) -> None:
    text = io.StringIO(newline="")
    rows = csv.writer(text, quoting=csv.QUOTE_ALL)
    rows.writerows([str(4 * (n % 2)), n, "Mon", "NO_QUERY", "amy", "good day"] for n in range(6))
    write(folder / "sent140" / Sent140().file, text.getvalue().encode())
    write(folder / "sent140" / Sent140().glove, b"good 1.0 0.5 -2.0\nday 0.25 3.0 1.0\n")


# --- what is read


def check(features: Any, labels: Any, shape: tuple[int, ...], dtype: Any, classes: int) -> None:
    """What a reader gives: features of one shape and type, finite, and as many labels within the classes."""
    assert features.shape == (len(labels), *shape), (features.shape, labels.shape)
    assert features.dtype == dtype, features.dtype
    assert labels.dtype == np.int64, labels.dtype
    assert np.isfinite(features).all()
    assert ((labels >= 0) & (labels < classes)).all(), labels


def pooled(section: Any, shape: tuple[int, ...], dtype: Any) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        found = section.load(0, folder)
        check(found.train_pixels, found.train_labels, shape, dtype, found.classes)
        check(found.test_pixels, found.test_labels, shape, dtype, found.classes)

    return read


def federated(section: Any, clients: int, rank: int) -> Callable[[Path], None]:
    """A federation whose features have so many axes."""

    def read(folder: Path) -> None:
        header = section.check(clients, folder)
        found = section.federate(clients, 0, folder)
        for number in range(clients):
            data = found.client(number)
            assert len(found.shapes[number]) == rank
            assert found.classes <= header.classes
            for x, y in ((data.train_features, data.train_labels), (data.test_features, data.test_labels)):
                check(x, y if y.dtype.kind == "i" else np.zeros(len(y), int), found.shapes[number], np.float32, 2**18)

    return read


def read_pool(folder: Path) -> None:
    section = Hdf5(file="own.h5")
    if section.check(2, folder).clients is None:
        found = section.load(0, folder)
        assert len(found.train_pixels) == len(found.train_labels)
        assert found.train_pixels.dtype in (np.uint8, np.float32)


def read_split(folder: Path) -> None:
    found = partition.read_split(folder / "split.h5", 2, (20, 10))
    held = np.concatenate([*found.train, found.server])
    assert len(np.unique(held)) == len(held)
    assert all(part.dtype == np.int64 and ((part >= 0) & (part < 20)).all() for part in (*found.train, *found.test))


def read_initial(folder: Path) -> None:
    found = InitialFile(folder / "initial.h5", 2, "single")
    values = [*found.shared.values(), *found.of(1).values()]
    assert all(each.dtype == np.float32 and np.isfinite(each).all() for each in values)


def read_table(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        speed = Table(file=str(folder / name))
        speed.covers(3, 4, 2)
        assert speed.values.shape[0] >= 3
        assert speed.values.shape[1:] == (4,)
        assert (speed.values > 0).all()

    return read


def read_config(folder: Path) -> None:
    config.load(folder / "run.toml").check(None)


KINDS: dict[str, Kind] = {
    "idx": Kind(lambda folder: mnist(folder, bytes), pooled(Mnist(), (1, 28, 28), np.uint8)),
    "idx.gz": Kind(lambda folder: mnist(folder, gzip.compress), pooled(Mnist(), (1, 28, 28), np.uint8)),
    "cifar": Kind(cifar_records, pooled(Cifar100(), (3, 32, 32), np.uint8)),
    "leaf": Kind(femnist, federated(Femnist(), 2, 3)),
    "libsvm": Kind(libsvm, pooled(Usps(), (1, 16, 16), np.float32)),
    "usps.h5": Kind(usps, pooled(Usps(), (1, 16, 16), np.float32)),
    "hdf5": Kind(clients, federated(Hdf5(file="own.h5"), 3, 1)),
    "hdf5-pool": Kind(pool, read_pool),
    "split": Kind(
        lambda folder: partition.write_split(
            folder / "split.h5", Split([np.arange(5), np.arange(5, 9)], [np.arange(3)] * 2, np.arange(10, 12))
        ),
        read_split,
    ),
    "initial": Kind(initial, read_initial),
    "speeds.csv": Kind(speeds, read_table("speeds.csv")),
    "depths.h5": Kind(depths, read_table("depths.h5")),
    "sent140": Kind(sent140, federated(Sent140(min_samples=5, length=4), 1, 2)),
    "toml": Kind(lambda folder: write(folder / "run.toml", TOML.encode()), read_config),
}


# --- trials


def damaged(content: bytes, rng: np.random.Generator) -> tuple[bytes, str]:
    """Return a file's content after something has happened to it, and what."""
    changed, place = bytearray(content), int(rng.integers(len(content) + 1))
    how = str(rng.choice(["cut", "bits", "bits", "first bits", "lost", "overwritten", "doubled"]))
    length = int(rng.integers(1, 65))
    if how == "cut":
        del changed[place:]
    elif how == "lost":
        del changed[place : place + length]
    elif how == "doubled":
        changed[place:place] = changed[place : place + length]
    elif how == "overwritten":
        piece = changed[place : place + length]
        changed[place : place + length] = (b"\0", b"\xff", rng.bytes(1))[rng.integers(3)] * len(piece)
    else:
        most = min(len(content), 512) if how == "first bits" else len(content)
        for bit in rng.integers(0, 8 * most, rng.choice([1, 1, 2, 8])).tolist():
            changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed), f"{how} at {place}"


def attempt(read: Callable[[Path], object], folder: Path) -> str:
    """Return what has come of reading; any error but a user's is raised."""
    try:
        read(folder)
    except UserError as error:
        line = str(error)
        assert line.isprintable(), line
        assert len(line) <= 1000 + len(str(folder)), line
        assert "fits into memory" not in line, line
        return "refused"
    return "read"


def trials(count: int, seed: int, names: list[str], folder: Path, verbose: bool) -> Counter[tuple[str, str]]:
    """Damage files so many times, taking turns among the kinds; return how often which kind was read and refused."""
    outcomes = Counter[tuple[str, str]]()
    sound: dict[str, dict[Path, bytes]] = {}
    for name in names:
        home = folder / name
        home.mkdir()
        KINDS[name].write(home)
        sound[name] = {path: path.read_bytes() for path in sorted(home.rglob("*")) if path.is_file()}
        KINDS[name].read(home)  # what is sound is not refused
    for trial in range(count):
        name = names[trial % len(names)]
        rng = np.random.default_rng([seed, trial])
        path = list(sound[name])[int(rng.integers(len(sound[name])))]
        content, how = damaged(sound[name][path], rng)
        if verbose:
            print(f"trial {trial} of seed {seed}: {path}, {how}", flush=True)
        path.write_bytes(content)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            outcomes[name, attempt(KINDS[name].read, folder / name)] += 1
        except BaseException:
            print(f"trial {trial} of seed {seed} ({path}, {how}) failed", file=sys.stderr, flush=True)
            raise
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            path.write_bytes(sound[name][path])
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description="Damage small files of every format at random, and read them.")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--verbose", action="store_true", help="name each trial before it, for deaths of the process")
    given = parser.parse_args()
    faulthandler.enable()
    faulthandler.register(signal.SIGPROF, chain=True)  # says where, also within a library, and then ends the process
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    with tempfile.TemporaryDirectory() as folder:
        outcomes = trials(given.trials, given.seed, given.kind or list(KINDS), Path(folder), given.verbose)
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
    assert taken < MEMORY, f"{taken} bytes were taken, expected fewer than {MEMORY}"
    kinds = {name: {word: outcomes[name, word] for word in ("refused", "read")} for name in given.kind or KINDS}
    print(json.dumps({"trials": outcomes.total(), "seed": given.seed, "memory": taken, "kinds": kinds}))


if __name__ == "__main__":
    main()
