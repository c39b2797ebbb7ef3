"""Fragments: Streaming DiLoCo (Douillard et al., arXiv 2501.18512), and Decoupled DiLoCo's rule of who is in which.

Tensors by falling size, each into the smallest fragment so far; fragment t mod P is sent and moved in round t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from judges.corrections import Correction
from judges.plain import Params
from judges.server import Server


def dealt(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    filled: list[list[str]] = [[] for _ in range(count)]
    room = [0] * count
    for size, name in sorted(((-size, -place), name) for place, (name, size) in enumerate(reversed(sizes.items()))):
        least = room.index(min(room))
        filled[least].append(name)
        room[least] -= size[0]
    return filled


def among(fragments: list[list[str]], correct: Correction) -> Correction:
    """A correction that has something to say of all tensors: only those whose turn it is move."""

    def some(round_: int, changes: dict[int, Params], v: dict[int, float]) -> Params:
        found = correct(round_, changes, v)
        return {name: found[name] for name in fragments[round_ % len(fragments)] if name in found}

    return some


class Each:
    """A server optimiser for each fragment."""

    def __init__(self, fragments: list[list[str]], made: Callable[[], Server]) -> None:
        self.rules = [(set(names), made()) for names in fragments]

    def __call__(self, w: Params, delta: Params) -> Params:
        for names, rule in self.rules:
            if some := {name: d for name, d in delta.items() if name in names}:
                w = rule(w, some)
        return w
