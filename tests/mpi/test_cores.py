"""Cores, hyper-threads and quotas: files made by hand, and masks that the ranks of these tests set themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcfl.mpi import cores as processors
from hpcfl.mpi.cores import Processors, threads


def shares(visible: list[Processors]) -> list[float]:
    return processors.shares(visible, ["here"] * len(visible))


def seen(*cores: int, **quotas: float) -> Processors:
    return Processors(cores, quotas)


def test_a_core_is_divided_among_those_that_see_it() -> None:
    assert shares([seen(0, 1, 2, 3)] * 2) == [2, 2]
    assert shares([seen(0, 1), seen(2, 3)]) == [2, 2]  # bound: each has its own
    assert shares([seen(0, 1, 2, 3), seen(2, 3)]) == [3, 1]
    assert shares([seen(0)] * 4) == [0.25] * 4
    assert processors.shares([seen(0, 1), seen(0), seen(0, 1)], ["a", "a", "b"]) == [1.5, 0.5, 2]
    thirds = shares([seen(0, 1, 2)] * 3)
    assert [threads(each) for each in thirds] == [1, 1, 1]  # three thirds are one


def test_a_quota_is_divided_among_its_group() -> None:
    assert shares([seen(*range(8), job=6.0)] * 2) == [3, 3]
    assert shares([seen(*range(8), job=100.0)] * 2) == [4, 4]  # more than there is
    assert shares([seen(0, 1, job=2.5, step=1.5), seen(2, 3, job=2.5)]) == [1.25, 1.25]
    assert shares([seen(0, 1, job=2.5, step=1.0), seen(2, 3, job=2.5)]) == [1.0, 1.25]


@pytest.mark.parametrize(
    ("share", "asked", "expected"),
    [(3.0, "", 3), (1.99, "", 1), (0.25, "", 1), (1 / 3 + 1 / 3 + 1 / 3, "", 1), (3.0, "8", 8), (3.0, "0", 3)],
)
def test_threads(share: float, asked: str, expected: int) -> None:
    assert threads(share, asked) == expected


def wrote(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")


def test_hyper_threads_are_one_core(tmp_path: Path) -> None:
    for thread, siblings in {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2-3", 3: "2-3"}.items():
        wrote(tmp_path / processors.SIBLINGS.format(thread), f"{siblings}\n")
    assert processors.whole([0, 1, 4, 5], tmp_path) == [0, 1]
    assert processors.whole([4, 3], tmp_path) == [0, 2]  # the second one of each
    assert processors.whole([7, 9], tmp_path) == [7, 9]  # nothing is known of them


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """A system with groups of version 2: a job's 6 processors, of which this step has 2.5."""
    wrote(tmp_path / "proc/self/cgroup", "0::/slurm/job/step/user\n")
    wrote(tmp_path / "proc/self/mountinfo", "35 1 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n")
    groups = tmp_path / "sys/fs/cgroup/slurm"
    wrote(groups / "cpu.max", "max 100000\n")
    wrote(groups / "job/cpu.max", "600000 100000\n")
    wrote(groups / "job/step/cpu.max", "125000 50000\n")
    wrote(groups / "job/step/user/cpu.max", "max 100000\n")
    return tmp_path


def test_quotas_of_version_2(second: Path) -> None:
    job = second / "sys/fs/cgroup/slurm/job"
    assert processors.quotas(second) == {str((job / "step").stat().st_ino): 2.5, str(job.stat().st_ino): 6.0}


def test_quotas_within_a_container(second: Path) -> None:
    """Its mount begins at its own group, whose path may be shown in full, or not at all."""
    for path in ("/docker/4711", "/", "/../other"):
        wrote(second / "proc/self/cgroup", f"1:name=systemd:/x\n0::{path}\n")
        top = "/docker/4711" if path.startswith("/docker") else "/"
        wrote(second / "proc/self/mountinfo", f"35 1 0:30 {top} /inside rw shared:9 - cgroup2 cgroup2 rw\n")
        wrote(second / "inside/cpu.max", "150000 100000\n")
        assert list(processors.quotas(second).values()) == [1.5]


def test_quotas_of_version_1(tmp_path: Path) -> None:
    wrote(tmp_path / "proc/self/cgroup", "4:memory:/m\n3:cpu,cpuacct:/job\n0::/\n")
    kinds = {"memory": "rw,memory", "cpu,cpuacct": "rw,cpu,cpuacct"}
    lines = [f"3{i} 1 0:3{i} / /cg/{name} rw - cgroup cgroup {said}" for i, (name, said) in enumerate(kinds.items())]
    wrote(tmp_path / "proc/self/mountinfo", "\n".join(lines))
    for group, quota in {"": -1, "/job": 350000}.items():
        wrote(tmp_path / f"cg/cpu,cpuacct{group}/cpu.cfs_quota_us", f"{quota}\n")
        wrote(tmp_path / f"cg/cpu,cpuacct{group}/cpu.cfs_period_us", "100000\n")
    assert list(processors.quotas(tmp_path).values()) == [3.5]


def test_no_groups_no_quotas(tmp_path: Path) -> None:
    assert processors.quotas(tmp_path) == {}


def test_of_this_process() -> None:
    assert 1 <= len(processors.cores()) <= processors.host_cores()


@pytest.fixture
def bound(world: Any) -> Iterator[None]:
    """Each rank by itself on one core, as launchers bind them, in turns where there are more ranks."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[world.rank % len(before)]})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.mpi
def test_bound_ranks_share_their_own_core_alone(world: Any, bound: None) -> None:
    from hpcfl.mpi.waiting import texts

    (own,), known = processors.cores(), processors.processors()
    text = json.dumps([list(known.cores), dict(known.quotas)])
    everyone = [Processors(*json.loads(each)) for each in texts(world.comm, text)]
    users = sum(list(each.cores) == [own] for each in everyone)
    share = processors.shares(everyone, ["here"] * world.size)[world.rank]
    assert share <= 1 / users
    if not processors.quotas():
        assert share == 1 / users
    apart = processors.shares(everyone, [str(rank) for rank in range(world.size)])[
        world.rank
    ]  # each on a host of its own
    assert threads(apart) == 1
