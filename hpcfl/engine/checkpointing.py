"""Checkpoints while the rounds go on: state is copied, a thread of each rank writes what the rank holds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from hpcfl import store
from hpcfl.base.errors import RunError, listed
from hpcfl.base.lazy import torch
from hpcfl.base.terminal import say
from hpcfl.base.types import State
from hpcfl.engine.job import Job, Progress
from hpcfl.engine.record import SAVING, Recorder
from hpcfl.engine.rounds import Rounds
from hpcfl.mpi.transport import Saved, arrays, as_chunk
from hpcfl.mpi.waiting import texts
from hpcfl.schedule.doubling import Stage
from hpcfl.schedule.planner import Flights
from hpcfl.store.atomic import PREFIX
from hpcfl.store.inside import one_line
from hpcfl.sums.guard import Norms, Watch

FAILURE_SECONDS = 30.0  # how long a rank that fails waits for the checkpoint under way: it ends all ranks then


Cost = tuple[float, int]
"""Of a checkpoint: seconds from the first byte until it was visible, and bytes in all its files."""


class Saver:
    """Writes the checkpoints of a run, one at a time: the next one, and the end, wait for the one before.

    Each rank has one; nothing is said over MPI here. An error of the thread is raised on its rank by whatever is called
    next.

    Parameters
    ----------
    rank : int
        This rank.
    token : str
        The same on all ranks of this start, see `store.draft`.
    first : int
        How many rounds were done when it began.
    recorder : Recorder, optional
        The server's.

    Attributes
    ----------
    saved : int
        How many were done at the last checkpoint.
    """

    def __init__(
        self, job: Job, rounds: Rounds, folder: Path, rank: int, token: str, first: int, recorder: Recorder | None
    ) -> None:
        self.job, self.rounds, self.folder, self.rank, self.token = job, rounds, folder, rank, token
        self.saved, self.recorder = first, recorder
        self.under_way: Future[Cost | None] | None = None
        self.path: Path | None = None
        self.waited, self.seconds, self.bytes = 0.0, 0.0, 0
        rounds.settle = self.finish

    def save(self, now: Progress, scores: Mapping[str, Any]) -> None:
        """Begin to write the state as it is now; `scores` are those of its evaluation, if there was one."""
        self.finish()
        start, self.saved = time.perf_counter(), now.round
        with self.rounds.phases.phase("store"):
            if self.recorder is not None:
                store.check_owner(self.folder)
                with _named(self.folder):
                    store.draft(self.folder, now.round, self.token)  # ranks may write to it from now on
            parts = self.rounds.personal(now) if self.job.personal_bytes else ()
            personal = [(clients.copy(), _copied(state)) for clients, state in parts]
            homes = self.rounds.homes if self.job.personal_bytes else np.zeros(0, dtype=np.int64)
            writers = set(homes.tolist())
            self.path = self.folder / "checkpoints" / f"round-{now.round:06d}"
            server = None
            if self.recorder is not None:
                state = store.Checkpoint(
                    now.round,
                    _copied(now.shared),
                    clock=now.clock | now.stage.numbers(),
                    memory=_copied(now.norms.saved() | now.flights.saved() | now.watch.saved()),
                    stale=dict(self.rounds.stale),
                    extras=_copied(now.extras),
                    served={version: _copied(state) for version, state in now.served.items()},
                )
                server = {"state": state, "homes": homes, "score": self.job.config.checkpoint.score(scores)}
                now.saved = self.path
                self.recorder.stale(now.round, self.rounds.stale)
            if self.recorder is not None or self.rank in writers:
                self.under_way = begun(partial(self._write, now.round, personal, writers, server))
        self.waited += time.perf_counter() - start

    def _write(
        self, round: int, personal: list[Saved], writers: Collection[int], server: Mapping[str, Any] | None
    ) -> Cost | None:
        """Write this rank's part; the server waits for the others' and makes all of it visible."""
        start = time.perf_counter()
        with _named(self.folder):
            draft = store.draft(self.folder, round, self.token)
            if server is not None:
                store.write_server(draft, **server)
            if self.rank in writers:
                store.write_rank(draft, self.rank, personal)
            if server is None or self.recorder is None:
                return None
            self.recorder.segment.sync()  # no checkpoint without the rows of its rounds, whatever the power does
            _, size = store.publish(draft, sorted(writers), self.job.config.checkpoint.kept)
            return time.perf_counter() - start, size

    def look(self) -> dict[str, float]:
        """Return the columns of a row: what checkpoints have cost since the row before."""
        if self.under_way is not None and self.under_way.done():
            self.finish()
        cost = dict(zip(SAVING, (self.waited, self.seconds, self.bytes)))
        self.waited, self.seconds, self.bytes = 0.0, 0.0, 0
        return cost

    def finish(self) -> None:
        """Wait for the checkpoint under way, if there is one: on the server, until it is visible."""
        if self.under_way is None:
            return
        start, under_way, self.under_way = time.perf_counter(), self.under_way, None
        with self.rounds.phases.phase("store"):
            written = under_way.result()
        self.waited += time.perf_counter() - start
        if written is not None:  # one that was waited for, and the next, may both end before a row
            self.seconds, self.bytes = self.seconds + written[0], self.bytes + written[1]

    def abandon(self) -> None:
        """Give the checkpoint under way some time, for this rank has failed and is about to end all others."""
        if self.under_way is None or self.path is None:
            return
        last = time.monotonic() + FAILURE_SECONDS
        while not self.path.exists() and time.monotonic() < last:
            if self.under_way.done() and (self.recorder is not None or self.under_way.exception() is not None):
                return
            time.sleep(0.01)


def write_part(folder: Path, token: str, rank: int, round: int, states: Mapping[int, Mapping[str, Any]]) -> None:
    """Write a rank's personal state, ``{client: {name: […]}}``, to the checkpoint that the server has begun.

    Nothing is written where that is not there any more: the server has gone on without this rank.
    """
    draft = store.drafted(folder, round, token)
    with _named(folder):
        try:
            store.write_rank(draft, rank, (as_chunk(client, arrays(state)) for client, state in states.items()))
        except FileNotFoundError:
            if draft.exists():
                raise


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Name the file, or this folder, where the disk refuses anything."""
    try:
        yield
    except OSError as error:
        if not error.errno:
            raise
        raise store.WriteError(error.errno, os.strerror(error.errno), str(error.filename or folder)) from error


