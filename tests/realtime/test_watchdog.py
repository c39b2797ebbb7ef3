"""What a client rank concludes from the run's status."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from helpers.launcher import LIMIT
from hpcfl import store
from hpcfl.base.errors import RunError
from hpcfl.engine import watchdog as watch
from hpcfl.engine.stopping import Stop
from hpcfl.engine.watchdog import LeftBehind, Watchdog
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
        beat(tmp_path, second)
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


def test_who_cannot_see_the_folder_goes_on(clock: list[float], tmp_path: Path) -> None:
    watching = Watchdog(tmp_path / "on another host", 0.5)
    for second in range(0, 1000, 3):
        clock[0] = second
        watching.look()


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


def beat(folder: Path, second: float) -> None:
    """Let the server say at this second that it is there."""
    os.utime(folder / "status", (second, second))


def test_ranks_of_the_servers_host_take_turns(clock: list[float], looks: list[float], tmp_path: Path) -> None:
    store.write_status(tmp_path, "running")
    watching = [Watchdog(tmp_path, None, rank, "aaaaabb") for rank in range(1, 5)]
    assert watched(watching, clock, 100.0) == [""] * 4
    assert 45 <= len(looks) <= 50
    assert np.diff(looks).min() > 1.5


def test_ranks_of_other_hosts_take_turns(clock: list[float], looks: list[float], tmp_path: Path) -> None:
    """Together about every 2 s, but each at least once in a minute."""
    store.write_status(tmp_path, "running")
    hosts = "a" + "bcde" * 5
    watched([Watchdog(tmp_path, None, rank, hosts) for rank in range(1, 21)], clock, 120.0)
    assert 55 <= len(looks) <= 60
    assert np.diff(looks).min() > 1.5
    looks.clear()
    watched([Watchdog(tmp_path, None, 9_999, "a" + "b" * 10_000)], clock, 185.0)
    assert np.diff(looks) == pytest.approx([60.0, 60.0], abs=0.2)


@pytest.mark.parametrize("gone", [{1}, {1, 2}, {2, 3}])
def test_when_others_are_gone_the_rest_look(
    gone: set[int], clock: list[float], looks: list[float], tmp_path: Path
) -> None:
    store.write_status(tmp_path, "running")
    watching = {rank: Watchdog(tmp_path, 0.5, rank, "aaaa") for rank in (1, 2, 3)}
    watched([*watching.values()], clock, 10.0)
    store.write_status(tmp_path, "done")
    left = [watchdog for rank, watchdog in watching.items() if rank not in gone]
    assert watched(left, clock, 12.0) == ["the run is done, and this rank was taken for dead"] * len(left)


def test_somebody_notices_soon_that_the_server_was_killed(clock: list[float], tmp_path: Path) -> None:
    text = signed("running").replace(f"pid: {os.getpid()}", "pid: 999999999")
    (tmp_path / "status").write_text(_checked(text))
    watching = [Watchdog(tmp_path, None, rank, "aaaaab") for rank in range(1, 5)]
    ends = watched(watching, clock, 2.5)
    assert sorted(ends) == ["", "", "", "the server (rank 0) is no more"]


def test_a_server_that_is_silent_for_long_is_gone(clock: list[float], tmp_path: Path) -> None:
    """All ranks conclude it, each by itself: no launcher may be left to end them."""
    store.write_status(tmp_path, "running")
    watching = [Watchdog(tmp_path, None, rank, "abbccccccc") for rank in range(1, 10)]
    for second in range(0, 400, 10):
        beat(tmp_path, second)
        assert watched(watching, clock, 10.0) == [""] * 9
    assert watched(watching, clock, 170.0) == [""] * 9
    ends = watched(watching, clock, 50.0)
    assert all(end.startswith("the server (rank 0) has been silent for 1") for end in ends)
    assert all(end.endswith(" s: its host may be gone") for end in ends)


def test_a_rank_that_was_suspended_itself_listens_anew(clock: list[float], tmp_path: Path) -> None:
    store.write_status(tmp_path, "running")
    watching = Watchdog(tmp_path, None, 1, "ab")
    assert watched([watching], clock, 10.0) == [""]
    clock[0] += 10_000.0
    assert watched([watching], clock, 150.0) == [""]
    beat(tmp_path, 5.0)
    assert watched([watching], clock, 170.0) == [""]
    assert watched([watching], clock, 20.0) != [""]


def test_ranks_of_a_run_that_was_taken_over_end(clock: list[float], tmp_path: Path) -> None:
    store.write_status(tmp_path, "running")
    watching = [Watchdog(tmp_path, None, rank, "abb") for rank in (1, 2)]
    assert watched(watching, clock, 10.0) == [""] * 2
    text = signed("running").replace(f"pid: {os.getpid()}", "pid: 7").replace(f"host: {os.uname().nodename}", "host: c")
    (tmp_path / "status").write_text(_checked(text))
    assert watched(watching, clock, 10.0) == ["the run has been taken over by process 7 on c"] * 2


def test_a_server_says_that_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "BEAT_SECONDS", 0.01)
    store.write_status(tmp_path, "running")

    def waited(change: bool) -> bool:
        beat(tmp_path, 1.0)
        end = time.monotonic() + (LIMIT if change else 0.2)
        while time.monotonic() < end and (tmp_path / "status").stat().st_mtime == 1.0:
            time.sleep(0.01)
        return (tmp_path / "status").stat().st_mtime != 1.0

    with watch.beating(tmp_path):
        assert waited(True)
    time.sleep(0.1)
    assert not waited(False)
    with watch.beating(tmp_path / "gone"):  # a file system that has gone ends nothing
        time.sleep(0.05)
