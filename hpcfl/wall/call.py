"""What the server tells a lane: one control message of fixed size."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from hpcfl.plan import Ints

NONE: Ints = np.zeros(0, dtype=np.int64)
HEAD = 4  # op, round, attempt, deadline


class Op(IntEnum):
    """What a lane is to do."""

    VISIT = 1
    CLOSE = 2
    SCORE = 3
    SAVE = 4
    LEAVE = 5


@dataclass(frozen=True)
class Call:
    """One control message.

    Attributes
    ----------
    op : Op
    round, attempt : int
        The round, and how many void attempts it has had; when leaving, whether the run was stopped.
    deadline : float
        Seconds from the round's start.
    counted : int64 [h]
        For each client that the lane hosts: the first layer of its last visit that counted (L + 1: none);
        0 where there is nothing to acknowledge.
    cohort : int64 [n]
        Who is invited on all lanes, ascending client ids.
    """

    op: Op
    round: int = 0
    attempt: int = 0
    deadline: float = 0.0
    counted: Ints = field(default_factory=lambda: NONE)
    cohort: Ints = field(default_factory=lambda: NONE)

    def packed(self, hosted: int, clients: int) -> Ints:
        """Return the message as int64, `length` entries."""
        data = np.zeros(length(hosted, clients), dtype=np.int64)
        data[:HEAD] = self.op, self.round, self.attempt, np.float64(self.deadline).view(np.int64)
        data[HEAD : HEAD + len(self.counted)] = self.counted
        invited = np.zeros(64 * _words(clients), dtype=bool)
        invited[self.cohort] = True
        data[HEAD + hosted :] = np.packbits(invited).view(np.int64)
        return data

    @classmethod
    def unpacked(cls, data: Ints, hosted: int) -> Call:
        """Return the message that `packed` wrote."""
        op, round_, attempt = (int(value) for value in data[:3])
        deadline = float(data[3:HEAD].view(np.float64)[0])
        bits = np.unpackbits(data[HEAD + hosted :].view(np.uint8))
        return cls(Op(op), round_, attempt, deadline, data[HEAD : HEAD + hosted], np.flatnonzero(bits))


def length(hosted: int, clients: int) -> int:
    """Return the entries of a control message on a lane that hosts `hosted` of `clients` clients."""
    return HEAD + hosted + _words(clients)


def _words(clients: int) -> int:
    return -(-clients // 64)
