"""Which tests are left out where `HPCFL_DRAWN` is set: of those that take half a second or more, all but a quarter.

Its value is a seed, the commit as `make test` has it: the same tests on all workers and ranks, others at the next
commit. `tests/costs.json` says what takes how long; tests that it does not name are new, and run.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping

OF = 4
ALWAYS = "tests/judges/", "tests/test_docs", "tests/test_frozen", "tests/test_launches", "tests/test_tutorials"


def left_out(nodeids: Iterable[str], costs: Mapping[str, float], seed: str) -> set[str]:
    """Return the tests that are left out; of a function's cases, those that take long, a quarter stays."""
    cases = defaultdict[str, list[str]](list)
    for nodeid in nodeids:
        if nodeid in costs and not nodeid.startswith(ALWAYS):
            cases[nodeid.partition("[")[0]].append(nodeid)
    out = set[str]()
    for function, some in cases.items():
        stay, rest = divmod(len(some), OF)
        stay += _number(seed, function) % OF < rest
        out |= {*sorted(some, key=lambda each: _number(seed, each))[stay:]}
    return out


def _number(seed: str, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big")
