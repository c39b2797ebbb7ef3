"""The server's end of one lane: what is under way on it, and what has arrived.

States: ``idle`` (can be asked), ``active`` (asked, not complete), ``late`` (the round closed without it; requests and
buffers are kept until it has caught up) and ``dead``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np
from mpi4py import MPI
from torch import Tensor

from hpcfl.base.types import Floats, Ints
from hpcfl.comm.message import Layout
from hpcfl.comm.mpi import Bandwidth
from hpcfl.comm.packing import Bytes
from hpcfl.comm.placement import Topology
from hpcfl.engine.wall.framing import Group, Parcel, room, wire
from hpcfl.engine.wall.protocol import Call, Op
from hpcfl.engine.wall.slot import Slot, real


class Lane:
    """One lane, as the server sees it.

    Parameters
    ----------
    bench : Topology
        Its client ranks and their clients.
    control, data : MPI.Intracomm
        Communicators of the server (rank 0) and the client ranks, one for calls and one for everything large.
    clients : int
        How many clients the run has.
    bandwidth : Bandwidth
        What is known of all lanes; this one adds to it.
    """

    def __init__(
        self, bench: Topology, control: Any, data: Any, layout: Layout, clients: int, bandwidth: Bandwidth
    ) -> None:
        self.bench, self.control, self.data, self.run_clients = bench, control, data, clients
        self.bandwidth = bandwidth
        self.wire: list[Group] = wire(layout, len(bench.ranks))
        self.hosted = bench.clients
        self.state, self.reason = "idle", ""
        self.since, self.heard = 0.0, inf  # a rank that has never been heard of may take its time to start
        self.counted: Ints = np.zeros(len(self.hosted), dtype=np.int64)
        self.sent = self.received = 0
        self.worked: Floats = np.zeros((2, len(bench.ranks)))
        self._sends: list[tuple[Any, Any]] = []
        self._leaving: tuple[int, float] | None = None  # bytes of the state, and since when
        self._draining: tuple[int, float] | None = None  # bytes that come after a closing, and since when
        self._plan: list[list[int]] = []
        self._opened = self._ahead = self._clear = 0
        self._buffers: list[Parcel] = []
        self.slot: Slot | None = None
        self._closing: list[Any] = []
        self._target: Ints = np.zeros(1, dtype=np.int64)
        self._drained: list[tuple[list[Any], Parcel]] = []
        self._reply: Any = None

    # what the server asks

    def invite(self, call: Call, state: Sequence[Bytes]) -> None:
        """Ask for a round's visits and send the shared state (in parts, kept until they are sent)."""
        self._plan = self.bench.slots(call.cohort)
        self._opened, self.slot = 0, None
        self._call(call)
        self._broadcast(state)
        self._ahead = sum(real(clients) for clients in self._plan)
        self.state = "active"

    def close(self, call: Call) -> None:
        """Tell a lane that is not complete that the round is over, and let it catch up."""
        self._call(call)
        opened = np.array([self._opened * len(self.wire)], dtype=np.int64)
        self._closing = [self.control.Iallreduce(opened, self._target, MPI.MAX), None]
        self._sends.append((self._closing[0], opened))
        self._drained, self._late_from, self._leaving = [], int(opened[0]), None
        self._fall_behind(self.sending + self.coming)

    def ask(self, call: Call, state: Sequence[Bytes], reply: Callable[[Any], Any]) -> None:
        """Ask for figures or saved state: `reply` starts to receive them, on the data communicator."""
        self._call(call)
        self._broadcast(state)
        self._reply = reply(self.data)
        self.state = "active"

    def give_up(self) -> None:
        """Do not wait for an answer any longer; it is dropped when it comes."""
        if self.state == "active":
            self._fall_behind()

    def dismiss(self, round_: int, stopped: int, hard: bool) -> None:
        """Tell the lane that the run is over; it is idle again when all its ranks are about to leave."""
        call = Call(Op.LEAVE, round_, stopped=stopped, hard=hard, counted=self.counted)
        self.ask(call, [], lambda data: data.Ibarrier())

    def expect(self, counted: Ints) -> None:
        """Wait until the ranks are there; some come from a lane that has fallen apart, `counted` being known of it."""
        self.counted = counted
        self._reply = self.control.Ibarrier()
        self._fall_behind()

    # what goes on by itself

    def poll(self) -> bool:
        """Move on as far as possible without waiting; return whether anything has happened.

        A lane whose communicator fails is dead.
        """
        if self.state == "dead":
            return False
        before = self._stand()
        try:
            self._advance()
        except MPI.Exception as error:
            self.die(" ".join(error.Get_error_string().split()))
        moved = before != self._stand()
        if moved:
            self.heard = time.monotonic()
        return moved

    def late_for(self) -> float:
        """Return for how many seconds the lane has been late, less those that bytes under way may take.

        They are below 0 while such bytes may still come, and inf where the lane is not late.
        """
        return time.monotonic() - self.since if self.state == "late" else inf

    def silent(self) -> float:
        """Return for how many seconds nothing has happened on a lane that owes something; 0 where it does not."""
        return time.monotonic() - self.heard if self.state in ("active", "late") else 0.0

    def die(self, reason: str) -> None:
        """Give the lane up for good; what has arrived stays."""
        self.state, self.reason = "dead", reason

    @property
    def arrived(self) -> int:
        """Complete visits in the current slot."""
        return self.slot.visits if self.slot is not None and self.slot.complete else 0

    @property
    def awaited(self) -> int:
        """Visits of this round that may still come."""
        if self.state != "active":
            return 0
        current = self.slot.visits if self.slot is not None and not self.slot.complete else 0
        return current + self._ahead

    @property
    def sending(self) -> int:
        """Bytes that are being sent to the lane."""
        return sum(kept.nbytes for _, kept in self._sends)

    @property
    def coming(self) -> int:
        """Bytes of the current slot that have not arrived."""
        return 0 if self.slot is None else sum(map(_nbytes, self.slot.data[len(self.slot.times) :]))

    def receive(self, parcel: Parcel) -> list[Any]:
        """Start to receive one group: from one rank as it is, from several added on the way to what is there."""
        return [self._received(data) for data in parcel]

    def _received(self, data: Tensor) -> Any:
        view = data.numpy()
        self.received += view.nbytes
        if len(self.bench.ranks) == 1:
            kind = MPI.Datatype.fromcode(view.dtype.char)
            return self.data.Igatherv([view[:0], kind], [view, ([0, view.size], [0, 0]), kind], root=0)
        return self.data.Ireduce(MPI.IN_PLACE, view, MPI.SUM, root=0)

    def _advance(self) -> None:
        self._sends = [(request, kept) for request, kept in self._sends if not request.Test()]
        if self._leaving and not self._sends:
            self.bandwidth.went(*self._leaving)
            self._leaving = None
        if self._reply is not None:
            if self._reply.Test():
                self._reply, self.state = None, "idle"
        elif self._closing:
            self._catch_up()
        elif self.state == "active":
            self._visit()

    def _visit(self) -> None:
        """Receive a slot, but not before the state has been sent: both at once take a third longer."""
        if self.slot is None and self._sends:
            self._clear_next()
        elif self.slot is None:
            self.open_next()
        if self.slot is not None and self.slot.poll() and self._opened == len(self._plan):
            self.state = "idle"

    def open_next(self) -> None:
        """Begin to receive the next slot, into the buffers of the one before: that one must have been summed up."""
        while self._clear_next():
            pass
        self._clear = 0
        self.slot = Slot(self, self._plan[self._opened], self._buffers)
        self._opened += 1
        self._ahead = sum(real(clients) for clients in self._plan[self._opened :])

    def _clear_next(self) -> bool:
        """Set the next group's buffers to zero, the server's own part of a sum; return whether there was any left."""
        self._buffers = self._buffers or room(self.wire)
        if len(self.bench.ranks) == 1 or self._clear == len(self._buffers):
            return False
        for data in self._buffers[self._clear]:
            data.zero_()
        self._clear += 1
        return True

    @property
    def turns(self) -> bool:
        """Whether a slot is complete and another one is to follow."""
        return self.arrived > 0 and self.state == "active" and self._opened < len(self._plan)

    def _catch_up(self) -> None:
        """Receive what the ranks had begun to send when they heard of the closing, then wait until they are free."""
        agreed, free = self._closing
        if self.slot is not None:
            self.slot.poll()
        if not agreed.Test():
            return
        if free is None:
            self._drain()
        elif self._all_there() and free.Test():
            self._closing, self._drained, self.state = [], [], "idle"

    def _drain(self) -> None:
        """Begin to receive what goes beyond the current slot, and to wait until the ranks are free."""
        for index in range(self._late_from, int(self._target[0])):
            parcel = self.wire[index % len(self.wire)].empty()
            self._drained.append((self.receive(parcel), parcel))
        self._closing[1] = self.control.Ibarrier()
        self._draining = self.coming + sum(_nbytes(parcel) for _, parcel in self._drained), time.monotonic()

    def _all_there(self) -> bool:
        """Return whether all that was under way has come; from the closing's agreement on nobody computes for it."""
        whole = self.slot is None or self.slot.complete
        if not whole or not all(MPI.Request.Testall(requests) for requests, _ in self._drained):
            return False
        if self._draining:
            self.bandwidth.came(*self._draining)
            self._draining, self.since = None, min(self.since, time.monotonic())
        return True

    def _call(self, call: Call) -> None:
        if self.state == "idle":
            self.heard = time.monotonic()
        packed = call.packed(len(self.hosted), self.run_clients)
        self._sends.append((self.control.Ibcast(packed, root=0), packed))
        self.sent += packed.nbytes
        self.counted = np.zeros_like(self.counted)

    def _broadcast(self, state: Sequence[Bytes]) -> None:
        nbytes = sum(part.nbytes for part in state)
        self._leaving = nbytes, time.monotonic()
        self._sends += [(self.data.Ibcast(part, root=0), part) for part in state]
        self.sent += nbytes

    def _fall_behind(self, under_way: int = 0) -> None:
        """Be late, from when bytes that are under way should be there at the latest."""
        self.state, self.since = "late", time.monotonic() + self.bandwidth.allows(under_way)

    def _stand(self) -> tuple[str, int, int]:
        return self.state, self._opened, len(self.slot.times) if self.slot is not None else 0


def _nbytes(parcel: Parcel) -> int:
    return sum(data.nbytes for data in parcel)
