"""A Slurm of our own on this machine, for tests: four nodes of Debian's packages, without systemd, cgroups or rights.

    with Cluster() as slurm:
        number = slurm.submit("--wrap", "hostname")
        print(slurm.ask("squeue"), slurm.facts(number)["JobState"])

Each node is a ``slurmd`` with a port and a name of its own (``n1`` … ``n4``), with more cores than there are and with
GPUs that are links to /dev/null. All of it is below one temporary folder, listens on 127.0.0.1 and ends with the block:
daemons stay in the foreground, so that whatever runs is a descendant of theirs.

``PYTHONPATH=tests python -m slurm.cluster bash`` runs a command with such a cluster around it, without a command it
says what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from helpers.launcher import descendants

PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmstepd", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
PACKAGES = "slurm-wlm slurm-wlm-basic-plugins munge libpmix-dev"  # the last for --mpi=pmix
START_SECONDS = 60.0
LEAVE_SECONDS = 8.0
ASK_SECONDS = 30.0
SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl

CONF = """\
ClusterName=hpcfl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SrunPortRange={first}-{last}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# a job that was queued again starts when the credentials of its last start have expired: after 120 s if not told
AuthInfo=socket={here}/munge.socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/%n/spool
# of --mpi=pmix, whose folders two nodes of one machine must not share
TmpFS={here}/%n/tmp
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/%n/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
# more cores than there are
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
MpiDefault=none
KillWait=5
MinJobAge=3600
SlurmctldTimeout=10
SlurmdTimeout=10
MessageTimeout=10
GresTypes=gpu
{nodes}
PartitionName=batch Nodes=ALL Default=YES DefaultTime=10 MaxTime=60 PriorityTier=10
PartitionName=low Nodes=ALL DefaultTime=10 MaxTime=60 PriorityTier=1
PartitionName=high Nodes=ALL DefaultTime=10 MaxTime=60 PriorityTier=100 PreemptMode=OFF
"""
NODE = "NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=4000 Gres=gpu:{gpus}"


def missing() -> str:
    """One line on why there can be no cluster here, "" where there can be one."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if lacking:
        return f"{', '.join(lacking)} not found: apt-get install --no-install-recommends {PACKAGES}"
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "nothing"
    if not address.startswith("127."):  # Slurm would listen there
        return f"this machine's name stands for {address}, expected 127.0.0.1: add '127.0.0.1 {host}' to /etc/hosts"
    return ""


