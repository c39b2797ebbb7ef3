"""Links, and clients that come and go, on ranks: who is invited and comes in time, and the same bits on any number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_rounds import _unhurried  # noqa: F401

from hpcfl.testing.runs import play, recorded, same, table

pytestmark = pytest.mark.mpi


def real(world: Any, **more: Any) -> dict[str, Any]:
    """Two rounds with a client on each rank but the server's."""
    plain = {"participation": {"close": "all"}, "speed": {"model": "none"}, "data": {"name": "digits"}}
    return table("fedavg", "mlp", False, **{**plain, "clock": "wall", "clients": world.size - 1, "rounds": 2, **more})


def csv(world: Any, folder: Path, header: str, rows: list[tuple[float, ...]]) -> str:
    file = folder / "world.csv"
    if world.rank == 0:
        file.write_text(header + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    world.meet()
    return str(file)


def test_who_has_a_slow_line_is_late(world: Any, shared_dir: Path) -> None:
    if world.size < 3:
        pytest.skip("needs two clients")
    clients = world.size - 1
    lines = [(client, 1e9, 1e9 if client else 1.0, 0.001) for client in range(clients)]  # client 0 takes hours
    file = csv(world, shared_dir, "client,down,up,latency", lines)
    close = {"close": "first", "first": clients - 1}
    run = play(world, real(world, link={"file": file}, participation=close), shared_dir / "run", world.comm)
    if world.rank == 0:
        found = recorded(run)
        assert found["arrived"].tolist() == [[0] + [1] * (clients - 1)] * 2
        assert (found["depth"][:, 0] > found["depth"][:, 1]).all()
        assert (found["visit_seconds"][:, 1:] >= 0.002).all()


def test_who_is_there_is_invited_and_nobody_is_waited_for(world: Any, shared_dir: Path) -> None:
    clients, later = world.size - 1, 0.3
    rows = [(client, later if client == 0 else 1e6, 1e9) for client in range(clients)]
    file = csv(world, shared_dir, "client,start,end", rows)
    there = {"model": "table", "file": file, "leaves": "stays"}
    run = play(world, real(world, availability=there), shared_dir / "run", world.comm)
    if world.rank == 0:
        found = recorded(run)
        assert [np.flatnonzero(row == 1).tolist() for row in found["cohort"]] == [[0], [0]]
        assert found["arrived"].tolist() == [[1] + [0] * (clients - 1)] * 2
        assert found["sim_seconds"][0] >= later


WORLD = {
    "speed": {"model": "gamma", "mean": 5.0, "within": 0.5, "slow": 3.0, "slow_share": 0.2},
    "link": {"up": "50 kB/s", "between": 0.5, "server": "80 kB/s"},
    "queue": {"model": "lognormal", "within": 0.5, "persistence": 0.5},
    "availability": {"model": "on-off", "on": 60.0, "off": 30.0},
}


@pytest.mark.parametrize("close", [{"close": "first", "first": 2}, {"close": "arrivals", "buffer": 2}])
def test_any_number_of_ranks_gives_the_same_bits(world: Any, shared_dir: Path, close: dict[str, Any]) -> None:
    link = dict(WORLD["link"]) if close["close"] == "first" else {"up": "50 kB/s"}  # shares are not known else
    values = table("fedavg", "mlp", False, **{**WORLD, "link": link, "participation": close, "rounds": 4})
    run = play(world, values, shared_dir / "run", world.comm)
    alone = play(world, values, shared_dir / "alone", None)
    if world.rank == 0:
        same(run, alone)
        invited = (recorded(run)["cohort"] == 1).sum(1)
        assert invited.min() < recorded(run)["cohort"].shape[1]
