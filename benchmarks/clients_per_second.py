"""Rounds of FedAvg by hpcfl, by a plain PyTorch loop and by a hand-batched one: the same work, and the same models.

    python benchmarks/clients_per_second.py [--work images many] [--repeats 5] [--mpi openmpi|mpich]

- ``images``: 100 clients x 100 samples of 784 numbers, MLP 784-200-10, batch 10, one epoch, lr 0.1, 10 rounds.
- ``many``: 10,000 clients x 20 samples of 64 numbers, MLP 64-32-10, otherwise the same.

Normal features, labels by a linear teacher. What computes:

- ``hpcfl``: `hpcfl.run`, with its run folder; a round lasts from one server's step to the next;
- ``one by one``: the same with ``batch_clients = false``;
- ``real time``: the same with ``clock = "wall"``, rounds that wait for all;
- ``plain``: per client a copy of the model, SGD over its batches, a weighted mean;
- ``batched``: gradients by hand, updates within ``baddbmm``, so many clients at once as are fastest of some numbers.

All begin with the same model and take the samples in the same order, so that they end with the same loss. Each runs in
processes of its own, on 1 thread, on 2, and on 3 ranks of one thread (a server that polls and two halves of the
clients); they take turns. Median seconds per round over all repeats. 5 minutes on 2 cores. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import launching
import numpy as np

import hpcfl
from hpcfl import FedAvg, Source
from hpcfl.base.memory import keep_freed
from hpcfl.base.rng import key_as_seed, keyed
from hpcfl.data import ClientData, Federation, Header

if TYPE_CHECKING:
    from torch import Tensor

    from hpcfl.base.types import State
    from hpcfl.learning.task import Task
    from hpcfl.sums.message import Sums

BATCH, LR, ROUNDS, SEED, CLASSES = 10, 0.1, 10, 0, 10
NEVER = 10**6


@dataclass(frozen=True)
class Work:
    """What is computed, and how many clients the hand-batched one may take at once."""

    clients: int
    samples: int
    features: int
    hidden: int
    together: tuple[int, ...]


WORKS = {"images": Work(100, 100, 784, 200, (5, 13, 25, 50)), "many": Work(10_000, 20, 64, 32, (100, 500, 1000))}
PLACES = {"1 thread": (1, 1), "2 threads": (1, 2), "3 ranks": (3, 1)}
WAYS: dict[str, dict[str, tuple[str, ...]]] = {
    "images": {
        "1 thread": ("hpcfl", "batched", "one by one", "plain"),
        "2 threads": ("hpcfl", "batched", "plain"),
        "3 ranks": ("hpcfl", "batched", "real time", "plain"),
    },
    "many": {"3 ranks": ("hpcfl", "batched")},
}


def samples(work: Work) -> tuple[np.ndarray, np.ndarray]:
    """Return all clients' features ``[clients, n, d]`` and labels ``[clients, n]``."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((work.clients, work.samples, work.features), dtype=np.float32)
    teacher = rng.standard_normal((work.features, CLASSES), dtype=np.float32)
    return x, (x @ teacher).argmax(2)


# hpcfl


@dataclass(frozen=True, eq=False)
class Held(Federation):
    """Clients with parts of one array; nothing is held back for tests."""

    x: np.ndarray
    y: np.ndarray

    def client(self, i: int) -> ClientData:
        """Return client i's samples."""
        return ClientData(self.x[i], self.y[i], self.x[i, :0], self.y[i, :0])

    def server_test(self) -> None:
        """Return nothing: the benchmark does not evaluate."""


def federation(work: Work) -> Held:
    """Return a work's clients."""
    sizes = np.full(work.clients, work.samples), np.zeros(work.clients, dtype=np.int64)
    return Held(CLASSES, *sizes, [(work.features,)] * work.clients, *samples(work))


class Arrays(Source):
    """The samples of a work."""

    work: str = "images"

    def check(self, clients: int, data_dir: Path | None) -> Header:
        """Return what there is."""
        work = WORKS[self.work]
        return Header(clients, clients * work.samples, 0, ((work.features,),), CLASSES)

    def federate(self, clients: int, seed: int, data_dir: Path | None) -> Held:
        """Return the clients."""
        return federation(WORKS[self.work])


class Timed(FedAvg):
    """FedAvg that notes when its server's steps begin."""

    def server(self, task: Task, shared: State, sums: Sums) -> State:
        """Take the step."""
        STEPS.append(time.perf_counter())
        return super().server(task, shared, sums)


STEPS: list[float] = []


