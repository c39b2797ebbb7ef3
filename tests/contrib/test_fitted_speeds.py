"""`hpcfl speeds`: laws, spreads and persistence of seconds that were drawn with known ones, and of published ones."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcfl.commands.cli import main
from hpcfl.config import load
from hpcfl.contrib.speeds import changes, fit, picture
from hpcfl.schedule.plan import Attempt

PUBLISHED = Path(os.environ.get("HPCFL_DATA", "nowhere")) / "speeds"


def table(path: Path, seconds: Any, names: Sequence[str] = ("client", "seconds")) -> Path:
    """Write seconds [round, client], a row each in order of time."""
    rows = [f"{client},{value:.9g}" for each in np.atleast_2d(seconds) for client, value in enumerate(each)]
    path.write_text("\n".join([",".join(names), *rows]) + "\n")
    return path


DRAWN = {
    "lognormal": lambda rng: rng.lognormal(0.3, 0.6, (400, 5)),
    "gamma": lambda rng: rng.gamma(3.0, 0.5, (400, 5)),
    "weibull": lambda rng: 2.0 * rng.weibull(2.5, (400, 5)),
    "shifted-exponential": lambda rng: 1.0 + rng.exponential(0.5, (400, 5)),
    "exponential": lambda rng: rng.exponential(2.0, (400, 5)),
    "pareto": lambda rng: 0.5 * (1 + rng.pareto(4.0, (400, 5))),
}
SPREADS = {"lognormal": 0.6, "gamma": 3**-0.5, "weibull": 0.4279, "shifted-exponential": 1 / 3, "exponential": 1.0}
SPREADS["pareto"] = 8**-0.5


@pytest.mark.parametrize("law", DRAWN)
def test_the_law_that_seconds_were_drawn_by_is_found(law: str, tmp_path: Path) -> None:
    seconds = DRAWN[law](np.random.default_rng(1))
    found = fit(table(tmp_path / "a.csv", seconds))
    assert found["best"] == law
    assert found["parameters"]["spread"] == pytest.approx(SPREADS[law], rel=0.1)
    assert found["parameters"]["mean"] == pytest.approx(seconds.mean(), rel=0.05)
    assert found["ks"] < 0.03
    assert found["persistence"] == pytest.approx(0, abs=0.07)  # 3 standard errors
    assert found["slow"] == {}
    assert (found["clients"], found["values"]) == (5, 2000)


def test_spreads_and_persistence_come_back_from_what_a_config_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"model": "lognormal", "mean": 3.0, "between": 0.5, "within": 0.3, "persistence": 0.6}
    config = load("wait-digits", {"speed": keys, "clients": 60})
    each = [Attempt(1, 60, np.ones(1), place, 0, np.arange(60)) for place in range(300)]
    file = table(tmp_path / "a.csv", [config.speed.seconds(attempt) for attempt in each])
    assert main(["speeds", "fit", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found["best"] == "lognormal"
    assert found["between"] == pytest.approx(0.5, rel=0.2)
    assert found["within"] == pytest.approx(0.3, rel=0.05)
    assert found["persistence"] == pytest.approx(0.6, abs=0.04)
    assert found["lags"]["2"][0] == pytest.approx(0.36, abs=0.05)
    pasted = tmp_path / "pasted.toml"
    pasted.write_text("\n".join(["base = 'wait-digits'", *lines[lines.index("[speed]") : -1]]))
    assert load(pasted).speed.persistence == pytest.approx(found["persistence"], abs=0.001)
    assert main(["speeds", "show", str(pasted)]) == 0
    shown = capsys.readouterr().out
    assert "first n visits" in shown
    assert "misses" not in shown


def test_who_is_slow_throughout_and_whose_level_changes(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    seconds = rng.lognormal(0.0, 0.05, (60, 8))
    seconds[:, 3] *= 2.4
    seconds[30:, 5] *= 1.8
    found = fit(table(tmp_path / "a.csv", seconds))
    assert found["slow"] == {"3": pytest.approx(2.4, rel=0.05)}
    assert list(found["changes"]) == ["5"]
    (at,) = found["changes"]["5"]
    assert abs(at - 30) <= 1
    lasting = [0.0]
    for each in rng.normal(size=400):
        lasting.append(0.7 * lasting[-1] + each)
    assert changes(np.array(lasting)) == changes(rng.normal(size=400)) == []


def test_units_and_intervals(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("device,on_ms,off_ms\na,0,1000\na,2000,5000\nb,1000,3000\nb,4000,\n")
    (tmp_path / "b.csv").write_text("x,y_ms\na,1000\nb,3000\nc,2000\n")
    assert fit(tmp_path / "b.csv")["laws"]["exponential"]["mean"] == pytest.approx(2.0)
    with pytest.raises(Exception, match=r"line 5: off_ms-on_ms = '-4000', expected seconds"):
        fit(tmp_path / "a.csv", "off_ms-on_ms", ["device"])


@pytest.mark.parametrize(
    ("words", "text", "said"),
    [
        (["--column", "secnds"], "client,seconds\n0,1\n", "has no column 'secnds'; did you mean 'seconds'?"),
        (["--by", "host"], "client,seconds\n0,1\n", "--by: 'a.csv' has no column 'host'"),
        ([], "client,seconds\n0,1\n0,-2\n", "line 3: seconds = '-2', expected seconds"),
        ([], "client,seconds\n0,1\n0,two\n", "line 3: seconds = 'two', expected seconds"),
        ([], "client,seconds\n0,1\n", "expected three values of seconds above 0 at least"),
        ([], "client,seconds\n0,1\n0,1\n0,1\n", "all values of seconds are 1: expected some that differ"),
    ],
)
def test_bad_tables_are_one_line(
    words: list[str], text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text(text)
    assert main(["speeds", "fit", "a.csv", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="no speeds/ in HPCFL_DATA")
def test_published_measurements() -> None:
    """What was found of them by others: phones are log-normal, off-times too, jobs persist, one worker is slow."""
    phones = fit(PUBLISHED / "phones.csv", "resnet_ms", ["device"])
    assert (phones["best"], phones["persistence"]) == ("lognormal", None)
    assert phones["parameters"]["spread"] == pytest.approx(0.78, abs=0.04)
    away = fit(PUBLISHED / "availability.csv", "off_s-on_s", ["user"])["laws"]
    assert away["exponential"]["ks"] > 0.4
    assert away["lognormal"]["spread"] == pytest.approx(2.59, abs=0.02)
    for job in range(1, 5):
        assert 0.55 <= fit(PUBLISHED / f"pai_job{job}.csv")["persistence"] <= 0.8
    even = fit(PUBLISHED / "cluster_se.csv", None, ["dp_rank", "stage"])
    assert even["persistence"] == pytest.approx(0, abs=0.05)
    assert even["slow"] == {}
    assert fit(PUBLISHED / "cluster_ar.csv", None, ["dp_rank", "stage"])["slow"] == {
        "0/0": pytest.approx(2.36, abs=0.02)
    }


def test_the_picture_has_values_laws_and_lags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(2)
    file = table(tmp_path / "a.csv", rng.lognormal(0.0, 0.3, (60, 8)))
    left, right = picture(fit(file), file).axes
    measured, *drawn = left.lines
    assert measured.get_xdata().tolist() == sorted(measured.get_xdata())
    assert measured.get_ydata()[[0, -1]].tolist() == pytest.approx([1.0, 1 / 480])
    assert [line.get_label() for line in drawn] == [*fit(file)["laws"]][:3]
    for line in drawn[:1]:  # of the law that fits best
        there = np.interp(line.get_xdata(), measured.get_xdata(), measured.get_ydata())
        assert np.abs(there - line.get_ydata()).max() < 0.08
    assert (left.get_xlabel(), right.get_ylabel()) == ("seconds", "autocorrelation of log seconds")
    assert main(["speeds", "fit", str(file), "-o", str(tmp_path / "new" / "a.svg"), "--json"]) == 0
    assert (tmp_path / "new" / "a.svg").stat().st_size > 1000
    assert main(["speeds", "fit", str(file), "-o", str(tmp_path / "a.svk")]) == 2
    assert "did you mean 'svg'" in capsys.readouterr().err
