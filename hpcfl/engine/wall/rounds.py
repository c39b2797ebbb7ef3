"""Rounds in real time, as the round loop sees them: the server runs the loop, the client ranks serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hpcfl.base.errors import Interrupted
from hpcfl.base.types import Floats, Ints
from hpcfl.comm.transport import Arrays, Saved
from hpcfl.engine.iterated import iterate
from hpcfl.engine.job import Job, Progress
from hpcfl.engine.loop import Rounds
from hpcfl.engine.record import Record, released
from hpcfl.engine.wall.server import Server
from hpcfl.engine.wall.sums import Held
from hpcfl.schedule.plan import Plan


class RealTime(Rounds):
    """The server's rounds over lanes.

    Where clients are needed no more, their ranks forget what they hold and sleep until the end, and the server keeps
    the personal state for checkpoints. Nobody tests the clients' models then: their scores are not known.

    Parameters
    ----------
    last : callable
        Returns the personal state of some clients as it was last saved.
    since : callable
        Returns the rounds after which that was.
    """

    serves = True

    def __init__(
        self,
        job: Job,
        server: Server,
        last: Callable[[Ints], dict[int, Arrays]],
        since: Callable[[list[int]], dict[int, int]] = lambda clients: dict.fromkeys(clients, 0),
    ) -> None:
        self.job, self.server, self.last, self.since = job, server, last, since
        self.told = 0
        self.kept: list[Saved] | None = None

    def release(self, now: Progress, record: Record) -> bool:
        """Let the client ranks sleep, once; who is late then goes on, and is not asked again."""
        if self.kept is None and self.job.algorithm.clients_done(now.round):
            self.kept, ranks = self.server.release(self.last)
            record.events.append(released(ranks))
        return False

    def exchange(self, now: Progress, record: Record) -> tuple[Plan, Held]:
        """Run the next round until its rule closes it; what more is asked of its messages, the server answers alone."""
        plan, sums = self._closed(now, record)
        record.gradients, record.rejected, record.norms = sums.gradients, sums.rejected, sums.norms
        if self.job.iterated is not None:
            with record.timed("server_seconds"):
                messages = sums.messages(self.job.keeps, self.job.task.device)
                device = self.job.task.device
                sums.iterated = iterate(self.job.iterated, now.shared, messages, lambda own: own, device)
        return plan, sums

    def _closed(self, now: Progress, record: Record) -> tuple[Plan, Held]:
        """Run the next round until its rule closes it."""
        if not self.job.algorithm.invites(now.round):
            plan = Plan.nobody(now.round, len(self.job.layers.tensors))
            return plan, Held(self.job.layout, 0, plan.miss_probability, [])
        with record.timed("wait_seconds"):
            try:
                return self.server.exchange(now.round, now.shared, now.stage.number, self.job.guard.limits(now.norms))
            except Interrupted:
                self.server.abandon()
                raise

    def scores(self, now: Progress) -> Floats:
        """Ask the ranks that are free; the others' scores are NaN."""
        if self.kept is not None:
            return np.full((self.job.scores, self.job.config.clients), np.nan)
        return self.server.scores(now.round, now.shared)

    def together(self, record: Record, reason: str) -> str:
        """Take the ranks' figures from what they have sent, and tell who is lost."""
        figures = self.server.figures()
        figures[2, 0] += record.seconds.get("wait_seconds", 0.0)  # none where nobody was invited
        record.by_rank = figures
        for loss in self.server.fleet.lost[self.told :]:
            record.events += [("lost", client, f"on rank {loss.rank}: {loss.reason}") for client in loss.clients]
        self.told = len(self.server.fleet.lost)
        return reason

    def personal(self, now: Progress) -> Iterator[Saved]:
        """Ask the ranks that are free for the acknowledged state; of the others, repeat what was saved last."""
        yield from self.server.personal(self.last) if self.kept is None else self.kept
        self.stale = self.since(self.server.missed)


def last_saved(job: Job, load: Callable[[list[int]], dict[int, Arrays]]) -> Callable[[Ints], dict[int, Arrays]]:
    """Return a function that looks up personal state: what `load` finds, or the state before the first visit."""

    def first(client: int) -> Arrays:
        return {name: value.cpu().numpy() for name, value in job.algorithm.init_client(job.task, client).items()}

    def last(clients: Ints) -> dict[int, Arrays]:
        found = load(clients.tolist())
        return {client: found.get(client) or first(client) for client in clients.tolist()}

    return last
