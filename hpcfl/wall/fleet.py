"""All lanes together: moving them on while the server waits, and what becomes of those that lose a rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from hpcfl.plan import Ints
from hpcfl.wall.lane import Lane
from hpcfl.wire import Patience

GRACE_SECONDS = 0.05  # after a closing, for lanes to hand in what they have and to become free again
ANSWER_SECONDS = 1.0  # least time for answers other than visits


@dataclass(frozen=True)
class Loss:
    """A rank that is gone, and with it its clients."""

    rank: int
    clients: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        clients = ", ".join(str(client) for client in self.clients)
        return f"rank {self.rank} is lost ({self.reason}), and with it client{'s' * (len(self.clients) > 1)} {clients}"


class Fleet:
    """The lanes of a run.

    Parameters
    ----------
    lanes : list of Lane
    spare : mapping of int to Lane
        A lane of its own for each rank that shares one: where MPI tells of dead ranks, a lane that has lost one falls
        apart into these.
    lost_after : float
        Seconds of silence after which a lane that owes something counts as dead; None: never.

    Attributes
    ----------
    lost : list of Loss
        The dead, in the order in which they were noticed.
    """

    def __init__(
        self, lanes: list[Lane], spare: Mapping[int, Lane] | None = None, lost_after: float | None = None
    ) -> None:
        self.lanes, self.spare, self.lost_after = lanes, spare or {}, lost_after
        self.lost: list[Loss] = []

    def look(self, patience: Patience, most: float = 1.0) -> None:
        """Move everything on, then pause for a moment."""
        if self.poll():
            patience.moved()
        patience.pause(most, sum(lane.sending for lane in self.lanes))

    def poll(self) -> bool:
        """Move every lane on; return whether anything has happened."""
        moved = False
        for lane in self.lanes:
            before = lane.state
            moved |= lane.poll()
            if self.lost_after is not None and lane.silent() > self.lost_after:
                lane.die(f"not heard of for {self.lost_after:g} s")
            if lane.state == "dead" and before != "dead" and not self._divisible(lane):
                self._mourn(lane)
        return moved

    def _divisible(self, lane: Lane) -> bool:
        return len(lane.bench.ranks) > 1 and lane.bench.ranks[0] in self.spare

    def reform(self) -> None:
        """Let lanes that have lost a rank fall apart into lanes of one rank each: the dead are found there."""
        for lane in [lane for lane in self.those("dead") if self._divisible(lane)]:
            lane.control.Revoke()  # those who were not waiting for the dead one hear of it too
            lane.data.Revoke()
            for seat, rank in enumerate(lane.bench.ranks):
                self.spare[rank].expect(lane.counted[lane.bench.places(seat)])
            self.lanes.remove(lane)
            self.lanes += [self.spare[rank] for rank in lane.bench.ranks]

    def _mourn(self, lane: Lane) -> None:
        """Say which ranks and clients are lost."""
        for rank, clients in zip(lane.bench.ranks, lane.bench.hosted):
            self.lost.append(Loss(rank, clients, lane.reason))
            print(f"hpcfl: {self.lost[-1]}", file=sys.stderr, flush=True)

    def those(self, *states: str) -> list[Lane]:
        """Return the lanes in these states."""
        return [lane for lane in self.lanes if lane.state in states]

    def hosted(self, *states: str) -> Ints:
        """Return the clients on lanes in these states."""
        found = [lane.hosted for lane in self.those(*states)]
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)

    def caught_up(self, lanes: Sequence[Lane] | None = None) -> None:
        """Give lanes that have just been closed a moment to become free: most of them do in a few milliseconds."""
        patience = Patience()
        while any(lane.late_for() < GRACE_SECONDS for lane in (self.lanes if lanes is None else lanes)):
            self.look(patience, GRACE_SECONDS)

    def answered(self, lanes: Sequence[Lane], limit: float = inf) -> None:
        """Wait for answers: at most `limit` seconds, or three times as long as half of the lanes took."""
        patience, start = Patience(), time.monotonic()
        while waiting := [lane for lane in lanes if lane.state == "active"]:
            seconds = time.monotonic() - start
            if limit == inf and len(waiting) <= len(lanes) / 2:
                limit = max(ANSWER_SECONDS, 3 * seconds)
            if seconds > limit:
                break
            self.look(patience)
        for lane in waiting:
            lane.give_up()

    def settled(self, limit: float) -> None:
        """Wait at most `limit` seconds until no lane has anything under way."""
        patience, start = Patience(), time.monotonic()
        while (self.those("active") or self.those("late")) and time.monotonic() - start < limit:
            self.look(patience)
