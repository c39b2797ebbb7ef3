"""What judges from outside are handed is the whole of a server's step, and what they found is what the docs say."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.launcher import ROOT
from judges import arrivals, flic, world
from judges.arrivals import Change, polynomial
from judges.outside import write
from judges.outside.read import BOUND, Run, compare, judge, read
from judges.plain import Params
from judges.server import FedOpt, Momentum, move

MEASURED = ROOT / "docs" / "measured"
SAMPLES, UNIFORM = world.weights(), world.weights("uniform")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    write.main(folder)
    return folder


def fresh(x: int) -> float:
    return 1.0


def compass(w: Params, came: list[Change]) -> Params:
    """``w + α Σ s(x) Δ_i / N``."""
    return {n: w[n] + 0.9 * sum(polynomial(x, 0.5) * d[n] for d, _, x, _ in came) / len(UNIFORM) for n in w}


def queue(w: Params, came: list[Change]) -> Params:
    """``w + Σ a_i Δ_i``, ``a_i = n_i s(x_i) / Σ n_j s(x_j)``."""
    counted = [SAMPLES[i] / (1 + x) for _, _, x, i in came]
    return {n: w[n] + sum(a * d[n] for a, (d, _, _, _) in zip(counted, came)) / sum(counted) for n in w}


SERVERS: dict[str, Callable[[Params, list[Change]], Params]] = {
    "fedavg": arrivals.fedbuff(fresh, SAMPLES, move),
    "fedavg-uniform": arrivals.fedbuff(fresh, UNIFORM, move),
    "fedavgm": arrivals.fedbuff(fresh, SAMPLES, Momentum(1.0, 0.8)),
    "fedadam": arrivals.fedbuff(fresh, SAMPLES, FedOpt("adam", 0.05, 0.9, 0.99, 0.02)),
    "fedyogi": arrivals.fedbuff(fresh, SAMPLES, FedOpt("yogi", 0.05, 0.9, 0.99, 0.02)),
    "fedadagrad": arrivals.fedbuff(fresh, SAMPLES, FedOpt("adagrad", 0.05, 0.0, 0.99, 0.02)),
    "fedbuff": arrivals.fedbuff(lambda x: polynomial(x, 0.5), UNIFORM, move),
    "fedasync": arrivals.fedasync(0.6, lambda x: arrivals.hinge(x, 2.0, 1)),
    "fedcompass": compass,
    "fedqueue": queue,
}


def tensors(arrays: dict[str, Any]) -> Params:
    return {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}


@pytest.mark.parametrize("name", SERVERS)
def test_a_loop_makes_the_states_of_the_changes(written: Path, name: str) -> None:
    run = read(written / f"{name}.npz")
    w = tensors(run.states[0])
    world.near(w, world.start(), 0.0)
    assert len(run.visits) >= 10
    for step, after in zip(run.steps, run.states[1:], strict=True):
        came = [(tensors(v.change), tensors(run.states[v.version]), v.staleness, v.client) for v in step]
        w = SERVERS[name](w, came)
        world.near(after, w)
    if "participation" in run.settings and run.settings["participation"].get("close") == "arrivals":
        assert max(visit.staleness for visit in run.visits) > 0


def test_noting_changes_nothing(tmp_path: Path, written: Path) -> None:
    plain = {**write.RUNS["fedbuff"], "algorithm": {**write.RUNS["fedbuff"]["algorithm"], "name": "fedavg"}}
    world.near(world.play(tmp_path, **plain).shared, read(written / "fedbuff.npz").states[-1], 0.0)


def test_anchors_are_barycenters_of_what_was_sent(written: Path) -> None:
    run, apart = read(written / "flic.npz"), []
    for step, before, after in zip(run.steps, run.states[:-1], run.states[1:], strict=True):
        for c, factor in enumerate(before["anchor.factors"]):
            held = [visit for visit in step if visit.weights[f"anchor.factors.{c}"]]
            new = tensors({str(i): factor + visit.change[f"anchor.factors.{c}"] for i, visit in enumerate(held)})
            by = [SAMPLES[visit.client] for visit in held]
            wanted = flic.barycenter([L @ L.T for L in new.values()], by)
            plain = sum(p * L @ L.T for p, L in zip(by, new.values())) / sum(by)
            apart.append(float(abs(wanted - plain).max()))
            world.equal(after["anchor.factors"][c] @ after["anchor.factors"][c].T, wanted, tolerance=1e-11)
    assert sorted(apart)[len(apart) // 2] > 1e3 * BOUND  # means of covariances would be told from barycenters


@pytest.mark.parametrize(("off", "code"), [(0.5 * BOUND, 0), (2 * BOUND, 1), (np.nan, 1)])
def test_a_judge_says_where_its_bound_is_broken(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: float, code: int
) -> None:
    def rows(folder: Path) -> Any:
        run: Run = read(folder / "fedavg.npz")
        yield compare("states", "itself", run.states[1].values(), run.states[1].values())
        yield compare("numbers", "others", [np.zeros(3), np.zeros(2)], [np.array([0.0, off, 0.0]), np.zeros(2)])

    monkeypatch.setattr(sys, "argv", ["judge", str(written), str(tmp_path / "lines.jsonl")])
    with pytest.raises(SystemExit) as ended:
        judge(["numpy"], rows)
    assert ended.value.code == code
    (line,) = map(json.loads, (tmp_path / "lines.jsonl").read_text().splitlines())
    assert line["versions"] == {"numpy": np.__version__}
    assert [row["numbers"] for row in line["compared"]] == [59, 5]
    assert line["commit"] == (written / "commit").read_text()


def newest() -> list[dict[str, Any]]:
    """The last line of each judge."""
    lines = map(json.loads, (MEASURED / "judges.jsonl").read_text(encoding="utf-8").splitlines())
    return list({next(iter(line["versions"])): line for line in lines}.values())


def test_what_the_docs_say_was_compared_is_on_record() -> None:
    page, lines = (MEASURED / "judges.md").read_text(encoding="utf-8"), newest()
    numbers = sum(row["numbers"] for line in lines for row in line["compared"])
    said = f"{numbers:,} numbers were compared, and none is off by more than {max(line['worst'] for line in lines):.0e}"
    assert f"{said}; the bound is {BOUND:.0e}." in page.replace("\n", " ")
    for line in lines:
        assert line["bound"] == BOUND >= line["worst"]
        assert line["date"] in page
        for row in line["compared"]:
            counts = [row.get("steps", ""), row.get("visits", ""), row["numbers"]]
            bare = f"{row['as_it_is']:.1g}" if "as_it_is" in row else ""
            told = [row["what"], f"`{row['by']}`", *counts, f"{row['worst']:.0e}", bare]
            assert f"| {' | '.join(map(str, told))} |".replace("  |", " |") in page
    rows = [row for row in page.splitlines() if row.startswith("| ") and "`" in row]
    assert len(rows) == sum(len(line["compared"]) for line in lines)


def test_versions_are_those_that_are_installed() -> None:
    files = [Path(write.__file__).with_name(f"{name}.txt") for name in ("requirements", "requirements-alone")]
    pinned = dict(row.split("==") for file in files for row in file.read_text().splitlines() if "==" in row)
    page = (MEASURED / "judges.md").read_text(encoding="utf-8")
    for line in newest():
        assert {
            package: found.partition("+")[0] for package, found in line["versions"].items()
        }.items() <= pinned.items()
        assert f"{next(iter(line['versions']))} {next(iter(line['versions'].values()))}" in page
