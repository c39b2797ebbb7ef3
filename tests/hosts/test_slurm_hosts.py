"""Batch jobs of Slurm over several hosts, one of which may be lost: a part of `make test-hosts-all`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import hpcfl
from helpers.launcher import ROOT, mpis
from hosts.batch import Slurm
from hosts.cluster import Cluster, missing
from hosts.test_hosts import hosts
from slurm import cluster as nodes
from slurm.test_slurm import HERE, LIMIT, SCRIPTS, SRUN, Job, Site, digest, options, settings

pytestmark = [pytest.mark.hosts, pytest.mark.slow]
HOSTS = 4


@pytest.fixture(autouse=True)
def possible(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := missing() or nodes.missing():
        pytest.skip(reason)
    monkeypatch.syspath_prepend(HERE)  # for a method that is `paced`


@contextmanager
def batch(here: Path) -> Iterator[tuple[Cluster, Slurm, Site]]:
    """Four hosts with Slurm on them."""
    with Cluster(HOSTS, [here, ROOT]) as cluster:
        slurm = Slurm(cluster)
        yield cluster, slurm, Site(slurm, here)


def submitted(site: Site, mpi: str, pause: float = 0.0, **env: str) -> Job:
    """Hand in a run of a server and two client ranks, each on a host but the controller's; rounds take `pause` more."""
    how = "--nodes=3 --exclude=h1"
    env |= {"FI_TCP_IFACE": "eth0", "UCX_NET_DEVICES": "eth0", "MPIR_CVAR_CH4_NETMOD": "ofi"}
    env["XDG_STATE_HOME"] = str(site.here / "state")  # as in a home that all hosts see
    return site.run("run", mpi, how, settings(pause=pause), **env)


def undisturbed(here: Path) -> str:
    """Return the digest of such a run by one process."""
    out = here / "alone"
    hpcfl.run("wait-digits", settings=settings(), out=out, quiet=True)
    return digest(out)


@pytest.mark.parametrize("mpi", mpis())
@pytest.mark.parametrize("launcher", ["mpiexec", "srun"])
def test_ranks_on_three_hosts_give_the_bits_of_one_process(launcher: str, mpi: str, tmp_path: Path) -> None:
    with batch(tmp_path) as (_, _, site):
        job = submitted(site, mpi, **({"LAUNCH": SRUN[mpi]} if launcher == "srun" else {}))
        job.ended("COMPLETED", restarts=0)
    assert hosts(job.folder) == ["h2", "h3", "h4"]
    assert digest(job.folder) == undisturbed(tmp_path)


@pytest.mark.parametrize("mpi", mpis())
@pytest.mark.parametrize(("fault", "host", "left"), [("crash", "h3", "h[1-2,4]"), ("cut", "h2", "h[1,3-4]")])
def test_where_a_node_is_lost_the_run_goes_on_on_others(
    fault: str, host: str, left: str, mpi: str, tmp_path: Path
) -> None:
    """A client's crashes, or the cable of that of server and batch script is pulled, and plugged in after the end."""
    with batch(tmp_path) as (cluster, slurm, site):
        job = submitted(site, mpi, 0.4)
        job.until_round(3)
        getattr(cluster, fault)(host)
        cluster.until(lambda: job.facts["JobState"] == "PENDING", LIMIT)
        slurm.ask("scontrol", "update", f"JobId={job.number}", "ExcNodeList=")
        assert job.ended("COMPLETED", restarts=1)["NodeList"] == left
        if fault == "cut":
            cluster.join(host)
        cluster.until(lambda: not any("hpcfl" in each for each in cluster.left()), LIMIT)
    assert digest(job.folder) == undisturbed(tmp_path)


def test_an_array_runs_on_all_hosts(tmp_path: Path) -> None:
    with batch(tmp_path) as (_, _, site):
        how = ["--array=0-3", "--ntasks-per-node=1", "--exclusive", str(SCRIPTS / "sweep.sbatch")]
        what = ["wait-digits", "--seeds", "1-4", "--out", str(tmp_path / "sweep"), *options(settings(20, pause=0.2))]
        number = site.submit("", [*how, *what])
        jobs = [
            Job(site.slurm, f"{number}_{task}", tmp_path / f"hpcfl-sweep-{number}_{task}.log", folder)
            for task, folder in enumerate(tmp_path / "sweep" / f"wait-digits_seed={seed}" for seed in (1, 2, 3, 4))
        ]
        nodes = [job.ended("COMPLETED")["NodeList"] for job in jobs]
    assert sorted(nodes) == ["h1", "h2", "h3", "h4"]
    assert len({digest(job.folder, 20) for job in jobs}) == 4
