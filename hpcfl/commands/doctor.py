"""What a launch looks like from the inside: MPI, ranks, hosts, devices, threads; and what is wrong with it.

Of each thing that is wrong one line, with the fix.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfl.base.errors import count_of
from hpcfl.base.lazy import MPI, torch
from hpcfl.launch.failure import raise_together
from hpcfl.launch.run import versions
from hpcfl.mpi import launcher as world
from hpcfl.mpi.cores import Processors, host_cores, processors, shares, threads
from hpcfl.mpi.devices import chosen, described
from hpcfl.mpi.launcher import OPENMPI
from hpcfl.mpi.waiting import texts, wait

THREADS = "OMP_NUM_THREADS"
LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


@dataclass(frozen=True)
class Rank:
    """What one rank sees of its place."""

    host: str
    device: str
    gpu: str  # tells one GPU from another, whatever its number; empty on a CPU
    cores: list[int]  # that it may use
    host_cores: int
    threads: int  # that torch uses on this rank as it was started
    polling: list[float] = field(default_factory=list)  # median seconds of polled broadcasts; empty without MPI
    settings: dict[str, str] = field(default_factory=dict)  # environment variables that diagnoses depend on, if set
    quotas: dict[str, float] = field(default_factory=dict)  # as in `Processors`


@dataclass(frozen=True)
class Facts:
    """What all ranks found."""

    ranks: list[Rank]
    launcher: str = ""
    mpi: str = ""  # name and number of the library
    standard: str = ""  # this and the next: empty where MPI was not started
    level: str = ""
    wrong: str = ""  # with the launch
    ulfm: bool = False  # a dead rank is reported to the others
    cuda: bool | None = None  # MPI takes buffers in GPU memory; None: it cannot be asked, or was not started
    wheels: list[str] = field(default_factory=list)  # MPI runtimes installed into this Python environment
    versions: dict[str, str] = field(default_factory=dict)
    granted: int = 0  # hosts that the batch system has given to the job, where it says so

    def hosts(self) -> dict[str, list[int]]:
        """The ranks of each host, hosts in the order of their first ranks."""
        by_host: dict[str, list[int]] = {}
        for rank, here in enumerate(self.ranks):
            by_host.setdefault(here.host, []).append(rank)
        return by_host

    def on(self, host: str) -> list[Rank]:
        return [rank for rank in self.ranks if rank.host == host]

    def cores(self, host: str) -> int:
        """How many cores the ranks of a host may use together, by number or by time."""
        return max(1, int(sum(share for rank, share in zip(self.ranks, self.share()) if rank.host == host) + 1e-6))

    def share(self) -> list[float]:
        """Each rank's share of the cores of its host."""
        return shares([Processors(rank.cores, rank.quotas) for rank in self.ranks], [rank.host for rank in self.ranks])

    def run_threads(self) -> list[int]:
        """The threads that each rank of a run in real time takes unless its config says."""
        asked = [rank.settings.get(THREADS, "") for rank in self.ranks]
        return [threads(share, each) for share, each in zip(self.share(), asked)]

    def fit(self, host: str) -> int:
        """Threads per rank that a host has cores for."""
        return min(threads(share) for rank, share in zip(self.ranks, self.share()) if rank.host == host)


