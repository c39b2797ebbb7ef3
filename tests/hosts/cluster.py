"""Hosts of our own on this machine, for tests, with a network between them that can fail; Linux, root.

    with Cluster(3, share=[folder]) as cluster, cluster.live("openmpi", (1, 2, 2), words, folder / "job") as job:
        cluster.cut("h3")
        assert job.wait() == 0

Each host (``h1`` …) has namespaces of its own for network, processes, name, shared memory and time (the i-th is i times
1000 seconds ahead), an empty /tmp but for the folders that are shared, and an ``sshd``; the rest of the file system is
one disk, as over NFS but for its caches. A bridge without a way out is between them. Nothing is left when the block
ends, or this process.

``PYTHONPATH=tests python -m hosts.cluster 3 bash`` runs a command on the first host, without a command it says what is
missing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from helpers.launcher import LIBRARIES, PREFIXES
from helpers.live import Live

PROGRAMS = "ip", "tc", "nsenter", "unshare", "mount", "umount", "ssh", "ssh-keygen", "sshd", "ethtool"
PACKAGES = "iproute2 ethtool util-linux openssh-client openssh-server"
PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
NETWORK = "10.77.0"
DAEMONS = "sshd:", "munged", "slurmctld", "slurmd"  # that are none of a job
SKEW = 1000  # seconds from one host's monotonic clock to the next one's
START_SECONDS = 10.0

SSHD = """\
HostKey {here}/key
AuthorizedKeysFile {here}/key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
PidFile none
MaxStartups 100
"""
SSH = """\
#!/bin/sh
exec /usr/bin/ssh -i {here}/key -o IdentitiesOnly=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \\
    -o LogLevel=ERROR "$@"
