from __future__ import annotations

import bz2
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from test_files import refused_by_all
from test_sources import IMAGES as MNIST
from test_sources import LABELS as MNIST_LABELS
from test_sources import idx_bytes, refused, write

from hpcfl.data import source_class, sources
from hpcfl.data.bundled import Digits
from hpcfl.data.two_digits import TwoDigits
from hpcfl.data.usps import Usps

TINY = {"first": "digits", "second": "digits-4x4"}

# --- USPS -----------------------------------------------------------------------------------------------------

N = {"train": 50, "test": 20}
PIXELS = np.random.default_rng(0).integers(0, 5, (50, 256)) / 4
LABELS = np.arange(50) % 10


def usps_h5(folder: Path, **changes: Any) -> Path:
    (folder / "usps").mkdir(exist_ok=True)
    content = {f"{part}/data": PIXELS[:n].astype("f4") for part, n in N.items()}
    content |= {f"{part}/target": LABELS[:n] for part, n in N.items()}
    with h5py.File(folder / "usps" / "usps.h5", "w") as file:
        for name, value in (content | changes).items():
            if value is not None:
                file[name] = value
    return folder / "usps" / "usps.h5"


def lines(n: int) -> list[str]:
    """LIBSVM's lines; like its own files, they say nothing of values of 0."""
    return [
        f"{label + 1} " + " ".join(f"{i + 1}:{2 * p - 1:.6f}" for i, p in enumerate(row) if p != 0.5) + " \n"
        for label, row in zip(LABELS[:n], PIXELS)
    ]


def usps_text(folder: Path, change: dict[int, str] | None = None) -> Path:
    (folder / "usps").mkdir(exist_ok=True)
    for name, n in (("usps.bz2", 50), ("usps.t.bz2", 20)):
        text = lines(n)
        for number, line in (change or {}).items() if n == 20 else ():
            text[number] = line
        (folder / "usps" / name).write_bytes(bz2.compress("".join(text).encode()))
    return folder / "usps" / "usps.t.bz2"


@pytest.mark.parametrize("form", [usps_h5, usps_text])
def test_both_forms_of_usps_are_read(form, tmp_path):
    form(tmp_path)
    header = Usps().check(5, tmp_path)
    assert (header.clients, header.train, header.test) == (None, 50, 20)
    assert (header.shapes, header.classes) == (((1, 16, 16),), 10)
    pool = Usps().load(0, tmp_path)
    assert pool.train_pixels.dtype == np.float32
    assert np.array_equal(pool.train_pixels.reshape(50, 256), PIXELS)
    assert np.array_equal(pool.train_labels, LABELS)
    assert np.array_equal(pool.test_pixels[:, 0], PIXELS[:20].reshape(20, 16, 16))
    features, labels = Usps(scale="centred").federate(5, 0, tmp_path).server_test()
    assert (features.min(), features.max()) == (-1, 1)
    assert np.array_equal(labels, LABELS[:20])


def test_missing_files_of_usps_are_named(tmp_path):
    refused_by_all(Usps(), None, "data.name = 'usps'", "--data-dir", "HPCFL_DATA", "usps/")
    refused_by_all(Usps(), tmp_path, f"{tmp_path} has no folder usps/")
    path = usps_text(tmp_path)
    path.unlink()
    refused_by_all(Usps(), tmp_path, f"{path.parent}: has neither usps.h5 nor usps.t.bz2")


NAN = np.where(np.arange(50 * 256).reshape(50, 256) == 700, np.nan, PIXELS)
WRONG_H5 = {
    "no data": ({"test/data": None}, "test/data is missing"),
    "no labels": ({"train/target": None}, "train/target is missing"),
    "width": (
        {"train/data": PIXELS[:, :250]},
        "of shape (50, 250) and int64 of shape (50,), expected numbers (n, 256) and integers (n,)",
    ),
    "lengths": ({"test/target": LABELS[:19]}, "of shape (20, 256) and int64 of shape (19,), expected numbers (n, 256)"),
    "nothing": ({"test/data": PIXELS[:0], "test/target": LABELS[:0]}, "of shape (0, 256) and int64 of shape (0,)"),
    "words": ({"test/target": ["3"] * 20}, "and object of shape (20,), expected numbers (n, 256) and integers"),
    "nan": ({"train/data": NAN}, "train: sample 2 holds nan, expected 0 to 1"),
    "bytes": ({"train/data": PIXELS * 255}, "train: sample 0 holds 255.0, expected 0 to 1"),
    "label": ({"train/target": LABELS + 1}, "train: sample 9 holds 10, expected a label of 0 to 9"),
}


