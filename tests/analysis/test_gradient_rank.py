"""Approximate ranks of a network's gradient: derivatives against autograd, ranks by hand, and the script as a whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from gradient_ranks.network import Network
from gradient_ranks.sharing import Draw, gathered, shared, slices
from gradient_ranks.slices import (
    approximate_ranks,
    derivatives,
    drawn_samples,
    drawn_weights,
    perturbed,
    rows_needed,
)
from torch import nn

from helpers.scripts import script


def ranks_of(*matrices: Any) -> list[int]:
    return approximate_ranks(np.linalg.svd(np.array(matrices, dtype=float), compute_uv=False)).tolist()


def test_ranks_by_hand() -> None:
    # squares of the diagonals: 9 1 0 -> 9 of 10 is just enough; 1 1 1 -> all; 8 1 1 -> two; 95 4 1 -> one
    diagonals = [(3, 1, 0), (1, 1, 1), (np.sqrt(8), 1, 1), (2, np.sqrt(95), 1)]
    assert ranks_of(*(np.diag(values) for values in diagonals)) == [1, 3, 2, 1]
    assert ranks_of(np.outer([1, 2, 3], [4, -5, 6]), np.zeros((3, 3)), np.eye(3) * 1e-200) == [1, 0, 3]
    assert approximate_ranks(np.array([[3.0, 2.0, 1.0]]), share=0.95).tolist() == [3]  # squares: 9, 13, 14


def test_rows_by_hand() -> None:
    # two alike rows: rank 1, but neither holds 90 % by itself; one large row; zero
    alike, one = np.outer([1, 1, 0], [1, 2, 3]), np.array([[9, 0, 0], [0, 1, 0], [0, 0, 1]])
    found = np.array([alike, one, np.zeros((3, 3))], dtype=float)
    assert ranks_of(*found) == [1, 1, 0]
    assert rows_needed(found).tolist() == [2, 1, 0]


def plain(shape: tuple[int, int, int], filters: list[int], hidden: list[int], activation: str) -> nn.Sequential:
    """The network as modules of torch."""
    act = {"logistic": nn.Sigmoid, "relu": nn.ReLU}[activation]
    channels, height, width = shape
    parts: list[nn.Module] = []
    for after in filters:
        parts += [nn.Conv2d(channels, after, 3, padding=1), act()]
        channels = after
    if filters:
        parts.append(nn.MaxPool2d(2))
        height, width = height // 2, width // 2
    parts.append(nn.Flatten())
    sizes = [channels * height * width, *hidden]
    for before, after in zip(sizes, hidden):
        parts += [nn.Linear(before, after), act()]
    return nn.Sequential(*parts, nn.Linear(sizes[-1], 3)).double()


@pytest.mark.parametrize("activation", ["logistic", "relu"])
@pytest.mark.parametrize(("filters", "hidden"), [([], [5]), ([], [5, 4]), ([2, 3], [5])])
def test_derivatives_are_those_of_single_samples(filters: list[int], hidden: list[int], activation: str) -> None:
    shape = (2, 5, 4)
    network, other = Network(shape, filters, hidden, 3, activation), plain(shape, filters, hidden, activation)
    rng = np.random.default_rng(1)
    theta, x, y = rng.normal(size=network.size), rng.random((6, *shape)), np.array([0, 1, 2, 2, 1, 0])
    assert network.size == sum(values.numel() for values in other.parameters())
    nn.utils.vector_to_parameters(torch.from_numpy(theta), other.parameters())
    found = derivatives(network, theta, x, y, np.arange(network.size))
    for i, label in enumerate(y):
        other.zero_grad()
        nn.functional.cross_entropy(other(torch.from_numpy(x[i : i + 1])), torch.tensor([label])).backward()
        expected = torch.cat([values.grad.flatten() for values in other.parameters()]).numpy()
        np.testing.assert_allclose(found[:, i], expected, rtol=1e-10, atol=1e-14)
    some = np.array([3, network.size - 9, network.size - 1])
    np.testing.assert_array_equal(derivatives(network, theta, x, y, some), found[some])  # to the bit


def test_the_networks_of_the_paper() -> None:
    mnist = Network((1, 28, 28), [], [784], 10, "logistic")
    cifar = Network((3, 32, 32), [40, 40], [150], 10, "logistic")
    assert (mnist.size, cifar.size) == (623_290, 1_553_220)
    places = np.array([0, 785, 784 * 784, mnist.size - 11, mnist.size - 1])
    expected = ["fc1.weight[0,0]", "fc1.weight[1,1]", "fc1.bias[0]", "fc2.weight[9,783]", "fc2.bias[9]"]
    assert mnist.names(places) == expected
    assert cifar.names(np.array([27 * 39 + 26, 1120])) == ["conv1.weight[39,2,2,2]", "conv2.weight[0,0,0,0]"]
    theta = mnist.initial(1)
    limit = np.sqrt(6 / 1568)
    assert 0.999 * limit < np.abs(theta[: 784 * 784]).max() <= limit
    assert not theta[784 * 784 : 784 * 785].any()


def test_what_is_drawn() -> None:
    theta = np.zeros(20_000, dtype=np.float32)
    theta[::2] = 0.01
    noise = (perturbed(1, theta, 3) - theta) / 0.005  # |theta|_1 / p = 0.005
    assert abs(noise.mean()) < 4 / np.sqrt(20_000)
    assert abs(noise.std() - 1) < 4 / np.sqrt(40_000)
    assert abs(np.corrcoef(noise, perturbed(1, theta, 4))[0, 1]) < 4 / np.sqrt(20_000)
    np.testing.assert_allclose(perturbed(1, theta, 3, 2.0) - theta, 0.01 * noise, atol=1e-15)
    np.testing.assert_array_equal(perturbed(1, theta, 3, 0.0), theta)
    places, eligible = drawn_weights(1, theta, 300, 0.005)
    assert eligible == 10_000
    assert len(np.unique(places)) == 300
    assert not (places % 2).any()
    assert set(drawn_weights(1, theta, 300, 0.0)[0] % 2) == {0, 1}
    assert drawn_weights(1, theta[:10], 300, 0.005)[0].tolist() == [0, 2, 4, 6, 8]
    assert np.unique(drawn_samples(1, 50, 50)).tolist() == list(range(50))
    assert len(np.unique(drawn_samples(1, 50, 7))) == 7


@pytest.mark.mpi
def test_slices_are_the_same_however_many_ranks_share_them(world: Any) -> None:
    form = {"shape": [1, 4, 4], "filters": [2], "hidden": [5], "classes": 3, "activation": "logistic"}
    rng = np.random.default_rng(2)
    theta = rng.normal(size=Network(**form).size).astype(np.float32)
    pixels, weights = rng.integers(0, 255, (7, 1, 4, 4), dtype=np.uint8), np.arange(0, theta.size, 5)
    arrays = {"theta": theta, "pixels": pixels, "labels": np.arange(7) % 3, "weights": weights}
    draw = Draw({"network": form, "peak": 255, "seed": 1, "perturbation": 1.0}, arrays)
    told = shared(world.comm, draw if world.rank == 0 else None)
    own, alone = slices(world.comm, told), slices(None, draw)
    assert alone.shape == (len(weights), 7, 7)
    np.testing.assert_array_equal(own, np.array_split(alone, world.size)[world.rank])
    whole = gathered(world.comm, own, len(weights))
    np.testing.assert_array_equal(whole, alone if world.rank == 0 else alone[:0])
    column = derivatives(Network(**form), perturbed(1, theta, 2), pixels / 255, arrays["labels"], weights)
    np.testing.assert_array_equal(alone[:, :, 2], column)


Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the script in this process; return what it printed last, and why it ended if not well."""

    def called(*words: Path | str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["gradient_rank", *map(str, words)])
        error = ""
        try:
            script("gradient_rank").main()
        except SystemExit as end:
            error = str(end)
        return capsys.readouterr().out, error

    return called


