"""Paces and depths from a table: that of a file, round by round, in both clocks, and which files are refused."""

from __future__ import annotations

from itertools import islice, product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpcfl import store
from hpcfl.base.errors import UsageError
from hpcfl.config import load
from hpcfl.engine.job import Job
from hpcfl.schedule.plan import Attempt
from hpcfl.schedule.speeds.table import Table
from hpcfl.testing.runs import play, resume, same, table

SECONDS = [2.5, 0.1, 4.0, 1.0, 3.0, 0.7, 1.9]
DEPTHS = [[1, 2, 3, 1, 1, 3, 2], [3, 3, 3, 3, 3, 3, 3], [1, 1, 1, 1, 1, 1, 1], [2, 1, 3, 1, 2, 2, 1]]
LATE = {"close": "deadline", "deadline": 2.0}


def by_client(path: Path, seconds: list[Any] = SECONDS) -> Path:
    path.write_text("client,seconds\n" + "".join(f"{client},{value}\n" for client, value in enumerate(seconds)))
    return path


def by_round(path: Path, name: str, values: Any) -> Path:
    """Rows in an order of their own, in CSV or HDF5."""
    rows = [(*key, values[key[0]][key[1]]) for key in product(range(len(values)), range(len(values[0])))][::-1]
    columns = dict(zip(("round", "client", name), zip(*rows)))
    if path.suffix == ".csv":
        path.write_text("\n".join([",".join(columns), *(",".join(map(repr, row)) for row in rows), ""]))
    else:
        with h5py.File(path, "w") as file:
            file.update({key: np.array(column) for key, column in columns.items()})
    return path


def values(file: Path | str, method: str = "fedavg", **more: Any) -> dict[str, Any]:
    chosen = {"algorithm": {"name": method, "batch": 0}, "speed": {"model": "table", "file": str(file)}}
    return table("salf", "mlp", False, **{"participation": {"close": "first", "first": 4}, **chosen, **more})


def job_of(what: dict[str, Any]) -> Job:
    config = load(what)
    config.check(None)
    return Job.of(config, None, 1)


def test_the_fastest_by_the_table_count(tmp_path: Path) -> None:
    for plan in islice(job_of(values(by_client(tmp_path / "paces.csv"))).planner.plans(), 3):
        assert plan.seconds.tolist() == SECONDS
        assert np.flatnonzero(plan.counted).tolist() == [1, 3, 5, 6]
        assert plan.duration == 1.9


@pytest.mark.parametrize("suffix", ["csv", "h5"])
def test_rounds_have_paces_of_their_own(tmp_path: Path, suffix: str) -> None:
    paces = np.random.default_rng(0).random((5, 7)).tolist()
    job = job_of(values(by_round(tmp_path / f"paces.{suffix}", "seconds", paces)))
    plans = list(islice(job.planner.plans(), 4))
    assert [plan.seconds.tolist() for plan in plans] == paces[:4]  # to the last bit
    np.testing.assert_allclose(job.config.speed.paces(0, 7), np.mean(paces, 0), rtol=1e-15)
    wanted = np.sort(paces, 1).mean(0)
    np.testing.assert_allclose(job.config.speed.order(0, 7, np.arange(7), 7), wanted, rtol=1e-12)


