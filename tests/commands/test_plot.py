"""What is drawn: means and bands against values worked out by hand, what is refused, and how large the picture is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.recorded import config, curve, write_run
from hpcfl.base.errors import UsageError
from hpcfl.commands.cli import main
from hpcfl.commands.plot import Line, draw, lines, seconds
from hpcfl.results.run_table import Recorded, run_folders

NAN = np.nan
FEDAVG = {"name": "fedavg", "lr": 0.1, "batch": 8}
SALF_ACCURACIES = [NAN, 0.2, NAN, 0.6], [NAN, 0.4, NAN, 0.7]
SALF_TIMES = [1, 2, 3, 4], [2, 3, 5, 7]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of SALF, whose times differ, and two of FedAvg, evaluated after rounds 2 and 4."""
    folder = tmp_path_factory.mktemp("plot") / "sweep"
    for seed, accuracy, times in zip((1, 2), SALF_ACCURACIES, SALF_TIMES):
        write_run(folder / f"a-{seed}", config(seed=seed), curve(accuracy, times))
    for seed, accuracy in ((1, [NAN, 0.5, NAN, 0.9]), (2, [NAN, 0.1, NAN, 0.5])):
        table = config(algorithm=FEDAVG, seed=seed)
        write_run(folder / f"b-{seed}", table, curve(accuracy, [1, 2, 3, 4]))
    return folder


def recorded(*folders: Path) -> list[Recorded]:
    return [Recorded.of(folder) for folder in run_folders(folders)]


def drawn(*folders: Path, **how: Any) -> list[Line]:
    return lines(recorded(*folders), **how)[1]


def close(values: Any, expected: Sequence[float]) -> None:
    np.testing.assert_allclose(values, expected, rtol=1e-12)


def test_means_and_bands_over_rounds(sweep: Path) -> None:
    salf, fedavg = drawn(sweep)
    assert (salf.label, fedavg.label) == ("algorithm.name=salf", "algorithm.name=fedavg")
    assert (salf.seeds, fedavg.seeds) == (2, 2)
    assert salf.rounds.x.tolist() == fedavg.rounds.x.tolist() == [2, 4]
    close(salf.rounds.mean, [0.3, 0.65])
    close(fedavg.rounds.mean, [0.3, 0.7])
    assert salf.rounds.sd is not None
    close(salf.rounds.sd, [0.1 * np.sqrt(2), 0.05 * np.sqrt(2)])  # n - 1 = 1: the distance over √2


def test_over_time_the_mean_is_one_at_a_time(sweep: Path) -> None:
    salf, fedavg = drawn(sweep)
    # evaluated at seconds 2 and 4, and at 3 and 7: both are known from 3 to 4
    assert salf.time.x.tolist() == [3, 4]
    close(salf.time.mean, [(0.4 + 0.4) / 2, (0.6 + 0.475) / 2])
    assert salf.time.sd is not None
    np.testing.assert_allclose(salf.time.sd, [0, 0.125 / np.sqrt(2)], atol=1e-12)
    assert fedavg.time.x.tolist() == [2, 4]
    close(fedavg.time.mean, [0.3, 0.7])


def test_the_figure_has_the_lines_bands_and_labels(sweep: Path) -> None:
    what, found = lines(recorded(sweep))
    figure = draw(found, what, seconds(recorded(sweep)), log_time=True)
    left, right = figure.axes
    for axes, curves in ((left, [line.rounds for line in found]), (right, [line.time for line in found])):
        for shown, band, expected in zip(axes.lines, axes.collections, curves, strict=True):
            close(shown.get_ydata(), expected.mean)
            close(shown.get_xdata(), expected.x)
            assert expected.sd is not None
            corners = band.get_paths()[0].vertices[:, 1]
            close(
                [corners.min(), corners.max()],
                [(expected.mean - expected.sd).min(), (expected.mean + expected.sd).max()],
            )
    assert (left.get_xlabel(), right.get_xlabel()) == ("round", "simulated seconds")
    assert (left.get_xscale(), right.get_xscale()) == ("linear", "log")
    assert left.get_ylabel() == "test accuracy"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["algorithm.name=salf", "algorithm.name=fedavg"]
    assert legend.get_title().get_text() == "mean ± sd over 2 seeds"
    assert len({line.get_color() for line in left.lines}) == 2


@pytest.mark.parametrize("width", ["page", "column"])
def test_the_legend_lies_beside_the_axes(sweep: Path, width: Any) -> None:
    figure = draw(drawn(sweep), "test accuracy", "simulated seconds", width)
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    whole = figure.bbox
    assert whole.x0 <= box.x0 < box.x1 <= whole.x1
    assert whole.y0 <= box.y0 < box.y1 <= whole.y1
    for axes in figure.axes:
        assert not axes.get_tightbbox().overlaps(box)
        assert axes.get_window_extent().width > whole.width / 4


