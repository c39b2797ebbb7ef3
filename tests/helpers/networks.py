"""What a network's measurement may come to: made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hpcfl.contrib.network.measure import Network
from hpcfl.contrib.network.model import Costs, Link, Rates

LINK = Link(1e-5, Rates(4e9, 2e9), Rates(5e9, 3e9), Rates(5e9, 3e9), Rates(2e9, 1e9))
COSTS = Costs(LINK, replace(LINK, latency=1e-3), sent=1e-6, received=2e-6, look=1e-5, request=1e-7, sums=1e9)
FOUND = Network("MPICH 5.0.2", "srun", "2026-11-24", 12.5, 0.25, {"n1": 3, "n2": 3}, COSTS, {"all": Rates(1e9, 5e8)})


def written(folder: Path, found: object, name: str = "network.json") -> Path:
    """Write JSON to a file and return it."""
    file = folder / name
    file.write_text(json.dumps(found), encoding="utf-8")
    return file
