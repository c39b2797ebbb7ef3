"""Ranks that die: a run goes on without them where MPI tells of it, and elsewhere ends with all it has recorded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import faults
from helpers.launcher import ROOT, Ended, alive, job, mpis
from hpcfl import store
from hpcfl.commands.show import summary
from hpcfl.presets import read
from hpcfl.testing.runs import play

pytestmark = pytest.mark.launch

RANKS, CLIENTS, ROUNDS = 5, 8, 12
HOSTED = {rank: {rank - 1, rank + 3} for rank in range(1, RANKS)}  # all alike, so they are dealt in their order
CONFIG = f"""
rounds = {ROUNDS}
clients = {CLIENTS}
seed = 1
clock = "wall"
threads = 1

[evaluate]
every = 1  # a line for every round

[checkpoint]
every = 3

[algorithm]
name = "helpers.strange.mortal:Mortal"
lr = 0.2
batch = 64
missing = "none"
momentum = 0.5
persist_optimizer = true

[data]
name = "digits"

[model]
name = "mlp"
hidden = [32, 16]
"""
ULFM = ("--with-ft", "ulfm")
RULES = {
    "all": ("participation.close=all",),
    "deadline": (
        "participation.close=deadline",
        "participation.deadline=0.1",
        "speed.model=exponential",
        "speed.kind=dynamic",
        "speed.rate=20.0",
    ),
}


def run(
    mpi: str,
    here: Path,
    deaths: Sequence[tuple[int, int]],
    *settings: str,
    rule: str = "all",
    env: dict[str, str] | None = None,
    **how: Any,
) -> Ended:
    """Run a job in which some clients, from some round on, take their ranks with them."""
    (here / "marks").mkdir()
    (here / "my.toml").write_text(CONFIG, encoding="utf-8")
    pairs = [list(pair) for pair in deaths]
    settings = (*RULES[rule], f"algorithm.deaths={pairs}", f"algorithm.marks={here / 'marks'}", *settings)
    words = [word for setting in settings for word in ("--set", setting)]
    return hpcfl(mpi, "run", str(here / "my.toml"), *words, "--out", str(here / "run"), env=env, **how)


def hpcfl(mpi: str, *args: str, **how: Any) -> Ended:
    return job(mpi, RANKS, [str(ROOT / "tests" / "helpers" / "driver.py"), *args], **how)


def died(here: Path) -> set[int]:
    """The clients that took their ranks with them."""
    return {int(path.name) for path in (here / "marks").iterdir()}


def with_ranks(clients: set[int]) -> set[int]:
    """All clients that are lost with these."""
    return {each for hosted in HOSTED.values() for each in hosted if hosted & clients}


def goes_on_without(here: Path, ended: Ended) -> None:
    """The job has ended well, and says who is gone."""
    assert ended.code == 0, ended.err
    folder, dead = here / "run", died(here)
    data, lost = store.open_run(folder), with_ranks(dead)
    assert data.attrs["status"] == "done"
    assert data["round"].values.tolist() == list(range(ROUNDS))
    events = [event for event in store.events(folder) if event["kind"] == "lost"]
    assert {event["client"] for event in events} == lost
    assert {client for client, _ in summary(folder)["lost"]} == lost
    for rank, hosted in HOSTED.items():
        told = [line for line in ended.said if line.startswith(f"hpcfl: rank {rank} is lost")]
        assert len(told) == bool(hosted & dead)
        assert all(line.endswith(f"and with it clients {rank - 1}, {rank + 3}") for line in told)
    for event in events:
        assert (data["cohort"].values[event["round"] + 1 :, event["client"]] == 0).all()
    assert np.isfinite(data["accuracy"].values[-1])
    assert "Traceback" not in ended.err


def test_clients_of_two_dead_ranks_go_on_at_others(solo: Any, tmp_path: Path) -> None:
    """Each dies in the round after a checkpoint, which has what they had, so that a replay gives the same bits."""
    ended = run("openmpi", tmp_path, [(1, 3), (7, 6)], "lane_width=1", "lost_clients=rehost", options=ULFM)
    assert ended.code == 0, ended.err
    assert died(tmp_path) == {1, 7}
    folder = tmp_path / "run"
    data = store.open_run(folder)
    assert data.attrs["status"] == "done"
    assert (data["cohort"].values == 1).all()
    arrived = data["arrived"].values
    assert arrived[3].tolist()[1] == arrived[6].tolist()[7] == 0
    assert arrived.sum(1)[[0, 1, 2, 4, 5, 7, 8, 9, 10, 11]].tolist() == [8] * 10
    moved = {1: (2, 1, 3), 5: (2, 3, 3), 3: (4, 1, 6), 7: (4, 3, 6)}  # from rank, to rank, after so many rounds
    how = {
        c: f"at rank {to} in place of rank {lost}, with the state after round {r}" for c, (lost, to, r) in moved.items()
    }
    assert dict(summary(folder)["rehosted"]) == how
    assert summary(folder)["lost"] == []
    events = [event for event in store.events(folder) if event["kind"] == "rehosted"]
    assert [(event["round"], event["client"]) for event in events] == [(4, 1), (4, 5), (7, 3), (7, 7)]
    line = "hpcfl: client {} of rank {} goes on at rank {}, with the state after round {}"
    assert {line.format(client, *where) for client, where in moved.items()} < set(ended.said)
    again = play(solo, replay(folder), tmp_path / "again", None)
    saved = [store.load(store.latest(each)) for each in (folder, again)]
    for name, value in saved[0].shared.items():
        np.testing.assert_array_equal(value, saved[1].shared[name], err_msg=name)
    kept = [store.load_personal(store.latest(each), range(CLIENTS)) for each in (folder, again)]
    for client, state in kept[0].items():
        for name, value in state.items():
            np.testing.assert_array_equal(value, kept[1][client][name], err_msg=f"{client} {name}")


def replay(folder: Path) -> dict[str, Any]:
    """The run in simulated time, as it was recorded."""
    values = read(str(folder.parent / "my.toml"))
    plain = {key: value for key, value in values.items() if key not in ("clock", "threads")}
    trace = {"model": "trace", "run": str(folder)}
    return {**plain, "algorithm": {**values["algorithm"], "name": "salf"}, "speed": trace}


# ---- studies


def readable(here: Path, ended: Ended, *also: str) -> int:
    """Everything that was told of is there, and the run is not said to be well; return how many rounds."""
    told = [int(line.split()[1].split("/")[0]) for line in ended.out.splitlines() if line.startswith("round ")]
    data = store.open_run(here / "run")
    assert data["round"].values.tolist() == list(range(data.sizes["round"]))
    assert data.sizes["round"] >= max(told, default=0)
    assert np.isfinite(data["accuracy"].values).all()
    assert data.attrs["status"] in ("failed", "killed", *also)
    return data.sizes["round"]


def nobody_is_left(here: Path) -> None:
    lines = (here / "run" / "status").read_text().splitlines()
    for line in lines:
        if line.startswith("rank "):
            assert not alive(int(line.split()[3])), line  # "rank 3: process 4711 on host"


def goes_on_later(mpi: str, here: Path, *options: str) -> None:
    again = hpcfl(mpi, "resume", str(here / "run"), options=options)
    assert again.code == 0, again.err
    data = store.open_run(here / "run")
    assert data.attrs["status"] == "done"
    assert data["round"].values.tolist() == list(range(ROUNDS))
    assert (data["cohort"].values[-1] == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_two_ranks_die_at_any_time(number: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(number)
    ranks = rng.choice(np.arange(1, RANKS), 2, replace=False)
    deaths = [(int(rng.choice(sorted(HOSTED[int(rank)]))), int(rng.integers(ROUNDS - 2))) for rank in ranks]
    width, rule = (1, 2, "all")[number % 3], sorted(RULES)[number % 2]
    ended = run("openmpi", tmp_path, deaths, f"lane_width={width}", rule=rule, options=ULFM)
    goes_on_without(tmp_path, ended)
    assert rule == "deadline" or len(died(tmp_path)) == 2
    nobody_is_left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, "all"])
@pytest.mark.parametrize(("mpi", "options"), [*((mpi, ()) for mpi in mpis()), ("openmpi", ULFM)])
def test_the_server_dies(mpi: str, options: tuple[str, ...], width: Any, tmp_path: Path) -> None:
    ended = run(mpi, tmp_path, [], f"lane_width={width}", options=options, env={faults.VARIABLE: "metrics:5"})
    assert ended.code != 0
    assert readable(tmp_path, ended) >= 4
    nobody_is_left(tmp_path)
    goes_on_later(mpi, tmp_path, *options)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, "all"])
@pytest.mark.parametrize("mpi", mpis())
def test_without_fault_tolerance_a_death_ends_the_job(mpi: str, width: Any, tmp_path: Path) -> None:
    ended = run(mpi, tmp_path, [(2, 5)], f"lane_width={width}")
    assert ended.code not in (0, 2)
    assert mpi == "mpich" or "rank 3" in ended.out + ended.err  # MPICH's launcher may name another process
    by_term = ("stopped",) if mpi == "openmpi" else ()  # its launcher sends TERM to the others, and they save
    assert readable(tmp_path, ended, *by_term) >= 5
    nobody_is_left(tmp_path)
    goes_on_later(mpi, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2])
def test_where_mpi_is_silent_a_rank_is_given_up(width: int, tmp_path: Path) -> None:
    """MPICH's launcher must be kept from noticing, or it kills the others; it tells them by USR1 in any case."""
    shim = tmp_path / "shim"
    shim.write_text("#!/bin/sh\ntrap '' USR1\n\"$@\"\nexit 0\n")
    shim.chmod(0o755)
    how: dict[str, Any] = {"options": ["-disable-auto-cleanup"], "program": [str(shim), sys.executable]}
    ended = run("mpich", tmp_path, [(2, 5)], f"lane_width={width}", "lost_after=1.0", **how)
    assert ended.code == 0, ended.err
    data = store.open_run(tmp_path / "run")
    assert data.attrs["status"] == "done"
    assert data["round"].values.tolist() == list(range(ROUNDS))
    lost = {event["client"] for event in store.events(tmp_path / "run") if event["kind"] == "lost"}
    assert with_ranks({2}) <= lost
    assert "rank 3 is lost (not heard of for 1 s), and with it clients 2, 6" in ended.err
    nobody_is_left(tmp_path)
