"""What a notebook shows: a bar below the cell while a run goes on, and of a run a table and a curve."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import hpcfl
from hpcfl.base import notebook
from hpcfl.testing.runs import table

VALUES = table("fedavg", "mlp", True, rounds=4)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The HTML that a cell shows, one after the other in the same place; IPython stands for a kernel's."""
    seen: list[str] = []

    def display(html: str, display_id: bool) -> Any:
        assert display_id
        seen.append(html)
        return SimpleNamespace(update=seen.append)

    kernel = ModuleType("IPython")
    vars(kernel)["get_ipython"] = lambda: SimpleNamespace(kernel=None)
    vars(kernel)["display"] = SimpleNamespace(display=display, HTML=str)
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    return seen


def test_a_bar_tells_of_rounds_figures_and_time(shown: list[str], tmp_path: Path) -> None:
    run = hpcfl.run(VALUES, out=tmp_path / "run")
    assert '<progress value="0" max="4"' in shown[0]
    assert '<progress value="4" max="4"' in shown[-1]
    accuracy = float(run.data["accuracy"][-1])
    assert f"round 4/4 · accuracy {accuracy:.4f} · 0 s left" in shown[-1].replace("  ", " ")
    again = len(shown)
    hpcfl.run(VALUES, out=tmp_path / "quiet", quiet=True)
    assert len(shown) == again


def test_without_a_kernel_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert notebook.display() is None
    shell = ModuleType("IPython")
    vars(shell)["get_ipython"] = lambda: None
    monkeypatch.setitem(sys.modules, "IPython", shell)
    assert notebook.display() is None


def test_a_run_is_a_table_and_a_curve(tmp_path: Path) -> None:
    run = hpcfl.run(VALUES, out=tmp_path / "run<1>")
    html = run._repr_html_()
    cells = dict(re.findall(r"<th>([^<]*)</th><td>([^<]*)</td>", html))
    assert (cells["status"], cells["rounds"]) == ("done", "4")
    assert cells["accuracy"] == f"{float(run.data['accuracy'][-1]):.4f}"
    counted, invited = int(run.data["arrived"].sum()), int((run.data["cohort"] == 1).sum())
    assert cells["arrived"] == f"{counted} of {invited} visits"
    assert "<caption>run&lt;1&gt;</caption>" in html
    assert html.count("<svg") == 1
    assert "accuracy" in html.partition("<svg")[2]


def test_a_run_without_rounds_has_no_curve(tmp_path: Path) -> None:
    def failing(row: Any) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        hpcfl.run(VALUES, out=tmp_path / "run", on_round=failing)
    html = hpcfl.Run(tmp_path / "run")._repr_html_()
    assert "<th>rounds</th><td>0</td>" in html
    assert "failed: LookupError" in html
    assert "<svg" not in html