@pytest.mark.parametrize("case", WRONG_H5)
def test_wrong_hdf5_of_usps_is_refused(case, tmp_path):
    changes, said = WRONG_H5[case]
    path = usps_h5(tmp_path, **changes)
    refused_by_all(Usps(), tmp_path, str(path), said)


DAMAGED = "truncated or damaged, expected LIBSVM's lines in a whole bzip2 file ("
WRONG_LINES = {
    "label": ("11 1:0.5\n", "sample 3 holds 11.0, expected a label of 1 to 10"),
    "digit": ("0 1:0.5\n", "sample 3 holds 0.0, expected a label of 1 to 10"),
    "beyond": ("3 1:0.5 2:1.5\n", "sample 3 holds 1.5, expected -1 to 1"),
    "nan": ("3 1:nan\n", "sample 3 holds nan, expected -1 to 1"),
    "vast": ("3 1:1e300\n", "sample 3 holds inf, expected -1 to 1"),
    "width": ("3 1:0.5 257:0.5\n", DAMAGED + "n_features was set to 256, but input file contains 257 features)"),
    "from 0": ("3 0:0.5\n", DAMAGED + "Invalid index 0 in SVMlight/LibSVM data file.)"),
    "twice": (
        "3 1:0.5 1:0.5\n",
        DAMAGED + "Feature indices in SVMlight/LibSVM data file should be sorted and unique.)",
    ),
    "word": ("3 1:x\n", DAMAGED + "could not convert string to float: b'x')"),
    "no value": ("3 1:0.5 7\n", DAMAGED + "need more than 1 value to unpack)"),
    "no label": ("1:0.5\n", DAMAGED + "could not convert string to float: b'1:0.5')"),
    "half a label": ("3.5 1:0.5\n", "sample 3 holds 3.5, expected a label of 1 to 10"),
    "colons": ("3 1:2:3\n", DAMAGED + "could not convert string to float: b'2:3')"),
    "long": ("3 " + "9" * 30 + ":1\n", DAMAGED),
}


@pytest.mark.parametrize("case", WRONG_LINES)
def test_malformed_lines_of_usps_are_refused(case, tmp_path):
    line, said = WRONG_LINES[case]
    path = usps_text(tmp_path, {3: line})
    refused_by_all(Usps(), tmp_path, f"{path}: {said}")


