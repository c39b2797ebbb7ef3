"""What the ranks of a host share: devices, and samples that one of them reads, or makes, for all.

And what torch is told so that a GPU gives the same bits each time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hpcfl.base.errors import RunError
from hpcfl.base.lazy import torch
from hpcfl.base.terminal import say
from hpcfl.config import Config
from hpcfl.data import Federation
from hpcfl.data.shared import attach, shared
from hpcfl.launch.failure import raise_together
from hpcfl.mpi.devices import NAME_BYTES, check_shared, chosen, described
from hpcfl.mpi.waiting import names

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS reads it when it is first used
FIXED = ":4096:8"  # one of the two settings with which cuBLAS promises the same bits


def placed(config: Config, comm: Any, hosts: Sequence[str]) -> tuple[str, list[str]]:
    """Return the device on which this rank computes, and what all ranks have; `hosts` [ranks] are theirs.

    Raises
    ------
    UsageError
        Where a GPU is asked for and there is none, or more ranks share one than the config allows; on one rank, as by
        `raise_together`.
    """
    rank = 0 if comm is None else comm.Get_rank()
    key = "server_device" if rank == 0 and len(hosts) > 1 else "device"
    own = raise_together(comm, lambda: chosen(getattr(config, key), key, hosts[:rank].count(hosts[rank])))
    if comm is None:
        return own, [described(own)]
    devices = names(comm, described(own), NAME_BYTES)
    raise_together(comm, lambda: check_shared(devices, hosts, config.ranks_per_device))
    return own, devices


def other_device(recorded: Mapping[str, str], devices: Sequence[str]) -> str:
    """Return in words that clients' computing goes on with another kind of device than it began with, "" if not."""
    began = json.loads(recorded.get("devices", "[]"))
    then, now = (
        ["cpu", *filter(None, each)][-1].partition(" GPU-")[0].partition(" MIG-")[0] for each in (began, devices)
    )
    return "" if then == now else f"began on {then} and goes on with {now}: last bits will differ from one whole run's"


@contextmanager
def fixed_arithmetic(wanted: bool) -> Iterator[None]:
    """Let a GPU use only algorithms that give the same bits each time, and no TF32, within the block, where `wanted`.

    Afterwards torch's flags and the environment are as they were.
    """
    if not wanted:
        yield
        return
    backends: Any = torch.backends
    deterministic: Any = torch.utils.deterministic
    cudnn, matmul = backends.cudnn, backends.cuda.matmul
    places: list[tuple[Any, str]] = [(cudnn, "benchmark"), (cudnn, "deterministic")]
    places += [(deterministic, "fill_uninitialized_memory"), (matmul, "allow_tf32"), (cudnn, "allow_tf32")]
    places += [(part, "fp32_precision") for part in (matmul, getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None))]
    before = [(place, name, value) for place, name in places if (value := _flag(place, name)) is not None]
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(WORKSPACE)
    try:
        os.environ.setdefault(WORKSPACE, FIXED)
        torch.use_deterministic_algorithms(True)
        deterministic.fill_uninitialized_memory = False  # a guard against reading it, which costs a pass over it
        cudnn.benchmark, cudnn.deterministic = False, True
        matmul.allow_tf32 = cudnn.allow_tf32 = False
        yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warns)
        for place, name, value in before:
            if _flag(place, name) != value:  # setting some of these by both of their names makes one unreadable
                setattr(place, name, value)
        if workspace is None:
            os.environ.pop(WORKSPACE, None)


def _flag(place: Any, name: str) -> Any:
    """Return a flag of torch; None where this version has none, or none by this name since it was set by another."""
    try:
        return getattr(place, name, None)
    except RuntimeError:
        return None


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
                say(f"each rank of this host reads the data by itself: {error}")
        yield federation
