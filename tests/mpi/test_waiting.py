"""How long a rank that waits sleeps, by a clock that only the test moves. (Marked for ranks: it needs mpi4py.)"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.mpi


class Clock:
    """What `time` and `os` are to somebody who waits: looks take a core, sleeps take none."""

    def __init__(self) -> None:
        self.now = self.used = 0.0
        self.slept = False
        self.naps: list[float] = []

    def look(self, seconds: float) -> None:
        self.now, self.used, self.slept = self.now + seconds, self.used + seconds, False

    def sleep(self, seconds: float) -> None:
        self.now, self.slept = self.now + seconds, True
        self.naps.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    from hpcfl.mpi import waiting

    clock = Clock()
    fake = SimpleNamespace(monotonic=lambda: clock.now, thread_time=lambda: clock.used, sleep=clock.sleep)
    monkeypatch.setattr(waiting, "time", fake)
    monkeypatch.setattr(waiting.Patience, "crowd", 1.0)
    return clock


def waited(clock: Clock, seconds: float, look: Callable[[], float]) -> Any:
    from hpcfl.mpi.waiting import Patience

    patience = Patience()
    while clock.now < seconds:
        clock.look(look())
        patience.pause()
    return patience


@pytest.mark.parametrize(("warm", "cold"), [(2e-6, 5e-6), (2e-5, 5e-5), (1e-5, 5e-4), (3e-4, 3e-4), (1e-3, 5e-3)])
def test_who_waits_takes_a_quarter_of_a_core_at_most(clock: Clock, warm: float, cold: float) -> None:
    """Also where each first look after a sleep takes much longer than others: nothing has moved for that."""
    waited(clock, 3.0, lambda: cold if clock.slept else warm)
    assert clock.used < 0.25 * clock.now
    if cold < 1e-4:
        assert clock.used < 0.1 * clock.now


def test_slow_looks_now_and_then_do_not_keep_it_awake(clock: Clock) -> None:
    """Such as one at a file, five times a second."""
    due = [0.0]

    def look() -> float:
        if clock.now < due[0]:
            return 2e-5
        due[0] = clock.now + 0.2
        return 1e-3

    waited(clock, 3.0, look)
    assert clock.used < 0.1 * clock.now
    assert max(clock.naps) > 0.0015


def test_what_it_is_told_says_nothing_about_how_long_looks_take(clock: Clock) -> None:
    from hpcfl.mpi.waiting import Patience

    patience, due = Patience(), 0.0
    while clock.now < 3.0:
        clock.look(4e-5)
        if clock.now > due:
            patience.moved()
            due = clock.now + 0.2
        patience.pause()
    assert clock.used < 0.1 * clock.now


def test_looks_that_take_longer_move_bytes(clock: Clock) -> None:
    """Naps begin anew, and are short: what follows is noticed soon."""
    patience = waited(clock, 1.0, lambda: 5e-5 if clock.slept else 2e-5)
    assert clock.naps[-1] == pytest.approx(0.002)
    while clock.slept:  # the first look after a sleep
        clock.look(5e-5)
        patience.pause()
    clock.look(1e-3)
    patience.pause()
    before = len(clock.naps)
    for _ in range(10):
        clock.look(2e-5)
        patience.pause()
    assert len(clock.naps) == before
    while len(clock.naps) == before:
        clock.look(2e-5)
        patience.pause()
    assert clock.naps[-1] < 0.0005