def test_one_seed_has_no_band(tmp_path: Path, sweep: Path) -> None:
    write_run(tmp_path / "other", config(algorithm={"lr": 0.3}), curve([0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4]))
    alone = drawn(tmp_path / "other")
    assert [(line.label, line.seeds, line.rounds.sd, line.time.sd) for line in alone] == [("other", 1, None, None)]
    close(alone[0].rounds.mean, [0.1, 0.2, 0.3, 0.4])
    figure = draw(alone, "", "")
    assert not figure.axes[0].collections
    assert figure.legends[0].get_title().get_text() == ""
    both = draw(drawn(tmp_path / "other", sweep / "a-1", sweep / "a-2"), "", "")
    assert [text.get_text() for text in both.legends[0].get_texts()] == ["lr=0.3 (1)", "lr=0.1 (2)"]
    assert both.legends[0].get_title().get_text() == "mean ± sd over 1 to 2 seeds"


def test_a_seed_that_ended_early_ends_the_line(tmp_path: Path, sweep: Path, capsys: Any) -> None:
    write_run(tmp_path / "short", config(seed=3), curve([NAN, 0.6], [1, 2.5]))
    (line,) = drawn(sweep / "a-1", sweep / "a-2", tmp_path / "short")
    assert line.seeds == 3
    close(line.rounds.x, [2])
    close(line.rounds.mean, [0.4])
    assert line.time.x.size == 0  # one ends before another begins
    assert "algorithm.name=salf: drawn up to round 2, where its shortest run ends" in capsys.readouterr().err


def test_a_run_without_a_score_is_named_and_left_out(tmp_path: Path, sweep: Path, capsys: Any) -> None:
    write_run(tmp_path / "killed", config(seed=3), [])
    write_run(tmp_path / "targets", config(seed=4), curve([NAN, NAN], [1, 2]))
    (line,) = drawn(sweep / "a-1", sweep / "a-2", tmp_path / "killed", tmp_path / "targets")
    assert line.seeds == 2
    said = capsys.readouterr().err
    assert f"'{tmp_path / 'killed'}' has recorded no accuracy: left out" in said
    assert f"'{tmp_path / 'targets'}' has recorded no accuracy: left out" in said


def test_where_no_run_has_a_score_the_picture_is_empty(tmp_path: Path) -> None:
    write_run(tmp_path / "killed", config(), [])
    assert main(["plot", str(tmp_path / "killed"), "-o", str(tmp_path / "it.png"), "--clients", "slow-third"]) == 0
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")
    assert drawn(tmp_path / "killed") == []


def test_keys_that_stand_in_no_label_are_named(tmp_path: Path, sweep: Path, capsys: Any) -> None:
    table = config(algorithm={**FEDAVG, "lr": 0.4}, speed={"rate": 2.0})
    write_run(tmp_path / "other", table, curve([0.1], [1]))
    assert [line.label for line in drawn(sweep / "a-1", tmp_path / "other")] == [
        "algorithm.name=salf",
        "algorithm.name=fedavg",
    ]
    assert "these keys differ too: algorithm.lr, speed.rate\n" in capsys.readouterr().err


