"""Write tests/costs.json, what tests take that take half a second or more: ``python tests/costs.py LINES``.

LINES is what a whole run has written, that of all ranks too: ``HPCFL_COSTS=LINES make test-all``, on an idle machine.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

COSTS = Path(__file__).with_suffix(".json")
LEAST = 0.5


def main(lines: Path) -> None:
    """Add up the processor-seconds of each test over its ranks."""
    spent = defaultdict[str, float](float)
    for line in lines.read_text(encoding="utf-8").splitlines():
        nodeid, seconds = json.loads(line)
        spent[nodeid] += seconds
    most = {nodeid: round(seconds, 1) for nodeid, seconds in sorted(spent.items()) if seconds >= LEAST}
    COSTS.write_text(json.dumps(most, indent=0) + "\n", encoding="utf-8")
    share = sum(most.values()) / sum(spent.values())
    print(f"{len(most)} of {len(spent)} tests take {share:.0%} of {sum(spent.values()):.0f} processor-seconds")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
