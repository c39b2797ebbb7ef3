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

ROOT = Path(__file__).parent.parent
RESULTS = "HPCFL_TEST_RESULTS"  # folder for rank-<n>.json where a launching test wants to read them

from hpcfl.comm.launcher import launched  # noqa: E402


def readme_example() -> str:
    """Return the README's algorithm: its Python block that defines one."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return next((block for block in blocks if "(Algorithm)" in block), "")


def pytest_configure(config: pytest.Config) -> None:
    """Drop the README's algorithm into the package, so that every generic test runs it too."""
    import hpcfl.algorithms

    folder = Path(tempfile.mkdtemp(prefix="hpcfl-example-"))
    (folder / "clipped.py").write_text(readme_example(), encoding="utf-8")
    hpcfl.algorithms.__path__.append(str(folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under a launcher, leave out the tests that would start launchers or processes of their own."""
    for item in items:
        if launched() and item.get_closest_marker("launch"):
            item.add_marker(pytest.mark.skip(reason="starts processes itself; not under mpirun"))


class World:
    """The ranks that run this test: one without a launcher, or where it is to be alone."""

    def __init__(self, alone: bool = False) -> None:
        self.comm: Any = None
        self.rank, self.size = 0, 1
        if launched() and not alone:
            from mpi4py import MPI

            self.comm = MPI.COMM_WORLD
            self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()

    def told(self, text: str) -> str:
        """Return rank 0's text on all ranks."""
        if self.comm is None:
            return text
        from hpcfl.comm.mpi import tell

        return tell(self.comm, text)

    def meet(self) -> None:
        """Wait for all ranks without spinning."""
        if self.comm is not None:
            from hpcfl.comm.mpi import wait

            wait([self.comm.Ibarrier()])


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
