"""The atlas: its grid, one small run counted by hand, and its lines."""

from __future__ import annotations

import csv
import os
from collections import Counter
from pathlib import Path
from typing import Any

import atlas
import numpy as np
import pytest

import hpcfl
from hpcfl.base.errors import UsageError
from hpcfl.config.config import from_table

KNOWN = "salf-exact", "salf-inverse", "known"
REFUSED = {
    "phones-diurnal": {*KNOWN, "ringmaster", "ringleader", "fedcompass", "fedqueue"},
    "spot": {*KNOWN, "ringmaster", "ringleader", "fedcompass", "fedqueue", "heterofl", "fedrolex"},
}
"""Methods that a world has no place for: chances are not known, nobody may leave, or nobody is slower than others."""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The grid, with runs of 8 visits."""
    grid = {**atlas.grid(), "digits": {**atlas.grid()["digits"], "seconds": 8}}
    monkeypatch.setattr(atlas, "grid", lambda: grid)
    atlas.slow.cache_clear()
    return grid


def test_each_cell_is_a_config_or_is_refused_by_name(tmp_path: Path) -> None:
    for pair in atlas.pairs("digits"):
        for cell in pair:
            refused = cell.method in REFUSED.get(cell.world, ())
            try:
                from_table(atlas.settings(cell, 0.1, 1, tmp_path)).check(None)
            except UsageError:
                assert refused, cell.key
            else:  # whose paces are alike is known where the job is made
                assert not refused or (cell.world == "spot" and cell.method in ("heterofl", "fedrolex")), cell.key


def test_a_visit_takes_a_second_in_the_mean_in_every_world(tmp_path: Path) -> None:
    for world in atlas.grid()["worlds"]:
        means = []
        for seed in range(1, 9):
            law = atlas.config(atlas.Cell("digits", world, "anyone", "wait"), seed)
            means.append(4 * law.speed.scale * atlas.seconds(law, 20).mean())
        assert np.mean(means) == pytest.approx(1.0, abs=0.25 if world in ("pai-4", "phones-diurnal") else 0.12), world


def test_the_last_third_is_slow_where_labels_are_their_own(tmp_path: Path) -> None:
    for world in ("pai-4", "llm-ar"):
        cell = atlas.Cell("digits", world, "own", "wait")
        law = from_table(atlas.settings(cell, 0.1, 1, tmp_path))
        mean = atlas.seconds(law, 1 if world == "llm-ar" else 200)
        assert mean[14:].min() >= mean[:14].max() * 0.8
        np.testing.assert_array_equal(atlas.slow(cell, 1), range(14, 20))
    cell = atlas.Cell("digits", "spot", "own", "wait")
    atlas.settings(cell, 0.1, 1, tmp_path)
    there = np.zeros(20)
    with (tmp_path / "there.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            start, end = (min(float(row[name]), 150 * 600) for name in ("start", "end"))
            there[int(row["client"])] += end - start
    assert (np.diff(there) <= 1e-6).all()


def test_a_line_says_what_the_run_did(short: dict[str, Any], tmp_path: Path) -> None:
    cell = atlas.Cell("digits", "pai-4", "anyone", "drop")
    line = atlas.carried_out(cell, 0.4, 1)
    data = hpcfl.run({**atlas.settings(cell, 0.4, 1, tmp_path), "rounds": 5}, out=tmp_path / "run", quiet=True).data
    assert (line["status"], line["rounds"], line["tests"]) == ("stopped", 5, 2)  # 5 · 1.48 <= 8 < 6 · 1.48
    assert line["reached"] == dict.fromkeys(["0.6", "0.7", "0.8", "0.9"])
    first, second = data["accuracy"].values[[1, 3]]  # known from 2.96 and from 5.92 seconds on
    assert line["area"] == pytest.approx((first * 2.96 + second * (8 - 5.92)) / 8, abs=5e-5)
    assert line["accuracy"] == pytest.approx(second, abs=5e-5)
    own, came = data["client_accuracy"].values[3], data["arrived"].values.sum(0)
    assert line["never_came"] == (came == 0).sum() > 0
    for name, some in (("clients", own), ("never", own[came == 0]), ("decile", np.sort(own)[:2])):
        assert line[name] == pytest.approx(some.mean(), abs=5e-5)
    assert line["jain"] == pytest.approx(came.sum() ** 2 / (20 * (came**2).sum()), abs=5e-5)
    assert line["megabytes"] == pytest.approx(
        came.sum() * 4 * (64 * 64 + 64 + 64 * 32 + 32 + 32 * 10 + 10) / 1e6, abs=1e-3
    )


@pytest.mark.parametrize("method", ["drop", "salf-exact", "fedbuff"])
def test_what_counts_is_counted(short: dict[str, Any], tmp_path: Path, method: str) -> None:
    cell = atlas.Cell("digits", "pai-4", "anyone", method)
    table = {**atlas.settings(cell, 0.4, 1, tmp_path), "rounds": 6}
    data = hpcfl.run(table, out=tmp_path / "run", quiet=True).data
    visits, useful, staleness = atlas.counted(data)
    expected, seconds, ages = Counter[int](), 0.0, []
    for row in range(6):
        one = data.isel(round=row)
        if method == "fedbuff":
            for client, took, age in zip(
                one["arrival_client"].values, one["arrival_visit_seconds"].values, one["arrival_staleness"].values
            ):
                expected[client] += 1
                seconds += took
                ages.append(age)
            continue
        for client in range(20):
            if one["arrived"].values[client]:
                expected[client] += 1
                took = min(one["visit_seconds"].values[client], one["round_seconds"].item())
                seconds += took * one["blocks"].values[client] / 3
    assert visits.tolist() == [expected[client] for client in range(20)]
    assert useful == pytest.approx(seconds)
    assert staleness == (pytest.approx(np.mean(ages), abs=5e-4) if ages else None)


def test_drawn_lines_come_out_again() -> None:
    """Others with each commit; to the last digit where the processor and the versions are those of the line."""
    draw = os.environ.get("HPCFL_DRAWN", "")
    found = atlas.again("digits", 0.25, draw)
    assert found["runs"] >= 2
    assert not found["differ"]
