"""A client rank without torch: it speaks the protocol of rounds in real time, and sleeps where others compute.

What it needs to know it hears from the server before the first round (`Facts`). It knows how to visit, to close, to
tell what it has counted and to leave; it hosts one client, which is invited to each round to which its lane is. Each
layer that it sends is full of one number, ``state + rank``, where the state's first number says which state was heard.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from hpcfl.mpi.channel import Connected, Pair, connect, single
from hpcfl.mpi.cores import cores
from hpcfl.mpi.placement import lane_ranks
from hpcfl.mpi.waiting import Patience, doze, rows, tell

Frame = list[NDArray[Any]]
COUNTED = ("visits", "control", "down", "up")
"""What a puppet tells in the first rows of its table: visits, bytes of commands and of state heard, of frames sent."""
SIGNS = 2  # of a frame's signs, those that a puppet gives: its flag and its seconds


@dataclass(frozen=True)
class Facts:
    """What the server tells the puppets, as JSON.

    Attributes
    ----------
    hosts : list of str
        The host of each rank.
    ops : dict of str to int
        Numbers of the commands' words.
    words : dict of str to int
        Length of a command, by the number of ranks on a lane.
    held : int
        Where a command has the number of the shared state: one that a rank has does not come again.
    state : list of int
        Bytes of each part of the shared state.
    frames : dict of str to list
        By the number of ranks on a lane, for each frame of a visit: entries and type of its parts; where in its head
        the first rank's weight is, and where the values begin.
    seconds : list of float
        How long each rank's visits take in the first `rounds` rounds.
    asleep : float
        How long everybody's take in the next one; no time at all afterwards.
    figures : int
        Rows of the table in which ranks tell where their time went.
    apart : bool
        Whether lanes may fall apart, as MPI tells of dead ranks.
    """

    hosts: list[str]
    width: int | str
    ops: dict[str, int]
    words: dict[str, int]
    held: int
    state: list[int]
    frames: dict[str, list[dict[str, Any]]]
    seconds: list[float]
    rounds: int
    asleep: float
    figures: int
    apart: bool

    def tell(self, comm: MPI.Intracomm) -> NDArray[np.float64]:
        """Tell all puppets; return the process ids of all ranks, [ranks]."""
        doze([comm.Ibarrier()], lambda: None)
        tell(comm, json.dumps(asdict(self)))
        return rows(comm, np.array([os.getpid()], dtype=np.float64))[:, 0]

    @classmethod
    def heard(cls, comm: MPI.Intracomm) -> Facts:
        """Return what the server tells."""
        doze([comm.Ibarrier()], lambda: None)  # the server needs long to import all that it needs
        facts = cls(**json.loads(tell(comm, "")))
        rows(comm, np.array([os.getpid()], dtype=np.float64))
        return facts


class Puppet:
    """One client rank on its lane, number `place` of those there; on the `spare` one once that lost another rank."""

    def __init__(self, facts: Facts, rank: int, place: int, ranks: int, lane: Pair, spare: Pair | None = None) -> None:
        self.facts, self.rank, self.spare = facts, rank, spare
        self.ops = {number: name for name, number in facts.ops.items()}
        self.counts = dict.fromkeys(COUNTED, 0)
        self._left: list[Any] = []
        self._join(place, ranks, lane)

    def _join(self, place: int, ranks: int, lane: Pair) -> None:
        self.place, self.ranks = place, ranks
        self.control, self.data = lane
        self.frames = self.facts.frames[str(ranks)]
        self.command = np.zeros(self.facts.words[str(ranks)], dtype=np.int64)
        self.state = [np.zeros(nbytes, dtype=np.uint8) for nbytes in self.facts.state]
        self._posted = self.held = 0
        self._sends: list[tuple[list[Any], Frame]] = []
        self._arrival = np.zeros((2, 1), dtype=np.int64)
        self._heard = self.control.agree(*self._arrival)

    def serve(self) -> None:
        """Do what the server asks until it says that the run is over."""
        try:
            self._serve()
        except MPI.Exception:
            if self.spare is None:
                raise
            spare, self.spare = self.spare, None
            self._left += [self._sends, self._heard, self.command, self.state]  # who hangs may still use it one day
            self._join(0, 1, spare)
            self._serve()

    def _serve(self) -> None:
        self._until_done(self._heard)
        self._listen()
        while True:
            self._until_done(self._heard)
            command = self.command.copy()
            op = self.ops[int(command[0])]
            if op != "PROFILE":
                self.counts["control"] += command.nbytes
            if op not in ("CLOSE", "LEAVE"):
                self._listen()
            if op == "LEAVE":
                self._until_done(self.data.meet())
                return
            {"VISIT": self._visit, "CLOSE": self._close, "PROFILE": self._profile}[op](command)

    def _listen(self) -> None:
        self._heard = self.control.down(self.command)

    def _visit(self, command: NDArray[np.int64]) -> None:
        """Take in the state, then send frame after frame, each when it is time for it, until the server interrupts."""
        begun, self._posted = time.monotonic(), 0
        self.counts["visits"] += 1
        if (held := int(command[self.facts.held])) == 0 or held != self.held:
            self._until_done([request for part in self.state for request in self.data.down(part)])
            self.counts["down"] += sum(part.nbytes for part in self.state)
            self.held = held
        number = float(self.state[0][:4].view(np.float32)[0]) + self.rank
        later = int(command[1]) - self.facts.rounds
        seconds = self.facts.seconds[self.rank] if later < 0 else self.facts.asleep if later == 0 else 0.0
        for each in range(1, len(self.frames) + 1):
            ready = begun + seconds * each / len(self.frames)
            self._until(lambda: _done(self._heard), ready)
            if _done(self._heard):
                break
            self._post(1.0, time.monotonic() - begun, number)
        self._until(lambda: not self._sends or _done(self._heard))

    def _close(self, _: NDArray[np.int64]) -> None:
        """Catch up with the rank of the lane that has sent most, by empty frames, and say when this one is free."""
        own, found = np.array([self._posted], dtype=np.int64), np.zeros(1, dtype=np.int64)
        self._until_done(self.control.agree(own, found))
        while self._posted < max(own[0], found[0]):
            self._post(0.0, 0.0, 0.0)
        self._until_done(self.control.meet())
        self._listen()

    def _profile(self, _: NDArray[np.int64]) -> None:
        table = np.zeros((self.facts.figures, self.ranks))
        table[: len(self.counts), self.place] = [*self.counts.values()]
        self._until_done(self.data.summed(table))

    def _post(self, flag: float, seconds: float, number: float) -> None:
        """Begin to send the next frame, full of a number, with weight 1; one whose flag is 0 says nothing."""
        facts = self.frames[self._posted]
        head, *large = (np.zeros(size, dtype=kind) for size, kind in facts["parts"])
        head[facts["values"] :] = number
        head[self.place :: self.ranks][:SIGNS] = flag, seconds
        head[facts["weight"] + self.place] = flag
        for part in large if flag else []:
            part.fill(number)
        frame, carried = [head, *large], self.data.summed if flag else self.data.absent
        self.counts["up"] += sum(part.nbytes for part in (frame if flag or self.ranks > 1 else frame[:1]))
        requests = [*self.data.summed(head), *(request for part in large for request in carried(part))]
        self._sends.append((requests, frame))
        self._posted += 1

    def _until_done(self, requests: list[Any]) -> None:
        self._until(lambda: _done(requests))

    def _until(self, over: Callable[[], bool], due: float = inf) -> None:
        """Look whether it is over until it is, or until the time `due`, without spinning."""
        patience = Patience()
        while not over() and time.monotonic() < due:
            self._sends = [(requests, frame) for requests, frame in self._sends if not _done(requests)]
            patience.pause(max(0.0, due - time.monotonic()))


def _done(requests: list[Any]) -> bool:
    return bool(MPI.Request.Testall(requests))


def joined(comm: MPI.Intracomm, facts: Facts, connected: Connected) -> Puppet:
    """Return the puppet of this rank on its own lane among those that were connected."""
    rank, rows = comm.Get_rank(), enumerate(lane_ranks(facts.width, facts.hosts))
    number, lane = next((number, row) for number, row in rows if rank in row)
    spare = connected.lanes.get(single(rank, comm.Get_size())) if len(lane) > 1 else None
    return Puppet(facts, rank, lane.index(rank), len(lane), connected.lanes[number], spare)


def serve(comm: MPI.Intracomm) -> None:
    """Be a puppet until the server says that the run is over."""
    facts = Facts.heard(comm)
    Patience.crowd = comm.Get_size() / len(cores())
    connected = connect(comm, facts.width, facts.hosts, facts.apart)
    joined(comm, facts, connected).serve()
    if not facts.apart:
        connected.free()
