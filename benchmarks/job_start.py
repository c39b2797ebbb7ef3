"""What the start of a job costs where one rank of a host reads the data, beside ranks that all read them.

    python benchmarks/job_start.py [--mpi openmpi|mpich] [--ranks 5] [--pairs 3] [--data-dir DIR] [--set KEY=VALUE ...]

FedAvg in real time on MNIST, of the folder ``mnist/`` in ``--data-dir`` (default: ``HPCFL_DATA``), a client on each
client rank. The two kinds take turns: ``shared`` as every run does it; for ``each`` the ranks are told that they are on
hosts of their own when it comes to reading. Per rank, the server first: bytes that it has read with system calls while
the data were read and the job was put together (``rchar``); its proportional share of memory (``Pss``) and what is
resident (``Rss``) when the job is put together on all ranks, in MB. ``seconds``: from the start of the launcher until
the server begins the first round. Medians over the pairs, by rank; the ratios are those of sums over ranks. Prints a
line per job and one JSON line last. 5 ranks take 2 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import launching

CONFIG = """
rounds = 1
clients = {clients}
clock = "wall"

[algorithm]
name = "fedavg"
batch = 8
epochs = 0
steps = 1

[data]
name = "mnist"

[model]
name = "mlp"
hidden = [32]
"""
KINDS = ("shared", "each")
FIGURES = ("read", "pss", "rss")
LIMIT_SECONDS = 300.0


def main() -> None:
    """Start the jobs, or be one of their ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mpi", choices=tuple(launching.LIBRARIES), default="openmpi")
    parser.add_argument("--ranks", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--data-dir", default=os.environ.get("HPCFL_DATA"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if launching.inside():
        on_a_rank(asked.kind, asked.began, asked.data_dir, asked.set)
        return
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for _ in range(asked.pairs):
        for kind in KINDS:
            found[kind].append(started(kind, asked))
            print(f"{kind:8}{found[kind][-1]}", flush=True)
    kinds = {kind: middle(jobs) for kind, jobs in found.items()}
    ratios = {name: round(sum(kinds["shared"][name]) / sum(kinds["each"][name]), 3) for name in FIGURES}
    ratios["seconds"] = round(kinds["shared"]["seconds"] / kinds["each"]["seconds"], 3)
    facts = {"mpi": asked.mpi, "ranks": asked.ranks, "pairs": asked.pairs, "load": launching.load()}
    print(json.dumps({**facts, **kinds, "shared_by_each": ratios}))


def started(kind: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Run one job."""
    args = [__file__, "--kind", kind, "--began", str(time.time()), "--data-dir", asked.data_dir]
    settings = [word for setting in asked.set for word in ("--set", setting)]
    found: dict[str, Any] = launching.run(asked.mpi, asked.ranks, [*args, *settings], LIMIT_SECONDS)
    return found


def middle(jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of what several jobs have found, by rank."""
    by_rank = {name: [median(values) for values in zip(*(job[name] for job in jobs))] for name in FIGURES}
    return {**by_rank, "seconds": median(job["seconds"] for job in jobs)}


def on_a_rank(kind: str, began: float, data_dir: str, settings: Sequence[str]) -> None:
    """Run the job; the server prints what all ranks have found when its first round begins."""
    from mpi4py import MPI

    import hpcfl
    from hpcfl.launch import host
    from hpcfl.realtime import start

    comm = MPI.COMM_WORLD
    read_once, lead, serve = host.read_once, start.lead, start.serve
    own: dict[str, float] = {}

    @contextmanager
    def counted(config: Any, place: Any, ranks: Any, hosts: Sequence[str], first: Any) -> Iterator[Any]:
        before = number("io", "rchar")
        apart = [str(rank) for rank in range(len(hosts))]
        with read_once(config, place, ranks, hosts if kind == "shared" else apart, first) as federation:
            yield federation
        own["read"] = (number("io", "rchar") - before) / 1e6

    def together(*args: Any) -> list[dict[str, float]]:
        for name in ("pss", "rss"):
            own[name] = number("smaps_rollup", name.capitalize()) * 1024 / 1e6
        return comm.allgather({name: round(value, 2) for name, value in own.items()})

    def led(*args: Any) -> Any:
        ranks, server = together(), lead(*args)
        seconds = time.time() - began
        found = {name: [rank[name] for rank in ranks] for name in FIGURES}
        said.append(json.dumps({**found, "seconds": round(seconds, 2)}))
        return server

    def served(*args: Any) -> Any:
        together()
        return serve(*args)

    said: list[str] = []
    replaced: list[tuple[Any, str, Any]] = [(host, "read_once", counted)]
    replaced += [(start, "lead", led), (start, "serve", served)]
    for module, name, function in replaced:
        setattr(module, name, function)
    with tempfile.TemporaryDirectory() as folder:
        values = {key: json.loads(value) for key, _, value in (setting.partition("=") for setting in settings)}
        table = Path(folder, "start.toml")
        if comm.Get_rank() == 0:
            table.write_text(CONFIG.format(clients=comm.Get_size() - 1))
        hpcfl.run(str(table), out=Path(folder, "run"), settings=values, data_dir=data_dir, quiet=True)
    if comm.Get_rank() == 0:
        print(said[0], flush=True)


def number(file: str, name: str) -> int:
    """Return a number that a file of this process in ``/proc`` gives by name."""
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
