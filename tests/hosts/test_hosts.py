"""Jobs over several hosts, with both MPIs: `make test-hosts`, and with what is marked as slow `make test-hosts-all`.

Hosts are namespaces of this machine (`hosts.cluster`): the network between them is TCP, and can fail.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.launcher import LIBRARIES, PREFIXES, ROOT, alone, mpis
from hosts.cluster import Cluster, missing
from hpcfl import store
from hpcfl.commands.show import summary
from hpcfl.testing.runs import toml

pytestmark = pytest.mark.hosts

PRESETS = "salf-digits", "wait-digits", "srpfl-fedrep-digits", "flic-toy"
LEFT_SECONDS = 60.0  # within which nobody is left of a job that is over
SPREAD = 1, 2, 2, 2  # ranks of each host; clients 4 and 5 are those of the last one
REAL: dict[str, Any] = {
    **{"clients": 6, "rounds": 100, "clock": "wall", "threads": 1, "evaluate": {"every": 1}},
    **{"checkpoint": {"every": 100}, "data": {"name": "digits"}, "model": {"name": "mlp"}},
    **{"algorithm": {"name": "fedavg", "epochs": 1}, "participation": {"close": "deadline", "deadline": 0.6}},
}
# servers are silent sooner than for users, who wait three minutes
HASTY = [ROOT / "tests" / "helpers" / "hasty.py", "SILENT_SECONDS=10", "BEAT_SECONDS=1", "--"]
SIMULATED = {key: value for key, value in REAL.items() if key not in ("clock", "participation")}
CLOCKS = REAL | {"lane_width": 1}, REAL | {"lane_width": "two-level"}, SIMULATED


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def first_is_quick(cases: Iterable[Any]) -> list[Any]:
    """Mark all cases but the first one as slow."""
    first, *others = ((case if isinstance(case, tuple) else (case,)) for case in cases)
    return [pytest.param(*first), *(slow(*case) for case in others)]


def in_turn(cases: Iterable[Any]) -> list[Any]:
    """Take each case with one MPI after the other; mark as slow what the others make of it."""
    return [
        pytest.param(case, mpi) if index == number % len(mpis()) else slow(case, mpi)
        for number, case in enumerate(cases)
        for index, mpi in enumerate(mpis())
    ]


@pytest.fixture(autouse=True, scope="module")
def possible() -> None:
    """Skip all where there can be no hosts: that is not asked while tests are collected."""
    if reason := missing():
        pytest.skip(reason)


def run(folder: Path, what: Any, *more: str) -> list[Any]:
    return ["-m", "hpcfl", "run", what, "--out", folder, *more]


def hosts(folder: Path) -> list[str]:
    return list(json.loads(store.open_run(folder).attrs["hosts"]))


def told(job: Any) -> int:
    """How many rounds a job has told of: one that evaluates tells of each."""
    return sum(line.startswith("round ") for line in job.out.splitlines())


def carried(config: dict[str, Any], mpi: str, ranks: Sequence[int], here: Path) -> int:
    """How many bytes the cables of hosts carry in a run of 10 rounds, each tested."""
    more: dict[str, Any] = {"rounds": 10, "model": {"name": "mlp", "hidden": [512, 512]}}
    more |= {"participation": {"close": "all"}} if "clock" in config else {}
    words = run(here / "run", toml(config | more, here / "run.toml"))
    with Cluster(len(ranks), [here]) as cluster:
        with cluster.live(mpi, ranks, words, here / "job") as job:
            over(cluster, job)
        return sum(came for _, came in cluster.wire().values())


def over(cluster: Cluster, job: Any, code: int = 0) -> None:
    """Wait for a job's end, and for that of all that belongs to it."""
    assert job.wait() == code, job.out + job.err
    cluster.until(lambda: not cluster.left(), LEFT_SECONDS)


def came(folder: Path, clients: Sequence[int]) -> np.ndarray[Any, Any]:
    """Whether visits of these clients counted, by round, bool [rounds, clients]."""
    found: np.ndarray[Any, Any] = store.open_run(folder)["arrived"].sel(client=list(clients)).values == 1
    return found