def by_hpcfl(name: str, way: str, threads: int) -> tuple[list[float], float]:
    """Return the seconds of each round, and the last training loss."""
    import clients_per_second

    work, here = WORKS[name], "clients_per_second:"
    config = {
        "rounds": ROUNDS,
        "clients": work.clients,
        "seed": SEED,
        "threads": threads,
        "batch_clients": False if way == "one by one" else "auto",
        "clock": "wall" if way == "real time" else "simulated",
        "algorithm": {"name": f"{here}Timed", "lr": LR, "batch": BATCH},
        "data": {"name": f"{here}Arrays", "work": name},
        "model": {"name": "mlp", "hidden": [work.hidden]},
        "evaluate": {"every": NEVER, "last": 1},
        "checkpoint": {"every": NEVER},
    }
    with tempfile.TemporaryDirectory() as folder:
        run = hpcfl.run(config, out=Path(folder) / "run", quiet=True)
        loss = float(run.data["loss"].values[-1]) if not rank() else 0.0
    return np.diff(clients_per_second.STEPS).tolist(), loss


# by hand

Local = Callable[[list["Tensor"], list[int], int, list["Tensor"]], None]
"""Adds up the models of some clients that begin with the state of a round, and their losses."""


def by_hand(work: Work, way: str, threads: int) -> tuple[list[float], float]:
    """Return the seconds of each round, and the last training loss."""
    import torch
    from torch import nn

    torch.set_num_threads(threads)
    keep_freed()  # as every run of hpcfl does
    torch.manual_seed(key_as_seed(SEED, "initial values"))
    model = nn.Sequential(nn.Linear(work.features, work.hidden), nn.ReLU(), nn.Linear(work.hidden, CLASSES))
    state = [value.detach().clone() for value in model.parameters()]
    x, y = (torch.from_numpy(part) for part in samples(work))
    own = range(work.clients) if size() == 1 else np.array_split(np.arange(work.clients), size() - 1)[rank() - 1]
    local = plain(work, model, x, y) if way == "plain" else fastest(work, x, y, state, list(own))
    times, loss = [time.perf_counter()], 0.0
    for round_ in range(ROUNDS):
        share(state)
        sums = [torch.zeros_like(value) for value in state] + [torch.zeros(1)]
        if rank() or size() == 1:
            local(state, list(own), round_, sums)
        total(sums)
        *state, mean = (value / work.clients for value in sums)
        loss = float(mean)
        times.append(time.perf_counter())
    return np.diff(times)[1:].tolist(), loss


def order(client: int, round_: int, work: Work) -> np.ndarray:
    """Return the order of a client's samples, as hpcfl draws it."""
    return keyed(SEED, "batches", round_, client, 0).permutation(work.samples)


def plain(work: Work, model: Any, x: Tensor, y: Tensor) -> Local:
    """Return what adds up the models of some clients, trained one after the other."""
    import torch
    import torch.nn.functional as F

    def local(state: list[Tensor], clients: list[int], round_: int, sums: list[Tensor]) -> None:
        for client in clients:
            with torch.no_grad():
                for value, start in zip(model.parameters(), state):
                    value.copy_(start)
            optimiser = torch.optim.SGD(model.parameters(), lr=LR)
            losses = torch.zeros(())
            batches = torch.split(torch.from_numpy(order(client, round_, work)), BATCH)
            for rows in batches:
                optimiser.zero_grad()
                loss = F.cross_entropy(model(x[client][rows]), y[client][rows])
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                losses += loss.detach()
            for whole, value in zip(sums, (*model.parameters(), losses / len(batches))):
                whole += value.detach()

    return local


def fastest(work: Work, x: Tensor, y: Tensor, state: list[Tensor], own: list[int]) -> Local:
    """Return `batched` with so many clients at a time as take least, of three rounds each that are forgotten."""
    import torch

    ways, seconds = [batched(work, x, y, together) for together in work.together], []
    for local in ways if rank() or size() == 1 else ():
        times = [time.perf_counter()]
        for _ in range(3):
            local(state, own, 0, [torch.zeros_like(value) for value in state] + [torch.zeros(1)])
            times.append(time.perf_counter())
        seconds.append(np.diff(times)[1:].min())
    return ways[int(np.argmin(seconds))] if seconds else ways[0]


def batched(work: Work, x: Tensor, y: Tensor, together: int) -> Local:
    """Return what adds up the models of some clients, trained `together` at a time."""
    import torch

    def local(state: list[Tensor], clients: list[int], round_: int, sums: list[Tensor]) -> None:
        for start in range(0, len(clients), together):
            part = torch.tensor(clients[start : start + together])
            orders = torch.from_numpy(np.stack([order(client, round_, work) for client in part.tolist()]))
            rows = orders + work.samples * part[:, None]
            for whole, values in zip(sums, several(state, rows, x.flatten(0, 1), y.flatten())):
                whole += values.sum(0)

    return local