def diagnose(facts: Facts) -> Iterator[str]:
    """Yield one line for each thing that is wrong."""
    if facts.wrong:
        yield facts.wrong
    if len(facts.wheels) > 1:
        both = f"{' and '.join(facts.wheels)} are installed in one environment, and both bring bin/mpiexec"
        install = "pip install --ignore-installed --prefix .mpi/<name> <name>"
        yield f"{both}; uninstall both, then install each with {install}"
    if facts.level in ("SINGLE", "FUNNELED"):  # one thread computes while the main one talks: MPI has to stand that
        expected = "expected SERIALIZED or MULTIPLE; use an MPI that is built with threads"
        yield f"MPI's thread level is {facts.level}, {expected}"
    if facts.granted > (used := len(facts.hosts())) < len(facts.ranks):
        meant = f"{facts.granted} hosts were given to this job, but its {len(facts.ranks)} ranks are on {used}"
        yield f"{meant} ({', '.join(facts.hosts())}); spread them: --map-by node (Open MPI), -ppn (MPICH), srun -N"
    yield from _crowded(facts)
    clients = [rank for rank in facts.ranks[1:] if rank.gpu]  # the server does not count, it computes little
    shared = ((rank, sum((rank.host, rank.gpu) == (each.host, each.gpu) for each in clients)) for rank in clients)
    for rank, count in [each for each in shared if each[1] > 1][:1]:
        who = f"{count} client ranks share one GPU ({rank.device}, host {rank.host}), which hpcfl run refuses"
        instead = f"start as many client ranks per host as it has GPUs, or set ranks_per_device = {count}"
        yield f"{who}; {instead}: time and memory are divided"
    values = (rank.settings.get("MPIR_CVAR_ASYNC_PROGRESS", "") for rank in facts.ranks)
    if value := next((value for value in values if value.lower() not in ("", "0", "no", "false", "off")), ""):
        yield f"MPIR_CVAR_ASYNC_PROGRESS={value}: a thread of each rank spins, rounds took 1.7 times longer; unset it"
    if facts.ulfm or len(facts.ranks) < 2:
        return
    end = "a rank that dies ends the job; go on with hpcfl resume"
    if facts.mpi.startswith("Open MPI") and facts.launcher == OPENMPI:
        yield f"no fault tolerance (ULFM): {end}, or start with mpiexec --with-ft ulfm to go on without it"
    else:
        instead = "Open MPI 5's mpiexec --with-ft ulfm would go on without it"
        yield f"no fault tolerance (ULFM) with {facts.mpi}: {end}; {instead}"


def _crowded(facts: Facts) -> Iterator[str]:
    """Hosts whose ranks would take more cores than there are, or fewer than they may."""
    by_host = {host: facts.on(host) for host in facts.hosts()}
    told = {host: [rank.threads for rank in here if THREADS in rank.settings] for host, here in by_host.items()}
    all_each = [host for host, here in by_host.items() if len(told[host]) < len(here) > 1]
    if all_each:
        host = all_each[0]
        most = max(rank.threads for rank in by_host[host])
        takes = f"what torch takes depends on its build (here up to {most} per rank) unless the config says"
        yield f"{THREADS} is unset with {_ranks_on(facts, all_each)}: {takes}; export {THREADS}={facts.fit(host)}"
    too_many = [
        host
        for host, here in by_host.items()
        if len(told[host]) == len(here) and max(told[host]) > 1 and sum(told[host]) > facts.cores(host)
    ]
    if too_many:
        host = too_many[0]
        threads = f"{sum(told[host])} threads with {count_of(facts.cores(host), 'core')}"
        yield f"{_ranks_on(facts, too_many)}: {threads}; export {THREADS}={facts.fit(host)}"
    if over := [host for host, here in by_host.items() if len(here) > facts.cores(host)]:
        cores = facts.cores(over[0])
        crowd = f"{_ranks_on(facts, over)} with {count_of(cores, 'core')}"
        cost = "waiting ranks sleep and cost little, computing ones slow each other"
        yield f"{crowd}: {cost}; for timings start at most {cores} there"
    for host, here in by_host.items() if facts.launcher == OPENMPI else ():  # it binds two ranks to one core each
        if all(len(rank.cores) == 1 for rank in here) and here[0].host_cores > len(here):
            bound = f"{_ranks_on(facts, [host])}: each is bound to one of its {here[0].host_cores} cores"
            yield f"{bound}; start with mpiexec --bind-to none, or --map-by slot:PE=<cores per rank>"
            break


def _ranks_on(facts: Facts, hosts: Sequence[str]) -> str:
    """How many ranks are on the first of these hosts, and how many hosts are alike."""
    more = f" and {len(hosts) - 1} more" if len(hosts) > 1 else ""
    return f"{count_of(len(facts.on(hosts[0])), 'rank')} on host {hosts[0]}{more}"


SETTINGS = ("OMP_NUM_THREADS", "MPIR_CVAR_ASYNC_PROGRESS", "MPI4PY_LIBMPI", "CUDA_VISIBLE_DEVICES")
SIZES = (8, 1_000_000)  # bytes of the broadcasts that are timed
REPEATS = 7
# in a process of its own: once MPI is loaded unstarted, nothing else here could start it on import
PROBE = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


def granted(environ: Mapping[str, str]) -> int:
    """Return how many hosts a batch system, Slurm or PBS, has given to the job; 0 where there is none."""
    with suppress(KeyError, OSError):
        return len({*Path(environ["PBS_NODEFILE"]).read_text().split()})
    return int(environ.get("SLURM_JOB_NUM_NODES", 0))


