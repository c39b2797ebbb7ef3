"""Server optimisers: the change that a round's means propose is a pseudo-gradient, of which the server makes a step.

A method's own step leads from w to what it proposes; Δ is the difference. β₁, β₂ are `betas`, η is `lr`, τ is `tau`.

==================== ==================================== ======================================================
``optimizer``        moments                              step
==================== ==================================== ======================================================
``none``             none                                 w + Δ, as the method says
``momentum``         m ← β₁ m + Δ                         w + η m (FedAvgM: Hsu, Qi & Brown, arXiv 1909.06335)
``nesterov``         m ← β₁ m + Δ                         w + η (Δ + β₁ m), as in DiLoCo (Douillard et al., 2023)
``delayed-nesterov`` D ← D + Δ                            w + η (Δ/N + c β₁ m); Liu et al., 2024
every N-th time      D so, m ← β₁ m + D/N, D ← 0          w + η (Δ/N + (1 − cN + c) β₁ m)
``adagrad``          m ← β₁ m + (1 − β₁) Δ, v ← v + Δ²    w + η m / (√v + τ)
``adam``             m so, v ← β₂ v + (1 − β₂) Δ²         so
``yogi``             m so, v ← v − (1 − β₂) Δ² sgn(v − Δ²) so
==================== ==================================== ======================================================

Delayed Nesterov (arXiv 2401.09135, Algorithm 3) is for steps with each arrival: what comes moves w at once, the
momentum with the mean of N, which c shares out among their steps. With N = 1 it is ``nesterov``. A step without
anybody counts for none of the N.

The last three are FedOpt (Reddi et al., ICLR 2021, Algorithm 2), without correction of bias; sgn(0) = 0. m begins with
0, v with τ², the least that the paper allows. Choices that it leaves open: Δ comes from the mean that the method takes
(the paper's is plain; `weights` of most methods are samples, as in implementations of it). A coordinate
that nobody has sent and that the method leaves as it was does not move, and its moments do not either. So it is with
fragments whose turn it is not; steps are counted for each fragment by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from hpcfl.algorithms.base import Algorithm, Extras, Model, ServerState, Sums, Task
from hpcfl.algorithms.wrapped import Wrapper, without, wrapped
from hpcfl.base.config import ConfigBase
from hpcfl.base.device_copy import on_device
from hpcfl.base.errors import UsageError, no_meaning, refusal
from hpcfl.base.lazy import Tensor, torch
from hpcfl.schedule.doubling import Doubling
from hpcfl.sums.message import moved

DELAYED = "delayed-nesterov"
PLAIN = "momentum", "nesterov", DELAYED
ADAPTIVE = "adam", "yogi", "adagrad"
BETAS = {**dict.fromkeys(("none", *PLAIN), (0.9,)), "adagrad": (0.0,), "adam": (0.9, 0.99), "yogi": (0.9, 0.99)}
"""Decays of the moments by default."""
M, V, TAKEN = "server.m.", "server.v.", "server.taken"


class ServerOptimizer(ConfigBase):
    """What steps the server takes along the changes that a method proposes."""

    optimizer: Literal["none", "momentum", "nesterov", "delayed-nesterov", "adam", "yogi", "adagrad"] = "none"
    """What takes the steps. ``none``: the method itself. ``momentum``: FedAvgM. ``nesterov``: the same with Nesterov's
    look ahead. ``delayed-nesterov``: the same for single arrivals, its momentum moving with every N-th. ``adam``,
    ``yogi``, ``adagrad``: FedOpt."""
    lr: float | None = Field(None, gt=0)
    """Step size η. By default 1 with ``momentum`` and Nesterov's, 0.01 with the others, to be tuned. Plain steps:
    ``momentum`` with ``betas = [0]``."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], ...] | None = None
    """Decay of the moments: β₁ and β₂ of ``adam`` and ``yogi``, by default [0.9, 0.99]; β₁ of the others, by default
    [0.9], [0] with ``adagrad``."""
    tau: float = Field(1e-3, gt=0)
    """τ, which is added to √v, and whose square v begins with: the smaller, the more adaptive."""
    cycle: int = Field(10, ge=1)
    """N of ``delayed-nesterov``: steps from one of its momentum to the next."""
    share: float = Field(0.0, ge=0, le=1)
    """c of ``delayed-nesterov``, at most 1/N: what the momentum counts in each step; the rest at a cycle's end."""
    only_for: ClassVar[Mapping[str, tuple[str, tuple[str, ...]]]] = {
        "lr": ("optimizer", PLAIN + ADAPTIVE),
        "betas": ("optimizer", ("adam", "yogi")),  # others have one of another size
        "tau": ("optimizer", ADAPTIVE),
        "cycle": ("optimizer", (DELAYED,)),
        "share": ("optimizer", (DELAYED,)),
    }

    def check(self, algorithm: Algorithm, doubling: Doubling, model: Model) -> None:
        """Raise UsageError where a key does not go with the optimiser, or this one with the method or the stages."""
        every = PLAIN + ADAPTIVE
        self.check_only_for(
            "server.", "optimizer", {"lr": every, "betas": every, "tau": ADAPTIVE, "cycle": DELAYED, "share": DELAYED}
        )
        if self.share * self.cycle > 1:
            raise refusal("server.share", f"at most 1/server.cycle = {1 / self.cycle:.3g}", self.share)
        default = BETAS[self.optimizer]
        if len(self.decays) != len(default):
            names = "β₁ and β₂" if len(default) == 2 else "β₁ alone"
            raise refusal("server.betas", f"{names} of '{self.optimizer}'", self.betas, default)
        if self.optimizer != "none" and algorithm.own_step:
            own = f"'none', since the server of algorithm.name = '{algorithm.name}' has steps of its own"
            raise refusal("server.optimizer", own, self.optimizer)
        if self.optimizer != "none" and not algorithm.shares_any(model):
            raise self.without_effect(algorithm)
        if self.optimizer != "none" and doubling.when == "gradient":
            why = "'none', since doubling.when = 'gradient' takes a round's change for a mean gradient"
            raise refusal("server.optimizer", why, self.optimizer, "doubling.when = 'plateau'")

    def without_effect(self, algorithm: Algorithm) -> UsageError:
        beside = f"algorithm.name = '{algorithm.name}', which shares none of the model's tensors"
        return no_meaning("server.optimizer", self.optimizer, beside)

    @property
    def adaptive(self) -> bool:
        """Whether each number has a step size of its own."""
        return self.optimizer in ADAPTIVE

    @property
    def decays(self) -> tuple[float, ...]:
        return BETAS[self.optimizer] if self.betas is None else self.betas

    @property
    def rate(self) -> float:
        """The step size η."""
        return self.lr or (0.01 if self.adaptive else 1.0)

    @property
    def second(self) -> float | None:
        """What the second moment begins with, v or D; None where there is none."""
        return self.tau**2 if self.adaptive else 0.0 if self.optimizer == DELAYED else None

    def stepped(
        self, change: Tensor, first: Tensor, second: Tensor | None, ends: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the step and the new moments of one tensor, where a cycle `ends` with it or does not.

        All are float64, `second` None where it is not kept.
        """
        beta = self.decays[0]
        if self.optimizer == DELAYED:
            assert second is not None
            second, share = second + change, self.share
            if ends:
                first, second = beta * first + second / self.cycle, torch.zeros_like(second)
                share = 1 - self.share * (self.cycle - 1)
            return self.rate * (change / self.cycle + share * beta * first), first, second
        if not self.adaptive:
            first = beta * first + change
            ahead = change + beta * first if self.optimizer == "nesterov" else first
            return self.rate * ahead, first, None
        assert second is not None
        first, square = beta * first + (1 - beta) * change, change.square()
        if self.optimizer == "adagrad":
            second = second + square
        elif self.optimizer == "adam":
            second = self.decays[1] * second + (1 - self.decays[1]) * square
        else:
            second = second - (1 - self.decays[1]) * square * (second - square).sign()
        return self.rate * first / (second.sqrt() + self.tau), first, second


def with_server_optimizer(algorithm: Algorithm, task: Task, server: ServerOptimizer) -> Algorithm:
    """Return the method whose server takes other steps; UsageError where it shares nothing of which they could be."""
    if server.optimizer == "none":
        return algorithm
    made = wrapped(algorithm, _Stepping, optimizer_of_server=server)
    if not _learnt(made, task):
        raise server.without_effect(algorithm)
    return made


class _Stepping(Wrapper):
    """The moments are in the tensors' own types, and advance in float64."""

    optimizer_of_server: ServerOptimizer

    def init_extras(self, task: Task) -> Extras:
        shared, rules = self.init_server(task), self.optimizer_of_server
        like = {name: shared[name] for name in _learnt(self, task)}
        moments = {M + name: torch.zeros_like(value) for name, value in like.items()}
        if rules.second is not None:
            moments |= {V + name: torch.full_like(value, rules.second) for name, value in like.items()}
        taken = dict.fromkeys(_counted(self, like), 0.0) if rules.optimizer == DELAYED else {}
        return {**super().init_extras(task), **moments, **taken}

    def step(self, task: Task, state: ServerState, sums: Sums) -> ServerState:
        moments = {name: value for name, value in state.extras.items() if name.startswith((M, V, TAKEN))}
        after = super().step(task, replace(state, extras=without(state.extras, moments)), sums)
        shared = dict(after.shared)
        names = [each.removeprefix(M) for each in moments if each.startswith(M)]
        ending = set[str]()
        for count, own in _counted(self, names).items() if self.optimizer_of_server.optimizer == DELAYED else ():
            came = any(name in sums and sums.weight(name) for name in own)
            moments[count] += float(came)
            ending |= own if came and moments[count] % self.optimizer_of_server.cycle == 0 else set()
        for name in names:
            ends = name in ending
            before, proposed, m, v = state.shared[name], after.shared[name], moments[M + name], moments.get(V + name)
            change, wide = proposed.double() - before.double(), None if v is None else v.double()
            step, first, second = self.optimizer_of_server.stepped(change, m.double(), wide, ends)
            idle = proposed == before
            stays: Tensor | None = idle  # which coordinates nobody has sent and the method leaves as they were
            if name in sums and sums.weight(name):
                holders = sums.holders(name)
                stays = None if holders is None else on_device(holders == 0, before.device) & idle
            shared[name] = _unless(stays, before, moved(before, step))
            if ends and stays is not None and v is not None:  # what came of it before in this cycle still counts
                stays = stays & (v == 0)
            moments[M + name] = _unless(stays, m, first.to(m))
            if v is not None and second is not None:
                moments[V + name] = _unless(stays, v, second.to(v))
        return replace(after, shared=shared, extras={**after.extras, **moments})


def _counted(method: Algorithm, names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the tensors whose steps are counted together, by the names of their counters: those of each fragment."""
    in_turn = {f"{TAKEN}.{number}": own for number, own in enumerate(method.in_turn)}
    return in_turn or {TAKEN: frozenset(names)}


def _unless(stays: Tensor | None, old: Tensor, new: Tensor) -> Tensor:
    return new if stays is None else new.where(~stays, old)


def _learnt(method: Algorithm, task: Task) -> list[str]:
    """Return the model's tensors that are shared and learnt so: not means of what is personal."""
    shared = method.init_server(task)
    own = method.personal(task) & method.init_client(task, 0).keys()  # a copy beside what is shared has another name
    return [name for names in task.layer_names() for name in names if name in shared and name not in own]
