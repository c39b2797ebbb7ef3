"""Compressed messages in real time: the bits of simulated time, in as many bytes as are said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_rounds import (
    CLIENTS,
    FEDAVG,
    HALF,
    ROUNDS,
    RULES,
    SOON,
    _unhurried,  # noqa: F401
    agree,
    is_exact,
    real,
    replay,
    simulated,
)

from hpcfl import store
from hpcfl.testing.runs import play, resume

pytestmark = pytest.mark.mpi

RULE: dict[str, dict[str, Any]] = {
    "top-k": {"compress": "top-k"},
    "top-k alone": {"compress": "top-k", "share": 0.3, "feedback": False},
    "random-k": {"compress": "random-k", "share": 0.2},
    "random-k alone": {"compress": "random-k", "share": 0.2, "feedback": False},
    "qsgd": {"compress": "qsgd", "levels": 5},
    "bf16": {"compress": "bf16"},
    "bf16 alone": {"compress": "bf16", "feedback": False},
}
HEADS = 4 * (5 + 2 + 1) + 2 * 4 * (5 + 2 * 2)
"""Of a visit's loss, and of two layers: five signs, of each tensor its weight in two numbers, and the loss."""
BYTES = {
    "top-k": 8 * (11 + 1 + 2 + 1),  # of 1024, 16, 160 and 10 numbers
    "top-k alone": 8 * (308 + 5 + 48 + 3),
    "random-k": 4 * (205 + 4 + 32 + 2) + 2 * 24,  # and whose visit it is, in the head of each layer
    "random-k alone": 4 * (205 + 4 + 32 + 2) + 2 * 24,
    "qsgd": 4 * (4 + 128 + 2 + 20 + 2),  # of each a step, and 512, 8, 80 and 5 bytes in whole words
    "bf16": 2 * (1024 + 16 + 160 + 10),
    "bf16 alone": 2 * (1024 + 16 + 160 + 10),
}


@pytest.mark.parametrize("rule", RULE)
def test_without_a_deadline_it_is_the_simulated_run(world: Any, shared_dir: Path, rule: str) -> None:
    values = real(1, algorithm=FEDAVG, message=RULE[rule])
    run = play(world, values, shared_dir / "run", world.comm)
    resume(world, run, 2, world.comm)
    twin = play(world, simulated(values), shared_dir / "twin", None)
    if world.rank == 0:
        agree(run, twin, True, seconds=False)
        data = store.open_run(run)
        visits, sent = (data[name].values[:, 1:] for name in ("visits", "wire_bytes_out"))
        assert visits.sum(1).tolist() == [CLIENTS] * ROUNDS
        np.testing.assert_array_equal(sent, visits * (HEADS + BYTES[rule]))


LATE: dict[str, dict[str, Any]] = {
    "layers": {**RULES["drawn"], "message": RULE["random-k"]},
    "parts of visits": {**RULES["parts"], "message": RULE["qsgd"]},
    "whole visits": {"algorithm": FEDAVG, "speed": HALF, "participation": SOON, "message": RULE["top-k"]},
    "parts of the model": {
        "algorithm": {"name": "heterofl", "batch": 64, "rates": [1.0, 0.5, 0.25]},
        "speed": HALF,
        "participation": SOON,
        "message": RULE["random-k"],
    },
    "arrivals": {
        "algorithm": FEDAVG,
        "participation": {"close": "arrivals", "buffer": CLIENTS + 5},  # some twice with one state
        "staleness": {"weight": "polynomial"},
        "message": RULE["random-k"],
    },
    "passed on": {
        "algorithm": FEDAVG,
        "participation": {"close": "arrivals", "buffer": 1},
        "message": RULE["qsgd"],
        "lane_width": "two-level",
        "leaders": 1,
    },
    "led": {**RULES["parts"], "message": RULE["random-k"], "lane_width": "two-level", "leaders": 1},
    "several in a sum": {"algorithm": FEDAVG, "message": RULE["top-k"], "batch_clients": 2},
}
APART = "layers", "whole visits", "parts of the model", "passed on"


@pytest.mark.parametrize("case", LATE)
def test_a_replay_ends_in_the_same_state(
    world: Any, shared_dir: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each client has left out too, of visits and of layers that counted and of those that did not.

    In some cases blocks of 64 bytes already travel by themselves, as large ones do.
    """
    for module in ("hpcfl.sums.packing", "hpcfl.sums.frames") if case in APART else ():
        monkeypatch.setattr(f"{module}.APART_BYTES", 64)
    values = real(1) | LATE[case]
    run = play(world, values, shared_dir / "run", world.comm)
    again = play(world, replay(values, run), shared_dir / "again", None)
    if world.rank == 0:
        agree(run, again, True)


def test_ranks_of_one_lane_add_up_what_is_left(world: Any, shared_dir: Path) -> None:
    """And what travels is as large as without."""
    values = real("all", algorithm=FEDAVG, rounds=1, evaluate={"every": 1})
    run = play(world, {**values, "message": RULE["top-k"]}, shared_dir / "run", world.comm)
    twin = play(world, simulated({**values, "message": RULE["top-k"]}), shared_dir / "twin", None)
    plain = play(world, values, shared_dir / "plain", world.comm)
    if world.rank == 0 and not is_exact(world, "all"):
        agree(run, twin, False, seconds=False)
        sent = [store.open_run(each)["wire_bytes_out"].values for each in (run, plain)]
        np.testing.assert_array_equal(*sent)