def held(path: Path) -> dict[str, Any]:
    with h5py.File(path) as file:
        return {name: values[()] for name, values in file.items()} | dict(file.attrs)


DIGITS = ("--data", "digits", "--hidden", "9", "--epochs", "2", "--lr", "0.02")


def test_a_study_is_written_read_and_gone_on_with(run: Run, tmp_path: Path) -> None:
    out, again, everything = (tmp_path / f"{name}.h5" for name in ("out", "again", "all"))
    line, error = run(*DIGITS, "--samples", "12", "--weights", "150", "--out", out)
    assert error == ""
    found, study = json.loads(line), held(out)
    assert study["slices"].shape == (150, 12, 12)
    np.testing.assert_array_equal(np.linalg.svd(study["slices"], compute_uv=False), study["singular_values"])
    ranks = study["approximate_ranks"]
    np.testing.assert_array_equal(approximate_ranks(study["singular_values"]), ranks)
    there = ranks > 0
    assert found["zero"] == (~there).sum() == (~study["slices"].any((1, 2))).sum()
    assert found["at_most_5"] == pytest.approx((ranks[there] <= 5).mean())
    assert (study["rows_needed"] >= ranks).all()
    assert found["parameters"] == len(study["theta"]) == 64 * 9 + 9 + 9 * 10 + 10
    assert (np.abs(study["theta"][study["weights"]]) >= 0.005).all()
    assert found["spread"] == pytest.approx(np.abs(study["theta"]).mean())
    assert found["train_accuracy"] > 0.5
    assert [study["hidden"].tolist(), study["optimizer"], study["seed"]] == [[9], "adam", 1]
    assert study["names"][-1].decode().startswith("fc2.")

    assert run("--theta", out, "--samples", "12", "--weights", "150", "--out", again)[1] == ""
    repeated = held(again)
    for name in ("theta", "slices", "weights", "samples"):
        np.testing.assert_array_equal(repeated[name], study[name])
    line, error = run("--theta", out, "--samples", "5", "--all-weights", "--weights", "9999", "--out", everything)
    assert json.loads(line)["weights"] == json.loads(line)["eligible"] == len(study["theta"])

    line, error = run("--from", out, everything, "--picture", tmp_path / "a.png")
    assert error == ""
    assert json.loads(line)["studies"][0] == found
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "again.h5", "all.h5", "out.h5"]


