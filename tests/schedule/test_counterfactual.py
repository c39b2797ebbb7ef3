"""Replays by rule: the seconds of a run under other rules, what was cut short being drawn from what is left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import hpcfl
from hpcfl.base.errors import UsageError
from hpcfl.commands.cli import main
from hpcfl.config import load
from hpcfl.engine.job import Job
from hpcfl.schedule.counterfactual import Counterfactual, Fitted
from hpcfl.schedule.plan import Attempt
from hpcfl.schedule.tape import Tape
from hpcfl.testing.runs import recorded

LAW = {"model": "lognormal", "mean": 0.5, "between": 0.4, "within": 0.3, "persistence": 0.5}
SOON = {"close": "deadline", "deadline": 0.5, "min_clients": 1}
METHODS: dict[str, dict[str, Any]] = {
    "salf": {"algorithm": {"name": "salf", "missing": "exact"}, "participation": SOON},
    "first": {"participation": {"close": "first", "first": 3}},
    "arrivals": {"participation": {"close": "arrivals", "buffer": 2}},
    "steps": {"participation": {**SOON, "partial": "steps"}, "algorithm": {"name": "fedavg", "epochs": 0, "steps": 4}},
}


def run(folder: Path, **sections: Any) -> hpcfl.Run:
    return hpcfl.run("wait-digits", overlays={"rounds": 5, "clients": 6, **sections}, out=folder)


def by_rule(run: hpcfl.Run) -> dict[str, Any]:
    return {"model": "trace", "closing": "rule", "run": str(run.folder)}


@pytest.mark.parametrize("name", METHODS)
def test_the_same_method_and_rule_give_the_same_bits(name: str, tmp_path: Path) -> None:
    own = run(tmp_path / "own", speed=LAW, **METHODS[name])
    again = run(tmp_path / "again", speed=by_rule(own), **METHODS[name])
    one, other = recorded(own.folder), recorded(again.folder)
    assert one.keys() == other.keys()
    for column in one:
        np.testing.assert_array_equal(one[column], other[column], err_msg=column)


def test_another_method_takes_the_seconds_of_the_same_rounds(tmp_path: Path) -> None:
    drop = run(tmp_path / "drop", speed=LAW, participation=SOON)
    direct = run(tmp_path / "direct", speed=LAW, **METHODS["first"])
    replayed = run(tmp_path / "replayed", speed=by_rule(drop), **METHODS["first"])
    for column in ("visit_seconds", "sim_seconds", "arrived", "loss"):
        np.testing.assert_array_equal(direct.data[column], replayed.data[column])
    more = run(tmp_path / "more", rounds=9, speed=by_rule(drop), **METHODS["arrivals"])
    assert more.data.sizes["round"] == 9


class Measured(Counterfactual):
    """A run by the wall clock that is written down: a deadline of 1.2 s cuts visits short."""

    @property
    def tape(self) -> Tape:  # type: ignore[override]
        return TAPE

    @property
    def simulated(self) -> bool:
        return False


ROUNDS, CLIENTS, DEADLINE, WITHIN = 60, 200, 1.2, 0.3
RNG = np.random.default_rng(1)
MEANS = RNG.normal(-0.1, 0.5, CLIENTS)
TRUE = np.exp(RNG.normal(MEANS, WITHIN, (ROUNDS, CLIENTS)))
ASKED = RNG.random((ROUNDS, CLIENTS)) < 0.5
ASKED[:, 0] = False  # of whom nothing is known
TAPE = Tape(
    *(None, 1, "vmapped", 2),  # type: ignore[arg-type]
    columns={
        "cohort": ASKED.astype(int),
        "visit_seconds": np.where(ASKED & (TRUE <= DEADLINE), TRUE, np.nan),
        "round_seconds": np.full(ROUNDS, DEADLINE),
        "repeats": np.zeros(ROUNDS, dtype=int),
        "deadline": np.full(ROUNDS, np.nan),
    },
    arrivals={},
)


def attempt(round: int, **more: Any) -> Attempt:
    return Attempt(7, CLIENTS, np.array([1.0, 0.5]), round, 0, np.arange(CLIENTS), **more)


@pytest.fixture
def measured() -> Measured:
    return Measured(run="here")


def test_the_law_comes_back_from_visits_that_were_cut_short(measured: Measured) -> None:
    cut = ASKED & (TRUE > DEADLINE)
    assert 0.2 < cut.sum() / ASKED.sum() < 0.5
    law = measured.fitted
    assert law.spread == pytest.approx(WITHIN, rel=0.05)
    some = ASKED.sum(0) - cut.sum(0) >= 5  # of whom five visits were whole
    assert np.abs(law.means - MEANS)[some].max() < 0.3
    assert (law.means - MEANS)[some].mean() == pytest.approx(0, abs=0.02)
    assert law.means[0] == pytest.approx(law.means[1:].mean(), abs=0.1)  # as all others


def test_a_likelihood_is_not_better_elsewhere() -> None:
    """One client: the censored likelihood, maximised by hand, is where the fit is."""
    rng = np.random.default_rng(5)
    logs = rng.normal(0.0, 0.5, (400, 1))
    cut = logs > 0.2
    law = Fitted.to(np.where(cut, np.nan, logs), np.where(cut, 0.2, np.nan))

    def likelihood(mean: float, spread: float) -> float:
        whole = stats.norm.logpdf(logs[~cut], mean, spread).sum()
        return float(whole + stats.norm.logsf(0.2, mean, spread) * cut.sum())

    best = likelihood(float(law.means[0]), law.spread)
    for mean, spread in ((0.02, 0.0), (-0.02, 0.0), (0.0, 0.02), (0.0, -0.02)):
        assert best > likelihood(law.means[0] + mean, law.spread + spread)


def test_what_is_known_is_taken_and_what_was_cut_short_is_longer(measured: Measured) -> None:
    known = ASKED & (TRUE <= DEADLINE)
    drawn = np.array([measured.seconds(attempt(place)) for place in range(ROUNDS)])
    np.testing.assert_array_equal(drawn[known], TRUE[known])
    cut = ASKED & ~known
    assert (drawn[cut] >= DEADLINE * (1 - 1e-12)).all()
    law = measured.fitted
    scores = (np.log(drawn) - law.means) / law.spread
    assert stats.kstest(scores[~ASKED], "norm").pvalue > 0.001  # of those that were not asked the whole law
    least = stats.norm.cdf((np.log(DEADLINE) - law.means) / law.spread)
    rest = (stats.norm.cdf(scores) - least) / (1 - least)
    assert stats.kstest(rest[cut], "uniform").pvalue > 0.001  # of the others what is beyond
    assert (measured.seconds(attempt(ROUNDS)) != drawn[0]).all()  # of a round beyond the recorded ones nothing is known
    again = replace(attempt(3), number=1)  # nor of a void attempt
    assert (measured.seconds(again) != drawn[3]).all()


def test_a_bound_is_that_of_the_attempt_that_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds with void attempts took five deadlines: the last of them cut visits short, and nobody else's do."""
    void = RNG.random(ROUNDS) < 0.5
    columns = {
        **TAPE.columns,
        "round_seconds": np.where(void, 5 * DEADLINE, DEADLINE),
        "repeats": np.where(void, 4, 0),
        "deadline": np.full(ROUNDS, DEADLINE),
    }
    monkeypatch.setattr(Measured, "tape", replace(TAPE, columns=columns))
    measured = Measured(run="here")
    assert set(measured.least[np.isfinite(measured.least)]) == {DEADLINE}
    assert measured.fitted.spread == pytest.approx(WITHIN, rel=0.05)


