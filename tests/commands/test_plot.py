"""``hpcfl plot``: options reach `hpcfl.figure`, pictures have the size and format that are asked for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from helpers.recorded import config, curve, write_run
from hpcfl.commands import plot
from hpcfl.commands.cli import main
from hpcfl.results.figures import figure


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plot") / "sweep"
    for seed in (1, 2):
        write_run(folder / f"run-{seed}", config(seed=seed), curve([0.2, 0.5], [1, 2]))
    return folder


@pytest.mark.parametrize(
    ("options", "suffix", "inches"),
    [([], "pdf", 3.3), (["--width", "page"], "pdf", 6.75), (["--width", "column"], "png", 3.3), ([], "png", 6.75)],
)
def test_the_picture_is_as_wide_as_a_column_or_page(
    tmp_path: Path, runs: Path, options: list[str], suffix: str, inches: float
) -> None:
    picture = tmp_path / "pictures" / f"it.{suffix}"
    assert main(["plot", str(runs), "-o", str(picture), *options]) == 0
    content = picture.read_bytes()
    if suffix == "pdf":
        box = re.search(rb"/MediaBox \[ ?0 0 ([0-9.]+) ", content)
        assert box is not None
        assert float(box[1]) == pytest.approx(72 * inches)
        assert b"/Type3" not in content
    else:
        assert int.from_bytes(content[16:20], "big") == pytest.approx(200 * inches)


def test_options_are_the_keys_of_figure(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def noted(runs: Any, **how: Any) -> Any:
        asked.update(how)
        return figure(runs)

    monkeypatch.setattr(plot, "figure", noted)
    looks = ["--color", "algorithm.name", "--style", "seed", "--facet", "data.name", "--order", "fedavg,salf"]
    words = ["--label", "salf=ours", "--label", "algorithm.lr=η=1"]
    rest = ["--kind", "curve", "--y", "loss", "--clients", "all", "--band", "ci95", "--last", "any", "--target", "0.5"]
    axes = ["--x", "time", "--x", "bytes", "--log", "time", "--log", "y", "--any-data"]
    assert main(["plot", str(runs), "-o", str(tmp_path / "x.svg"), *looks, *words, *rest, *axes]) == 0
    assert asked == {
        "width": "page",
        "labels": {"salf": "ours", "algorithm.lr": "η=1"},
        "order": ["fedavg", "salf"],
        "kind": "curve",
        "x": ("time", "bytes"),
        "y": "loss",
        **{"color": "algorithm.name", "style": "seed", "facet": "data.name"},
        **{"clients": "all", "band": "ci95", "last": "any", "log": ("time", "y"), "target": 0.5, "any_data": True},
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "x.pmg"], "'x.pmg': no picture of that kind; did you mean 'png'?"),
        (["--label", "salf"], "label: expected VALUE=WORDS, got 'salf'"),
        (
            ["--clients", "slow-half"],
            "clients: there is no 'slow-half'; did you mean 'slow-third'?",
        ),
        (["--color", "algorithm.nam"], "color: there is no 'algorithm.nam'; did you mean 'algorithm.name'?"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_a_line(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, options: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plot", str(runs), *options]) == 2
    assert capsys.readouterr().err.startswith(f"hpcfl: {said}")
    assert list(tmp_path.iterdir()) == []


def test_where_no_run_has_a_score_the_picture_is_empty(tmp_path: Path) -> None:
    write_run(tmp_path / "killed", config(), [])
    assert main(["plot", str(tmp_path / "killed"), "-o", str(tmp_path / "it.png"), "--clients", "slow-third"]) == 0
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")
