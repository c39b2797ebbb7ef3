from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from test_files import refused_by_all
from test_sources import refused, sound, store

from hpcfl.data import hdf5
from hpcfl.data.hdf5 import Hdf5
from hpcfl.data.usps import Usps

GROUP = "clients/a10/train"


def section(**keys: Any) -> Hdf5:
    return Hdf5(file="mine.h5", **keys)


# --- features that are not finite -----------------------------------------------------------------------------


def holding(value: float, folder: Path, dtype: str = "f8") -> Path:
    """A file whose client number 2 holds the value in training sample 3."""
    content = sound()
    content[f"{GROUP}/features"] = content[f"{GROUP}/features"].astype(dtype)
    content[f"{GROUP}/features"][3, 1] = value
    return store(folder, content)


NOT_FINITE = [(np.nan, "f8", "nan"), (-np.inf, "f4", "-inf"), (np.inf, "f2", "inf"), (4e38, "f8", "inf")]


@pytest.mark.parametrize(("value", "dtype", "said"), NOT_FINITE)
def test_features_that_are_not_finite_are_refused_with_client_and_sample(value, dtype, said, tmp_path):
    holding(value, tmp_path, dtype)
    line = f"{tmp_path / 'mine.h5'}: {GROUP}/features: sample 3 holds {said}, expected finite 32-bit numbers"
    assert refused(section().check, 3, tmp_path) == line
    federation = section().federate(3, 0, tmp_path)
    assert refused(federation.client, 2) == line
    assert federation.client(1).train_features.shape == (4, 3)


def test_large_files_are_checked_where_they_are_read(tmp_path, monkeypatch):
    holding(np.nan, tmp_path)
    features = 6 * (3 + 3 + 5)
    monkeypatch.setattr(hdf5, "VERIFIED", 4 * features - 1)
    assert section().check(3, tmp_path).clients == 3
    monkeypatch.setattr(hdf5, "VERIFIED", 4 * features)
    refused(section().check, 3, tmp_path)


def test_a_global_test_set_that_is_not_finite_is_refused(tmp_path):
    test = {"test/features": [[0.0, np.nan]], "test/labels": [1]}
    store(tmp_path, sound({"0": 2}) | test)
    assert "test/features: sample 0 holds nan" in refused(section().check, 1, tmp_path)
    assert "test/features: sample 0 holds nan" in refused(section().federate(1, 0, tmp_path).server_test)


# --- labels ---------------------------------------------------------------------------------------------------


def regression(folder: Path, **changes: Any) -> Path:
    """A file whose labels are real numbers."""
    content = sound()
    content = {name: v / 4 - 0.5 if name.endswith("labels") else v for name, v in content.items()}
    return store(folder, content | changes)


def test_labels_that_are_real_numbers_are_targets(tmp_path):
    regression(tmp_path)
    header = section().check(3, tmp_path)
    assert (header.train, header.test, header.classes) == (12, 6, 1)
    federation = section().federate(3, 0, tmp_path)
    client = federation.client(0)
    assert federation.classes == 1
    assert client.train_labels.dtype == client.test_labels.dtype == np.float32
    assert client.train_labels.tolist() == [-0.5, -0.25, 0.0, 0.25]


def test_targets_beside_classes_are_refused(tmp_path):
    regression(tmp_path, **{f"{GROUP}/labels": np.arange(4)})
    refused_by_all(
        section(),
        tmp_path,
        "clients/a1/train/labels are float64 ()",
        f"{GROUP}/labels int64 (); expected integers",
        clients=3,
    )


@pytest.mark.parametrize(("value", "told"), [(np.nan, "nan"), (np.inf, "inf"), (1e39, "inf")])
def test_targets_that_are_not_finite_are_refused(value, told, tmp_path):
    regression(tmp_path, **{f"{GROUP}/labels": np.array([0.0, 0.5, value, 1.0])})
    refused_by_all(section(), tmp_path, f"mine.h5: {GROUP}/labels: sample 2 holds {told}, expected finite", clients=3)


