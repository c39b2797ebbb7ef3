"""How late rounds close, whatever a client does.

Five ranks, 8 layers of 1 MB, a deadline of 600 ms; a visit takes some 160 ms. One client is slow, stuck in one long
operation, busy with a million tiny ones, suspended for 5 s at a time, or killed, for at least 20 rounds. Printed per
case: closing time minus deadline while the fault lasts (median, worst) and in the rounds after it (worst), the longest
wait between two rounds, and how many of the victim's layers counted in the rounds to which it was invited. A round that
is run without the victim, because it is still late, closes when the others are done: that is before the deadline.

    .venv/bin/python benchmarks/deadline.py                      # Open MPI, lanes of one client rank; 2 minutes
    .venv/bin/python benchmarks/deadline.py --mpi mpich
    .venv/bin/python benchmarks/deadline.py --width all          # one lane of everybody: the stall that lanes avoid
                                                                 # (MPICH, killed: left out, the run ends with the lane)
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import launching

if TYPE_CHECKING:
    from hpcfl.algorithms.base import Client
    from hpcfl.base.types import State
    from hpcfl.learning.batches import Visits
    from hpcfl.learning.task import Task
    from hpcfl.schedule.plan import Plan

CASES = ("none", "slow", "stuck", "busy", "stopped", "killed")
DEADLINE, LAYER_SECONDS, BEFORE, AFTER, VICTIM = 0.6, 0.02, 3, 6, 0
STRUCK, STOPPED = 0.07, 5.0  # seconds from a round's start to the blow, and for how long the victim is suspended
LIMIT = 240.0


def main() -> None:
    """Run every case as a job of its own and print a table, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mpi", choices=tuple(launching.LIBRARIES), default="openmpi")
    parser.add_argument("--width", default="1", choices=("1", "all"))
    parser.add_argument("--rounds", type=int, default=20, help="rounds under the fault")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    asked = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    print(f"{asked.mpi}, lanes of {asked.width}, load {launching.load():.1f}: milliseconds beyond the deadline")
    shared_fate = asked.width == "all" and asked.mpi == "mpich"  # a time-out gives up the whole lane: nobody is left
    for case in [case for case in asked.cases if case != "killed" or not shared_fate]:
        args = [__file__, case, asked.width, str(asked.rounds)]
        found[case] = launching.run(asked.mpi, 5, args, LIMIT, outlive=case == "killed")
        print(f"  {case:8}", "  ".join(f"{key} {value}" for key, value in found[case].items()), flush=True)
    told = {"openmpi": "ULFM", "mpich": "time-out"}[asked.mpi]
    print(json.dumps({"cases": found, "mpi": asked.mpi, "width": asked.width, "killed_by": told}))


def job(case: str, width: str, rounds: int) -> None:
    """Be one rank of a case; rank 0 prints what it measured."""
    import numpy as np
    import wall_rounds
    from mpi4py import MPI

    class Faulty(wall_rounds.Layers):
        """Layers that take their time, with a fault in one client."""

        def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
            struck = int(visits.clients[0]) == VICTIM and BEFORE <= visits.round < BEFORE + rounds
            for number, (name,) in enumerate(reversed(self.layers(task))):
                time.sleep(LAYER_SECONDS * (10 if struck and case == "slow" else 1))
                if struck and number == 3:
                    suffer(case)
                yield {name: (wall_rounds.ones(self.entries), visits.ones(1))}
            return {}

    comm = MPI.COMM_WORLD
    lost = {"lost_after": 2.0} if case == "killed" and "MPICH" in MPI.Get_library_version() else {}
    made = wall_rounds.job_of(
        Faulty(),
        comm.Get_size(),
        int(width) if width.isdigit() else width,
        {"close": "deadline", "deadline": DEADLINE},
        **lost,
    )
    pids = np.zeros(comm.Get_size(), dtype=np.int64)
    comm.Allgather(np.array([os.getpid()]), pids)
    if comm.Get_rank():
        wall_rounds.serve(made, comm)
        return
    server = wall_rounds.server(made, comm)
    series = Series(case, rounds, int(pids[1 + VICTIM]), len(made.layout))
    shared = made.algorithm.init_server(made.task)
    while not series.over:
        series.strike()
        plan, sums = server.run_round(series.number, shared)
        shared = made.algorithm.server(made.task, shared, sums)
        series.note(plan, server.began, server.took)
    _, hard = server.leave(series.number, False, without_dead=not lost)
    print(json.dumps(series.summary()), flush=True)
    if hard:
        os._exit(0)


