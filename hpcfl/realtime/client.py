"""A client rank's side of rounds in real time: messages in the main thread, computing in another one.

What it does is written as steps: where it waits, it yields, and whoever runs it says how time passes. A rank that is
alone on its lane, or shares it, runs its own; one that leads others takes a step of its own clients between two looks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from hpcfl.base.errors import RunError
from hpcfl.base.lazy import MPI
from hpcfl.base.memory import freeze
from hpcfl.engine.executor import Executor, Worker
from hpcfl.engine.job import Job
from hpcfl.engine.profile import Phases
from hpcfl.mpi.channel import Pair, Requests
from hpcfl.mpi.placement import Topology, Turn
from hpcfl.mpi.transfers import complete
from hpcfl.mpi.waiting import Doze, Patience
from hpcfl.realtime.lane import visit_formats
from hpcfl.realtime.orders import Command, Op
from hpcfl.realtime.questions import QUESTIONS, Store
from hpcfl.sums.frames import StagedFrame
from hpcfl.sums.packing import Bytes, Packing

LOOK_SECONDS = 0.002  # how often a rank that computes looks for the server's word
SENDING_SECONDS = 0.0002  # and how often while something is being sent


class GivenUp(Exception):  # noqa: N818
    """The server no longer speaks with this rank on its lane."""


@dataclass(eq=False)
class Wait:
    """One wait: so many bytes are `coming`, or the computing thread may have something within so many `seconds`.

    It is yielded until it is over: whoever runs the steps and gets it twice may turn to something else.
    """

    coming: int = 0
    seconds: float = 0.0


Steps: TypeAlias = Generator[Wait, None, None]
Rest: TypeAlias = Callable[[], None]
"""What is done again and again while a rank waits; it may raise."""


class ClientRank:
    """One client rank on its lane; `rest` is called while it waits.

    Parameters
    ----------
    channels : (Channel, Channel)
        The lane's: for commands, and for everything large.
    spare : (Channel, Channel), optional
        Those of a lane for this rank alone, if the lane should lose another rank, or the one that it goes by.
    phases, profiled : Phases, optional
        Where the rank's time goes, as far as it is told here; what it replies when it is asked, as a rule the same.
    worker : Worker, optional
        What computes, where it has begun to already.

    Attributes
    ----------
    word : list of MPI.Request
        Complete once the server has given the lane up for the spare one.
    """

    def __init__(
        self,
        job: Job,
        executor: Executor,
        topology: Topology,
        local_rank: int,
        channels: Pair,
        rest: Rest,
        spare: Pair | None = None,
        phases: Phases | None = None,
        store: Store = None,
        worker: Worker | None = None,
        profiled: Phases | None = None,
    ) -> None:
        self.word: Requests = []
        self._left: list[Any] = []
        self.job, self.executor, self.rest, self.spare, self.store = job, executor, rest, spare, store
        self.phases, self._round = phases or Phases(), -1
        self.profiled = profiled or self.phases
        self.worker = worker or Worker()
        if worker is None:
            self.worker.start(lambda put: executor.warm())
        self._posted = self._total = 0
        self._last = 0.0  # when it has posted its last frame
        self.released = False
        self._over = threading.Event()
        self._join(topology, local_rank, channels)

    def _join(self, topology: Topology, local_rank: int, channels: Pair) -> None:
        """Be on a lane, with room of its own for the shared state."""
        packing = Packing(self.job.algorithm.init_server(self.job.task))
        state = packing.zeros(pinned=self.job.task.device.type == "cuda")
        self.parts, self.views = packing.received(state), packing.views(state)
        self.local_rank, self.holds = local_rank, 0
        self.control, self.data = channels
        self._sends: list[tuple[Requests, StagedFrame | None]] = []
        self.host(topology)

    def host(self, topology: Topology) -> None:
        self.topology = topology
        self.formats = visit_formats(self.job.layout, topology, self.job.together, self.job.parts)
        self._turns: list[Turn] = []
        self._command = Command.empty(len(topology.clients), self.job.config.clients)

    def serve(self) -> Command:
        """Do what the server asks; return its last word, which is that the run is over."""
        last = Wait()
        for wait in self.steps():
            if wait is not last:
                last, pauses = wait, Doze() if self.released else Patience()
            if wait.seconds:
                self.worker.wait(wait.seconds)
            else:
                pauses.pause(coming=wait.coming)
        return self._heard_last

    def steps(self) -> Steps:
        """Do the same step by step."""
        while True:
            yield from self._arrive()
            try:
                yield from self._served()
                return
            except GivenUp:
                assert self.spare is not None
            except Exception as error:
                if not isinstance(error, MPI.Exception):
                    raise
                if self.spare is None:
                    reason = " ".join(error.Get_error_string().split())
                    raise RunError(f"the server (rank 0) is lost ({reason})") from None
            # the lane has lost another rank: go on with one of this rank alone
            self.word = []
            self._over.set()
            self._left += [self._sends, self._heard, self._command, self.parts]  # who hangs may still use it one day
            self._join(self.topology.single(self.local_rank), 0, self.spare)
            self.spare = None

    def _arrive(self) -> Steps:
        """Tell who leads this rank that it is here and free."""
        yield from self._rested()
        freeze()
        nothing = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        self._left.append(nothing)
        self._sends.append((self.control.agree(*nothing), None))

    def _served(self) -> Steps:
        self._listen()
        while True:
            with self.phases.phase("waiting"):
                yield from self._wait(self._heard)
            command = self._heard_last = Command.unpacked(self._command, len(self.topology.clients))
            if self._round < 0 or (command.op is Op.VISIT and command.round > self._round):
                self._round = command.round
                self.phases.begin()
            self.executor.acknowledge(dict(zip(self.topology.clients.tolist(), command.counted.tolist())))
            if command.op is Op.VISIT:
                self._listen()
                with self.phases.phase("compute"):
                    yield from self._visit(command)
            elif command.op is Op.CLOSE:
                with self.phases.phase("reduction"):
                    yield from self._close()
                self._listen()
            else:
                yield from self._answer(command)
            if command.op is Op.LEAVE:
                return

    def _listen(self) -> None:
        """Be ready for the server's next word."""
        self._heard = self.control.down(self._command)

    # visits

    def _visit(self, command: Command) -> Steps:
        """Compute the visits that are asked for; send each frame as soon as it is ready."""
        begun = time.monotonic()
        facts = command.round, command.attempt, command.stage, command.cohort, command.closes_after
        attempt = replace(self.job.planner.attempt(*facts), work=command.work)
        turns = self._turns = [turn[self.local_rank] for turn in self.topology.turns(command.cohort, self.job.together)]
        self._posted, self._total = 0, len(turns) * len(self.formats.all)
        over = self._over = threading.Event()
        yield from self._receive_state(command)
        work = self.executor.visits
        last = begun + attempt.closes_after - self.executor.spare(attempt.closes_after) / 2
        given = attempt, self.views, turns, self.formats, self.local_rank, over
        self.worker.start(lambda put: work(*given, put, begun))
        looks, sends = Wait(seconds=LOOK_SECONDS), Wait(seconds=SENDING_SECONDS)
        while self._posted < self._total:
            if (yield from self._interrupted()):
                break
            yield sends if self._sends else looks
            while (staged := self.worker.take(0)) is not None:
                yield from self._post(staged)
            if time.monotonic() > last:
                yield from self._send_snapshot(over)
            self._progress()
        if self._posted == self._total:
            yield from self._rested()  # the state that was served is in use until then
        with self.phases.phase("reduction"):
            yield from self._until(lambda: not self._sends or complete(self._heard))
        if self._posted == self._total and not self._sends and not over.is_set():
            self.executor.delivery = time.monotonic() - self._last

    def _interrupted(self) -> Generator[Wait, None, bool]:
        """Say whether the server has said something that ends the visits; hand over personal state if that is all."""
        if not complete(self._heard):
            return False
        command = Command.unpacked(self._command, len(self.topology.clients))
        if command.op in QUESTIONS and QUESTIONS[command.op].beside:
            yield from self._answer(command)
            return False
        return True

    def _send_snapshot(self, over: threading.Event) -> Steps:
        """Send the last snapshot of a visit that has not ended in time, if there is one; the visit ends then."""
        number, begun = divmod(self._posted, len(self.formats.all))
        for staged in () if begun else self.executor.overdue(number):
            over.set()
            yield from self._post(staged)

    def _post(self, staged: StagedFrame) -> Steps:
        """Send a frame once its data are there."""
        yield from self._until(staged.Test)
        self._sends.append((self.send(staged), staged))
        self._posted += 1
        self._last = time.monotonic()

    def send(self, staged: StagedFrame) -> Requests:
        """Begin to send a frame: from a rank alone on its lane what it has, else all, to be summed up on the way."""
        head, *large = staged.buffers()
        requests = [*self.data.summed(head)]
        for name, buffer in zip(staged.format.large, large):
            requests += (self.data.absent if staged.format.lacks(staged.parts, name) else self.data.summed)(buffer)
        return requests

    def _close(self) -> Steps:
        """Catch up: send as many frames as any rank of the lane has begun to, then say when this one is free."""
        self._over.set()
        begun = -self._posted % len(self.formats.all) if self.job.planner.whole else 0  # what was begun is finished
        posted, target = np.array([self._posted + begun], dtype=np.int64), np.zeros(1, dtype=np.int64)
        yield from self._wait(self.control.agree(posted, target))
        looks = Wait(seconds=LOOK_SECONDS)
        for _ in range(begun):
            while (staged := self.worker.take(0)) is None:
                self._progress()
                yield looks
            yield from self._post(staged)
        while self._posted < max(int(posted[0]), int(target[0])):
            turn, group = divmod(self._posted, len(self.formats.all))
            yield from self._post(self.executor.staging.nothing(self.formats.of(self._turns[turn])[group]))
            self._progress()
        yield from self._rested()
        yield from self._wait(self.control.meet())

    # everything else that is asked

    def _answer(self, command: Command) -> Steps:
        """Do what is asked, and reply."""
        question = QUESTIONS[command.op]()
        if not question.alone:
            self._listen()
        with self.phases.phase(question.phase):
            yield from (
                self._receive_state(command) if question.with_state else self._receive(question.room(self, command))
            )
            reply = question.reply(self.job, self.topology)
            yield from self._until(question.begin(self, command, reply))
            yield from self._wait(reply.send(self.control if question.beside else self.data))
        if question.alone and command.op is not Op.LEAVE:
            self._listen()

    def release(self) -> None:
        """Forget clients and shared state: only the last word is still to come."""
        self.executor.forget()
        self.parts, self.views, self.released = [], {}, True

    # waiting

    def _receive_state(self, command: Command) -> Steps:
        """Wait for the shared state, unless it has come before."""
        if not command.state or command.state != self.holds:
            self.holds = command.state or self.holds
            yield from self._receive(self.parts)

    def _receive(self, parts: list[Bytes]) -> Steps:
        """Wait for what comes with a command."""
        requests = [request for part in parts for request in self.data.down(part)]
        with self.phases.phase("broadcast"):
            yield from self._wait(requests, sum(part.nbytes for part in parts))

    def _wait(self, requests: Requests, coming: int = 0) -> Steps:
        """Wait until all are complete; `coming` bytes are known to be on their way."""
        yield from self._until(lambda: complete(requests), coming)

    def _rested(self) -> Steps:
        """Wait until the computing thread is free; what it has put before is not wanted any more."""
        yield from self._until(self.worker.over, seconds=LOOK_SECONDS)

    def _until(self, over: Callable[[], bool], coming: int = 0, seconds: float = 0.0) -> Steps:
        wait = Wait(coming, seconds)
        while not over():
            self._progress()
            yield wait

    def _progress(self) -> None:
        self._sends = [(requests, kept) for requests, kept in self._sends if not complete(requests)]
        if self.word and complete(self.word):
            raise GivenUp
        self.rest()
