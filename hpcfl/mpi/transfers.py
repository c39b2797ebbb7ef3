"""What a rank has under way with many others, looked at in one call of MPI."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from hpcfl.base.lazy import MPI


class Near:
    """What is under way within this process, as MPI's requests are between several."""

    done = False

    def Test(self) -> bool:  # noqa: N802
        return self.done


def complete(requests: Sequence[Any]) -> bool:
    """Whether all requests are complete."""
    return all(request.Test() for request in requests)


class Transfer:
    """Requests that belong together, of one `owner`.

    Attributes
    ----------
    left : int
        How many are not complete; one that has failed never is.
    outgoing : int
        Bytes that are being sent, 0 once they are.
    """

    __slots__ = ("kept", "left", "outgoing", "owner")

    def __init__(self, owner: Hashable, left: int, kept: Any, outgoing: int) -> None:
        self.owner, self.left, self.kept, self.outgoing = owner, left, kept, outgoing

    @property
    def done(self) -> bool:
        return self.left == 0


class Transfers:
    """All that is under way between this rank and many others.

    One call looks at all requests, however many there are: one by one each look takes the time of as many.

    Attributes
    ----------
    outgoing : int
        Bytes that are being sent.
    """

    def __init__(self) -> None:
        self.outgoing = 0
        self._requests: list[MPI.Request] = []
        self._transfers: list[Transfer] = []  # whose each request is
        self._statuses: list[MPI.Status] = []
        self._stirred: dict[Hashable, str] = {}
        self._near: list[tuple[Near, Transfer]] = []
        self._abandoned: list[tuple[MPI.Request, Transfer]] = []

    def begin(self, owner: Hashable, requests: Sequence[Any], kept: Any = None, outgoing: int = 0) -> Transfer:
        """Take in requests that have just begun.

        Parameters
        ----------
        kept
            What MPI reads or writes: it lives until the requests are complete, whatever becomes of the owner.
        outgoing : int
            Bytes that these requests send.
        """
        transfer = Transfer(owner, len(requests), kept, outgoing)
        self.outgoing += outgoing
        self._near += [(request, transfer) for request in requests if isinstance(request, Near)]
        others = [request for request in requests if not isinstance(request, Near)]
        self._requests += others
        self._transfers += [transfer] * len(others)
        self.stir(owner)
        return transfer

    def stir(self, owner: Hashable) -> None:
        """Let the next look return this owner, whatever has happened."""
        self._stirred.setdefault(owner, "")

    def look(self) -> dict[Any, str]:
        """Return the owners of transfers that are complete or new since the last look, with an error of MPI's or ""."""
        found = self._found()
        for index, error in found:
            transfer = self._transfers[index]
            if error:
                self._stirred[transfer.owner] = " ".join(MPI.Get_error_string(error).split())
                continue
            self._less(transfer)
        for request, transfer in self._near:
            if request.done:
                self._less(transfer)
        self._near = [(request, transfer) for request, transfer in self._near if not request.done]
        for index in sorted((index for index, _ in found), reverse=True):  # the last one takes its place
            for row in (self._requests, self._transfers):
                last: Any = row.pop()
                if index < len(row):
                    row[index] = last
        stirred, self._stirred = self._stirred, {}
        return stirred

    def abandon(self, owner: Hashable) -> None:
        """Look no more at what an owner has under way; the memory stays, since MPI may still use it."""
        pairs = list(zip(self._requests, self._transfers))
        mine = [(request, each) for request, each in pairs if each.owner == owner]
        if mine:
            self._abandoned += mine
            kept = [(request, each) for request, each in pairs if each.owner != owner]
            self._requests, self._transfers = [request for request, _ in kept], [each for _, each in kept]
            for each in {id(each): each for _, each in mine}.values():
                self.outgoing -= each.outgoing
                each.outgoing = 0
        self._near = [(request, each) for request, each in self._near if each.owner != owner]
        self._stirred.pop(owner, None)

    def _less(self, transfer: Transfer) -> None:
        """Note that one request of a transfer is complete, and whether that was the last one."""
        transfer.left -= 1
        if not transfer.done:
            return
        self.outgoing -= transfer.outgoing
        transfer.kept, transfer.outgoing = None, 0  # MPI needs the memory no more
        self._stirred.setdefault(transfer.owner, "")

    def _found(self) -> list[tuple[int, int]]:
        """Return which requests are complete by now, and the error of each, 0 for none."""
        try:
            return [(index, 0) for index in MPI.Request.Testsome(self._requests, self._statuses) or ()]
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_IN_STATUS:
                raise
        # which ones is lost with the call's result: they are those that are no requests any more, in their order
        done = [index for index, request in enumerate(self._requests) if request == MPI.REQUEST_NULL]
        return [(index, status.Get_error()) for index, status in zip(done, self._statuses)]
