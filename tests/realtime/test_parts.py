"""Clients that hold parts of the model, in real time: the numbers of simulated time, and a replay to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_rounds import CLIENTS, HALF, SECONDS, SOON, _unhurried, real, replay, simulated  # noqa: F401

from hpcfl import store
from hpcfl.testing.runs import play, recorded, resume

pytestmark = pytest.mark.mpi

RATES = {"rates": [1.0, 0.5, 0.25]}
HETEROFL, FEDROLEX = ({"name": name, "batch": 64, **RATES} for name in ("heterofl", "fedrolex"))


def agree(one: Path, other: Path, exact: bool = True, seconds: bool = True) -> None:
    left, right = recorded(one), recorded(other)
    assert left.keys() == right.keys()
    for name in left.keys() - (set() if seconds else {*SECONDS}):
        mine, theirs = left[name], right[name]
        if name.startswith("client_"):  # lanes that were late have no scores
            theirs = np.where(np.isnan(mine), mine, theirs)
        if exact or mine.dtype.kind != "f":
            np.testing.assert_array_equal(mine, theirs, err_msg=name)
    states = [store.load(store.latest(run), personal=False).shared for run in (one, other)]  # type: ignore[arg-type]
    for name, value in states[0].items():
        np.testing.assert_allclose(value, states[1][name], rtol=0, atol=0 if exact else 1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("algorithm", "width", "more"),
    [(HETEROFL, 1, {}), (FEDROLEX, 1, {"batch_clients": 2}), (HETEROFL, "all", {})],
    ids=["heterofl", "fedrolex-pairs", "heterofl-all"],
)
def test_without_a_deadline_it_is_the_simulated_run(
    world: Any, shared_dir: Path, algorithm: dict[str, Any], width: Any, more: dict[str, Any]
) -> None:
    values = real(width, algorithm=algorithm, **more)
    run = play(world, values, shared_dir / "run", world.comm)
    resume(world, run, 2, world.comm)
    twin = play(world, simulated(values), shared_dir / "twin", None)
    if world.rank == 0:
        agree(run, twin, exact=width == 1 or world.size == 2, seconds=False)
        rates = [1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25]
        whole_model = algorithm is FEDROLEX  # with zeros beside the window, at its place
        units = [16 if whole_model else round(16 * rate) for rate in rates]
        each = [65 * count + 10 * (count + 1) for count in units]
        data = store.open_run(run)
        assert data["message_bytes"].values.tolist() == [4 * sum(each)] * 4
        received, whole = data["wire_bytes_in"].values[:, 0], 4 * 75 * 16 * CLIENTS
        if width == 1 and not more:  # single visits, which travel as the sub-models that they are
            assert (received < 0.8 * whole).all()
        assert len(rates) == CLIENTS


def test_a_replay_ends_in_the_same_state(world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 1 kB already travel by themselves, as large ones do."""
    for module in ("hpcfl.sums.packing", "hpcfl.sums.frames"):
        monkeypatch.setattr(f"{module}.APART_BYTES", 1000)
    values = real(1, algorithm=FEDROLEX, speed=HALF, participation=SOON)
    run = play(world, values, shared_dir / "run", world.comm)
    again = play(world, replay(values, run), shared_dir / "again", None)
    if world.rank == 0:
        agree(run, again)
