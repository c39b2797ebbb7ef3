"""The last lines of the tests: processor-seconds by part, and how frozen runs were compared."""

from __future__ import annotations

from helpers.summary import FROZEN, SPENT, summary


def test_time_is_told_by_part_and_frozen_runs_by_how_they_were_compared() -> None:
    spent = {
        "tests/judges/test_salf.py::test_a": 2.0,
        "tests/algorithms/test_salf.py::test_judges[docs/a]": 30.0,
        "hpcfl/testing/test_algorithms.py::test_a": 3.0,
        "tests/test_docs.py::test_a": 4.0,
        "tests/test_docstrings.py::test_a": 5.0,
        "tests/realtime/test_simulator.py::test_a": 6.4,
    }
    ends = [{"nodeid": name, SPENT: seconds} for name, seconds in spent.items()]
    ends += [
        {"nodeid": "tests/test_frozen.py::test_a", FROZEN: how} for how in ("to the bit", "not at all", "to the bit")
    ]
    assert summary(ends, 61.0) == [
        "processor-seconds: tests 33, judges 2, simulator 6, docs 9; wall: 61 s",
        "most of them: tests/algorithms/test_salf.py::test_judges[docs/a] 30, "
        "tests/realtime/test_simulator.py::test_a 6, tests/test_docstrings.py::test_a 5, tests/test_docs.py::test_a 4, "
        "hpcfl/testing/test_algorithms.py::test_a 3, tests/judges/test_salf.py::test_a 2, "
        "tests/test_frozen.py::test_a 0",
        "frozen runs compared on this processor: 1 not at all, 2 to the bit",
    ]


def test_nothing_is_said_where_nothing_ran() -> None:
    assert summary([], 1.0) == []
