"""The theory of SRPFL beside its runs: singular values and bounds by hand, and the law of Theorem 4.9 on toy lines."""

from __future__ import annotations

import json
import subprocess
import sys
from math import inf, log, sqrt
from typing import Any

import numpy as np
import papers_page
import pytest
import srpfl_law
import srpfl_theory


def test_singular_values_are_those_of_the_fastest() -> None:
    heads = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    # of two: 1/2 and 1/2; of three: (2/3, 1/3), squared
    assert srpfl_theory.spread(heads, 2) == pytest.approx((sqrt(1 / 3), sqrt(2 / 3)))
    assert srpfl_theory.spread(heads, 3) == pytest.approx((sqrt(1 / 3), sqrt(2 / 3)))
    assert srpfl_theory.spread(heads[:2], 2) == pytest.approx((sqrt(1 / 2), sqrt(1 / 2)))


def test_the_bound_ends_at_the_target_for_one() -> None:
    theory, distance = srpfl_theory.Theory(32, 2, 0.2), np.array(1.0)
    for _ in range(300):
        distance = theory.bound(distance, np.array(32.0))
    assert float(distance) == pytest.approx(theory.target(1.0))
    assert theory.target(1.3) == pytest.approx(1.3 * 0.2 / (4 * sqrt(0.8) * (1 - sqrt(0.8))))


@pytest.mark.parametrize(("clients", "a"), [(16, 0.25), (256, 0.1), (2**20, 0.01)])
def test_the_times_of_the_recursion_and_of_the_lemmas(clients: int, a: float) -> None:
    """By a loop of its own, and by the number of rounds in closed form: Lemma B.3 says more than (10) gives."""
    constant, c = 1.2, 0.5
    theory = srpfl_theory.Theory(clients, 2, a, c)
    floor = a / (sqrt(clients / 2 * (1 - a)) * (1 - sqrt(1 - a)))
    harmonic = sum(1 / number for number in range(1, clients + 1))
    distance, rounds = 1.0, 0
    while distance > constant * floor:
        distance, rounds = distance * sqrt(1 - a) + a / sqrt(clients / 2 * (1 - a)), rounds + 1
    assert theory.followed(constant, False) == pytest.approx(rounds * (harmonic + c))
    needed = 2 * (log(1 / 0.2) + log(1 / floor - 1)) / log(1 / (1 - a))
    assert rounds - 1 < needed <= rounds
    assert theory.fedrep(constant) == pytest.approx(log(clients) * (log(clients) + 2 * log(5)) / log(1 / (1 - a)))
    assert theory.fedrep(constant) / log(clients) > rounds  # log N stands there for 2 log(1/floor - 1)
    assert theory.followed(constant, True) <= theory.followed(constant, False)
    assert theory.srpfl(constant) == pytest.approx(np.log2(clients) * (6 * 1.5 + 4 * np.log2(5)) / np.log2(1 / (1 - a)))
    assert theory.followed(constant, True) <= theory.srpfl(constant)


def test_a_curve_s_figures() -> None:
    curve = srpfl_theory.Curve(np.array([0.8, 0.6, 0.4, 0.5]), np.array([1.0, 2.0, 4.0, 7.0]), np.full(3, 8.0))
    assert (curve.until(0.6), curve.until(0.1)) == (2.0, inf)
    assert curve.factor() == pytest.approx(sqrt(0.5))
    # a = .1, n/n0 = 4: .8 * .9487 + .0527 = .812, .622, .432, which the last exceeds
    assert curve.kept(srpfl_theory.Theory(8, 2, 0.1)) == pytest.approx(2 / 3)


def test_its_line_is_json_and_of_the_asked_problem() -> None:
    few = ["rounds=30", "clients=8", "data.rank=1", "model.rank=1", "algorithm.initial=random"]
    asked = [word for each in few for word in ("--set", each)]
    done = subprocess.run(
        [sys.executable, srpfl_theory.__file__, "--seeds", "2", *asked], capture_output=True, text=True, check=True
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["sigma_min"], told["sigma_max"], told["step_fits"]) == (1.0, 1.0, 1.0)
    assert told["a"] == pytest.approx(0.1 * told["E0"] / 2, rel=1e-4)
    assert 0 < told["start"]["mean"] <= told["start"]["largest"] < 1


