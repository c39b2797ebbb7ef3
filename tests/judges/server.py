"""Server optimisers: FedAvgM (Hsu, Qi & Brown 2019), FedOpt (Reddi et al., ICLR 2021), DN (Liu et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from judges.plain import Params

Server = Callable[[Params, Params], Params]
"""What the model becomes by the change Δ that a round proposes; a tensor that Δ lacks stays."""


def move(w: Params, delta: Params) -> Params:
    return {name: w[name] + delta[name] if name in delta else w[name] for name in w}


class Momentum:
    """``m ← βm + Δ``; ``w ← w + ηm``, or with `nesterov` ``w ← w + η(Δ + βm)`` (Douillard et al. 2023)."""

    def __init__(self, lr: float, beta: float, nesterov: bool = False) -> None:
        self.lr, self.beta, self.nesterov, self.m = lr, beta, nesterov, {}

    def __call__(self, w: Params, delta: Params) -> Params:
        for name, d in delta.items():
            self.m[name] = self.beta * self.m.get(name, 0.0) + d
        ahead = {name: d + self.beta * self.m[name] if self.nesterov else self.m[name] for name, d in delta.items()}
        return move(w, {name: self.lr * ahead[name] for name in delta})


class Delayed:
    """Delayed Nesterov: m moves with the mean of every N changes, and counts c in each step, the rest at a cycle's end.

    ``w ← w + η(Δ/N + sβm)``, s = c, and 1 − (N − 1)c in every N-th step.
    """

    def __init__(self, lr: float, beta: float, n: int, c: float) -> None:
        self.lr, self.beta, self.n, self.c, self.t, self.m, self.d = lr, beta, n, c, 0, {}, {}

    def __call__(self, w: Params, delta: Params) -> Params:
        self.t += 1
        ends, step = self.t % self.n == 0, {}
        for name, d in delta.items():
            self.d[name] = self.d.get(name, 0.0) + d
            if ends:
                self.m[name] = self.beta * self.m.get(name, 0.0) + self.d.pop(name) / self.n
            share = 1 - (self.n - 1) * self.c if ends else self.c
            step[name] = self.lr * (d / self.n + share * self.beta * self.m.get(name, 0.0))
        return move(w, step)


class FedOpt:
    """``m ← β₁m + (1 − β₁)Δ``; v by its kind; ``w ← w + η m / (√v + τ)``. m begins with 0, v with τ²."""

    def __init__(self, kind: str, lr: float, b1: float, b2: float, tau: float) -> None:
        self.kind, self.lr, self.b1, self.b2, self.tau = kind, lr, b1, b2, tau
        self.m, self.v = {}, {}

    def __call__(self, w: Params, delta: Params) -> Params:
        step = {}
        for name, d in delta.items():
            self.m[name] = self.b1 * self.m.get(name, 0.0) + (1 - self.b1) * d
            v = self.v.get(name, torch.full_like(d, self.tau**2))
            if self.kind == "adagrad":
                v = v + d**2
            elif self.kind == "yogi":
                v = v - (1 - self.b2) * d**2 * (v - d**2).sign()
            else:
                v = self.b2 * v + (1 - self.b2) * d**2
            self.v[name] = v
            step[name] = self.lr * self.m[name] / (v.sqrt() + self.tau)
        return move(w, step)
