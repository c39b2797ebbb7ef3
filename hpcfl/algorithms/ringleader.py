"""Ringleader ASGD: asynchronous SGD of clients whose data differ (Maranjyan & Richtárik, ICLR 2026, arXiv 2509.22860).

Visits are single gradients. The server keeps the sum G_i of each client's and their number b_i, and a second table of
both, for the next cycle. First w stays, and each gradient goes into the tables, until all clients have sent one. Then a
client's next gradient goes in too, and ``w ← w − γ/n Σ_j G_j/b_j``: once for each of the n clients, the last one to
arrive first. What comes again from a client whose step is done goes into the second table, with which the next cycle
begins. A client goes on at once, at the newest w. A gradient that is rejected is lost.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from hpcfl.algorithms.base import By, Extras, Participation, ServerState, Sums, Task
from hpcfl.algorithms.ringmaster import Ringmaster
from hpcfl.base.errors import UsageError, refusal
from hpcfl.base.lazy import torch
from hpcfl.base.types import State
from hpcfl.sums.message import moved

COUNT, DONE = "count", "done"
NOW, NEXT = "now:", "next:"  # tables of this cycle and the next one, [clients, …]; NAME or COUNT follows


class Ringleader(Ringmaster):
    """Asynchronous SGD: steps along the mean over clients of the means of each one's gradients, in two phases."""

    own_step: ClassVar[bool] = True
    keeps_sent: ClassVar[bool] = True
    needs_members: ClassVar[str] = "a cycle needs all clients"
    name: Literal["ringleader"] = "ringleader"  # type: ignore[assignment]
    decay: float = Field(0.0, ge=0, le=0)
    """Gradients of different steps are added, whose sizes must be alike."""

    def check(self, participation: Participation, known: bool = True) -> None:
        super().check(participation, known)
        for key, good in (("concurrency", None), ("max_staleness", None), ("max_seconds", None)):
            if (value := getattr(participation, key)) != good:
                why = f"not to be set with algorithm.name = '{self.name}', which needs all clients"
                raise refusal(f"participation.{key}", why, value)

    def mean_weights(self) -> By:
        raise UsageError(f"weighting.correct: algorithm.name = '{self.name}' lets clients count alike: expected 'none'")

    def collects(self, before: Extras, after: Extras) -> bool:
        return bool((after[NOW + COUNT] > 0).sum() > (before[NOW + COUNT] > 0).sum())

    def init_extras(self, task: Task) -> Extras:
        model, clients = task.initial(), task.federation.clients
        tables = {name: value.new_zeros(clients, *value.shape) for name, value in model.items()}
        tables[COUNT] = torch.zeros(clients, dtype=torch.float64)
        begun = {table + name: value.clone() for table in (NOW, NEXT) for name, value in tables.items()}
        return {**begun, DONE: torch.zeros(clients, dtype=torch.float64)}

    def step(self, task: Task, state: ServerState, sums: Sums) -> ServerState:
        if not sums.weight("loss"):  # a deadline has ended the round, or the gradient was rejected
            return state
        assert sums.arrived is not None
        kept: State = dict(state.extras)
        client, shared = int(sums.arrived.clients[0]), dict(state.shared)
        table = NEXT if kept[DONE][client] else NOW
        kept |= {table + name: kept[table + name].clone() for name in (*shared, COUNT)} | {DONE: kept[DONE].clone()}
        kept[table + COUNT][client] += 1
        for name in shared:
            kept[table + name][client] += sums.mean(name).to(kept[table + name])
        if table == NOW and (kept[NOW + COUNT] > 0).all():
            for name, value in shared.items():
                means = kept[NOW + name].double() / kept[NOW + COUNT].view(-1, *[1] * value.dim()).to(value.device)
                shared[name] = moved(value, means.mean(0))
            kept[DONE][client] = 1
            if kept[DONE].all():
                for name in (*shared, COUNT):
                    kept[NOW + name], kept[NEXT + name] = kept[NEXT + name], torch.zeros_like(kept[NEXT + name])
                kept[DONE].zero_()
        return replace(state, shared=shared, extras=kept)
