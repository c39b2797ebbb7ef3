"""A sweep as one data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcfl
from hpcfl.testing.runs import table

VALUES = {**table("fedavg", "mlp", True), "rounds": 2}


def play(folder: Path, **settings: Any) -> None:
    hpcfl.run(VALUES, out=folder, settings={key.replace("__", "."): value for key, value in settings.items()})


def test_keys_and_seed_are_dimensions(tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        for seed in (1, 2):
            play(tmp_path / f"lr-{lr}-{seed}", algorithm__lr=lr, seed=seed)
    whole = hpcfl.open_sweep(tmp_path)
    assert dict(whole["accuracy"].sizes) == {"round": 2, "algorithm.lr": 2, "seed": 2}
    assert whole["algorithm.lr"].values.tolist() == [0.1, 0.2]
    assert whole["seed"].values.tolist() == [1, 2]
    for lr in (0.1, 0.2):
        for seed in (1, 2):
            one, own = hpcfl.open_run(tmp_path / f"lr-{lr}-{seed}"), {"algorithm.lr": lr, "seed": seed}
            for name in ("accuracy", "client_accuracy", "arrived", "sim_seconds"):
                dims = one[name].dims
                np.testing.assert_array_equal(whole[name].sel(own).transpose(*dims).values, one[name].values)


def test_a_key_that_follows_from_another_is_no_dimension(tmp_path: Path) -> None:
    play(tmp_path / "a", algorithm__lr=0.1)
    play(tmp_path / "b", algorithm__name="fedprox", algorithm__lr=0.3, algorithm__mu=0.5)
    play(tmp_path / "c", algorithm__name="fedprox", algorithm__lr=0.3, algorithm__mu=0.7, rounds=1)
    whole = hpcfl.open_sweep(tmp_path)
    assert set(whole["accuracy"].dims) == {"round", "algorithm.name", "algorithm.mu", "seed"}
    assert whole["algorithm.mu"].values.tolist() == ["", "0.5", "0.7"]
    losses = whole["loss"].isel(seed=0).transpose("algorithm.name", "algorithm.mu", "round")
    there = [[[True, True], [False] * 2, [False] * 2], [[False] * 2, [True, True], [True, False]]]
    np.testing.assert_array_equal(losses.notnull(), there)


def test_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(hpcfl.UsageError, match="is no run folder"):
        hpcfl.open_sweep(tmp_path)
    play(tmp_path / "a")
    play(tmp_path / "b")
    with pytest.raises(hpcfl.UsageError, match=r"a' and '.*b' have the same config and seed: expected each run once$"):
        hpcfl.open_sweep(tmp_path)
