"""Thirds by speed and the worst tenth against values worked out by hand, in tables and pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcfl
from helpers.recorded import config, write_run
from hpcfl.base.errors import UsageError
from hpcfl.commands.cli import main
from hpcfl.results.run_table import last_figures

NAN = np.nan
GROUPS = ["slow-third", "middle-third", "fast-third", "worst-decile"]
FAST_FIRST = {
    # clients 0 and 1 are fast, 2 and 3 middling, 4 and 5 slow; client 5 is not invited to round 1
    "visit_seconds": ([1.0, 1.0, 2.0, 2.0, 9.0, 9.0], [1.0, 1.0, 2.0, 2.0, np.inf, NAN]),
    "cohort": ([1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]),
    "arrived": ([1, 1, 1, 1, 1, 0], [1, 0, 1, 1, 0, 0]),
    "blocks": ([1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 0, 0]),
    "client_accuracy": ([0.9, 0.7, 0.5, 0.5, 0.1, 0.3], [NAN] * 6),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows: list[dict[str, Any]] = [{name: values[round_] for name, values in FAST_FIRST.items()} for round_ in range(2)]
    return write_run(tmp_path / "run", config(), rows)


def test_figures_by_hand(run: Path) -> None:
    found = hpcfl.group_figures(run)
    assert found.group.values.tolist() == GROUPS
    members = [np.flatnonzero(row).tolist() for row in found["member"].transpose("group", "client").values]
    assert members == [[4, 5], [2, 3], [0, 1], [4]]
    np.testing.assert_allclose(found["accuracy"].isel(round=0), [0.2, 0.5, 0.8, 0.1])
    assert np.isnan(found["accuracy"].isel(round=1)).all()
    figures = {name: found[name].transpose("group", "round").values for name in ("participation", "depth")}
    np.testing.assert_allclose(figures["participation"], [[1 / 2, 1 / 3], [1, 1], [1, 3 / 4], [1, 1 / 2]])
    np.testing.assert_allclose(figures["depth"], [[0, 0], [1, 1], [1, 3 / 4], [0, 0]])


def test_where_nobody_was_tested_there_are_the_other_figures(tmp_path: Path) -> None:
    row = {name: values[0] for name, values in FAST_FIRST.items() if name != "client_accuracy"}
    figures = last_figures(write_run(tmp_path / "run", config(), [row]))
    assert figures["fast-third"] == {"clients": 2, "accuracy": None, "participation": 1.0, "depth": 1.0}
    assert figures["worst-decile"] == {"clients": 0, "accuracy": None, "participation": None, "depth": None}


def test_shown_and_drawn(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run), "--groups", "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert groups["slow-third"] == {"clients": 2, "accuracy": 0.2, "participation": 1 / 3, "depth": 0.0}
    assert main(["show", str(run), "--groups"]) == 0
    assert "slow-third │ 2 │ 0.2 │ 0.3333 │ 0" in " ".join(capsys.readouterr().out.split()).replace("│ run │ ", "")
    picture = run.parent / "groups.png"
    assert main(["plot", str(run), "--kind", "groups", "-o", str(picture)]) == 0
    assert picture.stat().st_size > 10_000


def test_clients_of_one_speed_have_no_thirds(tmp_path: Path) -> None:
    alike = write_run(tmp_path / "run", config(), [{"visit_seconds": [1.0, 1.0, 1.0], "blocks": [1, 1, 1]}])
    with pytest.raises(UsageError, match="recorded no client that is slower than another"):
        hpcfl.group_figures(alike)
    assert last_figures(alike) == {}
    with pytest.raises(UsageError, match="has recorded no round"):
        hpcfl.group_figures(write_run(tmp_path / "none", config(), []))
