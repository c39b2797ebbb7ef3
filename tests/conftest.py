"""What the tests share: the world of ranks, a folder that all ranks see, and results as JSON per rank."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # digests are those of CPUs
if "HPCFL_TESTS_STATE" not in os.environ:  # what has run here is no affair of whoever runs the tests
    os.environ["HPCFL_TESTS_STATE"] = os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="hpcfl-state-")

from costs import COSTS
from helpers.draw import left_out
from helpers.summary import SPENT, processor_seconds, summary
from hpcfl.base import plugins
from hpcfl.mpi.launcher import launched
from hpcfl.realtime.lane import Lane
from hpcfl.testing.conftest import shared_dir, solo, world
from hpcfl.testing.world import RESULTS, World

BEGAN = time.monotonic()
Lane.checked = True
BEFORE = pytest.StashKey[float]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Launches first, since they take longest; under a launcher, none. Some are drawn, see `helpers.draw`."""
    if seed := os.environ.get("HPCFL_DRAWN"):
        costs = json.loads(COSTS.read_text(encoding="utf-8"))
        out = left_out([item.nodeid for item in items], costs, seed)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
        items[:] = [item for item in items if item.nodeid not in out]
    for item in items:
        if launched() and item.get_closest_marker("launch"):
            item.add_marker(pytest.mark.skip(reason="starts processes itself; not under mpirun"))
    items.sort(key=lambda item: (item.get_closest_marker("launch") is None, "test_launches" not in item.nodeid))


@pytest.fixture(scope="session")
def common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this pytest see, those of xdist too."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(autouse=True)
def modules_forgotten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget what a test has imported from files of its own, and what a run that it took up lets be imported."""
    before, base = set(sys.modules), tmp_path_factory.getbasetemp()
    yield
    plugins._only.clear()
    for name in sys.modules.keys() - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(base):
            del sys.modules[name]


__all__ = ["shared_dir", "solo", "world"]


class Results:
    """Outcomes and facts of one rank, written for the launching test."""

    outcomes: dict[str, str] = {}  # noqa: RUF012
    facts: dict[str, Any] = {}  # noqa: RUF012


@pytest.fixture(scope="session")
def facts() -> dict[str, Any]:
    """What a rank has found and the launching test wants to compare between launches."""
    return Results.facts


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test's outcome; a failure in set-up or tear-down counts too."""
    if report.when == "call" or report.outcome != "passed":
        Results.outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    """Write what this rank found."""
    folder = os.environ.get(RESULTS)
    if folder and launched():
        found = {"outcomes": Results.outcomes, "facts": Results.facts}
        (Path(folder) / f"rank-{World().rank}.json").write_text(json.dumps(found), encoding="utf-8")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    item.stash[BEFORE] = processor_seconds()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Let the last report of a test say what the test took, processes that it has started and seen end among it."""
    if call.when == "teardown":
        spent = processor_seconds() - item.stash[BEFORE]
        item.user_properties.append((SPENT, spent))
        if lines := os.environ.get("HPCFL_COSTS"):
            with Path(lines).open("a", encoding="utf-8") as file:
                file.write(json.dumps([item.nodeid, spent]) + "\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say where the time went, and how many frozen runs were really compared to the bit."""
    reports = [each for several in terminalreporter.stats.values() for each in several]
    ends = [
        dict(each.user_properties) | {"nodeid": each.nodeid}
        for each in reports
        if getattr(each, "when", "") == "teardown"
    ]
    for line in [] if launched() else summary(ends, time.monotonic() - BEGAN):
        terminalreporter.write_line(line)
