"""Ranks that die: a run goes on without them where MPI tells of it, and elsewhere ends with all it has recorded."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import absent, faults
from helpers.launcher import ROOT, Ended, alive, job, mpis
from hpcfl import store
from hpcfl.commands.show import summary
from hpcfl.config.presets import read
from hpcfl.schedule.plan import Fate
from hpcfl.testing.runs import play

pytestmark = pytest.mark.launch

RANKS, CLIENTS, ROUNDS = 5, 8, 12
HOSTED = {rank: {rank - 1, rank + 3} for rank in range(1, RANKS)}  # all alike, so they are dealt in their order
OF_SEVEN = {rank: {rank - 1, rank + 5} for rank in range(1, 7)}
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


def hpcfl(mpi: str, *args: str, ranks: int = RANKS, **how: Any) -> Ended:
    return job(mpi, ranks, [str(ROOT / "tests" / "helpers" / "driver.py"), *args], **how)


def died(here: Path) -> set[int]:
    """The clients that took their ranks with them."""
    return {int(path.name) for path in (here / "marks").iterdir()}


def with_ranks(clients: set[int], hosts: dict[int, set[int]] = HOSTED) -> set[int]:
    """All clients that are lost with these."""
    return {each for hosted in hosts.values() for each in hosted if hosted & clients}


def goes_on_without(here: Path, ended: Ended, hosts: dict[int, set[int]] = HOSTED) -> None:
    """The job has ended well, and says who is gone."""
    assert ended.code == 0, ended.err
    folder, dead = here / "run", died(here)
    data, lost = store.open_run(folder), with_ranks(dead, hosts)
    assert data.attrs["status"] == "done"
    assert data["round"].values.tolist() == list(range(ROUNDS))
    events = [event for event in store.events(folder) if event["kind"] == "lost"]
    assert {event["client"] for event in events} == lost
    assert {client for client, _ in summary(folder)["lost"]} == lost
    fates = data["fate"].values
    at_visit = {(event["round"], event["client"]) for event in events if fates[event["round"], event["client"]] >= 0}
    assert {(*each,) for each in np.argwhere(fates == Fate.LOST).tolist()} <= at_visit
    assert all(fates[each] in (Fate.LOST, Fate.COUNTED, Fate.PARTIAL) for each in at_visit)
    for rank, hosted in hosts.items():
        told = [line for line in ended.said if line.startswith(f"hpcfl: rank {rank} is lost")]
        assert len(told) == bool(hosted & dead)
        assert all(line.endswith(f"and with it clients {min(hosted)}, {max(hosted)}") for line in told)
    for event in events:
        assert (data["cohort"].values[event["round"] + 1 :, event["client"]] == 0).all()
    assert np.isfinite(data["accuracy"].values[-1])
    assert "Traceback" not in ended.err


def test_a_job_starts_without_a_rank_loses_another_and_all_clients_go_on(solo: Any, tmp_path: Path) -> None:
    """Rank 4 dies while it starts, rank 2 in the round after a checkpoint, which has what its clients had.

    So a replay gives the same bits.
    """
    settings = "lane_width=1", "lost_clients=rehost", "start_within=300.0", "min_ranks=4"
    how: dict[str, Any] = {"options": ULFM, "env": {absent.VARIABLE: "kill:4"}}
    ended = run("openmpi", tmp_path, [(1, 3)], *settings, **how)
    assert ended.code == 0, ended.err
    assert died(tmp_path) == {1}
    folder = tmp_path / "run"
    data = store.open_run(folder)
    assert data.attrs["status"] == "done"
    assert (data["cohort"].values == 1).all()
    arrived = data["arrived"].values
    assert arrived[3].tolist()[1] == 0
    assert arrived.sum(1)[[0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11]].tolist() == [8] * 11
    first, later = "the state before the first visit", "the state after round 3"
    moved = [  # in which round who went from where to where, and with what
        *((0, client, 4, to, first) for client, to in ((3, 1), (7, 2))),
        *((4, client, 2, to, later) for client, to in ((1, 3), (5, 1), (7, 3))),
    ]
    texts = [(round_, c, f"at rank {to} in place of rank {old}, with {what}") for round_, c, old, to, what in moved]
    events = [event for event in store.events(folder) if event["kind"] == "rehosted"]
    assert sorted((event["round"], event["client"], event["text"]) for event in events) == sorted(texts)
    assert dict(summary(folder)["rehosted"]) == {client: text for _, client, text in texts}
    assert summary(folder)["lost"] == []
    said = "\n".join(ended.said)
    for rank in (2, 4):
        assert said.count(f"hpcfl: rank {rank} is lost (") == 1
    assert f"clients 1, 7 of rank 2 go on at rank 3, with {later}" in said
    assert f"client 5 of rank 2 goes on at rank 1, with {later}" in said
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
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ranks", [(1, 4), (2, 3), (1, 2)], ids=["leader", "led and leader", "node"])
def test_ranks_of_two_levels_die(ranks: tuple[int, int], rule: str, tmp_path: Path) -> None:
    """Ranks 1 and 3 lead two ranks each: dead, they are followed by the other one, where that is left."""
    deaths = [(ranks[0] - 1, 3), (ranks[1] - 1, 6)]
    ended = run("openmpi", tmp_path, deaths, "lane_width=two-level", "leaders=2", rule=rule, options=ULFM)
    goes_on_without(tmp_path, ended)
    follow = [line for line in ended.said if line.endswith(", which is lost")]
    assert len(follow) == sum(rank in (1, 3) for rank in ranks if with_ranks({rank - 1}) & died(tmp_path)) or 2 in ranks
    nobody_is_left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "ranks", [(5,), (1, 5), (5, 6), (1, 2)], ids=["leader", "both leaders", "node", "node above another"]
)
def test_ranks_below_another_leader_die(ranks: tuple[int, ...], rule: str, tmp_path: Path) -> None:
    """Rank 1 leads rank 2, and rank 5, which leads rank 6; where both 1 and 2 are dead, rank 5 takes their place."""
    deaths = [(rank - 1, 3 * place) for place, rank in enumerate(ranks, start=1)]
    settings = "clients=12", "lane_width=two-level", "leaders=3", "fan_out=2"
    ended = run("openmpi", tmp_path, deaths, *settings, rule=rule, options=ULFM, ranks=7)
    goes_on_without(tmp_path, ended, OF_SEVEN)
    follow = [line for line in ended.said if line.endswith(", which is lost")]
    gone = {rank for rank in ranks if OF_SEVEN[rank] & died(tmp_path)}
    assert len(follow) == len(gone & {1, 5}) + (gone == {1, 2})  # rank 2 led in the place of rank 1
    there = store.open_run(tmp_path / "run")["cohort"].values[ROUNDS - 3 :].any(0)
    assert {*np.flatnonzero(there).tolist()} == {*range(12)} - with_ranks(died(tmp_path), OF_SEVEN)
    nobody_is_left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ranks", [(3,), (1,), (1, 3), (3, 1)])
def test_ranks_alone_on_nodes_above_others_die(ranks: tuple[int, ...], rule: str, tmp_path: Path) -> None:
    """Rank 1 leads ranks 3 and 4, and 3 leads 7, all of them nodes of their own: one below leads in their places."""
    hosts = {rank: {rank - 1, rank + 6} for rank in range(1, 8)}
    deaths = [(rank - 1, 3 * place) for place, rank in enumerate(ranks, start=1)]
    settings = "clients=14", "lane_width=two-level", "leaders=7", "fan_out=2"
    ended = run("openmpi", tmp_path, deaths, *settings, rule=rule, options=ULFM, ranks=8)
    goes_on_without(tmp_path, ended, hosts)
    there = store.open_run(tmp_path / "run")["cohort"].values[ROUNDS - 3 :].any(0)
    assert {*np.flatnonzero(there).tolist()} == {*range(14)} - with_ranks(died(tmp_path), hosts)
    nobody_is_left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_neighbours_go_on_without_the_one_that_passes_their_messages_on(how: int, tmp_path: Path) -> None:
    """Rank 1 is dead, or suspended for too long; the clients of rank 2, by way of it until then, arrive later too."""
    settings = "lane_width=two-level", "leaders=2", "participation.close=arrivals", "participation.buffer=2"
    settings += "lost_after=4.0", "rounds=80", "checkpoint.every=80", f"algorithm.signal={int(how)}"
    settings += "speed.model=exponential", "speed.kind=dynamic", "speed.rate=4.0"
    ended = run("openmpi", tmp_path, [(0, 6)], *settings, options=ULFM)
    assert ended.code == 0, ended.err
    assert died(tmp_path) == {0}
    folder = tmp_path / "run"
    data = store.open_run(folder)
    assert data.attrs["status"] == "done"
    assert {event["client"] for event in store.events(folder) if event["kind"] == "lost"} == HOSTED[1]
    client = data["arrival_client"].values
    assert HOSTED[2] <= {*client[:6].ravel().tolist()}
    assert HOSTED[2] <= {*client[-10:].ravel().tolist()}
    assert HOSTED[1].isdisjoint(client[-10:].ravel().tolist())
    nobody_is_left(tmp_path)


@pytest.mark.slow
def test_who_is_reached_by_way_of_another_rank_is_missed_when_it_dies(tmp_path: Path) -> None:
    """Rank 2, which leads nobody: the message of its death comes on no channel that the server waits on."""
    settings = "lane_width=two-level", "leaders=2", "participation.close=arrivals", "participation.buffer=2"
    settings += "rounds=80", "checkpoint.every=80", "speed.model=exponential", "speed.kind=dynamic", "speed.rate=4.0"
    ended = run("openmpi", tmp_path, [(1, 6)], *settings, options=ULFM)
    assert ended.code == 0, ended.err
    assert died(tmp_path) == {1}
    lost = [event["client"] for event in store.events(tmp_path / "run") if event["kind"] == "lost"]
    assert {*lost} == HOSTED[2]
    nobody_is_left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2, "all"])
@pytest.mark.parametrize("kind", ["kill", "stop"])
@pytest.mark.parametrize("lost", ["drop", "rehost"])
def test_a_job_starts_without_a_rank(kind: str, width: Any, lost: str, tmp_path: Path) -> None:
    settings = f"lane_width={width}", f"lost_clients={lost}", "start_within=60.0", "min_ranks=4"
    ended = run("openmpi", tmp_path, [], *settings, options=ULFM, env={absent.VARIABLE: f"{kind}:3"})
    assert ended.code == 0, ended.err
    assert any(line.startswith("hpcfl: rank 3 is lost (") for line in ended.said)
    data = store.open_run(tmp_path / "run")
    assert data.attrs["status"] == "done"
    there = np.array([lost == "rehost" or client not in HOSTED[3] for client in range(CLIENTS)])
    assert ((data["cohort"].values == 1) == there).all()
    nobody_is_left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "stop", "last"])
@pytest.mark.parametrize("rank", [1, 2, 5, 6], ids=["leader", "led", "leader below another", "led by that"])
def test_a_job_of_two_levels_starts_without_a_rank(kind: str, rank: int, tmp_path: Path) -> None:
    """Rank 1 leads rank 2, and rank 5, which leads rank 6; where a leader is missing, the other one leads."""
    settings = "clients=12", "lane_width=two-level", "leaders=3", "fan_out=2", "start_within=60.0", "min_ranks=6"
    if kind == "last":
        settings += ("start_within=20.0",)
    env = {absent.VARIABLE: f"{kind}:{rank}"}
    ended = run("openmpi", tmp_path, [], *settings, options=ULFM, env=env, ranks=7)
    assert ended.code == 0, ended.err
    assert sum(line.startswith(f"hpcfl: rank {rank} is lost (") for line in ended.said) == 1
    data = store.open_run(tmp_path / "run")
    assert data.attrs["status"] == "done"
    there = [client not in OF_SEVEN[rank] for client in range(12)]
    assert (data["cohort"].values == 1).any(0).tolist() == there
    assert (data["arrived"].values == 1).any(0).tolist() == there
    nobody_is_left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "stop", "last"])
def test_arrivals_over_two_levels_start_without_a_rank(kind: str, tmp_path: Path) -> None:
    """Rank 1 passes the messages of rank 2 on, if it is there."""
    settings = "lane_width=two-level", "leaders=2", "participation.close=arrivals", "participation.buffer=2"
    settings += "start_within=20.0" if kind == "last" else "start_within=60.0", "min_ranks=4", "rounds=60"
    ended = run("openmpi", tmp_path, [], *settings, options=ULFM, env={absent.VARIABLE: f"{kind}:1"})
    assert ended.code == 0, ended.err
    assert sum(line.startswith("hpcfl: rank 1 is lost (") for line in ended.said) == 1
    data = store.open_run(tmp_path / "run")
    assert data.attrs["status"] == "done"
    came = {*data["arrival_client"].values.ravel().tolist()}
    assert HOSTED[1].isdisjoint(came)
    assert not HOSTED[2].isdisjoint(came)
    nobody_is_left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_job_without_enough_ranks_ends(kind: str, tmp_path: Path) -> None:
    settings = "start_within=60.0", "min_ranks=5"
    ended = run("openmpi", tmp_path, [], *settings, options=ULFM, env={absent.VARIABLE: f"{kind}:3"})
    assert ended.code == 1
    few = "expected at least 5 of 5 ranks within start_within = 60 s, but rank 3 was not there"
    assert ended.said == [f"hpcfl: rank 0 of 5: min_ranks: {few}"]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
def test_clients_of_ranks_that_die_at_any_time_go_on(number: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(number)
    ranks = rng.choice(np.arange(1, RANKS), 2, replace=False)
    deaths = [(int(rng.choice(sorted(HOSTED[int(rank)]))), int(rng.integers(ROUNDS - 3))) for rank in ranks]
    width = (1, 2, "all")[number % 3]
    ended = run("openmpi", tmp_path, deaths, f"lane_width={width}", "lost_clients=rehost", options=ULFM)
    assert ended.code == 0, ended.err
    folder, dead = tmp_path / "run", died(tmp_path)
    data = store.open_run(folder)
    assert data["round"].values.tolist() == list(range(ROUNDS))
    assert (data["arrived"].values[-1] == 1).all()
    assert dead == {client for client, _ in deaths}
    assert {client for client, _ in summary(folder)["rehosted"]} >= with_ranks(dead)
    assert summary(folder)["lost"] == []
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