def test_the_network_of_cifar_10(run: Run, tmp_path: Path) -> None:
    home = tmp_path / "cifar-10-batches-bin"
    home.mkdir()
    rng = np.random.default_rng(3)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        records = rng.integers(0, 256, (4, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(4)
        (home / f"{name}.bin").write_bytes(records.tobytes())
    few = ("--epochs", "1", "--batch", "10", "--samples", "3", "--weights", "20")
    line, error = run("--data", "cifar10", "--data-dir", tmp_path, *few, "--out", tmp_path / "out.h5")
    assert error == ""
    assert (json.loads(line)["parameters"], json.loads(line)["hidden"]) == (1_553_220, [150])
    assert held(tmp_path / "out.h5")["slices"].any((1, 2)).all()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--data", "mnits"), "--data mnits: unknown; did you mean 'mnist'?"),
        (("--data", "digits", "--optimizer", "sgd"), "--optimizer sgd: unknown; known: adam, rmsprop"),
        (("--data", "digits", "--samples", "361"), "--samples 361: there are 360 test samples; did you mean 360?"),
        (("--data", "digits", "--samples", "0"), "--samples 0: expected at least 1"),
        (
            ("--data", "digits", "--hidden", "9,x"),
            "--hidden 'x': expected widths of at least 1, such as 784 or 784,784",
        ),
        (("--data", "digits", "--lr", "0"), "--lr 0.0: expected a number above 0"),
        (("--data", "digits", "--picture", "x.pgn"), "--picture x.pgn: no picture of that kind; did you mean 'png'?"),
        ((), "data.name = 'mnist': --data-dir or HPCFL_DATA must name the folder of mnist/"),
    ],
)
def test_refusals(words: tuple[str, ...], said: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCFL_DATA", raising=False)
    assert run(*words) == ("", said)


def test_a_file_that_is_not_there_cannot_be_shown(run: Run, tmp_path: Path) -> None:
    out, error = run("--from", tmp_path / "none.h5")
    assert out == ""
    assert error.startswith(f"{tmp_path / 'none.h5'}: no such file")


def test_a_theta_that_was_trained_otherwise_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "theta.h5"
    assert run(*DIGITS, "--samples", "2", "--weights", "2", "--out", path)[1] == ""
    said = f"--hidden (8,): {path} was trained with (9,); leave one of them out"
    assert run("--theta", path, "--hidden", "8") == ("", said)
    with h5py.File(path, "a") as file:
        del file.attrs["lr"]
    assert run("--theta", path) == ("", f"{path}: 'lr' is missing; expected a file that --out has written")
