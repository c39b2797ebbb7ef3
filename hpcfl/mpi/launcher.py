"""What started this process and as how many ranks, and what MPI is told before it starts.

Wrong launches are told apart before a run begins. MPI's settings, in the environment:

`TREES`: nonblocking collectives are binomial trees. By themselves both MPIs cut large messages into pieces that move on
when a rank looks, and wait for ranks that give way between two looks: 1 MB to and from 9 ranks took 12 times as long
under MPICH, 100 MB to and from 3 ranks twice as long under Open MPI. In a binomial tree a message is one piece.

`FAREWELL`: with ULFM, MPI_Finalize does not meet a second time through the launcher, which at times waits for the dead
(with two ranks killed about 1 run in 50 never ended on a busy machine; open-mpi/ompi issue 11404).
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import termios
import time
import warnings
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hpcfl.base.errors import ErrorOnOtherRank, UsageError, refusal
from hpcfl.mpi.devices import bind, local_rank

Environ = Mapping[str, str]

OPENMPI, HYDRA = "Open MPI's mpiexec", "MPICH's mpiexec"
CONNECTED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK")  # a launcher that MPI can talk to
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")  # last: hydra's are proxies
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
PATIENCE = 5.0  # seconds: launchers kill all when the first process leaves, so the one that speaks must be the first
ULFM = "OMPI_MCA_mpi_ft_enable"  # all that the ranks see of mpiexec --with-ft ulfm
TREES = {
    "OMPI_MCA_coll_libnbc_ibcast_algorithm": "2",
    "OMPI_MCA_coll_libnbc_ireduce_algorithm": "2",
    "MPIR_CVAR_IBCAST_INTRA_ALGORITHM": "sched_binomial",
    "MPIR_CVAR_IREDUCE_INTRA_ALGORITHM": "sched_binomial",
}
FAREWELL = {"OMPI_MCA_async_mpi_finalize": "1"}
LAUNCHER = re.compile(r"Name:\t(?:mpiexec|mpirun|prterun|prted|mpiexec\.hydra|hydra_pmi_proxy)\n.*\nPPid:\t(\d+)", re.S)
END = """exec < /dev/null > /dev/null 2>&1; gone() { timeout $2 tail --pid=$1 -f /dev/null; }
for rank in $3; do tail --pid=$rank -f /dev/null; done
gone $1 $2; [ $? -eq 124 ] || exit
below=$(cat /proc/$1/task/*/children); kill $1
gone $1 5 || kill -9 $1; kill -9 $below"""
SLOW_SECONDS = 30
SLOW = f"""for each in $(seq {SLOW_SECONDS}); do sleep 1; kill -0 $PPID 2> /dev/null || exit; done
echo "hpcfl: still waiting ({SLOW_SECONDS} s) for MPI to start on all ranks: some hosts may be out of reach" >&2"""
LAUNCHER_SECONDS = 15.0  # for launchers to end a job whose ranks are out of reach: they do that in a second, or never
NAMESPACE = "PMIX_NAMESPACE"  # in the environment of all processes of a job's ranks


def set_defaults(environ: MutableMapping[str, str]) -> None:
    """Add MPI's settings where the environment does not say what is wanted; to be called before MPI starts."""
    for name, value in (TREES | FAREWELL if _ulfm_asked(environ) else TREES).items():
        environ.setdefault(name, value)


def launched() -> bool:
    """True where MPI has a launcher to talk to: Open MPI's, MPICH's hydra, or srun with a PMI."""
    return _connected(os.environ)


def world() -> Any:
    """Return the world communicator where a launcher started this process, else None: MPI is not imported then.

    What is wrong with the launch, or with MPI on this host, goes to `refuse`.
    """
    comm, wrong = checked_world()
    if wrong:
        refuse(wrong)
    return comm


def checked_world() -> tuple[Any, str]:
    """Return the world communicator or None, and one line on what is wrong with the launch, empty where all is well.

    MPI is asked for its name before it starts: an MPICH under a foreign launcher ends the process while starting.
    """
    if not launched():
        return None, separate(os.environ)
    MPI = _loaded()
    text = str(MPI.Get_library_version())
    if not MPI.Is_initialized():
        if wrong := foreign(os.environ, text):
            return None, wrong
        bind(os.environ)
        speaks = shutil.which("sh") and launched_rank(os.environ) == 0
        # a process of its own: while MPI starts, no thread of this one runs
        teller = subprocess.Popen(["sh", "-c", SLOW], start_new_session=True) if speaks else None
        with warnings.catch_warnings():  # mpi4py's own guess at a wrong launch
            warnings.simplefilter("ignore", RuntimeWarning)
            MPI.Init_thread()
        if teller is not None:
            os.killpg(teller.pid, signal.SIGKILL)
            teller.wait()
    return MPI.COMM_WORLD, scattered(os.environ, MPI.COMM_WORLD.Get_size(), text)


def refuse(line: str) -> NoReturn:
    """Raise a UsageError on the first process, or on the first of a host if no other speaks; then let the job end.

    On others `ErrorOnOtherRank` is raised. Called where processes know nothing of each other; it needs the standard
    library alone.
    """
    if launched():
        atexit.register(_give_up)
    rank, speaks = launched_rank(os.environ), launched() and not local_rank(os.environ)
    if rank:
        time.sleep(PATIENCE / 2 if speaks else PATIENCE)
        if not speaks:
            raise ErrorOnOtherRank(2)
    error = UsageError(f"{line} (rank {rank}, host {os.uname().nodename})" if rank else line)
    error.settled = True
    raise error


def _give_up() -> None:
    """End the job of a process that leaves before MPI has started: MPICH's launcher would wait for it for ever.

    By PMI 1, which that launcher speaks; others end such a job by themselves. Open MPI's crashes where it kills a rank
    that is just about to call it.
    """
    time.sleep(PATIENCE / 5)
    with suppress(KeyError, OSError, ValueError):
        os.write(int(os.environ["PMI_FD"]), b"cmd=init pmi_version=1 pmi_subversion=1\ncmd=abort exitcode=2\n")


def launched_rank(environ: Environ) -> int:
    """The number that the launcher gave this process; 0 without one."""
    return next((_count(environ, key) for key in RANKS if key in environ), 0)


def separate(environ: Environ) -> str:
    """What is wrong where no PMI is offered: Slurm's tasks would each be a job of its own."""
    tasks = _count(environ, "SLURM_STEP_NUM_TASKS")
    if _connected(environ) or tasks < 2:
        return ""
    return (
        f"srun started {tasks} tasks without a PMI, so MPI would make {tasks} worlds of 1 rank, not one of {tasks}; "
        "start with srun --mpi=pmi2 (MPICH) or --mpi=pmix (Open MPI), or separate runs with srun -n 1 each"
    )


def foreign(environ: Environ, text: str) -> str:
    """What is wrong where the MPI of this version text cannot start under the launcher at all."""
    if launcher(environ) != OPENMPI or "PMI_RANK" in environ:
        return ""
    able = not text.startswith("MPICH") or "pmix" in text.lower()  # built to talk to Open MPI's launcher
    return "" if able else mismatch(environ, text)


def scattered(environ: Environ, size: int, text: str) -> str:
    """What is wrong where the launcher started several processes and MPI's world has one rank."""
    started = next((_count(environ, key) for key in SIZES if key in environ), 1)
    if size > 1 or started < 2:
        return ""
    return (
        f"{launcher(environ)} started {started} processes, but {library(text)}, which mpi4py loaded, made "
        f"worlds of 1 rank, not one of {started}; {remedy(environ, text)}"
    )


def mismatch(environ: Environ, text: str) -> str:
    """One line if the launcher and the loaded MPI are of two families, even where one rank works."""
    theirs = {OPENMPI: "Open MPI", HYDRA: "MPICH"}.get(launcher(environ))
    if theirs is None or family(text) in ("", theirs):
        return ""
    return f"started by {launcher(environ)}, but mpi4py loaded {library(text)}; {remedy(environ, text)}"


def remedy(environ: Environ, text: str) -> str:
    """What to start with for the loaded MPI, or which MPI to load for the launcher."""
    by, own = launcher(environ), family(text)
    if by == "srun":
        kind = {"Open MPI": "pmix", "MPICH": "pmi2"}.get(own, "pmi2 or pmix")
        return f"start with srun --mpi={kind}, or with the mpiexec of {own or 'that MPI'} in the batch script"
    if by == OPENMPI and own != "Open MPI":
        folder = environ.get("OMPI_LIBDIR_LOC", "<prefix>/lib")
        return f"start with the mpiexec of {own or 'that MPI'}, or set MPI4PY_LIBMPI={folder}/libmpi.so.40"
    if by == HYDRA and own != "MPICH":
        return f"start with the mpiexec of {own or 'that MPI'}, or set MPI4PY_LIBMPI=<prefix>/lib/libmpi.so.12"
    return "start with the mpiexec of the same installation, or set MPI4PY_LIBMPI to that mpiexec's libmpi"


def packed(ranks: int, environ: Environ) -> tuple[list[str], int]:
    """Return what starts so many ranks as a step within an allocation of Slurm, and how many steps have room in it.

    UsageError outside of one, and where not one has room.
    """
    if "SLURM_JOB_ID" not in environ:
        raise UsageError(f"--pack {ranks}: this is no allocation of Slurm: expected it within salloc or sbatch")
    cpus = max(_count(environ, "SLURM_CPUS_PER_TASK"), 1)
    nodes = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_JOB_CPUS_PER_NODE", ""))  # as in 4(x2),3
    tasks = _count(environ, "SLURM_NTASKS") or sum(int(cores) // cpus * int(times or 1) for cores, times in nodes)
    if ranks > tasks:
        raise refusal("--pack", f"at most the {tasks} tasks of this allocation", ranks, tasks or None)
    words = starter(step=True) if ranks > 1 else ["srun", "--mpi=none"]
    return [*words, "--exact", f"--cpus-per-task={cpus}", "-n", str(ranks)], tasks // ranks


def starter(step: bool = False) -> list[str]:
    """Return the words that start ranks of the MPI that mpi4py loads, in a batch job as many as it has tasks.

    With `step` by srun, which knows what other steps of the job take; so too in a heterogeneous job of Slurm, since no
    mpiexec reaches all of its components. In a job of Flux it is flux run.

    UsageError where MPI cannot be loaded, or comes without a launcher.
    """
    try:
        text = str(_loaded("").Get_library_version())
    except UsageError as error:
        hint = "MPI4PY_LIBMPI=<prefix>/lib/libmpi.so.40 (Open MPI) or libmpi.so.12 (MPICH) says which one to load"
        raise UsageError(f"{error}; {hint}") from None
    if "FLUX_URI" in os.environ:  # each rank chooses its GPU itself
        return ["flux", "run", "-o", "gpu-affinity=off", *(["-o", "pmi=pmix"] if family(text) == "Open MPI" else [])]
    components = _count(os.environ, "SLURM_HET_SIZE")
    step = step or components > 1
    mpiexec = "" if step else shutil.which("mpiexec") or ""
    with suppress(OSError):  # no Linux
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            if found := re.search(r"(/.*)/[^/]+/libmpi(?:ch|_cray)?\.so", line):
                beside = Path(found[1], "bin", "mpiexec")  # of the library that this process has loaded
                mpiexec = str(beside) if beside.exists() and not step else mpiexec
                break
    kinds = ""
    if "SLURM_JOB_ID" in os.environ:
        with suppress(OSError, subprocess.TimeoutExpired):
            said = subprocess.run(["srun", "--mpi=list"], capture_output=True, text=True, timeout=30, check=False)
            kinds = said.stdout + said.stderr
    return [*starting(text, mpiexec, kinds), *([f"--het-group=0-{components - 1}"] if components > 1 else [])]


def starting(text: str, mpiexec: str, kinds: str) -> list[str]:
    """Return what starts ranks of the MPI of this version text: its own `mpiexec`, else srun with one of its `kinds`.

    Its own goes first: PMIx is spoken in versions that both sides have to know, and Slurm 22.05 cuts lines of pmi2 at
    1024 bytes, which MPICH 5 exceeds where the memory behind an address happens to be full. Open MPI's binds ranks to
    cores, which within a batch job the scheduler has dealt.
    """
    own = family(text)
    if mpiexec:
        return [mpiexec, *(["--bind-to", "none"] if own == "Open MPI" else [])]
    kind = "pmix" if own == "Open MPI" else "pmi2"
    if kind in kinds.split():
        return ["srun", f"--mpi={kind}", "--kill-on-bad-exit=1"]
    where = f"beside that library or on PATH, or srun with --mpi={kind}"
    raise UsageError(f"mpi4py loads {library(text)}, which nothing here starts: expected its mpiexec {where}")


def launcher(environ: Environ) -> str:
    """Who started this process, empty for nobody. Inside a batch job, mpiexec goes before Slurm."""
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return OPENMPI
    if "MPI_LOCALNRANKS" in environ or "HYDI_CONTROL_FD" in environ:
        return HYDRA
    if "SLURM_STEP_NUM_TASKS" in environ and (_connected(environ) or _count(environ, "SLURM_STEP_NUM_TASKS") > 1):
        return "srun"
    return "a launcher with PMI" if _connected(environ) else ""


def family(text: str) -> str:
    """``"Open MPI"`` or ``"MPICH"`` (with what descends from it) for a library's version text, else empty."""
    if "Open MPI" in text:
        return "Open MPI"
    return "MPICH" if re.search(r"MPICH|MVAPICH|Intel\(R\) MPI", text) else ""


def library(text: str) -> str:
    """Name and number in a library's version text."""
    if match := re.match(r"Open MPI v([\w.]+)|MPICH Version:\s*([\w.]+)", text):
        return f"Open MPI {match[1]}" if match[1] else f"MPICH {match[2]}"
    return " ".join(text.split("\n")[0].split())[:60]


def has_ulfm(comm: Any) -> bool:
    """True where a dead rank is reported to the others instead of ending the job.

    Open MPI has the calls in any case, and they answer; only ``mpiexec --with-ft ulfm`` switches the reports on and
    keeps the launcher from killing the rest. MPICH has nothing.
    """
    match = None if comm is None else re.match(r"Open MPI v(\d+)", _loaded().Get_library_version())
    return match is not None and int(match[1]) >= 5 and _ulfm_asked(os.environ)


def end_job(comm: Any, code: int) -> NoReturn:
    """End all ranks at once, without MPI's farewell; the launcher's exit code is `code`.

    With ULFM MPI_Abort ends its own rank alone, and leaves the launcher with 0, or waiting for a suspended rank.
    So this rank ends all others of its host; those of other hosts notice that it is dead. A launcher that waits for a
    host that is out of reach is ended too.
    """
    wait_until_read()
    end_launcher()
    if has_ulfm(comm):
        end_ranks()
        os._exit(code)
    comm.Abort(code)
    os._exit(code)  # MPICH's Abort comes back, and what would follow may tell of the end as an error


def end_launcher(first: Sequence[int] = ()) -> None:
    """Have this job's launcher ended if it is still there `LAUNCHER_SECONDS` later: a process of its own sees to that.

    It begins when a `first` process has ended. Of a launcher on another host its daemon on this one is meant. Nothing
    is done where it is a batch system's: these have time limits.
    """
    found, above = 0, os.getppid()
    with suppress(OSError):  # it has ended, or no process can be begun
        while above and (match := LAUNCHER.match(Path(f"/proc/{above}/status").read_text())):
            found, above = above, int(match[1])
        if found:
            words = map(str, (found, LAUNCHER_SECONDS, *first))
            mine = {name: value for name, value in os.environ.items() if name != NAMESPACE}  # no rank: see `end_ranks`
            subprocess.Popen(["sh", "-c", END, "sh", *words], env=mine, start_new_session=True)


def wait_until_read(seconds: float = 1.0) -> None:
    """Wait, not for long, until the launcher has read what this rank has said.

    MPICH's forgets whatever it has not read when it hears of the end: 1 line of 40, on a busy machine.
    """
    last = time.monotonic() + seconds
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed
            stream.flush()
            if not stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
                continue
            while int.from_bytes(fcntl.ioctl(stream.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder):
                if time.monotonic() > last:
                    return
                time.sleep(0.001)


def end_ranks(ranks: Collection[int] | None = None) -> None:
    """Kill these ranks of this job (None: all others) on this host: those that PMIx's environment names."""
    job = os.environ.get(NAMESPACE)
    for process in Path("/proc").glob("[0-9]*") if job else ():
        try:
            settings = dict(each.partition(b"=")[::2] for each in (process / "environ").read_bytes().split(b"\0"))
            mine = settings.get(NAMESPACE.encode()) == os.fsencode(str(job)) and int(process.name) != os.getpid()
            if mine and (ranks is None or int(settings[b"PMIX_RANK"]) in ranks):
                os.kill(int(process.name), signal.SIGKILL)
        except (OSError, KeyError):  # another user's, or it has ended
            continue


def has_cuda(comm: Any) -> bool | None:
    """True where MPI says that it takes buffers in GPU memory; None where it cannot be asked."""
    if comm is None:
        return False
    try:
        return bool(ctypes.CDLL(_loaded().__file__).MPIX_Query_cuda_support())
    except (OSError, AttributeError):
        return None


def local(comm: Any) -> int:
    """This rank's number among the ranks of its host.

    By host name: under ``srun --mpi=pmix`` Open MPI's shared-memory communicator holds a single rank.
    """
    if comm is None:
        return 0
    from hpcfl.mpi.waiting import texts  # takes NumPy, which a host may lack where it is to `refuse`

    hosts, rank = texts(comm, socket.gethostname()), comm.Get_rank()
    return hosts[:rank].count(hosts[rank])


def _ulfm_asked(environ: Environ) -> bool:
    return environ.get(ULFM, "").lower() in ("1", "true", "yes", "enabled")


def _connected(environ: Environ) -> bool:
    return any(key in environ for key in CONNECTED)


def _count(environ: Environ, key: str) -> int:
    text = environ.get(key, "")
    return int(text) if text.isdigit() else 0


def _loaded(because: str = "started by an MPI launcher, but ") -> Any:
    """MPI, not yet started if nobody has imported it before; where it cannot be loaded, see `refuse`."""
    set_defaults(os.environ)
    try:
        import mpi4py

        mpi4py.rc(initialize=False, finalize=True)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        refuse(f"{because}MPI cannot be loaded: {' '.join(str(error).split())}")
    return MPI
