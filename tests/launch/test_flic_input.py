"""Clients of different feature spaces: bad input ends in one line, exit code 2, and leaves nothing on the disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from test_bad_input import SEVERAL

from helpers.launcher import alone
from hpcfl import store
from hpcfl.base.errors import UsageError
from hpcfl.commands.cli import main
from hpcfl.commands.show import summary
from hpcfl.config import from_table
from hpcfl.data.hdf5 import Hdf5
from hpcfl.testing.runs import cut_back, play, toml

WIDTHS = (3, 5, 4)
LATENT = {"name": "latent", "dimension": 4, "widths": [6]}
FLIC = {"name": "flic", "epochs": 1, "batch": 4}
LINEAR = {"name": "linear", "dimension": 4}
SPACES = {"name": "linear_spaces", "dimension": 4, "least": 4, "most": 6}
OWN = {"name": "hdf5", "file": "own.h5"}


def table(**more: Any) -> dict[str, Any]:
    """A run of 2 rounds with 3 clients of different widths and 3 classes."""
    plain = {"rounds": 2, "clients": 3, "seed": 1, "checkpoint": {"every": 1, "keep": 9}}
    return {**plain, "algorithm": FLIC, "data": OWN, "model": LATENT, **more}


def flic(**keys: Any) -> dict[str, Any]:
    return {"algorithm": {**FLIC, **keys}}


def latent(**keys: Any) -> dict[str, Any]:
    return {"model": {**LATENT, **keys}}


def write(path: Path, widths: tuple[int, ...] = WIDTHS) -> None:
    with h5py.File(path, "w") as file:
        for client, width in enumerate(widths):
            for part in ("train", "test"):
                x = np.random.default_rng(client).normal(size=(6, width))
                file[f"clients/{client}/{part}/features"] = x.astype(np.float32)
                file[f"clients/{client}/{part}/labels"] = np.arange(6) % 3


def put(name: str, value: Any) -> Callable[[h5py.File], None]:
    """Replace a data set."""

    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = value

    return change


def lost(file: h5py.File) -> None:
    del file["clients/1/train/features"]


def nothing(file: h5py.File) -> None:
    """Leave the file as it is."""


def holding(value: float) -> Callable[[h5py.File], None]:
    x = np.zeros((6, 5), np.float32)
    x[4, 2] = value
    return put("clients/1/train/features", x)


ONE_MODEL = "data: client number 1 has features of shape (5,), the first one (3,): algorithm"
DATA: dict[str, tuple[Callable[[h5py.File], None], str]] = {
    "train-is-not-test": (
        put("clients/1/test/features", np.zeros((6, 7), np.float32)),
        "own.h5: clients/1/train has 5 features, clients/1/test 7 features; expected the same in both",
    ),
    "nan": (holding(np.nan), "clients/1/train/features: sample 4 holds nan, expected finite"),
    "infinite": (holding(-np.inf), "clients/1/train/features: sample 4 holds -inf, expected finite"),
    "label": (
        put("clients/2/train/labels", [0, 1, 2, 3, 0, 1]),
        "clients/2/train/labels hold 3, got 3; did you mean 4",
    ),
    "no-features": (lost, "own.h5: clients/1/train/features is missing"),
}
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no-embedding": (
        {"model": {"name": "mlp"}},
        "expected one with an embedding, for algorithm.name = 'flic', got 'mlp'; did you mean '",
    ),
    "covariances-of-targets": (
        {"data": SPACES, **flic(covariances="mean")},
        "algorithm.covariances = 'mean' has no meaning without labels that are classes",
    ),
    "short-meta": (
        flic(meta=[0, 1]),
        "algorithm.meta: expected 3 numbers (one per class) from 0 on without gaps",
    ),
    "meta-with-a-gap": (flic(meta=[0, 2, 2]), "algorithm.meta: expected 3 numbers (one per class) from 0 on without"),
    **{
        f"bures-on-lanes-of-{width}": (
            {"clock": "wall", "lane_width": width, **flic(covariances="bures")},
            f"lane_width: algorithm.name = 'flic' asks for further sums over single messages, which ranks that share a "
            f"lane add up on the way: expected 1, got {width!r}; did you mean 1",
        )
        for width in (2, "all")
    },
    "convolutions-of-vectors": (latent(embedding="convolutions"), "got (3,); did you mean 'dense'"),
    "identity": (latent(embedding="identity"), "model.dimension: embedding = 'identity' keeps the 3 features, got 4"),
    "identity-of-another-client": (latent(embedding="identity", dimension=3), "keeps the 5 features, got 3"),
    "fedavg": (
        {"algorithm": {"name": "fedavg"}, "model": {"name": "mlp"}},
        f"{ONE_MODEL} 'fedavg' shares one model, which needs equal shapes; expected one of fedhenn, flic, lg_",
    ),
    "fedrep": ({"algorithm": {"name": "fedrep"}}, f"{ONE_MODEL} 'fedrep' shares one model"),
    "salf": ({"algorithm": {"name": "salf"}}, f"{ONE_MODEL} 'salf' shares one model"),
    "fedavg-of-spaces": (
        {"algorithm": {"name": "fedavg"}, "model": LINEAR, "data": SPACES},
        "shares one model, which needs equal shapes; expected one of fedhenn, flic, lg_fedavg, linear_fedrep, local",
    ),
    "linear-of-classes": (
        {"algorithm": {"name": "linear_fedrep"}, "model": LINEAR, "data": {"name": "noisy_features"}},
        "algorithm.name = 'linear_fedrep' needs data.name = 'linear' and model.name = 'linear', or data.name = 'line",
    ),
    "linear-of-a-file": (
        {"algorithm": {"name": "linear_fedrep"}, "model": LINEAR},
        "'linear_fedrep' needs data",
    ),
    "linear-of-another-model": (
        {"algorithm": {"name": "linear_fedrep"}, "data": SPACES},
        "'linear_fedrep' needs data.name = 'linear' and model.name = 'linear'",
    ),
}
CASES = {
    **{name: ({"data": {**OWN, "labels": 3}}, change, words) for name, (change, words) in DATA.items()},
    **{name: (settings, nothing, words) for name, (settings, words) in SETTINGS.items()},
}


def prepare(name: str, here: Path) -> str:
    """Make what a case is about in a folder; return the words that must be said."""
    settings, change, words = CASES[name]
    toml(table(**settings), here / "my.toml")
    write(here / "own.h5")
    with h5py.File(here / "own.h5", "r+") as file:
        change(file)
    return words


def told(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line with which a command refuses; assert that it changes nothing on the disk."""
    before = {path: path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()}
    capsys.readouterr()
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("hpcfl: ")
    assert {path: path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()} == before
    return line


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in an empty folder, as a process alone, whoever else runs the tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPCFL_DATA", raising=False)
    for module in ("hpcfl.launch.failure", "hpcfl.mpi.launcher"):
        monkeypatch.setattr(f"{module}.launched", lambda: False)


