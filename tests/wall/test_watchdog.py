"""What a client rank concludes from the run's status."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcfl import store
from hpcfl.base.errors import RunError
from hpcfl.engine.wall import watchdog as watch
from hpcfl.engine.wall.watchdog import LeftBehind, Watchdog


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


def test_a_failed_run_ends_at_once(clock: list[float], tmp_path: Path) -> None:
    watching = Watchdog(tmp_path)
    store.write_status(tmp_path, "failed", "no reason")
    clock[0] = 10.0
    with pytest.raises(RunError, match="failed"):
        watching.look()
