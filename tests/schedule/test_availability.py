"""Who is there when, and what rounds make of it: by hand, and against the laws."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import hpcfl
from helpers.toys import Paced, planner
from hpcfl.base.errors import RunError
from hpcfl.commands.cli import main
from hpcfl.schedule.availability import Availability, Presence
from hpcfl.schedule.link import Link
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.plan import Fate
from hpcfl.schedule.planner import Planner
from hpcfl.schedule.visit_times import VisitTimes
from hpcfl.testing.runs import recorded

# client 0 is there for 10 s and again from 30 s on, 1 from 4 s to 20 s and on to 25 s, 2 in the first 5 s of each 40 s
ROWS = [(0, 0, 10), (0, 30, 40), (1, 4, 20), (1, 20, 25), (2, 0, 5)]


def table(folder: Path, rows: list[tuple[float, ...]], **more: Any) -> Availability:
    file = folder / "there.csv"
    file.write_text("client,start,end\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return Availability(model="table", file=str(file), **more)


def seen(presence: Presence | None, *times: float) -> list[list[int]]:
    assert presence is not None
    return [np.flatnonzero(presence.at(time).there).tolist() for time in times]


def test_a_table_by_hand(tmp_path: Path) -> None:
    once, again = table(tmp_path, ROWS), table(tmp_path, ROWS, period=40.0)
    times = 0.0, 3.9, 4.0, 5.0, 10.0, 22.0, 25.0, 30.0, 39.0
    expected = [[0, 2], [0, 2], [0, 1, 2], [0, 1], [1], [1], [], [0], [0]]
    for each in (once, again):
        assert seen(each.presence(0, 3, 1.0), *times) == expected
        assert seen(each.presence(0, 3, 0.1), *(time / 10 for time in times)) == expected
    presence = again.presence(0, 3, 1.0)
    assert presence is not None
    assert presence.at(4.0).ends.tolist() == [10.0, 25.0, 5.0]
    assert presence.at(31.0).ends.tolist() == [50.0, 44.0, 40.0]  # client 0 stays from one period to the next
    assert presence.coming(np.arange(3)) == 40.0
    assert seen(presence, 83.0, 1023.0, 4.0) == [[0, 2], [1], [0, 1, 2]]
    assert seen(once.presence(0, 3, 1.0), 40.0, 1e9) == [[], []]
    assert table(tmp_path, [(0, 0, 7)], period=7.0).presence(0, 1, 1.0).at(1e6).ends.tolist() == [np.inf]  # type: ignore[union-attr]


def test_days_by_hand() -> None:
    at_once = Availability(model="diurnal", period=24.0, share=0.25, phases=0.0).presence(0, 2, 1.0)
    assert seen(at_once, 0.0, 5.9, 6.0, 23.9, 24.0, 29.9, 30.0) == [[0, 1], [0, 1], [], [], [0, 1], [0, 1], []]
    anywhere = Availability(model="diurnal", share=0.3).presence(1, 4000, 1.0)
    assert anywhere is not None
    for time in (0.0, 5e3, 1e5, 1e6):
        assert anywhere.at(time).there.mean() == pytest.approx(0.3, abs=0.03)
    there = np.array([anywhere.at(time).there.copy() for time in np.arange(0, 86400, 100.0)])
    np.testing.assert_allclose(there.mean(0), 0.3, atol=0.002)
    np.testing.assert_array_equal(anywhere.at(86400 * 3 + 300).there, there[3])


@pytest.mark.parametrize("law", ["lognormal", "gamma", "weibull"])
def test_intervals_have_the_law_and_look_alike_at_any_time(law: Any) -> None:
    made = Availability(model="on-off", law=law, on=30.0, off=100.0, on_spread=1.5, off_spread=0.7)
    presence = made.presence(1, 40_000, 1.0)
    assert presence is not None
    for time in (0.0, 1.0, 10.0, 100.0, 1000.0):
        assert presence.at(time).there.mean() == pytest.approx(30 / 130, abs=0.009)
    lasts, seconds = [], 0.0
    presence = made.presence(2, 300, 1.0)
    assert presence is not None
    before, since = presence.at(0.0).there.copy(), np.full(300, np.nan)
    while seconds < 4000:  # from one change to the next
        seconds = float(presence.ends.min())
        changed = np.flatnonzero(presence.at(seconds).there != before)
        for client in changed:
            if before[client] and np.isfinite(since[client]):
                lasts.append(seconds - since[client])
        since[changed], before = seconds, presence.there.copy()
    law_of = {
        "lognormal": stats.lognorm(1.5, scale=30 * np.exp(-(1.5**2) / 2)),
        "gamma": stats.gamma(1.5**-2, scale=30 * 1.5**2),
        "weibull": stats.weibull_min(*weibull()),
    }[law]
    assert len(lasts) > 5000
    assert stats.ks_1samp(lasts, law_of.cdf).statistic < 0.03


def weibull() -> tuple[float, float, float]:
    """Shape, location and scale of the law with mean 30 and a standard deviation of 45."""
    from scipy.optimize import brentq
    from scipy.special import gamma

    shape = brentq(lambda k: gamma(1 + 2 / k) / gamma(1 + 1 / k) ** 2 - 1 - 1.5**2, 0.3, 5)
    return shape, 0.0, 30 / gamma(1 + 1 / shape)


# --- rounds by hand


def rounds(there: Availability, seconds: list[Any], work: tuple[float, ...] = (1.0,), **rules: Any) -> Planner:
    """Clients whose visits take so many seconds; layers leave one by one where `work` has several."""
    made = planner(Participation(**rules), Paced(of=tuple(seconds)), len(seconds), work, layerwise=len(work) > 1)
    ones = np.ones(len(seconds), dtype=np.int64)
    times = VisitTimes(made.speed, None, Link(), 0, ones, 0 * ones, np.zeros((len(seconds), len(work)), np.int64))
    return replace(made, visit_times=times, availability=there)


def plans(made: Planner, count: int, **more: Any) -> list[Any]:
    return [*islice(made.plans(**more), count)]


def test_rounds_invite_who_is_there_and_wait_where_nobody_is(tmp_path: Path) -> None:
    found = plans(rounds(table(tmp_path, ROWS, leaves="stays"), [3.0, 9.0, 12.0]), 5)
    # 0 s: clients 0 and 2, 12 s; 12 s: client 1, 9 s; 21 s: client 1, 9 s; 30 s: client 0, three times 3 s
    assert [plan.cohort.tolist() for plan in found] == [[0, 2], [1], [1], [0], [0]]
    assert [plan.duration for plan in found] == [12.0, 9.0, 9.0, 3.0, 3.0]
    late = plans(rounds(table(tmp_path, [(0, 50, 60), (1, 70, 71)], leaves="stays"), [15.0, 1.0]), 2)
    assert [(plan.cohort.tolist(), plan.duration) for plan in late] == [([0], 65.0), ([1], 6.0)]
    with pytest.raises(RunError, match="round 2: nobody is there from second 71 on, and nobody comes any more"):
        plans(rounds(table(tmp_path, [(0, 50, 60), (1, 70, 71)], leaves="stays"), [15.0, 1.0]), 3)
    assert plans(rounds(table(tmp_path, ROWS, leaves="stays"), [3.0, 9.0, 12.0]), 1, begun=30.0)[0].cohort.tolist() == [
        0
    ]


def test_rounds_wait_until_as_many_are_there_as_have_to_count(tmp_path: Path) -> None:
    rows = [(0, 0, 100), (1, 20, 30), (2, 25, 26), (1, 60, 100)]
    rules = {"close": "deadline", "deadline": 3.0, "min_clients": 2}
    made = rounds(table(tmp_path, rows, leaves="stays"), [1.0, 1.0, 1.0], **rules)
    found = plans(made, 2, begun=0.0)
    assert [plan.cohort.tolist() for plan in found] == [[0, 1], [0, 1]]
    assert [plan.duration for plan in found] == [21.0, 1.0]
    assert plans(made, 1, begun=40.0)[0].duration == 21.0
    with pytest.raises(RunError, match=r"fewer than participation\.min_clients = 2 are there from second 100 on"):
        plans(made, 1, begun=100.0)


@pytest.mark.parametrize(
    ("leaves", "close", "depth", "duration"),
    [
        # client 0 leaves after 10 s, client 2 after 5 s; visits take 12, 8 and 4 s; layers are there after a half
        ("stays", {}, [1, 1], 12.0),
        ("lost", {}, [3, 1], 10.0),
        ("partial", {}, [2, 1], 10.0),
        ("partial", {"close": "deadline", "deadline": 7.0}, [2, 1], 7.0),
        ("lost", {"close": "deadline", "deadline": 7.0}, [2, 1], 7.0),  # the round closes before it leaves
        ("lost", {"close": "deadline", "deadline": 11.0}, [3, 1], 10.0),
        ("lost", {"close": "first", "first": 2, "partial": "layers"}, [3, 1], 10.0),
        ("lost", {"close": "first", "first": 1, "partial": "layers"}, [3, 1], 4.0),
    ],
)
def test_who_leaves_in_the_middle(leaves: Any, close: Any, depth: Any, duration: float, tmp_path: Path) -> None:
    made = rounds(table(tmp_path, ROWS, leaves=leaves), [12.0, 8.0, 4.0], work=(1.0, 0.5), **close)
    plan = plans(made, 1)[0]
    assert plan.cohort.tolist() == [0, 2]
    assert plan.depth.tolist() == depth
    assert plan.duration == duration
    if leaves != "stays":
        assert np.isnan(plan.arrival).all()


def test_steps_of_who_leaves_count_where_they_are_handed_in(tmp_path: Path) -> None:
    """Of 10 steps that take 12 s, 8 are done after 10 s."""
    there = {"model": "table", "file": table(tmp_path, ROWS).file, "leaves": "partial"}
    settings = {"rounds": 1, "clients": 3, "algorithm.epochs": 0, "algorithm.steps": 10}
    settings |= {"participation.close": "deadline", "participation.deadline": 20.0, "participation.partial": "steps"}
    (tmp_path / "speed.csv").write_text("client,seconds\n0,12\n1,8\n2,4\n")
    settings |= {"speed.model": "table", "speed.file": str(tmp_path / "speed.csv")}
    overlay = {"availability": there}
    run = hpcfl.run("fedavg-digits", overlays=overlay, settings=settings, out=tmp_path / "run")
    assert run.data["steps"].values[0].tolist() == [8, -1, 10]
    assert run.data["round_seconds"].values.tolist() == [10.0]
    whole = hpcfl.run(
        "fedavg-digits",
        overlays=overlay,
        settings={**settings, "participation.close": "all", "participation.deadline": None},
        out=tmp_path / "whole",
    )
    assert whole.data["steps"].values[0].tolist() == [8, -1, 10]


def test_arrivals_by_hand(tmp_path: Path) -> None:
    """Clients take 3, 9 and 2 s; a step of the server with each visit."""
    made = rounds(table(tmp_path, ROWS, leaves="lost"), [3.0, 9.0, 2.0], close="arrivals", buffer=1)
    found = plans(made, 9)
    # 0 and 2 begin at 0 s; 2 at 2 s and 4 s, and is gone at 5 s; 0 at 3, 6, 9, and is gone at 10 s; 1 begins at 4 and
    # at 13 s, and is gone at 25 s having begun at 22 s; 0 comes at 30 s
    arrived = [(plan.cohort.tolist(), float(plan.arrivals.times[0])) for plan in found]
    expected = [(2, 2.0), (0, 3.0), (2, 4.0), (0, 6.0), (0, 9.0), (1, 13.0), (1, 22.0), (0, 33.0), (0, 36.0)]
    assert arrived == [([client], time) for client, time in expected]
    lost = [plan.ended for plan in found]
    assert lost[3] == {2: Fate.LOST}
    assert lost[5] == {0: Fate.LOST}
    assert lost[7] == {1: Fate.LOST}
    stays = plans(rounds(table(tmp_path, ROWS, leaves="stays"), [3.0, 9.0, 2.0], close="arrivals", buffer=1), 10)
    assert [float(plan.arrivals.times[0]) for plan in stays] == [2, 3, 4, 6, 6, 9, 12, 13, 22, 31]


WORLD = {
    "speed": {"model": "gamma", "mean": 5.0, "within": 0.5},
    "availability": {"model": "on-off", "law": "gamma", "on": 20.0, "off": 30.0, "leaves": "lost"},
}


@pytest.mark.parametrize(
    "participation",
    [
        {"invite": "uniform", "size": 3},
        {"close": "deadline", "deadline": "adaptive", "min_clients": 1},
        {"close": "arrivals", "buffer": 2, "concurrency": 4},
    ],
    ids=lambda keys: keys.get("close", "all"),
)
def test_a_resumed_run_is_one_without_a_break(participation: dict[str, Any], tmp_path: Path) -> None:
    overlay = {**WORLD, "participation": participation, "rounds": 6, "clients": 8, "checkpoint": {"every": 2}}
    whole = hpcfl.run("wait-digits", overlays=overlay, out=tmp_path / "whole")
    hpcfl.run("wait-digits", overlays=overlay, out=tmp_path / "half", on_round=lambda row: row["round"] == 2)
    half = hpcfl.resume(tmp_path / "half")
    one, other = recorded(whole.folder), recorded(half.folder)
    for name in ("sim_seconds", "cohort", "arrived", "loss", "fate"):
        if name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    invited = (one["cohort"] == 1).sum(1)
    assert len(set(invited.tolist())) > 1 or "buffer" in participation


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["availability.model='table'"], "availability.file: model = 'table' needs it"),
        (["availability.on=2"], "availability.on"),
        (["availability.leaves='partial'"], "availability.leaves = 'partial' has no meaning"),
        (["availability.model='on-of'"], "did you mean 'on-off'?"),
        (["availability.model='on-off'", "availability.off=0"], "availability.off"),
        (["availability.model='diurnal'", "availability.share=1.0"], "availability.share"),
        (["availability.model='diurnal'", "clock='wall'"], "availability.leaves: in real time clients"),
        (
            ["availability.model='diurnal'", "availability.leaves='partial'", "participation.close='arrivals'"],
            "availability.leaves = 'partial' does not go with participation.close = 'arrivals'",
        ),
        (
            ["availability.model='diurnal'", "participation.dispatch='reporter'", "participation.close='arrivals'"],
            "participation.dispatch = 'reporter' sends out nobody who comes later",
        ),
        (
            ["availability.model='diurnal'", "availability.leaves='partial'"],
            "availability.leaves = 'partial' has no meaning with algorithm.name = 'fedavg', whose visits count as",
        ),
        (["queue.model='table'"], "queue.file: model = 'table' needs it"),
        (["speed.model='lognormal'", "speed.between=50.0"], "speed.between"),
        (["algorithm.name='salf'", "availability.model='diurnal'"], "algorithm.missing = 'exact' needs the chance"),
        (
            ["availability.model='diurnal'", "participation.partial='steps'"],
            "participation.partial = 'steps' has no meaning with participation.close = 'all'",
        ),
        (
            ["availability.model='diurnal'", "speed.model='uniform-depth'", "participation.close='deadline'"],
            "follow from",
        ),
    ],
)
def test_bad_input_is_one_line(keys: list[str], said: str, capsys: Any) -> None:
    more = ["participation.buffer=1"] if "arrivals" in keys[-1] else []
    words = [word for key in (*keys, *more) for word in ("--set", key)]
    assert main(["check", "fedavg-digits", *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if ": dropped " not in line]
    assert said in line


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(0, 5, 4)], "line 2: expected an end after the start, got 0,5,4"),
        ([(0, -1, 4)], "line 2: expected a start of 0 or more, got 0,-1,4"),
        ([(0, 0, 4), (12, 0, 4)], "line 3: expected a client from 0 to 9, got 12,0,4"),
        ([(0, 0, 4), (1, 0, 4), (0, 3, 8)], "line 4: 0,3,8 overlaps 0,0,4 of line 2"),
        ([(0, 0, 4), (1, 0, 41)], "line 3: expected an end within availability.period = 40, got 1,0,41"),
        ([], "expected an interval at least, got none"),
        ([(0, "x", 4)], "line 2: expected numbers for client,start,end"),
    ],
)
def test_bad_tables_are_one_line(rows: list[Any], said: str, tmp_path: Path, capsys: Any) -> None:
    file = table(tmp_path, rows).file
    keys = f"availability.file='{file}'", "availability.model='table'", "availability.period=40"
    assert main(["check", "fedavg-digits", *(word for key in keys for word in ("--set", key))]) == 2
    line = capsys.readouterr().err.strip()
    assert said in line
    assert len(line.splitlines()) == 1
