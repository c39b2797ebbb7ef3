"""Visit times by laws: moments, quantiles, first arrivals and autocorrelation, against scipy and closed forms."""

from __future__ import annotations

from math import exp, gamma, inf, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import brentq

import hpcfl
from hpcfl.commands.cli import main
from hpcfl.schedule.plan import Attempt
from hpcfl.schedule.speeds import speed_class
from hpcfl.schedule.speeds.laws import Law, in_slow_phase, normals

SPREADS = 0.2, 0.78, 1.0


def law(name: str, **keys: Any) -> Law:
    made = speed_class(name).from_table({"model": name, **keys}, "speed")
    assert isinstance(made, Law)
    return made


def frozen(name: str, spread: float) -> Any:
    """The law of mean 1 as scipy has it."""
    if name == "lognormal":
        return stats.lognorm(spread, scale=exp(-(spread**2) / 2))
    if name == "gamma":
        return stats.gamma(spread**-2, scale=spread**2)
    if name == "pareto":
        index = 1 + sqrt(1 + spread**-2)
        return stats.pareto(index, scale=(index - 1) / index)
    if name == "shifted-exponential":
        return stats.expon(1 - spread, spread)
    if name == "uniform-about":
        return stats.uniform(1 - sqrt(3) * spread, 2 * sqrt(3) * spread)
    shape = brentq(lambda k: gamma(1 + 2 / k) / gamma(1 + 1 / k) ** 2 - 1 - spread**2, 0.3, 50)
    return stats.weibull_min(shape, scale=1 / gamma(1 + 1 / shape))


NAMES = "lognormal", "gamma", "weibull", "pareto", "shifted-exponential", "uniform-about"


def attempt(round: int = 0, number: int = 0, clients: int = 5, **more: Any) -> Attempt:
    return Attempt(3, clients, np.array([1.0, 0.5]), round, number, np.arange(clients), **more)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("name", NAMES)
