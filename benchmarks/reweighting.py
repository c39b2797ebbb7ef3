"""Memory and time of solving for FedLRGD's weights, against the bound ``algorithm.memory``.

    python benchmarks/reweighting.py [--p 100000] [--rank 20] [--memory 64 256 1024]

A multilayer perceptron of about p parameters, r samples of the server on the unit cube, r parameter vectors: what the
server does once the clients' sums are there. Each bound is measured in a process of its own, in which the same was done
before on a tiny model: what is resident then is the state before, and the peak from there on is the kernel's.
The growth holds, beside what the bound is about (matrices G, their factors, gradients of samples), what is there
whatever the bound: the points, a message and its sum on three grids, the weights before and after. These are seven
arrays of r·p numbers, ``beside``; ``holds`` says whether the rest of the growth is within the bound.

``passes`` are the times that each of the r² gradients is computed: G has r²·p numbers, ``whole`` MB, and is worked
through in so many parts. ``ratio`` is the time over that of r² plain gradients in the same process (one pass over all r
samples at each of r points, `Task.gradients`). Half a minute on 2 cores. Prints a table and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from statistics import median
from typing import Any

import launching
import numpy as np
import torch
from memory import peak, settled

from hpcfl.algorithms import ServerState
from hpcfl.algorithms.fedlrgd.algorithm import POINTS, FedLrgd
from hpcfl.algorithms.fedlrgd.low_rank import shaped
from hpcfl.base.memory import give_back
from hpcfl.base.rng import StepKey
from hpcfl.config import from_table
from hpcfl.engine.job import Job
from hpcfl.sums.message import ExactSums

DIMENSION, CLASSES = 10, 10


def main() -> None:
    """Start a process for each bound, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--p", type=int, default=100_000)
    parser.add_argument("--rank", type=int, default=20)
    parser.add_argument("--memory", nargs="+", type=int, default=[64, 256, 1024], metavar="MB")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measured(asked.p, asked.rank, asked.memory[0])))
        return
    cases = []
    for memory in asked.memory:
        words = [sys.executable, __file__, "--one", "--p", asked.p, "--rank", asked.rank, "--memory", memory]
        done = subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True)
        cases.append(json.loads(done.stdout.splitlines()[-1]))
        print("  ".join(f"{name} {value}" for name, value in cases[-1].items()), flush=True)
    print(json.dumps({"load": launching.load(), "cases": cases}))


def measured(p: int, rank: int, memory: int) -> dict[str, Any]:
    """Return growth in MB and seconds of one solution."""
    solved(job_of(500, 4, 64))
    job = job_of(p, rank, memory)
    give_back()
    before = settled()
    seconds = solved(job)
    grown, size = peak() - before, job.task.parameter_count
    plain = median(gradients(job) for _ in range(3))
    whole, beside, mega = 8 * size * rank**2, 7 * 8 * size * rank, 2**20
    coordinates = job.algorithm._surrogates(job.task).bound.coordinates  # type: ignore[attr-defined]
    return {
        **{"p": size, "r": rank, "bound": memory, "whole": round(whole / mega), "grown": round(grown / mega)},
        **{"beside": round(beside / mega), "holds": grown - beside <= memory * mega, "passes": -(-size // coordinates)},
        **{"seconds": round(seconds, 2), "ratio": round(seconds / plain, 2)},
    }


def job_of(p: int, rank: int, memory: int) -> Job:
    """Return a job of one client."""
    hidden = max(1, (p - CLASSES) // (DIMENSION + 1 + CLASSES))
    values = {
        **{"rounds": 2, "clients": 1, "precision": "double"},
        "algorithm": {"name": "fedlrgd", "rank": rank, "scale": 0.1, "memory": memory},
        "data": {"name": "unit_cube", "dimension": DIMENSION, "labels": CLASSES, "samples": rank, "server": rank},
        "model": {"name": "mlp", "hidden": [hidden]},
    }
    return Job.of(from_table(values), None, 1)


def solved(job: Job) -> float:
    """Return the seconds in which the server solves for the weights, sums being random."""
    algorithm, state = (
        job.algorithm,
        ServerState(job.algorithm.init_server(job.task), job.algorithm.init_extras(job.task)),
    )
    assert isinstance(algorithm, FedLrgd)
    sums = ExactSums(job.layout, 1, np.zeros(1))
    shape = algorithm.rank, job.task.parameter_count
    sums.add({"sums": (torch.rand(1, *shape, dtype=torch.float64), torch.ones(1, dtype=torch.float64))})
    begun = time.perf_counter()
    after = algorithm.step(job.task, state, sums)
    seconds = time.perf_counter() - begun
    assert torch.isfinite(after.extras["weights"]).all()
    return seconds


def gradients(job: Job) -> float:
    """Return the seconds of r² plain gradients, those of the samples apart from each other."""
    task, points = job.task, job.algorithm.init_server(job.task)[POINTS]
    own = task.server_batch()
    assert own is not None
    apart = replace(own, x=own.x.transpose(0, 1), y=own.y.transpose(0, 1), key=StepKey(0, 0, [0] * len(points), 0))
    begun = time.perf_counter()
    for point in points:
        each = {name: value.expand(len(points), *value.shape) for name, value in shaped(point, task.initial()).items()}
        task.gradients(each, apart)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
