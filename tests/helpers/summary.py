"""What the tests say at their end: where the processors' time went, and what frozen runs were compared by."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

SPENT, FROZEN = "processor seconds", "frozen"  # properties of a test's report
SLOWEST = 12  # tests that are named
PARTS = "tests", "judges", "notebooks", "simulator", "grids", "docs"


def processor_seconds() -> float:
    """Seconds of this process, and of those that it has started and seen end."""
    return sum(os.times()[:4])


def part(nodeid: str) -> str:
    """Return the part to which a test belongs: by its folder or its file, ``judges/`` or ``test_judges.py``."""
    found = re.search(rf"(?:^|/)(?:test_)?({'|'.join(PARTS[1:])})", nodeid.partition("::")[0])
    return found[1] if found else PARTS[0]


def summary(ends: Iterable[Mapping[str, Any]], seconds: float) -> list[str]:
    """Return the last lines of a session that took so many seconds, from its tests' properties and ``nodeid``."""
    spent, frozen, alone = defaultdict[str, float](float), Counter[str](), Counter[str]()
    for each in ends:
        spent[part(each["nodeid"])] += each.get(SPENT, 0.0)
        alone[each["nodeid"]] += each.get(SPENT, 0.0)
        frozen.update([each[FROZEN]] if FROZEN in each else [])
    by_part = ", ".join(f"{name} {spent[name]:.0f}" for name in PARTS if name in spent)
    most = ", ".join(f"{name} {taken:.0f}" for name, taken in alone.most_common(SLOWEST))
    lines = [f"processor-seconds: {by_part}; wall: {seconds:.0f} s", f"most of them: {most}"] if spent else []
    if frozen:
        lines.append(
            "frozen runs compared on this processor: "
            + ", ".join(f"{number} {how}" for how, number in sorted(frozen.items()))
        )
    return lines
