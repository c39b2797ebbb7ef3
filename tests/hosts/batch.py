"""Slurm over hosts of our own: a node on each, its controller on the first, all of one disk but each with a /tmp."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hosts import cluster as hosts
from slurm import cluster as nodes

HERE = Path("/tmp/slurm")  # another folder on each host
LINES = {
    "(127.0.0.1)": "",
    "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny\n": "",
    "GresTypes=gpu\n": "",
}


class Slurm(nodes.Cluster):
    """Slurm on the hosts of a cluster, started and ended with it; commands are given on `host`, at first ``h1``."""

    def __init__(self, cluster: hosts.Cluster, cpus: int = 4) -> None:
        self.cluster, self.host = cluster, cluster.names[0]
        self.env = {"PATH": hosts.PATH, "SLURM_CONF": str(cluster.here / "slurm.conf")}
        rows = "\n".join(f"NodeName={name} CPUs={cpus} RealMemory=4000" for name in cluster.names)
        where = {"here": HERE, "host": self.host, "user": "root", "port": 17100, "first": 17200, "last": 17999}
        conf = nodes.CONF.format(nodes=rows, **where)
        for line, instead in LINES.items():
            assert line in conf
            conf = conf.replace(line, instead)
        (cluster.here / "slurm.conf").write_text(conf)
        # there are no cgroups, and 22.05 has no word for that
        old = re.search(r" 2[0-2]\.", self._on(self.host, "slurmd", "-V"))
        (cluster.here / "cgroup.conf").write_text(f"CgroupPlugin={'cgroup/v1' if old else 'disabled'}\n")
        (cluster.here / "munge.key").write_bytes(os.urandom(128))
        (cluster.here / "munge.key").chmod(0o600)
        for name in cluster.names:
            self.start_node(name)
        self._on(self.host, "slurmctld", "-i")
        self.until(lambda: self._idle() == len(cluster.names), nodes.START_SECONDS)

    def start_node(self, name: str) -> None:
        """Start what a node needs, again if it has crashed: its cable is plugged in, its ``sshd`` is there."""
        own = HERE / name
        files = ("socket", "pid-file", "log-file", "seed-file")
        munge = [f"--{file}={HERE}/munge.{file.partition('-')[0]}" for file in files]
        self._on(name, "mkdir", "-p", f"{own}/spool", f"{own}/tmp", f"{HERE}/state")
        self._on(name, "chmod", "711", str(HERE))
        self._on(name, "munged", "--force", f"--key-file={self.cluster.here}/munge.key", *munge)
        self._on(name, "slurmd", "-N", name)

    def ask(self, *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        return self._on(self.host, *words, env=env, cwd=cwd).strip()

    def _on(self, host: str, *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = self.cluster.start(host, words, {**(env or {}), **self.env}, cwd, **given)
        out, err = process.communicate(timeout=nodes.ASK_SECONDS)
        assert process.returncode == 0, f"{' '.join(words)}: {out}{err}"
        return out

    def _last_words(self) -> str:
        return "\n".join(self.cluster.left())
