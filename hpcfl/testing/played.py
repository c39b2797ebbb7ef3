"""Rounds in memory, and what is judged of them: what methods are easily wrong about, each in one line."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import pytest
import torch
from torch import Tensor

from hpcfl.algorithms.wrapped import Wrapper, changed, wrapped
from hpcfl.base.types import Computing, State
from hpcfl.config import Config
from hpcfl.engine.border import differing, like, misfit
from hpcfl.engine.job import Job
from hpcfl.engine.loop import step
from hpcfl.engine.record import Record
from hpcfl.engine.simulated import Simulated
from hpcfl.mpi.transport import Transport

if TYPE_CHECKING:
    from hpcfl.algorithms.base import Client, ServerState
    from hpcfl.learning.batches import Visits
    from hpcfl.learning.task import Task
    from hpcfl.sums.message import Message, Sums

Figures = dict[tuple[int, str], Tensor]
"""Numbers by the client whose they are and their name; of client −1 the server's."""


class Played:
    """Some rounds of a run in one process, without a run folder; `wrapper` stands around its method."""

    def __init__(self, config: Config, computing: Computing | None = None, wrapper: type | None = None) -> None:
        job = Job.of(config, None, 1, computing=computing)
        self.job = job if wrapper is None else replace(job, algorithm=wrapped(job.algorithm, wrapper))
        self.now, self.rejected = self.job.begin(0), 0
        self._rounds = Simulated(self.job, Transport(), 0)

    def play(self, rounds: int) -> Played:
        for _ in range(rounds):
            record = Record.open()
            plan, record.sums = self._rounds.exchange(self.now, record)
            step(self.job, self.now, record, plan)
            self.rejected += len(record.rejected)
            self.now.round += 1
        return self

    @property
    def state(self) -> Figures:
        """What is shared, what never leaves the server, and what each client keeps; copies."""
        server = self.now.shared | {name: torch.as_tensor(value) for name, value in self.now.extras.items()}
        found = {(-1, name): value.clone() for name, value in server.items()}
        for chunk in self.job.chunks:
            for name, values in self.now.personal[chunk.number].items():
                found |= {(client, name): own.clone() for client, own in zip(chunk.clients.tolist(), values)}
        return found

    @property
    def scores(self) -> Figures:
        """What each client's test gives: the sums of loss and metrics."""
        found: Figures = {}
        for chunk in self.job.chunks:
            sums = self.job.scored(self.now.round, self.now.shared, [(chunk.clients, self.now.personal[chunk.number])])[
                0
            ]
            found |= {(client, "test"): torch.from_numpy(own) for client, own in zip(chunk.clients.tolist(), sums.T)}
        return found


def apart(one: Figures, other: Figures, close: float = 0.0) -> str:
    """Return which number differs most between two runs, and by how much; "" where none does by more than `close`.

    What differs is relative to numbers above 1.
    """
    worst, line = close, ""
    for (client, name), value in one.items():
        wanted = other[client, name].double()
        gap = ((value.double() - wanted).abs() / wanted.abs().clamp(min=1)).masked_fill(value == wanted, 0.0)
        most = float(gap.nan_to_num(torch.inf).max()) if gap.numel() else 0.0
        if most > worst:
            worst, line = most, f"{whose(client, name)} differs by {most:.2g}"
    return line


def whose(client: int, name: str) -> str:
    return f"the server's '{name}'" if client < 0 else f"'{name}' of client {client}"


class Watched(Wrapper):
    """A method whose messages and states are judged as they come."""

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        blocks = {name: block for group in self.layout(task) for name, block in group.items()}
        served, kept = copied(shared), like(personal)

        def judged(message: Message) -> Message:
            for name, part in message.items():
                if wrong := misfit(blocks.get(name), part, len(visits.clients)):
                    failed(self.name, "client", f"block '{name}': {wrong}")
            return message

        after = yield from changed(super().client(task, shared, personal, visits), judged)
        unchanged(self.name, "client", served, shared)
        if wrong := differing(kept, like(after)):
            failed(self.name, "client", f"personal state {wrong}")
        return after

    def step(self, task: Task, state: ServerState, sums: Sums) -> ServerState:
        served = copied(state.shared)
        after = super().step(task, state, sums)
        unchanged(self.name, "server", served, state.shared)
        if wrong := differing(like(served), like(after.shared)):
            failed(self.name, "server", f"shared state {wrong}")
        return after

    def model(self, task: Task, shared: State, personal: State, visits: Visits) -> State:
        served, kept = copied(shared), copied(personal)
        params = super().model(task, shared, personal, visits)
        unchanged(self.name, "model", served, shared)
        unchanged(self.name, "model", kept, personal)
        return params


def copied(state: State) -> State:
    return {name: value.clone() for name, value in state.items()}


def unchanged(method: str, function: str, before: State, after: State) -> None:
    """Fail where a state that a function was given is no more what it was."""
    for name, value in before.items():
        if after.get(name) is None or not torch.equal(value, after[name]):
            failed(method, function, f"changes '{name}' that it is given in place: clone it first")


def failed(method: str, function: str, what: str) -> NoReturn:
    pytest.fail(f"{method}.{function}: {what}", pytrace=False)