def test_the_number_of_classes_may_be_stated(tmp_path):
    store(tmp_path, sound())
    assert section().check(3, tmp_path).classes == 4
    assert section(labels=6).check(3, tmp_path).classes == 6
    assert section(labels=6).federate(3, 0, tmp_path).classes == 6
    line = refused_by_all(section(labels=3), tmp_path, "mine.h5: clients/a1/train/labels hold 3", clients=3)
    assert line.startswith("data.labels: expected at least 4, since")
    assert line.endswith("got 3; did you mean 4?")
    regression(tmp_path)
    refused_by_all(section(labels=3), tmp_path, "data.labels: expected nothing, since", "labels are float", clients=3)


def test_features_of_no_size_are_refused(tmp_path):
    store(tmp_path, sound({"0": 2, "1": 0}))
    refused_by_all(section(), tmp_path, "clients/1/train/features are (4, 0), expected at least 1 per sample")


@pytest.mark.parametrize("part", ["features", "labels"])
def test_a_data_set_without_a_shape_is_refused(part, tmp_path):
    store(tmp_path, sound() | {f"{GROUP}/{part}": h5py.Empty("f4")})
    refused_by_all(section(), tmp_path, f"mine.h5: {GROUP}/{part} is empty, expected numbers", clients=3)


# --- pruned features ------------------------------------------------------------------------------------------

WIDTH, CLIENTS = 40, 60


def wide(folder: Path) -> Path:
    """A file of clients whose features are their own numbers, so that they tell which of them are kept."""
    content = sound({str(i): WIDTH for i in range(CLIENTS)})
    rows = {name: np.tile(np.arange(WIDTH), (len(v), 1)) for name, v in content.items() if name.endswith("features")}
    return store(folder, content | rows)


def test_pruned_features_are_few_random_and_keyed(tmp_path):
    wide(tmp_path)
    one, again, other = (section(prune=0.25).federate(CLIENTS, seed, tmp_path) for seed in (3, 3, 4))
    kept = [one.client(i).train_features for i in range(CLIENTS)]
    assert one.shapes == again.shapes == [own.shape[1:] for own in kept]
    assert all((own == own[0]).all() and (np.diff(own[0]) > 0).all() for own in kept)
    assert all(own.flags.c_contiguous for own in kept)  # sums of columns would have other bits
    for i in range(CLIENTS):
        assert np.array_equal(one.client(i).test_features[0], kept[i][0])
        assert np.array_equal(again.client(i).train_features, kept[i])
    removed = [WIDTH - shape[0] for shape in one.shapes]
    assert set(removed) == set(range(11))  # 60 draws of 11 numbers: all of them come, 10 of 40 being a quarter
    gone = [set(range(WIDTH)) - set(own[0]) for own in kept]
    assert len({frozenset(own) for own in gone}) > 50
    assert set().union(*gone) == set(range(WIDTH))
    assert other.shapes != one.shapes


def test_no_pruning_changes_nothing(tmp_path):
    wide(tmp_path)
    assert section().federate(CLIENTS, 0, tmp_path).shapes == [(WIDTH,)] * CLIENTS
    assert section(prune=0.02).federate(CLIENTS, 0, tmp_path).shapes == [(WIDTH,)] * CLIENTS  # 0.8 of a feature


@pytest.mark.parametrize(("prune", "width", "most"), [(0.29, 100, 29), (0.7, 10, 7), (0.999, 1000, 999), (0.9, 1, 0)])
def test_the_share_is_rounded_down(prune, width, most):
    assert section(prune=prune)._most(width) == most
    assert section(prune=1 - 1e-15)._most(width) == width - 1


def test_the_header_tells_how_pruning_makes_shapes_unequal(tmp_path):
    wide(tmp_path)
    assert section(prune=0.25).check(CLIENTS, tmp_path).shapes == ((40,), *[(30,)] * (CLIENTS - 1))
    assert section(prune=0.02).check(CLIENTS, tmp_path).shapes == ((40,),)
    store(tmp_path, sound({"0": 20, "1": 40}))
    assert section(prune=0.25).check(2, tmp_path).shapes == ((20,), (40,))