def suffer(case: str) -> None:
    """Do what a stuck or a busy client does."""
    import torch

    if case == "stuck":
        start = time.perf_counter()
        torch.linalg.svd(torch.rand(400, 400))
        size = int(400 * (3.5 / (time.perf_counter() - start)) ** (1 / 3))
        torch.linalg.svd(torch.rand(size, size))
    if case == "busy":
        tiny = torch.zeros(1)
        for _ in range(1_000_000):
            tiny = tiny + 1


class Series:
    """The rounds of one case: when the fault strikes, and what was measured."""

    def __init__(self, case: str, rounds: int, victim: int, layers: int) -> None:
        self.case, self.rounds, self.victim, self.layers = case, rounds, victim, layers
        self.number, self.under, self.afterwards = 0, 0, 0
        self.closed = 0.0
        self.blows: list[tuple[float, float]] = []
        self.rows: list[dict[str, float]] = []
        self.returned: list[int] = []

    @property
    def over(self) -> bool:
        """Whether there have been enough rounds under the fault, and after it."""
        if self.case == "killed":
            return self.under >= self.rounds
        return self.under >= self.rounds and self.afterwards >= AFTER

    def strike(self) -> None:
        """Let a blow fall in the round that begins now, if it is time for one."""
        if self.case not in ("stopped", "killed") or self.number < BEFORE or self.under >= self.rounds:
            return
        if self.case == "killed" and not self.blows:
            self._send(STRUCK, signal.SIGKILL)
            self.blows.append((time.monotonic() + STRUCK, float("inf")))
        if self.case == "stopped" and (not self.blows or self.returned[len(self.blows) - 1 :]):
            self._send(STRUCK, signal.SIGSTOP)
            self._send(STRUCK + STOPPED, signal.SIGCONT)
            start = time.monotonic() + STRUCK
            self.blows.append((start, start + STOPPED))

    def note(self, plan: Plan, began: float, took: float) -> None:
        """Note one round."""
        row = {"beyond": (took - DEADLINE) * 1e3, "waited": (began - (self.closed or began)) * 1e3}
        self.closed = began + took
        suffered = self._suffered(began)
        self.under += suffered
        self.afterwards += self.number >= BEFORE and self.under >= self.rounds and not suffered
        invited = VICTIM in plan.cohort
        depth = int(plan.depth[plan.cohort.tolist().index(VICTIM)]) if invited else self.layers + 1
        counted = self.layers + 1 - depth
        if self.case == "stopped" and self.blows and began > self.blows[-1][1] and len(self.returned) < len(self.blows):
            self.back = getattr(self, "back", 0) + 1
            if counted:
                self.returned.append(self.back)
                self.back = 0
        self.rows.append({**row, "suffered": suffered, "layers": counted if invited else -1, "number": self.number})
        self.number += 1

    def summary(self) -> dict[str, Any]:
        """Return the case's figures, in milliseconds."""
        rows = [row for row in self.rows if row["number"] >= BEFORE]
        under = [row for row in rows if row["suffered"]] or rows
        after = [row["beyond"] for row in (rows[1:] if self.case == "killed" else rows) if self._afterwards(row)]
        layers = [row["layers"] for row in under if row["layers"] >= 0]
        found = {
            "median_ms": round(statistics.median(row["beyond"] for row in under), 1),
            "worst_ms": round(max(row["beyond"] for row in under), 1),
            "after_ms": round(max(after), 1) if after else None,
            "layers": statistics.median(layers) if layers else 0,
            "waited_ms": round(max(row["waited"] for row in rows), 1),
            "rounds": len(under),
            "invited": len(layers),
        }
        return found | ({"back_after_rounds": self.returned} if self.case == "stopped" else {})

    def _afterwards(self, row: dict[str, float]) -> bool:
        """Return whether the fault was over; a killed client's rounds after the blow are such, too."""
        return self.case == "killed" or not row["suffered"]

    def _suffered(self, began: float) -> bool:
        """Return whether the fault lasted in a round that began then."""
        if self.case in ("stopped", "killed"):
            return any(start < began + DEADLINE and began < stop for start, stop in self.blows)
        return BEFORE <= self.number < BEFORE + self.rounds

    def _send(self, seconds: float, number: int) -> None:
        timer = threading.Timer(seconds, os.kill, (self.victim, number))
        timer.daemon = True
        timer.start()


if __name__ == "__main__":
    if launching.inside():
        job(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main()
