"""All methods by how rounds close, what counts of visits, corrections, server steps, clocks: all accepted has effect.

    python tests/grid.py [--seconds 1800] [--seed 0] [--shard 0/4] [--whole]

For each point that `Config.check_values` accepts a run of `ROUNDS` rounds is played in memory, and held against the
points that differ from it in one axis, where that has its plain value: both must end in other states. `NO_OPS` has the
exceptions, each with its reason. What is refused is refused in one line. In real time the run is played over the
network of `hpcfl.testing`, one rank for each client: sums and personal state are those of what counted, to the bit, and
where the same visits count as in simulated time, as they must where all are waited for, it ends in the same state.
Prints what it finds, and one JSON line last.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch

from hpcfl.algorithms import algorithm_class, algorithms
from hpcfl.base.errors import RunError, UsageError
from hpcfl.config import Config, from_table
from hpcfl.engine.job import Job
from hpcfl.schedule.plan import Plan
from hpcfl.testing import schedules
from hpcfl.testing.test_algorithms import OWN
from judges import world

ROUNDS, BATCH = 5, 4
HOSTS = ("here",) * (len(world.SIZES) + 1)
NETWORK: dict[str, Any] = {"latency": 1e-6, "bandwidth": 1e12, "jitter": 0.0, "failures": False, "eager": 4096}
State = dict[str, np.ndarray[Any, Any]]
Point = tuple[str, ...]
"""The values of the `AXES`, by their names there."""
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "method": {name: {"algorithm": {"name": name}} for name in sorted(algorithms())},
    "close": {
        "all": {},
        "first": {"participation": {"close": "first", "first": 4}},
        "quorum": {"participation": {"close": "quorum", "quorum": 2, "grace": 0.03}},
        "deadline": {"participation": {"close": "deadline", "deadline": 0.1}},
        "arrivals": {"participation": {"close": "arrivals", "buffer": 3, "max_seconds": 0.08}},
        "single": {"participation": {"close": "arrivals", "buffer": 1, "dispatch": "reporter"}},
        "every": {"participation": {"close": "arrivals", "buffer": 8, "every_client": True, "max_staleness": 0}},
        "groups": {"participation": {"close": "arrivals", "dispatch": "fedcompass"}, "scheduler": {"least_steps": 1}},
    },
    "partial": {each: {"participation": {"partial": each}} for each in ("auto", "layers", "steps", "discard")},
    "correct": {
        **{each: {"weighting": {"correct": each}} for each in ("none", "known", "estimated", "remembered")},
        "mifa": {"weighting": {"correct": "remembered", "mean": "all"}},
    },
    "server": {
        "none": {},
        "momentum": {"server": {"optimizer": "momentum"}},
        "delayed": {"server": {"optimizer": "delayed-nesterov", "cycle": 2}},
        "yogi": {"server": {"optimizer": "yogi"}},
    },
    "message": {
        "none": {},
        "top-k": {"message": {"compress": "top-k", "share": 0.2}},
        "qsgd": {"message": {"compress": "qsgd"}},
        "bf16": {"message": {"compress": "bf16"}},
    },
    "fragments": {"all": {}, "two": {"fragments": {"count": 2}}},
    "clock": {
        "simulated": {},
        "wall": {"clock": "wall", "batch_clients": False, "lane_width": 1, "threads": 1},
    },
}
NAMES = list(AXES)
PLAIN = {axis: next(iter(values)) for axis, values in AXES.items() if axis != "method"}
SPEED = {"model": "gamma", "mean": 0.1, "between": 0.3, "within": 0.9}
MORE: dict[str, dict[str, Any]] = {  # what methods need so that visits can be cut short, and to be small
    "fedavg": {"epochs": 0, "steps": 3},
    "lg_fedavg": {"epochs": 0, "steps": 3, "shared_layers": 2},
    "heterofl": {"mask_labels": False},
    "fedrolex": {"mask_labels": False},
    "hf_maml": {"steps": 4},
    "salf": {"missing": "none"},
}
NO_OPS: dict[str, tuple[str, Callable[[str, dict[str, str]], bool]]] = {
    "whole visits": (
        "a method that sends nothing layer by layer discards what is not whole anyway",
        lambda axis, at: axis == "partial" and at["partial"] == "discard" and at["method"] != "salf",
    ),
    "no end": (
        "where only the last visit or the next arrival ends a round, none is cut short: discarding is of rejections",
        lambda axis, at: axis == "partial" and at["partial"] == "discard" and at["close"] in ("all", "single", "every"),
    ),
    "heads first": (
        "FedRep's heads learn first: what the first four leave undone here has not come to what is shared",
        lambda axis, at: (
            axis == "partial" and at["method"] == "fedrep" and at["partial"] == "steps" and at["close"] == "first"
        ),
    ),
    "end unknown": (
        "in real time nobody knows when visits will close a round: those cut short count for nothing, as is warned",
        lambda axis, at: (
            (axis, at["partial"], at["clock"]) == ("partial", "steps", "wall") and at["close"] in ("first", "quorum")
        ),
    ),
    "layers alone": (
        "SALF's layers count one by one anyway",
        lambda axis, at: axis == "partial" and at["partial"] == "layers" and at["method"] == "salf",
    ),
    "local": (
        "clients that share nothing do not hear who else came",
        lambda axis, at: at["method"] in ("local", "fedhenn"),
    ),
}
"""Which axis at which value changes nothing, and why."""


@dataclass
class Grid:
    """What was found: the state that each point ends in, None where it is refused, with the line that says so."""

    ended: dict[Point, str | None] = field(default_factory=dict)
    lines: dict[Point, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    alike: int = 0
    """Points in real time in whose rounds the same visits count as in simulated time."""

    def play(self, point: Point) -> str | None:
        """Return a digest of what a point's run ends in; None: it is refused."""
        if point not in self.ended:
            self.ended[point] = self._played(point)
        return self.ended[point]

    def _played(self, point: Point) -> str | None:
        try:
            config = from_table(table(point))
            config.check_values()
        except UsageError as error:
            self.lines[point] = str(error)
            if "unknown key" in str(error):
                self.faults.append(f"{', '.join(point)}: {error}")
            if "\n" in str(error):
                self.faults.append(f"{', '.join(point)}: more than one line: {error}")
            return None
        try:
            states = self._in_real_time(point, config) if config.clock == "wall" else in_memory(config)
        except RunError as error:  # as where nobody ever arrives
            return str(error)
        except Exception:
            self.faults.append(f"{', '.join(point)}: {traceback.format_exc(limit=-3)}")
            return None
        if not all(np.isfinite(value).all() for state in states for value in state.values()):
            self.faults.append(f"{', '.join(point)}: ends in what is not finite")
        digest = hashlib.sha256()
        for state in states:
            for name in sorted(state):
                digest.update(name.encode() + np.ascontiguousarray(state[name]).tobytes())
        return digest.hexdigest()

    def _in_real_time(self, point: Point, config: Config) -> list[State]:
        """Return what a run in real time ends in, and hold it against simulated time."""
        found = schedules.play(schedules.Schedule(0, json.dumps(table(point)), HOSTS, NETWORK, rounds=ROUNDS))
        if found.broken or found.said or found.lost:
            self.faults.append(f"{', '.join(point)}: {found.broken}{found.said}{found.lost or ''}")
        if found.ended:
            raise RunError(found.ended)
        states = [numbers(found.shared), *(found.states[client] for client in sorted(found.states))]
        drawn = config.model_copy(update={"clock": "simulated"})
        plans = list(islice(Job.of(drawn, None, 1).planner.plans(), ROUNDS))
        if [counted(plan) for plan in found.plans] == [counted(plan) for plan in plans]:
            self.alike += 1
            for one, other in zip(states, in_memory(drawn), strict=True):
                if one.keys() != other.keys() or any(not np.allclose(one[n], other[n], 0, 1e-9) for n in one):
                    self.faults.append(f"{', '.join(point)}: ends in another state than in simulated time")
        elif dict(zip(NAMES, point))["close"] == "all":
            self.faults.append(f"{', '.join(point)}: other visits count than in simulated time")
        return states

    def judge(self, point: Point) -> None:
        """Note a fault where a value of an axis changes nothing."""
        ended, at = self.play(point), dict(zip(NAMES, point))
        for axis, plain in PLAIN.items():
            if ended is None or at[axis] == plain or axis in ("close", "clock"):
                continue
            other = tuple(plain if name == axis else value for name, value in at.items())
            if self.play(other) == ended and not any(idle(axis, at) for _, idle in NO_OPS.values()):
                self.faults.append(f"{', '.join(point)}: {axis} = {at[axis]} changes nothing")


