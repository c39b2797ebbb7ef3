"""What is said on a lane beside visits, in messages of fixed size: commands down, and a leader's notices up."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from hpcfl.base.types import Ints

NONE: Ints = np.zeros(0, dtype=np.int64)
HEAD = 8  # op, round, attempt, closes_after, stage, stopped or work, hard, state
HALF = 32  # bits of the steps of a visit, and as many of the fewest


class Op(IntEnum):
    """What a lane is to do."""

    VISIT = 1
    CLOSE = 2
    SCORE = 3
    SAVE = 4
    RELEASE = 5
    LEAVE = 6
    PROFILE = 7
    ADOPT = 8
    WRITE = 9


@dataclass(frozen=True)
class Command:
    """One control message.

    `counted` [h] has, for each client that the lane hosts, what counted of its last visit of which anything did, see
    `acknowledgment`; 0: nothing did. It is said again and again: who has heard it knows which visit it is about.
    """

    op: Op
    round: int = 0
    attempt: int = 0  # how many at this round were void
    closes_after: float = 0.0  # seconds from the round's start after which it closes at the latest
    stage: int = 0  # of doubling participant sets
    stopped: int = 0  # when leaving: the exit code of a run that did not come to its end, else 0
    hard: bool = False  # when leaving: end without MPI's farewell, which the dead would have to take part in
    state: int = 0  # the number of the shared state, which comes along unless it has come before; 0: it always does
    counted: Ints = field(default_factory=lambda: NONE)
    cohort: Ints = field(default_factory=lambda: NONE)  # who is invited on all lanes, ascending client ids
    work: tuple[int, int] = (0, 0)  # of a visit for which a rule says them: its steps, and the fewest of any client's

    @staticmethod
    def empty(hosted: int, clients: int) -> Ints:
        """Return room for a message on a lane that hosts `hosted` of `clients` clients, int64."""
        return np.zeros(HEAD + hosted + -(-clients // 64), dtype=np.int64)

    def packed(self, hosted: int, clients: int) -> Ints:
        data = self.empty(hosted, clients)
        closes_after = np.float64(self.closes_after).view(np.int64)
        steps, fewest = self.work
        word = self.stopped or steps << HALF | fewest  # no visit says both
        data[:HEAD] = self.op, self.round, self.attempt, closes_after, self.stage, word, self.hard, self.state
        data[HEAD : HEAD + len(self.counted)] = self.counted
        invited = np.zeros(64 * (len(data) - HEAD - hosted), dtype=bool)
        invited[self.cohort] = True
        data[HEAD + hosted :] = np.packbits(invited).view(np.int64)
        return data

    @classmethod
    def unpacked(cls, data: Ints, hosted: int) -> Command:
        op, round_, attempt, _, stage, word, hard, state = (int(value) for value in data[:HEAD])
        stopped, work = (0, divmod(word, 1 << HALF)) if op == Op.VISIT else (word, (0, 0))
        closes_after = float(data[3:4].view(np.float64)[0])
        cohort = np.flatnonzero(np.unpackbits(data[HEAD + hosted :].view(np.uint8)))
        counted = data[HEAD : HEAD + hosted].copy()
        return cls(Op(op), round_, attempt, closes_after, stage, stopped, bool(hard), state, counted, cohort, work)


RANK_STATES = "idle", "visiting", "asked", "late", "dead", "silent"
"""As a `Notice` numbers them; who is silent is a leader that is late and has not replied at the end of a round."""


class Notice:
    """What a leader tells, whenever it has changed, of the ranks below it and of the visits that it was asked for.

    It is all in `data`, int64: ``[round, attempt, closing, over, left]``, then for each rank its state (of
    `RANK_STATES`) and how many bytes it has received and sent so far, then how many groups of each client's visits have
    come (`NOT_ASKED`: none will), then in how many parts each large block comes (`SumFormat.parts`).

    Attributes
    ----------
    closing : int
        1: it has heard that the round is closed; 2: and has added up what counts, so that all `parts` are known.
    over : bool
        Whether it has sent all that counts.
    left : int
        Bytes that are still to come after the closing, at most.
    """

    HEAD = 5
    LAST = -2  # as a round: nothing comes after it
    NOT_ASKED = -1  # who was taken for free, and was not

    def __init__(self, ranks: int, clients: int, large: int) -> None:
        sizes = self.HEAD, 3 * ranks, clients, large
        self.data: Ints = np.zeros(sum(sizes), dtype=np.int64)
        _, states, self.came, self.parts = np.split(self.data, np.cumsum(sizes)[:-1])
        self.ranks: Ints = states.reshape(ranks, 3)

    @property
    def attempt(self) -> tuple[int, int]:
        """The round and the attempt at it that this is about."""
        return int(self.data[0]), int(self.data[1])

    @property
    def closing(self) -> int:
        return int(self.data[2])

    @property
    def over(self) -> bool:
        return bool(self.data[3])

    @property
    def left(self) -> int:
        return int(self.data[4])

    def copy(self) -> Notice:
        """Return another one that tells the same."""
        made = Notice(len(self.ranks), len(self.came), len(self.parts))
        made.data[:] = self.data
        return made

    def tells_more(self, last: Notice, groups: int) -> bool:
        """Whether it tells more than the last one did: of rounds, of ranks, or of visits that are complete or none."""
        if (self.data[: self.HEAD] != last.data[: self.HEAD]).any() or (self.ranks[:, 0] != last.ranks[:, 0]).any():
            return True
        settled = [np.where(came == groups, came, np.minimum(came, 0)) for came in (self.came, last.came)]
        return bool((settled[0] != settled[1]).any())

    def told(self) -> list[str]:
        """Return the state of each rank, of `RANK_STATES`."""
        return [RANK_STATES[number] for number in self.ranks[:, 0].tolist()]

    def states(self) -> list[str]:
        """Return the same as those of a `Lane`: who is silent is late."""
        return ["late" if state == "silent" else state for state in self.told()]
