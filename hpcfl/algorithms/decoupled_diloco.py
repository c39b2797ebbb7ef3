"""Decoupled DiLoCo: workers that never wait, merged fragment by fragment (Douillard et al., arXiv 2604.21428).

Worker m goes on from where it stands, whether its last visit counted or not: its model θ_m, its optimiser's moments and
its counters are its own. At the end of a visit it reports one fragment p (``[fragments]``) with the steps and the
samples, which stand for tokens, since that fragment was merged. With K reports (`participation.buffer`), and after a
`grace` or `slack`, the server merges what has come and takes its step (``[server]``):

    Δ_m = θ_m,p − Θ_p,   ω_m = samples² / steps,   Θ_p ← Θ_p + step(merge_m ω_m Δ_m).

Θ_p is the server's own at the merge, not the version that a visit began with. A fragment that was merged since a
worker's last visit began takes the place of its own when its next one begins, and its counters begin anew. ``merge``:

    mean    Σ ω_m Δ_m / Σ ω_m
    radial  (Σ ω_m |Δ_m| / Σ ω_m) · u/|u|,  u = Σ ω_m Δ_m/|Δ_m|,  tensor by tensor; of embeddings the mean.

No authors' code is known. Choices where notes of the paper are silent: directions that cancel (|u| ≤ 1e-6 Σ ω_m) are
merged by the mean; reports that come after others of their fragment have been merged count, unless they are older than
`participation.max_staleness`; a worker that reports twice before a merge counts twice, with what it has done by then
(`participation.once_per_version` lets it wait instead). A fragment that is merged while a visit goes on reaches the
worker at its end. `participation.slack` is the paper's adaptive grace, by each step's own seconds in place of means of
past ones.

With rounds that wait for all this is Streaming DiLoCo without overlap (arXiv 2501.18512); with one fragment, ``merge =
"mean"`` and ``weights = "uniform"`` it is DiLoCo, to the bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from hpcfl.algorithms.base import (
    Block,
    By,
    Client,
    IteratedReduction,
    Message,
    Participation,
    Queries,
    Sums,
    Task,
    Visits,
)
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.local_sgd import some
from hpcfl.base.device_copy import on_device, on_host
from hpcfl.base.errors import refusal
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.types import State
from hpcfl.learning.optim import column
from hpcfl.sums.message import moved

MERGED, OWN, SEEN, STEPS, SAMPLES = "merged:", "own:", "seen:", "steps:", "samples:"  # a tensor's name follows
NORM, CANCEL = "norm:", 1e-6


class DecoupledDiloco(FedAvg):
    """Workers go on with models of their own, of which a fragment is merged when some have reported it."""

    snapshots: ClassVar[bool] = False
    goes_on: ClassVar[bool] = True
    keeps_sent: ClassVar[bool] = True
    name: Literal["decoupled_diloco"] = "decoupled_diloco"  # type: ignore[assignment]
    optimizer: Literal["sgd", "adam", "adamw"] = "adamw"
    """The local optimiser; its memory stays with the worker."""
    persist_optimizer: Literal[True] = True
    """The optimiser's memory is the worker's own."""
    epochs: int = Field(0, ge=0, le=0)
    """No passes: workers count steps."""
    steps: int = Field(10, ge=1)
    """Local steps from one report to the next; H of the paper is this times the number of fragments."""
    weights: Literal["tokens", "samples", "uniform"] = "tokens"  # type: ignore[assignment]
    """Weight ω of a report. ``tokens``: samples² over steps, both since the fragment was merged. ``samples``: the
    worker's. ``uniform``: 1."""
    merge: Literal["radial", "mean"] = "radial"
    """How changes are merged, tensor by tensor. ``radial``: the mean of their lengths along the mean of their
    directions, of embeddings the mean. ``mean``: the mean."""

    def check(self, participation: Participation, known: bool = True) -> None:
        super().check(participation, known)
        with_it = f"with algorithm.name = '{self.name}', whose workers go on"
        if participation.close not in ("all", "arrivals"):
            raise refusal("participation.close", f"'arrivals' or 'all' {with_it}", participation.close, "arrivals")
        for key, good in (("stop_stale", False), ("max_seconds", None)):
            if (value := getattr(participation, key)) != good:
                raise refusal(f"participation.{key}", f"not to be set {with_it}", value)

    @property
    def iterates(self) -> bool:
        return True

    def iterated_reduction(self, task: Task) -> IteratedReduction:
        names = task.initial().keys()
        blocks = {name: block for group in self.layout(task) for name, block in group.items() if name in names}
        return Merge(blocks, blocks.keys() - task.embeddings if self.merge == "radial" else ())

    def init_server(self, task: Task) -> State:
        merged = {MERGED + name: torch.zeros(1, device=task.device) for name in task.initial()}
        return super().init_server(task) | merged

    def init_client(self, task: Task, client: int) -> State:
        kept = super().init_client(task, client)
        for name, value in task.initial().items():
            never, nothing = (torch.full((), each, dtype=torch.float64, device=task.device) for each in (-1, 0))
            kept |= {OWN + name: value, SEEN + name: never, STEPS + name: nothing, SAMPLES + name: nothing}
        return kept

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        served, after = task.replicate(some(shared, task.initial().keys()), visits), dict(personal)
        taken = self.taken(visits)
        used = taken * np.minimum(self.batch or visits.samples, visits.samples)
        steps, samples = (on_device(torch.from_numpy(each), task.device) for each in (taken, used))
        params = dict[str, Tensor]()
        for name, value in served.items():
            newer = shared[MERGED + name] > personal[SEEN + name]  # [c]
            params[name] = torch.where(column(newer, value), value, personal[OWN + name])
            after[SEEN + name] = shared[MERGED + name].to(torch.float64).expand(len(taken))
            after[STEPS + name] = torch.where(newer, 0.0, personal[STEPS + name]) + steps
            after[SAMPLES + name] = torch.where(newer, 0.0, personal[SAMPLES + name]) + samples
        moments = some(personal, self.optimiser.init(served).keys())
        by: By = "uniform" if self.weights == "uniform" else "samples"
        weights = dict.fromkeys(served, visits.weights(by))
        if self.weights == "tokens":
            each = [after[SAMPLES + name].square() / after[STEPS + name] for name in served]
            weights = dict(zip(served, on_host([torch.stack(each)])[0]))
        yield {"loss": (self.train(task, shared, params, moments, visits), visits.weights(by))}
        for names in reversed(task.layer_names()):
            yield {name: (params[name], weights[name]) for name in names}
        return after | moments | {OWN + name: value for name, value in params.items()}

    def server(self, task: Task, shared: State, sums: Sums) -> State:
        after = dict(shared)
        for name in task.initial():
            if sums.weight(name):
                change = sums.iterated.get(name)
                if change is None:  # directions cancel
                    change = sums.mean(name) - shared[name].double()
                after[name], after[MERGED + name] = moved(shared[name], change), shared[MERGED + name] + 1
        return after

    def model(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        return super().model(task, some(shared, task.initial().keys()), personal, visits)


class Merge(IteratedReduction):
    """Means of the changes Δ_m = θ_m − Θ, or of their directions and lengths, of those tensors that are `radial`."""

    def __init__(self, blocks: Mapping[str, Block], radial: Collection[str]) -> None:
        self.kept, self.radial = frozenset(blocks), sorted(radial)
        self.layout = ({**blocks, **{NORM + name: Block((), torch.float64) for name in self.radial}},)

    def query(self, shared: State) -> Queries:
        sums = yield some(shared, self.kept)
        found = {name: sums.mean(name) for name in self.kept if sums.weight(name)}
        for name in self.radial:
            if name in found and (length := float(found[name].norm())) > CANCEL:
                found[name] *= sums.mean(NORM + name) / length
            else:
                found.pop(name, None)
        return found

    def response(self, query: State, message: Message) -> Message:
        found = {}
        for name, (value, weight) in message.items():
            change = value - query[name]
            if name in self.radial:
                norms = torch.stack([row.double().norm() for row in change])  # each by itself, in either clock
                change = change / column(norms.clamp(min=torch.finfo(change.dtype).tiny), change).to(change.dtype)
                found[NORM + name] = norms, weight
            found[name] = change, weight
        return found
