"""The private start of SRPFL's linear case: moments by a loop, and the start of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import srpfl_private

import hpcfl


def test_moments_are_clipped_one_by_one() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((5, 4, 3)), rng.standard_normal((5, 4))
    plain, clipped, clips = srpfl_private.moments(x, y, 2.0)
    every = [sum(y[c, s] ** 2 * np.outer(x[c, s], x[c, s]) for s in range(4)) / 4 for c in range(5)]
    norms = [float(np.linalg.norm(each)) for each in every]
    np.testing.assert_allclose(plain, sum(every))
    np.testing.assert_allclose(clipped, sum(each * min(1, 2 / norm) for each, norm in zip(every, norms)))
    assert clips == sum(norm > 2 for norm in norms)
    assert 0 < clips < 5


def test_the_distance_of_a_turned_axis_is_its_sine() -> None:
    axis = np.array([np.cos(0.3), np.sin(0.3), 0.0])
    assert srpfl_private.distance(np.outer(axis, axis), np.eye(3)[:, :1]) == pytest.approx(np.sin(0.3))


def test_without_noise_it_is_where_a_run_starts(tmp_path: Path) -> None:
    settings = {"clients": 300, "seed": 3, "rounds": 1, "evaluate.every": 1}
    ran = hpcfl.run("fedrep-linear", settings=settings, out=tmp_path / "run", quiet=True).data
    found = srpfl_private.starts(300, 3, [])
    assert found["plain"] == pytest.approx(ran["distance"].values[0], rel=1e-6)
    assert found["plain"] < min(found["sum"], found["each"])