def test_chances_are_those_of_the_law(measured: Measured) -> None:
    law, one = measured.fitted, attempt(0, closes_after=0.8)
    expected = stats.lognorm(law.spread, scale=np.exp(law.means)).cdf(0.8)
    np.testing.assert_allclose(measured.arrival(one)[:, 0], expected, rtol=1e-9)
    np.testing.assert_allclose(measured.paces(0, CLIENTS), np.exp(law.means + law.spread**2 / 2))


def test_steps_scale_the_seconds_of_a_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one epoch recorded and two asked for: twice the seconds, client by client."""
    own = run(
        tmp_path / "own",
        speed=LAW,
        participation={"close": "all"},
        algorithm={"name": "fedavg", "epochs": 1, "steps": 0},
    )
    monkeypatch.setattr(Counterfactual, "simulated", False)
    for epochs, factor in ((1, 1.0), (2, 2.0)):
        sections = {
            "speed": {**by_rule(own), "per": "step"},
            "algorithm": {"name": "fedavg", "epochs": epochs, "steps": 0},
        }
        job = Job.of(load("wait-digits", overlays={"rounds": 5, "clients": 6, **sections}), None, 1)
        plan = job.planner.plan(job.planner.attempt(2))
        np.testing.assert_allclose(plan.seconds, factor * own.data["visit_seconds"].values[2], rtol=1e-12)


@pytest.mark.parametrize(
    ("recorded", "settings", "line"),
    [
        ({}, ["clients=5"], "recorded 6 clients, got 5; did you mean 6?"),
        ({}, ["speed.per='step'"], "expected 'visit', as recorded, got 'step'; did you mean 'visit'?"),
        ({}, ["speed.closing='rules'"], "did you mean 'rule'?"),
        ({}, ["speed.costs='parameters'"], "speed.costs = 'parameters' has no meaning"),
        (
            {"speed": {"model": "uniform-depth"}, "participation": SOON},
            [],
            "times follow from the deadline, and are none under another rule",
        ),
    ],
)
def test_bad_input_is_one_line(recorded: Any, settings: list[str], line: str, tmp_path: Path, capsys: Any) -> None:
    own = run(tmp_path / "own", **{"speed": LAW, "rounds": 1, **recorded})
    capsys.readouterr()
    keys = ["clients=6", "speed.model='trace'", "speed.closing='rule'", f"speed.run='{own.folder}'", *settings]
    assert main(["check", "wait-digits", *(word for key in keys for word in ("--set", key))]) == 2
    (said,) = capsys.readouterr().err.splitlines()[-1:]
    assert line in said


def test_a_run_in_a_world_is_replayed_with_what_it_has(tmp_path: Path, capsys: Any) -> None:
    """Links, availability, steps and scale are those of the run; under its own rule its seconds come back."""
    world = {"speed": {**LAW, "per": "step", "scale": 0.5}, "link": {"up": "50 kB/s"}}
    world |= {"availability": {"model": "on-off", "on": 20.0, "off": 5.0}}
    own = run(tmp_path / "own", participation={"close": "all"}, **world)
    (tmp_path / "same.toml").write_text('[participation]\nclose = "all"\n')
    words = ["compare", "--replay", str(own.folder), "--with", str(tmp_path / "same.toml"), "--out", str(tmp_path)]
    assert main(words) == 0
    again = hpcfl.open_run(tmp_path / "same")
    for column in ("sim_seconds", "cohort", "visit_seconds", "loss"):
        np.testing.assert_array_equal(own.data[column], again[column])


def test_of_a_run_in_real_time_with_links_it_is_not_known_what_is_computing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = run(tmp_path / "own", speed=LAW, link={"latency": 0.1})
    monkeypatch.setattr(Counterfactual, "simulated", False)
    with pytest.raises(UsageError, match=r"has \[link\], and what of its seconds by the wall clock is computing"):
        run(tmp_path / "again", speed=by_rule(own))


def test_a_replay_of_a_replay_by_rule_is_refused(tmp_path: Path) -> None:
    first = {"close": "first", "first": 3}
    own = run(tmp_path / "own", speed=LAW, participation=first)
    again = run(tmp_path / "again", speed={"model": "trace", "run": str(own.folder)}, participation=first)
    with pytest.raises(UsageError, match="is a replay itself: expected the run that it replays"):
        run(tmp_path / "third", speed=by_rule(again))


@pytest.mark.parametrize("more", [{"link": {"latency": 0.05}}, {"speed": {**LAW, "scale": 0.9}}], ids=["link", "scale"])
def test_chances_of_a_replay_are_not_known_where_its_speed_model_does_not_say_them(more: Any, tmp_path: Path) -> None:
    sections = {"speed": LAW, **METHODS["salf"], **more}
    own = run(tmp_path / "own", **sections)
    replay = {"speed": {"model": "trace", "run": str(own.folder)}}
    with pytest.raises(UsageError, match="nor of a replayed run with links"):
        run(tmp_path / "again", **sections | replay | {"link": {}})
    plain = {**sections["algorithm"], "missing": "none"}
    run(tmp_path / "plain", **sections | replay | {"link": {}, "algorithm": plain})


def test_other_rules_are_compared_on_the_seconds_of_a_run(tmp_path: Path, capsys: Any) -> None:
    own = run(tmp_path / "own", speed=LAW, participation={"close": "all"})
    for name, first in (("three", 3), ("two", 2)):
        (tmp_path / f"{name}.toml").write_text(f'[participation]\nclose = "first"\nfirst = {first}\n')
    capsys.readouterr()
    names = ",".join(str(tmp_path / f"{name}.toml") for name in ("three", "two"))
    words = ["compare", "--replay", str(own.folder), "--with", names, "--out", str(tmp_path / "out"), "--as", "json"]
    for _ in range(2):  # what is done already is not run again
        assert main(words) == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 2
    seconds = np.sort(own.data["visit_seconds"].values, 1)
    for name, first in (("three", 3), ("two", 2)):
        took = hpcfl.open_run(tmp_path / "out" / name)["sim_seconds"].values
        np.testing.assert_allclose(took, np.cumsum(seconds[:, first - 1]), rtol=1e-12)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "three.toml").write_text('[participation]\nclose = "first"\nfirst = 4\n')
    (tmp_path / "law.toml").write_text('[speed]\nmodel = "gamma"\n')
    for names, said in (
        ("sub/three.toml", "holds a run of another config"),
        ("three.toml,sub/three.toml", "expected overlays of different names"),
        ("law.toml", "[speed]: expected an overlay without it"),
    ):
        words[4] = ",".join(str(tmp_path / name) for name in names.split(","))
        assert main(words) == 2
        assert said in capsys.readouterr().err
    assert main(["compare", "--with", "a.toml", str(own.folder)]) == 2
    assert main(["compare"]) == 2
    assert "expected FOLDERS" in capsys.readouterr().err