class Cluster:
    """Nodes, a controller and what tells them that they are one; started and ended by a ``with`` block."""

    def __init__(self, nodes: int = 4, cpus: int = 4, gpus: int = 2) -> None:
        self.here = Path(tempfile.mkdtemp(prefix="hpcfl-slurm-"))
        self.port = _free_ports(1 + nodes)
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self.cpus, self.gpus = cpus, gpus
        self.env = {"PATH": PATH, "SLURM_CONF": str(self.here / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        try:
            self._configure()
            self._start_munge()
            self._start("slurmctld", "-D", "-i")
            for name in self.names:
                self.start_node(name)
            self.until(lambda: self._idle() == len(self.names), START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End all jobs and daemons, and remove the folder."""
        with contextlib.suppress(OSError, AssertionError, subprocess.SubprocessError):
            self.ask("scancel", "--quiet", f"--user={getpass.getuser()}")
            self.until(lambda: not self.ask("squeue", "-h", "-t", "R,CG,S"), LEAVE_SECONDS)
        for name in reversed([*self.daemons]):
            self._kill(name)
        shutil.rmtree(self.here, ignore_errors=True)

    # ---- asking

    def ask(self, *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Return what one of Slurm's commands prints; AssertionError with its words where it fails."""
        said = subprocess.run(
            words,
            env={**os.environ, **(env or {}), **self.env},
            cwd=cwd,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASK_SECONDS,
            check=False,
        )
        assert said.returncode == 0, f"{' '.join(words)}: {said.stdout}{said.stderr}"
        return said.stdout.strip()

    def submit(self, *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Hand in what follows ``sbatch``; return the number of the job."""
        return self.ask("sbatch", "--parsable", *words, env=env, cwd=cwd)

    def facts(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job, or of one task of an array (``7_2``)."""
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", "-o", job)))

    def until(self, seen: Callable[[], object], seconds: float, every: float = 0.3) -> None:
        """Wait until something is seen; AssertionError, with the daemons' last words, if it is not by then."""
        end = time.monotonic() + seconds
        while not seen():
            assert time.monotonic() < end, f"not seen within {seconds} s\n{self._last_words()}"
            time.sleep(every)

    # ---- nodes

    def start_node(self, name: str) -> None:
        for part in ("spool", "tmp"):
            (self.here / name / part).mkdir(parents=True, exist_ok=True)
        self._start("slurmd", "-D", "-N", name, "-d", str(shutil.which("slurmstepd", path=PATH)), name=name)

    def kill_node(self, name: str) -> None:
        """End all that runs on a node at once, as a power cut does; Slurm is not told."""
        self._kill(name)

    def _kill(self, name: str) -> None:
        daemon = self.daemons.pop(name)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # what is stopped starts nothing more
            for pid in descendants(daemon.pid) if daemon.poll() is None else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        daemon.wait()

    # ---- starting

    def _configure(self) -> None:
        for name in ("state", "dev"):
            (self.here / name).mkdir()
        for number in range(self.gpus):
            (self.here / "dev" / f"gpu{number}").symlink_to(os.devnull)
        (self.here / "gres.conf").write_text(f"Name=gpu File={self.here}/dev/gpu[0-{self.gpus - 1}]\n")
        nodes = [
            NODE.format(name=name, port=self.port + place, cpus=self.cpus, gpus=self.gpus)
            for place, name in enumerate(self.names, 1)
        ]
        where = {"here": self.here, "host": socket.gethostname().partition(".")[0], "user": getpass.getuser()}
        ports = {"port": self.port, "first": self.port + 100, "last": self.port + 899}
        (self.here / "slurm.conf").write_text(CONF.format(nodes="\n".join(nodes), **where, **ports))

    def _start_munge(self) -> None:
        key = self.here / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.here}/munge.{end}" for option, end in files.items()]
        self._start("munged", "--foreground", "--force", *options)
        self.until((self.here / "munge.socket").exists, START_SECONDS, 0.05)

    def _start(self, program: str, *words: str, name: str = "") -> None:
        with (self.here / f"{name or program}.out").open("ab") as out:
            self.daemons[name or program] = subprocess.Popen(
                [str(shutil.which(program, path=PATH)), *words],
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_adopt,
            )

    def _idle(self) -> int:
        """How many nodes wait for work; 0 where nobody answers yet."""
        try:
            return len(self.ask("sinfo", "-h", "-N", "-p", "batch", "-t", "idle", "-o", "%N").split())
        except AssertionError:
            return 0

    def _last_words(self) -> str:
        files = sorted(self.here.glob("*.out"))
        return "\n".join(f"== {file.stem}\n{file.read_text(errors='replace')[-1500:]}" for file in files)


def _adopt() -> None:
    """Remain the ancestor of what detaches itself, as the daemons of steps do, and end with who has started this."""
    prctl = ctypes.CDLL(None).prctl
    prctl(SET_CHILD_SUBREAPER, 1)
    prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _free_ports(count: int) -> int:
    """The first of so many free ports in a row, below those that the system deals out."""
    for first in range(17100, 30000, 1000):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def main(words: Sequence[str]) -> int:
    if lacking := missing():
        print(f"slurm: {lacking}", file=sys.stderr)
        return 1
    if not words:
        return 0
    with Cluster() as slurm:
        return subprocess.run(words, env={**os.environ, **slurm.env}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
