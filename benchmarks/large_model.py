"""A model of one tensor above 2^31 bytes through broadcast, sums and a checkpoint, in real time.

    python benchmarks/large_model.py [--mpi openmpi|mpich] [--gib 2.1] [--ranks 3] [--width 1|all] [--out FOLDER]

Open MPI refuses messages of 2^31 bytes and more; hpcfl sends them in pieces. Two rounds in which each client sends back
the state that it has heard, from where it lies, so that a client rank holds the model once. The server adds their mean
to its state, which doubles: every entry of it is checked, and so is every entry of the checkpoint, which is written and
read again. The server holds the state before and after, a message per lane, and what is read.

Printed per rank: the most that was resident, in GiB, and what it was before the model came. Seconds of each round with
the server's step, of writing the checkpoint and of reading it. 18 GiB in all with 2.1 GiB; `--gib 0.1` to try it.
Prints a table and one JSON line last.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import launching
import numpy as np

if launching.inside():
    import torch
    import wall_rounds
    from memory import peak, settled
    from mpi4py import MPI

    from hpcfl import store
    from hpcfl.mpi.waiting import rows

    if TYPE_CHECKING:
        from torch import Tensor

        from hpcfl.algorithms.base import Client
        from hpcfl.base.types import State
        from hpcfl.engine.job import Job
        from hpcfl.learning.batches import Visits
        from hpcfl.learning.task import Task

    class Echo(wall_rounds.Layers):
        """One layer, which clients send back as they have heard it."""

        def init_server(self, task: Task) -> State:
            """Return zeros that take no memory before somebody writes them: client ranks look at their size only."""
            return {NAME: torch.from_numpy(np.zeros(self.entries, dtype=np.float32))}

        def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
            yield {NAME: (shared[NAME][None], visits.ones(1))}
            return {}


NAME = "layer 1"
ROUNDS = 2
PERIOD = 1009  # entries after which the values repeat: no multiple of it is a power of two
PIECE = PERIOD * 2**14
GIB = 2**30
LIMIT = 900.0


def main() -> None:
    """Start the job, or be one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mpi", choices=tuple(launching.LIBRARIES), default="openmpi")
    parser.add_argument("--gib", type=float, default=2.1, help="size of the model")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--width", choices=("1", "all"), default="1")
    parser.add_argument("--out", type=Path, help="where the checkpoint is written, and removed; a temporary folder")
    asked = parser.parse_args()
    if launching.inside():
        on_a_rank(asked)
        return
    print(f"{asked.mpi}, {asked.ranks} ranks, {asked.gib:g} GiB, load {launching.load():.1f}", flush=True)
    found = launching.run(asked.mpi, asked.ranks, [__file__, *sys.argv[1:]], LIMIT)
    for name, value in found.items():
        print(f"  {name} {value}")
    print(json.dumps({"mpi": asked.mpi, "ranks": asked.ranks, "width": asked.width, "load": launching.load(), **found}))


def on_a_rank(asked: argparse.Namespace) -> None:
    """Measure; the server prints."""
    comm = MPI.COMM_WORLD
    entries = round(asked.gib * GIB / 4)
    width: int | str = 1 if asked.width == "1" else asked.width
    job = wall_rounds.job_of(Echo(count=1, entries=entries), comm.Get_size(), width, {"close": "all"})
    before, found = settled(), dict[str, Any]()
    if comm.Get_rank():
        wall_rounds.serve(job, comm)
    else:
        state, seconds = after_rounds(job, comm, entries)
        gc.collect()  # what lanes held
        check(state, 2**ROUNDS, "the state")
        found = {"bytes": state.nbytes, "rounds_s": seconds, **saved(state, asked.out)}
    gib = rows(comm, np.array([before, peak()]) / GIB).round(2)
    if comm.Get_rank() == 0:
        print(json.dumps({**found, "before_gib": gib[:, 0].tolist(), "peak_gib": gib[:, 1].tolist()}), flush=True)


def after_rounds(job: Job, comm: MPI.Intracomm, entries: int) -> tuple[Tensor, list[float]]:
    """Return the server's state after the rounds, and the seconds of each."""
    server, state, seconds = wall_rounds.server(job, comm), filled(entries), []
    for number in range(ROUNDS):
        start = time.perf_counter()
        _, sums = server.run_round(number, {NAME: state})
        state = sums.moved(NAME, state)
        seconds.append(round(time.perf_counter() - start, 2))
        del sums
    server.leave(ROUNDS, 0, without_dead=True)
    return state, seconds


def saved(state: Tensor, out: Path | None) -> dict[str, float]:
    """Write a checkpoint and read it again; return the seconds of both."""
    with tempfile.TemporaryDirectory(dir=out) as folder:
        start = time.perf_counter()
        draft = store.draft(Path(folder), ROUNDS, "large")
        store.write_server(draft, store.Checkpoint(ROUNDS, {NAME: state.numpy()}))
        path, _ = store.publish(draft)
        written = time.perf_counter()
        shared = store.load(path).shared
        read = time.perf_counter()
        check(torch.from_numpy(shared[NAME]), 2**ROUNDS, "the checkpoint")
    return {"write_s": round(written - start, 2), "read_s": round(read - written, 2)}


def pieces(entries: int) -> Iterator[tuple[slice, Tensor]]:
    """Give parts of the model, and what they hold at first."""
    pattern = torch.arange(PERIOD, dtype=torch.float32).repeat(PIECE // PERIOD)
    for start in range(0, entries, PIECE):
        yield slice(start, min(start + PIECE, entries)), pattern[: min(PIECE, entries - start)]


def filled(entries: int) -> Tensor:
    """Return the first state."""
    state = torch.empty(entries)
    for piece, values in pieces(entries):
        state[piece] = values
    return state


def check(state: Tensor, factor: int, what: str) -> None:
    """Raise RuntimeError unless a state is the first one times a factor, to the bit."""
    for piece, values in pieces(len(state)):
        if not torch.equal(state[piece], values * factor):
            raise RuntimeError(f"expected {what} to be {factor} times what it was at first: entries {piece} are not")


if __name__ == "__main__":
    main()
