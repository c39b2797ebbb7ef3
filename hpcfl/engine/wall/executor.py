"""The clients that live on one rank: their personal state, and their visits in real time. Knows no MPI."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hpcfl.base.types import Floats, State
from hpcfl.comm.guard import METRIC, NOBODY, norms
from hpcfl.comm.message import Message
from hpcfl.engine.wall.framing import REJECTED, Group
from hpcfl.engine.wall.staging import Dock, Shipment
from hpcfl.learning.batches import RoundClosed, Visits
from hpcfl.schedule.plan import Attempt

if TYPE_CHECKING:
    from hpcfl.comm.placement import Chunk
    from hpcfl.comm.transport import Personal
    from hpcfl.engine.job import Job

Put = Callable[[Shipment], None]


class Host:
    """One rank's clients, each a chunk of its own.

    A client's new personal state is provisional: it replaces the old one when the server acknowledges that the visit
    counted, and block by block where only some layers did.

    Parameters
    ----------
    direct : bool
        MPI reads the memory of the GPU that computes.
    """

    def __init__(self, job: Job, chunks: Sequence[Chunk], personal: Personal, direct: bool = False) -> None:
        self.job = job
        self.states = {int(chunk.clients[0]): personal[chunk.number] for chunk in chunks}
        self.dock = Dock(job.task.device, job.lean, direct)
        self._new: dict[int, State] = {}

    def warm(self) -> None:
        """Do one step for nothing, see `Task.warm_up`."""
        client = next(iter(self.states))
        plan = self.job.planner.plan(self.job.planner.attempt(0, cohort=np.array([client])))
        self.job.task.warm_up(self.job.visits(plan, np.zeros(1, dtype=np.int64), Event()))

    def placed(self, shared: State) -> State:
        """Return the shared state on the device that computes."""
        return {name: value.to(self.job.task.device) for name, value in shared.items()}

    def visits(
        self,
        attempt: Attempt,
        shared: State,
        slots: Sequence[int],
        wire: Sequence[Group],
        seat: int,
        over: Event,
        put: Put,
    ) -> None:
        """Compute visits one after the other (−1: nobody's) and put the groups of each; stop when it is `over`."""
        start = time.monotonic()
        plan = self.job.planner.plan(attempt)
        seconds = self.job.config.speed.enforced(attempt)
        state = self.placed(shared)
        for client in slots:
            if over.is_set():
                return
            if client < 0:
                for group in wire:
                    put(self.dock.nothing(group))
                continue
            row = np.searchsorted(attempt.cohort, [client])
            visits = self.job.visits(plan, row, over)
            pace = Pace(self.job, float(seconds[row[0]]), over, start)
            sender = Sender(wire, seat, self.dock, pace, put, self.job.planner.whole, partial(self.computed, client))
            self._visit(client, state, visits, sender)
            start = time.monotonic()

    def computed(self, client: int) -> int:
        """Return how many gradients a client's visit has computed so far."""
        return self.job.task.oracle_calls[client]

    def _visit(self, client: int, shared: State, visits: Visits, sender: Sender) -> None:
        own = {name: value.clone() for name, value in self.states[client].items()}
        self.job.task.oracle_calls.clear()
        work = self.job.algorithm.client(self.job.task, shared, own, visits)
        try:
            while True:
                sender.take(next(work))
                if sender.pace.over.is_set() and self.job.planner.whole:
                    return
        except StopIteration as end:
            self._new[client] = end.value
        except RoundClosed:
            return
        sender.finish()

    def acknowledge(self, counted: Mapping[int, int]) -> None:
        """Take over what counted: for each client the first layer that did, L + 1 for none; 0: nothing is known yet."""
        layers = self.job.algorithm.layers(self.job.task)
        level = {name: number for number, names in enumerate(layers, start=1) for name in names}
        for client, depth in counted.items():
            if depth == 0 or client not in self._new:
                continue
            new = self._new.pop(client)
            for name, value in self.states[client].items():
                if level.get(name, 1) >= depth:
                    value.copy_(new[name])

    def scores(self, round_: int, shared: State) -> Floats:
        """Return the clients' scores, ``[scores, h]``, see `Job.scores`."""
        found = np.zeros((self.job.scores, len(self.states)))
        for column, (client, personal) in enumerate(self.states.items()):
            found[:, [column]] = self.job.scored(round_, shared, personal, np.array([client]))
        return found

    def forget(self) -> None:
        """Let go of the clients, their state and their samples."""
        self.states, self._new = {}, {}
        self.job.task.release_data()

    def personal(self) -> dict[int, State]:
        """Return the acknowledged personal state, ``{client: {name: […]}}``."""
        return {client: {name: value[0] for name, value in state.items()} for client, state in self.states.items()}


class Pace:
    """Slows a visit down to the seconds that the speed model has drawn for it.

    Parameters
    ----------
    seconds : float
        What a whole visit shall take; 0 for as fast as it goes.
    start : float
        When the visit began (seconds of the monotonic clock).
    """

    def __init__(self, job: Job, seconds: float, over: Event, start: float) -> None:
        self.work_fractions = job.planner.work_fractions[job.layers.of_groups - 1]
        self.busy = job.config.speed.enforce == "busy"
        self.target, self.over, self.start = seconds, over, start

    def seconds(self) -> float:
        """Return the seconds since the visit began."""
        return time.monotonic() - self.start

    def wait(self, number: int) -> None:
        """Return when group `number` may be ready, or when the round is over."""
        ready = self.start + self.work_fractions[number] * self.target
        if not self.busy:
            self.over.wait(max(0.0, ready - time.monotonic()))
            return
        work = torch.ones(32, 32)
        while time.monotonic() < ready and not self.over.is_set():
            work = torch.mm(work, work).clamp_(max=1.0)


class Sender:
    """Gathers the blocks of a visit into groups and puts each group when it is ready.

    Where a visit is whole or nothing, all groups wait until the visit has ended: by then the client's new state is
    there for the acknowledgement, which may come as soon as the last group has left.

    Parameters
    ----------
    gradients : callable
        Returns how many gradients the visit has computed so far.
    """

    def __init__(
        self,
        wire: Sequence[Group],
        seat: int,
        dock: Dock,
        pace: Pace,
        put: Put,
        whole: bool,
        gradients: Callable[[], int] = lambda: 0,
    ) -> None:
        self.wire, self.seat, self.dock, self.pace, self.put, self.whole = wire, seat, dock, pace, put, whole
        self.gradients = gradients
        self.place = {name: number for number, group in enumerate(wire) for name in group.blocks}
        self.number, self.bad = 0, NOBODY
        self.held: list[Shipment] = []
        self.versions: dict[str, tuple[Tensor, int]] = {}
        self._begin()

    def _reject(self, name: str) -> None:
        """Let the visit count no more, from this block's group on or as a whole; the loss is named last."""
        if self.bad == NOBODY or (self.whole and self.bad == self.place.get(METRIC) and name != METRIC):
            self.bad = self.place[name]

    def take(self, message: Message) -> None:
        """Put the blocks of a message into their groups; a group leaves when all of it is there.

        Raises
        ------
        ValueError
            If a block comes after a block of a later group.
        """
        for name, (value, weight) in message.items():
            self.versions[name] = value, value._version
            if self.place[name] < self.number:
                raise ValueError(f"block '{name}' comes after its group has left: yield blocks in the layout's order")
            while self.number < self.place[name]:
                self._leave()
            self.dock.write(self.wire[self.number], self.shipment, self.seat, name, value[0], float(weight[0]))
            self.missing.discard(name)
            if not np.isfinite(norms(value[:1])[0]):
                self._reject(name)
            if not self.missing:
                self._leave()

    def finish(self) -> None:
        """Let the rest leave: blocks that the visit has not sent have weight 0.

        Raises
        ------
        ValueError
            If a block was changed after it was yielded: it may have been sent from where it was.
        """
        for name, (value, version) in self.versions.items():
            if value._version != version:
                raise ValueError(f"block '{name}' was changed after it was yielded: yield a tensor that stays as it is")
        while self.number < len(self.wire):
            self._leave()
        if self.whole and self.bad != NOBODY:
            self.held = [self._rejected(number) for number in range(len(self.wire))]
        if self.whole:
            self._put()

    def _begin(self) -> None:
        group = self.wire[self.number]
        self.shipment, self.missing = self.dock.open(group), set(group.blocks)

    def _leave(self) -> None:
        self.pace.wait(self.number)
        if self.bad == NOBODY:
            self.wire[self.number].sign(self.shipment.parcel, self.seat, self.pace.seconds(), self.gradients())
            self.held.append(self.dock.close(self.wire[self.number], self.shipment))
        else:
            self.held.append(self._rejected(self.number))
        self.number += 1
        if self.number < len(self.wire):
            self._begin()
        if not self.whole:
            self._put()

    def _rejected(self, number: int) -> Shipment:
        """Return a group of which nothing counts; that by which the visit was rejected says so."""
        group = self.wire[number]
        shipment = self.dock.open(group)
        if number == self.bad:
            group.sign(shipment.parcel, self.seat, self.pace.seconds(), self.gradients(), REJECTED)
        return self.dock.close(group, shipment)

    def _put(self) -> None:
        """Let what is held leave, unless the round is over."""
        if not self.pace.over.is_set():
            for shipment in self.held:
                self.put(shipment)
            self.held = []
