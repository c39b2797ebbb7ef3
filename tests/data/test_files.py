from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_sources import idx_bytes, refused, rng, seeds, write

from hpcfl.data import partition, source_class, sources
from hpcfl.data.bundled import Digits
from hpcfl.data.cifar import Cifar10, Cifar100
from hpcfl.data.femnist import Femnist
from hpcfl.data.mnist import Emnist, Mnist, Mnist32
from hpcfl.data.sent140 import Sent140, words


def pixels_of(features: np.ndarray) -> np.ndarray:
    """The pixels 0 .. 255 that features in [0, 1] came from."""
    return np.rint(features * 255).astype(int)


def refused_by_all(section: Any, folder: Path | None, *said: str, clients: int = 2) -> str:
    """Both ways in refuse the files, with the same line, which holds the words."""
    lines = {refused(section.check, clients, folder), refused(section.federate, clients, 0, folder)}
    assert len(lines) == 1
    line = lines.pop()
    assert all(word in line for word in said), line
    return line


def test_all_of_them_are_found():
    assert {"cifar10", "cifar100", "emnist", "femnist", "sent140"} <= set(sources())
    assert not {"cifar", "folder", "glove", "leaf"} & set(sources())
    assert source_class("cifar100") is Cifar100


@pytest.mark.parametrize("section", [Cifar10(), Cifar100(), Emnist(), Femnist(), Sent140()], ids=lambda s: s.name)
def test_a_missing_folder_is_named(section, tmp_path):
    refused_by_all(section, None, f"data.name = '{section.name}'", "--data-dir", "HPCFL_DATA")
    refused_by_all(section, tmp_path, f"data.name = '{section.name}'", str(tmp_path))


# --- CIFAR --------------------------------------------------------------------------------------------------

N = 12
IMAGES = np.random.default_rng(1).integers(0, 256, (N, 3, 32, 32)).astype(np.uint8)


def labels_of(number: int, classes: int) -> np.ndarray:
    return (np.arange(N) * 7 + number) % classes


