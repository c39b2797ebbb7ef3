"""FLIC whose embeddings stay: without its keys it is FLIC; with them a visit leaves embeddings where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flic_visit
import numpy as np
import pytest

import hpcfl

SMALL = {
    "rounds": 1,
    "clients": 4,
    "participation.size": 4,
    "data.samples_per_class": 60,
    "data.labels": 6,
    "model.widths": [8],
    "model.dimension": 8,
    "model.hidden": [6],
    "algorithm.pretrain": 1,
    "algorithm.epochs": 2,
    "algorithm.evaluation": "stored",
}
FIXED = {"algorithm.name": "flic_visit:Choice", "algorithm.embeddings": "fixed"}


def run(folder: Path, **keys: Any) -> Any:
    hpcfl.run("flic-hl-toy-lm-small", settings=SMALL | keys, out=folder, quiet=True)
    return hpcfl.open_run(folder), hpcfl.open_models(folder)


def test_losses_of_epochs_from_means() -> None:
    assert flic_visit.by_epoch([3.0, 2.5, 2.0]) == [3.0, 2.0, 1.0]


def test_without_its_keys_it_is_flic(tmp_path: Path) -> None:
    ours, _ = run(tmp_path / "ours", **{"algorithm.name": "flic_visit:Choice"})
    theirs, _ = run(tmp_path / "theirs")
    np.testing.assert_array_equal(ours["loss"], theirs["loss"])
    np.testing.assert_array_equal(ours["mean_client_accuracy"], theirs["mean_client_accuracy"])


def test_a_fixed_embedding_is_where_its_alignment_brought_it(tmp_path: Path) -> None:
    """In more rounds and with more epochs; those that learn are elsewhere, and so are shared layers."""
    _, one = run(tmp_path / "one", **FIXED)
    _, more = run(tmp_path / "more", **FIXED, **{"rounds": 2, "algorithm.epochs": 3, "algorithm.shared_epochs": 2})
    _, learn = run(tmp_path / "learn")
    for fixed, again, moved in zip(one, more, learn):
        x = fixed.data.test_features
        np.testing.assert_array_equal(fixed.embed(x), again.embed(x))
        assert abs(fixed.embed(x) - moved.embed(x)).max() > 1e-4
        assert abs(fixed.embed(x) - fixed.untrained.embed(x)).max() > 1e-4
    assert any(abs(one.shared[name] - more.shared[name]).max() > 1e-4 for name in one.shared if "weight" in name)


def test_epochs_of_shared_layers_have_the_first_in_common(tmp_path: Path) -> None:
    """A step of plain descent on all samples lowers the loss each time, and the first loss is that of one epoch."""
    plain = {"algorithm.optimizer": "sgd", "algorithm.lr": 0.02, "algorithm.batch": 0, "algorithm.lambda2": 0.0}
    keys = FIXED | plain
    means = [run(tmp_path / f"{n}", **keys, **{"algorithm.shared_epochs": n})[0]["loss"].item() for n in (1, 2, 3)]
    by_epoch = flic_visit.by_epoch(means)
    assert by_epoch[0] == pytest.approx(means[0], rel=1e-4)
    assert by_epoch[0] > by_epoch[1] > by_epoch[2]
