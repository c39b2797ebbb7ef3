from __future__ import annotations

import gzip
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from hpcfl.base.errors import UsageError
from hpcfl.data import mnist, partition, source_class, sources
from hpcfl.data.bundled import Digits
from hpcfl.data.hdf5 import Hdf5
from hpcfl.data.mnist import Mnist


def refused(call: Callable[..., Any], *args: Any) -> str:
    """The one-line message of the UsageError that the call raises."""
    with pytest.raises(UsageError) as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- partitions ---------------------------------------------------------------------------------------------

pools = st.builds(
    lambda sizes, seed: np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes)),
    st.lists(st.integers(1, 40), min_size=2, max_size=12),
    st.integers(0, 5),
)
seeds = st.integers(0, 2**32)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def assert_disjoint(parts: partition.Parts, pool: np.ndarray, clients: int) -> None:
    assert len(parts) == clients
    every = np.concatenate(parts)
    assert every.dtype == np.int64
    assert len(np.unique(every)) == len(every)
    assert every.size == 0 or (every.min() >= 0 and every.max() < len(pool))
    assert all((np.diff(part) > 0).all() for part in parts)


@given(pools, st.integers(1, 30), seeds)
def test_iid_parts_are_equal_and_leave_out_less_than_one_each(pool, clients, seed):
    parts = partition.iid(pool, clients, rng(seed))
    assert_disjoint(parts, pool, clients)
    assert {len(part) for part in parts} == {len(pool) // clients}
    assert len(pool) - sum(map(len, parts)) <= clients - 1


@given(pools, st.integers(1, 30), st.integers(1, 12), seeds)
def test_shards_give_every_client_so_many_classes(pool, clients, classes, seed):
    counts = np.bincount(pool)
    assume(np.minimum(counts, clients).sum() >= clients * classes)
    parts = partition.shards(pool, clients, classes, rng(seed))
    assert_disjoint(parts, pool, clients)
    held = [set(pool[part]) for part in parts]
    assert {len(classes_of) for classes_of in held} == {classes}
    used = set().union(*held)
    assert len(used) == min(len(counts), clients * classes)
    assert sum(map(len, parts)) == counts[list(used)].sum()


@given(st.integers(2, 10), st.integers(1, 40), st.integers(1, 10), seeds)
def test_shards_of_large_classes_are_balanced(total_classes, clients, classes, seed):
    assume(classes <= total_classes)
    pool = np.repeat(np.arange(total_classes), 400)
    parts = partition.shards(pool, clients, classes, rng(seed))
    holders = np.bincount([c for part in parts for c in set(pool[part])], minlength=total_classes)
    assert holders.max() - holders.min() <= 1


@given(st.integers(2, 10), st.integers(1, 4), st.integers(1, 10), seeds)
def test_shards_have_equal_sizes_where_the_classes_divide(total_classes, times, classes, seed):
    assume(classes <= total_classes)
    clients = times * total_classes
    pool = np.repeat(np.arange(total_classes), 10 * times * classes)
    parts = partition.shards(pool, clients, classes, rng(seed))
    assert {len(part) for part in parts} == {10 * times * classes * total_classes // clients}


def test_shards_of_unequal_classes_have_nearly_equal_sizes():
    pool = np.repeat(np.arange(10), [592, 674, 596, 613, 584, 542, 592, 626, 585, 595])
    sizes = [len(part) for part in partition.shards(pool, 30, 2, rng(0))]
    assert max(sizes) - min(sizes) <= 2
    assert sum(sizes) == len(pool)


def test_shards_are_refused_where_the_classes_are_too_small():
    pool = np.repeat(np.arange(3), [50, 50, 2])
    message = refused(partition.shards, pool, 10, 3, rng(0))
    assert message.startswith("data.classes: expected at most 2, for 2 to 50 training samples a class and clients = 10")
    assert message.endswith("got 3; did you mean 2?")
    assert len(partition.shards(pool, 10, 2, rng(0))) == 10


@given(st.integers(1, 4), st.integers(1, 3), st.integers(4, 12), seeds)
def test_label_groups_share_no_class(groups, classes, clients, seed):
    pool = rng(seed).permutation(np.repeat(np.arange(12), 40))
    parts = partition.grouped(pool, clients, classes, groups, rng(seed))
    assert_disjoint(parts, pool, clients)
    held = [set(pool[part]) for part in parts]
    assert {len(classes_of) for classes_of in held} == {classes}
    for block, own in zip(np.array_split(np.arange(clients), groups), np.array_split(np.arange(12), groups)):
        assert set().union(*(held[client] for client in block)) <= set(own.tolist())
    if groups == 1:
        assert all(map(np.array_equal, parts, partition.shards(pool, clients, classes, rng(seed))))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"label_groups": 2}, "expected 1 with data.partition = 'iid', got 2"),
        (
            {"partition": "shards", "classes": 4, "label_groups": 3},
            r"data.label_groups = 3, .*, got 4; did you mean 3\?$",
        ),
        (
            {"partition": "shards", "classes": 1, "label_groups": 9},
            r"for 10 classes and 8 clients, got 9; did you mean 8\?$",
        ),
    ],
)
def test_label_groups_that_cannot_be_are_refused(keys, message):
    with pytest.raises(UsageError, match=message):
        Digits(**keys).check(8, None)


