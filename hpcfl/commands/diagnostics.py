"""What the ranks of a launch found, and the traps in it: one line each, with the fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcfl.comm import launcher as world
from hpcfl.comm.placement import shares

LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


@dataclass(frozen=True)
class Rank:
    """What one rank sees of its place.

    Attributes
    ----------
    host, device, gpu : str
        Where it runs; `gpu` tells one GPU from another, whatever its number, and is empty on a CPU.
    cores : list of int
        The cores that it may use.
    host_cores, threads : int
        Cores of the host, and threads that torch uses on this rank as it was started.
    polling : list of float
        Seconds of a broadcast of 8 bytes and of 1 MB, polled, medians; empty without MPI.
    settings : dict
        The environment variables that traps depend on, where they are set.
    """

    host: str
    device: str
    gpu: str
    cores: list[int]
    host_cores: int
    threads: int
    polling: list[float] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """What all ranks found.

    Attributes
    ----------
    launcher, mpi, standard, level : str
        Who started the ranks, name and number of the MPI library, of the standard, and the thread level; the last
        two are empty where MPI was not started.
    wrong : str
        What is wrong with the launch, empty where all is well.
    ulfm : bool
        A dead rank is reported to the others.
    cuda : bool or None
        MPI takes buffers in GPU memory; None: it cannot be asked, or was not started.
    wheels : list of str
        MPI runtimes installed into this Python environment.
    """

    ranks: list[Rank]
    launcher: str = ""
    mpi: str = ""
    standard: str = ""
    level: str = ""
    wrong: str = ""
    ulfm: bool = False
    cuda: bool | None = None
    wheels: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def hosts(self) -> dict[str, list[int]]:
        """Return the ranks of each host, hosts in the order of their first ranks."""
        found: dict[str, list[int]] = {}
        for rank, here in enumerate(self.ranks):
            found.setdefault(here.host, []).append(rank)
        return found

    def cores(self, host: str) -> int:
        """Return how many cores the ranks of a host may use together."""
        return len({core for rank in self.hosts()[host] for core in self.ranks[rank].cores})

    def share(self) -> list[int]:
        """Return each rank's share of the cores of its host."""
        found = [1] * len(self.ranks)
        for members in self.hosts().values():
            for rank, share in zip(members, shares([self.ranks[rank].cores for rank in members])):
                found[rank] = share
        return found


def traps(facts: Facts) -> list[str]:
    """Return one line per trap."""
    found = (
        facts.wrong,
        two_wheels(facts.wheels),
        thread_level(facts.level),
        threads_unset(facts),
        too_many_threads(facts),
        oversubscribed(facts),
        bound_to_one(facts),
        shared_gpu(facts.ranks),
        async_progress(facts.ranks),
        no_ulfm(facts),
    )
    return [line for line in found if line]


def two_wheels(wheels: Sequence[str]) -> str:
    """Return a line if both MPI runtimes are in one environment: both bring bin/mpiexec."""
    if len(wheels) < 2:
        return ""
    return (
        f"{' and '.join(wheels)} are installed in one environment, and both bring bin/mpiexec; uninstall both, "
        "then install each with pip install --ignore-installed --prefix .mpi/<name> <name>"
    )


def thread_level(level: str) -> str:
    """Return a line if MPI would not stand a second thread: one computes while the main one talks."""
    if level not in LEVELS or LEVELS.index(level) >= LEVELS.index("SERIALIZED"):
        return ""
    return f"MPI's thread level is {level}, expected SERIALIZED or MULTIPLE; use an MPI that is built with threads"


def threads_unset(facts: Facts) -> str:
    """Return a line if each of several ranks would take all cores."""
    crowded = [
        host
        for host, members in facts.hosts().items()
        if len(members) > 1 and any("OMP_NUM_THREADS" not in facts.ranks[rank].settings for rank in members)
    ]
    if not crowded:
        return ""
    first = facts.hosts()[crowded[0]]
    most = max(facts.ranks[rank].threads for rank in first)
    return (
        f"OMP_NUM_THREADS is unset with {_on(len(first), crowded)}: what torch takes depends on its build (here up to "
        f"{most} per rank) unless the config says; export OMP_NUM_THREADS={min(facts.share()[rank] for rank in first)}"
    )


