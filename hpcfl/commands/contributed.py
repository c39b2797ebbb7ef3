"""What few need is not part of the core: the commands load it by name, when it is asked for."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

CONTRIBUTED = {
    "bounds of salf": "hpcfl.contrib.theory.salf_bounds:facts",
    "bounds of fedlrgd": "hpcfl.contrib.theory.complexity:theory",
    "planned deadlines": "hpcfl.contrib.theory.planned:facts",
    "oracle complexity": "hpcfl.contrib.theory.complexity:gamma",
    "optimum": "hpcfl.contrib.theory.optimum:of",
    "network": "hpcfl.contrib.network.measure:facts",
    "prediction": "hpcfl.contrib.network.predict:facts",
    "speeds": "hpcfl.contrib.speeds",
    "other ranks": "hpcfl.contrib.network.predict:Like.of",
}
"""By name, what yields facts about a job, a config or these ranks, or what such facts are told of."""


def contributed(name: str) -> Any:
    """Return what stands under a name."""
    return resolve_name(CONTRIBUTED[name])