def several(state: list[Tensor], rows: Tensor, x: Tensor, y: Tensor) -> Iterator[Tensor]:
    """Yield the parameters of some clients that begin with `state`, and each one's mean loss."""
    import torch

    c = len(rows)
    w1, b1, w2, b2 = (value.expand(c, *value.shape).clone() for value in state)
    losses, minus = torch.zeros(c), torch.full((c, BATCH, 1), -1.0)
    for step in range(0, rows.shape[1], BATCH):
        picked = rows[:, step : step + BATCH].flatten()
        inputs, labels = x[picked].view(c, BATCH, -1), y[picked].view(c, BATCH, 1)
        hidden = torch.baddbmm(b1.unsqueeze(1), inputs, w1.transpose(1, 2)).relu_()
        logs = torch.baddbmm(b2.unsqueeze(1), hidden, w2.transpose(1, 2)).log_softmax(2)
        losses -= logs.gather(2, labels).mean((1, 2))
        d2 = logs.exp_().scatter_add_(2, labels, minus).div_(BATCH)
        d1 = torch.bmm(d2, w2).mul_(hidden > 0)
        w2.baddbmm_(d2.transpose(1, 2), hidden, alpha=-LR)
        b2.sub_(d2.sum(1), alpha=LR)
        w1.baddbmm_(d1.transpose(1, 2), inputs, alpha=-LR)
        b1.sub_(d1.sum(1), alpha=LR)
    yield from (w1, b1, w2, b2, losses / (rows.shape[1] // BATCH))


def world() -> Any:
    """Return the communicator of the job, None where there is none."""
    if not launching.inside():
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD


def rank() -> int:
    """Return this rank's number."""
    return 0 if world() is None else int(world().Get_rank())


def size() -> int:
    """Return the number of ranks."""
    return 1 if world() is None else int(world().Get_size())


def share(state: list[Tensor]) -> None:
    """Send the server's state to all, asleep meanwhile."""
    if world() is not None:
        polled([world().Ibcast(value.numpy(), root=0) for value in state])


def total(sums: list[Tensor]) -> None:
    """Add up the ranks' sums at the server, asleep meanwhile."""
    if world() is not None:
        from mpi4py import MPI

        ends = [(MPI.IN_PLACE, value.numpy()) if rank() == 0 else (value.numpy(), None) for value in sums]
        polled([world().Ireduce(*pair, root=0) for pair in ends])


def polled(requests: list[Any]) -> None:
    """Wait without spinning."""
    from mpi4py import MPI

    while not MPI.Request.Testall(requests):
        time.sleep(5e-5)


# who runs what


def child(name: str, way: str, threads: int) -> None:
    """Do the work one way; the server prints what it took as JSON."""
    ours = way in ("hpcfl", "one by one", "real time")
    seconds, loss = by_hpcfl(name, way, threads) if ours else by_hand(WORKS[name], way, threads)
    peak = np.zeros(size())
    peak[rank()] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if world() is not None:
        from mpi4py import MPI

        world().Allreduce(MPI.IN_PLACE, peak)
    if rank() == 0:
        print(json.dumps({"seconds": seconds, "loss": loss, "rss_mb": [round(each) for each in peak]}), flush=True)


def run(name: str, way: str, place: str, mpi: str) -> dict[str, Any]:
    """Start the processes that do the work one way, and return what they say."""
    ranks, threads = PLACES[place]
    args = [__file__, "--child", name, way, str(threads)]
    if ranks > 1:
        found: dict[str, Any] = launching.run(mpi, ranks, args, 600)
        return found
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, *args], env=environ, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{way}, {place}: {done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measured(name: str, place: str, repeats: int, mpi: str) -> dict[str, Any]:
    """Return what each way takes on one work and place, and how that compares."""
    ways = WAYS[name][place]
    runs = {way: [] for way in ways}  # type: dict[str, list[dict[str, Any]]]
    for _ in range(repeats):
        for way in ways:
            runs[way].append(run(name, way, place, mpi))
    found = {}
    for way, several_ in runs.items():
        seconds = statistics.median(second for each in several_ for second in each["seconds"])
        loss, peak = several_[0]["loss"], [max(ranks) for ranks in zip(*(each["rss_mb"] for each in several_))]
        found[way] = {"seconds": round(seconds, 4), "loss": round(loss, 6), "rss_mb": peak}
        print(f"{name:8}{place:11}{way:12}{1000 * seconds:9.1f} ms  loss {loss:.5f}  {peak} MB", flush=True)
    losses = [each["loss"] for each in found.values()]
    assert max(losses) - min(losses) < 1e-4, losses
    return found


def main() -> None:
    """Print a line per way, and all of it as JSON."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=tuple(WORKS), default=list(WORKS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mpi", choices=tuple(launching.LIBRARIES), default="openmpi")
    asked = parser.parse_args()
    found = {
        name: {place: measured(name, place, asked.repeats, asked.mpi) for place in WAYS[name]} for name in asked.work
    }
    ratios = {}
    for name, places in found.items():
        for place, ways in places.items():
            for way in ways.keys() - {"plain", "batched"}:
                other = "plain" if way == "one by one" else "batched"
                ratios[f"{name}, {place}, {way} / {other}"] = ways[way]["seconds"] / ways[other]["seconds"]
    print(
        json.dumps(
            {
                "load": launching.load(),
                "mpi": asked.mpi,
                "seconds": found,
                "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
