"""What the server tells a lane: one control message of fixed size."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from hpcfl.base.types import Ints

NONE: Ints = np.zeros(0, dtype=np.int64)
HEAD = 7  # op, round, attempt, closes_after, stage, stopped, hard


class Op(IntEnum):
    """What a lane is to do."""

    VISIT = 1
    CLOSE = 2
    SCORE = 3
    SAVE = 4
    RELEASE = 5
    LEAVE = 6


@dataclass(frozen=True)
class Call:
    """One control message.

    Attributes
    ----------
    op : Op
    round, attempt : int
        The round, and how many void attempts it has had.
    closes_after : float
        Seconds from the round's start after which it closes at the latest.
    stage : int
        The stage of doubling participant sets.
    stopped : int
        When leaving: the exit code of a run that did not come to its end, else 0.
    hard : bool
        When leaving: whether to end without MPI's farewell, which the dead would have to take part in.
    counted : int64 [h]
        For each client that the lane hosts: the first layer of its last visit that counted (L + 1: none);
        0 where there is nothing to acknowledge.
    cohort : int64 [n]
        Who is invited on all lanes, ascending client ids.
    """

    op: Op
    round: int = 0
    attempt: int = 0
    closes_after: float = 0.0
    stage: int = 0
    stopped: int = 0
    hard: bool = False
    counted: Ints = field(default_factory=lambda: NONE)
    cohort: Ints = field(default_factory=lambda: NONE)

    def packed(self, hosted: int, clients: int) -> Ints:
        """Return the message as int64, `length` entries."""
        data = np.zeros(length(hosted, clients), dtype=np.int64)
        closes_after = np.float64(self.closes_after).view(np.int64)
        data[:HEAD] = self.op, self.round, self.attempt, closes_after, self.stage, self.stopped, self.hard
        data[HEAD : HEAD + len(self.counted)] = self.counted
        invited = np.zeros(64 * _words(clients), dtype=bool)
        invited[self.cohort] = True
        data[HEAD + hosted :] = np.packbits(invited).view(np.int64)
        return data

    @classmethod
    def unpacked(cls, data: Ints, hosted: int) -> Call:
        """Return the message that `packed` wrote."""
        op, round_, attempt, _, stage, stopped, hard = (int(value) for value in data[:HEAD])
        closes_after = float(data[3:4].view(np.float64)[0])
        bits = np.unpackbits(data[HEAD + hosted :].view(np.uint8))
        counted, cohort = data[HEAD : HEAD + hosted], np.flatnonzero(bits)
        return cls(Op(op), round_, attempt, closes_after, stage, stopped, bool(hard), counted, cohort)


def length(hosted: int, clients: int) -> int:
    """Return the entries of a control message on a lane that hosts `hosted` of `clients` clients."""
    return HEAD + hosted + _words(clients)


def _words(clients: int) -> int:
    return -(-clients // 64)