def examine(comm: Any) -> Facts | None:
    """Look around on all ranks of `comm` (None: this process); return what they find on rank 0, None on the others."""
    raise_together(comm, lambda: import_module("torch"))
    own, seen = chosen("auto", "device", world.local(comm)), processors()
    here = Rank(
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
    found = texts(comm, json.dumps(asdict(here)))
    if comm is not None and comm.Get_rank() > 0:
        return None
    wheels = []
    for name in ("openmpi", "mpich"):
        with suppress(PackageNotFoundError):
            wheels.append(f"{name} {version(name)}")
    if comm is None:
        mpi: dict[str, Any] = {"mpi": _unstarted()}
    else:
        text = MPI.Get_library_version()
        mpi = {
            "mpi": world.library(text),
            "standard": ".".join(str(number) for number in MPI.Get_version()),
            "level": next(name for name in LEVELS if getattr(MPI, f"THREAD_{name}") == MPI.Query_thread()),
            "wrong": world.mismatch(os.environ, text),
            "ulfm": world.has_ulfm(comm),
            "cuda": world.has_cuda(comm),
        }
    return Facts(
        [Rank(**json.loads(each)) for each in found],
        launcher=world.launcher(os.environ),
        wheels=wheels,
        granted=granted(os.environ),
        versions=versions() | {"torch_cuda": str(torch.version.cuda or "none"), "hdf5": h5py.version.hdf5_version},
        **mpi,
    )


def as_object(facts: Facts) -> dict[str, Any]:
    """All facts, each rank's share of the cores and the diagnoses, as JSON has them."""
    whole = asdict(facts) | {"world": len(facts.ranks), "traps": [*diagnose(facts)]}
    threads = zip(whole["ranks"], facts.share(), facts.run_threads())
    whole["ranks"] = [each | {"share": share, "run_threads": count} for each, share, count in threads]
    return whole


def report(facts: Facts) -> list[str]:
    """The lines to print: what was found, then what is wrong with it."""
    hosts = facts.hosts()
    per_host = _span(sorted({len(members) for members in hosts.values()}))
    dead = "ULFM: a run goes on without a dead rank" if facts.ulfm else "no ULFM: a dead rank ends the job"
    aware = {True: "yes", False: "no", None: "unknown"}[facts.cuda] if facts.standard else "not started"
    mpi = f"{facts.mpi} · standard {facts.standard} · thread level {facts.level} · started by {facts.launcher}"
    if not facts.standard:
        loads = f"mpi4py would load {facts.mpi}" if facts.mpi else "mpi4py finds none to load"
        mpi = f"not started: {facts.launcher or 'no launcher'}; {loads}"
    waiting = "polled: yields while bytes move, then sleeps, up to 2 ms"
    if facts.ranks[0].polling:
        small, large = (max(rank.polling[place] for rank in facts.ranks) * 1e3 for place in range(len(SIZES)))
        waiting += f" · Ibcast of 8 bytes {small:.3f} ms, of 1 MB {large:.3f} ms (slowest rank)"
    rows = [
        ("MPI", mpi),
        ("world", f"{count_of(len(facts.ranks), 'rank')} on {count_of(len(hosts), 'host')}, {per_host} per host"),
        *((f"host {host}", _host(facts, members)) for host, members in hosts.items()),
        ("waiting", waiting),
        ("faults", dead if facts.ulfm or facts.standard else "MPI not started"),
        ("GPU", f"CUDA-aware MPI: {aware} · torch built with CUDA: {facts.versions.get('torch_cuda', 'unknown')}"),
        ("versions", " · ".join(f"{name} {number}" for name, number in facts.versions.items())),
    ]
    wide = max(len(name) for name, _ in rows) + 2
    wrong = [f"trap: {line}" for line in [*diagnose(facts)] or ["none found"]]
    return [f"{name:<{wide}}{text}" for name, text in rows] + wrong


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


def _span(numbers: Sequence[int]) -> str:
    """``3`` or ``1-3`` for sorted numbers."""
    return str(numbers[0]) if numbers[0] == numbers[-1] else f"{numbers[0]}-{numbers[-1]}"


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


def _unstarted() -> str:
    """The MPI that mpi4py would load, empty if none."""
    try:
        probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return world.library(probe.stdout) if probe.returncode == 0 else ""
