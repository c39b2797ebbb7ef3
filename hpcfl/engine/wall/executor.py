"""The clients that live on one rank: their personal state, and their visits in real time. Knows no MPI."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from threading import Event
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcfl.base.transfer import on_device
from hpcfl.base.types import Floats, State
from hpcfl.comm.guard import METRIC, NO_GROUP, norms
from hpcfl.comm.message import Message
from hpcfl.comm.placement import Chunk
from hpcfl.comm.transport import Personal
from hpcfl.engine.job import Job
from hpcfl.engine.wall.framing import REJECTED, SENT, FrameFormat, StagedFrame, Staging
from hpcfl.learning.batches import RoundClosed, Visits
from hpcfl.schedule.plan import Attempt

Put = Callable[[StagedFrame], None]
SWITCH_SECONDS = 0.0001  # how long the main thread waits for Python's lock: by itself Python lets it wait for 5 ms


class Worker:
    """A second thread that does one piece of work at a time and hands over results as they become ready.

    So finished layers leave while a long operation goes on: torch gives up Python's global lock inside its operations.
    Work that holds the lock delays this rank only.
    """

    def __init__(self) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        self.busy = False
        self._work: queue.SimpleQueue[Callable[[Callable[[Any], None]], None]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # a daemon: a rank that leaves with an error does not wait for an operation that may take for ever
        threading.Thread(target=self._loop, name="hpcfl worker", daemon=True).start()

    def start(self, work: Callable[[Callable[[Any], None]], None]) -> None:
        """Begin ``work(put)``; what it puts comes out of `take`."""
        self.busy = True
        self._work.put(work)

    def take(self, timeout: float) -> Any:
        """Return the next result; None after `timeout` seconds or where the work has ended; raise what it raised."""
        try:
            kind, result = self._results.get(timeout=timeout) if timeout > 0 else self._results.get_nowait()
        except queue.Empty:
            return None
        if kind == "put":
            return result
        self.busy = False
        if result is not None:
            raise result
        return None

    def _loop(self) -> None:
        while True:
            work = self._work.get()
            error = None
            try:
                work(lambda item: self._results.put(("put", item)))
            except BaseException as raised:  # whatever it is, the main thread must know
                error = raised
            self._results.put(("end", error))


class Executor:
    """One rank's clients, each a chunk of its own.

    A client's new personal state is provisional: it replaces the old one when the server acknowledges that the visit
    counted, and block by block where only some layers did. `direct`: MPI reads the memory of the GPU that computes.
    """

    def __init__(self, job: Job, chunks: Sequence[Chunk], personal: Personal, direct: bool = False) -> None:
        self.job = job
        self.states = {int(chunk.clients[0]): personal[chunk.number] for chunk in chunks}
        self.staging = Staging(job.task.device, direct)
        self._new: dict[int, State] = {}

    def warm(self) -> None:
        """Do one step for nothing, see `Task.warm_up`."""
        client = next(iter(self.states))
        plan = self.job.planner.plan(self.job.planner.attempt(0, cohort=np.array([client])))
        self.job.task.warm_up(self.job.visits(plan, np.zeros(1, dtype=np.int64), Event()))

    def placed(self, shared: State) -> State:
        """Return the shared state on the device that computes."""
        return {name: on_device(value, self.job.task.device) for name, value in shared.items()}

    def visits(
        self,
        attempt: Attempt,
        shared: State,
        clients: Sequence[int],
        formats: Sequence[FrameFormat],
        local_rank: int,
        over: Event,
        put: Put,
    ) -> None:
        """Compute visits one after the other (−1: nobody's) and put the frames of each; stop when it is `over`."""
        start = time.monotonic()
        plan = self.job.planner.plan(attempt)
        seconds = self.job.config.speed.enforced(attempt)
        state = self.placed(shared)
        for client in clients:
            if over.is_set():
                return
            if client < 0:
                for group in formats:
                    put(self.staging.nothing(group))
                continue
            row = np.searchsorted(attempt.cohort, [client])
            visits = self.job.visits(plan, row, over)
            pace = Pace(self.job, float(seconds[row[0]]), over, start)
            gradients = partial(self._gradients, client)
            sender = Sender(formats, local_rank, self.staging, pace, put, self.job.planner.whole, gradients)
            self._visit(client, state, visits, sender)
            start = time.monotonic()

    def _gradients(self, client: int) -> int:
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
        for client, depth in counted.items():
            if depth == 0 or client not in self._new:
                continue
            new = self._new.pop(client)
            for name, value in self.states[client].items():
                if self.job.layers.of.get(name, 1) >= depth:
                    value.copy_(new[name])

    def scores(self, round_: int, shared: State) -> Floats:
        """Return the clients' scores, ``[scores, h]``, see `Job.scores`."""
        sums = np.zeros((self.job.scores, len(self.states)))
        for column, (client, personal) in enumerate(self.states.items()):
            sums[:, [column]] = self.job.scored(round_, shared, personal, np.array([client]))
        return sums

    def forget(self) -> None:
        """Let go of the clients, their state and their samples."""
        self.states, self._new = {}, {}
        self.job.task.release_data()

    def personal(self) -> dict[int, State]:
        """Return the acknowledged personal state, ``{client: {name: […]}}``."""
        return {client: {name: value[0] for name, value in state.items()} for client, state in self.states.items()}


class Pace:
    """Slows a visit, begun at `start`, down to the seconds that the speed model has drawn; 0: as fast as it goes."""

    def __init__(self, job: Job, seconds: float, over: Event, start: float) -> None:
        self.work_fractions = job.planner.work_fractions[job.layers.of_groups - 1]
        self.busy = job.config.speed.enforce == "busy"
        self.target, self.over, self.start = seconds, over, start

    def seconds(self) -> float:
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
    """Gathers the blocks of a visit into frames and puts each frame when it is ready.

    Where a visit is whole or nothing, all frames wait until the visit has ended: by then the client's new state is
    there for the acknowledgement, which may come as soon as the last frame has left. `gradients` returns how many the
    visit has computed so far.
    """

    def __init__(
        self,
        formats: Sequence[FrameFormat],
        local_rank: int,
        staging: Staging,
        pace: Pace,
        put: Put,
        whole: bool,
        gradients: Callable[[], int] = lambda: 0,
    ) -> None:
        self.formats, self.local_rank, self.staging, self.pace = formats, local_rank, staging, pace
        self.put, self.whole, self.gradients = put, whole, gradients
        self.group = {name: number for number, group in enumerate(formats) for name in group.blocks}
        self.number, self.bad = 0, NO_GROUP
        self.ready: list[StagedFrame] = []
        self.versions: dict[str, tuple[Tensor, int]] = {}
        self._begin()

    def take(self, message: Message) -> None:
        """Put the blocks of a message into their frames; a frame leaves when all of it is there."""
        for name, (value, weight) in message.items():
            self.versions[name] = value, value._version
            if self.group[name] < self.number:
                raise ValueError(f"block '{name}' comes after its group has left: yield blocks in the layout's order")
            while self.number < self.group[name]:
                self._leave()
            self.staging.write(self.staged, self.local_rank, name, value[0], float(weight[0]))
            self.missing.discard(name)
            if not self.staging.far and not np.isfinite(norms(value[:1])[0]):
                self._reject(name)
            if not self.missing:
                self._leave()

    def finish(self) -> None:
        """Let the rest leave: blocks that the visit has not sent have weight 0."""
        for name, (value, version) in self.versions.items():
            if value._version != version:  # it may have been sent from where it was
                raise ValueError(f"block '{name}' was changed after it was yielded: yield a tensor that stays as it is")
        while self.number < len(self.formats):
            self._leave()
        for staged in self.ready:  # where a visit is whole or nothing
            staged.wait()
        if self.whole and self.bad != NO_GROUP:
            self.ready = [self._rejected(number) for number in range(len(self.formats))]
        if self.whole:
            self._put()

    def _begin(self) -> None:
        if self.number < len(self.formats):
            self.staged = self.staging.open(self.formats[self.number])
            self.missing = set(self.staged.format.blocks)

    def _leave(self) -> None:
        self.pace.wait(self.number)
        if self.bad == NO_GROUP:
            self._sign(self.staged)
            self.staged.judge = partial(self._judge, self.number)
            self.ready.append(self.staging.close(self.staged))
        else:
            self.ready.append(self._rejected(self.number))
        self.number += 1
        self._begin()
        if not self.whole:
            self._put()

    def _put(self) -> None:
        """Let what is ready leave, unless the round is over."""
        if not self.pace.over.is_set():
            for staged in self.ready:
                self.put(staged)
            self.ready = []

    def _judge(self, number: int, staged: StagedFrame) -> None:
        """Take out of a frame from a device what does not count, now that its norms are known: in the main thread."""
        for name, norm in staged.norms.items():
            if not isfinite(norm):
                self._reject(name)
        if self.bad != NO_GROUP and self.staging.far and not self.whole:
            staged.parts = self._rejected(number).parts

    def _reject(self, name: str) -> None:
        """Let the visit count no more, from this block's group on or as a whole; the loss is named last."""
        if self.bad == NO_GROUP or (self.whole and self.bad == self.group.get(METRIC) and name != METRIC):
            self.bad = self.group[name]

    def _rejected(self, number: int) -> StagedFrame:
        """Return a frame of which nothing counts; that by which the visit was rejected says so."""
        staged = self.staging.open(self.formats[number])
        if number == self.bad:
            self._sign(staged, REJECTED)
        return self.staging.close(staged)

    def _sign(self, staged: StagedFrame, flag: float = SENT) -> None:
        staged.format.sign(staged.parts, self.local_rank, self.pace.seconds(), self.gradients(), flag)
