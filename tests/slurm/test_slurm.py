"""Batch jobs under a live Slurm, with both MPIs: `make test-slurm`, two to three minutes.

Interrupted or not, a run ends in the state of one that was left alone. On node n1 two runs meet their time limits
twice, in the background; the other tests use n2, n3 and n4 meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import hpcfl
from helpers.environments import environment
from helpers.launcher import LIBRARIES, PREFIXES, ROOT, mpis
from hpcfl import store
from hpcfl.commands.cli import main
from hpcfl.commands.show import summary
from slurm.cluster import Cluster, missing

pytestmark = pytest.mark.slurm

HERE, SCRIPTS = ROOT / "tests" / "slurm", ROOT / "jobs" / "slurm"
HPCFL = Path(sys.executable).parent / "hpcfl"
LIMIT = 400.0  # seconds after which a job hangs
ROUNDS = 60
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")
MPIEXEC = {
    "mpich": f"{PREFIXES / 'mpich' / 'bin' / 'mpiexec'}",
    "openmpi": f"{PREFIXES / 'openmpi' / 'bin' / 'mpiexec'} --bind-to none",
}
SRUN = {"mpich": "srun --mpi=pmi2 --kill-on-bad-exit=1", "openmpi": "srun --mpi=pmix --kill-on-bad-exit=1"}


def settings(rounds: int = ROUNDS, **pace: float) -> dict[str, Any]:
    """A small run with a checkpoint in each round; `pace` are the keys of `paced.Paced`."""
    keys = {"rounds": rounds, "evaluate.every": rounds, "checkpoint.every": 1, "algorithm.name": "paced:Paced"}
    return keys | {f"algorithm.{key}": value for key, value in pace.items()}


def options(values: Mapping[str, Any]) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def digest(folder: Path, rounds: int = ROUNDS) -> str:
    """Return the digest of a run that is done."""
    row = summary(folder)
    assert (row["status"], row["rounds"]) == ("done", rounds)
    return str(row["state_sha256"])


@dataclass(frozen=True)
class Job:
    """A job that was handed in, the file of what it says, and the folder of its run."""

    slurm: Cluster
    number: str
    log: Path
    folder: Path

    @property
    def facts(self) -> dict[str, str]:
        return self.slurm.facts(self.number)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else "nothing was said"

    def ended(self, state: str, restarts: int | None = None) -> dict[str, str]:
        """Wait until the job is over, and not queued again; return what Slurm knows of it."""
        self.slurm.until(lambda: self.facts["JobState"] in OVER, LIMIT)
        facts = self.facts
        assert facts["JobState"] == state, f"{facts}\n{self.said}"
        assert restarts in (None, int(facts["Restarts"])), f"{facts}\n{self.said}"
        return facts

    def until_round(self, least: int) -> None:
        """Wait until so many rounds of a job that still runs are in checkpoints."""

        def saved() -> bool:
            assert self.facts["JobState"] not in OVER, f"{self.facts}\n{self.said}"
            files = (self.folder / "checkpoints").glob("round-*")
            return any(int(re.findall("[0-9]+", file.name)[0]) >= least for file in files)

        self.slurm.until(saved, LIMIT)


@dataclass(frozen=True)
class Site:
    """A cluster, and a folder that its nodes see."""

    slurm: Cluster
    here: Path

    def submit(self, mpi: str, words: list[str], **env: str) -> str:
        """Hand in a script or a command, as somebody who uses this MPI."""
        own = {
            "HPCFL": str(HPCFL),
            "MPI4PY_LIBMPI": str(PREFIXES / mpi / "lib" / LIBRARIES[mpi]) if mpi else "",
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "FI_TCP_IFACE": "lo",
            "UCX_NET_DEVICES": "lo",
        }
        return self.slurm.submit(*words, env={**own, **env}, cwd=self.here)

    def run_written(self, name: str, mpi: str, words: str, **env: str) -> Job:
        """Hand in a run by a script that `hpcfl doctor --site` writes, with these options."""
        script, folder = self.here / f"{name}-{mpi}.sbatch", self.here / f"{name}-{mpi}"
        assert main(["doctor", "--site", "--scheduler=slurm", "-o", str(script), *words.split()]) == 0
        what = [str(script), "wait-digits", *options(settings(pause=0.6))]
        number = self.submit(mpi, ["--exclude=n1", *what], OUT=str(folder), **env)
        return Job(self.slurm, number, self.here / f"hpcfl-{number}.log", folder)

    def run(self, name: str, mpi: str, words: str = "", keys: Mapping[str, Any] | None = None, **env: str) -> Job:
        """Hand in a run: unless `words` for sbatch say otherwise a server and a client rank, each on a node."""
        folder = self.here / f"{name}-{mpi}"
        how = ["--nodes=2", "--ntasks-per-node=1", "--exclude=n1", *words.split()]
        what = [str(SCRIPTS / "run.sbatch"), "wait-digits", *options(keys or settings())]
        number = self.submit(mpi, [*how, *what], OUT=str(folder), **env)
        return Job(self.slurm, number, self.here / f"hpcfl-{number}.log", folder)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if lacking := missing():
        pytest.skip(lacking)
    assert len(mpis()) == 2, "expected both MPIs: make setup"
    with pytest.MonkeyPatch.context() as patch, Cluster() as slurm:
        patch.syspath_prepend(HERE)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        yield Site(slurm, tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module", autouse=True)
def limited(site: Site) -> dict[str, Job]:
    """With each MPI a run whose time is up after a minute, handed in before anything else."""
    # the warning comes 25 to 55 s after a start: Slurm looks every 30 s, and counts as if it were 30 s later
    where = "--nodes=1 --ntasks-per-node=2 --exclude=n2,n3,n4 --time=1 --signal=B:USR1@5"
    return {mpi: site.run("limited", mpi, where, settings(pause=2.0, restarts=2)) for mpi in mpis()}


@pytest.fixture(scope="module")
def state(site: Site, limited: object) -> str:
    """The digest of a run that nobody interrupts, without MPI and Slurm."""
    out = site.here / "alone"
    hpcfl.run("wait-digits", settings=settings(), out=out, quiet=True)
    return digest(out)


@pytest.mark.parametrize("mpi", mpis())
def test_a_run_starts_by_itself(mpi: str, site: Site, state: str) -> None:
    """On two nodes with two ranks each."""
    job = site.run("plain", mpi, "--ntasks-per-node=2")
    job.ended("COMPLETED", restarts=0)
    assert f"started by {MPIEXEC[mpi]}\n" in job.said
    assert len(json.loads(store.run_attributes(job.folder)["hosts"])) == 4
    assert digest(job.folder) == state


@pytest.mark.parametrize("mpi", mpis())
def test_srun_starts_ranks_where_it_is_asked_to(mpi: str, site: Site, state: str) -> None:
    # what MPICH sends of an address of ofi is short; of others it is at times more than Slurm 22.05 takes by pmi2
    job = site.run("srun", mpi, "--cpus-per-task=2 --gpus-per-task=1", LAUNCH=SRUN[mpi], MPIR_CVAR_CH4_NETMOD="ofi")
    facts = job.ended("COMPLETED", restarts=0)
    assert (facts["NumCPUs"], facts["TresPerTask"]) == ("4", "gres:gpu:1")
    assert digest(job.folder) == state


def interrupted(job: Job, state: str) -> None:
    """Let a job save, leave and queue itself again; see that it ends as one that was left alone."""
    job.until_round(3)
    job.slurm.ask("scancel", "--batch", "--signal=USR1", job.number)
    job.ended("COMPLETED", restarts=1)
    assert digest(job.folder) == state


@pytest.mark.parametrize("mpi", mpis())
def test_environment_and_data_are_staged_to_the_nodes(mpi: str, site: Site, state: str, tmp_path: Path) -> None:
    (tmp_path / "data" / "mine").mkdir(parents=True)
    (tmp_path / "disk").mkdir()
    how = f"--nodes=2 --ranks-per-node=2 --stage={environment(tmp_path)}"
    job = site.run_written("staged", mpi, how, HPCFL_DATA=str(tmp_path / "data"), SCRATCH=str(tmp_path / "disk"))
    interrupted(job, state)
    here = tmp_path / "disk" / f"hpcfl-{job.number}"
    assert job.said.count(f"{here}/env {here}/data ['mine']\n") == 8  # of four ranks, twice
    assert not [*(tmp_path / "disk").iterdir()]


@pytest.mark.parametrize("mpi", mpis())
def test_a_server_on_a_node_without_gpus(mpi: str, site: Site, state: str) -> None:
    how = "--nodes=2 --ranks-per-node=2 --gpus-per-node=2 --server-apart"
    job = site.run_written("apart", mpi, how, MPIR_CVAR_CH4_NETMOD="ofi")
    interrupted(job, state)
    assert "--het-group=0-1\n" in job.said
    assert len(json.loads(store.run_attributes(job.folder)["hosts"])) == 5
    assert [site.slurm.facts(f"{job.number}+{part}").get("TresPerNode") for part in (0, 1)] == [None, "gres:gpu:2"]


def test_sweeps_packed_into_a_job(site: Site) -> None:
    """Four runs on two nodes: alone, or on two ranks each, of which two have room; one fails, and no other."""
    rounds, digests, numbers = 5, [], {}
    for mpi in ("", "openmpi"):
        out = site.here / f"packed-{mpi}"
        how = ["--nodes=2", "--ntasks-per-node=2", "--exclude=n1", str(SCRIPTS / "sweep.sbatch"), "fedavg-digits"]
        what = ["--seeds=1-4", f"--out={out}", f"--pack={2 if mpi else 1}", *options(settings(rounds, pause=0.2))]
        (out / "fedavg-digits_seed=3").mkdir(parents=True)
        (out / "fedavg-digits_seed=3" / "checkpoints").touch()  # where a folder is to be
        numbers[mpi] = site.submit(mpi, [*how, *what])
    steps = re.compile(rf"\b{numbers['']}\.\d")
    site.slurm.until(lambda: len(steps.findall(site.slurm.ask("squeue", "--steps"))) > 1, LIMIT)
    for mpi, number in numbers.items():
        job = Job(site.slurm, number, site.here / f"hpcfl-sweep-{number}_4294967294.log", site.here / f"packed-{mpi}")
        assert job.ended("FAILED", restarts=0)["ExitCode"] == "1:0"
        digests.append([digest(job.folder / f"fedavg-digits_seed={seed}", rounds) for seed in (1, 2, 4)])
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 3
    ranks = json.loads(store.run_attributes(site.here / "packed-openmpi" / "fedavg-digits_seed=1")["hosts"])
    assert len(ranks) == 2


@pytest.mark.parametrize("mpi", mpis())
def test_the_ranks_of_a_node_share_its_gpus_out(mpi: str, site: Site) -> None:
    how = "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --exclude=n1 --output=doctor-%j.log"
    look = f"$({HPCFL} doctor --launcher) {HPCFL} doctor --json"
    number = site.submit(mpi, [*how.split(), "--wrap", look], OMP_NUM_THREADS="1")
    job = Job(site.slurm, number, site.here / f"doctor-{number}.log", site.here)
    job.ended("COMPLETED", restarts=0)
    (line,) = (line for line in job.said.splitlines() if line.startswith("{"))
    ranks = json.loads(line)["ranks"]
    assert [rank["settings"]["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["0", "1", "0", "1"]


def test_preempted(site: Site, state: str) -> None:
    """A job of a higher partition takes the nodes; the runs are queued again, go on, and end as if alone."""
    jobs = [site.run("preempted", mpi, "--partition=low", settings(pause=0.6)) for mpi in mpis()]
    for job in jobs:
        job.until_round(3)
    high = ["--partition=high", "--nodes=3", "--exclude=n1", "--exclusive", "--output=high.log"]
    number = site.submit("", [*high, "--wrap", "sleep 1"])
    Job(site.slurm, number, site.here / "high.log", site.here).ended("COMPLETED", restarts=0)
    for job in jobs:
        job.ended("COMPLETED", restarts=1)
        assert digest(job.folder) == state


def test_cancelled(site: Site, state: str) -> None:
    """What `scancel` leaves can be read, does not say that it runs, and can be gone on with."""
    jobs = [site.run("cancelled", mpi, keys=settings(pause=0.6)) for mpi in mpis()]
    for job in jobs:
        job.until_round(3)
        site.slurm.ask("scancel", job.number)
    for job in jobs:
        job.ended("CANCELLED", restarts=0)
        # without cgroups a rank whose launcher was killed first lives a moment longer
        site.slurm.until(lambda job=job: store.read_status(job.folder).state in ("stopped", "killed"), LIMIT)
        assert store.open_run(job.folder).sizes["round"] >= 3
        assert main(["resume", str(job.folder), "--quiet"]) == 0
        assert digest(job.folder) == state


def test_stopped(site: Site) -> None:
    """`hpcfl stop` ends a job for good."""
    jobs = [site.run("stopped", mpi, keys=settings(pause=0.6)) for mpi in mpis()]
    for job in jobs:
        job.until_round(3)
        assert main(["stop", str(job.folder)]) == 0
    for job in jobs:
        assert job.ended("FAILED", restarts=0)["ExitCode"] == "85:0"
        assert store.read_status(job.folder).state == "stopped"


def test_stopped_while_it_waits_to_start_again(site: Site) -> None:
    """`hpcfl stop` is heard by a job that has been queued again, when it starts: for good, but for who resumes."""
    job = site.run("waits", "mpich", keys=settings(pause=0.6))
    job.until_round(3)
    site.slurm.ask("scontrol", "requeuehold", job.number)
    site.slurm.until(lambda: store.read_status(job.folder).state in ("stopped", "killed"), LIMIT)
    site.slurm.until(lambda: job.facts["JobState"] == "PENDING", LIMIT)
    before = store.open_run(job.folder).sizes["round"]
    assert main(["stop", str(job.folder)]) == 0
    site.slurm.ask("scontrol", "release", job.number)
    assert job.ended("FAILED", restarts=1)["ExitCode"] == "85:0"
    assert "was asked to stop before its job was started again" in job.said
    assert (store.read_status(job.folder).state, store.open_run(job.folder).sizes["round"]) == ("stopped", before)


def test_a_node_is_lost(site: Site, state: str) -> None:
    """With one MPI it is the node of the client rank, with the other that of the server and the batch script."""
    elsewhere = {mpi: f"--exclude=n1,{node}" for mpi, node in zip(mpis(), ("n4", "n2"))}
    jobs = [site.run("lost", mpi, words, settings(pause=0.6)) for mpi, words in elsewhere.items()]
    for job in jobs:
        job.until_round(3)
    site.slurm.kill_node("n3")
    for job in jobs:
        site.slurm.until(lambda job=job: job.facts["JobState"] == "PENDING", LIMIT)
        site.slurm.ask("scontrol", "update", f"JobId={job.number}", "ExcNodeList=n1")
    for job in jobs:
        assert job.ended("COMPLETED", restarts=1)["NodeList"] == "n[2,4]"
        assert digest(job.folder) == state
    site.slurm.start_node("n3")


def test_sweeps_as_arrays(site: Site) -> None:
    """A run per task, alone or on two ranks; of each sweep one is interrupted and queued again."""
    rounds, digests = 20, []
    sweeps = {}
    for mpi in ("", *mpis()):
        out = site.here / f"sweep-{mpi}"
        how = ["--array=0-1", f"--ntasks-per-node={2 if mpi else 1}", "--exclude=n1", str(SCRIPTS / "sweep.sbatch")]
        what = ["wait-digits", "--seeds", "1-2", "--out", str(out), *options(settings(rounds, pause=0.5))]
        number = site.submit(mpi, [*how, *what])
        sweeps[mpi] = [
            Job(site.slurm, f"{number}_{task}", site.here / f"hpcfl-sweep-{number}_{task}.log", out / name)
            for task, name in enumerate(("wait-digits_seed=1", "wait-digits_seed=2"))
        ]
    for _, job in sweeps.values():
        job.until_round(2)
        site.slurm.ask("scancel", "--batch", "--signal=USR1", job.number)
    for jobs in sweeps.values():
        for restarts, job in enumerate(jobs):
            job.ended("COMPLETED", restarts)
        digests.append([digest(job.folder, rounds) for job in jobs])
    assert digests[0] == digests[1] == digests[2]
    assert digests[0][0] != digests[0][1]


@pytest.mark.parametrize("mpi", mpis())
def test_the_time_is_up(mpi: str, limited: dict[str, Job], state: str) -> None:
    """Warned by Slurm the run saves and is queued again, at least twice; it ends as if it had had the time."""
    job = limited[mpi]
    facts = job.ended("COMPLETED")
    assert facts["TimeLimit"] == "00:01:00"
    assert int(facts["Restarts"]) >= 2
    assert job.said.count("(signal USR1)") == int(facts["Restarts"])
    assert digest(job.folder) == state