def by_time(path: Path, rows: list[tuple[float, ...]]) -> Path:
    path.write_text("time,client,seconds\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


def test_rounds_take_what_a_table_says_at_the_time_when_they_begin(tmp_path: Path) -> None:
    """Client 0 takes 1 s, from 10 s on 5 s; client 1 takes 2 s, from 4 s on 1 s."""
    rows = [(10, 0, 5), (0, 1, 2), (4, 1, 1), (0, 0, 1)]
    job = job_of(values(by_time(tmp_path / "a.csv", rows), clients=2, participation={"close": "all"}))
    plans = list(islice(job.planner.plans(), 10))
    assert [plan.duration for plan in plans] == [2.0, 2.0, *[1.0] * 6, 5.0, 5.0]
    assert [plan.seconds.tolist() for plan in plans[1:3]] == [[1, 2], [1, 1]]
    assert next(job.planner.plans(5, begun=9.9)).seconds.tolist() == [1, 1]
    assert next(job.planner.plans(5, begun=1e9)).seconds.tolist() == [5, 1]
    assert job.config.speed.paces(0, 2).tolist() == [3.0, 1.5]


@pytest.mark.parametrize(
    ("rows", "more", "said"),
    [
        ([(0, 0, 1), (1, 1, 1)], {}, "line 3: expected a row at second 0 before it for client 1"),
        ([(0, 0, 1), (0, 1, 1), (0, 1, 2)], {}, "line 4: client 1 at second 0 is there twice"),
        ([(0, 0, 1), (0, 1, 1), (-2, 1, 2)], {}, "line 4: time is -2, expected seconds from 0 on"),
        ([(0, 0, 1)], {}, "no row for client 1 (clients = 2)"),
        ([(0, 0, 1), (0, 1, 1)], {"clock": "wall"}, "in simulated time, got clock = 'wall'"),
        (
            [(0, 0, 1), (0, 1, 1)],
            {"participation": {"close": "arrivals", "buffer": 1}},
            "in simulated time, got participation.close = 'arrivals'",
        ),
    ],
)
def test_tables_by_time_that_are_none(rows: list[Any], more: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = by_time(tmp_path / "a.csv", rows)
    with pytest.raises(UsageError) as error:
        job_of(values(file, **{"clients": 2, "participation": {"close": "all"}, **more}))
    assert said in str(error.value)


def test_what_arrives_by_a_deadline_is_known(tmp_path: Path) -> None:
    speed = Table(file=str(by_client(tmp_path / "paces.csv")))
    asked = Attempt(0, 7, np.array([1.0, 0.5]), 3, 0, np.array([0, 2, 3]), closes_after=2.0)
    assert speed.seconds(asked).tolist() == speed.enforced(asked).tolist() == [2.5, 4.0, 1.0]
    assert speed.depth(asked).tolist() == [2, 2, 1]
    assert speed.arrival(asked).tolist() == [[0, 1], [0, 1], [1, 1]]
    assert speed.miss_probability(asked).tolist() == [0, 0]
    assert (speed.known("simulated"), speed.needs_end) == (True, False)


def test_depths_decide_which_layers_arrive(solo: Any, tmp_path: Path) -> None:
    file = by_round(tmp_path / "depths.csv", "depth", DEPTHS)
    what = values(file, "salf", participation=LATE)
    plans = list(islice(job_of(what).planner.plans(), 4))
    assert [plan.depth.tolist() for plan in plans] == DEPTHS
    assert plans[0].arrival.tolist() == [[1, 1], [0, 1], [0, 0], [1, 1], [1, 1], [0, 0], [0, 1]]
    assert plans[1].miss_probability.tolist() == [1, 1]
    assert plans[0].seconds.tolist() == [2, 4, np.inf, 2, 2, np.inf, 4]  # at the pace seen at the deadline
    run = play(solo, what, tmp_path / "run", None)
    assert store.open_run(run)["depth"].values.tolist() == DEPTHS
    released = job_of({**what, "participation": {**LATE, "partial": "discard"}})
    assert next(released.planner.plans()).depth.tolist() == [1, 3, 3, 1, 1, 3, 3]


@pytest.mark.mpi
def test_one_rank_equals_n(world: Any, shared_dir: Path) -> None:
    file = shared_dir / "depths.h5"
    if world.rank == 0:
        by_round(file, "depth", DEPTHS)
    world.meet()
    what = values(file, "salf", participation=LATE, batch_clients=2)
    runs = [play(world, what, shared_dir / name, comm) for name, comm in (("n", world.comm), ("1", None))]
    if world.rank == 0:
        same(*runs)
    world.meet()


def test_a_run_goes_on_from_elsewhere_and_can_be_replayed(
    solo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    by_client(Path("paces.csv"))
    run = play(solo, values("paces.csv"), tmp_path / "run", None)
    again = play(solo, values("", speed={"model": "trace", "run": str(run)}), tmp_path / "again", None)
    same(again, run)
    monkeypatch.chdir(tmp_path)
    resume(solo, run, 2, None)
    same(again, run)
    by_client(tmp_path / "here/paces.csv", [*SECONDS[:6], 2.0])
    with pytest.raises(UsageError, match=r"paces\.csv' has changed since the run began, which found speed\.file there"):
        resume(solo, run, 2, None)


def test_stages_of_doubling_follow_from_the_table(tmp_path: Path) -> None:
    doubling = {"doubling": {"when": "theory"}, "participation": {"close": "first", "first": 2}}
    job = job_of(values(by_client(tmp_path / "paces.csv"), **doubling))
    np.testing.assert_allclose(job.config.speed.order(0, 7, np.arange(7), 7), np.sort(SECONDS), rtol=1e-12)
    assert len(job.planner.stage_limits) == 2


def test_seconds_hold_in_real_time_and_depths_do_not(tmp_path: Path) -> None:
    load(values(by_client(tmp_path / "paces.csv"), clock="wall")).check(None)
    depths = values(by_round(tmp_path / "depths.csv", "depth", DEPTHS), "salf", participation=LATE, clock="wall")
    with pytest.raises(UsageError, match=r"has depths, which simulated time alone can keep: .*got clock = 'wall'$"):
        load(depths).check(None)


GOOD = "client,seconds\n" + "".join(f"{client},1.5\n" for client in range(7))
DEEP = "round,client,depth\n" + "".join(f"{round_},{client},1\n" for round_ in range(4) for client in range(7))
CSV: dict[str, tuple[str, str]] = {
    "missing client": (GOOD.replace("3,1.5\n", ""), r"no row for client 3$"),
    "missing last": (GOOD.replace("6,1.5\n", ""), r"no row for client 6 \(clients = 7\)$"),
    "unknown client": (GOOD + "7,1.5\n", r"line 9: client is 7, expected 0 … 6 \(clients = 7\)$"),
    "far client": (GOOD + "70000000000,1.5\n", r"line 9: client is 7e\+10, expected a whole number from 0 on$"),
    "no client": (GOOD.replace("3,", "3.5,"), r"line 5: client is 3.5, expected a whole number from 0 on$"),
    "negative": (GOOD.replace("3,1.5", "3,-1.5"), r"line 5: seconds is -1\.5, expected seconds above 0$"),
    "zero": (GOOD.replace("3,1.5", "3,0"), r"line 5: seconds is 0, expected seconds above 0$"),
    "infinite": (GOOD.replace("3,1.5", "3,inf"), r"line 5: seconds is inf, expected seconds above 0$"),
    "empty cell": (GOOD.replace("3,1.5", "3,"), r"line 5: expected numbers for client,seconds, got '3,'$"),
    "word": (GOOD.replace("3,1.5", "3,slow"), r"line 5: expected numbers for client,seconds, got '3,slow'$"),
    "name": (
        GOOD.replace("3,1.5", "Bern,1.5"),
        r"got 'Bern,1\.5'; clients are numbers, in the order of the names that",
    ),
    "remark": (
        GOOD.replace("3,1.5", "3,1.5 # slow"),
        r"line 5: expected numbers for client,seconds, got '3,1\.5 # slow'$",
    ),
    "twice": (GOOD + "3,1.5\n", r"line 9: client 3 is there twice$"),
    "unknown column": (GOOD.replace("seconds", "second"), r"expected columns client,seconds or .*, got client,second$"),
    "a column more": (GOOD.replace("1.5", "1.5,2"), r"line 2: expected numbers for client,seconds, got '0,1\.5,2'$"),
    "a column twice": (
        GOOD.replace("client", "seconds"),
        r"expected columns client,seconds or .*, got seconds,seconds$",
    ),
    "a column less": ("client\n0\n", r"expected columns client,seconds or round,client,seconds or .*, got client$"),
    "nothing": ("", r"expected columns client,seconds or .*, got none$"),
    "no text": ("\xff", r"truncated or damaged, expected a CSV file"),
    "no rows": ("client,seconds\n", r"no row for client 0 \(clients = 7\)$"),
    "missing round": (DEEP.replace("2,3,1\n", ""), r"no row for client 3 in round 2$"),
    "short": (DEEP.rsplit("3,0,1\n")[0], r"no row for client 0 in round 3; did you mean rounds"),
    "depth 0": (DEEP.replace("2,5,1", "2,5,0"), r"line 21: depth is 0, expected a whole number from 1 on$"),
    "too deep": (DEEP.replace("2,5,1", "2,5,4"), r"line 21: depth is 4, expected 1 … 3: the model has 2 layers$"),
    "round twice": (DEEP + "2,3,1\n", r"line 30: client 3 in round 2 is there twice$"),
}


@pytest.mark.parametrize("name", CSV)
def test_tables_that_do_not_fit_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    text, words = CSV[name]
    (tmp_path / "speeds.csv").write_text(text, encoding="latin-1")
    rules = {"participation": LATE} if "depth" in text else {}
    with pytest.raises(UsageError, match=words) as caught:
        job_of(values(tmp_path / "speeds.csv", "salf", **rules))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(("speed.file: " + str(tmp_path), str(tmp_path)))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"client": np.arange(7), "seconds": np.ones(6)}, "expected columns of one length, got client 7, seconds 6$"),
        ({"client": np.arange(7), "seconds": np.ones((7, 1))}, r"seconds is float64 of shape \[7, 1\], expected one"),
        ({"client": np.arange(7), "seconds": -np.ones(7)}, r"row 0: seconds is -1, expected seconds above 0$"),
        ({"client": np.arange(7), "seconds": np.array([b"a"] * 7)}, r"seconds is \|S1 of shape \[7\], expected one"),
    ],
)
def test_so_are_those_in_hdf5(tmp_path: Path, columns: dict[str, Any], words: str) -> None:
    with h5py.File(tmp_path / "speeds.h5", "w") as file:
        file.update(columns)
    with pytest.raises(UsageError, match=words):
        job_of(values(tmp_path / "speeds.h5"))


def test_files_of_other_kinds_and_rules_that_depths_do_not_go_with(tmp_path: Path) -> None:
    (tmp_path / "speeds.txt").write_text(GOOD)
    with pytest.raises(UsageError, match=r"speeds\.txt: expected a name that ends in \.csv, \.h5 or \.hdf5$"):
        job_of(values(tmp_path / "speeds.txt"))
    with pytest.raises(UsageError, match=r"^speed\.file = 'none\.csv': no such file in \.$"):
        job_of(values("none.csv"))
    (tmp_path / "speeds.csv").write_text(DEEP)
    for rules, got in ({"close": "all"}, "got 'all'"), ({"close": "deadline", "deadline": "adaptive"}, "adaptive"):
        with pytest.raises(UsageError, match=got):
            job_of(values(tmp_path / "speeds.csv", participation=rules))