@pytest.mark.parametrize(("preset", "mpi"), in_turn(PRESETS))
def test_three_hosts_give_the_bits_of_one_process(preset: str, mpi: str, tmp_path: Path) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    assert alone([sys.executable, *map(str, run(one, preset, "--set", "rounds=8"))]).code == 0
    words = run(several, preset, "--set", "rounds=8")
    with Cluster(3, [tmp_path]) as cluster, cluster.live(mpi, (1, 2, 2), words, tmp_path / "job") as job:
        over(cluster, job)
    assert hosts(several) == ["h1", "h2", "h2", "h3", "h3"]
    assert summary(several)["state_sha256"] == summary(one)["state_sha256"]


@pytest.mark.parametrize(("fault", "mended"), [("cut", "join"), slow("freeze", "thaw")])
@pytest.mark.parametrize(("width", "mpi"), in_turn([1, "two-level"]))
def test_a_host_that_is_away_for_seconds_comes_back(
    width: Any, fault: str, mended: str, mpi: str, tmp_path: Path
) -> None:
    """Nothing is lost but visits of its own clients.

    What TCP has begun to send into a cut of 5 s is sent again up to 5 s after it, and rounds take .2 s.
    """
    folder = tmp_path / "run"
    speeds = tmp_path / "speeds.csv"
    speeds.write_text("\n".join(["client,seconds", *(f"{client},0.1" for client in range(6)), ""]))
    real = REAL | {"lane_width": width, "rounds": 120, "speed": {"model": "table", "file": str(speeds)}}
    words = run(folder, toml(real, tmp_path / "run.toml"))
    with Cluster(4, [tmp_path]) as cluster, cluster.live(mpi, SPREAD, words, tmp_path / "job") as job:
        job.until(lambda: told(job) > 10)
        getattr(cluster, fault)("h4")
        time.sleep(5)
        before = told(job)
        getattr(cluster, mended)("h4")
        over(cluster, job)
    assert hosts(folder) == ["h1", "h2", "h2", "h3", "h3", "h4", "h4"]
    assert came(folder, range(4)).all()
    away = came(folder, (4, 5))
    assert not away[before - 2 : before].any()
    assert away[:10].all()
    assert away[-5:].all()
    assert job.err.count("h4 (ranks 5, 6; clients 4, 5) has not been heard of since round") == 1
    back = re.findall(r"h4 \(ranks? ([\d, ]+); clients? [\d, ]+\) is back, after", job.err)
    assert sorted(", ".join(back).split(", ")) == ["5", "6"]  # together or one by one


@pytest.mark.parametrize("mpi", first_is_quick(mpis()))
def test_a_run_whose_host_was_killed_goes_on_on_the_others_to_the_bit(mpi: str, tmp_path: Path) -> None:
    keys = "--set", "rounds=20", "--set", "evaluate.every=1", "--set", "checkpoint.every=1"
    one, killed = tmp_path / "one", tmp_path / "killed"
    assert alone([sys.executable, *map(str, run(one, "wait-digits", *keys))]).code == 0
    with Cluster(3, [tmp_path]) as cluster:
        with cluster.live(mpi, (1, 2, 2), run(killed, "wait-digits", *keys), tmp_path / "first") as job:
            job.until(lambda: told(job) > 5)
            cluster.kill("h3")
            job.process.wait(LEFT_SECONDS)
        assert store.read_status(killed).state != "done"
        with cluster.live(mpi, (1, 2), ["-m", "hpcfl", "resume", killed], tmp_path / "second") as job:
            over(cluster, job)
    assert summary(killed)["state_sha256"] == summary(one)["state_sha256"]


@pytest.mark.parametrize(("config", "mpi"), first_is_quick((config, mpi) for config in CLOCKS for mpi in mpis()))
def test_nobody_stays_where_the_servers_host_has_crashed(config: dict[str, Any], mpi: str, tmp_path: Path) -> None:
    """Its launcher is gone with it: each rank ends by itself; the run goes on from another host."""
    folder = tmp_path / "run"
    config = config | {"rounds": 30, "checkpoint": {"every": 5}}
    _, _, *words = run(folder, toml(config, tmp_path / "run.toml"))
    with Cluster(3, [tmp_path]) as cluster:
        with cluster.live(mpi, (1, 2, 2), [*HASTY, *words], tmp_path / "first") as job:
            job.until(lambda: told(job) > 10)
            cluster.crash("h1")
            cluster.until(lambda: not cluster.left(), LEFT_SECONDS)
        assert "the server (rank 0) has been silent for" in store.read_status(folder).reason
        with cluster.live(mpi, (0, 1, 2), ["-m", "hpcfl", "resume", folder], tmp_path / "second") as job:
            over(cluster, job)
    assert store.open_run(folder)["round"].values.tolist() == list(range(30))


