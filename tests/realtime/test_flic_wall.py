"""FLIC in real time: rounds that close with the first visits of clients of different widths, and their replay.

Over two levels too: the leaders send on what the barycenters need of each visit, beside the sums.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_rounds import _unhurried, agree, replay  # noqa: F401

from hpcfl import store
from hpcfl.testing.runs import play

pytestmark = pytest.mark.mpi

DATA = {
    "name": "noisy_features",
    "labels": 4,
    "classes": 2,
    "informative": 3,
    "least_noise": 0,
    "most_noise": 5,
    "samples_per_class": 20,
    "thinning": False,
}


def table() -> dict[str, Any]:
    """3 rounds of 7 clients in real time, which close with 2, 4 and all visits."""
    learning = {"epochs": 1, "batch": 0, "draws": 8, "optimizer": "sgd", "lr": 0.1, "pretrain": 1}
    return {
        "rounds": 3,
        "clients": 7,
        "seed": 2,
        "clock": "wall",
        "threads": 1,
        "evaluate": {"every": 3, "last": 1},
        "checkpoint": {"every": 3},
        "algorithm": {"name": "flic", **learning, "covariances": "bures", "iterations": 5},
        "participation": {"close": "first", "first": 2},
        "doubling": {"when": "rounds", "rounds": 1},
        "data": DATA,
        "model": {"name": "latent", "dimension": 4, "widths": [6]},
    }


@pytest.mark.parametrize("width", [1, "two-level"])
def test_a_replay_ends_in_the_same_state(world: Any, shared_dir: Path, width: int | str) -> None:
    """Over two levels there are two leaders, or a tree of them where there are four client ranks."""
    levels = {"leaders": world.size - 1 if world.size > 4 else min(2, world.size - 1), "fan_out": 2}
    values = table() | {"lane_width": width} | (levels if width == "two-level" else {})
    run = play(world, values, shared_dir / "run", world.comm)
    again = play(world, replay(values, run), shared_dir / "again", None)
    if world.rank == 0:
        data = store.open_run(run)
        invited, counted = ((data[name].values == 1).sum(1) for name in ("cohort", "arrived"))
        np.testing.assert_array_equal(counted, np.minimum([2, 4, 7], invited))  # who is still busy is not invited
        assert (data["barycenter_iterations"].values > 0).all()
        agree(run, again, exact=True)
        widths = {state["embed1.weight"].shape for state in store.load_personal(store.latest(run), range(7)).values()}
        assert len(widths) > 2
        tested = data["client_accuracy"].values
        tested = tested[np.isfinite(tested)]  # of those alone who are free at the end: there may be none
        assert ((tested >= 0) & (tested <= 1)).all()
