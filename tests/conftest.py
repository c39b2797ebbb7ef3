"""What the tests share: the world of ranks, a folder that all ranks see, and results as JSON per rank."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from helpers.launcher import ROOT
from helpers.world import RESULTS, World
from hpcfl.comm.launcher import launched


def documented_example() -> str:
    """Return the algorithm in the docs: the Python block that defines one."""
    page = ROOT / "docs" / "extending.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return next((block for block in blocks if "(Algorithm)" in block), "")


def pytest_configure(config: pytest.Config) -> None:
    """Drop the docs' algorithm into the package, so that every generic test runs it too."""
    import hpcfl.algorithms

    folder = Path(tempfile.mkdtemp(prefix="hpcfl-example-"))
    (folder / "clipped.py").write_text(documented_example(), encoding="utf-8")
    hpcfl.algorithms.__path__.append(str(folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Launches first, since they take longest; under a launcher, none."""
    for item in items:
        if launched() and item.get_closest_marker("launch"):
            item.add_marker(pytest.mark.skip(reason="starts processes itself; not under mpirun"))
    items.sort(key=lambda item: (item.get_closest_marker("launch") is None, "test_launches" not in item.nodeid))


@pytest.fixture(scope="session")
def world() -> World:
    """The ranks that run the tests."""
    return World()


@pytest.fixture(scope="session")
def solo() -> World:
    """One rank, whoever else runs the tests."""
    return World(alone=True)


@pytest.fixture
def shared_dir(world: World, tmp_path: Path) -> Iterator[Path]:
    """A fresh folder that all ranks see; rank 0's."""
    world.meet()
    yield Path(world.told(str(tmp_path)))
    world.meet()


@pytest.fixture(scope="session")
def common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this pytest see, those of xdist too."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


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
