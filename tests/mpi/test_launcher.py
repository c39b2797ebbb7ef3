"""Which launches are right: environments as launchers make them, and what MPI then says."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.launcher import LIBRARIES, PREFIXES, alone, mpis
from hpcfl.base.errors import ErrorOnOtherRank, UsageError
from hpcfl.commands.cli import main
from hpcfl.mpi import launcher as worlds
from hpcfl.mpi.devices import LOCAL_RANKS

OPENMPI = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11"
MPICH = "MPICH Version:      5.0.2\nMPICH configure:    --with-device=ch4:ucx,ofi --with-pm=hydra:gforker\n"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.25 (ANL base 3.4a2)"

BATCH = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
STEP = {**BATCH, "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}
MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "PMIX_RANK": "2",
    "OMPI_LIBDIR_LOC": "/opt/openmpi/lib",
}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0", "HYDI_CONTROL_FD": "7"}
LAUNCHES = {
    "alone": {},
    "batch": BATCH,
    "mpirun": MPIRUN,
    "mpirun-batch": {**BATCH, **MPIRUN},
    "hydra": HYDRA,
    "hydra-batch": {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", **HYDRA},  # a step of two proxies
    "srun-none": STEP,
    "srun-pmi2": {**STEP, "PMI_SIZE": "4", "PMI_RANK": "2"},
    "srun-pmix": {**STEP, "PMIX_RANK": "2"},
}
ALL = {key for environ in LAUNCHES.values() for key in environ} | {*worlds.CONNECTED, *worlds.SIZES, *worlds.RANKS}
ALL |= {*LOCAL_RANKS}


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes this process look as a launcher would have started it."""

    def start(environ: dict[str, str]) -> None:
        monkeypatch.setattr(worlds, "PATIENCE", 0)
        monkeypatch.setattr(worlds, "atexit", SimpleNamespace(register=lambda _: None))
        for key in (*ALL, worlds.ULFM):
            monkeypatch.delenv(key, raising=False)
        for key, value in environ.items():
            monkeypatch.setenv(key, value)

    return start


class Library:
    """An MPI as `hpcfl.mpi.launcher` sees it; made of a version text and the size of its world."""

    def __init__(self, text: str, size: int, running: bool = False) -> None:
        self.text, self.running = text, running
        self.COMM_WORLD = SimpleNamespace(Get_size=lambda: size)
        self.__file__ = os.devnull

    def Get_library_version(self) -> str:  # noqa: N802
        return self.text

    def Is_initialized(self) -> bool:  # noqa: N802
        return self.running

    def Init_thread(self) -> None:  # noqa: N802
        self.running = True


def test_who_launched() -> None:
    found = {name: (worlds.launcher(environ), worlds.launched_rank(environ)) for name, environ in LAUNCHES.items()}
    assert found == {
        "alone": ("", 0),
        "batch": ("", 0),
        "mpirun": (worlds.OPENMPI, 2),
        "mpirun-batch": (worlds.OPENMPI, 2),
        "hydra": (worlds.HYDRA, 2),
        "hydra-batch": (worlds.HYDRA, 2),
        "srun-none": ("srun", 2),
        "srun-pmi2": ("srun", 2),
        "srun-pmix": ("srun", 2),
    }
    assert worlds.launcher({"PMI_RANK": "0"}) == "a launcher with PMI"
    assert worlds.launcher({"SLURM_STEP_NUM_TASKS": "1"}) == ""


@pytest.mark.parametrize("name", LAUNCHES)
def test_launched_means_that_mpi_has_someone_to_talk_to(name: str, start: Any) -> None:
    start(LAUNCHES[name])
    assert worlds.launched() == (name not in ("alone", "batch", "srun-none"))


def test_tasks_without_a_pmi() -> None:
    found = {name for name, environ in LAUNCHES.items() if worlds.separate(environ)}
    assert found == {"srun-none"}
    assert worlds.separate({**STEP, "SLURM_STEP_NUM_TASKS": "1"}) == ""
    line = worlds.separate(STEP)
    for word in ("srun started 4 tasks", "4 worlds of 1 rank", "--mpi=pmi2 (MPICH)", "--mpi=pmix (Open MPI)"):
        assert word in line