@pytest.mark.parametrize("form", [usps_h5, usps_text])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9])
def test_truncated_files_of_usps_are_refused(form, share, tmp_path):
    path = form(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    refused_by_all(Usps(), tmp_path, str(path))
    path.write_bytes(b"not packed")
    refused_by_all(Usps(), tmp_path, str(path))


# --- digits of 4 x 4 pixels -----------------------------------------------------------------------------------


def test_small_digits_are_means_of_the_large_ones_with_the_same_split():
    large, small = (Digits(side=side).federate(10, 3, None) for side in (8, 4))
    assert Digits(side=4).check(10, None).shapes == ((1, 4, 4),)
    for i in (0, 9):
        features = large.client(i).train_features
        means = features.reshape(-1, 1, 4, 2, 4, 2).mean(axis=(3, 5))
        assert np.allclose(small.client(i).train_features, means, atol=1e-6)
        assert np.array_equal(small.client(i).test_labels, large.client(i).test_labels)


# --- two domains ----------------------------------------------------------------------------------------------


def test_they_are_found():
    assert {"two_digits", "usps"} <= set(sources())
    assert not {"libsvm", "hdf5_file"} & set(sources())
    assert source_class("two_digits") is TwoDigits


@pytest.mark.parametrize("classes", [3, 5])
def test_clients_hold_images_of_one_domain_and_so_many_classes(classes):
    section = TwoDigits(**TINY, classes=classes)
    header = section.check(8, None)
    assert (header.clients, header.train, header.test, header.classes) == (None, 2 * 1437, 2 * 360, 10)
    assert header.shapes == ((1, 8, 8), (1, 4, 4)) * 4
    federation = section.federate(8, 0, None)
    assert federation.domains.tolist() == [0, 1] * 4
    assert tuple(federation.shapes) == header.shapes
    assert federation.server_test() is None
    for i in range(8):
        client = federation.client(i)
        assert client.train_features.shape == (federation.train_sizes[i], *header.shapes[i])
        assert client.test_features.shape == (federation.test_sizes[i], *header.shapes[i])
        assert len(set(client.train_labels)) == classes
        assert set(client.test_labels) <= set(client.train_labels)
    assert federation.train_sizes.sum() == header.train
    assert federation.test_sizes.sum() == header.test


def test_the_clients_of_the_first_domain_are_those_of_its_source():
    federation = TwoDigits(**TINY, classes=4, train_samples=500, scale="centred").federate(10, 7, None)
    alone = Digits(partition="shards", classes=4, train_samples=500, scale="centred").federate(5, 7, None)
    for i in range(5):
        assert np.array_equal(federation.client(2 * i).train_features, alone.client(i).train_features)
        assert np.array_equal(federation.client(2 * i).test_labels, alone.client(i).test_labels)
    assert federation.train_sizes[1::2].sum() == 500


def test_domains_are_cut_by_the_seed_and_independently():
    first, again, other = (TwoDigits(**TINY).federate(40, seed, None) for seed in (1, 1, 2))

    def held(federation: Any, at: int) -> list[set[int]]:
        return [set(federation.client(i).train_labels.tolist()) for i in range(at, 40, 2)]

    for at in (0, 1):
        assert held(first, at) == held(again, at) != held(other, at)
    assert sum(map(set.__eq__, held(first, 0), held(first, 1))) < 10


@pytest.mark.parametrize(
    ("share", "domains"),
    [(0.5, [0, 1, 0, 1, 0, 1, 0, 1]), (0.25, [1, 0, 1, 1, 1, 0, 1, 1]), (0.75, [0, 0, 1, 0, 0, 0, 1, 0])],
)
def test_domains_alternate_as_evenly_as_the_share_allows(share, domains):
    assert TwoDigits(**TINY, share=share).federate(8, 0, None).domains.tolist() == domains


def test_domains_may_be_files(tmp_path):
    (tmp_path / "mnist").mkdir()
    for part, n in (("train", 60), ("t10k", 20)):
        write(tmp_path / "mnist" / f"{part}-images-idx3-ubyte", idx_bytes(MNIST[:n]), True)
        write(tmp_path / "mnist" / f"{part}-labels-idx1-ubyte", idx_bytes(MNIST_LABELS[:n]), True)
    section = TwoDigits(second="usps")
    refused_by_all(section, tmp_path, "data.second = 'usps': ", "has no folder usps/")
    usps_h5(tmp_path)
    assert section.check(4, tmp_path).train == 110
    federation = section.federate(4, 0, tmp_path)
    assert federation.shapes == [(1, 28, 28), (1, 16, 16)] * 2
    assert [federation.client(i).train_features.shape[1:] for i in range(4)] == federation.shapes


@pytest.mark.parametrize(
    ("keys", "clients", "said"),
    [
        (
            {"second": "digits"},
            4,
            "data.second: expected another domain than data.first: 'digits-4x4', 'mnist', 'usps', got 'digits'",
        ),
        ({}, 1, "clients: expected at least 2, one of each domain, got 1"),
        (
            {"share": 0.1},
            4,
            "data.share: expected one with 1 to 3 of clients = 4 in each domain, got 0.1; did you mean 0.25?",
        ),
        ({"share": 0.9}, 4, "did you mean 0.75"),
        (
            {"train_samples": 1500},
            4,
            "data.first = 'digits': data.train_samples: expected 0 … 1437, got 1500; did you mean",
        ),
        (
            {"share": 0.01, "train_samples": 50},
            100,
            "data.second = 'digits-4x4': clients: expected 1 … 50, one per training sample, got 99",
        ),
    ],
)
def test_domains_that_cannot_be_are_refused(keys, clients, said):
    refused_by_all(TwoDigits(**TINY | keys), None, said, clients=clients)


def test_vast_numbers_of_clients_are_refused_at_once():
    assert "1 … 1437, one per training sample" in refused(TwoDigits(**TINY).check, 10**15, None)