@pytest.mark.parametrize("mpi", first_is_quick(mpis()))
def test_a_server_that_comes_back_finds_its_run_taken_over(mpi: str, tmp_path: Path) -> None:
    """Its host was cut off, and the run went on from another one; it writes no more, and its ranks end."""
    folder = tmp_path / "run"
    config = toml(REAL | {"rounds": 40, "checkpoint": {"every": 5}}, tmp_path / "run.toml")
    with Cluster(4, [tmp_path]) as cluster, cluster.live(mpi, (1, 2), run(folder, config), tmp_path / "first") as job:
        job.until(lambda: told(job) > 10)
        cluster.cut("h1")
        again = "-m", "hpcfl", "resume", folder, "--force"
        with cluster.live(mpi, (0, 0, 1, 2), again, tmp_path / "second", others=("h3", "h4")) as second:
            second.until(lambda: told(second) > 5)
            cluster.join("h1")
            cluster.until(lambda: job.process.poll() is not None, LEFT_SECONDS)
            assert second.wait() == 0, second.out + second.err
            cluster.until(lambda: not cluster.left(), LEFT_SECONDS)
    assert job.process.wait() != 0
    assert f"'{folder}' was taken over by process" in job.err or "the run has been taken over by" in job.err
    assert store.read_status(folder).state == "done"
    assert store.open_run(folder)["round"].values.tolist() == list(range(40))


@pytest.mark.parametrize("mpi", first_is_quick(mpis()))
def test_a_host_without_the_data_is_named(mpi: str, tmp_path: Path) -> None:
    mnist = Path(os.environ.get("HPCFL_DATA", "")) / "mnist"
    if not mnist.is_dir():
        pytest.skip("HPCFL_DATA names no folder with mnist/")
    facts = {"rounds": 3, "clients": 6, "algorithm": {"name": "fedavg"}, "model": {"name": "mlp"}}
    config = toml(facts | {"data": {"name": "mnist"}}, tmp_path / "run.toml")
    with Cluster(3, [tmp_path]) as cluster:
        for host in ("h1", "h2"):  # each has a /tmp of its own
            assert cluster.start(host, ["sh", "-c", f"mkdir /tmp/data && cp -r {mnist} /tmp/data"]).wait() == 0
        words = run(tmp_path / "run", config, "--data-dir", "/tmp/data")
        with cluster.live(mpi, (1, 2, 2), words, tmp_path / "job") as job:
            over(cluster, job, 2)
    line = "hpcfl: data.name = 'mnist': /tmp/data has no folder mnist/ (rank 3, host h3)"
    assert [each for each in job.err.splitlines() if each.startswith("hpcfl: ")] == [line]


@pytest.mark.parametrize(("what", "mpi"), in_turn(["another MPI", "h5py"]))
def test_a_host_that_lacks_what_others_have_is_named(what: str, mpi: str, tmp_path: Path) -> None:
    """Nobody waits for it, whichever launcher it is."""
    if what == "another MPI":
        if len(mpis()) < 2:
            pytest.skip("there is one MPI")
        other = next(each for each in mpis() if each != mpi)
        what = str(PREFIXES / other / "lib" / LIBRARIES[other])
    _, _, *words = run(tmp_path / "run", "wait-digits")
    words = [ROOT / "tests" / "helpers" / "lacking.py", "3,4", what, *words]
    with Cluster(3, [tmp_path]) as cluster, cluster.live(mpi, (1, 2, 2), words, tmp_path / "job") as job:
        over(cluster, job, 2)
    line = "hpcfl: No module named 'h5py': expected " if what == "h5py" else "hpcfl: "
    (told,) = (each for each in job.err.splitlines() if each.startswith("hpcfl: "))
    assert told.startswith(line)
    assert told.endswith(" (rank 3, host h3)")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mpi", mpis())