def test_quantiles_and_chances_are_those_of_scipy(name: str, spread: float) -> None:
    survival, known = np.array([0.999, 0.7, 0.5, 0.1, 1e-6]), frozen(name, spread)
    factors = law(name).factor(survival, spread)
    np.testing.assert_allclose(factors, known.isf(survival), rtol=1e-9)
    np.testing.assert_allclose(law(name).chance(factors, spread), 1 - survival, rtol=1e-9)
    assert known.mean() == pytest.approx(1, rel=1e-9)
    if name == "lognormal":
        assert np.log(factors).mean() == pytest.approx(np.log(known.isf(survival)).mean())
    else:
        assert known.std() == pytest.approx(spread, rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_drawn_visits_have_the_laws_moments(name: str) -> None:
    drawn = law(name, mean=2.0, within=0.4).seconds(attempt(clients=200_000))
    assert stats.kstest(drawn / 2, frozen(name, 0.4).cdf).pvalue > 0.01
    between = law(name, mean=2.0, between=0.4)
    assert stats.kstest(between.paces(3, 200_000) / 2, frozen(name, 0.4).cdf).pvalue > 0.01
    np.testing.assert_array_equal(between.seconds(attempt(round=4)), between.paces(3, 5))


def test_first_arrivals_are_those_of_the_closed_form() -> None:
    """Of n visits, exponential with the mean m: m · Σ 1/(n − k)."""
    found = law("gamma", mean=2.0, within=1.0).order(3, 50, np.arange(50), 10)
    exact = 2.0 * np.cumsum(1 / np.arange(10, 0, -1))
    np.testing.assert_allclose(found, exact, rtol=0.06)  # 1,000 draws


def test_persistence_is_the_autocorrelation_of_log_time() -> None:
    """To the accuracy of 400 clients of 500 rounds: 4 standard errors."""
    speed = law("lognormal", within=0.5, between=0.3, persistence=0.7)
    logs = np.log([speed.seconds(attempt(place, clients=400)) for place in range(500)])
    logs -= np.log(speed.paces(3, 400)) - 0.5**2 / 2
    for lag in (1, 2, 5):
        assert (logs[lag:] * logs[:-lag]).mean() / 0.25 == pytest.approx(0.7**lag, abs=0.02)
    assert logs.std() == pytest.approx(0.5, rel=0.02)
    pareto = law("pareto", within=0.5, persistence=0.7)
    paretos = np.concatenate([pareto.seconds(attempt(place, clients=400)) for place in range(0, 500, 50)])
    assert stats.kstest(paretos, frozen("pareto", 0.5).cdf).pvalue > 0.01


def test_a_round_is_the_same_whatever_was_asked_for_before() -> None:
    whole = [normals(1, 4, 0.6, place, 0) for place in range(9)]
    for place in (8, 3, 3, 5, 4):
        np.testing.assert_array_equal(normals(1, 4, 0.6, place, 0), whole[place])
    again = normals(1, 4, 0.6, 5, 2)
    assert (again != whole[5]).all()
    np.testing.assert_array_equal(normals(1, 4, 0.6, 6, 0), whole[6])


def test_spans_of_seconds_instead_of_rounds() -> None:
    """Rounds that begin within one span find clients alike; from span to span these are what rounds are without it."""
    keys = {"within": 0.5, "between": 0.3, "persistence": 0.7, "slow": 3.0, "slow_rounds": 4.0}
    by_rounds, by_spans = law("gamma", **keys), law("gamma", lag=2.5, **keys)
    for round_, number, begins in ((0, 0, 0.0), (1, 0, 2.4), (2, 1, 2.4), (3, 0, 2.5), (4, 2, 99.9), (5, 0, 101.0)):
        now = by_spans.seconds(attempt(round_, number, begins=begins))
        np.testing.assert_array_equal(now, by_rounds.seconds(attempt(int(begins // 2.5))))
    assert by_spans.persists


def test_rounds_of_a_run_are_drawn_by_when_they_begin(tmp_path: Path) -> None:
    spans = {"speed.model": "lognormal", "speed.within": 0.5, "speed.lag": 6.0, "speed.scale": 2.0, "rounds": 12}
    run = hpcfl.run("wait-digits", settings={**spans, "clients": 4, "seed": 3}, out=tmp_path)
    speed, begins = law("lognormal", within=0.5), 0.0
    for seconds, ended in zip(run.data["visit_seconds"].values, run.data["sim_seconds"].values):
        here = Attempt(3, 4, np.ones(1), int(begins / 2 // 6), 0, np.arange(4))
        np.testing.assert_array_equal(seconds, 2 * speed.seconds(here))
        begins = ended
    assert begins > 24  # there are spans with several rounds, and several spans


@pytest.mark.parametrize("name", NAMES)
def test_chances_to_arrive_are_the_laws_given_the_clients_mean(name: str) -> None:
    speed = law(name, mean=1.5, between=0.3, within=0.4, persistence=0.5)
    each = attempt(closes_after=1.2)
    expected = frozen(name, 0.4).cdf(1.2 / np.outer(speed.paces(3, 5), [1.0, 0.5]))
    np.testing.assert_allclose(speed.arrival(each), expected, rtol=1e-9, atol=1e-12)
    assert (law(name, mean=1.5).arrival(each) == [0, 1]).all()
    assert (speed.arrival(attempt(closes_after=inf)) == 1).all()


def test_numbers_from_fast_to_slow() -> None:
    paces = law("lognormal", between=0.8, sorted=True).paces(3, 50)
    assert (np.diff(paces) > 0).all()
    assert np.log(paces).std() == pytest.approx(0.8, rel=0.2)
    assert log(paces.mean()) == pytest.approx(0, abs=0.3)


KEYS = {"speed": {"model": "lognormal", "within": 0.5, "between": 0.4, "persistence": 0.8}, "rounds": 6, "clients": 5}


def test_a_resumed_run_draws_what_one_without_a_break_draws(tmp_path: Path) -> None:
    close = {"participation.close": "first", "participation.first": 3, "checkpoint.every": 2}
    whole = hpcfl.run("wait-digits", settings={**KEYS, **close}, out=tmp_path / "whole")
    hpcfl.run("wait-digits", settings={**KEYS, **close}, out=tmp_path / "half", on_round=lambda row: row["round"] == 2)
    half = hpcfl.resume(tmp_path / "half")
    for name in ("visit_seconds", "sim_seconds", "arrived", "loss"):
        np.testing.assert_array_equal(whole.data[name], half.data[name])
    logs = np.log(whole.data["visit_seconds"].values)
    assert np.isfinite(logs).all()
    assert len({*logs.ravel()}) == logs.size


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["speed.model=lognormal", "speed.within=-1"], "speed.within"),
        (["speed.model=gamma", "speed.within=0.1", "speed.persistence=1"], "speed.persistence"),
        (["speed.model=gamma", "speed.persistence=0.5"], "speed.persistence: expected 0 with speed.within = 0"),
        (["speed.model=shifted-exponential", "speed.within=1.5"], "speed.within"),
        (["speed.model=lognormal", "speed.mean=0"], "speed.mean"),
        (["speed.model=gamma", "speed.lag=3"], "speed.lag = 3.0 has no meaning with speed.within = 0"),
        (["speed.model=gamma", "speed.within=1", "speed.lag=3", "clock=wall"], "in simulated time"),
        (["speed.model=uniform-about", "speed.within=0.6"], "speed.within"),
        (["speed.model=log-normal"], "did you mean 'lognormal'?"),
        (["speed.model=lognormal", "speed.slow=0.5"], "speed.slow"),
        (
            ["speed.model=lognormal", "speed.slow_share=0.2"],
            "speed.slow_share = 0.2 has no meaning with speed.slow = 1",
        ),
        (
            ["speed.model=lognormal", "speed.slow=2", "speed.slow_share=0.9", "speed.slow_rounds=2"],
            "speed.slow_rounds = 2: speed.slow_share = 0.9 needs phases of 9 rounds at least",
        ),
    ],
)
def test_what_no_law_can_have_is_refused(keys: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "wait-digits", *(word for key in keys for word in ("--set", key))]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert said in line


def phases(share: float, lasts: float, rounds: int = 3000, clients: int = 60) -> Any:
    return np.array([in_slow_phase(3, clients, share, lasts, place, 0) for place in range(rounds)])


def test_slow_phases_last_as_long_as_they_should() -> None:
    """A Markov chain: its share, its mean phases, and from round to round the chance 1/lasts to end one."""
    slow = phases(0.2, 8.0)
    assert slow.mean() == pytest.approx(0.2, abs=0.01)
    ends = (slow[:-1] & ~slow[1:]).sum() / slow[:-1].sum()
    begins = (~slow[:-1] & slow[1:]).sum() / (~slow[:-1]).sum()
    assert ends == pytest.approx(1 / 8, rel=0.05)
    assert begins == pytest.approx(0.2 / 0.8 / 8, rel=0.05)
    assert slow[0].mean() == pytest.approx(0.2, abs=0.2)
    for place in (7, 2, 2, 9):
        np.testing.assert_array_equal(in_slow_phase(3, 60, 0.2, 8.0, place, 0), slow[place])
        np.testing.assert_array_equal(in_slow_phase(3, 60, 0.2, 8.0, place, 4), slow[place])


@pytest.mark.parametrize("within", [0.0, 0.4])
def test_visits_in_slow_phases_take_longer_and_chances_know_it(within: float) -> None:
    speed = law("weibull", mean=1.5, between=0.3, within=within, slow=3.0, slow_share=0.25, slow_rounds=4.0)
    plain = law("weibull", mean=1.5, between=0.3, within=within)
    each = [attempt(place, closes_after=2.0) for place in range(6000)]
    seconds = np.array([speed.seconds(one) for one in each])
    slow = phases(0.25, 4.0, 6000, 5)
    np.testing.assert_allclose(seconds, np.array([plain.seconds(one) for one in each]) * np.where(slow, 3.0, 1.0))
    np.testing.assert_allclose(seconds.mean(0), speed.paces(3, 5), rtol=0.08)
    there = (seconds[:, :, None] * [1.0, 0.5] <= 2.0).mean(0)
    np.testing.assert_allclose(there, speed.arrival(each[0]), atol=0.04)
    np.testing.assert_allclose(speed.in_time(each[0], np.tile([2.0, 4.0], (5, 1))), speed.arrival(each[0]), rtol=1e-12)
    assert speed.redrawn


MEASURED = "client,ms_ms\na,1000\na,3000\nb,500\nb,\nb,700\nb,900\n"


def test_measured_seconds_are_drawn_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(MEASURED)
    everybody = {"model": "bootstrap", "file": str(tmp_path / "a.csv")}
    pooled = speed_class("bootstrap").from_table(everybody, "speed")
    each = [attempt(place, clients=40, closes_after=0.8) for place in range(400)]
    seconds = np.array([pooled.seconds(one) for one in each])
    values, counts = np.unique(seconds, return_counts=True)
    assert values.tolist() == pytest.approx([0.5, 0.7, 0.9, 1.0, 3.0])
    assert stats.chisquare(counts).pvalue > 0.001
    assert pooled.paces(3, 40).tolist() == pytest.approx([1.22] * 40)
    np.testing.assert_allclose(
        pooled.arrival(each[0]), [[0.4, 0.8]] * 40
    )  # by .8 s of the first layer, 1.6 of the other
    own = speed_class("bootstrap").from_table({**everybody, "by": "client", "sorted": True}, "speed")
    seconds = np.array([own.seconds(one) for one in each])
    kinds = [tuple(np.unique(column).round(9).tolist()) for column in seconds.T]
    assert set(kinds) == {(0.5, 0.7, 0.9), (1.0, 3.0)}
    assert kinds == sorted(kinds)
    means = own.paces(3, 40)
    np.testing.assert_allclose(seconds.mean(0), means, rtol=0.12)
    assert (np.diff(means) >= 0).all()
    there = (seconds[:, :, None] * [1.0, 0.5] <= 0.8).mean(0)
    np.testing.assert_allclose(there, own.arrival(each[0]), atol=0.11)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "speed.file: missing"),
        ({"file": "none.csv"}, "no such file"),
        ({"file": "FILE", "column": "ms_m"}, "did you mean 'ms_ms'?"),
        ({"file": "FILE", "by": "clients"}, "speed.by"),
        ({"file": "BAD"}, "line 2: seconds = 'x', expected seconds"),
        ({"file": "LONG", "by": "clien"}, "speed.by"),
        ({"file": "BINARY"}, "truncated or damaged, expected a CSV file"),
    ],
)
def test_measured_seconds_that_are_none(keys: dict[str, str], said: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "FILE").write_text(MEASURED)
    (tmp_path / "BAD").write_text("seconds\nx\n1\n2\n")
    (tmp_path / "LONG").write_text("a,seconds\n1,2,3\n1,2,3\n1,2,3\n1,2,3\n")
    (tmp_path / "BINARY").write_bytes(b"seconds\n\xff\xfe\x00\n")
    places = {name: str(tmp_path / name) for name in ("FILE", "BAD", "BINARY", "LONG")}
    words = [f"speed.{key}='{places.get(value, value)}'" for key, value in keys.items()]
    assert (
        main(
            ["check", "wait-digits", *(each for word in ("speed.model=bootstrap", *words) for each in ("--set", word))]
        )
        == 2
    )
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert said in line


def test_a_check_says_that_chances_are_not_given_the_rounds_before(capsys: Any) -> None:
    for persistence, said in ((0.7, True), (0.0, False)):
        words = ["speed.model=lognormal", "speed.within=0.5", f"speed.persistence={persistence}"]
        assert main(["check", "salf-digits", *(each for word in words for each in ("--set", word))]) == 0
        assert ("(over all rounds, not given those before)" in capsys.readouterr().out) == said


def test_narrow_laws_are_narrow() -> None:
    """Of a Weibull law, whose shape is found from its spread, down to what rounding leaves."""
    u = (np.arange(100_000) + 0.5) / 100_000
    for spread in (1e-6, 9e-4, 1.1e-3, 0.01):
        drawn = law("weibull").factor(u, spread)
        assert drawn.std() == pytest.approx(spread, rel=0.01)
        assert drawn.mean() == pytest.approx(1, abs=spread)