def too_many_threads(facts: Facts) -> str:
    """Return a line if somebody asked for more threads than there are cores."""
    asked = {
        host: [facts.ranks[rank].threads for rank in members]
        for host, members in facts.hosts().items()
        if all("OMP_NUM_THREADS" in facts.ranks[rank].settings for rank in members)
    }
    crowded = [host for host, each in asked.items() if max(each) > 1 and sum(each) > facts.cores(host)]
    if not crowded:
        return ""
    each, members = asked[crowded[0]], facts.hosts()[crowded[0]]
    return (
        f"{_on(len(each), crowded)}: {sum(each)} threads with {_cores(facts.cores(crowded[0]))}; "
        f"export OMP_NUM_THREADS={min(facts.share()[rank] for rank in members)}"
    )


def oversubscribed(facts: Facts) -> str:
    """Return a line if there are more ranks than cores; those that wait cost little, as they sleep."""
    crowded = [host for host, members in facts.hosts().items() if len(members) > facts.cores(host)]
    if not crowded:
        return ""
    count, cores = len(facts.hosts()[crowded[0]]), facts.cores(crowded[0])
    return (
        f"{_on(count, crowded)} with {_cores(cores)}: waiting ranks sleep and cost little, computing ones slow "
        f"each other; for timings start at most {cores} there"
    )


def bound_to_one(facts: Facts) -> str:
    """Return a line if Open MPI bound its ranks to one core each, as it does with two, on however large a host."""
    for host, members in facts.hosts().items():
        if facts.launcher == world.OPENMPI and all(len(facts.ranks[rank].cores) == 1 for rank in members):
            total = facts.ranks[members[0]].host_cores
            if total > len(members):
                return (
                    f"{_on(len(members), [host])}: each is bound to one of its {total} cores; "
                    "start with mpiexec --bind-to none, or --map-by slot:PE=<cores per rank>"
                )
    return ""


def shared_gpu(ranks: Sequence[Rank]) -> str:
    """Return a line if client ranks share a GPU; the server does not count, it computes little."""
    users = Counter((rank.host, rank.gpu) for rank in ranks[1:] if rank.gpu)
    for (host, gpu), count in users.items():
        if count > 1:
            device = next(rank.device for rank in ranks[1:] if (rank.host, rank.gpu) == (host, gpu))
            return (
                f"{count} client ranks share one GPU ({device}, host {host}): its memory and time are divided; "
                "start as many client ranks per host as it has GPUs, or show each its own (srun --gpus-per-task=1)"
            )
    return ""


def async_progress(ranks: Sequence[Rank]) -> str:
    """Return a line if MPICH's progress thread is on: it spins on a core."""
    for rank in ranks:
        value = rank.settings.get("MPIR_CVAR_ASYNC_PROGRESS", "0")
        if value.lower() not in ("", "0", "no", "false", "off"):
            return (
                f"MPIR_CVAR_ASYNC_PROGRESS={value}: a thread of each rank spins, rounds took 1.7 times longer; unset it"
            )
    return ""


def no_ulfm(facts: Facts) -> str:
    """Return what becomes of a job whose rank dies."""
    if facts.ulfm or len(facts.ranks) < 2:
        return ""
    end = "a rank that dies ends the job; go on with hpcfl resume"
    if facts.mpi.startswith("Open MPI") and facts.launcher == world.OPENMPI:
        return f"no fault tolerance (ULFM): {end}, or start with mpiexec --with-ft ulfm to go on without it"
    return (
        f"no fault tolerance (ULFM) with {facts.mpi}: {end}; Open MPI 5's mpiexec --with-ft ulfm would go on without it"
    )


def _on(count: int, hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - 1} more" if len(hosts) > 1 else ""
    return f"{count} rank{'s' * (count != 1)} on host {hosts[0]}{more}"


def _cores(count: int) -> str:
    return f"{count} core{'s' * (count != 1)}"