@pytest.mark.parametrize("text", [OPENMPI, MPICH, CRAY, "something else 1.0"])
def test_worlds_of_one(text: str) -> None:
    for name, environ in LAUNCHES.items():
        assert bool(worlds.scattered(environ, 1, text)) == (name not in ("alone", "batch")), name
        assert worlds.scattered(environ, 4, text) == ""
        assert worlds.scattered(environ, 2, text) == ""  # the world decides, whatever the launcher's variables count
    assert worlds.scattered({**HYDRA, "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"}, 1, text) == ""
    assert worlds.scattered({**LAUNCHES["hydra-batch"], "PMI_SIZE": "1"}, 1, text) == ""  # a step of two proxies


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "hydra",
            OPENMPI,
            ["MPICH's mpiexec started 4 processes", "Open MPI 5.0.11", "MPI4PY_LIBMPI=<prefix>/lib/libmpi.so.12"],
        ),
        ("mpirun", CRAY, ["Open MPI's mpiexec started 4", "CRAY MPICH", "MPI4PY_LIBMPI=/opt/openmpi/lib/libmpi.so.40"]),
        ("mpirun", OPENMPI, ["the mpiexec of the same installation"]),
        ("srun-pmi2", OPENMPI, ["srun started 4 processes", "srun --mpi=pmix", "mpiexec of Open MPI"]),
        ("srun-pmix", MPICH, ["MPICH 5.0.2", "srun --mpi=pmi2"]),
    ],
)
def test_what_is_said_of_worlds_of_one(name: str, text: str, words: list[str]) -> None:
    line = worlds.scattered(LAUNCHES[name], 1, text)
    assert "\n" not in line
    for word in [*words, "made worlds of 1 rank, not one of 4"]:
        assert word in line


def test_an_mpich_that_open_mpis_launcher_would_abort() -> None:
    line = worlds.foreign(MPIRUN, MPICH)
    assert line.startswith(
        "started by Open MPI's mpiexec, but mpi4py loaded MPICH 5.0.2; start with the mpiexec of MPICH"
    )
    assert line.endswith("MPI4PY_LIBMPI=/opt/openmpi/lib/libmpi.so.40")
    assert worlds.foreign(MPIRUN, OPENMPI) == ""
    assert worlds.foreign(MPIRUN, MPICH + "--with-pmix=/opt/pmix") == ""  # built for such launchers
    assert worlds.foreign(MPIRUN, CRAY) == ""  # unknown: the size of its world will tell
    assert worlds.foreign({**MPIRUN, **HYDRA}, MPICH) == ""  # one launcher inside the other
    assert [name for name, environ in LAUNCHES.items() if worlds.foreign(environ, MPICH)] == ["mpirun", "mpirun-batch"]


def test_two_families_are_named_even_where_they_do_no_harm() -> None:
    assert "loaded Open MPI 5.0.11" in worlds.mismatch({**HYDRA, "PMI_SIZE": "1"}, OPENMPI)
    assert "loaded MPICH 5.0.2" in worlds.mismatch(MPIRUN, MPICH)
    assert worlds.mismatch(HYDRA, MPICH) == worlds.mismatch(MPIRUN, OPENMPI) == ""
    assert worlds.mismatch(LAUNCHES["srun-pmi2"], OPENMPI) == ""  # some are built for it
    assert worlds.mismatch(HYDRA, "something else 1.0") == ""


def test_names_of_libraries() -> None:
    assert [worlds.library(text) for text in (OPENMPI, MPICH)] == ["Open MPI 5.0.11", "MPICH 5.0.2"]
    assert worlds.library(CRAY) == "MPI VERSION : CRAY MPICH version 8.1.25 (ANL base 3.4a2)"
    texts = (OPENMPI, MPICH, CRAY, "Intel(R) MPI Library 2021.11 for Linux* OS", "MVAPICH2 Version      :\t2.3.7", "x")
    assert [worlds.family(text) for text in texts] == ["Open MPI", "MPICH", "MPICH", "MPICH", "MPICH", ""]