@pytest.mark.parametrize("name", CASES)
def test_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = prepare(name, Path())
    line = told(["run", "my.toml", "--out", "out"], capsys)
    assert words in line
    assert told(["check", "my.toml"], capsys) == line
    assert not Path("out").exists()


@pytest.mark.launch
def test_all_is_judged_before_torch_is_imported(tmp_path: Path) -> None:
    argvs = {}
    for name in CASES:
        prepare(name, tmp_path / name)
        settings = [str(tmp_path / name / "my.toml"), "--data-dir", str(tmp_path / name)]
        argvs[name] = ["run", *settings, "--out", str(tmp_path / name / "out")]
    ended = alone([sys.executable, "-c", SEVERAL, json.dumps(argvs)])
    found = json.loads(ended.out.splitlines()[-1])
    assert found == {"codes": dict.fromkeys(argvs, 2), "torch": False, "mpi": False}


# ---- data that are not those of the run


@pytest.fixture
def done(solo: Any) -> Path:
    """A finished run, and beside its data a folder with a file whose client 1 is wider."""
    write(Path("own.h5"))
    write(Path("others.h5"), (3, 7, 4))
    Path("other").mkdir()
    Path("others.h5").rename("other/own.h5")
    return play(solo, table(), Path("run"), None)


WIDER = (
    "data: client 1 has features of shape (7,): 'embed1.weight' has shape [6, 7] on these data, in the checkpoint [6"
)


def test_a_run_goes_on_with_its_own_data_only(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digest = summary(done)["state_sha256"]
    cut_back(done, 1)
    assert WIDER in told(["resume", "run", "--data-dir", "other"], capsys)
    assert store.read_status(done).state == "stopped"
    assert main(["resume", "run", "--quiet"]) == 0
    assert summary(done)["state_sha256"] == digest


def test_clients_adapt_with_the_data_of_the_run_only(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert WIDER in told(["adapt", "run", "--client", "all", "--data-dir", "other", "--out", "own-layers.h5"], capsys)
    assert main(["adapt", "run", "--client", "0,2", "--data-dir", "other"]) == 0


def test_a_shared_model_goes_on_with_data_of_its_width_only(solo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("own.h5"), (5, 5, 5))
    play(solo, table(algorithm={"name": "fedavg"}, model={"name": "mlp", "hidden": [6]}), Path("run"), None)
    cut_back(Path("run"), 1)
    write(Path("own.h5"), (4, 4, 4))
    line = told(["resume", "run"], capsys)
    assert "data: 'fc1.weight' has shape [6, 4] on these data, in the checkpoint [6, 5]: expected the data" in line


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "clients/1/train/features",
            np.ones((6, 7)),
            r"clients/1/train has 6 samples with 7 features, but 6 with 5 features, .*when it was checked",
        ),
        (
            "clients/1/test/features",
            np.ones((6, 4)),
            r"clients/1/test has 6 samples with 4 features, but [0-9] with 5 features, .*when it was checked",
        ),
        ("clients/1/train/labels", [0, 1, 2, 3, 0, 1], "clients/1/train has .*, or other labels, when it was checked"),
        ("clients/1/train/labels", np.arange(6) / 2, "clients/1/train has .*, or other labels, when it was checked"),
    ],
)
@pytest.mark.parametrize("prune", [0.0, 0.5])
def test_a_client_that_has_changed_since_is_refused(name: str, value: Any, words: str, prune: float) -> None:
    write(Path("own.h5"))
    data = Hdf5(file="own.h5", prune=prune).federate(3, 0, None)
    with h5py.File("own.h5", "r+") as file:
        put(name, value)(file)
    assert data.client(2).train_features.shape[0] == 6
    with pytest.raises(UsageError, match=f"own.h5: {words}.*; expected a file that stays as it is$"):
        data.client(1)


def test_anchors_follow_labels_that_are_real_numbers() -> None:
    assert from_table(table(data=SPACES)).check(None).targets
