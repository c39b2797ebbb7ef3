"""Where the time goes: every moment of a rank's rounds belongs to one phase, and measuring changes nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcfl import store
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.commands.cli import main
from hpcfl.engine import profile
from hpcfl.engine.profile import PHASES, Phases
from hpcfl.engine.record import Record
from hpcfl.launch.request import run_request
from hpcfl.launch.run import launch
from hpcfl.sums.message import Block, ExactSums
from hpcfl.testing.runs import play, same, table, toml

NAMES = ("compute", "waiting", "broadcast", "reduction", "server", "evaluation", "store", "other")
ROUNDS, OVER = 4, 2


class Clock:
    """A clock that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(profile.time, "perf_counter", lambda: self.now)

    def after(self, seconds: float) -> None:
        self.now += seconds


def seconds(each: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in each.items() if value}


def test_each_moment_belongs_to_the_innermost_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, measured = Clock(monkeypatch), Phases(True)
    clock.after(1)  # before the first round
    measured.begin()
    clock.after(2)
    with measured.phase("evaluation"):
        clock.after(4)
        with measured.phase("waiting"):
            clock.after(8)
            measured.was("reduction")
            clock.after(16)
        clock.after(32)
    measured.begin()
    with suppress(ValueError), measured.phase("compute"):
        clock.after(64)
        raise ValueError
    clock.after(128)
    measured.end()
    clock.after(256)  # after the last one
    with measured.phase("store"):
        clock.after(512)
    first, second = measured.rounds
    assert tuple(first) == PHASES == NAMES
    assert seconds(first) == {"other": 2, "evaluation": 36, "reduction": 8, "waiting": 16}
    assert seconds(second) == {"compute": 64, "other": 128}
    count, total, *parts = measured.figures().tolist()
    sums, median, medians = parts[:8], parts[8], parts[9:]
    assert (count, total, median) == (2, 254, (62 + 192) / 2)
    assert seconds(dict(zip(NAMES, sums))) == {
        "compute": 64,
        "waiting": 16,
        "reduction": 8,
        "evaluation": 36,
        "other": 130,
    }
    assert medians == [each / 2 for each in sums]


def test_nothing_is_noted_unasked() -> None:
    phases = Phases()
    phases.begin()
    with phases.phase("compute"):
        phases.was("store")
    phases.end()
    assert phases.figures().tolist() == Phases(True).figures().tolist() == [0.0] * 19


def test_what_a_record_measures_is_a_phase_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, measured = Clock(monkeypatch), Phases(True)
    record = Record.open(measured)
    with record.timed("server_seconds"):
        clock.after(1)
        with record.phases.phase("reduction"):
            clock.after(2)
        with record.timed("wait_seconds"):
            clock.after(4)
    measured.end()
    assert record.seconds == {"server_seconds": 3, "wait_seconds": 4}
    assert seconds(measured.rounds[0]) == {"server": 1, "reduction": 2, "waiting": 4}


def told(out: str) -> list[dict[str, Any]]:
    """Return what the last line says, which must add up."""
    ranks: list[dict[str, Any]] = json.loads(out.splitlines()[-1])["profile"]
    for each in ranks:
        assert tuple(each) == ("rank", "rounds", "seconds", "shares", "medians")
        for part in ("seconds", "shares", "medians"):
            assert tuple(each[part]) == ("total", *NAMES)
        for part, whole in (("seconds", each["seconds"]["total"]), ("shares", 1.0)):
            assert sum(each[part][name] for name in NAMES) == pytest.approx(whole, abs=1e-5)
            assert each[part]["total"] == whole > 0
    return ranks


def happened(each: dict[str, Any]) -> set[str]:
    return {name for name in NAMES if each["seconds"][name] > 0}


