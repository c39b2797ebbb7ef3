"""How much of its host's processors a rank may use: the cores that it sees, and quotas on processor time.

A core is one however many hyper-threads it has: a product keeps its arithmetic units busy with one thread.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

SIBLINGS = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@dataclass(frozen=True)
class Processors:
    """What one process sees.

    Attributes
    ----------
    cores : collection of int
        Those that it may run on, each by its first hyper-thread.
    quotas : mapping of str to float
        Processors' worth of time that the control groups around it allow, by something that tells a group of one host
        from another. A group outside of a container is not seen from within.
    """

    cores: Collection[int]
    quotas: Mapping[str, float] = field(default_factory=dict)


def processors() -> Processors:
    """Return what this process sees."""
    return Processors(cores(), quotas())


def cores() -> list[int]:
    """Return the cores that this process may run on, each by its first hyper-thread."""
    if hasattr(os, "sched_getaffinity"):
        return whole(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def host_cores() -> int:
    """Return how many cores this host has, whoever may use them."""
    return len(whole(range(os.cpu_count() or 1)))


def whole(threads: Collection[int], root: Path = Path("/")) -> list[int]:
    """Return the cores of some hyper-threads, each by its first; all count where the system does not tell."""
    firsts = set()
    for thread in threads:
        firsts.add(thread)
        with suppress(OSError, ValueError):
            text = (root / SIBLINGS.format(thread)).read_text(encoding="ascii")
            firsts.remove(thread)
            firsts.add(min(int(number) for number in text.replace("-", ",").split(",")))
    return sorted(firsts)


def quotas(root: Path = Path("/")) -> dict[str, float]:
    """Return the processors' worth of time that this process's control groups allow, of those that set a limit.

    Both versions of control groups are read: ``cpu.max``, and ``cpu.cfs_quota_us`` by ``cpu.cfs_period_us``. A group is
    named by the number of its folder, which is the same in all containers of a host.
    """
    found = {}
    for group in _groups(root):
        with suppress(OSError, ValueError, ZeroDivisionError):
            if (group / "cpu.max").exists():
                quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
            else:
                files = group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us"
                quota, period = (file.read_text(encoding="ascii").strip() for file in files)
            if quota != "max" and int(quota) > 0:
                found[str(group.stat().st_ino)] = int(quota) / int(period)
    return found


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of the groups around this process that may limit its time, innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
        mounts = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # no Linux
        return
    paths = {kinds: path for _, kinds, path in (line.split(":", 2) for line in lines if line.count(":") >= 2)}
    for line in mounts:
        place, _, kind = line.partition(" - ")
        fields, words = place.split(), kind.split()
        if len(fields) < 5 or len(words) < 3:
            continue
        options = words[2].split(",")
        if words[0] == "cgroup2":
            path = paths.get("")
        elif words[0] == "cgroup" and "cpu" in options:
            path = next((path for kinds, path in paths.items() if "cpu" in kinds.split(",")), None)
        else:
            continue
        if path is not None:
            mount, top = root / fields[4].lstrip("/"), fields[3]  # what is mounted begins at the group `top`
            inside = Path(path).is_relative_to(top) and ".." not in Path(path).parts
            group = mount / Path(path).relative_to(top) if inside else mount
            yield from (each for each in (group, *group.parents) if each.is_relative_to(mount))


def shares(visible: Sequence[Processors], hosts: Sequence[str]) -> list[float]:
    """Return how many cores' worth of its host each rank has, of `hosts` [ranks].

    A core is divided among all ranks that see it, and the quota of a control group among all that are in it.
    """
    users = Counter((host, core) for host, each in zip(hosts, visible) for core in each.cores)
    members = Counter((host, group) for host, each in zip(hosts, visible) for group in each.quotas)
    found = []
    for host, each in zip(hosts, visible):
        quotas = (quota / members[host, group] for group, quota in each.quotas.items())
        found.append(min([sum(1 / users[host, core] for core in each.cores), *quotas]))
    return found


def threads(share: float, asked: str = "") -> int:
    """Return how many threads a rank's operations take: as `asked`, by OMP_NUM_THREADS, or its share, at least 1."""
    return int(asked) if asked.isdecimal() and int(asked) else max(1, int(share + 1e-6))
