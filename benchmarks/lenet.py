"""FedAvg on a LeNet, all of `hpcfl run`, against a plain PyTorch loop: alone, and what more processes gain.

    OMP_NUM_THREADS=1 python benchmarks/lenet.py [--mpi openmpi|mpich] [--ranks 3] [--pairs 4] [--rounds 2]

Convolutions of 64 and 64 filters, 32x32x3 images, 10 clients of 100 samples, batches of 10, one epoch. hpcfl writes its
run folder and is tested at the end only; a round's seconds are those of a run of so many rounds more, less those of a
run of one. The loop trains a model per client and takes the mean in float64; it is given the order of the samples,
which hpcfl draws. Both take turns.

- alone: processor's seconds per round in one process, on one thread, without MPI;
- ranks: seconds per round of both in one process of an MPI job while the others are asleep, and in all of them: hpcfl
  with a server and two client ranks, the loop's clients dealt to three processes that add up their models. ``gain`` is
  the quotient of the two; the loop waits for its sums as hpcfl does, polling.

Medians over pairs, with both losses of the last round. About 2 minutes on two cores. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import launching
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hpcfl
from hpcfl.base.memory import keep_freed
from hpcfl.base.plugins import look_in
from hpcfl.config import from_table
from hpcfl.learning.task import Task

if launching.inside():
    from mpi4py import MPI

    from hpcfl.mpi.waiting import wait

CLIENTS, SAMPLES, TESTS, BATCH, LR, SEED = 10, 100, 20, 10, 0.01, 1
ASLEEP_SECONDS = 0.05
CONFIG: dict[str, Any] = {
    "clients": CLIENTS,
    "seed": SEED,
    "algorithm": {"name": "fedavg", "lr": LR, "batch": BATCH},
    "data": {"name": "lenet:Images"},
    "model": {"name": "cnn", "channels": [64, 64], "hidden": [120, 64]},
}


class Images(hpcfl.Source):
    """Pictures of the classes, in noise."""

    def check(self, clients: int, data_dir: Path | None) -> hpcfl.Header:
        """Return what there is."""
        return hpcfl.InMemory.of([client(0)] * clients, 10).header

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> hpcfl.Federation:
        """Return the clients' samples."""
        return hpcfl.InMemory.of([client(number) for number in range(clients)], 10)


def client(number: int) -> hpcfl.ClientData:
    """Return a client's samples."""
    rng = np.random.default_rng(number)
    pictures = np.random.default_rng(CLIENTS).normal(size=(10, 3, 32, 32))
    y = rng.integers(10, size=SAMPLES + TESTS)
    x = (pictures[y] + rng.normal(size=(len(y), 3, 32, 32))).astype(np.float32)
    return hpcfl.ClientData(x[:SAMPLES], y[:SAMPLES], x[SAMPLES:], y[SAMPLES:])


class Loop:
    """FedAvg as a plain PyTorch loop over some of the clients; `add` sums a tensor over processes."""

    def __init__(self, clients: range, add: Callable[[Tensor], None] = lambda _: None) -> None:
        self.net = nn.Sequential(
            *(nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(1600, 120), nn.ReLU(), nn.Linear(120, 64), nn.ReLU(), nn.Linear(64, 10)),
        )
        config = from_table({**CONFIG, "rounds": 1})
        task = Task(config.model, config.data.federate(CLIENTS, SEED, None), SEED)
        self.initial = dict(zip(self.net.state_dict(), task.initial().values()))
        self.held = {number: task.samples(number)[:2] for number in clients}
        self.add = add

    def run(self, rounds: int) -> float:
        """Train from the beginning; return the last round's mean loss."""
        state = self.initial
        for number in range(rounds):
            shapes = {name: value.shape for name, value in state.items()} | {"loss": torch.Size()}
            mean = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
            for client, (x, y) in self.held.items():
                self.net.load_state_dict(state)
                optimiser = torch.optim.SGD(self.net.parameters(), lr=LR)
                order = torch.from_numpy(hpcfl.keyed(SEED, "batches", number, client, 0).permutation(SAMPLES))
                for rows in torch.split(order, BATCH):
                    optimiser.zero_grad()
                    loss = F.cross_entropy(self.net(x[rows]), y[rows])
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimiser.step()
                    mean["loss"].add_(loss.detach(), alpha=BATCH / SAMPLES / CLIENTS)
                for name, value in self.net.state_dict().items():
                    mean[name].add_(value, alpha=1 / CLIENTS)
            for value in mean.values():
                self.add(value)
            found = float(mean.pop("loss"))
            state = {name: value.float() for name, value in mean.items()}
        return found


