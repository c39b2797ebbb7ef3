"""What `hpcfl doctor --site` finds, here in canned words of schedulers, and the job scripts that it writes.

Slurm's scripts run under a live Slurm in tests/slurm. Those for PBS and Flux are compared with files of ``golden``, and
played: programs that stand in for the scheduler start a script's ranks on this machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.environments import environment
from helpers.launcher import LIBRARIES, PREFIXES, ROOT, alone, mpis
from hpcfl.base.errors import UsageError
from hpcfl.commands import site as sites
from hpcfl.commands.cli import main
from hpcfl.commands.show import summary
from hpcfl.commands.site import SCHEDULERS, Site, lacking, look, report

GOLDEN = Path(__file__).parent / "golden"
SAID = {
    "slurm": {
        "sbatch --version": "slurm-wlm 22.05.8\n",
        "sinfo -h -o %R|%D|%c|%G|%l": "cpu|100|64|(null)|2-00:00:00\ngpu|8|32+|gpu:a100:4|1-00:00:00\n",
        "srun --mpi=list": "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin available: pmix_v4\n",
        "nvidia-smi -L": "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)\nGPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-2)\n",
    },
    "pbs": {
        "qstat --version": "pbs_version = 22.05.11\n",
        "pbsnodes -a": "".join(
            f"n{number}\n     state = free\n     resources_available.ncpus = 16\n{gpus}\n"
            for number, gpus in enumerate(("", "", "     resources_available.ngpus = 2\n"))
        ),
    },
    "flux": {
        "flux version": "commands:    \t\t0.66.0\nlibflux-core:\t\t0.66.0\n",
        "flux resource info": "8 Nodes, 32 Cores, 0 GPUs\n",
    },
    "": {},
}
FOUND = {
    "slurm": [
        "scheduler   Slurm 22.05.8",
        "nodes       partition cpu: 100 nodes, 64 cores, no GPU on each; at most 2-00:00:00",
        "nodes       partition gpu: 8 nodes, 32+ cores, gpu:a100:4 on each; at most 1-00:00:00",
        "srun --mpi  pmi2 pmix pmix_v4",
        "MPI         mpi4py loads Open MPI 5.0.11, started by /o/bin/mpiexec --bind-to none",
        "GPU         NVIDIA A100-SXM4-40GB, NVIDIA A100-SXM4-40GB on this host, by nvidia-smi",
    ],
    "pbs": [
        "scheduler   PBS 22.05.11",
        "nodes       2 nodes, 16 cores, gpu:0 on each",
        "nodes       1 nodes, 16 cores, gpu:2 on each",
    ],
    "flux": ["scheduler   Flux 0.66.0", "nodes       8 Nodes, 32 Cores, 0 GPUs"],
    "": ["scheduler   none"],
}


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hpcfl.mpi.launcher.launched", lambda: False)
    for each in SCHEDULERS.values():
        monkeypatch.delenv(each.inside, raising=False)


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What programs say, to be filled."""
    said: dict[str, str] = {}
    monkeypatch.setattr(sites, "ask", lambda *words: said.get(" ".join(words), ""))
    monkeypatch.setattr(sites.launcher, "starter", lambda: ["/o/bin/mpiexec", "--bind-to", "none"])
    monkeypatch.setattr(sites, "MPI", SimpleNamespace(Get_library_version=lambda: "Open MPI v5.0.11, and more"))
    return said


@pytest.mark.parametrize("scheduler", SAID)
def test_what_is_found(scheduler: str, canned: dict[str, str]) -> None:
    canned |= SAID[scheduler]
    lines = report(look())
    assert lines[: len(FOUND[scheduler])] == FOUND[scheduler]
    script = {"slurm": "run.sbatch", "pbs": "run.pbs", "flux": "run.flux", "": "FILE --scheduler NAME"}[scheduler]
    assert lines[-1] == f"a script: hpcfl doctor --site -o {script}"


