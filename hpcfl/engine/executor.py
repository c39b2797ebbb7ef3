"""The clients that live on one rank: their personal state, and their visits in real time. Knows no MPI."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

import numpy as np

from hpcfl.algorithms.base import Client
from hpcfl.base.blame import blaming
from hpcfl.base.device_copy import on_device
from hpcfl.base.lazy import torch
from hpcfl.base.types import Floats, State
from hpcfl.engine.chunk_batches import Part
from hpcfl.engine.job import Job, stacked
from hpcfl.engine.pace import LayerSender, Pace, Put, Sender, StepClock, SumSender, WholeSender
from hpcfl.engine.uneven import drained
from hpcfl.learning.batches import RoundClosed, Training, Visits
from hpcfl.mpi.placement import Chunk, Turn
from hpcfl.mpi.transport import Personal
from hpcfl.schedule.plan import Attempt, Plan, Timeline
from hpcfl.sums.frames import StagedFrame, Staging, VisitFormats

DEPTH_BITS = 16
SPARE_SECONDS, SPARE_SHARE = 0.02, 0.05
"""What a visit that stops by the clock leaves for sending, beside twice what that took last.

So many seconds, or a share of the time that the round is given.
"""
SWITCH_SECONDS = 0.0001  # how long the main thread waits for Python's lock: by itself Python lets it wait for 5 ms


def acknowledgment(round: int, attempt: int, depth: Any = 0) -> Any:
    """Return in one number which visit this is about, and the first layer of it that counted."""
    return (round << 20 | attempt) << DEPTH_BITS | depth


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
        self._next: Any = None  # the one that `wait` has seen
        # a daemon: a rank that leaves with an error does not wait for an operation that may take for ever
        threading.Thread(target=self._loop, name="hpcfl worker", daemon=True).start()

    def start(self, work: Callable[[Callable[[Any], None]], None]) -> None:
        """Begin ``work(put)``; what it puts comes out of `take`."""
        self.busy = True
        self._work.put(work)

    def wait(self, seconds: float) -> None:
        """Return when there is a result, or after so many seconds."""
        if self._next is None:
            with suppress(queue.Empty):
                self._next = self._results.get(timeout=seconds) if seconds > 0 else self._results.get_nowait()

    def take(self, timeout: float) -> Any:
        """Return the next result; None after `timeout` seconds or where the work has ended; raise what it raised."""
        self.wait(timeout)
        if self._next is None:
            return None
        (kind, result), self._next = self._next, None
        if kind == "put":
            return result
        self.busy = False
        if result is not None:
            raise result
        return None

    def over(self, take: Callable[[Any], object] = lambda result: None) -> bool:
        """Take the results that there are; True once the work has ended."""
        while self.busy and (found := self.take(0)) is not None:
            take(found)
        return not self.busy

    def _loop(self) -> None:
        while True:
            work = self._work.get()
            error = None
            try:
                work(lambda item: self._results.put(("put", item)))
            except BaseException as raised:  # whatever it is, the main thread must know
                error = raised
            self._results.put(("end", error))


class UnderWay:
    """A visit that may be sent by either thread: as it ends, or the last snapshot of it. Who claims it first, does."""

    def __init__(self, number: int) -> None:
        self.number, self.snapshot = number, Snapshot()
        self._claimed = threading.Lock()  # never released

    def claim(self) -> bool:
        return self._claimed.acquire(blocking=False)


@dataclass(frozen=True)
class Snapshot:
    """What a visit would send had it stopped after some step, and the client's state by then; no frames: none yet."""

    frames: Sequence[StagedFrame] = ()
    client: int = -1
    state: State = field(default_factory=dict)


