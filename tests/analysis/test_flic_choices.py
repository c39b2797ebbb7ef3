"""The scripts on FLIC's choices: every case is a config that goes, figures by hand, runs on a split made up here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import pytest

from helpers.scripts import script
from hpcfl.config import Config, load
from hpcfl.testing.runs import alone, toml


@pytest.fixture(scope="module")
def released() -> ModuleType:
    return script("flic_released")


@pytest.fixture(scope="module")
def covariances() -> ModuleType:
    return script("flic_covariances")


# ---- choices of the released code


def config(case: Any) -> Config:
    table, overlays, keys = case
    return load(table, {f"algorithm.{key}": value for key, value in keys.items()}, overlays)


def test_each_case_is_another_in_the_keys_of_its_choice_alone(released: ModuleType) -> None:
    found = {name: config(case).algorithm.model_dump() for name, case in released.cases().items()}
    for name, own in found.items():
        config(released.cases()[name]).check_values()
        base, _, choice = name.partition(" without ") if " without " in name else name.partition(" with ")
        if choice:
            differing = {key for key, value in own.items() if value != found[base][key]}
            other = found["text" if base == "released" else "released"]
            assert differing == {key for key in released.CHOICES[choice] if other[key] != found[base][key]}
            assert differing
    told = {key for keys in released.CHOICES.values() for key in keys}
    changed = {key for key, value in found["released"].items() if value != found["text"][key]}
    assert changed == told


def split(folder: Path, sizes: tuple[int, ...] = (6, 9, 12)) -> Path:
    """Write a split of the authors' form, clients of 2, 3 and 4 features."""
    rng, arrays = np.random.default_rng(3), {}
    for client, size in enumerate(sizes):
        for letter, count in (("", size), ("t", 4)):
            y = np.resize([0, 1], count).astype(np.int8)
            arrays |= {f"{letter}x{client}": rng.normal(size=(count, 2 + client)) + y[:, None], f"{letter}y{client}": y}
    (folder / "flic").mkdir()
    np.savez(folder / "flic" / "toy_nf.npz", **arrays)
    return folder


@pytest.mark.parametrize(("pad", "most", "widths"), [(False, 400, [2, 3, 4]), (True, 9, [15, 15])])
def test_a_split_becomes_a_file_of_clients(
    pad: bool, most: int, widths: list[int], released: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(released, "CLIENTS", 3)
    released.convert(split(tmp_path), tmp_path, pad, most)
    arrays = np.load(tmp_path / "flic" / "toy_nf.npz")
    with h5py.File(tmp_path / "toy_nf.h5") as file:
        assert [file[f"clients/{client}/train/features"].shape[1] for client in range(len(widths))] == widths
        for client, letter, part in ((0, "", "train"), (1, "t", "test")):
            x = file[f"clients/{client}/{part}/features"][()]
            wanted = arrays[f"{letter}x{client}"].astype(np.float32)
            np.testing.assert_array_equal(x[:, : wanted.shape[1]], wanted)
            assert not x[:, wanted.shape[1] :].any()
            np.testing.assert_array_equal(file[f"clients/{client}/{part}/labels"], arrays[f"{letter}y{client}"])


def test_runs_are_carried_out_once_and_compared_seed_by_seed(
    released: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(released, "CLIENTS", 3)
    short = {"epochs": 1, "pretrain": 1, "evaluation": "tuned", "tune_epochs": 1}
    less = {"rounds": 1, "model": {"name": "latent", "dimension": 4}}
    monkeypatch.setattr(released, "TEXT", {**released.TEXT, **less, "algorithm": {"name": "flic", **short}})
    words = ["flic_released", "--data-dir", str(split(tmp_path)), "--out", str(tmp_path / "out"), "--seeds", "1", "2"]
    for cases in (["text", "text with spread 10"], []):
        monkeypatch.setattr(sys, "argv", [*words, "--cases", *cases])
        monkeypatch.setattr(released, "cases", lambda: {name: CASES(released)[name] for name in sorted(NAMES)})
        released.main()
        found = json.loads(capsys.readouterr().out.splitlines()[-1])["flic_released"]
        assert [(row["case"], row["seeds"]) for row in found] == [(name, [1, 2]) for name in sorted(NAMES)]
    assert found[0]["difference"] is None  # released is not there
    assert found[1]["difference"] == pytest.approx(found[1]["accuracy"] - found[0]["accuracy"])
    assert len(list((tmp_path / "out").glob("*_seed=*"))) == 4


NAMES = ("text", "text with spread 10")


def CASES(released: ModuleType) -> dict[str, Any]:  # noqa: N802
    return {"text": (released.TEXT, (), {}), "text with spread 10": (released.TEXT, (), {"spread": 10.0})}


def test_figures_of_a_case(released: ModuleType) -> None:
    seconds = 4.0
    found = {
        "released": {1: (0.8, seconds), 2: (0.7, seconds)},
        "released without x": {1: (0.7, seconds), 2: (0.7, 2.0)},
    }
    first, second = released.rows(found)
    assert (first["accuracy"], first["difference"], first["error"]) == pytest.approx((0.75, 0.0, 0.0))
    assert second["difference"] == pytest.approx(-0.05)
    assert second["error"] == pytest.approx(0.05)
    assert second["wall_seconds"] == 3.0


# ---- covariances


def test_covariances_by_hand(covariances: ModuleType) -> None:
    """Two anchors in the plane: 2 I against I, and diag(1, 3) against I."""
    bures, mean = (
        covariances.Run(Path("run"), {}, np.array(found, dtype=float), accuracy)
        for found, accuracy in (([np.diag([2, 2]), np.diag([1, 3])], 0.5), ([np.eye(2), np.eye(2)], 0.25))
    )
    found = covariances.figures(bures, mean)
    assert found["bures from I"] == pytest.approx((1 + 2 / np.sqrt(2)) / 2)
    assert found["mean from I"] == 0
    assert found["apart"] == pytest.approx((0.5 + 2 / np.sqrt(10)) / 2)
    assert (found["accuracy bures"], found["accuracy mean"]) == (0.5, 0.25)


def test_covariances_of_runs(
    covariances: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []
    for kind in ("bures", "mean", "fixed"):
        keys = {"name": "flic", "epochs": 1, "batch": 20, "anchor_lr": 0.1, "anchor_steps": 3, "anchor_persist": True}
        values = {
            **{"rounds": 1, "clients": 3, "model": {"name": "latent", "dimension": 3, "widths": [4]}},
            **{"data": {"name": "linear_mapping", "labels": 3, "samples_per_class": 30}},
            "algorithm": {**keys, "covariances": kind},
        }
        folders.append(tmp_path / kind)
        alone(values, toml(values, tmp_path / f"{kind}.toml"), folders[-1])
    monkeypatch.setattr(sys, "argv", ["flic_covariances", *map(str, folders[:2])])
    covariances.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["flic_covariances"]
    assert 0 < found["mean"]["apart"] < found["mean"]["bures from I"]
    assert found["std"]["apart"] is None
    monkeypatch.setattr(sys, "argv", ["flic_covariances", str(folders[0])])
    with pytest.raises(SystemExit, match=r"seed 0: expected a run of algorithm\.covariances 'bures' and one of 'mean'"):
        covariances.main()
    monkeypatch.setattr(sys, "argv", ["flic_covariances", str(folders[2])])
    with pytest.raises(SystemExit, match=r"no anchor\.factors; expected a run with algorithm\.covariances"):
        covariances.main()
