"""FedRep for linear regression (SRPFL's Algorithm 2, FLIC's Algorithm S3) against loops of NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpcfl import config as configs
from hpcfl.engine.job import Job
from judges import world
from judges.linear import by_moments, distance, embedded, fedrep, orthonormal
from judges.personal import fastest

N, ROUNDS = 9, 7
PACES = np.array([0.9, 3.5, 1.7, 0.2, 2.6, 9.0, 0.5, 4.0, 2.0])
NEAR = {"rtol": 0, "atol": world.TOLERANCE}
SPACES = "linear_spaces"
DATA: dict[str, dict[str, Any]] = {
    "linear": {"name": "linear", "dimension": 5, "rank": 2, "samples": 8, "noise": 0.3},
    SPACES: {"name": SPACES, "dimension": 4, "least": 4, "most": 7, "samples": 9, "noise": 0.3},
}


@pytest.mark.parametrize(
    ("data", "chunk", "start"), [("linear", 1, "random"), ("linear", 4, "moments"), (SPACES, 4, "moments")]
)
def test_linear_fedrep(tmp_path: Path, data: str, chunk: int, start: str) -> None:
    first = np.random.default_rng(5).normal(size=(2, 5))
    with h5py.File(tmp_path / "initial.h5", "w") as file:
        file["representation.weight"], file["head.weight"] = first, np.zeros((1, 2))
    model: dict[str, Any] = {"name": "linear", "rank": 2} | ({"dimension": 4} if data == SPACES else {})
    model |= {"initial": f"{tmp_path}/initial.h5"} if start == "random" else {}
    settings = configs.from_table(
        {
            **{"rounds": ROUNDS, "clients": N, "seed": 3, "precision": "double", "batch_clients": chunk},
            "algorithm": {"name": "linear_fedrep", "lr": 0.2, "initial": start},
            **{"data": DATA[data], "model": model, "speed": world.table(tmp_path / "speed.csv", PACES)},
            "participation": {"close": "first", "first": 1, "invite": "uniform", "size": 7},
            **{"doubling": {"when": "rounds", "rounds": 2}, "oracle": {"record": True, "phi": 1.0}},
        }
    )
    found = world.played(settings)
    federation: Any = Job.of(settings, None, 1).task.federation

    def draws(client: int, round_: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        x, y = federation.drawn(client, round_)
        return embedded(x, *federation.moments(client), 4) if data == SPACES else x, y

    basis, begins = (by_moments(draws, range(N), 2), 1) if start == "moments" else (orthonormal(first.T), 0)
    invited = list(enumerate(found.who("cohort")))[begins:]
    rounds = {t: fastest(who, PACES, 1, (t - begins) // 2) for t, who in invited}
    assert all(len(who) == N for who in found.who()[:begins])
    basis, heads = fedrep(draws, basis, rounds, 0.2)
    assert found.rows["gradients"].tolist() == [0] * begins + [DATA[data]["samples"]] * (ROUNDS - begins)
    own = found.shared["representation.weight"].numpy().T
    signs = np.sign((own * basis).sum(0))  # eigenvectors have none, and from then on nothing changes them
    np.testing.assert_allclose(own, basis * signs, **NEAR)
    np.testing.assert_allclose(found.rows["distance"][-1], distance(basis, federation.target), **NEAR)
    for client, state in enumerate(found.personal):
        np.testing.assert_allclose(state["head.weight"][0], heads.get(client, np.zeros(2)) * signs, **NEAR)
