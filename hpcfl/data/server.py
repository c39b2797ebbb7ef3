"""Samples that the server itself holds: which ones they are, and how they are dealt out where it is to hold none."""

from __future__ import annotations

from abc import ABC

import numpy as np
from pydantic import Field

from hpcfl.base.errors import UsageError
from hpcfl.data.base import Integers, Source
from hpcfl.data.partition import Parts


class Served(Source, ABC):
    """Keys of all sources whose server may hold training samples of its own.

    Attributes
    ----------
    server : int
        Training samples that the server holds itself, beside the clients'.
    deal : bool
        Deal the server's samples out to the clients, one each in turn, for methods whose server holds none: the
        training samples are the same in all.
    """

    server: int = Field(0, ge=0)
    deal: bool = False

    @property
    def keeps(self) -> int:
        """How many training samples the server holds in the end: none of those that are dealt out."""
        return 0 if self.deal else self.server

    def check_server(self, total: int) -> None:
        """Raise UsageError where of `total` training samples none is left to the clients, or there are none to deal."""
        if self.server >= total:
            raise UsageError(
                f"data.server = {self.server}, but there are {total} training samples for clients and server; "
                f"did you mean {total - 1}?"
            )
        if self.deal and not self.server:
            raise UsageError("data.deal = true, but data.server = 0: expected samples to deal out; did you mean 1?")


def turns(labels: Integers, count: int, rng: np.random.Generator) -> Integers:
    """Return `count` of the samples such that classes take turns: class 0, 1, …, then again, as long as each lasts.

    Any first r of them are of as many classes as can be, and are the first r of any greater `count`.

    Parameters
    ----------
    labels : int64 [n]
        Classes; all equal where there are none.
    count : int
        At most n.
    rng : numpy.random.Generator
        Decides which samples of a class come first.

    Returns
    -------
    int64 [count]
    """
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    kinds = labels[order]
    turn = np.arange(len(order)) - np.searchsorted(kinds, kinds)  # how many of its class come before
    return order[np.lexsort((kinds, turn))[:count]]


def dealt(parts: Parts, own: Integers) -> Parts:
    """Return the clients' parts with the server's samples `own` dealt out in their order, to one after the other."""
    return [np.sort(np.append(part, own[i :: len(parts)])) for i, part in enumerate(parts)]