def records(number: int, classes: int) -> bytes:
    """One binary file; the coarse labels of CIFAR-100 are not the fine ones."""
    fine = labels_of(number, classes).astype(np.uint8)[:, None]
    head = [fine] if classes == 10 else [fine // 5, fine]
    return np.concatenate([*head, (IMAGES + number).reshape(N, -1)], axis=1).astype(np.uint8).tobytes()


FILES = {10: [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"], 100: ["train", "test"]}
FOLDERS = {10: "cifar-10-batches-bin", 100: "cifar-100-binary"}


def cifar(folder: Path, classes: int) -> Path:
    """Write the files; return their folder."""
    home = folder / FOLDERS[classes]
    home.mkdir()
    for number, name in enumerate(FILES[classes]):
        (home / f"{name}.bin").write_bytes(records(number, classes))
    return home


@pytest.mark.parametrize("section", [Cifar10(), Cifar100()], ids=lambda s: s.name)
def test_cifar_is_read(section, tmp_path):
    classes = section.layout.classes
    cifar(tmp_path, classes)
    batches = len(FILES[classes]) - 1
    header = section.check(3, tmp_path)
    assert (header.train, header.test) == (batches * N, N)
    assert (header.shapes, header.classes) == (((3, 32, 32),), classes)
    pool = section.load(0, tmp_path)
    assert pool.train_pixels.dtype == np.uint8
    for number in range(batches):
        own = slice(number * N, (number + 1) * N)
        assert np.array_equal(pool.train_pixels[own], (IMAGES + number).astype(np.uint8))
        assert np.array_equal(pool.train_labels[own], labels_of(number, classes))
    features, labels = section.federate(3, 0, tmp_path).server_test()
    assert features.dtype == np.float32
    assert np.array_equal(pixels_of(features), (IMAGES + batches).astype(np.uint8))
    assert np.array_equal(labels, labels_of(batches, classes))


@pytest.mark.parametrize("kept", [0, 1, 2000, -1])
def test_truncated_files_of_cifar_are_refused(kept, tmp_path):
    path = cifar(tmp_path, 10) / "data_batch_5.bin"
    path.write_bytes(path.read_bytes()[:kept])
    refused_by_all(Cifar10(), tmp_path, str(path), "truncated")


def test_a_batch_of_cifar_that_lost_whole_records_is_refused(tmp_path):
    path = cifar(tmp_path, 10) / "data_batch_1.bin"
    path.write_bytes(path.read_bytes()[:-3073])
    refused_by_all(Cifar10(), tmp_path, f"{path}: truncated or damaged, {N - 1} records; expected {N} as in data_batch")


def test_cifar_10_is_not_taken_for_cifar_100(tmp_path):
    home = cifar(tmp_path, 100)
    (home / "train.bin").write_bytes(records(0, 10))
    refused_by_all(Cifar100(), tmp_path, "train.bin", "whole records of 3074")


def test_labels_and_files_of_cifar_are_checked(tmp_path):
    home = cifar(tmp_path, 100)
    content = bytearray(records(0, 100))
    content[4 * 3074 + 1] = 100
    (home / "test.bin").write_bytes(content)
    refused_by_all(Cifar100(), tmp_path, "test.bin", "sample 4 holds 100, expected a label of 0 to 99")
    (home / "train.bin").unlink()
    refused_by_all(Cifar100(), tmp_path, "train.bin", "no such file")


# --- EMNIST -------------------------------------------------------------------------------------------------

STROKES = np.random.default_rng(2).integers(0, 256, (60, 28, 28))


def emnist(folder: Path, split: str, labels: np.ndarray, zipped: bool = True) -> None:
    (folder / "emnist").mkdir(exist_ok=True)
    for part, n in (("train", 60), ("test", 20)):
        name = f"emnist-{split}-{part}"
        write(folder / "emnist" / f"{name}-images-idx3-ubyte", idx_bytes(STROKES[:n]), zipped)
        write(folder / "emnist" / f"{name}-labels-idx1-ubyte", idx_bytes(labels[:n]), zipped)


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
def test_emnist_is_read_upright(zipped, tmp_path):
    labels = np.arange(60) % 47
    emnist(tmp_path, "balanced", labels, zipped)
    header = Emnist().check(4, tmp_path)
    assert (header.train, header.test, header.shapes, header.classes) == (60, 20, ((1, 28, 28),), 47)
    features, found = Emnist().federate(4, 0, tmp_path).server_test()
    assert np.array_equal(pixels_of(features[:, 0]), STROKES[:20].transpose(0, 2, 1))
    assert np.array_equal(found, labels[:20])


def test_letters_count_from_1(tmp_path):
    emnist(tmp_path, "letters", np.arange(60) % 26 + 1)
    section = Emnist(split="letters")
    assert section.check(2, tmp_path).classes == 26
    assert np.array_equal(section.load(0, tmp_path).train_labels, np.arange(60) % 26)
    emnist(tmp_path, "letters", np.arange(60) % 26)
    refused_by_all(section, tmp_path, "train-labels-idx1-ubyte", "sample 0 holds 0, expected a label of 1 to 26")


def test_only_the_first_classes_are_used(tmp_path):
    labels = np.arange(60) % 47
    emnist(tmp_path, "byclass", labels)
    section = Emnist(split="byclass", first_classes=10, partition="shards", classes=5)
    header = section.check(4, tmp_path)
    assert (header.train, header.test, header.classes) == (20, 10, 10)
    pool = section.load(0, tmp_path)
    assert np.array_equal(pool.train_labels, labels[labels < 10])
    assert np.array_equal(pool.train_pixels[:, 0], STROKES[labels < 10].transpose(0, 2, 1))
    federation = section.federate(4, 0, tmp_path)
    assert [len(set(federation.client(i).train_labels)) for i in range(4)] == [5] * 4
    refused_by_all(
        Emnist(split="digits", first_classes=11),
        tmp_path,
        "data.first_classes: expected 1 … 10 in split 'digits', got 11",
        "did you mean 10",
    )


def test_the_files_of_the_split_are_named(tmp_path):
    emnist(tmp_path, "balanced", np.arange(60) % 47)
    refused_by_all(Emnist(split="mnist"), tmp_path, "emnist-mnist-train-images-idx3-ubyte.gz")
    emnist(tmp_path, "balanced", np.arange(60))
    refused_by_all(
        Emnist(), tmp_path, "emnist-balanced-train-labels", "sample 47 holds 47, expected a label of 0 to 46"
    )


def test_mnist32_is_mnist_with_a_black_edge_in_three_colours(tmp_path):
    (tmp_path / "mnist").mkdir()
    for part, n in (("train", 60), ("t10k", 20)):
        write(tmp_path / "mnist" / f"{part}-images-idx3-ubyte", idx_bytes(STROKES[:n]), True)
        write(tmp_path / "mnist" / f"{part}-labels-idx1-ubyte", idx_bytes(np.arange(n) % 10), True)
    assert Mnist32().check(4, tmp_path).shapes == ((3, 32, 32),)
    plain, own = Mnist().load(0, tmp_path), Mnist32().load(0, tmp_path)
    for one, other in ((plain.train_pixels, own.train_pixels), (plain.test_pixels, own.test_pixels)):
        assert other.sum() == 3 * one.sum()
        assert all(np.array_equal(other[:, colour, 2:30, 2:30], one[:, 0]) for colour in range(3))
    assert np.array_equal(own.train_labels, np.arange(60) % 10)


# --- FEMNIST ------------------------------------------------------------------------------------------------


def written(name: str, labels: list[int]) -> dict[str, Any]:
    """A user's samples: each image has one grey that tells whose it is and which."""
    first = int(name[1:])
    return {"x": [[(10 * first + k) / 255] * 784 for k in range(len(labels))], "y": labels}


def leaf_file(path: Path, users: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = [len(data["y"]) for data in users.values()]
    path.write_text(json.dumps({"users": list(users), "num_samples": sizes, "user_data": users}))
    return path


def femnist(folder: Path, home: str = "femnist") -> Path:
    """Five users in two files; the third has none of the first 10 classes, the fifth is not in the test files."""
    labels = {"f1": [0, 1, 1, 30, 2], "f2": [3, 3, 4, 4], "f3": [50, 51], "f4": [9, 8, 7, 9], "f5": [5, 6, 5, 6, 5]}
    users = {name: written(name, own) for name, own in labels.items()}
    train = folder / home / "train"
    leaf_file(train / "all_data_1.json", {name: users[name] for name in ("f4", "f5")})
    leaf_file(train / "all_data_0.json", {name: users[name] for name in ("f1", "f2", "f3")})
    own = {"f4": written("f4", [7, 9]), "f1": written("f1", [2, 0, 30]), "f2": written("f2", [4])}
    leaf_file(folder / home / "test" / "all_data_0.json", own | {"f3": written("f3", [50])})
    return folder


def greys(features: np.ndarray) -> list[int]:
    assert features.shape[1:] == (1, 28, 28)
    assert np.array_equal(features, np.broadcast_to(features[:, :, :1, :1], features.shape))
    return pixels_of(features[:, 0, 0, 0]).tolist()


@pytest.mark.parametrize("home", ["femnist", "femnist/data"])
def test_users_of_leaf_files_are_clients(home, tmp_path):
    femnist(tmp_path, home)
    header = Femnist().check(5, tmp_path)
    assert (header.clients, header.train, header.test, header.classes) == (None, 20, 7, 62)
    federation = Femnist().federate(5, 0, tmp_path)
    assert federation.train_sizes.tolist() == [5, 4, 2, 4, 5]
    assert federation.test_sizes.tolist() == [3, 1, 1, 2, 0]
    assert federation.shapes == [(1, 28, 28)] * 5
    first, last = federation.client(0), federation.client(3)
    assert first.train_features.dtype == np.float32
    assert first.train_features[0, 0, 0, 0] == np.float32(10 / 255)
    assert greys(first.train_features) == [10, 11, 12, 13, 14]
    assert first.train_labels.tolist() == [0, 1, 1, 30, 2]
    assert greys(first.test_features) == [10, 11, 12]
    assert (greys(last.train_features), last.train_labels.tolist()) == ([40, 41, 42, 43], [9, 8, 7, 9])
    assert last.test_labels.tolist() == [7, 9]
    assert federation.server_test()[1].tolist() == [2, 0, 30, 4, 50, 7, 9]


def test_users_without_the_first_classes_are_left_out(tmp_path):
    femnist(tmp_path)
    section = Femnist(first_classes=10)
    assert section.check(4, tmp_path).train == 17
    federation = section.federate(4, 0, tmp_path)
    assert federation.classes == 10
    assert [federation.client(i).train_labels.tolist() for i in range(2)] == [[0, 1, 1, 2], [3, 3, 4, 4]]
    assert greys(federation.client(0).train_features) == [10, 11, 12, 14]
    assert federation.client(0).test_labels.tolist() == [2, 0]
    assert federation.client(3).train_labels.tolist() == [5, 6, 5, 6, 5]
    refused_by_all(
        section, tmp_path, "clients: expected 1 … 4, the users", "first 10 classes", "did you mean 4", clients=5
    )


def test_a_user_keeps_so_many_classes_and_samples(tmp_path):
    femnist(tmp_path)
    section = Femnist(first_classes=10, classes=2)
    seen, alike = set(), []
    for seed in range(12):
        federation = section.federate(4, seed, tmp_path)
        first, third = (set(federation.client(i).train_labels.tolist()) for i in (0, 2))
        alike.append({label + 7 for label in first} == third)
        for i, everything in enumerate([[0, 1, 1, 2], [3, 3, 4, 4], [9, 8, 7, 9], [5, 6, 5, 6, 5]]):
            client = federation.client(i)
            held = set(client.train_labels.tolist())
            assert len(held) == 2
            assert client.train_labels.tolist() == [label for label in everything if label in held]
            assert set(client.test_labels.tolist()) <= held
        seen.add(tuple(federation.client(0).train_labels))
    assert seen == {(0, 1, 1), (0, 2), (1, 1, 2)}
    assert not all(alike)  # clients draw their classes each by itself
    limited = Femnist(first_classes=10, samples=3, imbalance=1)
    sizes = np.stack([limited.federate(4, seed, tmp_path).train_sizes for seed in range(12)])
    assert {*sizes.flat} == {3, 4}
    same = [limited.federate(4, 3, tmp_path).client(2).train_labels.tolist() for _ in range(2)]
    assert same[0] == same[1]


def by_user(folder: Path) -> Path:
    """LEAF's split by user: whose samples are for testing has none for training."""
    users = {f"f{i}": written(f"f{i}", [0, 1, 0, 1]) for i in range(5)}
    leaf_file(folder / "femnist" / "train" / "0.json", {name: users[name] for name in ("f0", "f1", "f2")})
    leaf_file(folder / "femnist" / "test" / "0.json", {name: users[name] for name in ("f3", "f4")})
    return folder


def test_test_samples_of_other_users_are_for_merged_clients_only(tmp_path):
    home = by_user(tmp_path) / "femnist" / "test"
    refused_by_all(Femnist(), tmp_path, f"{home}: none of its users is in train/; expected LEAF's split by sample")
    section = Femnist(merge=True)
    assert section.check(2, tmp_path).test == 8
    federation = section.federate(2, 0, tmp_path)
    assert greys(federation.server_test()[0]) == [30, 31, 32, 33, 40, 41, 42, 43]
    assert federation.train_sizes.tolist() == [6, 6]
    assert federation.test_sizes.tolist() == [4, 4]


def test_merged_users_without_training_samples_of_the_first_classes_test_the_others(tmp_path):
    users = {"f0": written("f0", [0, 1, 1]), "f1": written("f1", [50])}
    leaf_file(tmp_path / "femnist" / "train" / "0.json", users)
    leaf_file(tmp_path / "femnist" / "test" / "0.json", {"f1": written("f1", [1, 50])})
    header = Femnist(merge=True, first_classes=10).check(1, tmp_path)
    assert (header.train, header.test) == (3, 1)


def test_a_global_test_set_without_samples_is_none(tmp_path):
    from hpcfl.learning.evaluate import server_scores
    from hpcfl.learning.task import Task
    from hpcfl.models.mlp import Mlp

    leaf_file(tmp_path / "femnist" / "train" / "0.json", {"f0": written("f0", [0, 1])})
    leaf_file(tmp_path / "femnist" / "test" / "0.json", {"f0": written("f0", [50])})
    federation = Femnist(first_classes=10).federate(1, 0, tmp_path)
    assert len(federation.server_test()[1]) == 0
    task = Task(Mlp(hidden=(2,)), federation, 0)
    assert server_scores(task, task.initial()) is None


def test_merged_samples_are_dealt_anew(tmp_path):
    labels = np.repeat(np.arange(10), 30)
    for part in ("train", "test"):
        users = {f"f{i}": written(f"f{i}", labels[i::6].tolist()) for i in range(6)}
        leaf_file(tmp_path / "femnist" / part / "0.json", users)
    section = Femnist(merge=True, first_classes=10, classes=3, samples=20, imbalance=5)
    assert section.check(10, tmp_path).train == 300
    federation = section.federate(10, 4, tmp_path)
    assert {len(set(federation.client(i).train_labels)) for i in range(10)} == {3}
    assert all(set(federation.client(i).test_labels) == set(federation.client(i).train_labels) for i in range(10))
    assert federation.train_sizes.min() >= 20
    assert federation.train_sizes.max() <= 25
    assert len(set(federation.train_sizes.tolist())) > 2
    every = np.concatenate(federation.train_parts)
    assert len(np.unique(every)) == len(every)
    line = refused(Femnist(merge=True, samples=31).federate, 10, 0, tmp_path)
    assert "since client 0 has 30, got 31" in line
    assert line.startswith("data.samples + data.imbalance: expected at most 30 training samples, ")


def test_too_few_samples_name_the_nearest(tmp_path):
    femnist(tmp_path)
    line = refused(Femnist(first_classes=10, samples=5).federate, 4, 0, tmp_path)
    assert "data.samples + data.imbalance: expected at most 4 training samples or data.merge = true" in line
    assert "since client 0 has 4, got 5; did you mean 4?" in line
    assert "data.samples: expected the least" in refused_by_all(Femnist(imbalance=5), tmp_path)
    refused_by_all(
        Femnist(first_classes=10, classes=11),
        tmp_path,
        "data.classes: expected at most data.first_classes = 10, got 11",
    )
    refused_by_all(
        Femnist(merge=True), tmp_path, "expected 1 … 20, the training samples", "did you mean 20", clients=21
    )


def change(user: str, **keys: Any) -> Any:
    """A change of one user's data in a LEAF file; None removes a key."""

    def changed(content: dict[str, Any]) -> Any:
        data = content["user_data"][user] | keys
        content["user_data"][user] = {key: value for key, value in data.items() if value is not None}
        return content

    return changed


def image(*values: Any) -> list[Any]:
    return [*values, *[0.5] * (784 - len(values))]


MALFORMED = {
    "no users": (lambda c: c["user_data"], "users: Field required, got {"),
    "no sizes": (lambda c: {k: c[k] for k in ("users", "user_data")}, "num_samples: Field required, got {"),
    "a list": (lambda c: [c], "Input should be a valid dictionary or instance of Leaf, got [{"),
    "other sizes": (lambda c: c | {"num_samples": [4]}, "2 users, but 1 entries in 'num_samples'"),
    "user names": (lambda c: c | {"users": ["f4", 5]}, "users: 1: Input should be a valid string, got 5"),
    "no such user": (
        lambda c: c | {"users": ["f4", "f9"]},
        "user 'f9': Input should be a valid dictionary or instance of LeafUser, got None",
    ),
    "twice": (lambda c: c | {"users": ["f4", "f4"]}, "user 'f4': comes a second time"),
    "in two files": (change("f4"), None),
    "no labels": (change("f5", y=None), "user 'f5': y: Field required, got {"),
    "no images": (change("f5", x=3), "user 'f5': x: Input should be a valid list, got 3"),
    "lengths": (change("f5", y=[1, 2]), "user 'f5': 5 samples in 'x', 2 labels in 'y', but num_samples says 5"),
    "num_samples": (
        change("f4", x=[image()], y=[1]),
        "user 'f4': 1 samples in 'x', 1 labels in 'y', but num_samples says 4",
    ),
    "label": (change("f4", y=[1, 62, 1, 1]), "user 'f4': y: 1: Input should be less than 62, got 62"),
    "float label": (change("f4", y=[1, 1, 1, 1.0]), "user 'f4': y: 3: Input should be a valid integer, got 1.0"),
    "short": (
        change("f4", x=[image(), image()[1:], image(), image()]),
        "user 'f4': x: 1: List should have at least 784 items",
    ),
    "no list": (change("f4", x=[image(), image(), 7, image()]), "user 'f4': x: 2: Input should be a valid list, got 7"),
    "words": (change("f4", x=[image("a")] * 4), "user 'f4': x: 0: 0: Input should be a valid number, got 'a'"),
    "null": (change("f4", x=[image(0.1, None)] * 4), "user 'f4': x: 0: 1: Input should be a valid number, got None"),
    "beyond": (
        change("f4", x=[image(0, 1)] * 3 + [image(255)]),
        "user 'f4': x: 3: 0: Input should be less than or equal to 1, got 255",
    ),
    "sizes of words": (
        lambda c: c | {"num_samples": ["4\n", 5]},
        "num_samples: 0: Input should be a valid integer, got '4\\n'",
    ),
    "a truth": (lambda c: c | {"num_samples": [True, 5]}, "num_samples: 0: Input should be a valid integer, got True"),
    "nan": (
        change("f4", x=[image(0.5, float("nan"))] * 4),
        "user 'f4': x: 0: 1: Input should be a finite number, got nan",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_leaf_files_are_refused(case, tmp_path):
    alter, said = MALFORMED[case]
    path = femnist(tmp_path) / "femnist" / "train" / "all_data_1.json"
    changed = alter(json.loads(path.read_text()))
    if case == "in two files":
        path, said = path.with_name("all_data_2.json"), "user 'f4': comes a second time"
    path.write_text(json.dumps(changed))
    refused_by_all(Femnist(), tmp_path, f"{path}: {said}")


LONG = "\x1b[31m" + "x" * 500


@pytest.mark.parametrize(
    "alter",
    [
        lambda c: c | {"users": [LONG, "f5"]},
        lambda c: c | {"num_samples": [LONG, 5]},
        lambda c: c | {"num_samples": [10**400, 5]},
        change("f4", y=[1, LONG, 1, 1]),
        change("f4", y=[1, [[LONG] * 9], 1, 1]),
        change("f4", y=[10**400] * 4),
        change("f4", x=[image(LONG)] * 4),
        change("f4", x=[image(0, 10**400)] * 4),
        change("f4", x=[image(-(10**400), 1)] * 4),
    ],
)
def test_what_a_leaf_file_says_is_one_short_line(alter, tmp_path):
    path = femnist(tmp_path) / "femnist" / "train" / "all_data_1.json"
    path.write_text(json.dumps(alter(json.loads(path.read_text()))))
    line = refused_by_all(Femnist(), tmp_path, f"{path}: ")
    assert line.isprintable()
    assert len(line) < len(str(path)) + 240


@pytest.mark.parametrize("content", [b"", b'{"users": ["f4", ', b"\xff\xfe\x00", b"[" * 100_000])
def test_leaf_files_that_are_not_json_are_refused(content, tmp_path):
    path = femnist(tmp_path) / "femnist" / "test" / "all_data_0.json"
    path.write_bytes(content)
    refused_by_all(Femnist(), tmp_path, f"{path}: truncated or damaged, expected JSON")
    path.unlink()
    refused_by_all(Femnist(), tmp_path, f"{path.parent}: has no files *.json")


# --- Sentiment140 -------------------------------------------------------------------------------------------

VECTORS = {"good": [1.0, 0.5, -2.0], "day": [0.25, 3.0, 1.0], "!": [4.0, 4.0, 4.0], "unused": [9.0, 9.0, 9.0]}
TWEETS = [
    *[("0", "zoe", "bad Day")] * 6,
    ("2", "zoe", "neither"),
    *[("4", "amy", "Good day, café!")] * 6,
    *[("4", "bob", "GOOD")] * 4,
    *[("0", "bob", "good bad good day !")] * 6,
    *[("0", "few", "day")] * 3,
]


def sent140(folder: Path, tweets: list[tuple[str, str, str]] = TWEETS, vectors: dict[str, Any] = VECTORS) -> Path:
    (folder / "sent140").mkdir(exist_ok=True)
    with (folder / "sent140" / Sent140().file).open("w", encoding="latin-1", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        for number, (polarity, user, text) in enumerate(tweets):
            writer.writerow([polarity, number, "Mon Apr 06 22:19:45 PDT 2009", "NO_QUERY", user, text])
    lines = [" ".join([word, *map(str, numbers)]) for word, numbers in vectors.items()]
    (folder / "sent140" / Sent140().glove).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


SECTION = Sent140(min_samples=5, length=4)


def test_words_are_lower_case_and_signs_stand_alone():
    assert words("Good day,  CAFÉ's!!") == ["good", "day", ",", "café", "'", "s", "!", "!"]


def test_the_users_with_most_tweets_are_clients(tmp_path):
    sent140(tmp_path)
    header = SECTION.check(3, tmp_path)
    assert (header.clients, header.train, header.test) == (None, 8 + 5 + 5, 2 + 1 + 1)
    assert (header.shapes, header.classes) == (((4, 3),), 2)
    federation = SECTION.federate(3, 0, tmp_path)
    assert federation.train_sizes.tolist() == [8, 5, 5]  # bob; then amy before zoe
    assert federation.test_sizes.tolist() == [2, 1, 1]
    assert federation.server_test() is None
    zero, good, day, bang = [0.0] * 3, VECTORS["good"], VECTORS["day"], VECTORS["!"]
    amy, zoe = federation.client(1), federation.client(2)
    assert amy.train_features.dtype == np.float32
    assert amy.train_features.tolist() == [[good, day, zero, zero]] * 5  # a comma and a café have no vector
    assert (amy.train_labels.tolist(), amy.test_labels.tolist()) == ([1] * 5, [1])
    assert zoe.test_features.tolist() == [[zero, day, zero, zero]]
    assert zoe.train_labels.tolist() == [0] * 5
    bob = federation.client(0)
    wanted = {1: [good, zero, zero, zero], 0: [good, zero, good, day]}
    assert bob.train_features.tolist() == [wanted[label] for label in bob.train_labels.tolist()]
    longer = Sent140(min_samples=5, length=5).federate(3, 0, tmp_path).client(0)
    assert longer.train_features[longer.train_labels == 0][0].tolist() == [good, zero, good, day, bang]


def test_the_split_of_a_users_tweets_is_keyed_by_the_seed(tmp_path):
    sent140(tmp_path)
    tests = [tuple(SECTION.federate(2, seed, tmp_path).test_parts[0]) for seed in range(8)]
    assert len(set(tests)) > 3
    assert tests[5] == tuple(SECTION.federate(2, 5, tmp_path).test_parts[0])
    federation = SECTION.federate(2, 5, tmp_path)
    assert sorted([*federation.train_parts[0], *federation.test_parts[0]]) == list(range(10))


def test_mixed_tweets_are_the_same_and_as_many_each(tmp_path):
    sent140(tmp_path)
    section = Sent140(min_samples=5, length=4, mixed=True)
    own, mixed = SECTION.federate(3, 0, tmp_path), section.federate(3, 0, tmp_path)
    assert (mixed.train_sizes.tolist(), mixed.test_sizes.tolist()) == ([8, 5, 5], [2, 1, 1])
    pairs = [
        sorted(
            (*row.tolist(), label) for rows, labels in zip(each.tokens, each.labels) for row, label in zip(rows, labels)
        )
        for each in (own, mixed)
    ]
    assert pairs[0] == pairs[1]
    assert {*mixed.labels[1].tolist()} == {0, 1}  # amy wrote positive tweets alone
    assert any((section.federate(3, 1, tmp_path).tokens[0] != mixed.tokens[0]).ravel())


def test_only_the_most_frequent_words_are_known(tmp_path):
    sent140(tmp_path)
    section = Sent140(min_samples=5, length=4, vocabulary=2)  # of bob alone: good 16 times; bad, day and ! 6 times
    federation = section.federate(1, 0, tmp_path)
    assert federation.vectors.tolist() == [[0.0] * 3, VECTORS["good"], VECTORS["!"]]


def test_too_few_users_are_refused(tmp_path):
    sent140(tmp_path)
    refused_by_all(
        SECTION,
        tmp_path,
        "clients: expected 1 … 3, the users of at least data.min_samples = 5",
        "did you mean 3",
        clients=4,
    )
    refused_by_all(SECTION, tmp_path, "clients: expected at least 1, got 0", clients=0)


@pytest.mark.parametrize(
    ("vectors", "said"),
    [
        ({}, "vocabulary mismatch, none of the 6 words"),
        ({"good": [1.0, 2.0], "day": [1.0]}, "line 2 has 1 values, expected 2 as in line 1"),
        ({"4": [2], "good": [1.0, 2.0]}, "line 2 has 2 values, expected 1 as in line 1"),
        ({"a": [2], "good": ["1.0x"]}, "line 2 ('good'): expected a word and finite numbers"),
        ({"a": [2], "good": ["nan"]}, "line 2 ('good'): expected a word and finite numbers"),
        ({"good": []}, "line 1 ('good'): expected a word and finite numbers"),
        ({"Good": [1.0], "Day": [2.0]}, "vocabulary mismatch, none of the 6 words"),
    ],
)
def test_wrong_word_vectors_are_refused(vectors, said, tmp_path):
    path = sent140(tmp_path, vectors=vectors) / "sent140" / "glove.6B.100d.txt"
    refused_by_all(SECTION, tmp_path, f"{path}: {said}")


@pytest.mark.parametrize("name", [Sent140().file, Sent140().glove])
@pytest.mark.parametrize("lost", [1, 3])
def test_lines_that_break_off_are_refused(name, lost, tmp_path):
    path = sent140(tmp_path) / "sent140" / name
    path.write_bytes(path.read_bytes()[:-lost])
    refused_by_all(SECTION, tmp_path, f"{path}: truncated: its last line is not complete")


def test_word_vectors_that_are_missing_or_no_text_are_refused(tmp_path):
    path = sent140(tmp_path) / "sent140" / "glove.6B.100d.txt"
    path.write_bytes(b"good 1.0\n\xff\xfe 2.0\n")
    refused_by_all(SECTION, tmp_path, f"{path}: truncated or damaged, expected text in UTF-8")
    path.unlink()
    refused_by_all(SECTION, tmp_path, f"{path}: no such file")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('"0","1","Mon","NO_QUERY","amy"\n', "line 27 has 5 columns, expected 6 (polarity, id,"),
        ('"3","1","Mon","NO_QUERY","amy","x"\n', "line 27: polarity '3', expected 0, 2 or 4"),
        ('"0","1","Mon","NO_QUERY","amy","' + "x" * 140_000 + '"\n', "truncated or damaged, expected CSV"),
    ],
)
def test_malformed_tweets_are_refused(line, said, tmp_path):
    path = sent140(tmp_path) / "sent140" / Sent140().file
    path.write_text(path.read_text("latin-1") + line, "latin-1")
    refused_by_all(SECTION, tmp_path, f"{path}: {said}")
    path.unlink()
    refused_by_all(SECTION, tmp_path, f"{path}: no such file")


# --- parts of unequal sizes ---------------------------------------------------------------------------------


@given(st.integers(1, 20), st.sampled_from(["log-normal", "uniform"]), st.floats(0.01, 1.0), seeds)
def test_thinned_parts_keep_every_class_and_the_largest_share_all(clients, law, spread, seed):
    pool = rng(seed).integers(0, 6, 20 * clients)
    parts = partition.iid(pool, clients, rng(seed))
    kept = partition.thin(pool, parts, law, spread, rng(seed))
    assert all(set(own) <= set(part) for own, part in zip(kept, parts))
    assert all((np.diff(own) > 0).all() for own in kept)
    assert all(set(pool[own]) == set(pool[part]) for own, part in zip(kept, parts))
    assert max(map(len, kept)) == 20


def test_shares_follow_their_law():
    pool = np.zeros(400 * 2000, dtype=np.int64)
    parts = np.split(np.arange(len(pool)), 400)
    sizes = np.array([len(part) for part in partition.thin(pool, parts, "uniform", 0.4, rng(0))])
    assert sizes.max() == 2000
    assert 1200 <= sizes.min() < 1220
    assert sizes.mean() == pytest.approx(1600, rel=0.02)
    logs = np.log([len(part) for part in partition.thin(pool, parts, "log-normal", 0.5, rng(0))])
    assert logs.std() == pytest.approx(0.5, rel=0.08)
    assert np.median(logs) == pytest.approx(logs.mean(), abs=0.08)


@pytest.mark.parametrize("spread", [750.0, 1000.0, 1e300])
def test_any_spread_leaves_the_largest_part_whole(spread):
    pool = np.zeros(200, dtype=np.int64)
    parts = np.split(np.arange(len(pool)), 10)
    with np.errstate(over="raise", invalid="raise"):
        kept = partition.thin(pool, parts, "log-normal", spread, rng(0))
    largest = int(rng(0).standard_normal(10).argmax())
    assert [len(own) for own in kept] == [20 if i == largest else 1 for i in range(10)]


def test_shares_are_those_of_the_law():
    pool = np.zeros(100 * 1000, dtype=np.int64)
    parts = np.split(np.arange(len(pool)), 100)
    law = np.exp(0.5 * rng(7).standard_normal(100))
    kept = partition.thin(pool, parts, "log-normal", 0.5, rng(7))
    assert [len(own) for own in kept] == [round(share * 1000) for share in law / law.max()]


def test_equal_sizes_change_nothing_and_others_only_training_parts():
    keys = {"partition": "shards", "classes": 3}
    plain, named, thinned, again = (
        Digits(**keys, **more).federate(8, 2, None)
        for more in ({}, {"sizes": "equal"}, *[{"sizes": "log-normal", "spread": 0.8}] * 2)
    )
    for i in range(8):
        assert np.array_equal(plain.train_parts[i], named.train_parts[i])
        assert np.array_equal(plain.test_parts[i], thinned.test_parts[i])
        assert np.array_equal(thinned.train_parts[i], again.train_parts[i])
        assert set(thinned.train_parts[i]) <= set(plain.train_parts[i])
        assert len(set(thinned.client(i).train_labels)) == 3
    assert np.array_equal(thinned.train_sizes, [len(part) for part in thinned.train_parts])
    assert (thinned.train_sizes < plain.train_sizes).sum() == 7


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"spread": 0.5}, "data.spread: expected nothing with data.sizes = 'equal', got 0.5"),
        ({"sizes": "uniform"}, "data.spread: expected a number above 0 with data.sizes = 'uniform', got nothing"),
        (
            {"sizes": "uniform", "spread": 1.5},
            "data.spread: expected 0.0 … 1.0, the least share being 1 - spread, got 1.5",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(keys, said):
    refused_by_all(Digits(**keys), None, said)