def test_of_two_schedulers_that_counts_whose_job_this_is(
    canned: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    canned |= SAID["slurm"] | SAID["flux"]
    assert look().scheduler == "slurm"
    monkeypatch.setenv("FLUX_URI", "local:///run")
    assert look().scheduler == "flux"


@pytest.mark.parametrize("name", ["slurm", "pbs"])
def test_a_scheduler_that_does_not_answer_is_named(
    name: str, canned: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert look().silent == ""
    program = tmp_path / SCHEDULERS[name].asked.split()[0]
    program.touch(mode=0o755)
    assert look().silent == SCHEDULERS[name].asked
    canned |= SAID[name]
    assert not [line for line in lacking(look()) if line.startswith("a scheduler")]


def test_what_cannot_be_started_is_said(canned: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def starter() -> list[str]:
        raise UsageError("mpi4py loads Open MPI 5.0.11, which nothing here starts")

    monkeypatch.setattr(sites.launcher, "starter", starter)
    canned |= SAID["pbs"]
    assert "lacking: mpi4py loads Open MPI 5.0.11, which nothing here starts" in report(look())


WHOLE = Site(
    *("slurm", "22.05.8", ["gpu:4"], ["pmix", "pmi2"], "MPICH 5.0.2", "mpiexec", "", ["A100"]),
    *({"/local": ("xfs", 900)}, True, "lustre"),
)
LACKING = {
    "a scheduler": {"scheduler": ""},
    "a scheduler that answers ('sbatch --version' fails): look": {"scheduler": "", "silent": "sbatch --version"},
    "no MPI": {"mpi": "", "unstarted": "no MPI at all"},
    "srun --mpi=pmi2, for MPICH 5.0.2": {"kinds": ["pmix"]},
    "GPUs that the scheduler knows of": {"nodes": ["8 Nodes, 32 Cores, 0 GPUs"]},
    "a node's own disk": {"scratch": {"/tmp": ("tmpfs", 60)}},
    "a shared folder: this one is on xfs": {"here": "xfs"},
}


@pytest.mark.parametrize("line", LACKING)
def test_each_thing_that_is_lacking_is_one_line(line: str) -> None:
    (said,) = lacking(Site(**{**vars(WHOLE), **LACKING[line]}))
    assert said.startswith(line)


def test_nothing_is_lacking() -> None:
    assert not [*lacking(WHOLE)]
    assert not [*lacking(Site(**{**vars(WHOLE), "starts": "", "unstarted": "no mpiexec"}))]  # srun does
    assert "lacking: nothing" in report(WHOLE)


def test_the_command_looks_around(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--site"]) == 0
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert {"scheduler", "MPI", "GPU", "scratch", "modules"} < {*names}


# --- scripts


def written(scheduler: str, *words: str) -> str:
    """Return the script that the command writes."""
    name = SCHEDULERS[scheduler].script
    assert main(["doctor", "--site", "-o", name, "--scheduler", scheduler, *words]) == 0
    return Path(name).read_text()


def tarred(name: str = "env.tar", member: str = "bin/python") -> str:
    """Return a tar with a file in it."""
    Path(member).parent.mkdir(parents=True, exist_ok=True)
    Path(member).touch()
    subprocess.run(["tar", "-cf", name, member], check=True)
    return name


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_by_itself_a_script_is_the_one_in_jobs(scheduler: str) -> None:
    name = SCHEDULERS[scheduler].script
    assert written(scheduler) == (ROOT / "jobs" / scheduler / name).read_text().replace(f"jobs/{scheduler}/", "")


def test_scripts_differ_in_their_heads_only() -> None:
    texts = [(ROOT / "jobs" / name / each.script).read_text() for name, each in SCHEDULERS.items()]
    (tail,) = {text.partition("# --- from here on scripts for other schedulers are the same\n")[2] for text in texts}
    assert tail.count("\n") > 50


@pytest.mark.parametrize(("scheduler", "apart"), [("pbs", ["--server-apart"]), ("flux", [])])
def test_scripts_are_those_of_the_golden_files(scheduler: str, apart: list[str], tmp_path: Path) -> None:
    options = ["--nodes=4", "--gpus-per-node=8", "--time=12:30:00", f"--stage={tarred()}", *apart]
    golden = GOLDEN / SCHEDULERS[scheduler].script
    text = written(scheduler, *options).replace(str(tmp_path), "/home/me")
    if "HPCFL_GOLDEN" in os.environ:  # writes them anew
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("script", [*(ROOT / "jobs").glob("*/run.*"), *GOLDEN.glob("run.*")], ids=str)
def test_scripts_are_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


def directives(text: str) -> list[str]:
    return [line.split(" --")[-1] for line in text.splitlines() if line.startswith("#SBATCH")]


def test_a_server_apart_is_a_component_of_its_own() -> None:
    words = ["--nodes=3", "--gpus-per-node=4", "--time=02:00:00", "--server-apart"]
    server, clients = " ".join(directives(written("slurm", *words))).split(" #SBATCH hetjob ")
    assert server.startswith("job-name=hpcfl nodes=1 ntasks-per-node=1 cpus-per-task=1 time=02:00:00 signal=B:USR1@120")
    assert clients == "requeue nodes=3 ntasks-per-node=4 time=02:00:00 gpus-per-node=4"


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("", 5),
        ("--gpus-per-node=4", 5),
        ("--gpus-per-node=4 --nodes=2", 4),
        ("--gpus-per-node=4 --ranks-per-node=9", 9),
    ],
)
def test_as_many_ranks_as_a_node_has_gpus(words: str, ranks: int) -> None:
    assert f"ntasks-per-node={ranks}" in directives(written("slurm", *words.split()))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--nodes 2", "a job script is written by --site -o FILE: expected both"),
        ("--site --nodes 2", "a job script is written by --site -o FILE: expected both"),
        ("-o x.sh", "a job script is written by --site -o FILE: expected both"),
        ("--site --launcher", "--launcher, --network and --site tell of different things: expected one"),
        ("--site -o x.sh --scheduler pbs --time 2h", "--time: expected HH:MM:SS, 5 minutes or more, got '2h'"),
        ("--site -o x.sh --scheduler pbs --time 00:04:00", "--time: expected HH:MM:SS, 5 minutes or more, got"),
        ("--site -o x.sh --scheduler flux --server-apart", "--server-apart: slots of Flux are alike"),
        ("--site -o x.sh --scheduler pbs --stage no.tar", "--stage 'no.tar': No such file"),
        ("--site -o x.sh --scheduler pbs --stage text", "--stage 'text': not a tar"),
        ("--site -o x.sh --scheduler pbs --stage odd.tar", "--stage 'odd.tar': expected bin/python in it"),
        ("--site -o text --scheduler pbs", "-o 'text': File exists"),
        ("--site -o x.sh --scheduler lsf", "'lsf' is not one of 'slurm', 'pbs', 'flux'"),
        ("--site -o x.sh", "-o: no scheduler found here: expected --scheduler slurm, pbs or flux"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    words: str, line: str, canned: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text").write_text("a text")
    tarred("odd.tar", "other")
    assert main(["doctor", *words.split()]) != 0
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1
    assert not Path("x.sh").exists()


# --- played

STANDS_IN = {
    "qstat": 'echo "    Resource_List.walltime = 00:00:$LEFT"',
    "qsub": 'echo "$HPCFL_RESTARTED $HPCFL_DATA qsub $*" >>handed-in',
    "pbsdsh": 'shift 3; exec "$@"',
    "flux": """case $1 in
        exec) shift; exec "$@" ;;
        getattr) echo 1 ;;
        job) echo "$LEFT" ;;
        --parent) echo "$HPCFL_RESTARTED $HPCFL_DATA flux $*" >>handed-in ;;
        run) while [[ $1 != --ntasks* ]]; do shift; done; n=${1#*=}; shift; exec "$MPIEXEC" -n "$n" "$@" ;;
    esac""",
}


@pytest.mark.launch
@pytest.mark.parametrize(("scheduler", "mpi"), [("pbs", "openmpi"), ("pbs", "mpich"), ("flux", "mpich")])
def test_a_job_saves_before_its_time_is_up_and_hands_itself_in(scheduler: str, mpi: str, tmp_path: Path) -> None:
    if mpi not in mpis():
        pytest.skip(f"{mpi} is not installed: make setup")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in STANDS_IN.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    Path("nodes").write_text("localhost\n" * 2)
    script = tmp_path / SCHEDULERS[scheduler].script
    (tmp_path / "data" / "mine").mkdir(parents=True)
    (tmp_path / "disk").mkdir()
    written(scheduler, "--ranks-per-node=2", f"--stage={environment(tmp_path)}")
    keys = {"rounds": 40, "evaluate.every": 40, "algorithm.name": "paced:Paced", "algorithm.pause": 0.5}
    options = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    env = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "slurm"), str(ROOT)]),
        "HPCFL": str(Path(sys.executable).parent / "hpcfl"),
        "MPI4PY_LIBMPI": str(PREFIXES / mpi / "lib" / LIBRARIES[mpi]),
        "MPIEXEC": str(PREFIXES / mpi / "bin" / "mpiexec"),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OUT": "run",
        "HPCFL_DATA": "data",
        "SCRATCH": str(tmp_path / "disk"),
        "LEFT": "128",  # seconds
    }
    own: dict[str, Any] = {
        "pbs": {
            **{"PBS_JOBID": "7.here", "PBS_NODEFILE": "nodes", "PBS_O_WORKDIR": str(tmp_path)},
            **{"CONFIG": "wait-digits", "OPTIONS": " ".join(options)},
        },
        "flux": {"FLUX_URI": "local:///run"},
    }
    words = ["bash", str(script), *(["wait-digits", *options] if scheduler == "flux" else [])]
    env |= own[scheduler]
    first = alone(words, env=env)
    assert first.code == 85, first.err
    here = {"pbs": f"{tmp_path}/disk/hpcfl-7.here", "flux": f"{tmp_path}/disk/hpcfl-128"}[scheduler]
    assert first.out.count(f"{here}/env {here}/data ['mine']\n") == 2  # of two ranks
    assert not [*(tmp_path / "disk").iterdir()]
    again = {"pbs": f"qsub {script}", "flux": f"flux --parent batch {' '.join(words[1:])}"}[scheduler]
    assert Path("handed-in").read_text() == f"1 data {again}\n"
    second = alone(words, env=env | {"HPCFL_RESTARTED": "1", "LEFT": "9999"})
    assert second.code == 0, second.err
    assert (summary(Path("run"))["status"], summary(Path("run"))["rounds"]) == ("done", 40)
    assert Path("handed-in").read_text().count("\n") == 1
