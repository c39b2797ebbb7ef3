"""The script that predicts large jobs: it finds costs that runs were made up from, and says what it cannot read."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import script
from hpcfl.contrib.network.model import Costs, Link, Rates, layouts, predict


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return script("scaling")


SERVER, TREE = Rates(2e9, 2e9), Rates(5e8, 5e8)
LINK = Link(3e-5, SERVER, Rates(float("inf"), float("inf")), SERVER, TREE)
COSTS = Costs(LINK, LINK, 0.0, 0.0, look=2e-5, request=1e-7, sums=1e9, lane=8e-5)


def run(study: ModuleType, ranks: int, width: int | str, lanes: int, kilobytes: float) -> dict[str, Any]:
    """Return the figures of a run with these costs, as `benchmarks/puppets.py` prints them."""
    facts = {"mpi": "Open MPI 5.0.11", "ranks": ranks, "width": width, "lanes": lanes, "per_host": 32}
    facts |= {"kilobytes": kilobytes, "layers": 4, "made_s": 0.5 + 0.03 * lanes}
    zero = {"swift_ms": {"down": [0.0], "up": [0.0], "sums": [0.0]}, "look": {"cpu_ms": None}}
    bare = study.Run.read({**facts, **zero, "late_ms": {"median": 0.0}, "memory_mb": [300, 300]})
    expected = predict(COSTS, bare.layout, bare.load)
    messages = 1000 * (expected.total - expected.sums)
    look = 1000 * (COSTS.look + COSTS.request * lanes * bare.load.up)
    found = {"swift_ms": {"down": [messages / 4] * 3, "up": [3 * messages / 4] * 3, "sums": [1000 * expected.sums] * 3}}
    grown = lanes * (1e4 + bare.load.frame) / 1e6
    late = {"median": 1 + 0.02 * lanes, "worst": 99.0}
    return {**facts, **found, "look": {"cpu_ms": look}, "late_ms": late, "memory_mb": [300, 300 + grown]}


@pytest.fixture(scope="module")
def made(study: ModuleType) -> list[dict[str, Any]]:
    cases = [(n, 1, n - 1, size) for n in (9, 33, 129) for size in (64, 4096)]
    cases += [(n, "all", 1, size) for n in (9, 129) for size in (64, 4096)] + [(129, 32, 4, 4096)]
    return [run(study, *case) for case in cases]


def test_costs_are_found(study: ModuleType, made: list[dict[str, Any]]) -> None:
    runs = [study.Run.read(each) for each in made]
    costs, off = study.fitted(runs)
    assert off < 1e-3
    assert costs.within.latency == pytest.approx(LINK.latency, rel=0.05)
    assert costs.within.server.up == pytest.approx(SERVER.up, rel=0.05)
    assert costs.within.tree.up == pytest.approx(TREE.up, rel=0.05)
    for name in ("lane", "look", "request", "sums"):
        assert getattr(costs, name) == pytest.approx(getattr(COSTS, name), rel=0.05), name
    server = study.Server.of(runs)
    (single, *_) = layouts(1001, 32)
    load = study.load(4096, 4, 1, 1000)
    assert server.at(single, load) == pytest.approx(
        {"late": 0.001 + 0.00002 * 1000, "made": 0.5 + 0.03 * 1000, "memory": 1000 * (1e4 + load.frame)}
    )


def test_what_a_lane_carries_by_hand(study: ModuleType) -> None:
    """Two layers of 1,000 numbers; of a command 8 words, one for the client, and 2 for 65 in the cohort."""
    load = study.load(8, 2, 1, 65)
    assert load.state == 8000 + 8 * (8 + 1 + 2)
    assert load.frame == 2 * 4 * (1000 + 5 + 2)  # a layer's numbers, signs and weight, all in one head
    assert load.up == 2


def test_the_script(
    study: ModuleType, made: list[dict[str, Any]], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    file, picture = tmp_path / "runs.log", tmp_path / "scaling.png"
    file.write_text("what was printed\n" + json.dumps({"puppets": made}) + "\n")
    monkeypatch.setattr("sys.argv", ["scaling.py", str(file), "-o", str(picture), "--ranks", "1000"])
    study.main()
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])["predicted"]
    assert picture.stat().st_size > 10_000
    assert [each["layout"] for each in found][-1] == "two levels"
    for each, layout in zip(found, layouts(1000, 32)):
        right = predict(COSTS, layout, study.load(4096, 4, layout.ranks, 999))
        assert each["total"] == pytest.approx(right.total, rel=0.05)
        assert each["bottleneck"] == right.bottleneck


def test_a_slow_network(study: ModuleType) -> None:
    link = study.between(COSTS, 1e-3, 1e8)
    assert link == Link(1e-3, *[Rates(1e8, 1e8)] * 4)
    assert study.between(COSTS, None, None) == LINK


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("no JSON", "expected the output of benchmarks/puppets.py"),
        ("{}", "expected the output of benchmarks/puppets.py"),
        ("few", "expected more than 4 different runs"),
        ("narrow", "expected runs with lanes of one rank"),
    ],
)
def test_bad_input(study: ModuleType, made: list[dict[str, Any]], tmp_path: Path, text: str, wanted: str) -> None:
    cases = {"few": made[:4], "narrow": made[:6]}
    file = tmp_path / "runs.log"
    file.write_text(json.dumps({"puppets": cases[text]}) if text in cases else text)
    with pytest.raises(study.ReadError, match=wanted):
        study.runs([file])
    with pytest.raises(study.ReadError, match="No such file"):
        study.runs([tmp_path / "missing"])