@given(pools, st.integers(1, 30), st.floats(1e-6, 1e6), seeds)
def test_dirichlet_parts_are_equal_and_never_empty(pool, clients, alpha, seed):
    assume(clients <= len(pool))
    parts = partition.dirichlet(pool, clients, alpha, rng(seed))
    assert_disjoint(parts, pool, clients)
    assert {len(part) for part in parts} == {len(pool) // clients}


@pytest.mark.parametrize("alpha", [1e-300, 1e-9, 1e9, 1e300])
def test_dirichlet_survives_extreme_concentrations(alpha):
    pool = np.repeat(np.arange(10), 20)
    assert_disjoint(partition.dirichlet(pool, 7, alpha, rng(0)), pool, 7)


def test_alpha_sets_how_alike_clients_are():
    pool = np.repeat(np.arange(10), 1000)

    def largest_share(alpha: float) -> float:
        parts = partition.dirichlet(pool, 20, alpha, rng(1))
        return float(np.mean([np.bincount(pool[part], minlength=10).max() / len(part) for part in parts]))

    shares = [largest_share(alpha) for alpha in (0.01, 1.0, 1e5)]
    assert shares[0] > 0.85 > shares[1] > 0.3
    assert shares[2] < 0.15


@pytest.mark.parametrize(
    "cut",
    [
        lambda pool, r: partition.iid(pool, 7, r),
        lambda pool, r: partition.shards(pool, 7, 3, r),
        lambda pool, r: partition.dirichlet(pool, 7, 0.5, r),
        lambda pool, r: partition.follow(pool, [pool[:50], pool[50:]], r),
    ],
    ids=["iid", "shards", "dirichlet", "follow"],
)
def test_partitions_depend_on_the_generator_alone(cut):
    pool = rng(0).integers(0, 10, 300)
    first, again, other = (np.concatenate(cut(pool, rng(seed))) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@given(pools, pools, st.integers(1, 20), seeds)
@settings(max_examples=50)
def test_a_followed_pool_has_the_same_classes_and_nothing_left(train, test, clients, seed):
    assume(clients <= len(train))
    moulds = [train[part] for part in partition.dirichlet(train, clients, 1.0, rng(seed))]
    parts = partition.follow(test, moulds, rng(seed))
    assert_disjoint(parts, test, clients)
    assert all(set(test[part]) <= set(mould) for part, mould in zip(parts, moulds))
    held = set(np.concatenate(moulds))
    assert sum(map(len, parts)) == sum(label in held for label in test)


# --- digits and the keys of pooled sources ------------------------------------------------------------------


def test_digits_have_the_sizes_the_header_says():
    header = Digits().check(10, None)
    assert (header.clients, header.train, header.test, header.classes) == (None, 1437, 360, 10)
    federation = Digits().federate(10, 0, None)
    assert federation.clients == len(federation.shapes) == 10
    assert federation.train_sizes.tolist() == [143] * 10
    assert federation.test_sizes.tolist() == [36] * 10
    client = federation.client(3)
    assert client.train_features.shape == (143, 1, 8, 8)
    assert client.train_features.dtype == client.test_features.dtype == np.float32
    assert client.train_labels.dtype == client.test_labels.dtype == np.int64
    features, labels = federation.server_test()
    assert features.shape == (360, 1, 8, 8)
    assert len(labels) == 360


@pytest.mark.parametrize(("scale", "low"), [("unit", 0.0), ("centred", -1.0), ("mnist", -0.42421296)])
def test_pixels_are_scaled(scale, low):
    features, _ = Digits(scale=scale).federate(2, 0, None).server_test()
    high = 2.8214867 if scale == "mnist" else 1.0
    assert (features.min(), features.max()) == (np.float32(low), np.float32(high))


@pytest.mark.parametrize("keys", [{}, {"partition": "shards", "classes": 3}, {"partition": "dirichlet"}])
def test_a_federation_is_a_function_of_the_seed(keys):
    first, again, other = (Digits(**keys).federate(8, seed, None) for seed in (5, 5, 6))
    for i in range(8):
        assert np.array_equal(first.client(i).train_features, again.client(i).train_features)
        assert np.array_equal(first.client(i).test_labels, again.client(i).test_labels)
    same = [np.array_equal(first.client(i).train_labels, other.client(i).train_labels) for i in range(8)]
    assert not any(same)


def test_the_test_part_of_shards_has_the_classes_of_the_training_part():
    federation = Digits(partition="shards", classes=2).federate(10, 0, None)
    for i in range(10):
        client = federation.client(i)
        assert set(client.train_labels) == set(client.test_labels)
        assert len(set(client.train_labels)) == 2
    assert federation.train_sizes.sum() == 1437
    assert federation.test_sizes.sum() == 360


def test_a_subset_without_enough_classes_for_the_label_groups_is_refused():
    section = Digits(partition="shards", classes=1, label_groups=3, train_samples=3)
    fine, refusals = 0, []
    for seed in range(12):
        present = len(np.unique(used_labels(3, seed)))
        if present == 3:
            fine += section.federate(3, seed, None).train_sizes.sum() == 3
        else:
            refusals.append((present, refused(section.federate, 3, seed, None)))
    assert fine
    assert refusals
    for present, message in refusals:
        assert message == (
            f"data.label_groups: expected at most {present}, for data.classes = 1 of {present} in each, got 3; "
            f"did you mean {present}?"
        )


def used_labels(used: int, seed: int) -> np.ndarray:
    """Labels of the training samples that are used, however they are cut."""
    return Digits(train_samples=used).cut(1, seed, None).pool.train_labels


def test_only_so_many_training_samples_are_used():
    section = Digits(train_samples=100, partition="dirichlet")
    assert section.check(10, None).train == 100
    federation = section.federate(10, 0, None)
    assert federation.train_sizes.tolist() == [10] * 10
    assert len(federation.server_test()[1]) == 360


@pytest.mark.parametrize(
    ("keys", "clients", "words"),
    [
        ({}, 100_000_000, ["clients: expected 1 … 1437", "got 100000000", "did you mean 1437"]),
        ({}, 0, ["clients: expected at least 1, got 0"]),
        ({"train_samples": 20}, 21, ["clients: expected 1 … 20", "got 21", "did you mean 20"]),
        ({"train_samples": 5000}, 2, ["data.train_samples: expected 0 … 1437, got 5000", "did you mean 1437"]),
        ({"partition": "shards"}, 10, ["data.classes", "1 to 10"]),
        (
            {"partition": "shards", "classes": 11},
            10,
            ["data.classes: expected 1 to 10 per client, for 10 classes", "got 11", "did you mean 10"],
        ),
        (
            {"partition": "shards", "classes": 3},
            700,
            ["data.classes: expected 1 to 2", "clients = 700", "got 3", "did you mean 2"],
        ),
        ({"classes": 2}, 10, ["data.classes", "'iid'", "got 2", "'shards'"]),
    ],
)
def test_impossible_partitions_are_refused_before_anything_is_loaded(keys, clients, words):
    section = Digits(**keys)
    for call in (lambda: section.check(clients, None), lambda: section.federate(clients, 0, None)):
        message = refused(call)
        assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "keys",
    [
        {"alpha": 0.0},
        {"alpha": float("nan")},
        {"classes": 0},
        {"train_samples": 0},
        {"partition": "shard"},
        {"scale": "none"},
        {"name": "mnist"},
        {"pixels": 3},
    ],
)
def test_the_section_refuses_wrong_values(keys):
    with pytest.raises(ValidationError):
        Digits(**keys)


# --- finding sources ----------------------------------------------------------------------------------------


def test_sources_are_the_files_that_define_one():
    assert {"digits", "hdf5", "mnist"} <= set(sources())
    assert not {"base", "formats", "partition", "pooled"} & set(sources())
    assert source_class("mnist") is Mnist


@pytest.mark.parametrize(("name", "known"), [("minst", "'mnist'"), ("pooled", "digits"), ("../x", "digits")])
def test_an_unknown_source_names_the_nearest(name, known):
    message = refused(source_class, name)
    assert all(word in message for word in ["data.name", name, known])


def test_a_check_imports_nothing_heavy():
    code = (
        "import sys; from hpcfl.data import source_class; source_class('digits')().check(10, None);"
        "sys.exit(', '.join({'torch', 'mpi4py', 'sklearn', 'scipy'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# --- IDX files ----------------------------------------------------------------------------------------------


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, dtype=">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


def write(path: Path, content: bytes, zipped: bool) -> Path:
    path = path.with_name(path.name + ".gz") if zipped else path
    path.write_bytes(gzip.compress(content, mtime=0) if zipped else content)
    return path


IMAGES = np.random.default_rng(0).integers(0, 256, (60, 28, 28))
LABELS = np.arange(60) % 10


@pytest.fixture(params=[False, True], ids=["plain", "gz"])
def zipped(request):
    return request.param


@pytest.fixture
def folder(tmp_path, zipped):
    """A data folder with a small, sound mnist/ in it."""
    (tmp_path / "mnist").mkdir()
    for part, n in (("train", 60), ("t10k", 20)):
        write(tmp_path / "mnist" / f"{part}-images-idx3-ubyte", idx_bytes(IMAGES[:n]), zipped)
        write(tmp_path / "mnist" / f"{part}-labels-idx1-ubyte", idx_bytes(LABELS[:n]), zipped)
    return tmp_path


def path_of(folder: Path, name: str, zipped: bool) -> Path:
    return folder / "mnist" / (name + ".gz" * zipped)


def refused_by_all(folder: Path, *words: str) -> None:
    """Both ways in refuse the files, with the words."""
    for call in (lambda: Mnist().check(2, folder), lambda: Mnist().federate(2, 0, folder)):
        message = refused(call)
        assert all(word in message for word in words), message


def test_sound_files_are_read(folder):
    header = Mnist().check(6, folder)
    assert (header.train, header.test, header.shapes) == (60, 20, ((1, 28, 28),))
    features, labels = Mnist().federate(6, 0, folder).server_test()
    assert np.array_equal(labels, LABELS[:20])
    assert np.array_equal(np.rint(features[:, 0] * 255), IMAGES[:20])


def test_an_unpacked_file_that_kept_its_name_is_read(tmp_path):
    path = tmp_path / "labels.gz"
    path.write_bytes(idx_bytes(LABELS))
    assert np.array_equal(mnist.read_idx(path, 1), LABELS)


def test_a_gzip_file_of_two_members_is_read(tmp_path):
    content = idx_bytes(LABELS)
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(content[:30]) + gzip.compress(content[30:]))
    assert np.array_equal(mnist.read_idx(path, 1), LABELS)


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_a_wrong_magic_number_is_refused(folder, zipped, name):
    write(folder / "mnist" / name, b"\x00\x00\x0d\x03" + bytes(5000), zipped)
    refused_by_all(folder, name, "magic number 0x00000d03", "expected 0x00000")


def test_images_in_place_of_labels_are_refused(folder, zipped):
    write(folder / "mnist" / "train-labels-idx1-ubyte", idx_bytes(IMAGES), zipped)
    refused_by_all(folder, "train-labels-idx1-ubyte", "0x00000803", "0x00000801", "labels")


@pytest.mark.parametrize("kept", [0, 3, 10, 18, 2000, -1])
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-images-idx3-ubyte"])
def test_a_truncated_file_is_refused(folder, zipped, name, kept):
    path = path_of(folder, name, zipped)
    path.write_bytes(path.read_bytes()[:kept])
    refused_by_all(folder, name, "truncated")


def test_a_file_that_is_too_long_is_refused(folder, zipped):
    write(folder / "mnist" / "train-images-idx3-ubyte", idx_bytes(IMAGES) + b"x", zipped)
    refused_by_all(folder, "train-images-idx3-ubyte", "too long", "47057 bytes", "says 47056")


def test_a_damaged_gzip_file_is_refused_by_check(folder, zipped):
    if not zipped:
        pytest.skip("plain IDX files carry no checksum")
    path = path_of(folder, "train-images-idx3-ubyte", zipped)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    refused_by_all(folder, "train-images-idx3-ubyte", "damaged")


def test_labels_of_another_number_are_refused(folder, zipped):
    write(folder / "mnist" / "train-labels-idx1-ubyte", idx_bytes(LABELS[:59]), zipped)
    refused_by_all(folder, "train-labels-idx1-ubyte", "59 labels", "60 images")


def test_labels_out_of_range_are_refused(folder, zipped):
    write(folder / "mnist" / "t10k-labels-idx1-ubyte", idx_bytes(np.where(np.arange(20) == 7, 10, 0)), zipped)
    refused_by_all(folder, "t10k-labels-idx1-ubyte", "sample 7 holds 10", "a label of 0 to 9")


def test_images_of_another_size_are_refused(folder, zipped):
    write(folder / "mnist" / "t10k-images-idx3-ubyte", idx_bytes(IMAGES[:20, :20]), zipped)
    refused_by_all(folder, "t10k-images-idx3-ubyte", "20 x 28", "28 x 28")


def test_a_missing_file_or_folder_is_named(folder, zipped, tmp_path):
    path_of(folder, "t10k-images-idx3-ubyte", zipped).unlink()
    refused_by_all(folder, str(folder / "mnist"), "t10k-images-idx3-ubyte.gz")
    refused_by_all(tmp_path / "elsewhere", f"{tmp_path / 'elsewhere'} has no folder mnist/")
    assert all(word in refused(Mnist().check, 3, None) for word in ("--data-dir", "HPCFL_DATA", "mnist/"))


def test_the_real_mnist():
    root = os.environ.get("HPCFL_DATA")
    if root is None or not (Path(root) / "mnist").is_dir():
        pytest.skip("no MNIST: HPCFL_DATA does not name a folder with mnist/ in it")
    section = Mnist(partition="shards", classes=2)
    header = section.check(30, Path(root))
    assert (header.train, header.test) == (60000, 10000)
    federation = section.federate(30, 0, Path(root))
    assert federation.train_sizes.sum() == 60000
    assert np.ptp(federation.train_sizes) <= 2
    client = federation.client(29)
    assert set(client.train_labels) == set(client.test_labels)
    assert client.train_features.shape == (federation.train_sizes[29], 1, 28, 28)


# --- HDF5 files of the user ---------------------------------------------------------------------------------

Content = dict[str, Any]


def sound(widths: dict[str, int] | None = None) -> Content:
    """What a sound file holds: clients with 4 training and 2 test samples."""
    content: Content = {}
    for number, (name, width) in enumerate((widths or {"a1": 3, "a10": 5, "a2": 3}).items()):
        for part, n in (("train", 4), ("test", 2)):
            content[f"clients/{name}/{part}/features"] = np.full((n, width), number, dtype=np.float64)
            content[f"clients/{name}/{part}/labels"] = np.arange(n, dtype=np.int8)
    return content


def store(folder: Path, content: Content) -> Path:
    with h5py.File(folder / "mine.h5", "w") as file:
        for name, value in content.items():
            file[name] = value
    return folder


def test_clients_of_an_hdf5_file_are_read(tmp_path):
    section = Hdf5(file="mine.h5")
    store(tmp_path, sound())
    header = section.check(3, tmp_path)
    assert (header.clients, header.train, header.test, header.classes) == (3, 12, 6, 4)
    assert header.shapes == ((3,), (3,), (5,))
    federation = section.federate(3, 0, tmp_path)
    assert federation.shapes == [(3,), (3,), (5,)]
    assert federation.train_sizes.tolist() == [4, 4, 4]
    assert federation.test_sizes.tolist() == [2, 2, 2]
    client = federation.client(2)  # a10, which the file holds second
    assert client.train_features.dtype == np.float32
    assert np.array_equal(client.train_features, np.ones((4, 5)))
    assert client.test_labels.tolist() == [0, 1]
    assert client.test_labels.dtype == np.int64
    assert federation.server_test() is None


def test_equal_shapes_are_given_once_and_numbers_sorted_as_numbers(tmp_path):
    store(tmp_path, sound({"10": 2, "9": 2, "0": 2}))
    section = Hdf5(file="mine.h5")
    assert section.check(3, tmp_path).shapes == ((2,),)
    first = [section.federate(3, 0, tmp_path).client(i).train_features[0, 0] for i in range(3)]
    assert first == [2, 1, 0]


def test_the_global_test_set_of_an_hdf5_file(tmp_path):
    content = sound({"0": 2, "1": 2})
    content |= {"test/features": np.ones((5, 2)), "test/labels": np.full(5, 6)}
    section = Hdf5(file="mine.h5")
    federation = section.federate(2, 0, store(tmp_path, content))
    features, labels = federation.server_test()
    assert features.shape == (5, 2)
    assert labels.tolist() == [6] * 5
    assert federation.classes == 7


def test_a_file_may_lie_in_the_working_directory(tmp_path, monkeypatch):
    store(tmp_path, sound())
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    assert Hdf5(file="mine.h5").check(3, tmp_path / "data").clients == 3
    assert Hdf5(file="mine.h5").check(3, None).clients == 3
    message = refused(Hdf5(file="none.h5").check, 3, tmp_path / "data")
    assert "data.file = 'none.h5'" in message
    assert str(tmp_path / "data") in message


GROUP = "clients/a10/test"
WRONG = {
    "no features": ({f"{GROUP}/features": None}, [f"{GROUP}/features is missing"]),
    "no labels": ({f"{GROUP}/labels": None}, [f"{GROUP}/labels is missing"]),
    "no part": ({f"{GROUP}/features": None, f"{GROUP}/labels": None}, [f"{GROUP}/features is missing"]),
    "part is data": (
        {f"{GROUP}/features": None, f"{GROUP}/labels": None, GROUP: np.ones(2)},
        [f"{GROUP}/features is missing"],
    ),
    "lengths": ({f"{GROUP}/labels": np.arange(3)}, [GROUP, "2 features", "3 labels"]),
    "float labels": ({f"{GROUP}/labels": np.ones(2)}, [f"{GROUP}/labels", "float64", "expected integers"]),
    "negative": ({f"{GROUP}/labels": np.array([0, -4])}, [f"{GROUP}/labels", "-4", "from 0"]),
    "text": ({f"{GROUP}/features": [["a"], ["b"]]}, [f"{GROUP}/features", "expected numbers"]),
    "flat": ({f"{GROUP}/features": np.ones(2)}, [GROUP, "(2,)", "[samples, ...]"]),
    "widths": (
        {f"{GROUP}/features": np.ones((2, 4))},
        ["clients/a10/train has 5 features, clients/a10/test 4 f"],
    ),
    "no training sample": (
        {"clients/a2/train/features": np.ones((0, 3)), "clients/a2/train/labels": np.zeros(0, dtype=int)},
        ["clients/a2/train", "no samples", "at least 1"],
    ),
    "half a test set": ({"test/features": np.ones((2, 3))}, ["test/labels is missing"]),
    "test set of another shape": (
        {"test/features": np.ones((2, 3)), "test/labels": np.zeros(2, dtype=int)},
        ["clients/a10/train has 5 features, test 3 features", "global test set"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_hdf5_content_is_refused(case, tmp_path):
    changes, words = WRONG[case]
    content = {name: value for name, value in (sound() | changes).items() if value is not None}
    store(tmp_path, content)
    section = Hdf5(file="mine.h5")
    for call in (lambda: section.check(3, tmp_path), lambda: section.federate(3, 0, tmp_path)):
        message = refused(call)
        assert all(word in message for word in ["mine.h5", *words]), message


def test_another_number_of_clients_is_refused(tmp_path):
    store(tmp_path, sound())
    message = refused(Hdf5(file="mine.h5").check, 5, tmp_path)
    assert all(
        word in message for word in ("clients: expected 3", "data.file = 'mine.h5' holds", "got 5", "did you mean 3")
    )


def test_files_that_are_not_hdf5_or_hold_no_clients_are_refused(tmp_path):
    section = Hdf5(file="mine.h5")
    assert "no clients" in refused(section.check, 3, store(tmp_path, {"samples": np.ones(3)}))
    content = (tmp_path / "mine.h5").read_bytes()
    for wrong in (b"", b"not hdf5", content[: len(content) // 2]):
        (tmp_path / "mine.h5").write_bytes(wrong)
        message = refused(section.check, 3, tmp_path)
        assert "mine.h5" in message
        assert "truncated or damaged, expected an HDF5 file" in message
