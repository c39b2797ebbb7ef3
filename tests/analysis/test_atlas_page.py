"""What the atlas' page says of its lines: times and ranks counted by hand, and that page and table follow from them."""

from __future__ import annotations

import csv
from math import inf, nan
from pathlib import Path
from typing import Any

import atlas
import atlas_page
import numpy as np
import pytest
from atlas_page import Found

STUDIES = atlas.ROOT / "docs" / "studies"
WORLDS = "pai-4", "pai-2"


def found(method: str, *times: float | None, accuracy: float = 0.5, why: str = "") -> Found:
    """Return a cell of one line per time to the target."""
    lines: list[dict[str, Any]] = [
        {"status": "stopped", "reached": {"0.8": each}, "accuracy": accuracy + number / 100}
        for number, each in enumerate(times)
    ]
    return Found(atlas.Cell("digits", "pai-1", "anyone", method), 0.1, lines, why)


def test_the_time_of_a_cell_is_the_median_of_its_seeds() -> None:
    assert found("wait", 10.0, None, 20.0).seconds == 20.0
    assert found("wait", 10.0, None, None).seconds == inf
    assert np.isnan(found("wait", why="none for it").seconds)
    assert found("wait", 10.0, 20.0).mean("accuracy") == pytest.approx(0.505)


def test_who_does_not_reach_the_target_comes_last_by_accuracy() -> None:
    cells = {
        "place/a": found("a", 10.0, None, accuracy=0.7),
        "place/b": found("b", 10.0, 30.0),
        "place/c": found("c", None, None, accuracy=0.6),
    }
    assert atlas_page.ranks(cells, ["place"], ["a", "b", "c"]).tolist() == [[[1.5, 1.5, 3.0], [2.0, 1.0, 3.0]]]


def test_the_critical_difference_is_that_of_nemenyis_table() -> None:
    """Demšar (JMLR 2006), Table 5: q is 2.728 for 5 methods; and his example of 14 data sets and 4 methods."""
    assert atlas_page.critical_difference(5, 1) == pytest.approx(2.728 * (5 * 6 / 6) ** 0.5, abs=2e-3)
    assert atlas_page.critical_difference(4, 14) == pytest.approx(1.25, abs=0.01)


def test_a_row_has_what_is_known() -> None:
    names, first, second = atlas_page.rows([found("wait", 10.0, 12.0), found("known", why="no chances are known")])
    row = dict(zip(names, first))
    assert (row["method"], row["seeds"], row["reached_0.8"], row["seconds_0.8"]) == ("wait", "2", "2", "11")
    assert float(row["low_0.8"]) <= 11 <= float(row["high_0.8"])
    assert (row["reached_0.9"], row["seconds_0.9"], row["diverged"], row["slow"]) == ("0", "inf", "0", "")
    assert dict(zip(names, second))["why"] == "no chances are known"


@pytest.mark.parametrize(("value", "text"), [(None, ""), (nan, ""), (inf, "inf"), (0.123456, "0.1235"), (3, "3")])
def test_words_of_the_table(value: Any, text: str) -> None:
    assert atlas_page.word(value) == text


def test_the_table_follows_from_the_lines() -> None:
    every = [each for study in atlas.STUDIES for each in atlas_page.found(study).values()]
    with (atlas.FOLDER / "cells.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == atlas_page.rows(every)


def test_the_page_follows_from_the_lines(tmp_path: Path) -> None:
    every = {study: atlas_page.found(study) for study in atlas.STUDIES}
    told = atlas_page.draw_ranks(every["digits"], tmp_path / "ranks.png")
    text = (STUDIES / "atlas.md").read_text(encoding="utf-8")
    assert text == atlas_page.page(every, told)
    assert len(text.split()) <= 1500


def test_the_front_page_says_what_the_lines_say() -> None:
    cells, text = atlas_page.found("digits"), " ".join((atlas.ROOT / "README.md").read_text(encoding="utf-8").split())
    four, two = (
        {name: cells[f"{world}/own/{name}"] for name in ("wait", "drop", "first", "fedbuff")} for world in WORLDS
    )
    slow = [f"{each.mean('slow'):.2f}".lstrip("0") for each in (four["fedbuff"], four["drop"], two["first"])]
    assert (
        f"FedAvg that waits needs {four['wait'].seconds:.0f} s to .8. FedBuff needs {four['fedbuff'].seconds:.0f} s"
        in text
    )
    assert f"ends at {slow[0]} for the slow third; dropping stragglers leaves it at {slow[1]}." in text
    assert f"(pai-2), waiting needs {two['wait'].seconds:.0f} s; rounds" in text
    assert f"rounds of the first 14 of 20 leave it at {slow[2]} " in text
    assert f"[{len(atlas.grid()['methods'])} methods in eight worlds]" in text


def test_all_cells_are_there() -> None:
    """Also those of methods that are none for a world, with the reason."""
    for study in atlas.STUDIES:
        found, seeds = atlas_page.found(study), len(atlas.grid()[study]["seeds"])
        for cell in (cell for pair in atlas.pairs(study) for cell in pair):
            assert len(found[cell.key].lines) == seeds or found[cell.key].why, f"{study}:{cell.key}"
