"""FLamby's benchmarks: loss and metric against direct loops, splits, and a page that says what the lines say."""

from __future__ import annotations

import csv
import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import flamby
import flamby_heart
import flamby_runs
import numpy as np
import pytest
import torch
from flamby_runs import BESIDE, HANDED_ON, LINES, SEEDS

import hpcfl

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("HPCFL_DATA", "nowhere")) / "flamby"
STUDIES = {"brca": flamby.BRCA, "heart": flamby_heart.HEART}
SPLIT = {
    "brca": ([248, 156, 164, 129, 129, 40], [63, 40, 42, 33, 33, 11]),
    "heart": ([199, 172, 30, 85], [104, 89, 16, 45]),
}
"""Samples of each centre as FLamby counts them, to train and to test."""


def lines(study: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (LINES / f"{study}.jsonl").read_text(encoding="utf-8").splitlines()]


def needs(name: str) -> None:
    if not (DATA / name).is_file():
        pytest.skip(f"HPCFL_DATA names no folder with flamby/{name}")


def patients(count: int, days: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores, and events with days: from 1 to so many days."""
    rng = np.random.default_rng(count)
    score = rng.integers(0, 12, count) / 4 if days < count else rng.normal(size=count)
    lived = rng.integers(1, days + 1, count) if days < count else rng.permutation(count)
    return torch.tensor(score)[:, None], torch.tensor(np.column_stack([rng.random(count) < 0.4, lived]).astype(float))


def test_coxs_loss_is_that_of_a_loop() -> None:
    outputs, labels = patients(30, 30)
    outputs.requires_grad_()
    loss = flamby.cox(outputs, labels).mean()
    loss.backward()
    score, slope, expected = outputs.detach()[:, 0].tolist(), [0.0] * 30, 0.0
    for i, (event, lived) in enumerate(labels.tolist()):
        among = [j for j, (_, days) in enumerate(labels.tolist()) if days >= lived]
        risk = sum(math.exp(score[j]) for j in among)
        expected += event * (math.log(risk) - score[i]) / 30
        slope[i] -= event / 30
        for j in among:
            slope[j] += event * math.exp(score[j]) / risk / 30
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert outputs.grad is not None
    assert outputs.grad[:, 0].tolist() == pytest.approx(slope, abs=1e-12)


@pytest.mark.parametrize("days", [8, 40])
def test_concordance_is_that_of_a_loop(days: int) -> None:
    outputs, labels = patients(40, days)
    pairs, right = 0, 0.0
    for (one,), (event, lived) in zip(outputs.tolist(), labels.tolist()):
        for (other,), (later, days_) in zip(outputs.tolist(), labels.tolist()):
            if event and (lived < days_ or (lived == days_ and not later)):
                pairs += 1
                right += 1.0 if one > other else 0.5 if one == other else 0.0
    index = flamby.concordance(outputs, labels)
    assert index.tolist() == pytest.approx([right / pairs] * 40)


@pytest.mark.parametrize("name", STUDIES)
def test_each_method_has_a_line_of_each_seed(name: str) -> None:
    found = Counter((row["method"], row["seed"]) for row in lines(name))
    assert found == Counter((method, seed) for method in STUDIES[name].methods for seed in SEEDS)


def test_an_untrained_model_is_flambys_own() -> None:
    """Where Cyclic's centre 0 has no turn, its published results are those of the initial model."""
    (row,) = (row for row in lines("brca") if row["method"] == "Cyclic" and not row["config"]["rounds"])
    assert row["tests"] == pytest.approx(row["published"], abs=1e-12)


@pytest.mark.parametrize("name", STUDIES)
def test_the_page_says_what_the_lines_say(name: str) -> None:
    page = (ROOT / "docs" / "studies" / "flamby.md").read_text(encoding="utf-8")
    rows, distances = lines(name), []
    for method in STUDIES[name].methods:
        own = [row for row in rows if row["method"] == method]
        ours, theirs = (np.array([row[key] for row in own]) for key in ("tests", "published"))
        mean, spread = theirs.mean(0), theirs.std(0, ddof=1)
        cells = [f"{our:.3f} ({of:.3f}±{by:.3f})".replace("0.", ".") for our, of, by in zip(ours.mean(0), mean, spread)]
        assert f"| {method} | {' | '.join(cells)} |" in page
        apart = abs(ours.mean(0) - mean)
        if method not in BESIDE:
            distances += [gap / by if by else math.inf if gap else 0.0 for gap, by in zip(apart, spread)]
    within = sum(distance <= 1 for distance in distances)
    assert f"{within} of {len(distances)} cells lie within one, the worst at {max(distances):.2f}" in page
    said = flamby_runs.verdict(rows)
    beside = {"brca": "lies up to {:.2f} deviations off", "heart": "is within {:.2f}."}[name]
    assert beside.format(max(said["distances"]["handed on" if name == "brca" else "c by samples"])) in page
    assert said["passed"] == (within >= 0.9 * len(distances) and max(distances) <= 2)
    assert (said["cells"], said["worst"]) == (len(distances), pytest.approx(max(distances), abs=1e-3))


@pytest.mark.parametrize("name", STUDIES)
def test_the_split_is_flambys(name: str) -> None:
    needs({"brca": "brca.csv", "heart": "heart_disease_uci.csv"}[name])
    parts = STUDIES[name].parts(DATA)
    for kind, counts in zip(("train", "test"), SPLIT[name]):
        assert [len(parts[f"{kind}_{centre}"][1]) for centre in range(len(counts))] == counts
    assert len(parts["test_pooled"][1]) == sum(SPLIT[name][1])


@pytest.mark.parametrize("name", STUDIES)
def test_published_results_are_those_of_the_files(name: str) -> None:
    needs(f"{STUDIES[name].results}_seed42.csv")
    for row in lines(name):
        method = f"{BESIDE.get(row['method'], row['method'])}100"
        with (DATA / f"{STUDIES[name].results}_seed{row['seed']}.csv").open(newline="", encoding="utf-8") as file:
            found = {each["Test"]: float(each["Metric"]) for each in csv.DictReader(file) if each["Method"] == method}
        tests = [*(f"client_test_{centre}" for centre in range(len(found) - 1)), "Pooled Test"]
        assert row["published"] == [found[test] for test in tests]


@pytest.mark.parametrize("method", ["FedAvg", "Cyclic"])
def test_a_line_comes_again(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("brca.csv")
    monkeypatch.chdir(ROOT)  # functions that a config names are of files below
    line = flamby_runs.carried_out(flamby.BRCA, method, 43, DATA, tmp_path)
    (row,) = (row for row in lines("brca") if (row["method"], row["seed"]) == (method, 43))
    same = all(line[key] == row[key] for key in ("processor", "versions"))
    assert line["tests"] == pytest.approx(row["tests"], abs=1e-12 if same else 0.05)
    last = hpcfl.open_run(tmp_path / "run")["client_concordance"].values[-1]
    assert line["tests"][: 1 if method == "Cyclic" else 6] == pytest.approx(last[np.isfinite(last)].tolist(), abs=1e-6)


def test_the_model_goes_from_centre_to_centre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    x, y = torch.rand(20, 39, generator=torch.Generator().manual_seed(0)), patients(20, 20)[1].float()
    parts = {f"{kind}_{centre}": (x, y) for kind in ("train", "test") for centre in range(6)} | {"test_pooled": (x, y)}
    flamby_runs.trained(flamby.BRCA, HANDED_ON, 42, parts, tmp_path)
    arrived = hpcfl.open_run(tmp_path / "run")["arrived"].values
    np.testing.assert_array_equal(arrived, np.eye(6, dtype=int)[[3, 2, 5, 4, 1]])  # FLamby's order of this seed
