"""Samples that one rank of each host reads, or makes, for all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hpcfl.base.errors import RunError
from hpcfl.config import Config
from hpcfl.data import Federation
from hpcfl.data.shared import attach, shared
from hpcfl.launch.failure import raise_together
from hpcfl.mpi.waiting import names


@contextmanager
def read_once(
    config: Config, data_dir: Path | None, comm: Any, hosts: Sequence[str], first: Callable[[], None]
) -> Iterator[Federation | None]:
    """Yield what this rank maps of the data that the first rank of its host has read; None: it reads them itself.

    `hosts` [ranks] are those of all ranks, which enter together; until they have all entered what follows, no rank
    leaves the block. Each calls `first` before anything is read. A rank reads by itself where no other is on its host,
    or the first one is missing, or the data cannot be shared.

    Raises
    ------
    UsageError
        If the data cannot be read; on one rank, as by `raise_together`.
    """
    rank = 0 if comm is None else comm.Get_rank()
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    with ExitStack() as stack:

        def offered() -> str:
            first()
            if len(here) == 1 or rank != here[0]:
                return ""
            return stack.enter_context(shared(config.federation(data_dir), config.data))

        own = raise_together(comm, offered)
        if len({*hosts}) == len(hosts):
            yield None
            return
        text = names(comm, own)[here[0]]
        federation = None
        try:
            federation = attach(text, config.data) if text else None
        except RunError as error:
            if rank == here[min(1, len(here) - 1)]:  # one of those that map
                print(f"hpcfl: each rank of this host reads the data by itself: {error}", file=sys.stderr, flush=True)
        yield federation
