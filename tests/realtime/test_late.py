"""Who is late in real time: what is under way is waited for by its bytes, and older personal state is told of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.runs import after_each_round
from hpcfl import store
from hpcfl.base.errors import Stopped
from hpcfl.engine import stopping
from hpcfl.testing.runs import play, table

pytestmark = pytest.mark.mpi

ROUNDS = 4
SAVED = {"momentum": 0.5, "persist_optimizer": True}


@pytest.fixture
def patient(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for those who leave however long they take."""
    if world.size < 3:
        pytest.skip("needs two clients on ranks of their own")
    from hpcfl.realtime import server

    monkeypatch.setattr(server, "LEAVE_SECONDS", 1e6)


def real(world: Any, width: Any, **more: Any) -> dict[str, Any]:
    """A run in real time with one client on each rank but the server's."""
    plain = {"clients": world.size - 1, "lane_width": width, "threads": 1, "speed": {"model": "none"}}
    return {**table("salf", "mlp", False), "clock": "wall", "data": {"name": "digits"}, **plain, **more}


# ---- a lane of several ranks


@pytest.fixture
def closes_when_sent(world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a round close when it waits for the last group and all ranks but the first client's have begun to send it.

    On a busy machine they may be done before the server has noticed that its state has left: then nothing is under way.
    """
    from hpcfl.realtime import client, server
    from hpcfl.realtime.outcome import RoundOutcome

    names = ["" for _ in range(world.size)]
    visit, post, attempt = client.ClientRank._visit, client.ClientRank._post, server.Server._attempt

    def name(round_: int) -> None:
        names[:] = [f"sent-{round_}-{rank}" for rank in range(world.size)]

    def attempted(self: Any, round_: int, *given: Any) -> Any:
        name(round_)
        return attempt(self, round_, *given)

    def visited(self: Any, command: Any) -> Iterator[Any]:
        name(command.round)
        yield from visit(self, command)

    def posted(self: Any, staged: Any) -> Iterator[Any]:
        yield from post(self, staged)
        if self._posted == self._total:
            (shared_dir / names[world.rank]).touch()

    monkeypatch.setattr(server.Server, "_attempt", attempted)
    monkeypatch.setattr(client.ClientRank, "_visit", visited)
    monkeypatch.setattr(client.ClientRank, "_post", posted)

    def over(outcome: RoundOutcome, seconds: float) -> bool:
        outcome.ends = 0.0  # ask at each look
        return all(lane.visits.pending for lane in outcome.lanes) and all(
            (shared_dir / each).exists() for each in names[2:]
        )

    monkeypatch.setattr(RoundOutcome, "over", over)


@pytest.mark.usefixtures("patient", "closes_when_sent")
def test_layers_under_way_count_where_another_rank_of_the_lane_is_slow(
    world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No group can have arrived when a round closes; that bytes are under way is all that gives them time, minutes."""
    from hpcfl.mpi import waiting
    from hpcfl.realtime import lanes

    monkeypatch.setattr(lanes, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(waiting, "TELLING", 2**60)
    monkeypatch.setattr(waiting, "UNKNOWN", 1e5)
    after_each_round(monkeypatch, lambda done, row: (shared_dir / str(done - 1)).touch())
    values = real(
        world,
        "all",
        algorithm={"name": "helpers.strange.held:Held", "missing": "none", "victim": 0, "gates": str(shared_dir)},
        model={"name": "mlp", "hidden": [512, 512]},
        participation={"close": "deadline", "deadline": 1e6},
    )
    run = play(world, values, shared_dir / "run", world.comm)
    if world.rank == 0:
        data, others = store.open_run(run), world.size - 2
        np.testing.assert_array_equal(data["depth"].values, [[4] + [1] * others] * ROUNDS)
        np.testing.assert_array_equal(data["layer_weight"].values, np.full((ROUNDS, 3), others))


# ---- a lane of one rank


@pytest.mark.usefixtures("patient")
def test_who_had_sent_nothing_catches_up_without_its_large_blocks(
    world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of each of its frames says that nothing was sent."""
    from hpcfl.mpi.channel import Direct

    absent, carried = [], Direct.absent

    def counted(self: Direct, data: Any) -> Any:
        absent.append(data.nbytes)
        return carried(self, data)

    monkeypatch.setattr(Direct, "absent", counted)
    late = {"name": "helpers.strange.late:Late", "victim": 0, "gate": str(shared_dir / "gate")}
    values = real(
        world,
        1,
        algorithm={**late, "stall": 1e6, "pause": 1e-3},
        model={"name": "mlp", "hidden": [512, 512]},
        participation={"close": "first", "first": world.size - 2},
        checkpoint={"every": ROUNDS},
    )
    run = play(world, values, shared_dir / "run", world.comm)
    large = 4 * 512 * 512
    assert {*absent} == ({large} if world.rank == 1 else set())
    if world.rank == 0:
        data = store.open_run(run)
        assert data["depth"].values[:, 0].tolist() == [4, -1, -1, -1]
        sent = data["wire_bytes_out"].values.sum(axis=0)
        assert sent[1] < large < sent[2:].min()
        assert data["wire_bytes_in"].values[:, 0].sum() == sent[1:].sum()


def test_how_long_bytes_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the median of what has come; before, by what has left, but on no more than gigabit Ethernet is counted."""
    from hpcfl.mpi import waiting

    monkeypatch.setattr(waiting.time, "monotonic", lambda: 10.0)
    bandwidth, size = waiting.Bandwidth(), 10**8
    assert bandwidth.allows(size) == pytest.approx(waiting.SLACK * 1.0)
    bandwidth.went(size, 0.0)
    assert bandwidth.allows(size) == pytest.approx(waiting.SLACK * 10.0)
    bandwidth.went(size, 9.9)
    assert bandwidth.allows(size) == pytest.approx(waiting.SLACK * 1.0)
    for start in (9.5, 0.0, 9.8):  # one of them met a rank that slept
        bandwidth.came(size, start)
    bandwidth.came(waiting.TELLING - 1, 0.0)
    assert bandwidth.allows(size) == pytest.approx(waiting.SLACK * 0.5, rel=1e-4)
    assert bandwidth.allows(0) == 0.0


# ---- personal state that did not come


@pytest.mark.usefixtures("patient")
def test_older_personal_state_is_told_of(
    world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Client 1 is stuck in round 0 until the others are in round 3; the run stops when a visit of its has counted."""
    from hpcfl.realtime import questions

    monkeypatch.setattr(questions, "SAVE_SECONDS", 1e6)  # for whoever is free; who is late is not asked
    monkeypatch.setattr(stopping, "LOOK_SECONDS", 0.0)
    folder = shared_dir / "run"
    after_each_round(monkeypatch, lambda done, row: row["arrived"][1] and stopping.request(folder))
    stuck = {"victim": 1, "gate": str(shared_dir / "gate"), "stall": 1e6, "pause": 0.02}
    values = real(
        world,
        1,
        rounds=400,
        algorithm={"name": "helpers.strange.late:Late", "batch": 64, **SAVED, **stuck},
        participation={"close": "first", "first": world.size - 2},
        checkpoint={"every": 1, "keep": 1000},
    )
    with pytest.raises(Stopped) as caught:
        play(world, values, folder, world.comm)
    world.meet()
    if world.rank != 0:
        return
    said = capfd.readouterr().err.splitlines()
    events = [event for event in store.events(folder) if event["kind"] == "stale"]
    for done in (1, 2, 3):
        saved = store.load(folder / "checkpoints" / f"round-{done:06d}")
        assert saved.stale == {1: 0}  # the second repeats what the first one has, and is no newer for that
        text = f"the checkpoint after round {done} holds the client's personal state after round 0"
        assert [(e["client"], e["text"]) for e in events if e["round"] == done - 1] == [(1, text)]
        line = f"hpcfl: checkpoint after round {done}: no personal state in time from client 1; kept is that of round 0"
        assert said.count(line) == 1
    newest = store.latest(folder)
    assert newest is not None
    saved = store.load(newest)
    assert saved.round == caught.value.round
    assert 1 not in saved.stale  # another may be late by now: on a busy machine any visit may be
    with store.checkpoints.h5py.File(newest / "server.h5") as file:
        assert ("stale" in file) == bool(saved.stale)
