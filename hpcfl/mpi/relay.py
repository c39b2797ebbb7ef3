"""A rank that passes messages on between the server and its neighbours, whatever they say.

Where each rank speaks with the server by itself, yet the server shall reach few ranks only, those of a node share the
way of one of them. That one takes what is to be passed on from a communicator of its own, so it need not know what
comes; messages of one lane keep their order. It holds each until it has left. A neighbour's last one is for itself:
there are no more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.lazy import MPI
from hpcfl.mpi.channel import NOTICES, TAGS

AT_ONCE_SECONDS = 0.001  # how long a look goes on while something is on its way: large messages need many

Held: TypeAlias = "tuple[MPI.Request, NDArray[np.uint8]]"
"""What MPI is doing with a message, and its bytes."""


class Relay:
    """Passes on what goes to some `ranks` and what comes from them.

    `comms` are as for `hpcfl.mpi.channel.Relayed`.
    """

    def __init__(self, comms: Sequence[MPI.Intracomm], ranks: Collection[int]) -> None:
        self.comm, self.passing = comms
        self._coming: dict[tuple[int, int], deque[Held]] = {}  # by source and tag
        self._leaving: list[Held] = []
        self._there = {*ranks}  # who may still have something to say

    @property
    def over(self) -> bool:
        """Whether all ranks have said that there is nothing more, or are dead, and all has left."""
        return not (self._coming or self._leaving or self._there)

    def look(self) -> None:
        """Pass on what is there; while something is on its way, for a short time."""
        until = 0.0
        while self._moved() or self._coming or self._leaving:
            now = time.monotonic()
            until = until or now + AT_ONCE_SECONDS
            if now > until:
                return

    def _moved(self) -> bool:
        try:
            taken = self._take()
        except MPI.Exception:  # somebody is dead, and any message could have been theirs
            self.passing.Ack_failed()
            everybody, dead = self.passing.Get_group(), self.passing.Get_failed()
            self._there -= {*dead.Translate_ranks(range(dead.Get_size()), everybody)}
            taken = False
        return taken | self._pass_on()

    def _take(self) -> bool:
        status = MPI.Status()
        message = self.passing.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        if message is None:
            return False
        room = np.empty(status.Get_count(MPI.BYTE), dtype=np.uint8)
        source, tag = status.Get_source(), status.Get_tag()
        if tag % TAGS == NOTICES:
            self._there.discard(source)
        self._coming.setdefault((source, tag), deque()).append((message.Irecv(room), room))
        return True

    def _pass_on(self) -> bool:
        moved = False
        for (source, tag), waiting in list(self._coming.items()):
            while waiting and _ended(waiting[0][0]):
                _, room = waiting.popleft()
                moved = True
                if tag % TAGS != NOTICES:
                    with suppress(MPI.Exception):  # whom it is for is dead
                        self._leaving.append((self.comm.Isend(room, 0 if source else tag // TAGS, tag), room))
            if not waiting:
                del self._coming[source, tag]
        left = [(request, room) for request, room in self._leaving if not _ended(request)]
        moved |= len(left) < len(self._leaving)
        self._leaving = left
        return moved


def _ended(request: MPI.Request) -> bool:
    """Whether a request is complete, or has failed because the other rank is dead."""
    try:
        return bool(request.Test())
    except MPI.Exception:
        return True
