"""What ranks do in drawn schedules: ``python tests/golden/schedules.py`` writes schedules.json anew.

Of each schedule it has the beginning of a digest of its trace (all messages, parts in collectives, and faults, in their
order, at which microsecond of the network's clock) and of what the run told: lines, fates, whose visits counted and how
long they took. `tests/realtime/test_simulator.py` plays them, and any other digest is found. A change in real time that
is to alter what ranks do, or when, freezes them anew.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, combinations, count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcfl.testing.schedules import LARGE, LATEST, SAVING, WIDER, Played, Schedule, drawn, play

FILE = Path(__file__).with_name("schedules.json")
APART = 10_000  # seeds from one part to the next: more than a part has
FIRSTS = *range(SAVING, SAVING + 6 * APART, APART), WIDER, LARGE, LATEST
EVENTS = 10**6 / len(FIRSTS)


def part(first: int) -> Iterator[tuple[Schedule, Played]]:
    """Play an eighth of a million events, of schedules in which clients learn nothing: these are quick."""
    events, seeds = 0, count(first)
    while events < EVENTS:
        schedule = drawn(next(seeds))
        if schedule.quick:
            found = play(schedule)
            events += found.events
            yield schedule, found


def short(found: Played) -> str:
    figures = np.array(found.figures)
    figures[2] = 0  # what the server waited for, by its own clock
    told: list[Any] = [found.trace, found.said, found.ended, found.lost, found.rejected, sorted(found.rehosted)]
    told += [found.gradients, sorted(found.codes.items())]
    told += [(rank, profile.round(6).tolist()) for rank, profile in sorted(found.profiles.items())]
    told.append(figures.round(6).tolist())
    for plan in found.plans:
        told += [plan.cohort.tolist(), plan.depth.tolist(), plan.seconds.round(6).tolist(), round(plan.duration, 6)]
        told.append(sorted((client, int(fate)) for client, fate in plan.ended.items()))
        if (came := plan.arrivals) is not None:
            told += [came.versions.tolist(), came.numbers.tolist(), came.times.round(6).tolist(), came.waiting.tolist()]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:8]


def frozen() -> dict[int, str]:
    """Return the trace of each seed."""
    return {int(seed): trace for seed, trace in json.loads(FILE.read_text(encoding="utf-8")).items()}


def unlike(number: int) -> list[int]:
    """Return so many seeds of those that are frozen, of schedules that are as unlike each other as possible.

    Each is the one with the most pairs of facts that no earlier one has.
    """
    left, seen, found = {seed: {*combinations(sorted(facts(drawn(seed))), 2)} for seed in frozen()}, set[Any](), []
    while left and len(found) < number:
        found.append(max(left, key=lambda seed: len(left[seed] - seen)))
        seen |= left.pop(found[-1])
    return found


def facts(schedule: Schedule) -> set[str]:
    """Return what is told of a schedule, where it is one of a few."""
    config = json.loads(schedule.config)
    rules = sorted((key, value) for key, value in config["participation"].items())
    keys = "lane_width", "lost_after", "start_within", "fan_out", "guard", "availability"
    told = {f"{key} {config.get(key)}" for key in keys}
    told |= {f"{key} {config['algorithm'].get(key)}" for key in ("name", "momentum")}
    told |= {f"rules {rules}", f"lost {config.get('lost_clients')}", f"hosts {len({*schedule.hosts})}"}
    told |= {fault.kind for fault in schedule.faults} | {f"saves {schedule.saves}", f"writes {schedule.writes < 1e9}"}
    return told | {
        f"failures {schedule.network['failures']}",
        f"stop {schedule.stop < 1e9}",
        f"apart {schedule.apart}",
        f"further {schedule.further}",
    }


def traces(first: int) -> list[tuple[int, str, str]]:
    torch.set_num_threads(1)
    return [(schedule.seed, short(found), found.broken) for schedule, found in part(first)]


def main() -> int:
    with ProcessPoolExecutor() as pool:
        rows = [*chain.from_iterable(pool.map(traces, FIRSTS))]
    FILE.write_text(json.dumps({seed: trace for seed, trace, _ in rows}, indent=0) + "\n", encoding="utf-8")
    broken = {seed: why for seed, _, why in rows if why}
    print(json.dumps({"schedules": len(rows), "broken": broken}))
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
