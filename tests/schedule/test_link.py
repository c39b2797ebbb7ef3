"""What visits take beside computing: waits, messages and shared uplinks, by hand and against drawn rounds."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcfl
from hpcfl.commands.check import report
from hpcfl.commands.cli import main
from hpcfl.config import load
from hpcfl.engine.job import Job
from hpcfl.schedule.batch_queue import BatchQueue
from hpcfl.schedule.link import Link, rate, shared
from hpcfl.schedule.plan import Attempt
from hpcfl.schedule.speeds import Speed, speed_class
from hpcfl.schedule.speeds.table import Table
from hpcfl.schedule.visit_times import VisitTimes

FRACTIONS = np.array([1.0, 0.6, 0.3])


def csv(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def model(**keys: Any) -> Speed:
    return speed_class(keys["model"]).from_table(keys, "speed")


def times(speed: Speed, link: Link | None = None, wait: BatchQueue | None = None, **facts: Any) -> VisitTimes:
    facts = {"steps": [1, 1, 1], "down": [800, 400, 400], "up": [[300, 200, 100]] * 3, **facts}
    arrays = (np.array(facts[name]) for name in ("steps", "down", "up"))
    return VisitTimes(speed, wait and wait.times, link or Link(), 5, *arrays)


def asked(round: int = 0, **more: Any) -> Attempt:
    return Attempt(5, 3, FRACTIONS, round, 0, np.arange(3), **more)


@pytest.fixture
def speed(tmp_path: Path) -> Speed:
    return Table(file=csv(tmp_path, "speed.csv", "client,seconds\n0,10\n1,4\n2,1\n"))


LINES = "client,down,up,latency\n0,100,50,0.5\n1,200,100,0.25\n2,400,1000,0\n"


def test_layers_of_three_clients_by_hand(speed: Speed, tmp_path: Path) -> None:
    link = Link(file=csv(tmp_path, "link.csv", LINES))
    wait = BatchQueue(model="table", file=csv(tmp_path, "queue.csv", "client,seconds\n0,1\n1,0.125\n2,3\n"))
    found = times(speed, link, wait)
    drawn = found.timeline(asked())
    # client 0 has all after 1 + .5 + 8 = 9.5 s; its layers are ready at 12.5, 15.5 and 19.5, and take 2, 4 and 6
    np.testing.assert_allclose(drawn.arrives[0], [9.5 + 10 + 6 + 0.5, 9.5 + 6 + 4 + 0.5, 9.5 + 3 + 2 + 0.5], rtol=1e-12)
    # client 1 has all after .125 + .25 + 2 = 2.375 s; ready at 3.575, 4.775 and 6.375, and take 1, 2 and 3:
    # each waits for the one before
    np.testing.assert_allclose(drawn.arrives[1], [6.775 + 3 + 0.25, 4.775 + 2 + 0.25, 3.575 + 1 + 0.25], rtol=1e-12)
    # client 2 has all after 4 s; ready at 4.3, 4.6 and 5, and take .1, .2 and .3
    np.testing.assert_allclose(drawn.arrives[2], [5.3, 4.8, 4.4], rtol=1e-12)
    np.testing.assert_allclose(drawn.begins, [9.5, 2.375, 4.0], rtol=1e-12)
    np.testing.assert_allclose(drawn.computes, [10.0, 4.0, 1.0], rtol=1e-12)
    np.testing.assert_allclose(drawn.sends, [6.5, 10.025 - 6.375, 0.3], rtol=1e-12)
    assert found.seconds(asked()).tolist() == drawn.arrives[:, 0].tolist()
    assert found.depth(asked(closes_after=7.1)).tolist() == [4, 2, 1]
    np.testing.assert_allclose(found.arrival(asked(closes_after=7.1)), [[0, 0, 0], [0, 1, 1], [1, 1, 1]])


def test_an_uplink_is_shared_fairly_by_hand() -> None:
    """100 bytes a second: client 0 can send 20 of these, the others what is left."""
    ready, sizes = np.array([[0.0], [1.0], [1.0]]), np.array([[100.0], [80.0], [200.0]])
    found = shared(ready, sizes, np.array([20.0, 1000.0, 1000.0]), 100.0)
    # from 1 s on 20, 40 and 40 a second; client 1 is done at 3 s, when 120 bytes of client 2 are left: 80 a second
    np.testing.assert_allclose(found, [[5.0], [3.0], [3.0 + 120 / 80]], rtol=1e-12)
    alone = shared(ready, sizes, np.array([20.0, 1000.0, 1000.0]), 1e9)
    np.testing.assert_allclose(alone, [[5.0], [1.08], [1.2]], rtol=1e-12)


def test_layers_share_an_uplink_by_hand(speed: Speed) -> None:
    """Two clients send two layers each, 10 bytes a second, 5 each while both send."""
    ready, sizes = np.array([[4.0, 0.0], [1.0, 0.0]]), np.array([[10.0, 10.0], [10.0, 0.0]])
    # client 0 sends its last layer from 0 on, 10 bytes by 1 s; then client 1 is alone until 2 s
    np.testing.assert_allclose(shared(ready, sizes, np.full(2, inf), 10.0), [[5.0, 1.0], [2.0, 0.0]], rtol=1e-12)
    link = Link(up="1 kB/s", server="600 B/s")
    drawn = times(speed, link, up=[[600, 0, 0]] * 3).timeline(asked())
    np.testing.assert_allclose(drawn.arrives[:, 0], [11.0, 5.0, 2.0], rtol=1e-12)


@pytest.mark.parametrize(("up", "wait"), [("1 kB/s", "none"), ("100 B/s", "gamma"), ("unlimited", "lognormal")])
@pytest.mark.parametrize("name", ["lognormal", "exponential", "uniform", "constant"])
def test_chances_are_the_frequencies(name: str, up: str, wait: str) -> None:
    spread = {} if wait == "none" else {"mean": 2.0, "within": 0.7, "between": 0.3}
    keys: dict[str, Any] = {
        "lognormal": {"mean": 4.0, "within": 0.6, "between": 0.3},
        "exponential": {"rate": 0.3, "kind": "dynamic"},
        "uniform": {"longest": 8.0},
        "constant": {"model": "gamma", "mean": 4.0, "between": 0.5},
    }[name]
    found = times(model(**{"model": name, **keys}), Link(up=up, latency=0.3), BatchQueue(model=wait, **spread))
    rounds, one = 1500, asked(closes_after=7.0)
    each = [replace(one, round=round_) for round_ in range(rounds)]
    there = np.mean([found.timeline(now).arrives <= 7.0 for now in each], 0)
    chance = found.arrival(one)
    np.testing.assert_allclose(there, chance, atol=4.5 * np.sqrt(0.25 / rounds))
    assert ((chance > 0.02) & (chance < 0.98)).any() or (name, wait) == ("constant", "none")
    share = np.array([0.5, 0.25, 1.0])
    done = np.mean([found.share(now, found.seconds(now), 7.0) >= share - 1e-9 for now in each], 0)
    whole = replace(found, up=np.array([[600, 0, 0]] * 3))
    if up == "unlimited":  # a visit sends all at its end where its steps count
        np.testing.assert_allclose(done, whole.reach(one, share), atol=4.5 * np.sqrt(0.25 / rounds))


def test_without_links_and_waits_chances_and_seconds_are_the_speeds() -> None:
    for keys in ({"model": "weibull", "within": 0.5}, {"model": "exponential", "kind": "dynamic-scale"}):
        speed, one = model(**keys), asked(4, closes_after=1.3)
        assert times(speed).seconds(one).tolist() == speed.seconds(one).tolist()
        np.testing.assert_allclose(times(speed).arrival(one), speed.arrival(one), rtol=1e-13)
        np.testing.assert_allclose(times(speed).reach(one, FRACTIONS), speed.reach(one, FRACTIONS), rtol=1e-10)


def test_everything_is_multiplied_by_the_scale() -> None:
    keys = {"model": "lognormal", "within": 0.6, "communication": 0.5}
    link, wait = Link(up="200 B/s", down="1 kB/s", latency=0.1, server="400 B/s"), BatchQueue(model="gamma", within=0.5)
    one, ten = times(model(**keys), link, wait), times(model(**keys, scale=10.0), link, wait)
    np.testing.assert_allclose(ten.timeline(asked()).arrives, 10 * one.timeline(asked()).arrives, rtol=1e-12)
    assert (one.communication, ten.communication) == (0.5, 5.0)
    known = replace(one, link=link.model_copy(update={"server": "unlimited"}))
    scaled = replace(ten, link=known.link)
    np.testing.assert_allclose(
        scaled.arrival(asked(closes_after=60.0)), known.arrival(asked(closes_after=6.0)), rtol=1e-9
    )


def test_first_arrivals_are_expected_as_they_are_drawn() -> None:
    alike = times(model(model="exponential", rate=2.0), Link(latency=1.0))
    np.testing.assert_allclose(alike.order(5, 3, np.arange(3), 3), 2 + np.cumsum([1 / 3, 1 / 2, 1]) / 2, rtol=1e-12)
    apart = times(model(model="gamma"), Link(up="100 B/s", down="100 B/s"))  # client 0 begins with twice as much
    np.testing.assert_allclose(apart.order(5, 3, np.arange(3), 3), [11.0, 11.0, 15.0], rtol=1e-12)


def test_bandwidths_spread_about_their_mean() -> None:
    lines = Link(up="8 Mbit/s", down="2 MB/s", between=0.5).lines(1, 100_000)
    assert lines.up.mean() == pytest.approx(1e6, rel=0.01)
    assert np.log(lines.up).std() == pytest.approx(0.5, rel=0.01)
    np.testing.assert_allclose(lines.down, 2 * lines.up)


@pytest.mark.parametrize(
    ("text", "value"), [("20 Mbit/s", 2.5e6), ("1.5 MB/s", 1.5e6), ("1e3 B/s", 1e3), ("8bit/s", 1), ("unlimited", inf)]
)
def test_rates_have_units(text: str, value: float) -> None:
    assert rate(text) == value


DIGITS: dict[str, Any] = {"rounds": 2, "clients": 4}


def seconds(settings: dict[str, Any]) -> Any:
    job = Job.of(load("fedavg-digits", overlays=settings), None, 1)
    return job, job.planner.plan(job.planner.attempt(0))


def test_a_visits_bytes_and_steps_are_those_of_the_method() -> None:
    link = {"up": "10 kB/s", "down": "20 kB/s", "latency": 0.25}
    job, plan = seconds({**DIGITS, "speed": {"model": "gamma", "mean": 0.01, "per": "step"}, "link": link})
    sent = int(job.layers.sent(0, bytes=True).sum())
    steps = [job.algorithm.visit_steps(samples)[0] for samples in job.task.federation.train_sizes.tolist()]
    expected = 0.5 + sent / 20e3 + 0.01 * np.array(steps) + sent / 10e3
    np.testing.assert_allclose(plan.seconds, expected, rtol=1e-12)
    assert min(steps) > 10


def test_small_clients_of_heterofl_send_and_take_less() -> None:
    config = {**DIGITS, "algorithm": {"name": "heterofl"}, "model": {"name": "mlp", "hidden": [32]}}
    config["speed"] = {"model": "none"}
    job, plan = seconds({**config, "link": {"up": "1 kB/s", "down": "2 kB/s"}})
    sent = np.array([job.layers.sent(part, bytes=True).sum() for part in job.parts.tolist()])
    assert len(set(sent.tolist())) > 1
    np.testing.assert_allclose(plan.seconds, 1 + sent / 1e3 + sent / 2e3, rtol=1e-12)


def test_steps_that_count_are_those_that_leave_in_time() -> None:
    participation = {"close": "deadline", "deadline": 1.5, "partial": "steps"}
    rest = {"speed": {"model": "gamma", "between": 0.5}, "link": {"up": "20 kB/s", "latency": 0.1}}
    job, plan = seconds({**DIGITS, **rest, "participation": participation})
    sent = int(job.layers.sent(0, bytes=True).sum())
    whole, computes = job.planner.visit_steps[0], job.config.speed.paces(job.config.seed, 4)
    share = np.clip((1.5 - 0.2 - sent / 20e3) / computes, 0, 1)
    assert plan.steps.tolist() == np.floor(whole * share * (1 + 1e-12)).astype(int).tolist()
    assert 0 < plan.steps.min() < whole.min()


def test_complete_visits_lose_no_step_to_rounding() -> None:
    """After a day in the queue visits of a hundredth of a second are complete."""
    speed = model(model="lognormal", mean=0.01, within=0.5)
    found = times(speed, None, BatchQueue(model="gamma", mean=86400.0, within=0.5))
    for place in range(200):
        now = asked(place)
        seconds = found.seconds(now)
        assert (found.share(now, seconds, float(seconds.max())) == 1.0).all()


def test_chances_are_outcomes_where_nothing_is_drawn() -> None:
    found = times(model(model="none"), Link(latency=0.1), steps=[1, 1, 1])
    for end in (1.2, 1.2000000000000002, 1.19):
        now = asked(closes_after=end)
        np.testing.assert_array_equal(found.arrival(now), found.depth(now)[:, None] <= [1, 2, 3])


def test_tables_by_time_are_scaled_too(tmp_path: Path) -> None:
    file = csv(tmp_path, "a.csv", "time,client,seconds\n0,0,1\n0,1,1\n0,2,1\n10,0,5\n10,1,5\n10,2,5\n")
    for scale in (1.0, 0.1):
        found = times(Table(file=file, scale=scale))
        took = [float(found.seconds(asked(begins=begins * scale))[0]) / scale for begins in (0.0, 9.9, 10.1)]
        assert took == pytest.approx([1, 1, 5])


def test_runs_are_the_same_when_resumed(tmp_path: Path) -> None:
    config = {**DIGITS, "rounds": 4, "speed": {"model": "weibull", "within": 0.4, "persistence": 0.5}}
    config |= {"queue": {"model": "lognormal", "within": 1.0, "persistence": 0.7}, "link": {"up": "1 MB/s"}}
    whole = hpcfl.run("wait-digits", overlays=config, out=tmp_path / "whole")
    begun = hpcfl.run("wait-digits", overlays={**config, "rounds": 2}, out=tmp_path / "begun")
    again = hpcfl.resume(begun.folder, rounds=4)
    assert again.data["sim_seconds"].values.tolist() == whole.data["sim_seconds"].values.tolist()


DEADLINE = "participation.close='deadline'", "participation.deadline=1"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["link.up='10'"], "link.up: expected a rate with its unit such as '20 Mbit/s'"),
        (["link.up=10"], "link.up"),
        (["link.down='0 B/s'"], "link.down: expected a rate above 0"),
        (["link.latency=-1"], "link.latency"),
        (["link.between=0.5"], "link.between = 0.5 has no meaning with link.down and link.up = 'unlimited'"),
        (["link.file='FILE'", "link.up='1 B/s'"], "link.up"),
        (["link.up='1e400 B/s'"], "link.up: expected a rate above 0"),
        (["queue.mean=2"], "queue.mean = 2.0 has no meaning with queue.model = 'none'"),
        (["queue.model='gamma'", "queue.persistence=0.5"], "queue.persistence: expected 0 with queue.within = 0"),
        (["queue.model='table'"], "queue.file"),
        (["queue.model='shifted-exponential'", "queue.within=2"], "queue.within"),
        (["speed.scale=0"], "speed.scale"),
        (["speed.per='stp'"], "did you mean 'step'?"),
        (
            ["link.latency=1", "speed.model='uniform-depth'", *DEADLINE],
            "[link]: the times of speed.model = 'uniform-depth' follow from the deadline",
        ),
        (["link.server='1 B/s'", "participation.close='arrivals'", "participation.buffer=2"], "link.server: "),
    ],
)
def test_bad_input_is_one_line(settings: list[str], line: str, tmp_path: Path, capsys: Any) -> None:
    file = csv(tmp_path, "lines.csv", LINES)
    words = [word for text in settings for word in ("--set", text.replace("FILE", file))]
    assert main(["check", "fedavg-digits", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert line in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ("0,1,1,0\n1,1,1,0", "no row for client 2 (clients = 3)"),
        ("0,1,1,0\n1,1,1,0\n2,1,0,0", "line 4: up is 0, expected bytes per second above 0"),
        ("0,1,1,0\n1,1,1,-1\n2,1,1,0", "line 3: latency is -1, expected seconds"),
        ("0,1,1,0\n1,1,1,0\n1,1,1,0", "line 4: client 1 is there twice"),
        ("0,1,1,0\n1,1,1,0\n7,1,1,0", "line 4: client is 7, expected 0 … 2 (clients = 3)"),
        ("0,1,1", "line 2: expected numbers for client,down,up,latency"),
    ],
)
def test_bad_tables_are_one_line(rows: str, line: str, tmp_path: Path, capsys: Any) -> None:
    file = csv(tmp_path, "lines.csv", f"client,down,up,latency\n{rows}\n")
    assert main(["check", "fedavg-digits", "--set", "clients=3", "--set", f"link.file={file!r}"]) == 2
    said = capsys.readouterr().err.strip()
    assert line in said
    assert len(said.splitlines()) == 1


def test_what_is_shown_of_speeds_has_all_that_a_visit_takes(capsys: Any) -> None:
    words = ["speed.model='none'", "link.latency=5", "queue.model='gamma'", "queue.mean=100"]
    assert main(["speeds", "show", "fedavg-digits", *(word for text in words for word in ("--set", text))]) == 0
    assert " 111 " in capsys.readouterr().out.splitlines()[3]  # 100 in the queue, 2 · 5 on the way, 1 computing


@pytest.mark.parametrize("participation", [{}, {"close": "arrivals", "buffer": 2}], ids=["all", "arrivals"])
def test_a_check_says_how_long_the_run_takes(participation: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    world = {"speed": {"model": "lognormal", "between": 0.5, "within": 0.3}, "link": {"up": "20 kB/s"}}
    overlay = {"rounds": 5, "clients": 4, **world, "participation": participation}
    run = hpcfl.run("wait-digits", overlays=overlay, out=tmp_path / "run")
    config = load("wait-digits", overlays=overlay)
    said = dict(line.split(maxsplit=1) for line in report(config, config.check(None), None, 1))
    took = float(run.data["sim_seconds"].values[-1])
    words = said["in"].split()  # all 12.3 s for 5 rounds; by 9 other seeds 8.1 to 20.2 s
    assert float(words[1]) == pytest.approx(took, rel=1e-3)
    assert words[3:9] == ["for", "5", "rounds;", "by", "9", "other"]
    assert 0 < float(words[10]) < float(words[12])
