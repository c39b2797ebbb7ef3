"""A client rank's side of rounds in real time: MPI in the main thread, computing in another one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from hpcfl.base.errors import RunError
from hpcfl.base.memory import freeze
from hpcfl.comm.mpi import Patience, doze
from hpcfl.comm.packing import Packing
from hpcfl.comm.placement import Topology
from hpcfl.engine.wall.executor import Host
from hpcfl.engine.wall.framing import wire
from hpcfl.engine.wall.protocol import Call, Op, length
from hpcfl.engine.wall.replies import Saving, Scoring
from hpcfl.engine.wall.staging import Shipment
from hpcfl.engine.wall.worker import Worker

if TYPE_CHECKING:
    from hpcfl.engine.job import Job

Connected = tuple[Any, Any]
LOOK_SECONDS = 0.002  # how often a rank that computes looks for the server's word
SENDING_SECONDS = 0.0002  # and how often while something is being sent


class Member:
    """One client rank on its lane.

    Parameters
    ----------
    host : Host
        The clients that live here, and how to compute their visits.
    seat : int
        This rank's place on the bench.
    connected : (MPI.Intracomm, MPI.Intracomm)
        The lane's communicators: for calls, and for everything large.
    rest : callable
        Called while the rank waits.
    spare : (MPI.Intracomm, MPI.Intracomm), optional
        Those of a lane for this rank alone, if the lane should lose another rank.
    """

    def __init__(
        self,
        job: Job,
        host: Host,
        bench: Topology,
        seat: int,
        connected: Connected,
        rest: Callable[[], None],
        spare: Connected | None = None,
    ) -> None:
        self.job, self.host, self.rest, self.spare = job, host, rest, spare
        self.worker = Worker()
        self.worker.start(lambda put: host.warm())
        packing = Packing(job.algorithm.init_server(job.task))
        state = packing.empty()
        self.parts, self.views = packing.received(state), packing.views(state)
        self._posted = self._total = 0
        self.released = False
        self._over = threading.Event()
        self._sit(bench, seat, connected)
        self._rested()
        freeze()
        self._arrive()

    def _sit(self, bench: Topology, seat: int, connected: Connected) -> None:
        """Take a seat on a lane."""
        self.bench, self.seat = bench, seat
        self.control, self.data = connected
        self.wire = wire(self.job.layout, len(bench.ranks))
        self._call = np.zeros(length(len(bench.clients), self.job.config.clients), dtype=np.int64)
        self._sends: list[tuple[list[Any], Shipment]] = []

    def serve(self) -> Call:
        """Do what the server asks; return its last word, which is that the run is over.

        Raises
        ------
        RunError
            If the server is lost.
        """
        try:
            return self._served()
        except MPI.Exception as error:
            if self.spare is None:
                reason = " ".join(error.Get_error_string().split())
                raise RunError(f"the server (rank 0) is lost ({reason})") from None
        self._move(self.spare)
        return self.serve()

    def _move(self, spare: Connected) -> None:
        """Leave a lane that has lost a rank for one of this rank alone."""
        self.spare = None
        self._over.set()
        self._sit(self.bench.single(self.seat), 0, spare)
        self._arrive()

    def _arrive(self) -> None:
        """Tell the server that this rank is here and free."""
        self._rested()
        self._sends.append(([self.control.Ibarrier()], Shipment([])))

    def _served(self) -> Call:
        done = {Op.VISIT: self._visit, Op.CLOSE: self._close, Op.SCORE: self._score, Op.SAVE: self._save}
        done[Op.RELEASE] = self._release
        self._listen()
        while True:
            doze(self._heard, self._progress) if self.released else self._wait([self._heard])
            call = Call.unpacked(self._call.copy(), len(self.bench.clients))
            self.host.acknowledge(dict(zip(self.bench.clients.tolist(), call.counted.tolist())))
            if call.op is Op.LEAVE:
                self._wait([self.data.Ibarrier()])
                return call
            if call.op is not Op.CLOSE:
                self._listen()  # a closing has collectives of its own before the next word
            done[call.op](call)

    def _listen(self) -> None:
        """Be ready for the server's next word."""
        self._heard = self.control.Ibcast(self._call, root=0)

    # visits

    def _visit(self, call: Call) -> None:
        """Compute the visits that are asked for; send each group as soon as it is ready."""
        state = self._expect_state()
        attempt = self.job.planner.attempt(call.round, call.attempt, call.stage, call.cohort, call.closes_after)
        slots = [row[self.seat] for row in self.bench.slots(call.cohort)]
        self._posted, self._total = 0, len(slots) * len(self.wire)
        over = self._over = threading.Event()
        self._wait(*state)
        work = self.host.visits
        self.worker.start(lambda put: work(attempt, self.views, slots, self.wire, self.seat, over, put))
        while self._posted < self._total and not self._heard.Test():
            shipment = self.worker.take(SENDING_SECONDS if self._sends else LOOK_SECONDS)
            while shipment is not None:
                self._wait([shipment])
                self._post(shipment)
                shipment = self.worker.take(0)
            self._progress()
        if self._posted == self._total:
            self._rested()  # the state that was served is in use until then

    def _post(self, shipment: Shipment) -> None:
        """Send the next group."""
        self._sends.append((self.send(shipment), shipment))
        self._posted += 1

    def send(self, shipment: Shipment) -> list[Any]:
        """Begin to send a group: from a rank alone on its lane as it is, else to be summed up on the way."""
        alone = len(self.bench.ranks) == 1
        begin = self.data.Igatherv if alone else self.data.Ireduce
        return [begin(buffer, None, root=0) for buffer in shipment.buffers()]

    def _close(self, call: Call) -> None:
        """Catch up: send as many groups as any rank of the lane has begun to, then say when this one is free."""
        self._over.set()
        begun = -self._posted % len(self.wire) if self.job.planner.whole else 0  # what was begun is finished
        posted, target = np.array([self._posted + begun], dtype=np.int64), np.zeros(1, dtype=np.int64)
        self._wait([self.control.Iallreduce(posted, target, MPI.MAX)])
        for _ in range(begun):
            self._post(self._next())
        while self._posted < int(target[0]):
            self._post(self.host.dock.nothing(self.wire[self._posted % len(self.wire)]))
            self._progress()
        self._rested()
        self._wait([self.control.Ibarrier()])
        self._listen()

    def _rested(self) -> Any:
        """Wait until the worker is free; return the last thing that it has found."""
        found = None
        while self.worker.busy:
            result = self.worker.take(LOOK_SECONDS)
            found = found if result is None else result
            self._progress()
        return found

    def _next(self) -> Shipment:
        """Return the next group that the worker has put, or is about to put."""
        while (found := self.worker.take(LOOK_SECONDS)) is None:
            self._progress()
        shipment: Shipment = found
        self._wait([shipment])
        return shipment

    # other questions

    def _score(self, call: Call) -> None:
        """Test the clients' models on their own test parts."""
        self._wait(*self._expect_state())
        shared = self.host.placed(self.views)
        answer = Scoring(self.job.scores, len(self.bench.clients))
        self.worker.start(lambda put: put(self.host.scores(call.round, shared)))
        answer.data[:, self.bench.places(self.seat)] = self._rested()
        self._wait([answer.send(self.data)])

    def _save(self, call: Call) -> None:
        """Hand over the acknowledged personal state."""
        answer = Saving(self.bench, self.job.like)
        self._wait([answer.send(self.data, self.seat, self.host.personal())])

    def _release(self, call: Call) -> None:
        """Forget everything: all that is still to come is the server's last word."""
        self._rested()
        self.host.forget()
        self.parts, self.views, self.released = [], {}, True
        self._wait([self.data.Ibarrier()])

    # waiting

    def _expect_state(self) -> tuple[list[Any], int]:
        """Begin to receive the shared state; return the requests, and how many bytes come."""
        return [self.data.Ibcast(part, root=0) for part in self.parts], sum(part.nbytes for part in self.parts)

    def _wait(self, requests: list[Any], coming: int = 0) -> None:
        """Wait until all are complete, without spinning; `coming` bytes are known to be on their way."""
        patience = Patience()
        while not all(request.Test() for request in requests):
            self._progress()
            patience.pause(coming=coming)

    def _progress(self) -> None:
        done = [MPI.Request.Testall(requests) for requests, _ in self._sends]
        for ended, (_, shipment) in zip(done, self._sends):
            if ended:
                self.host.dock.give_back(shipment)
        self._sends = [pair for ended, pair in zip(done, self._sends) if not ended]
        self.rest()
