"""The scripts of FLIC's tables and latent spaces, on runs of three rounds: their figures computed again by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcfl
from helpers.scripts import script
from hpcfl import store
from hpcfl.results.trained import ClientModel
from hpcfl.testing.runs import alone, toml

FLIC = {"algorithm": {"name": "flic", "epochs": 1, "batch": 50}, "model": {"name": "latent", "dimension": 8}}
LOCAL = {"algorithm": {"name": "local"}, "model": {"name": "latent", "dimension": 8}}
DIGITS = {"name": "two_digits", "first": "digits", "second": "digits-4x4"}
SPACES = {"name": "linear_mapping", "samples_per_class": 60, "labels": 5}
COMMON = {"rounds": 3, "clients": 8, "participation": {"invite": "uniform", "size": 4}}


def made(folder: Path, method: dict[str, Any], data: dict[str, Any], **more: Any) -> Path:
    values = {**COMMON, **method, "data": data, **more}
    alone(values, toml(values, folder.with_suffix(".toml")), folder)
    return folder


@dataclass(frozen=True)
class Ended:
    """How a script ended: why, if not well, and what it printed."""

    error: str
    stdout: str
    stderr: str


Analysed = Callable[..., Ended]


@pytest.fixture
def analysed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Analysed:
    """Run a script in this process: importing torch and scikit-learn anew takes longer than all else."""

    def run(name: str, *words: Path | str) -> Ended:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        error = ""
        try:
            script(name).main()
        except SystemExit as end:
            error = str(end)
        return Ended(error, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    hidden = {"name": "latent", "dimension": 8, "hidden": [6]}
    for seed in (1, 2, 3):
        made(folder / f"class-{seed}", FLIC, SPACES, seed=seed)
        if seed < 3:
            made(folder / f"local-{seed}", LOCAL, SPACES, seed=seed)
    made(folder / "hl-1", FLIC, SPACES, seed=1, model=hidden)
    made(folder / "wider-1", FLIC, {**SPACES, "samples_per_class": 80}, seed=1)
    made(folder / "digits", FLIC, DIGITS)
    return folder


def accuracies(run: Path) -> tuple[float, float]:
    """The last row of the clients' accuracies, as a mean and weighted by test samples."""
    data = hpcfl.open_run(run)
    last, sizes = data["client_accuracy"].values[-1], data["test_samples"].values
    return last.mean(), (last * sizes).sum() / sizes.sum()


def test_the_table_holds_what_the_runs_recorded(runs: Path, analysed: Analysed) -> None:
    folders = sorted(path for path in runs.iterdir() if (path / "run.h5").exists() and path.name != "digits")
    ended = analysed("flic_table", *folders)
    assert (ended.error, ended.stderr) == ("", "")
    *_, line = ended.stdout.splitlines()
    found = {(row["data"], row["method"]): row for row in json.loads(line)["flic_table"]}
    few, many = (f"linear_mapping, samples_per_class={count}" for count in (60, 80))
    assert list(found) == [(few, "Local"), (few, "FLIC-Class"), (few, "FLIC-HL"), (many, "FLIC-Class")]
    row = found[few, "FLIC-Class"]
    assert row["seeds"] == [1, 2, 3]
    for at, name in enumerate(("accuracy", "weighted")):
        own = [accuracies(runs / f"class-{seed}")[at] for seed in (1, 2, 3)]
        less = np.array(own[:2]) - [accuracies(runs / f"local-{seed}")[at] for seed in (1, 2)]
        assert row[name]["mean"] == pytest.approx(np.mean(own))
        assert row[name]["std"] == pytest.approx(np.std(own, ddof=1))
        difference = row[f"{name}_difference"]
        assert difference["seeds"] == [1, 2]
        assert difference["mean"] == pytest.approx(less.mean())
        assert difference["error"] == pytest.approx(abs(less[0] - less[1]) / 2)  # of two: half their distance
        assert found[few, "FLIC-HL"][name] == {"mean": pytest.approx(accuracies(runs / "hl-1")[at])} | dict.fromkeys(
            ("std", "error")
        )
    assert row["accuracy"]["mean"] != row["weighted"]["mean"]
    assert found[few, "Local"]["accuracy_difference"]["mean"] == 0
    assert found[many, "FLIC-Class"]["accuracy_difference"]["mean"] is None
    walls = [float(hpcfl.open_run(runs / f"class-{seed}")["wall_seconds"][-1]) for seed in (1, 2, 3)]
    assert row["wall_seconds"] == pytest.approx(np.mean(walls))
    shown = f"{100 * row['accuracy']['mean']:.2f} ± {100 * row['accuracy']['std']:.2f}"
    assert shown in ended.stdout
    alone_ = analysed("flic_table", "--json", *folders)
    assert alone_.stdout == f"{line}\n"