def numbers(state: Mapping[str, Any]) -> State:
    return {name: np.asarray(value) for name, value in state.items()}


def in_memory(config: Config) -> list[State]:
    """Return what a run in simulated time ends in: the server's state, then each client's."""
    found = world.played(config)
    return [numbers(state) for state in (found.shared, *found.personal)]


def counted(plan: Plan) -> Any:
    """Return what of a round counts: whose visits, of which versions, and how far they came."""
    known = plan.arrivals
    with_what = [] if known is None else [known.versions.tolist(), known.numbers.tolist()]
    return plan.cohort.tolist(), plan.depth.tolist(), None if plan.steps is None else plan.steps.tolist(), with_what


def table(point: Point) -> dict[str, Any]:
    """Return the config of a point."""
    method = point[0]
    own = {
        name: dict(section) for name, section in OWN.get(method, {}).items() if name in ("data", "model", "algorithm")
    }
    keys: dict[str, Any] = {
        **{"rounds": ROUNDS, "clients": len(world.SIZES), "seed": 5, "precision": "double", "batch_clients": 3},
        **{"data": {"name": "judges.world:Unequal"}, "model": {"name": "mlp", "hidden": [5, 3]}, "speed": SPEED},
        **{"evaluate": {"every": ROUNDS + 1, "last": 1}, "participation": {}, "algorithm": {}},
        **own,
    }
    for axis, value in zip(AXES.values(), point):
        for section, more in axis[value].items():
            keys[section] = {**keys.get(section, {}), **more} if isinstance(more, dict) else more
    small = {"batch": BATCH} if "batch" in algorithm_class(method).model_fields and "data" not in own else {}
    keys["algorithm"] |= small | MORE.get(method, {})
    return keys


