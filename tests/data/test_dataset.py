"""PyTorch datasets by import path, and samples of several tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpcfl
from helpers import datasets
from hpcfl.base.errors import UsageError
from hpcfl.data import source_class
from hpcfl.data.base import EXACT, packed
from hpcfl.testing.runs import play, same, toml

PLAIN: dict[str, Any] = {
    "rounds": 2,
    "clients": 4,
    "seed": 3,
    "evaluate": {"every": 1},
    "algorithm": {"name": "fedavg", "batch": 4, "lr": 0.01},
    "speed": {"model": "none"},
}
SEVERAL = PLAIN | {
    "data": {"name": "helpers.datasets:Pairs", "test_share": 0.25},
    "model": {"name": "helpers.datasets:Both"},
}


def source(name: str, **keys: Any) -> Any:
    name = f"helpers.datasets:{name}"
    return source_class(name).from_table({"name": name, **keys}, "data")


def test_images_are_cut_like_any_pool(tmp_path: Path) -> None:
    images = source("Images", partition="shards", classes=2)
    header = images.check(4, tmp_path)
    assert (header.train, header.test, header.shapes, header.classes) == (40, 20, ((1, 6, 5),), 4)
    federation = images.federate(4, 0, tmp_path)
    seen = []
    for client in range(4):
        data = federation.client(client)
        assert len(set(data.train_labels.tolist())) == 2
        for x, y in zip(data.train_features, data.train_labels):
            (place,) = np.flatnonzero((datasets.pixels(True) == np.round(x[0] * 255)).all((1, 2)))
            assert place % 4 == y
            seen.append(place)
    assert sorted(seen) == list(range(40))
    x, y = federation.server_test()
    np.testing.assert_array_equal(x[:, 0], datasets.pixels(False).astype(np.float32) / np.float32(255))
    assert y.tolist() == [i % 4 for i in range(20)]
    assert source("Images", arguments={"classes": 2}).check(4, tmp_path).classes == 2


def test_a_dataset_without_a_test_part_gives_a_share() -> None:
    held = source("Stream", test_share=0.25).federate(3, 1, None)
    x, y = held.server_test()
    assert (len(x), held.train_sizes.tolist(), x.shape[1:], y.dtype) == (3, [3, 3, 3], (3,), np.int64)
    again, other = (source("Stream", test_share=0.25).federate(3, seed, None).server_test()[0] for seed in (1, 2))
    np.testing.assert_array_equal(x, again)  # what it draws is keyed
    assert not np.array_equal(x, other)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    source("Stream").federate(3, 1, None)
    assert torch.equal(torch.get_rng_state(), before)


def test_several_tensors_are_rows_of_numbers() -> None:
    words, numbers = np.arange(6).reshape(2, 3), np.array([[0.5], [1.5]], np.float32)
    rows, pieces = packed([words, numbers])
    assert rows.tolist() == [[0, 1, 2, 0.5], [3, 4, 5, 1.5]]
    assert [piece.tokens for piece in pieces] == [True, False]
    assert packed([words, words])[0].dtype == np.int64
    assert packed([words[:0], numbers[:0]])[0].shape == (0, 4)
    with pytest.raises(UsageError, match=r"^tensor 0 of a sample: expected integers of ±2\^24 beside real numbers"):
        packed([words + EXACT, numbers])


def test_a_module_of_several_tensors_runs_and_predicts(tmp_path: Path) -> None:
    run = hpcfl.run(SEVERAL, out=tmp_path / "run", quiet=True)
    lost = run.data["test_loss"].values
    assert lost[-1] < lost[0]
    samples = [datasets.Pairs()[i][0] for i in range(5)]
    tensors = tuple(torch.stack([torch.as_tensor(sample[k]) for sample in samples]) for k in range(3))
    plain = datasets.Both(((3,), (2, 2), ()), 1)
    plain.load_state_dict(run.state_dict(), strict=True)
    plain.eval()
    with torch.no_grad():
        wanted = plain(*tensors[:2], tensors[2].float())[:, 0].numpy()
        np.testing.assert_allclose(run.module()(*tensors[:2], tensors[2].float())[:, 0].numpy(), wanted, rtol=1e-6)
    (first, *_) = iter(run.models)
    np.testing.assert_allclose(first.predict(tuple(np.asarray(each) for each in tensors)), wanted, rtol=1e-6)


def test_clients_in_memory_may_hold_tuples() -> None:
    words, numbers = np.arange(6).reshape(2, 3), np.ones((2, 1), np.float32)
    part = hpcfl.ClientData((words, numbers), np.zeros(2, np.int64), (words[:1], numbers[:1]), np.zeros(1, np.int64))
    held = hpcfl.InMemory.of([part, part], 2)
    assert held.shapes == [(4,), (4,)]
    assert [piece.shape for piece in held.header.pieces] == [(3,), (1,)]
    assert held.client(1).test_features.tolist() == [[0, 1, 2, 1]]


def test_clients_in_memory_have_types_that_models_take() -> None:
    x, y = np.arange(6.0).reshape(2, 3), np.array([0, 1], np.int32)
    held = hpcfl.InMemory.of([hpcfl.ClientData(x, y, x[:1], y[:1])], 2)
    data = held.client(0)
    assert (data.train_features.dtype, data.test_labels.dtype) == (np.float32, np.int64)
    assert (held.header.tokens, held.header.targets, held.header.shapes) == (False, False, ((3,),))


@pytest.mark.mpi
def test_one_rank_equals_n_with_samples_of_several_tensors(world: Any, solo: Any, shared_dir: Path) -> None:
    one = play(world, SEVERAL, shared_dir / "one", None)
    same(play(world, SEVERAL, shared_dir / "ranks", world.comm), one)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ragged": ({"name": "ragged"}, "features: sample 1: expected numbers of shape (2,) as the first one's, got "),
    "no-labels": ({"name": "unlabelled"}, "data.name = 'helpers.datasets:unlabelled': expected samples (features, "),
    "empty": ({"name": "empty"}, "it has no samples, expected at least 1"),
    "no-call": ({"name": "COUNT"}, "expected a Source, a Dataset or what makes one, got 40"),
    "argument": ({"name": "Pairs", "arguments": {"word": 3}}, "TypeError: "),
    "share": (
        {"name": "Images", "test_share": 0.5},
        "data.test_share: expected 0.0, since helpers.datasets:Images has",
    ),
    "augment": (
        {"name": "Stream", "augment": True},
        "data.augment: expected false, since samples of helpers.datasets:",
    ),
    "chain": ({"name": "Pairs"}, "data: samples are tuples, model.name = 'mlp' takes arrays of real numbers: expected"),
    "targets": ({"name": "Pairs", "partition": "shards", "classes": 2}, "'iid' or 'file', since labels are real numbe"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_one_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hpcfl.commands.cli import main

    keys, said = REFUSED[case]
    values = PLAIN | {"clients": 2, "model": {"name": "mlp"}}
    data = {**keys, "name": f"helpers.datasets:{keys['name']}"}
    arguments = data.pop("arguments", {})
    file = toml(values | {"data": data}, tmp_path / "a.toml")
    if arguments:
        file.write_text(f"{file.read_text()}\n[data.arguments]\nword = 3\n")
    assert main(["check", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert said in lines[0]
