"""What a client rank concludes from the run's status."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcfl import store
from hpcfl.base.errors import RunError
from hpcfl.engine import watchdog as watch
from hpcfl.engine.stopping import Stop
from hpcfl.engine.watchdog import LeftBehind, Noticeboard, Watchdog
from hpcfl.launch import run
from hpcfl.store.status import Status, _checked, signed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the test moves on."""
    now = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    return now


def test_a_running_run_is_watched_without_end(clock: list[float], tmp_path: Path) -> None:
    store.write_status(tmp_path, "running")
    watching = Watchdog(tmp_path, 0.5)
    for second in range(0, 1000, 3):
        clock[0] = second
        watching.look()


@pytest.mark.parametrize("state", ["done", "stopped"])
@pytest.mark.parametrize(("lost_after", "most"), [(0.5, 3.0), (None, 122.0), (1e6, 122.0)])
def test_a_rank_that_nobody_dismisses_parts(
    state: str, lost_after: float | None, most: float, clock: list[float], tmp_path: Path
) -> None:
    watching = Watchdog(tmp_path, lost_after)
    store.write_status(tmp_path, state)
    clock[0] = 10.0
    watching.look()
    clock[0] += most
    watching.look()
    clock[0] += 2.5
    with pytest.raises(LeftBehind) as found:
        watching.look()
    assert found.value.state == state


@pytest.mark.parametrize("told", ["", "signal USR1", "signal TERM"])
def test_who_is_ended_by_the_launcher_has_no_line_of_its_own(
    told: str, clock: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching, stop, ended = Watchdog(tmp_path), Stop(tmp_path, False), list[int]()
    monkeypatch.setattr(stop, "requested", lambda: told)
    monkeypatch.setattr(run, "end_job", lambda comm, code: ended.append(code))
    store.write_status(tmp_path, "failed")
    clock[0] = 10.0
    with nullcontext() if told == "signal TERM" else pytest.raises(RunError, match="failed"):
        run._look_for_server(watching, stop, None)
    assert ended == [1] * (told == "signal TERM")


def test_a_failed_run_ends_at_once(clock: list[float], tmp_path: Path) -> None:
    watching = Watchdog(tmp_path)
    store.write_status(tmp_path, "failed", "no reason")
    clock[0] = 10.0
    with pytest.raises(RunError, match="failed"):
        watching.look()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> list[float]:
    """When somebody has looked at a file."""
    times, read = list[float](), store.read_status

    def counted(folder: Path) -> Status:
        times.append(clock[0])
        return read(folder)

    monkeypatch.setattr(watch.store, "read_status", counted)
    return times


def boards(count: int) -> list[Noticeboard]:
    first = Noticeboard.offered()
    return [first, *(Noticeboard.found(first.words) for _ in range(count - 1))]


def watched(watching: list[Watchdog], clock: list[float], seconds: float) -> list[str]:
    """Let everybody look ten times a second; return what ends it for each, "" for nothing."""
    ends = [""] * len(watching)
    for _ in range(round(10 * seconds)):
        clock[0] += 0.1
        for each, watchdog in enumerate(watching):
            try:
                if not ends[each]:
                    watchdog.look()
            except (RunError, LeftBehind) as end:
                ends[each] = str(end)
    return ends


def test_one_rank_of_a_host_looks(clock: list[float], looks: list[float], tmp_path: Path) -> None:
    store.write_status(tmp_path, "running")
    watching = [Watchdog(tmp_path, None, board) for board in boards(5)]
    assert watched(watching, clock, 100.0) == [""] * 5
    assert 40 <= len(looks) <= 50
    assert np.diff(looks).min() >= 2.0


def test_when_the_one_that_looks_is_gone_others_do(clock: list[float], looks: list[float], tmp_path: Path) -> None:
    store.write_status(tmp_path, "running")
    watching = [Watchdog(tmp_path, 0.5, board) for board in boards(3)]
    watched(watching, clock, 10.0)
    store.write_status(tmp_path, "done")
    there = len(looks)
    ends = watched(watching[2:], clock, 10.0)
    assert ends == ["the run is done, and this rank was taken for dead"]
    assert len(looks) > there


def test_all_of_a_host_learn_that_the_server_was_killed(clock: list[float], looks: list[float], tmp_path: Path) -> None:
    text = signed("running").replace(f"pid: {os.getpid()}", "pid: 999999999")
    (tmp_path / "status").write_text(_checked(text))
    watching = [Watchdog(tmp_path, None, board) for board in boards(4)]
    assert watched(watching, clock, 5.0) == ["the server (rank 0) is no more"] * 4
    assert len(looks) == 1


def test_many_hosts_look_rarely(clock: list[float], looks: list[float], tmp_path: Path) -> None:
    """The server's every 2 s, the others' together about as often, but each at least once in a minute."""
    store.write_status(tmp_path, "running")
    clock[0] = 1000.0
    watched([Watchdog(tmp_path, None, Noticeboard(), host, 20) for host in range(20)], clock, 400.0)
    assert 400 / 2 + 19 * (400 / 42 - 2) <= len(looks) <= 400 / 2 + 19 * (400 / 40 + 1)
    looks.clear()
    far = Watchdog(tmp_path, None, Noticeboard(), 9_999, 10_000)
    watched([far], clock, 600.0)
    assert 9 <= len(looks) <= 10


def test_who_cannot_reach_the_others_looks_by_itself(clock: list[float], looks: list[float], tmp_path: Path) -> None:
    store.write_status(tmp_path, "failed", "no reason")
    found = [Noticeboard.found(words) for words in ("", f"{os.getpid()} 999 {'0' * 32}")]
    ends = watched([Watchdog(tmp_path, None, board) for board in found], clock, 5.0)
    assert ends == ["the run has failed"] * 2
    assert len(looks) == 2


@pytest.mark.mpi
def test_ranks_share_a_board(world: Any) -> None:
    from hpcfl.launch.run import _board

    board = _board(world.comm, ["ab"[rank % 2] for rank in range(world.size)])
    if world.rank < 2:
        board.state = f"from {world.rank}"
    world.meet()
    assert board.state == f"from {world.rank % 2}"
    world.meet()
