"""What the tests share: the world of ranks, a folder that all ranks see, and results as JSON per rank."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # digests are those of CPUs

from hpcfl.comm.launcher import launched
from hpcfl.testing.conftest import shared_dir, solo, world
from hpcfl.testing.world import RESULTS, World


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Launches first, since they take longest; under a launcher, none."""
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
    """Forget what a test has imported from files of its own: another one's may have the same name."""
    before, base = set(sys.modules), tmp_path_factory.getbasetemp()
    yield
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