def toy(distances: list[list[float]], paces: list[list[float]]) -> list[dict[str, Any]]:
    return [
        {"distance": distance, "sim_seconds": np.cumsum(pace).tolist(), "rounds": list(range(1, len(pace) + 1))}
        for distance, pace in zip(distances, paces)
    ]


def test_the_law_by_hand() -> None:
    """FedRep's rounds take 4 seconds and end at .1; SRPFL's take 1, and in the last stage 4."""
    tail = [0.1] * srpfl_law.LAST
    fedrep = toy([[0.9, 0.5, 0.13, *tail], [0.9, 0.11, *tail]], [[4.0] * 23, [4.0] * 22])
    srpfl = toy([[0.9, 0.14, 0.12, 0.1], [0.9, 0.3, 0.115, 0.1]], [[1, 1, 4, 4], [1, 1, 1, 4]])
    found = srpfl_law.reached(8, srpfl, fedrep, 1.2, cost=10.0)
    assert found.floor == pytest.approx(0.1)
    # at most .12: FedRep after 4 and 2 rounds, SRPFL after 3 each; with 10 seconds per round
    assert found.fedrep.tolist() == [56.0, 28.0]
    assert found.srpfl.tolist() == [36.0, 33.0]
    assert found.everybody.tolist() == [1.0, 0.0]
    assert found.speedup() == pytest.approx(84 / 69)
    assert srpfl_law.said("everybody 8", [found]) == "50"
    assert srpfl_law.said("speedup 8", [found]) == "1.22 (0.85 to 1.56)"
    assert srpfl_law.said("floor", [found]) == "0.28–0.28"
    never = srpfl_law.reached(8, toy([[0.9, 0.5]], [[1, 1]]), fedrep[:1], 1.2)
    assert srpfl_law.said("slope", [never]) == "never"


def test_what_the_page_says_of_the_law_and_of_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = {
        "mean_client_accuracy": [0.5, 0.8, 0.8, 0.8, 0.8],
        "sim_seconds": [1, 2, 3, 4, 5],
        "rounds": [2, 4, 6, 8, 10],
    }
    slow = {**fast, "mean_client_accuracy": [0.5, 0.76, 0.8, 0.8, 0.8], "sim_seconds": [10, 20, 30, 40, 50]}
    found = {"srpfl figures/a/x": fast, "srpfl figures/a/y": slow, "srpfl samples/all/x": slow}
    monkeypatch.setattr(papers_page, "lines", lambda of: (found[of],))
    # 90 and 97 % of .8: after 2 and 2 units with 4 rounds, against 10 and 15 with 4 and 6
    assert papers_page.gains("a", "x", "y", unit=2.0) == "0.1 / 0.067; 0.5 / 0.33; 0.82 / 0.55; 0.9 / 0.6; 0.98 / 0.65"
    assert papers_page.gains("a", "x", "y", by="samples").startswith("10 / 15; ")
    cases = {"8": {}, "16": {"without": ["SRPFL-b"]}, "32": {}}
    monkeypatch.setattr(papers_page.papers, "studies", lambda paper: {"law": {"cases": cases}})
    tail = [0.1] * srpfl_law.LAST
    both = {"SRPFL": toy([[0.9, 0.1]], [[1, 1]]), "FedRep": toy([[0.9, 0.1, *tail]], [[4.0] * 22])}
    monkeypatch.setattr(papers_page, "lines", lambda of: both[of.rpartition("/")[2].partition("-")[0]])
    assert papers_page.law("floor", start="-b") == "0.28–0.57"
    assert papers_page.law("floor", least=16) == "0.40–0.57"
    assert papers_page.law("speedup 16", cost=1.0) == "2.50 (2.50 to 2.50)"


def test_the_slope_is_that_of_the_speed_up() -> None:
    """Speed-ups 1 + 2 ln N, the same in all seeds, have the slope 2 whatever seeds are drawn."""
    sizes = [srpfl_law.Reached(N, 0.1, np.ones(4), np.full(4, 1 + 2 * log(N)), np.ones(4)) for N in (8, 64, 512)]
    assert srpfl_law.said("slope", sizes) == "2.00 (2.00 to 2.00)"
