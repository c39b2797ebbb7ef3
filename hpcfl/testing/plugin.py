"""What pytest loads at its start, wherever hpcfl is installed: the option ``--algorithm``. It imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("hpcfl").addoption(
        "--algorithm",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="An algorithm to be tested by --pyargs hpcfl.testing; may be given several times (default: hpcfl's own).",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "mpi: runs on any number of MPI ranks")