def test_a_run_says_where_its_time_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = toml(table("fedavg", "mlp", True), tmp_path / "run.toml"), tmp_path / "run"
    assert main(["run", str(file), "--set", "rounds=3", "--out", str(folder), "--quiet", "--profile"]) == 0
    out = capsys.readouterr().out
    assert "│ rank │" in out.replace("┃", "│")
    (only,) = told(out)
    assert (only["rank"], only["rounds"]) == (0, 3)
    assert happened(only) >= {"compute", "server", "evaluation", "store", "other"}
    assert only["seconds"]["broadcast"] == only["seconds"]["reduction"] == 0
    data = store.open_run(folder)  # measured around what is a phase here, and in the middle of rounds
    assert only["seconds"]["compute"] <= data["compute_seconds"].values.sum() + 1e-6
    assert only["seconds"]["total"] >= data["wall_seconds"].values[-1]
    assert main(["run", str(file), "--set", "rounds=3", "--out", str(tmp_path / "bare"), "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    same(folder, tmp_path / "bare")


def profiled(world: Any, values: dict[str, Any], folder: Path) -> Path:
    if world.rank == 0:
        toml(values, folder.with_suffix(".toml"))
    launch(
        lambda: run_request(str(folder.with_suffix(".toml")), (), folder, None, quiet=True, profile=True), world.comm
    )
    world.meet()
    return folder


@pytest.mark.mpi
def test_ranks_in_step_tell(world: Any, shared_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bits are those of a run that is not measured; each rank's phases are those that it has."""
    values = table("salf", "mlp", True)
    run = profiled(world, values, shared_dir / "run")
    out = capsys.readouterr().out
    plain = play(world, values, shared_dir / "plain", world.comm)
    if world.rank > 0:
        assert out == ""
        return
    same(run, plain)
    ranks = told(out)
    assert [each["rank"] for each in ranks] == list(range(world.size))
    assert {each["rounds"] for each in ranks} == {ROUNDS}
    assert happened(ranks[0]) >= {"server", "evaluation", "store", "other"}
    for each in ranks[1:]:
        assert happened(each) >= {"compute", "waiting", "broadcast", "reduction", "evaluation", "other"}
        assert each["seconds"]["server"] == 0


@pytest.mark.mpi
def test_released_ranks_tell_of_the_rounds_that_they_had(
    world: Any, shared_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FedAvg, "clients_done", lambda self, round_: round_ >= OVER)
    profiled(world, table("fedavg", "mlp", True), shared_dir / "run")
    if world.rank == 0:
        rounds = [each["rounds"] for each in told(capsys.readouterr().out)]
        assert rounds == [ROUNDS] + [OVER + 1] * (world.size - 1)  # they were released in one


@pytest.mark.mpi
@pytest.mark.parametrize("width", [1, "all"])
def test_ranks_in_real_time_tell(
    width: Any, world: Any, shared_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.size == 1:
        pytest.skip("needs a server and a client")
    from hpcfl.realtime import questions, server

    monkeypatch.setattr(questions, "SAVE_SECONDS", 1e6)
    monkeypatch.setattr(server, "SAVE_SECONDS", 1e6)
    plain = {"participation": {"close": "all"}, "speed": {"model": "none"}, "clock": "wall", "threads": 1}
    profiled(world, table("salf", "mlp", False, **plain, lane_width=width), shared_dir / "run")
    out = capsys.readouterr().out
    if world.rank > 0:
        assert out == ""
        return
    ranks = told(out)
    assert [each["rank"] for each in ranks] == list(range(world.size))
    assert {each["rounds"] for each in ranks} == {ROUNDS}
    assert happened(ranks[0]) >= {"waiting", "broadcast", "reduction", "server", "store", "other"}
    for each in ranks[1:]:
        assert happened(each) >= {"compute", "waiting", "broadcast", "reduction", "other"}
        assert each["seconds"]["server"] == 0


@pytest.mark.mpi
def test_a_collective_begins_when_all_have_come(world: Any, shared_dir: Path) -> None:
    """Until then it is waiting; what is moved and summed is what it is without."""
    if world.size == 1:
        pytest.skip("nobody to wait for")
    from hpcfl.mpi.collective import Collective

    entered: list[str] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        entered.append(name)
        yield
        if name == "waiting":
            assert all((turn / str(rank)).exists() for rank in range(world.size))

    def come(name: str) -> None:
        nonlocal turn
        turn = shared_dir / name
        turn.mkdir(exist_ok=True)
        time.sleep(0.02 * world.rank)
        (turn / str(world.rank)).touch()

    turn, transport = shared_dir, Collective(world.comm, phase)
    come("invite")
    assert transport.invite({"a": torch.full((3,), float(world.rank))})["a"].tolist() == [0.0] * 3
    sums = [ExactSums(({"a": Block((2,))},), 1, np.zeros(1)) for _ in range(2)]
    for each in sums:
        each.add({"a": (torch.ones(1, 2), torch.ones(1))})
    come("close")
    closed = transport.close(sums[0])
    come("share")
    assert transport.share(sums[1]).total("a").tolist() == [world.size] * 2
    come("agree")
    assert transport.agree(np.ones(2)).tolist() == [world.size] * 2
    if world.rank == 0:
        assert closed.total("a").tolist() == [world.size] * 2
    met = ["waiting", "broadcast", *["waiting", "reduction"] * 2, "reduction", "waiting", "reduction"]
    assert entered == met
    transport.leave()
