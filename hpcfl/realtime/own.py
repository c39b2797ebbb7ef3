"""The clients of a rank that leads others: to its main thread they are one more lane, over which nothing travels."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from hpcfl.base.types import Ints, State
from hpcfl.engine.job import Job
from hpcfl.engine.profile import Phases
from hpcfl.mpi.placement import Topology
from hpcfl.mpi.transfers import Transfers
from hpcfl.mpi.waiting import Bandwidth
from hpcfl.realtime.executor import Executor, Worker
from hpcfl.realtime.frames import FrameFormat, StagedFrame
from hpcfl.realtime.lane import Lane, PendingReceive
from hpcfl.realtime.orders import Command
from hpcfl.realtime.questions import Question, Reply
from hpcfl.sums.packing import Bytes


class PendingOwn(PendingReceive):
    """One turn of the rank's own clients: frames are taken as they leave the computing thread."""

    def __init__(self, clients: list[list[int]], formats: Sequence[FrameFormat]) -> None:
        self.clients, self.visits = clients, sum(map(len, clients))
        self.formats, self.frames, self.signs, self.times = formats, [], [], []

    def poll(self) -> bool:
        return self.complete

    @property
    def complete(self) -> bool:
        return len(self.times) == len(self.formats)

    def take(self, staged: StagedFrame) -> None:
        """Take the next frame, whose data are there."""
        self.frames.append(staged.parts)
        self.signs.append(self.formats[len(self.times)].signs(staged.parts))
        self.times.append(time.monotonic())


class OwnLane(Lane):
    """A leader's own clients, see `Lane`: they compute in a second thread, and are never waited for.

    Attributes
    ----------
    shared : State
        The state with which visits begin, and which is tested.
    """

    def __init__(
        self,
        job: Job,
        executor: Executor,
        worker: Worker,
        topology: Topology,
        bandwidth: Bandwidth,
        transfers: Transfers,
        phases: Phases,
        store: Callable[[int, Mapping[int, State]], None] | None,
    ) -> None:
        nowhere: Any = None, None
        self.job, self.executor, self.phases, self.store = job, executor, phases, store
        super().__init__(
            topology, nowhere, job.layout, job.config.clients, bandwidth, transfers, job.together, job.parts
        )
        self.local_rank, self.views = 0, State()
        self.worker = worker
        self._over = threading.Event()
        self._queue: deque[StagedFrame] = deque()
        self._work: Callable[[], None] | None = None
        self._doing: Callable[[], bool] | None = None
        self._closed = False
        self._last, self._total = float("inf"), 0

    def expect(self, counted: Ints) -> None:
        self.counted = counted
        self._doing, self.state = self._rested, "late"

    def invite(self, command: Command, state: Sequence[Bytes], later: int = 0) -> None:
        began = time.monotonic()
        self._owed += later
        facts = command.round, command.attempt, command.stage, command.cohort, command.closes_after
        attempt = self.job.planner.attempt(*facts)
        turns = [turn[0] for turn in self.topology.turns(command.cohort, self.together)]
        self._turns = [[list(chain(*turn))] for turn in turns]
        over = self._over = threading.Event()
        self._queue, self._begun, self._closed = deque(), 0, False
        self._total = len(turns) * len(self.formats)
        self._last = began + attempt.closes_after - self.executor.spare(attempt.closes_after) / 2
        given = attempt, self.views, turns, self.formats, 0, over
        self.receive_next()
        self._ask(command, lambda: self.worker.start(lambda put: self.executor.visits(*given, put, began, self.narrow)))

    def pass_on(self, piece: Bytes) -> None:
        self._owed -= piece.nbytes

    def receive_next(self) -> None:
        self.pending = PendingOwn(self._turns[self._begun], self.formats_in(self._begun))
        self._begun += 1
        self._ahead = sum(sum(map(len, turn)) for turn in self._turns[self._begun :])

    def keep_pending(self) -> None:
        """Frames have memory of their own."""

    def close(self, command: Command) -> None:
        self.counted = self.counted * 0
        self._over.set()
        self._closed = True
        self._fall_behind()

    def ask(self, command: Command, question: Question, reply: Reply, state: Sequence[Bytes] = ()) -> bool:
        def begin() -> None:
            self._doing = question.begin(self, command, reply)

        free = self.state == "idle"
        if free:
            self._reply = self._begin([], reply)
            self._ask(command, begin)
        return free

    def release(self) -> None:
        self.executor.forget()
        self.views = {}

    def _ask(self, command: Command, begin: Callable[[], None]) -> None:
        """Acknowledge, and begin something, once the state is there and the computing thread is free."""
        counted = dict(zip(self.hosted.tolist(), self.counted.tolist()))

        def work() -> None:
            self.executor.acknowledge(counted)
            begin()

        self._work, self.state = work, "active"
        self.counted = self.counted * 0

    def _rested(self) -> bool:
        """Whether the computing thread is free; what it has put before is not wanted any more."""
        while self.worker.busy and self.worker.take(0) is not None:
            pass
        return not self.worker.busy

    def _advance(self) -> None:
        if self._work is not None:
            if not self._owed and self._rested():
                work, self._work = self._work, None
                work()
        elif self._doing is not None:
            if self._doing():
                self._doing, self._reply, self.state = None, None, "idle"
        elif self.state in ("active", "late"):
            self._visit()

    def _visit(self) -> None:
        while self.worker.busy and (staged := self.worker.take(0)) is not None:
            self._queue.append(staged)
        if self._closed:
            self._queue.clear()
        one = self.pending
        assert isinstance(one, PendingOwn)
        if time.monotonic() > self._last and not self._closed and not one.times and not self._queue:
            self._queue.extend(self.executor.overdue(self._begun - 1))
            if self._queue:
                self._over.set()
        while self._queue and not one.complete and self._queue[0].Test():
            one.take(self._queue.popleft())
        if (one.complete and self._begun == len(self._turns)) if not self._closed else not self.worker.busy:
            self.state = "idle"

    def _progress(self) -> tuple[str, int, int]:
        return self.state, self._begun, len(self.pending.times) if self.pending is not None else 0
