"""Every client for itself: what methods that share have to beat."""

from __future__ import annotations

from typing import Literal

from hpcfl.algorithms.whole import Whole


class Local(Whole):
    """Every client for itself: nothing but the training loss is sent."""

    name: Literal["local"] = "local"