def test_pruning_needs_features_of_one_axis_and_no_global_test_set(tmp_path):
    images = {f"clients/0/{part}/features": np.ones((n, 2, 2)) for part, n in (("train", 4), ("test", 2))}
    store(tmp_path, sound({"0": 4, "1": 4}) | images)
    said = "has features of shape (2, 2) in clients/0/train, not one axis, got 0.1; did you mean 0.0?"
    refused_by_all(section(prune=0.1), tmp_path, "data.prune: expected 0, since", said)
    store(tmp_path, sound({"0": 4, "1": 4}) | {"test/features": np.ones((2, 4)), "test/labels": [0, 1]})
    refused_by_all(section(prune=0.1), tmp_path, "data.prune: expected 0, since", "global test set", "did you mean 0.0")


# --- data that are not in the file itself ---------------------------------------------------------------------

ALIEN = "other.h5"


def linked(name: str, link: h5py.SoftLink | h5py.ExternalLink) -> Callable[[h5py.File], None]:
    """Move what is there to another name, and put a link in its place."""

    def change(file: h5py.File) -> None:
        file.move(name, "moved")
        file[name] = link

    return change


Rows = slice | list[int]


def virtual(*sources: tuple[str, str, Rows], name: str = f"{GROUP}/features") -> Callable[[h5py.File], None]:
    """Map rows of 4 from the first rows of sources (file, name, where to), after the data set was moved."""

    def change(file: h5py.File) -> None:
        if name in file:
            file.move(name, "moved")
        layout = h5py.VirtualLayout((4, 5), "f8")
        for path, source, rows in sources:
            count = len(np.arange(4)[rows])
            layout[rows] = h5py.VirtualSource(path, source, (count + 1, 5))[:count]
        file.create_virtual_dataset(name, layout, fillvalue=0)

    return change


ALL = slice(4)


def raw(file: h5py.File) -> None:
    del file[f"{GROUP}/labels"]
    file.create_dataset(f"{GROUP}/labels", (4,), "i1", external=[("labels.bin", 0, 4)])


def nested(file: h5py.File) -> None:
    virtual((ALIEN, f"{GROUP}/features", ALL), name="half")(file)
    virtual((".", "half", ALL))(file)


FEATURES = f"{GROUP}/features"
PLACES = [
    (linked("clients", h5py.SoftLink("/moved")), "mine.h5: clients is a soft link"),
    (linked("clients/a10", h5py.ExternalLink(ALIEN, "clients/a10")), "mine.h5: clients/a10 is an external link"),
    (linked(GROUP, h5py.SoftLink("/moved")), f"mine.h5: {GROUP} is a soft link"),
    (linked(FEATURES, h5py.ExternalLink(ALIEN, FEATURES)), f"mine.h5: {FEATURES} is an external link"),
    (lambda file: file.update({"test": h5py.SoftLink("/none")}), "mine.h5: test is a soft link"),
    (raw, f"mine.h5: {GROUP}/labels keeps its numbers in 'labels.bin'"),
    (virtual((ALIEN, FEATURES, ALL)), f"mine.h5: {FEATURES} is virtual and maps '{FEATURES}' of '{ALIEN}'"),
    (nested, f"mine.h5: half is virtual and maps '{FEATURES}' of '{ALIEN}'"),
    (virtual((".", "moved", slice(2)), (".", "none", slice(2, 4))), f"{FEATURES} is virtual, but its source 'none' is"),
    (virtual((".", "clients/a2/test/features", ALL)), "source clients/a2/test/features is (2, 3), not what is mapped"),
    (virtual((".", FEATURES, ALL)), f"mine.h5: {FEATURES} is virtual, but its source '{FEATURES}' is missing or the"),
    (
        virtual((".", "moved", slice(3)), (".", "moved", [0, 2])),
        f"mine.h5: {FEATURES} is virtual, but no source is mapped to 5 of its 20 numbers",
    ),
]


