"""What presets gave when they were frozen (tests/golden/freeze.py), they give still: on one rank, and on three."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from golden.freeze import FILE, RUNS, has_data, kind, play, record
from helpers import summary

FROZEN = json.loads(FILE.read_text())
DIGESTS = next((each["digests"] for each in FROZEN["kinds"] if each["kind"] == kind()), {})
ROUNDING = {"accuracy": 1e-6, "client_accuracy": 1e-6}
NORM = 1e-5  # relative: norms are written with six digits
if not DIGESTS:
    warnings.warn(f"digests are not compared: none are frozen on {kind()}", stacklevel=1)


def changes(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield what differs between two records, what tells most first."""
    for column in ("sim_seconds", "message_bytes", "arrived", "depth", "accuracy", "client_accuracy"):
        for number, (before, after) in enumerate(zip_longest(then[column], now[column])):
            if not near(before, after, absolute=ROUNDING.get(column, 0.0)):
                yield f"{column} of round {number} was {before}, is {after}"
    for norms in ("shared_norms", "personal_norms"):
        for name in sorted(then[norms].keys() | now[norms].keys()):
            before, after = then[norms].get(name), now[norms].get(name)
            if not near(before, after, relative=NORM):
                yield f"{norms} of {name} was {before}, is {after}"
    for digest, before in then["digests"].items():
        if before != now["digests"][digest]:
            yield f"{digest} was {before[:12]}, is {now['digests'][digest][:12]}"


def near(before: Any, after: Any, relative: float = 0.0, absolute: float = 0.0) -> bool:
    if before == after:
        return True
    numbers = isinstance(before, float) and isinstance(after, float)
    return numbers and math.isclose(before, after, rel_tol=relative, abs_tol=absolute)


def difference(name: str, run: Path) -> str:
    """Return in one line what has changed of a preset, "" if nothing."""
    then = FROZEN["runs"][name] | {"digests": DIGESTS.get(name, {})}
    found = list(changes(then, record(run)))
    more = f"; and {len(found) - 1} more" if found[1:] else ""
    return f"{name}: {found[0]}{more}" if found else ""


@pytest.mark.parametrize("name", RUNS)
def test_one_rank_gives_what_is_frozen(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    how = "to the bit" if name in DIGESTS else "only by norms and columns"
    record_property(summary.FROZEN, how if has_data(name) else "not at all")
    if not has_data(name):
        pytest.skip("needs MNIST in HPCFL_DATA")
    if changed := difference(name, play(name, tmp_path / name)):
        pytest.fail(changed, pytrace=False)


@pytest.mark.mpi
def test_three_ranks_give_what_is_frozen(world: Any, shared_dir: Path) -> None:
    if world.size != 3:
        pytest.skip("needs three ranks")
    runs = {name: play(name, shared_dir / name) for name in RUNS if has_data(name)}
    if world.rank == 0 and (changed := [line for name, run in runs.items() if (line := difference(name, run))]):
        pytest.fail("\n".join(changed), pytrace=False)