def test_runs_that_are_no_seeds_of_one_are_refused(runs: Path, tmp_path: Path, analysed: Analysed) -> None:
    longer = made(tmp_path / "longer", FLIC, SPACES, seed=2, rounds=4)
    ended = analysed("flic_table", runs / "class-1", longer)
    assert ended.stdout == ""
    assert ended.error.startswith("rounds: ")
    assert ended.error.endswith("longer 4; expected seeds of one run")
    (tmp_path / "again").symlink_to(runs / "class-1")
    ended = analysed("flic_table", runs / "class-1", tmp_path / "again")
    assert ended.error.endswith("both have 1; expected each once")


def test_runs_that_have_not_finished_are_left_out(runs: Path, tmp_path: Path, analysed: Analysed) -> None:
    folder = made(tmp_path / "run", FLIC, SPACES, seed=4)
    store.write_status(folder, "stopped")
    ended = analysed("flic_table", "--json", runs / "class-1", folder)
    assert ended.stderr == f"{folder}: left out, it is stopped\n"
    assert [row["seeds"] for row in json.loads(ended.stdout)["flic_table"]] == [[1]]


def test_the_ratio_is_of_distances_between_class_means() -> None:
    ratio = script("flic_latent").ratio
    # class 0 at 0 and 3 of a line, class 1 at 10 and 11: same (3 + 1)/2, different the four of 10, 11, 7, 8
    z = np.array([[0.0], [2.0], [4.0], [10.0], [11.0]])
    classes, groups = np.array([0, 0, 0, 1, 1]), np.array([0, 1, 1, 0, 1])
    assert ratio(z, classes, groups) == pytest.approx(2 / 9)
    assert ratio(z, classes, np.zeros(5, int)) is None
    assert ratio(z, np.zeros(5, int), groups) is None


def by_hand(models: list[ClientModel], groups: Any) -> float:
    """The ratio by plain loops."""
    rows: dict[tuple[int, int], list[Any]] = {}
    for model in models:
        for z, label in zip(model.embed(model.data.test_features), model.data.test_labels):
            rows.setdefault((int(label), int(groups[model.client])), []).append(z)
    means = {key: np.mean(values, axis=0) for key, values in rows.items()}
    same: dict[int, list[float]] = {}
    other = []
    for one, two in product(means, means):
        if one < two:
            apart = float(np.linalg.norm(means[one] - means[two]))
            same.setdefault(one[0], []).append(apart) if one[0] == two[0] else other.append(apart)
    return float(np.mean([np.mean(values) for values in same.values()]) / np.mean(other))


@pytest.mark.parametrize(("run", "method", "classes"), [("digits", "tsne", 10), ("class-1", "pca", 5)])
def test_the_latent_space_is_drawn_and_measured(
    run: str, method: str, classes: int, runs: Path, tmp_path: Path, analysed: Analysed
) -> None:
    picture = tmp_path / "latent.png"
    ended = analysed("flic_latent", runs / run, "-o", picture, "--method", method)
    assert (ended.error, ended.stderr) == ("", "")
    found = json.loads(ended.stdout.splitlines()[-1])
    opened = hpcfl.open_models(runs / run)
    groups = opened.federation.domains if run == "digits" else np.arange(8)
    models = list(opened)
    assert found["ratio"] == pytest.approx(by_hand(models, groups), rel=1e-5)
    assert found["ratio_untrained"] == pytest.approx(by_hand([own.untrained for own in models], groups), rel=1e-5)
    assert (found["classes"], found["clients"], found["round"]) == (classes, 8, 3)
    assert ("two domains" in found["compared"]) == (run == "digits")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_what_cannot_be_drawn_is_said_in_one_line(tmp_path: Path, analysed: Analysed) -> None:
    ended = analysed("flic_latent", tmp_path / "none", "-o", tmp_path / "x.png")
    assert ended.error.startswith(f"'{tmp_path / 'none'}' is no run folder")
    assert len(ended.error.splitlines()) == 1
