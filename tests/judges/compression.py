"""Compressed messages: what of a change is sent, and what is kept for the next one.

top-k with memory: Stich, Cordonnier & Jaggi, NeurIPS 2018. QSGD: Alistarh et al., NeurIPS 2017. Error feedback:
Karimireddy et al., ICML 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import torch
from torch import Tensor

from judges.corrections import Correction, plain
from judges.plain import Params

Rule = Callable[[Tensor, Any], Tensor]
"""What is sent of a flat tensor, by a generator."""


def top(share: float) -> Rule:
    def rule(v: Tensor, rng: Any) -> Tensor:
        largest = v.abs().sort(descending=True).indices[: ceil(share * len(v))]
        return torch.zeros_like(v).index_copy(0, largest, v[largest])

    return rule


def some(share: float, unbiased: bool) -> Rule:
    def rule(v: Tensor, rng: Any) -> Tensor:
        k = ceil(share * len(v))
        places = torch.from_numpy(rng.choice(len(v), k, replace=False))
        return torch.zeros_like(v).index_copy(0, places, v[places] * (len(v) / k if unbiased else 1.0))

    return rule


def grid(levels: int) -> Rule:
    def rule(v: Tensor, rng: Any) -> Tensor:
        u, norm, sent = rng.random(len(v)), float(v.norm()), []
        for x, draw in zip(v.tolist(), u.tolist()):
            exact = levels * abs(x) / norm if norm else 0.0
            level = int(exact) + (draw < exact - int(exact))
            sent.append(norm * level / levels * (1 if x > 0 else -1))
        return torch.tensor(sent, dtype=v.dtype)

    return rule


def half(v: Tensor, rng: Any) -> Tensor:
    return v.bfloat16().double()


class Compressed:
    """Each client's changes as they arrive, tensor by tensor in the order in which they leave."""

    def __init__(self, rule: Rule, order: list[str], draw: Callable[[int, int, str], Any], feedback: bool) -> None:
        self.rule, self.order, self.draw, self.feedback, self.left = rule, order, draw, feedback, {}
        self.then: Correction = plain

    def __call__(self, round_: int, changes: dict[int, Params], v: dict[int, float]) -> Params:
        arrived: dict[int, Params] = {}
        for i, change in changes.items():
            arrived[i] = {}
            for name in self.order:
                whole = change[name] + (self.left.get((i, name), 0.0) if self.feedback else 0.0)
                arrived[i][name] = self.rule(whole.flatten(), self.draw(round_, i, name)).view(whole.shape)
                self.left[i, name] = whole - arrived[i][name]
        return self.then(round_, arrived, v)
