"""Splits from a file, splits written to one, and pools in HDF5 files of the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from test_files import refused_by_all
from test_sources import Content, folder, refused, store, zipped  # noqa: F401

from hpcfl import open_models
from hpcfl.base.rng import keyed
from hpcfl.config import load
from hpcfl.data.bundled import Digits
from hpcfl.data.hdf5 import Hdf5
from hpcfl.data.mnist import Mnist
from hpcfl.data.partition import dirichlet, shards
from hpcfl.testing.runs import play, same, table
from hpcfl.testing.world import World

PARTS: Content = {
    "clients/c10/train": np.array([7, 0, 1436]),
    "clients/c10/test": np.array([359, 3]),
    "clients/c2/train": np.array([5, 4], dtype=np.uint8),
    "clients/c2/test": np.array([3], dtype=np.int32),
    "clients/c1/train": np.array([9, 8, 1, 2]),
}


def split(here: Path, content: Content, name: str = "split.h5") -> Path:
    store(here, {key: value for key, value in content.items() if value is not None})
    return (here / "mine.h5").rename(here / name)


def digits(**keys: Any) -> Digits:
    return Digits(partition="file", partition_file="split.h5", **keys)


# --- a split from a file --------------------------------------------------------------------------------------


def test_clients_hold_the_rows_of_the_file_in_its_order(tmp_path):
    split(tmp_path, PARTS)
    header = digits().check(3, tmp_path)
    assert (header.train, header.test, header.server) == (9, 3, 0)
    pool, federation = Digits().load(4, None), digits().federate(3, 4, tmp_path)
    assert federation.train_sizes.tolist() == [4, 2, 3]  # c1, c2, c10
    assert federation.test_sizes.tolist() == [0, 1, 2]
    for client, name in enumerate(("c1", "c2", "c10")):
        data, held = federation.client(client), PARTS[f"clients/{name}/train"].astype(int)
        np.testing.assert_array_equal(data.train_features * 16, pool.train_pixels[held])
        np.testing.assert_array_equal(data.train_labels, pool.train_labels[held])
        tested = PARTS.get(f"clients/{name}/test", np.zeros(0)).astype(int)
        np.testing.assert_array_equal(data.test_labels, pool.test_labels[tested])
    assert federation.server_train() is None
    assert len(federation.server_test()[1]) == 360  # the whole test pool, whoever holds it


def test_the_file_may_name_the_samples_of_the_server(tmp_path):
    split(tmp_path, PARTS | {"server/train": np.array([20, 10])})
    assert digits().check(3, tmp_path).server == 2
    features, labels = digits().federate(3, 0, tmp_path).server_train()
    assert labels.tolist() == Digits().load(0, None).train_labels[[20, 10]].tolist()
    assert len(features) == 2


def test_the_file_may_lie_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    split(tmp_path, PARTS)
    monkeypatch.chdir(tmp_path)
    assert digits().check(3, tmp_path / "data").train == 9
    (tmp_path / "split.h5").unlink()
    line = refused_by_all(digits(), tmp_path / "data", "data.partition_file = 'split.h5': no such file", clients=3)
    assert str(tmp_path / "data") in line


def test_each_pooled_source_has_the_key(folder):  # noqa: F811
    split(folder, {"clients/0/train": [59, 2], "clients/0/test": [19], "clients/1/train": [0]})
    federation = Mnist(partition="file", partition_file="split.h5").federate(2, 0, folder)
    assert federation.client(0).train_labels.tolist() == [9, 2]
    assert federation.client(0).test_labels.tolist() == [9]


C2 = "clients/c2/train"
SOUND_POOL = "of the pool of 1437 training samples"
WRONG: dict[str, tuple[Content, str]] = {
    "no clients": (dict.fromkeys(PARTS) | {"train": [1]}, "no clients, expected groups clients/<id>/train"),
    "reals": ({C2: np.array([1.0])}, f"{C2} is float64 of shape (1,), expected integers of one axis"),
    "truth values": ({C2: np.array([True])}, f"{C2} is bool of shape (1,), expected integers of one axis"),
    "two axes": ({C2: np.array([[3]])}, f"{C2} is int64 of shape (1, 1), expected integers of one axis"),
    "negative": ({C2: [5, -1]}, f"{C2}: place 1 holds -1, expected 0 to 1436 {SOUND_POOL}"),
    "too large": ({C2: [1437]}, f"{C2}: place 0 holds 1437, expected 0 to 1436 {SOUND_POOL}"),
    "beyond 64 bits": ({C2: np.array([2**64 - 1], "u8")}, f"{C2}: place 0 holds 18446744073709551615"),
    "no test sample": ({"clients/c2/test": [360]}, "clients/c2/test: place 0 holds 360, expected 0 to 359"),
    "too many": ({C2: np.zeros(1438, int)}, f"{C2} has 1438 indices, expected at most 1437, each once, {SOUND_POOL}"),
    "twice in one": ({C2: [6, 3, 6]}, f"{C2} names sample 6 twice, expected each index once"),
    "twice in test": ({"clients/c2/test": [6, 6]}, "clients/c2/test names sample 6 twice"),
    "twice in two": ({C2: [3, 1436]}, "clients/c2 and clients/c10 both hold training sample 1436"),
    "at the server": ({"server/train": [11, 4]}, "clients/c2 and server both hold training sample 4"),
    "none": ({C2: np.zeros(0, int)}, f"{C2} is missing or empty, expected at least 1 training sample"),
    "no part": ({C2: None}, f"{C2} is missing or empty, expected at least 1 training sample"),
    "another part": ({"clients/c2/tests": [1]}, "clients/c2 has tests, expected train and test"),
    "no group": ({"clients/c3": [1]}, "clients/c3 is no group, expected clients/c3/train and clients/c3/test"),
    "link": ({C2: h5py.ExternalLink("other.h5", "x")}, f"{C2} is an external link, expected the data themselves"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_split_is_refused_in_one_line(case, tmp_path):
    changes, said = WRONG[case]
    path = split(tmp_path, PARTS | changes)
    number = 4 if "clients/c3" in changes else 3
    line = refused_by_all(digits(), tmp_path, f"{path}: {said}", clients=number)
    assert "\n" not in line


def test_another_number_of_clients_and_no_hdf5_are_refused(tmp_path):
    path = split(tmp_path, PARTS)
    line = refused_by_all(digits(), tmp_path, clients=5)
    assert line == f"clients: expected 3, which {path} holds, got 5; did you mean 3?"
    content = path.read_bytes()
    for wrong in (b"", b"not hdf5", content[: len(content) // 2]):
        path.write_bytes(wrong)
        refused_by_all(digits(), tmp_path, f"{path}: truncated or damaged, expected an HDF5 file", clients=3)


KEYS: list[tuple[dict[str, Any], str]] = [
    ({"partition_file": None}, "data.partition_file: expected an HDF5 file, with data.partition = 'file', got nothing"),
    ({"partition": "iid"}, "data.partition_file: expected nothing with data.partition = 'iid', got 'split.h5'; did you "
     "mean data.partition = 'file'?"),
    ({"classes": 2}, "data.classes: expected nothing with data.partition = 'file', which says who holds what, got 2"),
    ({"label_groups": 2}, "data.label_groups: expected 1 with data.partition = 'file'"),
    ({"alpha": 0.3}, "data.alpha: expected 0.5 with data.partition = 'file'"),
    ({"train_samples": 900}, "data.train_samples: expected nothing with data.partition = 'file'"),
    ({"sizes": "uniform", "spread": 0.5}, "data.sizes: expected 'equal' with data.partition = 'file'"),
    ({"spread": 0.5}, "data.spread: expected nothing with data.partition = 'file'"),
    ({"server": 4}, "data.server: expected 0 with data.partition = 'file'"),
    ({"deal": True}, "data.deal: expected false with data.partition = 'file'"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "said"), KEYS)
def test_keys_that_would_do_nothing_beside_a_file_are_refused(keys, said, tmp_path):
    split(tmp_path, PARTS)
    section = Digits(**({"partition": "file", "partition_file": "split.h5"} | keys))
    assert refused_by_all(section, tmp_path, clients=3).startswith(said)


def test_a_preset_of_shards_takes_a_file_instead(tmp_path):
    file = str(split(tmp_path, PARTS))
    below = table("drop", "mlp", True, data={"name": "digits", "partition": "shards", "classes": 2})
    config = load(below, ["data.partition=file", f"data.partition_file={file}"])
    assert (config.data.classes, config.data.partition_file) == (None, file)


# --- a split that a run used ----------------------------------------------------------------------------------

SPLITS: list[dict[str, Any]] = [
    {"partition": "iid", "train_samples": 300},
    {"partition": "shards", "classes": 2, "sizes": "uniform", "spread": 0.5},
    {"partition": "dirichlet", "server": 9, "train_samples": 300},
]


@pytest.mark.parametrize("keys", SPLITS, ids=[keys["partition"] for keys in SPLITS])
def test_a_split_that_was_saved_gives_the_same_clients(keys, tmp_path):
    one = Digits(**keys).federate(7, 5, None)
    one.save_split(tmp_path / "split.h5")
    other = digits().federate(7, 5, tmp_path)
    for client in range(7):
        for left, right in zip(vars(one.client(client)).values(), vars(other.client(client)).values()):
            np.testing.assert_array_equal(left, right)
    held = [each.server_train() for each in (one, other)]
    assert (held[0] is None) == (held[1] is None) == ("server" not in keys)
    for left, right in zip(*(parts or () for parts in held)):
        np.testing.assert_array_equal(left, right)


def test_clients_that_no_pool_was_cut_into_have_no_split(tmp_path):
    store(tmp_path, {f"clients/0/{part}/{what}": np.ones((2, 2))[: 2, : 1 + (what == "features")].squeeze()
                     for part in ("train", "test") for what in ("features", "labels")})  # fmt: skip
    federation = Hdf5(file="mine.h5").federate(1, 0, tmp_path)
    assert "not cut from one pool" in refused(federation.save_split, tmp_path / "split.h5")


@pytest.mark.mpi
def test_a_run_is_done_again_from_its_split_on_any_ranks(world: World, shared_dir: Path) -> None:
    values = table("drop", "mlp", True)
    values["data"] = {"name": "digits", "partition": "shards", "classes": 3}
    one = play(world, values, shared_dir / "one", None)
    if world.rank == 0:
        open_models(one).federation.save_split(shared_dir / "split.h5")
    world.meet()
    values["data"] = {"name": "digits", "partition": "file", "partition_file": str(shared_dir / "split.h5")}
    other = play(world, values, shared_dir / "other", world.comm)
    if world.rank == 0:
        same(one, other)


# --- a pool in a file of the user -----------------------------------------------------------------------------

N, TESTS = 60, 24
BYTES = np.random.default_rng(1).integers(0, 256, (N + TESTS, 2, 3), dtype=np.uint8)
CLASSES = np.arange(N + TESTS) % 4


def pool(features: Any = BYTES, labels: Any = CLASSES, test: bool = True) -> Content:
    content = {"train/features": features[:N], "train/labels": labels[:N]}
    return content | ({"test/features": features[N:], "test/labels": labels[N:]} if test else {})


def mine(**keys: Any) -> Hdf5:
    return Hdf5(file="mine.h5", **keys)


def test_a_pool_is_cut_as_that_of_any_other_source(tmp_path):
    store(tmp_path, pool())
    section = mine(partition="shards", classes=2, server=8)
    header = section.check(5, tmp_path)
    assert (header.train, header.test, header.server, header.shapes) == (N - 8, TESTS, 8, ((2, 3),))
    assert (header.classes, header.targets) == (4, False)
    federation = section.federate(5, 3, tmp_path)
    assert federation.train_sizes.sum() == N - 8
    assert sorted(federation.server_train()[1].tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    rest = np.delete(np.arange(N), federation.server_part)
    for client, part in enumerate(shards(CLASSES[rest], 5, 2, keyed(3, "partition"))):
        data = federation.client(client)
        assert data.train_features.dtype == np.float32
        np.testing.assert_array_equal(data.train_features, BYTES[rest[part]])
        assert set(data.test_labels) == set(data.train_labels)
    np.testing.assert_array_equal(federation.server_test()[0], BYTES[N:])


def test_a_published_set_in_a_file_of_ones_own_gives_the_same_clients(folder):  # noqa: F811
    whole = Mnist().load(0, folder)
    images, labels = (np.concatenate([getattr(whole, f"{part}_{what}") for part in ("train", "test")])
                      for what in ("pixels", "labels"))  # fmt: skip
    store(folder, pool(images, labels))
    keys: dict[str, Any] = {"partition": "shards", "classes": 2, "train_samples": 50, "server": 10, "deal": True}
    one, other = Mnist(**keys).federate(4, 2, folder), mine(**keys, scale="unit").federate(4, 2, folder)
    for client in range(4):
        for left, right in zip(vars(one.client(client)).values(), vars(other.client(client)).values()):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("dtype", ["u1", "i4", "f8"])
def test_pixels_of_a_pool_are_scaled(dtype, tmp_path):
    store(tmp_path, pool(BYTES.astype(dtype)))
    features, _ = mine(scale="centred").federate(3, 0, tmp_path).server_test()
    np.testing.assert_allclose(features, BYTES[N:] / 127.5 - 1, atol=1e-6)


def test_a_pool_without_test_samples_leaves_all_without(tmp_path):
    store(tmp_path, pool(test=False))
    for keys in ({}, {"partition": "shards", "classes": 2}, {"partition": "dirichlet"}):
        assert mine(**keys).check(5, tmp_path).test == 0
        federation = mine(**keys).federate(5, 0, tmp_path)
        assert federation.test_sizes.tolist() == [0] * 5
        assert federation.client(2).test_features.shape == (0, 2, 3)


def test_dirichlet_parts_of_a_pool(tmp_path):
    store(tmp_path, pool())
    federation = mine(partition="dirichlet", alpha=0.2, labels=9).federate(4, 1, tmp_path)
    assert federation.classes == 9
    for part, wanted in zip(federation.train_parts, dirichlet(CLASSES[:N], 4, 0.2, keyed(1, "partition"))):
        np.testing.assert_array_equal(part, wanted)


def test_targets_of_a_pool_are_cut_without_regard_to_them_or_by_a_file(tmp_path):
    targets = np.linspace(-1, 1, N + TESTS)
    store(tmp_path, pool(labels=targets))
    assert mine().check(5, tmp_path).targets
    federation = mine(sizes="uniform", spread=0.9, server=5).federate(5, 0, tmp_path)
    assert np.ptp(federation.train_sizes) > 0
    assert federation.client(0).train_labels.dtype == np.float32
    (tmp_path / "data").mkdir()
    split(tmp_path / "data", {"clients/0/train": [7, 3]})
    own = mine(partition="file", partition_file="data/split.h5")
    np.testing.assert_allclose(own.federate(1, 0, tmp_path).client(0).train_labels, targets[[7, 3]], rtol=1e-6)
    said = "data.partition: expected 'iid' or 'file', since labels are real numbers"
    refused_by_all(mine(partition="shards", classes=2), tmp_path, said, clients=5)
    refused_by_all(mine(partition="dirichlet"), tmp_path, said, clients=5)


BAD_POOLS: dict[str, tuple[Content, dict[str, Any], str]] = {
    "no samples": ({"train/features": BYTES[:0], "train/labels": CLASSES[:0]}, {}, "train has no samples, expected at"),
    "half": ({"train/labels": None}, {}, "train/labels is missing"),
    "half a test pool": ({"test/labels": None}, {}, "test/labels is missing"),
    "shapes": ({"test/features": BYTES[N:, :1]}, {}, "train has features of shape (2, 3), test features of"),
    "kinds": ({"test/labels": np.ones(TESTS)}, {}, "train/labels are int64 (), but test/labels float64 ()"),
    "not finite": ({"test/features": np.full((TESTS, 2, 3), np.nan)}, {}, "test/features: sample 0 holds nan"),
    "no pixels": ({"test/features": np.full((TESTS, 2, 3), 256)}, {"scale": "unit"}, "sample 0 holds 256.0"),
    "prune": ({}, {"prune": 0.1}, "is a pool, whose clients have features of equal shapes, got 0.1"),
    "labels": ({}, {"labels": 3}, "data.labels: expected at least 4"),
    "augment": ({}, {"augment": True}, "data.augment: expected false, since"),
    "clients": ({}, {"train_samples": 2}, "clients: expected 1 … 2, one per training sample, got 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_POOLS)
def test_wrong_pools_are_refused_in_one_line(case, tmp_path):
    changes, keys, said = BAD_POOLS[case]
    store(tmp_path, {name: value for name, value in (pool() | changes).items() if value is not None})
    refused_by_all(mine(**keys), tmp_path, said, clients=3)


OF_POOLS = {"partition": "dirichlet", "partition_file": "x.h5", "classes": 2, "label_groups": 2, "alpha": 1.0}
OF_POOLS |= {"train_samples": 3, "sizes": "uniform", "spread": 0.5, "server": 1, "deal": True, "augment": True}


@pytest.mark.parametrize("key", OF_POOLS)
def test_keys_of_pools_are_refused_with_clients(key, tmp_path):
    own = {f"clients/0/{name}": value for name, value in pool().items()}
    store(tmp_path, own | pool())  # clients count, whatever else is there
    assert mine().check(1, tmp_path).clients == 1
    line = refused_by_all(mine(**{key: OF_POOLS[key]}), tmp_path, "mine.h5 is no pool, but has clients", clients=1)
    assert line.startswith(f"data.{key}: expected ")