def begun(work: Callable[[], Cost | None]) -> Future[Cost | None]:
    """Do some work in a thread that does not keep the process from ending."""
    future: Future[Cost | None] = Future()

    def carry_out() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=carry_out, name="checkpoint", daemon=True).start()
    return future


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors, arrays, numbers and strings as arrays, numbers and strings that nothing else changes."""
    here = {name: value.cpu().numpy() if hasattr(value, "cpu") else value for name, value in state.items()}
    return {name: value if isinstance(value, str) else np.array(value) for name, value in here.items()}


def restored(likes: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint holds as tensors, numbers and strings like those given."""
    # copied into torch's own memory: the last bits of products may depend on how memory is aligned
    return {
        name: torch.from_numpy(np.asarray(saved[name])).to(like, copy=True)
        if isinstance(like, torch.Tensor)
        else type(like)(saved[name])
        for name, like in likes.items()
    }


def mark_of(folder: Path, token: str) -> Path:
    """Return a file that rank 0 makes for the others to see; the first segment sweeps it away."""
    return folder / "checkpoints" / f"{PREFIX}{token}-seen"


def see_one_folder(folder: Path, token: str, comm: Any) -> bool:
    """Return whether all ranks see the run folder that rank 0 has opened; where one does not, that is said once."""
    if comm is None:
        return True
    seen = texts(comm, str(mark_of(folder, token).exists()))
    blind = [f"rank {rank}" for rank, word in enumerate(seen) if word != str(True)]
    if blind and comm.Get_rank() == 0:
        say(f"{listed(blind)} cannot see '{folder}': personal state is sent to rank 0 for checkpoints")
    return not blind


def begin(job: Job, rank: int, checkpoint: Path | None) -> Progress:
    """Return where a rank begins: before round 0, or after the checkpoint; each rank reads the clients it hosts."""
    now = job.begin(rank)
    if checkpoint is None:
        return now
    try:
        now.saved = checkpoint
        saved = store.load(checkpoint, personal=False)
        now.round, now.stage = saved.round, Stage.of(saved.clock)
        now.clock = {name: saved.clock[name] for name in now.clock}
        now.norms, now.watch = Norms.restored(saved.memory), Watch.restored(saved.memory)
        now.flights = Flights.restored(saved.memory, job.config.clients)
        store.check_shared(saved.shared, now.shared)
        hosted = [chunk.clients.tolist() for chunk in job.hosted(rank)]
        store.check_personal(checkpoint, chain(*hosted), job.like, job.task.federation.shapes)
        now.served = {version: restored(now.shared, state) for version, state in saved.served.items()}
        now.shared, now.extras = restored(now.shared, saved.shared), restored(now.extras, saved.extras)
        for state, clients in zip(now.personal.values(), hosted):
            held = store.load_personal(checkpoint, clients) if state else {}
            for name in state:
                for row, client in enumerate(clients):
                    state[name][row] = torch.from_numpy(held[client][name])
        if saved.stale and rank == 0:

            def everyone() -> Iterator[tuple[int, State]]:
                for chunk in job.chunks:
                    held = store.load_personal(checkpoint, chunk.clients.tolist())
                    yield from ((client, restored(job.like(client), state)) for client, state in held.items())

            now.extras = job.algorithm.recalled(job.task, now.extras, everyone)
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        what = f"{type(error).__name__}: {one_line(error)}"
        raise RunError(f"checkpoint {checkpoint} does not fit the run: {what}") from error
    return now