class Runs:
    """Runs of hpcfl, each in a folder of its own, on the ranks of a communicator."""

    def __init__(self, place: Path, comm: Any = None) -> None:
        self.folders, self.comm = (place / str(number) for number in count()), comm

    def run(self, rounds: int) -> float:
        """Train from the beginning; return the last round's mean loss."""
        settings = {**CONFIG, "rounds": rounds, "evaluate": {"every": rounds, "last": 1}}
        run = hpcfl.run(settings, out=next(self.folders), quiet=True, comm=self.comm)
        return float(run.data["loss"].values[-1])


def per_round(run: Callable[[int], float], rounds: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Return a further round's seconds, and the last loss."""
    start = clock()
    run(1)
    first = clock()
    loss = run(1 + rounds)
    return (clock() - first - (first - start)) / rounds, loss


def alone(pairs: int, rounds: int) -> dict[str, Any]:
    """Return the processor's seconds per round of both, in this process."""
    found, losses = [], (0.0, 0.0)
    with tempfile.TemporaryDirectory() as place:
        sides = Runs(Path(place)).run, Loop(range(CLIENTS)).run
        for side in sides:
            side(1)  # warm up
        for _ in range(pairs):
            seconds, losses = zip(*(per_round(side, rounds, time.process_time) for side in sides))
            found.append(seconds)
    return {**figures(found), "losses": losses}


def figures(found: list[tuple[float, ...]]) -> dict[str, Any]:
    """Return medians: of hpcfl's and the loop's seconds, and of their ratios."""
    ours, plain = (round(median(each), 4) for each in zip(*found))
    return {"hpcfl_s": ours, "plain_s": plain, "ratio": round(median(one / other for one, other in found), 3)}


def on_a_rank(pairs: int, rounds: int) -> None:
    """Take part in the job; the server prints."""
    comm = MPI.COMM_WORLD
    place = Path(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None))
    both = Runs(place / "all", comm).run, Loop(range(comm.rank, CLIENTS, comm.size), adder(comm)).run
    single = Runs(place / "one", MPI.COMM_SELF).run, Loop(range(CLIENTS)).run
    found: list[list[float]] = []
    for pair in range(pairs + 1):  # the first one warms up
        row: list[float] = []
        for side in single:
            row.append(per_round(side, rounds, time.perf_counter)[0] if comm.rank == 0 and pair else 0.0)
            meet(comm)
        for side in both:
            row.append(per_round(side, rounds if pair else 1, time.perf_counter)[0])
            meet(comm)
        found += [row] if pair else []
    if comm.rank == 0:
        gains = [(one[0] / one[2], one[1] / one[3]) for one in found]
        ours, plain = (round(median(each), 3) for each in zip(*gains))
        share = round(median(one / other for one, other in gains), 3)
        seconds = figures([(row[2], row[3]) for row in found])
        print(json.dumps({**seconds, "hpcfl_gain": ours, "plain_gain": plain, "gain_ratio": share}))


def adder(comm: Any) -> Callable[[Tensor], None]:
    """Return what sums a tensor over ranks in place, polling."""
    return lambda value: wait([comm.Iallreduce(MPI.IN_PLACE, value.numpy(), MPI.SUM)])


def meet(comm: Any) -> None:
    """Wait for all others, nearly always asleep."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(ASLEEP_SECONDS)


def main() -> None:
    """Measure, print a line of each part, and all of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mpi", choices=tuple(launching.LIBRARIES), default="openmpi")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    look_in(Path(__file__).parent)
    keep_freed()  # as every run of hpcfl does; it serves the loop as well
    if launching.inside():
        on_a_rank(asked.pairs, asked.rounds)
        return
    found: dict[str, Any] = {"load": launching.load(), "alone": alone(asked.pairs, asked.rounds)}
    print(found["alone"], flush=True)
    found["ranks"] = launching.run(asked.mpi, asked.ranks, [__file__, *sys.argv[1:]], 600)
    print(found["ranks"], flush=True)
    print(json.dumps({"mpi": asked.mpi, "pairs": asked.pairs, "rounds": asked.rounds, **found}))


if __name__ == "__main__":
    main()
