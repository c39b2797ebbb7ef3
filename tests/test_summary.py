"""The last lines of the tests: processor-seconds by part, and how frozen runs were compared."""

from __future__ import annotations

from helpers.draw import left_out
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


def test_a_quarter_of_what_takes_long_is_drawn_by_the_commit() -> None:
    grid = [f"tests/a.py::test_grid[{case}]" for case in range(9)]
    alone = [f"tests/a.py::test_{number}" for number in range(300)]
    judges = ["tests/judges/test_salf.py::test_salf"]
    costs = dict.fromkeys([*grid[:8], *alone, *judges], 2.0)
    every = [*grid, *alone, *judges]
    out = [left_out(every, costs, seed) for seed in ("a", "b")]
    assert out[0] == left_out(reversed(every), costs, "a")
    for some in out:
        assert len(some & set(grid)) == 6
        assert 190 < len(some & set(alone)) < 260
        assert not some & {grid[8], *judges}
    assert out[0] & set(grid) != out[1] & set(grid)
    assert len({seed for seed in range(60) if alone[0] not in left_out(every, costs, str(seed))}) in range(6, 27)
    assert left_out(every, {}, "a") == set()