@pytest.mark.parametrize("width", [1, "two-level"])
@pytest.mark.slow
def test_a_slow_link_holds_up_nobody_else(width: Any, mpi: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    more: dict[str, Any] = {"lane_width": width, "rounds": 40, "model": {"name": "mlp", "hidden": [256, 256]}}
    words = run(folder, toml(REAL | more, tmp_path / "run.toml"))
    with Cluster(4, [tmp_path]) as cluster, cluster.live(mpi, SPREAD, words, tmp_path / "job") as job:
        job.until(lambda: told(job) > 10)
        cluster.rate("h4", 1.0)  # of the 340 kB of a model a tenth in a round
        job.until(lambda: told(job) > 35)
        cluster.rate("h4", 0)
        over(cluster, job)
    assert came(folder, range(4)).all()
    assert not came(folder, (4, 5))[15:30].all(1).any()


@pytest.mark.parametrize(("config", "mpi"), first_is_quick((config, mpi) for config in CLOCKS for mpi in mpis()))
def test_bytes_on_record_are_those_of_the_cables(config: dict[str, Any], mpi: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    sent = carried(config, mpi, (1, 1, 1, 1), tmp_path)
    data = store.open_run(folder)
    assert 0.95 < data["wire_bytes_in"].values.sum() / sent < 1.05
    assert data["wire_bytes_in"].values.sum() == pytest.approx(data["wire_bytes_out"].values.sum(), rel=1e-3)


@pytest.mark.parametrize("mpi", mpis())
@pytest.mark.slow
def test_in_simulated_time_one_copy_goes_to_each_host_and_one_comes(mpi: str, tmp_path: Path) -> None:
    """Of the state, tested and used, at 4 bytes a number, and of the sums at 8."""
    sent = carried(SIMULATED, mpi, (1, 2, 2), tmp_path)
    numbers = 64 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10
    assert 1.0 < sent / (10 * 2 * (4 + 8) * numbers) < 1.05


@pytest.mark.parametrize("mpi", mpis())
@pytest.mark.parametrize("width", [1, "two-level"])
@pytest.mark.slow
def test_where_a_link_loses_frames_only_visits_of_its_host_are_late(width: Any, mpi: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = run(folder, toml(REAL | {"lane_width": width, "rounds": 40}, tmp_path / "run.toml"))
    with Cluster(4, [tmp_path]) as cluster, cluster.live(mpi, SPREAD, words, tmp_path / "job") as job:
        job.until(lambda: told(job) > 10)
        cluster.lossy("h4", 0.05)
        over(cluster, job)
    assert came(folder, range(4)).all()
    assert came(folder, (4, 5))[15:].any()


@pytest.mark.parametrize(("ready", "mpi"), in_turn([False, True]))
def test_a_host_that_is_cut_off_in_the_start_is_spoken_of(ready: bool, mpi: str, tmp_path: Path) -> None:
    folder, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()
    config = toml(REAL | {"patience": 3.0}, tmp_path / "run.toml")
    held = [Path(__file__).parents[1] / "helpers" / "held.py", marks, "start" if ready else "begin"]
    with Cluster(4, [tmp_path]) as cluster:
        words = [*held, *run(folder, config)[2:]]
        with cluster.live(mpi, SPREAD, words, tmp_path / "job") as job:
            cluster.until(lambda: len(list(marks.iterdir())) == sum(SPREAD), LEFT_SECONDS)
            cluster.cut("h4")
            (marks / "go").touch()
            job.until(lambda: "still waiting (" in job.err)
        line = (
            "for all ranks to start: some may be dead" if ready else "for MPI to start on all ranks: some hosts may be"
        )
        assert line in job.err
        assert job.err.count("still waiting (") == 1


@pytest.mark.parametrize(
    ("mpi", "options"),
    [(mpi, ()) for mpi in mpis()] + [("openmpi", ("--with-ft", "ulfm"))] * ("openmpi" in mpis()),
)
@pytest.mark.parametrize("more", first_is_quick(({}, {"lane_width": "two-level"})))
def test_a_job_whose_host_is_cut_off_for_good_ends(
    more: dict[str, Any], mpi: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = run(folder, toml(REAL | more | {"lost_after": 5.0, "rounds": 60}, tmp_path / "run.toml"))
    with Cluster(4, [tmp_path]) as cluster, cluster.live(mpi, SPREAD, words, tmp_path / "job", options) as job:
        job.until(lambda: told(job) > 10)
        cluster.cut("h4")
        cluster.until(lambda: store.read_status(folder).state == "done", LEFT_SECONDS)
        cluster.until(lambda: not cluster.left(), LEFT_SECONDS)
        assert job.process.wait() is not None
    assert "h4 (ranks 5, 6; clients 4, 5) has not been heard of since round" in job.err
    assert all(f"rank {rank} is lost" in job.err for rank in (5, 6))
    assert came(folder, range(4)).all()