@pytest.mark.parametrize(
    ("name", "library", "started", "wrong"),
    [
        ("alone", None, None, ""),
        ("batch", None, None, ""),
        ("srun-none", None, None, "without a PMI"),
        ("hydra", Library(MPICH, 4), True, ""),
        ("hydra-batch", Library(MPICH, 4), True, ""),
        ("srun-pmi2", Library(MPICH, 4), True, ""),
        ("srun-pmix", Library(OPENMPI, 4), True, ""),
        ("hydra", Library(OPENMPI, 1), True, "worlds of 1 rank"),
        ("mpirun", Library(MPICH, 4), False, "but mpi4py loaded MPICH"),
        ("mpirun", Library(MPICH, 4, running=True), True, ""),  # it did start, so it can
    ],
)
def test_launches_are_judged(
    name: str, library: Any, started: bool | None, wrong: str, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(LAUNCHES[name])
    monkeypatch.setattr(worlds, "_loaded", lambda: library)
    comm, line = worlds.checked_world()
    assert comm is (library.COMM_WORLD if started else None)
    assert wrong in line
    assert bool(line) == bool(wrong)
    assert library is None or library.running == started


@pytest.mark.parametrize("command", [["run", "salf-digits", "--out", "one"], ["resume", "one"], ["doctor"]], ids=str)
@pytest.mark.parametrize("name", ["srun-none", "hydra"])
def test_one_process_of_a_wrong_launch_speaks(
    name: str,
    command: list[str],
    start: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worlds, "_loaded", lambda: Library(OPENMPI, 1))
    told = []
    for number in ("0", "3"):
        start({**LAUNCHES[name], "SLURM_PROCID": number, **({"PMI_RANK": number} if name == "hydra" else {})})
        capsys.readouterr()
        assert main(command) == 2
        told.append(capsys.readouterr())
    assert [len(each.err.splitlines()) for each in told] == [1, 0]
    assert [each.out for each in told] == ["", ""]
    assert "4 worlds of 1 rank" in told[0].err
    assert not list(tmp_path.iterdir())


def test_commands_that_need_no_world_go_on(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    start(STEP)
    assert main(["list"]) == 0
    assert capsys.readouterr().err == ""


def test_refusing(start: Any) -> None:
    start({**STEP, "SLURM_PROCID": "0"})
    with pytest.raises(UsageError, match="4 worlds") as caught:
        worlds.world()
    assert caught.value.settled
    start(STEP)
    with pytest.raises(ErrorOnOtherRank) as silent:
        worlds.world()
    assert silent.value.code == 2
    start({})
    assert worlds.world() is None


@pytest.mark.parametrize(("local", "waits"), [("0", 2.5), ("1", 5.0)])
def test_who_tells_of_what_a_host_lacks(local: str, waits: float, monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    """The first of its processes, a little later than the first of all would have."""
    waited = list[float]()
    monkeypatch.setattr(worlds.time, "sleep", waited.append)
    start({**HYDRA, "MPI_LOCALRANKID": local})
    monkeypatch.setattr(worlds, "PATIENCE", 5.0)
    where = rf"^it lacks much \(rank 2, host {os.uname().nodename}\)$"
    error, text = (UsageError, where) if local == "0" else (ErrorOnOtherRank, "")
    with pytest.raises(error, match=text):
        worlds.refuse("it lacks much")
    assert waited == [waits]


def test_mpi_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    start(HYDRA)
    with pytest.raises(UsageError, match="MPI cannot be loaded"):
        worlds.world()


KINDS = "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: pmix_v4"


@pytest.mark.parametrize(
    ("text", "mpiexec", "kinds", "expected"),
    [
        (MPICH, "/m/bin/mpiexec", KINDS, "/m/bin/mpiexec"),
        (MPICH, "", KINDS, "srun --mpi=pmi2 --kill-on-bad-exit=1"),
        (OPENMPI, "/o/bin/mpiexec", KINDS, "/o/bin/mpiexec --bind-to none"),
        (OPENMPI, "", KINDS, "srun --mpi=pmix --kill-on-bad-exit=1"),
        (OPENMPI, "", "none pmi2", ""),
        (OPENMPI, "", "", ""),
        (CRAY, "/c/bin/mpiexec", KINDS, "/c/bin/mpiexec"),
    ],
)
def test_what_starts_ranks(text: str, mpiexec: str, kinds: str, expected: str) -> None:
    if expected:
        assert worlds.starting(text, mpiexec, kinds) == expected.split()
        return
    with pytest.raises(UsageError, match=r"^mpi4py loads Open MPI 5.0.11, .* its mpiexec .* or srun with --mpi=pmix$"):
        worlds.starting(text, mpiexec, kinds)


@pytest.mark.parametrize(
    ("text", "environ", "expected"),
    [
        (MPICH, {"SLURM_HET_SIZE": "3"}, "srun --mpi=pmi2 --kill-on-bad-exit=1 --het-group=0-2"),
        (OPENMPI, {"SLURM_HET_SIZE": "2"}, "srun --mpi=pmix --kill-on-bad-exit=1 --het-group=0-1"),
        (MPICH, {"FLUX_URI": "local:///run"}, "flux run -o gpu-affinity=off"),
        (OPENMPI, {"FLUX_URI": "local:///run"}, "flux run -o gpu-affinity=off -o pmi=pmix"),
    ],
)
def test_what_starts_ranks_where_no_mpiexec_does(
    text: str, environ: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "_loaded", lambda because: SimpleNamespace(Get_library_version=lambda: text))
    monkeypatch.setattr(worlds.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=KINDS, stderr=""))
    for key, value in {"SLURM_JOB_ID": "7", **environ}.items():
        monkeypatch.setenv(key, value)
    assert worlds.starter() == expected.split()


@pytest.mark.parametrize(
    ("environ", "ranks", "room"),
    [
        ({"SLURM_NTASKS": "12"}, 5, 2),
        ({"SLURM_NTASKS": "4", "SLURM_JOB_CPUS_PER_NODE": "64", "SLURM_CPUS_PER_TASK": "3"}, 1, 4),
        ({"SLURM_JOB_CPUS_PER_NODE": "4(x2),3", "SLURM_CPUS_PER_TASK": "2"}, 1, 5),
        ({"SLURM_JOB_CPUS_PER_NODE": "4(x2),3"}, 2, 5),
    ],
)
def test_as_many_steps_as_an_allocation_has_room_for(
    environ: dict[str, str], ranks: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "starter", lambda step: ["srun", "--mpi=pmix"] if step else ["mpiexec"])
    words, found = worlds.packed(ranks, {"SLURM_JOB_ID": "7", **environ})
    cpus = environ.get("SLURM_CPUS_PER_TASK", "1")
    kind = "none" if ranks == 1 else "pmix"
    assert words == f"srun --mpi={kind} --exact --cpus-per-task={cpus} -n {ranks}".split()
    assert found == room


@pytest.mark.launch
@pytest.mark.parametrize("mpi", mpis())
def test_the_mpiexec_is_that_of_the_library(mpi: str) -> None:
    words = [sys.executable, "-m", "hpcfl", "doctor", "--launcher"]
    found = alone(words, env={"MPI4PY_LIBMPI": str(PREFIXES / mpi / "lib" / LIBRARIES[mpi])})
    assert found.code == 0, found.err
    assert found.out.split()[0] == str(PREFIXES / mpi / "bin" / "mpiexec")


def test_without_an_mpi_nothing_starts_ranks(monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    start({})
    with pytest.raises(UsageError, match=r"^MPI cannot be loaded: .*; MPI4PY_LIBMPI=<prefix>/lib/libmpi.so.40 "):
        worlds.starter()


@pytest.mark.parametrize(
    ("text", "switch", "expected"),
    [
        (OPENMPI, "1", True),
        (OPENMPI, "true", True),
        (OPENMPI, "0", False),
        (OPENMPI, None, False),
        ("Open MPI v4.1.4, package: Debian", "1", False),
        (MPICH, "1", False),
    ],
)
def test_ulfm(text: str, switch: str | None, expected: bool, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start({} if switch is None else {worlds.ULFM: switch})
    monkeypatch.setattr(worlds, "_loaded", lambda: Library(text, 4))
    assert worlds.has_ulfm(object()) is expected
    assert worlds.has_ulfm(None) is False


@pytest.mark.parametrize(("switch", "expected"), [("1", "1"), ("0", None), (None, None)])
def test_only_with_fault_tolerance_nobody_waits_for_the_launcher(switch: str | None, expected: str | None) -> None:
    (name,) = worlds.FAREWELL
    environ = {} if switch is None else {worlds.ULFM: switch}
    worlds.set_defaults(environ)
    assert environ.get(name) == expected


def test_what_the_user_has_set_is_kept() -> None:
    asked = dict.fromkeys([*worlds.TREES, *worlds.FAREWELL], "0") | {worlds.ULFM: "1"}
    environ = dict(asked)
    worlds.set_defaults(environ)
    assert environ == asked


def test_cuda_is_unknown_where_it_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "_loaded", lambda: Library(OPENMPI, 4))  # of a file that is no library
    assert worlds.has_cuda(object()) is None
    assert worlds.has_cuda(None) is False


@pytest.mark.mpi
def test_numbers_on_the_host(world: Any) -> None:
    from hpcfl.mpi.waiting import texts, wait

    found = np.empty(world.size, dtype=np.int64)
    wait([world.comm.Iallgather(np.array([worlds.local(world.comm)]), found)])
    hosts = texts(world.comm, socket.gethostname())
    for host in set(hosts):
        here = [rank for rank in range(world.size) if hosts[rank] == host]
        assert found[here].tolist() == [*range(len(here))]


@pytest.mark.mpi
def test_the_launch_of_these_tests_is_right(world: Any) -> None:
    comm, wrong = worlds.checked_world()
    assert wrong == ""
    assert comm.Get_size() == world.size
    assert worlds.has_cuda(comm) in (True, False)
    assert worlds.mismatch(os.environ, worlds._loaded().Get_library_version()) == ""


def test_one_process_needs_no_world() -> None:
    assert worlds.local(None) == (0, 1)


def test_what_a_rank_says_is_read_before_it_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    said, heard = os.fdopen(write, "w"), []

    def reader() -> None:
        time.sleep(0.05)
        heard.append(os.read(read, 100))

    monkeypatch.setattr("sys.stderr", said)
    print("a line", file=said)
    thread = threading.Thread(target=reader)
    thread.start()
    worlds.wait_until_read(seconds=60.0)
    thread.join()
    print("nobody reads this", file=said)
    worlds.wait_until_read(seconds=0.0)
    said.close()
    os.close(read)
    assert heard == [b"a line\n"]
    worlds.wait_until_read()  # closed