def test_data_sets_are_not_mixed_unless_told(tmp_path: Path, sweep: Path, capsys: Any) -> None:
    other = write_run(tmp_path / "other", config(data={"name": "mnist", "alpha": 0.5}), curve([0.1], [1]))
    skewed = write_run(tmp_path / "skewed", config(data={"alpha": 5.0}), curve([0.1], [1]))
    picture = tmp_path / "x.png"
    assert main(["plot", str(sweep / "a-1"), str(other), "-o", str(picture)]) == 2
    assert capsys.readouterr().err == (
        f"hpcfl: data.name differs: digits in {sweep / 'a-1'}; mnist in {other}; expected runs on one data set, or "
        "--any-data\n"
    )
    with pytest.raises(UsageError, match=r"data\.alpha differs: 5\.0 in \S*skewed; 0\.5 in \S*a-1, \S*a-2; expected"):
        drawn(skewed, sweep / "a-1", sweep / "a-2")
    assert not picture.exists()
    assert main(["plot", str(sweep / "a-1"), str(other), "-o", str(picture), "--any-data"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_accuracies_of_two_kinds_are_not_mixed(tmp_path: Path, sweep: Path) -> None:
    rows = [{"accuracy": 0.3, "client_accuracy": [0.5, 0.7], "sim_seconds": 1}]
    own = write_run(tmp_path / "own", config(algorithm=FEDAVG), [{**rows[0], "accuracy": NAN}])
    both = write_run(tmp_path / "both", config(algorithm={"lr": 0.3}), rows)
    what, (first, second) = lines(recorded(own, both))
    assert what == "mean test accuracy over the clients"
    close([*first.rounds.mean, *second.rounds.mean], [0.6, 0.6])
    what, (first, second) = lines(recorded(sweep / "a-1", both))
    assert what == "test accuracy"
    close(second.rounds.mean, [0.3])
    with pytest.raises(UsageError, match=r"no accuracy in common: '\S*own' none on the global .*'\S*a-1' none of cl"):
        lines(recorded(own, sweep / "a-1"))
    assert len(drawn(own, sweep / "a-1", any_data=True)) == 2


def test_the_worst_tenth_is_chosen_in_each_round(tmp_path: Path) -> None:
    # 11 clients with a test part, so 2; one more without
    early = [0.9, 0.1, 0.3, *[0.8] * 8, NAN]
    late = [0.2, 0.9, 0.4, *[0.8] * 8, NAN]
    rows = [
        {"client_accuracy": early, "sim_seconds": 1},
        {"sim_seconds": 2},
        {"client_accuracy": late, "sim_seconds": 3},
    ]
    run = write_run(tmp_path / "run", config(), rows)
    what, (line,) = lines(recorded(run), "worst-decile")
    assert what == "accuracy of the worst tenth of the clients"
    assert line.rounds.x.tolist() == [1, 3]
    close(line.rounds.mean, [0.2, 0.3])


def test_the_slow_third_is_that_of_the_visits_seconds(tmp_path: Path) -> None:
    # means: 1, 2.5, 3, 2, never invited, (4 + longest that ended = 6) / 2; two of the five known are the slow third
    seconds = [[1, 2, 6, 2, NAN, 4], [1, 3, 0, 2, NAN, np.inf]]
    accuracies = [[0.9, 0.8, 0.1, 0.7, 0.6, 0.3], [0.9, 0.8, 0.2, 0.7, 0.6, NAN]]
    rows = [
        {"client_accuracy": right, "visit_seconds": took, "sim_seconds": 1 + number}
        for number, (right, took) in enumerate(zip(accuracies, seconds))
    ]
    what, (line,) = lines(recorded(write_run(tmp_path / "run", config(), rows)), "slow-third")
    assert what == "accuracy of the slowest third of the clients"
    close(line.rounds.mean, [0.2, 0.2])


def test_clients_that_cannot_be_told_apart_are_refused(tmp_path: Path, sweep: Path) -> None:
    alike = write_run(tmp_path / "run", config(), [{"client_accuracy": [0.5, 0.6], "visit_seconds": [2, 2]}])
    with pytest.raises(UsageError, match=r"--clients slow-third: '\S*run' recorded no client that is slower"):
        drawn(alike, clients="slow-third")
    for clients in ("slow-third", "worst-decile"):
        with pytest.raises(UsageError, match=rf"--clients {clients}: '\S*a-1' recorded no accuracy of clients"):
            drawn(sweep / "a-1", clients=clients)


def test_seconds_are_called_what_they_are(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", config(), [])
    real = write_run(tmp_path / "real", config(clock="wall"), [])
    assert seconds(recorded(one)) == "simulated seconds"
    assert seconds(recorded(real)) == "wall seconds"
    assert seconds(recorded(real, one)) == "simulated or wall seconds"


@pytest.mark.parametrize(
    ("options", "suffix", "inches"),
    [([], "pdf", 3.3), (["--width", "page"], "pdf", 6.75), (["--width", "column"], "png", 3.3), ([], "png", 6.75)],
)
def test_the_picture_is_as_wide_as_a_column_or_page(
    tmp_path: Path, sweep: Path, options: list[str], suffix: str, inches: float
) -> None:
    picture = tmp_path / "pictures" / f"it.{suffix}"
    assert main(["plot", str(sweep), "-o", str(picture), *options]) == 0
    content = picture.read_bytes()
    if suffix == "pdf":
        box = re.search(rb"/MediaBox \[ ?0 0 ([0-9.]+) ", content)
        assert box is not None
        assert float(box[1]) == pytest.approx(72 * inches)
        assert b"/Type3" not in content
    else:
        assert int.from_bytes(content[16:20], "big") == pytest.approx(200 * inches)


def test_a_group_of_clients_that_there_is_not(capsys: Any) -> None:
    assert main(["plot", "run", "--clients", "slow-half"]) == 2
    assert (
        "'slow-half' is not one of 'worst-decile', 'slow-third', 'middle-third', 'fast-third'"
        in capsys.readouterr().err
    )