def points() -> Iterator[Point]:
    """Yield all points, but those that have both a part of the model and messages that say less."""
    for point in itertools.product(*(AXES[name] for name in NAMES)):
        at = dict(zip(NAMES, point))
        if at["message"] == PLAIN["message"] or at["fragments"] == PLAIN["fragments"]:
            yield point


def run(
    seconds: float, seed: int, accepted: float = inf, shard: slice = slice(None), beside: frozenset[str] = frozenset()
) -> Grid:
    """Judge points in an order that a seed draws, for so many seconds, or until so many are `accepted`.

    `shard` picks some of the methods; the axes `beside` have their plain value.
    """
    methods = [*AXES["method"]][shard]
    grid, order, began = Grid(), list(points()), time.monotonic()
    plain = [(place, PLAIN[name]) for place, name in enumerate(NAMES) if name in beside]
    order = [each for each in order if each[0] in methods and all(each[place] == value for place, value in plain)]
    random.Random(seed).shuffle(order)
    for point in order:
        found = sum(each is not None for each in grid.ended.values()) if accepted < inf else 0
        if time.monotonic() - began > seconds or found >= accepted:
            break
        grid.judge(point)
    return grid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", default="0/1", help="Of the methods: 0/4 has the first of every four.")
    parser.add_argument("--whole", action="store_true", help="All points whose messages say all of the whole model.")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    first, step = map(int, asked.shard.split("/"))
    beside = frozenset({"message", "fragments"} if asked.whole else ())
    grid = run(inf if asked.whole else asked.seconds, asked.seed, inf, slice(first, None, step), beside)
    for fault in grid.faults:
        print(fault)
    accepted = sum(ended is not None for ended in grid.ended.values())
    found = {"played": len(grid.ended), "accepted": accepted, "alike": grid.alike, "faults": len(grid.faults)}
    print(json.dumps({"points": sum(1 for _ in points()), **found}))


if __name__ == "__main__":
    main()
