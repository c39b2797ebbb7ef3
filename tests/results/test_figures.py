"""Figures: what is drawn against values worked out by hand, what stands on it, what is refused, how it looks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.testing.compare import compare_images
from matplotlib.text import Text

from helpers.recorded import config, curve, restated, write_run
from hpcfl import figure
from hpcfl.base.errors import UsageError
from hpcfl.results.curves import Curve

NAN = np.nan
GOLDEN = Path(__file__).parent / "golden"
FEDAVG = {"name": "fedavg", "lr": 0.1, "batch": 8}
DROP = {"close": "deadline", "deadline": 0.5, "partial": "discard"}
SALF_TIMES = [1, 2, 3, 4], [2, 3, 5, 7]


def table(**more: Any) -> dict[str, Any]:
    """Return a config, with sections that are not in the helper's."""
    extra = {key: more.pop(key) for key in ("participation", "evaluate") if key in more}
    return config(**more) | extra


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of SALF, whose times differ, and two of FedAvg, evaluated after rounds 2 and 4."""
    folder = tmp_path_factory.mktemp("figures") / "sweep"
    for seed, accuracy, times in zip((1, 2), ([NAN, 0.2, NAN, 0.6], [NAN, 0.4, NAN, 0.7]), SALF_TIMES):
        write_run(folder / f"a-{seed}", config(seed=seed), sent(curve(accuracy, times), 1000 * seed))
    for seed, accuracy in ((1, [NAN, 0.5, NAN, 0.9]), (2, [NAN, 0.1, NAN, 0.5])):
        rows = sent(curve(accuracy, [1, 2, 3, 4]), 5000)
        write_run(folder / f"b-{seed}", table(algorithm=FEDAVG, seed=seed, participation=DROP), rows)
    return folder


def sent(rows: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    return [{**row, "message_bytes": size} for row in rows]


def texts(drawn: Figure) -> list[str]:
    return [text.get_text() for text in drawn.legends[0].get_texts()]


def close(values: Any, expected: Sequence[float]) -> None:
    np.testing.assert_allclose(values, expected, rtol=1e-12, atol=1e-12)


def edges(axes: Any, number: int = 0) -> tuple[list[float], list[float]]:
    """The lower and the upper edge of a band, at each of its x."""
    corners = axes.collections[number].get_paths()[0].vertices
    at = np.unique(corners[:, 0])
    return tuple([pick(corners[corners[:, 0] == x, 1]) for x in at] for pick in (min, max))


def test_means_and_bands_over_rounds_and_time(sweep: Path) -> None:
    drawn = figure(sweep)
    left, right = drawn.axes
    salf, fedavg = left.lines
    assert salf.get_xdata().tolist() == fedavg.get_xdata().tolist() == [2, 4]
    close(salf.get_ydata(), [0.3, 0.65])
    close(fedavg.get_ydata(), [0.3, 0.7])
    half = np.array([0.1, 0.05]) * np.sqrt(2)  # n - 1 = 1: the distance over √2
    mean = np.array([0.3, 0.65])
    close(edges(left), (mean - half, mean + half))
    # evaluated at seconds 2 and 4, and at 3 and 7: both are known from 3 to 4
    assert right.lines[0].get_xdata().tolist() == [3, 4]
    close(right.lines[0].get_ydata(), [(0.4 + 0.4) / 2, (0.6 + 0.475) / 2])
    assert right.lines[1].get_xdata().tolist() == [2, 4]
    assert (left.get_xlabel(), right.get_xlabel()) == ("round", "simulated time (s)")
    assert left.get_ylabel() == "test accuracy"
    assert texts(drawn) == ["SALF", "FedAvg (drop stragglers)"]
    assert drawn.legends[0].get_title().get_text() == "mean ± sd over 2 seeds"
    assert len({line.get_color() for line in left.lines}) == 2


def test_bytes_are_those_of_all_rounds_so_far(sweep: Path) -> None:
    (axes,) = figure(sweep, x="bytes").axes
    assert axes.get_xlabel() == "messages that counted (kB)"
    assert axes.lines[0].get_xdata().tolist() == [4, 4] or axes.lines[0].get_xdata().tolist() == [4]
    assert axes.lines[1].get_xdata().tolist() == [10, 20]


def test_an_interval_of_the_mean_is_students() -> None:
    at = np.arange(2.0)
    line = Curve.of([(at, np.array(each)) for each in ([0.5, 1.0], [0.7, 0.0], [0.6, 1.0])], band="ci95")
    t = 4.302652729911275  # Student's 97.5 % quantile for 2 degrees of freedom
    np.testing.assert_allclose(line.half, t * np.array([0.1, 1 / np.sqrt(3)]) / np.sqrt(3), rtol=1e-9)


def test_no_band_leaves_what_values_can_be(tmp_path: Path) -> None:
    for seed, accuracy in ((1, [0.0, 1.0]), (2, [0.1, 0.8]), (3, [0.0, 1.0])):
        write_run(tmp_path / f"{seed}", config(seed=seed), curve(accuracy, [1, 2]))
    for axes in figure(tmp_path, band="ci95").axes:
        low, high = edges(axes)
        assert (low[0], high[-1]) == (0, 1)


def test_a_line_is_drawn_where_all_its_seeds_are_or_where_any_is(tmp_path: Path, sweep: Path, capsys: Any) -> None:
    short = write_run(tmp_path / "short", config(seed=3), curve([NAN, 0.6], [1, 2.5]))
    runs = [sweep / "a-1", sweep / "a-2", short]
    left, right = figure(runs).axes
    assert left.lines[0].get_xdata().tolist() == [2]
    close(left.lines[0].get_ydata(), [0.4])
    said = capsys.readouterr().err
    assert "SALF: drawn up to round 2, where its shortest run ends; last=any goes on" in said
    # it ended, at 2.5 s, before another was first evaluated, at 3 s: no line is left out
    assert "SALF: no time that all its seeds have in common: drawn where any of them is" in said
    assert right.lines[0].get_xdata().tolist() == [2, 2.5, 3, 4, 7]
    left, _ = figure(runs, last="any").axes
    close(left.lines[0].get_ydata(), [0.4, 0.65])
    assert "ends" not in capsys.readouterr().err


def test_last_rounds_that_are_all_evaluated_make_no_zigzag(tmp_path: Path) -> None:
    accuracy = [NAN, NAN, NAN, NAN, 0.1, NAN, NAN, NAN, NAN, 0.2, NAN, NAN, 0.9, 0.1, 0.3, 0.0, 0.4]
    run = write_run(tmp_path / "run", table(evaluate={"every": 5}), curve(accuracy, range(1, 18)))
    (axes,) = figure(run, x="rounds").axes
    assert axes.lines[0].get_xdata().tolist() == [5, 10, 15, 17]
    few = write_run(tmp_path / "few", table(evaluate={"every": 5}), curve(accuracy[-5:], range(1, 6)))
    assert figure(few, x="rounds").axes[0].lines[0].get_xdata().tolist() == [1, 2, 3, 4, 5]


def test_keys_give_colours_dashes_and_panels(tmp_path: Path) -> None:
    for lr, alpha, name in product((0.1, 0.3), (0.5, 5.0), ("salf", "fedprox")):
        rows = curve([0.1 + lr, 0.2 + lr], [1, 2])
        sections = {"algorithm": {"name": name, "lr": lr}, "data": {"name": "digits", "alpha": alpha}}
        write_run(tmp_path / f"{name}-{lr}-{alpha}", config(**sections), rows)
    how: dict[str, Any] = {"color": "algorithm.name", "style": "algorithm.lr", "facet": "data.alpha", "x": "time"}
    drawn = figure(tmp_path, labels={"salf": "ours", "data.alpha": "α"}, order=["SALF", "0.3"], **how)
    assert [axes.get_title() for axes in drawn.axes] == ["α 0.5", "α 5.0"]
    assert texts(drawn) == ["FedProx", "ours", "learning rate 0.3", "learning rate 0.1"]
    assert texts(figure(tmp_path, order=["salf"], **how))[:2] == ["SALF", "FedProx"]
    for axes in drawn.axes:
        looks = {(line.get_color(), line.get_linestyle()) for line in axes.lines}
        assert len(looks) == 4
        assert len({colour for colour, _ in looks}) == len({dash for _, dash in looks}) == 2


def test_lines_that_look_alike_are_named(sweep: Path, tmp_path: Path, capsys: Any) -> None:
    figure(sweep, color="data.alpha", labels={"0.5": "half"})
    assert "2 lines look like 1: expected as color, style or facet one of algorithm.name" in capsys.readouterr().err
    other = table(algorithm={**FEDAVG, "lr": 0.4}, speed={"rate": 2.0})
    write_run(tmp_path / "other", other, curve([0.1], [1]))
    assert texts(figure([sweep / "a-1", tmp_path / "other"])) == ["SALF", "FedAvg"]
    assert "these keys differ too: algorithm.lr, speed.rate\n" in capsys.readouterr().err


def test_one_seed_has_no_band(tmp_path: Path, sweep: Path) -> None:
    write_run(tmp_path / "other", config(algorithm={"lr": 0.3}), curve([0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4]))
    alone = figure(tmp_path / "other")
    assert not alone.axes[0].collections
    assert (texts(alone), alone.legends[0].get_title().get_text()) == (["SALF"], "")
    both = figure([tmp_path / "other", sweep / "a-1", sweep / "a-2"])
    assert texts(both) == ["learning rate 0.3 (1)", "learning rate 0.1 (2)"]
    assert both.legends[0].get_title().get_text() == "mean ± sd over 1 to 2 seeds"


def test_what_is_drawn_may_be_any_number_of_a_round(tmp_path: Path) -> None:
    rows = [
        {"test_loss": 2.0, "loss": 3.0, "accuracy": 0.1},
        {"test_loss": 1.0, "loss": 2.5, "client_test_loss": [1.0]},
    ]
    run = write_run(tmp_path / "run", config(), rows)
    for name, words, values in (
        ("test_loss", "test loss", [2.0, 1.0]),
        ("loss", "mean training loss over\nthe visits that counted", [3.0, 2.5]),
    ):
        (axes,) = figure(run, x="rounds", y=name).axes
        assert axes.get_ylabel() == words
        close(axes.lines[0].get_ydata(), values)
    with pytest.raises(UsageError, match=r"^y: there is no 'accurcy'; did you mean 'accuracy'"):
        figure(run, y="accurcy")
    with pytest.raises(UsageError, match="y: there is no 'client_accuracy'; did you mean '"):
        figure(run, y="client_accuracy")


@pytest.mark.parametrize("width", ["page", "column"])
def test_the_legend_lies_beside_the_axes(sweep: Path, width: Any) -> None:
    drawn = figure(sweep, width=width)
    drawn.draw_without_rendering()
    box, whole = drawn.legends[0].get_window_extent(), drawn.bbox
    assert whole.width == drawn.dpi * {"page": 6.75, "column": 3.3}[width]
    assert whole.x0 <= box.x0 < box.x1 <= whole.x1
    assert whole.y0 <= box.y0 < box.y1 <= whole.y1
    for axes in drawn.axes:
        assert not axes.get_tightbbox().overlaps(box)
        assert axes.get_window_extent().width > whole.width / 4


def test_no_label_of_a_single_panel_is_cut(tmp_path: Path) -> None:
    rows = [{"client_accuracy": [0.5, 0.7], "sim_seconds": seconds} for seconds in (1, 2)]
    for seed, lr in ((1, 0.1), (2, 0.1), (1, 0.2), (2, 0.2)):
        write_run(tmp_path / f"{lr}-{seed}", config(algorithm={"lr": lr}, seed=seed), rows)
    drawn = figure(tmp_path, x="time", width="column")
    drawn.draw_without_rendering()
    (axes,), whole = drawn.axes, drawn.bbox
    assert axes.get_ylabel() == "mean test accuracy\nover the clients"
    for label in (axes.xaxis.label, axes.yaxis.label):
        box = label.get_window_extent()
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1
        assert whole.y0 <= box.y0 < box.y1 <= whole.y1


def test_labels_of_logarithmic_ticks_do_not_overlap(tmp_path: Path) -> None:
    ranges = [2, 3], [10, 29], [100, 650], [13, 950], [1500, 1.2e5], [0.02, 5e4]
    runs = [
        write_run(tmp_path / f"{place}", config(data={"alpha": float(place)}), curve([0.1, 0.2], times))
        for place, times in enumerate(ranges)
    ]
    how: dict[str, Any] = {"facet": "data.alpha", "x": "time", "log": ["time", "y"]}
    for width in ("page", "column"):  # three panels beside each other, or one
        drawn = figure(runs, width=width, **how)
        drawn.draw_without_rendering()
        assert len(drawn.axes) == len(ranges)
        for axis in (axis for axes in drawn.axes for axis in (axes.xaxis, axes.yaxis)):
            low, high = axis.get_view_interval()
            shown = zip(axis.get_majorticklocs(), axis.get_majorticklabels())
            boxes = [text.get_window_extent() for at, text in shown if low <= at <= high]
            assert len(boxes) > 1 or not axis.get_majorticklabels()  # of a panel to the right, whose y axis is shared
            assert not any(first.overlaps(second) for first, second in pairwise(boxes))
            assert not any(text.get_text() for text in axis.get_minorticklabels())


def test_data_sets_are_not_mixed_unless_told(tmp_path: Path, sweep: Path) -> None:
    other = write_run(tmp_path / "other", config(data={"name": "mnist", "alpha": 0.5}), curve([0.1], [1]))
    skewed = write_run(tmp_path / "skewed", config(data={"alpha": 5.0}), curve([0.1], [1]))
    with pytest.raises(UsageError, match=r"data\.name differs: digits in \S*a-1; mnist in \S*other; expected runs on"):
        figure([sweep / "a-1", other])
    with pytest.raises(UsageError, match=r"data\.alpha differs: 5\.0 in \S*skewed; 0\.5 in \S*a-1, \S*a-2; expected"):
        figure([skewed, sweep / "a-1", sweep / "a-2"], facet="data.name")
    assert texts(figure([sweep / "a-1", other], any_data=True)) == ["digits", "mnist"]
    drawn = figure([sweep / "a-1", other], facet="data.name", x="rounds")
    assert [axes.get_title() for axes in drawn.axes] == ["digits", "mnist"]
    assert texts(drawn) == ["SALF"]


def test_accuracies_of_two_kinds_are_not_mixed(tmp_path: Path, sweep: Path) -> None:
    rows = [{"accuracy": 0.3, "client_accuracy": [0.5, 0.7], "sim_seconds": 1}]
    own = write_run(tmp_path / "own", config(algorithm=FEDAVG), [{**rows[0], "accuracy": NAN}])
    both = write_run(tmp_path / "both", config(algorithm={"lr": 0.3}), rows)
    left = figure([own, both]).axes[0]
    assert left.get_ylabel() == "mean test accuracy over\nthe clients"
    close([*left.lines[0].get_ydata(), *left.lines[1].get_ydata()], [0.6, 0.6])
    close(figure([sweep / "a-1", both]).axes[0].lines[1].get_ydata(), [0.3])
    with pytest.raises(UsageError, match=r"no accuracy in common: '\S*own' none on the global .*'\S*a-1' none of cl"):
        figure([own, sweep / "a-1"])
    assert len(figure([own, sweep / "a-1"], any_data=True).axes[0].lines) == 2


def test_some_of_the_clients(tmp_path: Path, sweep: Path) -> None:
    # 11 clients with a test part, so 2 are the worst tenth, in each round anew; one more without
    early, late = [0.9, 0.1, 0.3, *[0.8] * 8, NAN], [0.2, 0.9, 0.4, *[0.8] * 8, NAN]
    worst = write_run(tmp_path / "worst", config(), [{"client_accuracy": early}, {}, {"client_accuracy": late}])
    (axes,) = figure(worst, clients="worst-decile", x="rounds").axes
    assert axes.get_ylabel() == "accuracy of the worst\ntenth of the clients"
    assert axes.lines[0].get_xdata().tolist() == [1, 3]
    close(axes.lines[0].get_ydata(), [0.2, 0.3])
    # means: 1, 2.5, 3, 2, never invited, (4 + longest that ended = 6) / 2; two of the five known are the slow third
    took = [[1, 2, 6, 2, NAN, 4], [1, 3, 0, 2, NAN, np.inf]]
    accuracies = [[0.9, 0.8, 0.1, 0.7, 0.6, 0.3], [0.9, 0.8, 0.2, 0.7, 0.6, NAN]]
    rows = [{"client_accuracy": right, "visit_seconds": seconds} for right, seconds in zip(accuracies, took)]
    slow = write_run(tmp_path / "slow", config(), rows)
    close(figure(slow, clients="slow-third", x="rounds").axes[0].lines[0].get_ydata(), [0.2, 0.2])
    alike = write_run(tmp_path / "alike", config(), [{"client_accuracy": [0.5, 0.6], "visit_seconds": [2, 2]}])
    with pytest.raises(UsageError, match=r"clients slow-third: '\S*alike' recorded no client that is slower"):
        figure(alike, clients="slow-third")
    with pytest.raises(UsageError, match=r"clients worst-decile: '\S*a-1' recorded no accuracy of clients"):
        figure(sweep / "a-1", clients="worst-decile")


def test_a_run_without_a_score_is_named_and_left_out(tmp_path: Path, sweep: Path, capsys: Any) -> None:
    killed = write_run(tmp_path / "killed", config(seed=3), [])
    drawn = figure([sweep / "a-1", sweep / "a-2", killed])
    assert drawn.legends[0].get_title().get_text() == "mean ± sd over 2 seeds"
    assert f"'{killed}' has recorded no accuracy: left out" in capsys.readouterr().err
    assert figure(killed).axes[0].lines[:] == []


def test_a_sweep_says_how_many_runs_are_missing(tmp_path: Path, capsys: Any) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"run-{seed}", config(seed=seed), curve([0.1], [1]))
    restated(tmp_path / "run-2", "done", "running")
    figure(SimpleNamespace(folder=tmp_path, planned=[0] * 5))
    assert "not finished: 4 of 5 runs\n" in capsys.readouterr().err
    figure(SimpleNamespace(folder=tmp_path / "run-1"))
    assert capsys.readouterr().err == ""


def test_seconds_are_called_what_they_are(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", config(), curve([0.1], [1]))
    real = write_run(tmp_path / "real", config(clock="wall"), curve([0.1], [1]))
    assert figure(real, x="time").axes[0].get_xlabel() == "wall-clock time (s)"
    assert figure([real, one], x="time").axes[0].get_xlabel() == "simulated or wall-clock time (s)"


ROUNDS = [
    {"arrived": [1, 1, 0, 0], "blocks": [1, 1, 0, 0], "steps": [4, 2, 0, 0], "client_accuracy": [0.9, 0.8, 0.3, 0.4]},
    {"arrived": [1, 0, 0, 1], "blocks": [1, 0, 0, 1], "steps": [4, 0, 0, -1], "client_accuracy": [0.8, 0.7, 0.2, 0.3]},
]


def test_kinds_show_what_was_recorded(tmp_path: Path) -> None:
    rows = [{**row, "visit_seconds": [1.0, 2.0, 4.0, 4.0]} for row in ROUNDS]
    rows[1]["cohort"] = [1, 1, 1, 0]
    run = write_run(tmp_path / "run", config(), rows)
    (axes,) = figure(run, "participation").axes
    assert axes.lines[0].get_xdata().tolist() == [1, 2, 3, 4]
    close(axes.lines[0].get_ydata(), [0, 0, 0.5, 1])  # client 3: once invited, late; what it sent uninvited is none
    layers, steps = figure(run, "depth").axes
    close(layers.lines[0].get_ydata(), [0.5, 1 / 3])
    close(steps.lines[0].get_ydata(), [1.5, 4 / 3])
    (axes,) = figure(run, "fairness").axes
    close(axes.lines[0].get_xydata(), [[0.5, 0.2]])
    groups = figure(run, "groups", log="rounds")
    assert [axes.get_xscale() for axes in groups.axes] == ["log"] * 3
    assert texts(groups) == ["slow third", "middle third", "fast third", "worst decile"]
    with pytest.raises(UsageError, match=r"'\S*run' recorded no arrival_staleness: expected participation\.close = 'a"):
        figure(run, "staleness")


def test_staleness_is_that_of_each_arrival(tmp_path: Path) -> None:
    rows = [{"arrival_staleness": each} for each in ([0, 0, 2], [1, -1, 0])]
    (axes,) = figure(write_run(tmp_path / "run", config(), rows), "staleness").axes
    assert axes.lines[0].get_xdata().tolist() == [0, 1, 2]
    close(axes.lines[0].get_ydata(), [0.6, 0.2, 0.2])


def test_where_wall_clock_time_went(tmp_path: Path) -> None:
    parts = {"compute_seconds": [0.0, 1.0, 2.0], "wait_seconds": [2.5, 1.5, 0.5], "server_seconds": 0.25}
    rows = [{**parts, "checkpoint_wait_seconds": 0.0, "wall_seconds": 3.0 * done} for done in (1, 2)]
    run = write_run(tmp_path / "run", config(), rows)
    (axes,) = figure(run, "where-time-went").axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["SALF, server", "SALF, clients"]
    widths = np.array([[bar.get_width() for bar in part] for part in axes.containers])
    close(widths[:, 0], [0, 5, 0.5, 0, 0.5])
    close(widths[:, 1], [3, 2, 0, 0, 1])
    with pytest.raises(UsageError, match="recorded no wall_seconds: expected a round at least"):
        figure(write_run(tmp_path / "none", config(), []), "where-time-went")


def test_time_to_a_target(sweep: Path, tmp_path: Path) -> None:
    (axes,) = figure(sweep, "time-to-target", target=0.6).axes
    assert axes.get_xlabel() == "simulated time (s) to test accuracy 0.6"
    assert [text.get_text() for text in axes.get_yticklabels()] == ["SALF", "FedAvg (drop stragglers)"]
    assert [text.get_text() for text in axes.texts] == ["2/2", "1/2"]
    interval, seeds, median = axes.lines[:3]
    assert interval.get_xdata().tolist() == [4, 7]
    assert seeds.get_xdata().tolist() == [4, 7]
    assert median.get_xdata().tolist() == [5.5]
    close(axes.lines[3].get_xdata(), [4, 7.7])  # one of two never did: to beyond the latest
    assert axes.lines[3].get_marker() == ">"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"kind": "curves"}, "kind: there is no 'curves'; did you mean 'curve'?"),
        ({"x": "rond"}, "x: there is no 'rond'; did you mean 'rounds'?"),
        ({"clients": "slow-half"}, "clients: there is no 'slow-half'; did you mean 'slow-third'?"),
        ({"band": "variance"}, "band: there is no 'variance'; known: ci95, sd"),
        ({"last": "first"}, "last: there is no 'first'; known: all, any"),
        ({"width": "pag"}, "width: there is no 'pag'; did you mean 'page'?"),
        ({"log": "bytes"}, "log: there is no 'bytes'; known: rounds, time, y"),
        ({"color": "algorithm.nam"}, "color: there is no 'algorithm.nam'; did you mean 'algorithm.name'?"),
        (
            {"kind": "participation", "x": "time"},
            "x = 'time' has no meaning with kind = 'participation': remove it",
        ),
        ({"kind": "groups", "color": "clients"}, "color = 'clients' has no meaning with kind = 'groups': remove it"),
        ({"kind": "time-to-target"}, "target: kind = 'time-to-target' needs it"),
        ({"target": 0.5}, "target = 0.5 has no meaning with kind = 'curve': remove it"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_a_line(sweep: Path, how: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=f"^{said.replace('?', '[?]')}"):
        figure(sweep, **how)


def test_a_figure_shows_itself_and_saves_in_its_own_style(sweep: Path, tmp_path: Path) -> None:
    drawn = figure(sweep)
    assert drawn._repr_png_().startswith(b"\x89PNG")
    drawn.savefig(tmp_path / "it.pdf")
    assert b"/Type3" not in (tmp_path / "it.pdf").read_bytes()


GOLDEN_FIGURES: dict[str, dict[str, Any]] = {
    "curves": {"width": "column", "band": "ci95"},
    "panels": {"facet": "algorithm.name", "style": "algorithm.lr", "x": "time", "log": "time", "last": "any"},
    "target": {"kind": "time-to-target", "target": 0.6, "width": "column"},
}


@pytest.mark.parametrize("name", GOLDEN_FIGURES)
def test_figures_look_as_they_did(name: str, sweep: Path, tmp_path: Path) -> None:
    """Against pictures in golden/, without texts, whose shapes are a font's; one that is removed is drawn anew."""
    drawn = figure(sweep, **GOLDEN_FIGURES[name])
    for text in drawn.findobj(Text):
        text.set_visible(False)
    for axes in drawn.axes:
        axes.tick_params(labelleft=False, labelbottom=False)
    drawn.savefig(tmp_path / f"{name}.png", dpi=60)
    golden = GOLDEN / f"{name}.png"
    if not golden.exists():
        golden.write_bytes((tmp_path / f"{name}.png").read_bytes())
        pytest.fail(f"{golden} is new: look at it")
    assert compare_images(str(golden), str(tmp_path / f"{name}.png"), tol=3) is None
