"""Clients per second against a plain PyTorch loop, in the same process and with the same threads.

    OMP_NUM_THREADS=1 python benchmarks/clients_per_second.py [--rounds 9] [--batch-clients auto]

FedAvg, 100 clients x 100 samples, MLP 784-200-10, batch 10, one local epoch. The reference does the same work: per
client a copy of the model, SGD over its batches, a weighted mean at the end. Both include the mean; neither writes
to disk.
The two alternate round by round; the ratio is that of the medians (below 1: hpcfl is faster). About 10 s on one core.
Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfl.base.memory import keep_freed
from hpcfl.comm.placement import chunk_size, cut
from hpcfl.comm.transport import Alone
from hpcfl.config import Config, from_table
from hpcfl.data import ClientData, Federation
from hpcfl.engine.job import Job
from hpcfl.engine.record import Record
from hpcfl.engine.simulated import Simulated
from hpcfl.learning.task import Task

CLIENTS, SAMPLES, BATCH, LR = 100, 100, 10, 0.1


class Random(Federation):
    """Clients with random samples of MNIST's shape."""

    def client(self, i: int) -> ClientData:
        """Return client i's samples; its test part is empty."""
        rng = np.random.default_rng(i)
        x, y = rng.random((SAMPLES, 784), dtype=np.float32), rng.integers(10, size=SAMPLES)
        return ClientData(x, y, x[:0], y[:0])

    def server_test(self) -> None:
        """Return nothing: the benchmark does not evaluate."""


def config(batch_clients: str | int | bool) -> Config:
    """Return the config of the benchmark, without evaluation."""
    return from_table(
        {
            "rounds": 1,
            "clients": CLIENTS,
            "batch_clients": batch_clients,
            "algorithm": {"name": "fedavg", "lr": LR, "batch": BATCH},
            "data": {"name": "digits"},
            "model": {"name": "mlp", "hidden": [200]},
        }
    )


def ours(federation: Federation, settings: Config) -> Callable[[], None]:
    """Return a function that runs one round of hpcfl."""
    task = Task(settings.model, federation, settings.seed)
    size = chunk_size(settings.batch_clients, CLIENTS, sum(v.nbytes for v in task.initial().values()))
    chunks = cut(size, np.ones(CLIENTS), 1)
    job = Job(settings, task, settings.algorithm, chunks)
    now, rounds = job.begin(0), Simulated(job, Alone(), 0)

    def one_round() -> None:
        _, sums = rounds.exchange(now, Record.open())
        now.shared = job.algorithm.server(task, now.shared, sums)

    return one_round


def plain(federation: Federation) -> Callable[[], None]:
    """Return a function that runs one round of an ordinary PyTorch loop."""
    model = nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))
    data = [federation.client(i) for i in range(CLIENTS)]
    held = [(torch.from_numpy(d.train_features), torch.from_numpy(d.train_labels)) for d in data]
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def one_round() -> None:
        mean: dict[str, Tensor] = {name: torch.zeros_like(value) for name, value in state.items()}
        for x, y in held:
            model.load_state_dict(state)
            optimiser = torch.optim.SGD(model.parameters(), lr=LR)
            for rows in torch.randperm(SAMPLES).view(-1, BATCH):
                optimiser.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            for name, value in model.state_dict().items():
                mean[name] += value * (len(y) / (CLIENTS * SAMPLES))
        state.update(mean)

    return one_round


def timed(function: Callable[[], None]) -> float:
    """Return the seconds one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    """Alternate the two and print the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch-clients", default="auto", help="auto or a number")
    asked = parser.parse_args()
    size = asked.batch_clients
    torch.set_num_threads(1)
    keep_freed()  # as every run of hpcfl does; it serves the reference as well
    sizes = np.full(CLIENTS, SAMPLES)
    federation = Random(10, sizes, np.zeros(CLIENTS, dtype=np.int64), [(784,)] * CLIENTS)
    mine, reference = (
        ours(federation, config("auto" if size == "auto" else int(size))),
        plain(federation),
    )
    mine(), reference()  # warm up
    times = [(timed(mine), timed(reference)) for _ in range(asked.rounds)]
    ours_s, plain_s = (statistics.median(column) for column in zip(*times))
    print(f"hpcfl {CLIENTS / ours_s:.0f} clients/s, plain loop {CLIENTS / plain_s:.0f} clients/s")
    print(
        json.dumps(
            {
                "hpcfl_s": ours_s,
                "plain_s": plain_s,
                "ratio": ours_s / plain_s,
                "batch_clients": asked.batch_clients,
                "rounds": asked.rounds,
                "threads": torch.get_num_threads(),
            }
        )
    )


if __name__ == "__main__":
    main()
