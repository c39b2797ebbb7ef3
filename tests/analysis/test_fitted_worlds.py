"""The worlds have the figures that are fitted to the measurements, and any method runs in each of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers.launcher import ROOT
from helpers.scripts import script
from hpcfl.config import load
from hpcfl.config.presets import overlays
from hpcfl.engine.job import Job

WORLDS = sorted(name for name in overlays() if name.startswith("world/"))


def test_the_worlds_have_the_fitted_figures() -> None:
    data = os.environ.get("HPCFL_DATA")
    if data is None or not (Path(data) / "speeds").is_dir():
        pytest.skip("needs the tables of measured speeds in HPCFL_DATA")
    found = script("worlds").main(["--data-dir", data])
    assert found["far"] == []
    assert {f"world/{name}" for name in found["worlds"]} == {*WORLDS} - {"world/fail-slow"}


def test_the_page_has_a_row_and_a_source_for_each_world() -> None:
    page = (ROOT / "docs" / "reference" / "worlds.md").read_text(encoding="utf-8")
    for world in WORLDS:
        name = world.partition("/")[2]
        assert f"| `{name}` |" in page
        assert f"**{name.partition('-')[0]}" in page


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("base", ["fedavg-digits", "fedbuff-digits"])
def test_rounds_are_planned_in_each_world(world: str, base: str) -> None:
    job = Job.of(load(base, overlays=[world]), None, 1)
    plans = job.planner.plans()
    first, second = next(plans), next(plans)
    assert first.duration > 0
    assert len(first.cohort) >= 1
    assert second.round == 1