"""


def missing() -> str:
    """One line on why there can be no hosts here, "" where there can be."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if lacking:
        return f"{', '.join(lacking)} not found: apt-get install --no-install-recommends {PACKAGES}"
    tried = subprocess.run(
        ["unshare", "-n", "-m", "-p", "-T", "-f", "true"], capture_output=True, text=True, check=False
    )
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Cluster:
    """Hosts ``h1`` … and the network between them; started and ended by a ``with`` block.

    Attributes
    ----------
    inits : dict of str to int
        The number out here of the first process of each host.
    """

    def __init__(self, hosts: int, share: Sequence[Path] = ()) -> None:
        self.here = Path(tempfile.mkdtemp(prefix="hpcfl-hosts-", dir="/run"))  # each host has a /tmp of its own
        self.names = [f"h{number}" for number in range(1, hosts + 1)]
        self.share = [path.resolve() for path in share]
        self.inits: dict[str, int] = {}
        self._parents: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        try:
            (self.here / "sshd_config").write_text(SSHD.format(here=self.here))
            (self.here / "ssh").write_text(SSH.format(here=self.here))
            (self.here / "ssh").chmod(0o755)
            rows = [f"{NETWORK}.{number} {name}" for number, name in enumerate(self.names, start=1)]
            (self.here / "hosts").write_text("\n".join(["127.0.0.1 localhost", *rows, ""]))
            _do("ssh-keygen", "-qt", "ed25519", "-N", "", "-f", self.here / "key")
            self.inits["switch"] = self._begin("switch", "-n")
            self._net("switch", "ip", "link", "add", "switch", "type", "bridge")
            self._net("switch", "ip", "link", "set", "switch", "up")
            for number, name in enumerate(self.names, start=1):
                ahead = f"{number * SKEW}"
                own = "-n", "-u", "-i", "-m", "-p", "-T", "--monotonic", ahead, "--boottime", ahead, "--mount-proc"
                self.inits[name] = self._begin(name, *own, "--propagation", "private")
                peer = "peer", "name", "eth0", "netns", str(self.inits[name])
                self._net("switch", "ip", "link", "add", name, "type", "veth", *peer)
                self._net("switch", "ip", "link", "set", name, "master", "switch", "up")
                self._net(name, "ip", "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
                self._net(name, "ip", "link", "set", "lo", "up")
                self.boot(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End all hosts with all that runs there."""
        for parent in self._parents:
            parent.kill()  # and with it the first process of a host, and so all others
            parent.wait()
        shutil.rmtree(self.here, ignore_errors=True)

    # what befalls hosts

    def cut(self, host: str) -> None:
        """Pull a host's cable."""
        self._net(host, "ip", "link", "set", "eth0", "down")

    def join(self, host: str) -> None:
        """Plug it in."""
        self._net(host, "ip", "link", "set", "eth0", "up")

    def rate(self, host: str, mbit: float) -> None:
        """Let a host's cable carry so many megabits per second each way; 0: what it can."""
        for where, device in ((host, "eth0"), ("switch", host)):
            self._net(where, "tc", "qdisc", "del", "dev", device, "root", check=False)
            if mbit:
                limit = "tbf", "rate", f"{mbit}mbit", "burst", "16kb", "limit", "512kb"
                self._net(where, "tc", "qdisc", "add", "dev", device, "root", *limit)

    def lossy(self, host: str, share: float) -> None:
        """Let a host's cable lose such a share of what it is to carry, each way, for good."""
        for name in self.names:  # single frames, whole: what passes them on can neither cut them nor sum them up
            self._net(name, "ethtool", "-K", "eth0", "tx", "off", "tso", "off", "gso", "off", "gro", "off")
        bad, good = f"{host}-bad", f"{host}-good"
        self._net("switch", "ip", "link", "add", bad, "type", "veth", "peer", "name", good)
        self._net("switch", "ip", "link", "set", bad, "up")
        self._net("switch", "ip", "link", "set", good, "master", "switch", "up")
        words = sys.executable, Path(__file__).parents[1] / "helpers" / "lossy.py", host, bad, share
        relay = subprocess.Popen(
            [*map(str, ("nsenter", "-t", self.inits["switch"], "-n", "--", *words))], stdout=subprocess.PIPE
        )
        self._parents.append(relay)
        assert relay.stdout is not None
        relay.stdout.readline()  # it is ready
        self._net("switch", "ip", "link", "set", host, "nomaster")

    def freeze(self, host: str) -> None:
        """Suspend all that runs on a host; its kernel goes on to acknowledge what comes."""
        self._signal(host, signal.SIGSTOP)

    def thaw(self, host: str) -> None:
        self._signal(host, signal.SIGCONT)

    def kill(self, host: str) -> None:
        """Kill all that runs on a host; its kernel tells the others."""
        self._signal(host, signal.SIGKILL)

    def crash(self, host: str) -> None:
        """Do the same with the cable pulled before, so that nobody is told."""
        self.cut(host)
        self.kill(host)

    def boot(self, host: str) -> None:
        """Have a host's ``sshd`` and its cable again."""
        self.join(host)
        _do(*self._entered(host), shutil.which("sshd", path=PATH), "-f", self.here / "sshd_config")

    def _signal(self, host: str, number: int) -> None:
        told = set[int]()
        while new := {*self.processes(host)} - told:  # and those that they have started meanwhile
            for pid in new:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            told |= new

    # what is seen of them

    def processes(self, host: str) -> dict[int, str]:
        """The command of each process of a host but the first, by its number out here."""
        own, found = Path(f"/proc/{self.inits[host]}/ns/pid").readlink(), dict[int, str]()
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (place / "ns" / "pid").readlink() == own and int(place.name) != self.inits[host]:
                    found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found

    def left(self) -> list[str]:
        """What of jobs still runs, ``host: command``; what has ended and was not waited for does not."""
        return [
            f"{host}: {command}"
            for host in self.inits
            for command in self.processes(host).values()
            if command and host != "switch" and not command.startswith(DAEMONS)
        ]

    def wire(self) -> dict[str, tuple[int, int]]:
        """Bytes that each host has sent and received by its cable since it was there."""
        return {name: (self._count(name, "tx"), self._count(name, "rx")) for name in self.names}

    def _count(self, host: str, way: str) -> int:
        told = self._net(host, "cat", f"/sys/class/net/eth0/statistics/{way}_bytes")
        return int(told)

    def until(self, seen: Callable[[], object], seconds: float, every: float = 0.1) -> None:
        """Wait until something is seen; AssertionError if it is not by then."""
        end = time.monotonic() + seconds
        while not seen():
            assert time.monotonic() < end, f"not seen within {seconds} s; still running: {self.left()}"
            time.sleep(every)

    # jobs

    def start(
        self,
        host: str,
        words: Sequence[Any],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        **files: Any,
    ) -> subprocess.Popen[str]:
        """Start a command on a host, as a process group of its own."""
        env = {**os.environ, "PATH": PATH, "OMP_NUM_THREADS": "1", **self.settings, **(env or {})}
        env.pop("PRTE_MCA_rmaps_default_mapping_policy", None)  # with one, Open MPI puts all ranks on the first host
        inside = ["/bin/sh", "-c", 'cd "$1" && shift && "$@" <&0 & wait $!', "sh", cwd or self.here, *words]
        return subprocess.Popen(
            [*map(str, (*self._entered(host), *inside))],
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
            env=env,
            **files,
        )

    @contextmanager
    def live(
        self,
        mpi: str,
        ranks: Sequence[int],
        words: Sequence[Any],
        here: Path,
        options: Sequence[str] = (),
        others: Sequence[str] = (),
    ) -> Iterator[Live]:
        """Start Python on so many ranks of each host, from the first that has any.

        Nobody is left when the block ends, on these hosts if only they are named: `others` may run on.
        """
        first = next(name for name, count in zip(self.names, ranks) if count)
        prefix, file = PREFIXES / mpi, self.here / f"hosts-{first}"
        between = " slots=" if mpi == "openmpi" else ":"
        file.write_text("".join(f"{name}{between}{count}\n" for name, count in zip(self.names, ranks) if count))
        where = ("--hostfile" if mpi == "openmpi" else "-f"), file
        line = [prefix / "bin" / "mpiexec", *options, *where, "-n", sum(ranks), sys.executable, *words]
        library = {"MPI4PY_LIBMPI": str(prefix / "lib" / LIBRARIES[mpi])}
        here.mkdir(exist_ok=True)
        with (here / "out").open("w") as out, (here / "err").open("w") as err:
            process = self.start(first, line, library, here, stdout=out, stderr=err)
        try:
            yield Live(process, here)
        finally:
            for host in others or self.names:
                self.kill(host)
                self.boot(host)
            process.wait()

    @property
    def settings(self) -> dict[str, str]:
        """What lets both launchers reach other hosts."""
        return {
            "PRTE_MCA_plm_ssh_agent": str(self.here / "ssh"),
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": str(self.here / "ssh"),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }

    # how

    def _begin(self, name: str, *own: str) -> int:
        """Start the first process of new namespaces; return its number."""
        (self.here / name).mkdir()
        (self.here / name / "name").write_text(f"{name}\n")
        (self.here / name / "boot_id").write_text(f"{uuid.uuid4()}\n")
        init = sys.executable, "-m", "hosts.cluster", "--init", name, self.here, *self.share
        parent = subprocess.Popen(
            [*map(str, ("unshare", "-f", "--kill-child", *own, *init))],
            stdin=subprocess.PIPE,  # closed when this process ends, however it does
            start_new_session=True,
            env={**os.environ, "PATH": PATH, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        self._parents.append(parent)
        up = self.here / name / "up"
        self.until(lambda: up.exists() or parent.poll() is not None, START_SECONDS, 0.01)
        assert up.exists(), f"{name} did not come up"
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        return int(children[0])

    def _entered(self, host: str) -> Iterator[str]:
        yield from ("nsenter", "-t", str(self.inits[host]), "-m", "-u", "-i", "-n", "-p", "-T", "-F", "--")

    def _net(self, host: str, *words: str, check: bool = True) -> str:
        """Carry out a command within a host's network."""
        return _do("nsenter", "-t", str(self.inits[host]), "-n", "-m", "--", *words, check=check)


def _do(*words: Any, check: bool = True) -> str:
    done = subprocess.run(
        [*map(str, words)], capture_output=True, text=True, check=False, env={**os.environ, "PATH": PATH}
    )
    assert done.returncode == 0 or not check, f"{' '.join(map(str, words))}: {done.stderr}"
    return done.stdout


def init(name: str, here: Path, share: Sequence[Path]) -> None:
    """Be the first process of a host: make its file system, then let all end that is left behind here."""
    own = here / name
    if name != "switch":
        (old := own / "old").mkdir()
        below = [path for path in share if path.is_relative_to("/tmp")]
        mounts: list[tuple[Any, ...]] = [
            ("-t", "sysfs", "sysfs", "/sys"),
            ("-t", "tmpfs", "-o", "size=2g,mode=1777", "shm", "/dev/shm"),
            ("--bind", here / "hosts", "/etc/hosts"),
            *([("--bind", own / "name", "/etc/hostname")] if Path("/etc/hostname").exists() else []),
            ("--bind", own / "boot_id", "/proc/sys/kernel/random/boot_id"),
            ("--rbind", "/tmp", old),
            ("-t", "tmpfs", "-o", "size=2g,mode=1777", "tmp", "/tmp"),
            *(("--rbind", old / path.relative_to("/tmp"), path) for path in below),
        ]
        for *how, where in mounts:
            Path(where).mkdir(parents=True, exist_ok=True) if where in below else None
            _do("mount", *how, where)
        _do("umount", "-l", old)
        _do("hostname", name)
        Path("/run/sshd").mkdir(exist_ok=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    (own / "up").touch()
    sys.stdin.buffer.read()


def main() -> int:
    """Run a command on the first of some hosts; or be one."""
    if sys.argv[1:2] == ["--init"]:
        init(sys.argv[2], Path(sys.argv[3]), [Path(each) for each in sys.argv[4:]])
        return 0
    if reason := missing():
        print(f"no hosts: {reason}", file=sys.stderr)
        return 2
    if len(sys.argv) < 3:
        return 0
    with Cluster(int(sys.argv[1]), [Path.cwd()]) as cluster:
        return cluster.start("h1", sys.argv[2:], cwd=Path.cwd()).wait()


if __name__ == "__main__":
    sys.exit(main())