@pytest.mark.parametrize(("change", "said"), PLACES, ids=[said.split(":")[-1] for _, said in PLACES])
def test_data_that_are_not_in_the_file_itself_are_refused(change, said, tmp_path):
    (store(tmp_path, sound()) / "mine.h5").rename(tmp_path / ALIEN)
    store(tmp_path, sound())
    (tmp_path / "labels.bin").write_bytes(bytes(4))
    federation = section().federate(3, 0, tmp_path)
    with h5py.File(tmp_path / "mine.h5", "r+") as file:
        change(file)
    refused_by_all(section(), tmp_path, said, clients=3)
    if GROUP in said:
        assert said in refused(federation.client, 2)  # when read, too


def test_a_virtual_data_set_of_the_same_file_is_read(tmp_path):
    store(tmp_path, sound() | {"one": np.full((3, 5), 7.0), "100%": np.arange(45.0).reshape(9, 5)})
    with h5py.File(tmp_path / "mine.h5", "r+") as file:
        virtual((".", "one", slice(0, 4, 2)), (".", "100%%", slice(1, 4, 2)), name="both")(file)
        layout = h5py.VirtualLayout((4, 5), "f8")
        layout[...] = h5py.VirtualSource(".", "/both", (4, 5))
        del file[FEATURES]
        file.create_virtual_dataset(FEATURES, layout)
    assert section().check(3, tmp_path).train == 12
    assert section().federate(3, 0, tmp_path).client(2).train_features[:, 0].tolist() == [7, 0, 7, 5]


def test_links_in_the_file_of_usps_are_refused_too(tmp_path):
    (tmp_path / "usps").mkdir()
    with h5py.File(tmp_path / "usps" / "usps.h5", "w") as file:
        file["elsewhere/data"], file["elsewhere/target"] = np.zeros((9, 256)), np.arange(9)
        file["train"], file["test"] = file["elsewhere"], h5py.SoftLink("/elsewhere")
    assert refused(Usps().check, 2, tmp_path) == (
        f"{tmp_path / 'usps' / 'usps.h5'}: test is a soft link, expected the data themselves"
    )


# --- pixels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "expected"), [("unit", [0, 0.2, 1]), ("centred", [-1, -0.6, 1])])
@pytest.mark.parametrize("dtype", ["u1", "f8"])
def test_pixels_are_scaled_as_those_of_other_sources(scale, expected, dtype, tmp_path):
    rows = {name: np.array([[0, 51, 255]] * len(v), dtype) for name, v in sound({"0": 3}).items() if "features" in name}
    content = sound({"0": 3}) | rows
    store(tmp_path, content | {"test/features": rows["clients/0/test/features"], "test/labels": [0, 1]})
    federation = section(scale=scale).federate(1, 0, tmp_path)
    client, whole = federation.client(0), federation.server_test()
    for features in (client.train_features, client.test_features, whole[0]):
        assert features.dtype == np.float32
        np.testing.assert_array_equal(features, np.tile(np.float32(expected), (len(features), 1)))
    assert section(scale=scale).check(1, tmp_path).ranges == ((expected[0], expected[-1]),)
    assert section().check(1, tmp_path).ranges == ((0, 255),)
    store(tmp_path, content)
    pruned = section(scale=scale, prune=0.5)
    assert pruned.check(1, tmp_path).ranges == ()
    kept = {tuple(pruned.federate(1, seed, tmp_path).client(0).train_features[0]) for seed in range(9)}
    assert len(kept) > 1
    assert all(set(row) <= set(np.float32(expected)) for row in kept)


@pytest.mark.parametrize("value", [-1.0, 256.0, np.nan])
def test_numbers_that_are_no_pixels_are_refused_with_a_scale(value, tmp_path, monkeypatch):
    store(tmp_path, sound({"0": 3, "1": 3}) | {"test/features": [[0.0, 1, 2], [3, value, 5]], "test/labels": [0, 1]})
    line = f"{tmp_path / 'mine.h5'}: test/features: sample 1 holds {value}, expected 0 to 255 as data.scale = 'unit'"
    assert refused(section(scale="unit").check, 2, tmp_path) == line
    monkeypatch.setattr(hdf5, "VERIFIED", 0)
    assert section(scale="unit").check(2, tmp_path).ranges == ()
    assert refused(section(scale="unit").federate(2, 0, tmp_path).server_test) == line
