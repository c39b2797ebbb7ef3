"""What the ranks of a launch found, and what is wrong with it: one line each, with the fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hpcfl.mpi.cores import Processors, shares, threads
from hpcfl.mpi.launcher import OPENMPI

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
        share = self.share()
        return max(1, int(sum(share[rank] for rank in self.hosts()[host]) + 1e-6))

    def share(self) -> list[float]:
        """Each rank's share of the cores of its host."""
        by_rank = [1.0] * len(self.ranks)
        for members in self.hosts().values():
            here = [self.ranks[rank] for rank in members]
            for rank, share in zip(members, shares([Processors(each.cores, each.quotas) for each in here])):
                by_rank[rank] = share
        return by_rank

    def run_threads(self) -> list[int]:
        """The threads that each rank of a run in real time takes unless its config says."""
        asked = [rank.settings.get("OMP_NUM_THREADS", "") for rank in self.ranks]
        return [threads(share, each) for share, each in zip(self.share(), asked)]

    def fit(self, host: str) -> int:
        """Threads per rank that a host has cores for."""
        share = self.share()
        return min(threads(share[rank]) for rank in self.hosts()[host])


def diagnose(facts: Facts) -> list[str]:
    """One line for each thing that is wrong."""
    return [line for line in (facts.wrong, *(check(facts) for check in CHECKS)) if line]


def two_wheels(facts: Facts) -> str:
    if len(facts.wheels) < 2:
        return ""
    return (
        f"{' and '.join(facts.wheels)} are installed in one environment, and both bring bin/mpiexec; uninstall both, "
        "then install each with pip install --ignore-installed --prefix .mpi/<name> <name>"
    )


def thread_level(facts: Facts) -> str:
    """One thread computes while the main one talks: MPI has to stand that."""
    level = facts.level
    if level not in LEVELS or LEVELS.index(level) >= LEVELS.index("SERIALIZED"):
        return ""
    return f"MPI's thread level is {level}, expected SERIALIZED or MULTIPLE; use an MPI that is built with threads"


def threads_unset(facts: Facts) -> str:
    """Each of several ranks would take all cores."""
    hosts = _crowded(
        facts, lambda _, here: len(here) > 1 and any("OMP_NUM_THREADS" not in rank.settings for rank in here)
    )
    if not hosts:
        return ""
    most = max(rank.threads for rank in facts.on(hosts[0]))
    return (
        f"OMP_NUM_THREADS is unset with {_ranks_on(facts, hosts)}: what torch takes depends on its build (here up to "
        f"{most} per rank) unless the config says; export OMP_NUM_THREADS={facts.fit(hosts[0])}"
    )


def too_many_threads(facts: Facts) -> str:
    def too_many(host: str, here: Sequence[Rank]) -> bool:
        each = [rank.threads for rank in here if "OMP_NUM_THREADS" in rank.settings]
        return len(each) == len(here) and max(each) > 1 and sum(each) > facts.cores(host)

    hosts = _crowded(facts, too_many)
    if not hosts:
        return ""
    threads = sum(rank.threads for rank in facts.on(hosts[0]))
    return (
        f"{_ranks_on(facts, hosts)}: {threads} threads with {_cores(facts.cores(hosts[0]))}; "
        f"export OMP_NUM_THREADS={facts.fit(hosts[0])}"
    )


def oversubscribed(facts: Facts) -> str:
    """More ranks than cores; those that wait cost little, as they sleep."""
    hosts = _crowded(facts, lambda host, here: len(here) > facts.cores(host))
    if not hosts:
        return ""
    cores = facts.cores(hosts[0])
    return (
        f"{_ranks_on(facts, hosts)} with {_cores(cores)}: waiting ranks sleep and cost little, computing ones slow "
        f"each other; for timings start at most {cores} there"
    )


def bound_to_one(facts: Facts) -> str:
    """Open MPI binds two ranks to one core each, on however large a host."""
    bound = _crowded(
        facts, lambda _, here: all(len(rank.cores) == 1 for rank in here) and here[0].host_cores > len(here)
    )
    if facts.launcher != OPENMPI or not bound:
        return ""
    return (
        f"{_ranks_on(facts, bound[:1])}: each is bound to one of its {facts.on(bound[0])[0].host_cores} cores; "
        "start with mpiexec --bind-to none, or --map-by slot:PE=<cores per rank>"
    )


def shared_gpu(facts: Facts) -> str:
    """Client ranks share a GPU; the server does not count, it computes little."""
    clients = [rank for rank in facts.ranks[1:] if rank.gpu]
    for (host, gpu), count in Counter((rank.host, rank.gpu) for rank in clients).items():
        if count > 1:
            device = next(rank.device for rank in clients if (rank.host, rank.gpu) == (host, gpu))
            return (
                f"{count} client ranks share one GPU ({device}, host {host}), which hpcfl run refuses; start as many "
                f"client ranks per host as it has GPUs, or set ranks_per_device = {count}: time and memory are divided"
            )
    return ""


def async_progress(facts: Facts) -> str:
    """MPICH's progress thread spins on a core."""
    for rank in facts.ranks:
        value = rank.settings.get("MPIR_CVAR_ASYNC_PROGRESS", "")
        if value.lower() not in ("", "0", "no", "false", "off"):
            return (
                f"MPIR_CVAR_ASYNC_PROGRESS={value}: a thread of each rank spins, rounds took 1.7 times longer; unset it"
            )
    return ""


def no_ulfm(facts: Facts) -> str:
    if facts.ulfm or len(facts.ranks) < 2:
        return ""
    end = "a rank that dies ends the job; go on with hpcfl resume"
    if facts.mpi.startswith("Open MPI") and facts.launcher == OPENMPI:
        return f"no fault tolerance (ULFM): {end}, or start with mpiexec --with-ft ulfm to go on without it"
    return (
        f"no fault tolerance (ULFM) with {facts.mpi}: {end}; Open MPI 5's mpiexec --with-ft ulfm would go on without it"
    )


CHECKS = (
    two_wheels,
    thread_level,
    threads_unset,
    too_many_threads,
    oversubscribed,
    bound_to_one,
    shared_gpu,
    async_progress,
    no_ulfm,
)


def _crowded(facts: Facts, is_crowded: Callable[[str, Sequence[Rank]], bool]) -> list[str]:
    return [host for host in facts.hosts() if is_crowded(host, facts.on(host))]


def _ranks_on(facts: Facts, hosts: Sequence[str]) -> str:
    """How many ranks are on the first of these hosts, and how many hosts are alike."""
    count, more = len(facts.on(hosts[0])), f" and {len(hosts) - 1} more" if len(hosts) > 1 else ""
    return f"{count} rank{'s' * (count != 1)} on host {hosts[0]}{more}"


def _cores(count: int) -> str:
    return f"{count} core{'s' * (count != 1)}"