class Executor:
    """One rank's clients, by chunks.

    A client's new personal state is provisional: it replaces the old one when the server acknowledges that the visit
    counted, and block by block where only some layers did. `direct`: MPI reads the memory of the GPU that computes.
    """

    def __init__(self, job: Job, chunks: Sequence[Chunk], personal: Personal, direct: bool = False) -> None:
        self.job, self.chunks = job, chunks
        self.states = {chunk.number: personal[chunk.number] for chunk in chunks}
        self.staging = Staging(job.task.device, direct)
        self.delivery = 0.0  # seconds that the frames of the last visits took to leave
        self.under_way: UnderWay | None = None
        self._chunk = {client: chunk for chunk in chunks for client in chunk.clients.tolist()}
        self._attempt = 0  # which visits are under way, as in acknowledgments of them
        self._new: dict[int, tuple[State, int, int]] = {}  # a visit's chunk's new state, its row there, and which it is

    def spare(self, closes_after: float) -> float:
        """Return the seconds before the end of a round by which a visit that stops by the clock has to leave."""
        return max(SPARE_SECONDS, SPARE_SHARE * closes_after) + 2 * self.delivery

    def warm(self) -> None:
        """Do one step for nothing, see `Task.warm_up`."""
        cohort = np.sort(self.chunks[0].clients)
        plan = self.job.planner.plan(self.job.planner.attempt(0, cohort=cohort))
        self.job.task.warm_up(self.job.visits(plan, np.arange(len(cohort)), threading.Event()))

    def placed(self, state: State) -> State:
        """Return a state on the device that computes."""
        return {name: on_device(value, self.job.task.device) for name, value in state.items()}

    def visits(
        self,
        attempt: Attempt,
        shared: State,
        turns: Sequence[Turn],
        formats: VisitFormats,
        local_rank: int,
        over: threading.Event,
        put: Put,
        begun: float | None = None,
    ) -> None:
        """Compute the visits of one turn after the other and put the frames of each; stop when it is `over`.

        The round has `begun` at this second of the monotonic clock; None: now.
        """
        start, self._attempt = time.monotonic(), acknowledgment(attempt.round, attempt.number)
        leaves = (start if begun is None else begun) + attempt.closes_after - self.spare(attempt.closes_after)
        plan, drawn = self._planned(attempt)
        state = self.placed(shared)
        for number, turn in enumerate(turns):
            if over.is_set():
                return
            self.under_way = UnderWay(number)
            if not turn:
                for group in formats.all:
                    put(self.staging.nothing(group))
                continue
            rows = [np.searchsorted(attempt.cohort, clients) for clients in turn]
            pace = Pace(self.job, drawn.of(np.concatenate(rows)), over, start)  # they are side by side
            given = formats.of(turn), local_rank, self.staging, pace, put
            self.staging.visit = plan.round, int(turn[0][0]), plan.number
            with blaming(lambda: f" in round {attempt.round}"), suppress(RoundClosed):
                if self.job.planner.whole:
                    whole = SumSender(*given) if formats.all[0].sums else WholeSender(*given)
                    chunks = (self._clocked(self.job.visits(plan, each, over), leaves, state, whole) for each in rows)
                    self._whole(state, chunks, whole)
                else:
                    layers = LayerSender(*given, partial(self.job.task.oracle_calls.item, turn[0][0]))
                    visits = self._clocked(self.job.visits(plan, rows[0], over), leaves, state, layers)
                    self._by_layers(state, visits, layers)
            start = time.monotonic()

    def _planned(self, attempt: Attempt) -> tuple[Plan, Timeline]:
        """Return what is known beforehand, and when visits shall do what.

        Where arrivals end rounds the attempt is a visit, and has its number; the seconds are drawn for all there, as in
        simulated time.
        """
        planner = self.job.planner
        plan = planner.plan(attempt)
        if not planner.participation.by_arrivals:
            return plan, planner.times.timeline(attempt)
        drawn = planner.times.timeline(replace(attempt, cohort=planner.members))
        plan = replace(plan, arrival=np.full_like(plan.arrival, np.nan), number=attempt.number)
        drawn = drawn.of(np.searchsorted(planner.members, attempt.cohort))
        if planner.rules.scheduled:
            steps, fewest = attempt.work
            plan = replace(plan, steps=np.array([steps]), rate=fewest / steps)
            drawn = drawn.shortened(steps / int(planner.visit_steps[0][attempt.cohort[0]]))
        return plan, drawn

    def _whole(self, shared: State, chunks: Iterable[Visits], sender: WholeSender) -> None:
        self.job.task.oracle_calls[:] = 0
        parts = (Part(self._chunk[int(visits.clients[0])], self._personal(visits), visits) for visits in chunks)
        for _, visits, work in self.job.bundles.work(shared, parts):
            visits.raise_if_closed()
            state = self._sent(visits, work, sender)
            if visits.training is not None and self.under_way is not None and not self.under_way.claim():
                raise RoundClosed
            self._keep(visits, state)
        sender.finish()

    def _sent(self, visits: Visits, work: Client, sender: WholeSender) -> State:
        """Let visits take place, and a sender have what they send; return the clients' state."""
        sieve = self.job.guard.sieve(len(visits.clients), None)
        state = drained(sieve.through(work), sender.take)
        sender.end(sieve.first, self.job.task.oracle_calls[visits.clients].tolist(), visits.steps)
        return state

    def _by_layers(self, shared: State, visits: Visits, sender: LayerSender) -> None:
        self.job.moves.to(visits.round, visits.clients)
        self.job.task.hold(self._chunk[int(visits.clients[0])].clients)
        self.job.task.oracle_calls[:] = 0
        work = self.job.border.client(self.job.task, shared, self._personal(visits), visits)
        self._keep(visits, drained(work, sender.take))
        sender.finish()

    def _clocked(self, visits: Visits, leaves: float, shared: State, sender: Sender) -> Visits:
        """Return visits that stop after a step in time to deliver, where they may."""
        if visits.steps is None or not self.job.planner.participation.by_steps or leaves == inf:
            return visits
        every, under_way, pace = self.job.planner.participation.snapshot, self.under_way, sender.pace
        leaves -= pace.sends
        training = Training() if every else None
        nothing = Timeline.computing(np.zeros(1), self.job.planner.work_fractions)

        def keep(taken: int) -> None:
            frames: list[StagedFrame] = []
            at_once = Pace(self.job, nothing, pace.over, pace.start)
            other = WholeSender(sender.formats, sender.local_rank, self.staging, at_once, frames.append)
            state = self._stopped(shared, replace(timed, steps=np.array([taken])), other)
            if under_way is not None and len(frames) == len(sender.formats):
                under_way.snapshot = Snapshot(frames, int(visits.clients[0]), state)

        least = int(self.job.planner.visit_steps[1][visits.clients].max())
        clock = StepClock(pace, visits.steps, least, leaves, every, keep)
        timed = replace(visits, more=clock.more, training=training)
        return timed

    def _stopped(self, shared: State, visits: Visits, sender: WholeSender) -> State:
        """Let visits that go on send what they would if they stopped here; return the clients' state."""
        task = self.job.task
        assert visits.training is not None
        params, memory = (
            {name: value.clone() for name, value in state.items()}
            for state in (visits.training.params, visits.training.memory)
        )
        buffers = {} if task.whole is None else task.whole.now(visits.clients)
        trained = Training(params, memory, visits.training.loss, buffers)
        alone = replace(visits, more=None, training=None, trained=trained)
        calls = task.oracle_calls.copy()
        state = self._sent(alone, self.job.border.client(task, shared, self._personal(visits), alone), sender)
        sender.finish()
        task.oracle_calls[:] = calls
        return state

    def overdue(self, number: int) -> Sequence[StagedFrame]:
        """Take the snapshot of the visit of this turn in place of what it has not put yet; nothing where there is none.

        Called by the main thread when it is high time.
        """
        under_way = self.under_way
        if under_way is None or under_way.number != number or not under_way.snapshot.frames or not under_way.claim():
            return ()
        snapshot = under_way.snapshot
        self._new[snapshot.client] = snapshot.state, 0, self._attempt
        return snapshot.frames

    def _personal(self, visits: Visits) -> State:
        """Return the acknowledged state of some clients of one chunk, ``{name: [c, …]}``."""
        chunk = self._chunk[int(visits.clients[0])]
        places = on_device(torch.from_numpy(chunk.places(visits.clients)), self.job.task.device)
        return {name: value[places] for name, value in self.states[chunk.number].items()}

    def _keep(self, visits: Visits, state: State) -> None:
        """Keep visits' new state until it is known what of them counted."""
        self._new |= {client: (state, row, self._attempt) for row, client in enumerate(visits.clients.tolist())}

    def acknowledge(self, counted: Mapping[int, int]) -> None:
        """Take over what counted, see `acknowledgment`; nothing where it is of an earlier visit."""
        for client, told in counted.items():
            new, row, attempt = self._new.get(client, ({}, 0, told))
            depth = told - attempt
            if not 0 < depth < 1 << DEPTH_BITS:
                continue
            del self._new[client]
            for name, value in self._own(client).items():
                if self.job.layers.of_state(name) >= depth:
                    value.copy_(new[name][row])

    def _own(self, client: int) -> State:
        """Return a client's acknowledged personal state, without a client axis."""
        chunk = self._chunk[client]
        (place,) = np.flatnonzero(chunk.clients == client)
        return {name: value[place] for name, value in self.states[chunk.number].items()}

    def scores(self, round_: int, shared: State) -> Floats:
        """Return the clients' scores, ``[scores, h]``, see `Job.scores`."""
        hosted = [(chunk.clients, self.states[chunk.number]) for chunk in self.chunks]
        return np.concatenate(self.job.scored(round_, shared, hosted), axis=1)

    def adopt(self, chunks: Sequence[Chunk], states: Mapping[int, State]) -> None:
        """Take over clients of another rank with their personal state, and read their samples."""
        for chunk in chunks:
            together = stacked([states[client] for client in chunk.clients.tolist()])
            self.states[chunk.number] = self.placed(together)
            self._chunk |= dict.fromkeys(chunk.clients.tolist(), chunk)
            self.job.task.hold(chunk.clients)
        self.chunks = [*self.chunks, *chunks]

    def forget(self) -> None:
        """Let go of the clients, their state and their samples."""
        self.chunks, self.states, self._chunk, self._new = [], {}, {}, {}
        self.job.task.release_data()

    def personal(self) -> dict[int, State]:
        """Return the acknowledged personal state, ``{client: {name: […]}}``."""
        return {client: self._own(client) for client in self._chunk}
