"""Rounds in simulated time: all ranks carry them out in step, and nothing sleeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from hpcfl.algorithms.base import Message, Visits
from hpcfl.base.device_copy import on_device
from hpcfl.base.lazy import torch
from hpcfl.base.types import Floats, Ints, State
from hpcfl.engine.checkpointing import restored
from hpcfl.engine.chunk_batches import Part
from hpcfl.engine.iterated import blank, iterate, keep
from hpcfl.engine.job import Job, Progress
from hpcfl.engine.record import Record, released
from hpcfl.engine.rounds import Rounds
from hpcfl.engine.uneven import drained, evenly
from hpcfl.learning import batchnorm
from hpcfl.mpi.placement import Chunk
from hpcfl.mpi.transport import Personal, Saved, Transport, arrays
from hpcfl.schedule.plan import Plan
from hpcfl.sums.message import ExactSums


class Simulated(Rounds):
    """Each rank computes its own clients' visits; the transport carries state down and sums up.

    Where clients are needed no more, the server takes over all of them with their personal state: it reads the same
    federation, so it can test them as their ranks did. Those forget what they hold and wait for the end.

    Attributes
    ----------
    released : bool
        Whether this rank has been released.
    apart : bool
        Whether each rank writes its own clients' personal state: all see the same run folder.
    """

    def __init__(self, job: Job, transport: Transport, first: int, apart: bool = True) -> None:
        self.job, self.transport, self.apart = job, transport, apart
        self.serves, self.released = transport.serves, False
        self.down: tuple[int, int] | None = None  # bytes sent and received, where all have the coming round's state
        self.alone = transport.size == 1
        self.plans: Iterator[Plan] | None = None
        self.first = first
        self.mine = job.hosted(transport.rank)

    def release(self, now: Progress, record: Record) -> bool:
        """Let the server take over, once; all ranks decide alike."""
        if self.alone or not self.job.algorithm.clients_done(now.round):
            return False
        taken: Personal = {chunk.number: {} for chunk in self.job.chunks}
        if self.job.personal_bytes:
            collected = self.transport.collect(self.job.chunks, now.personal, self.job.like)
            for (clients, state), chunk in zip(collected, self.job.chunks):
                taken[chunk.number] = restored(self.job.like(int(clients[0])), state)
        self.released = not self.serves
        if self.released:
            now.shared, now.personal, self.mine = {}, {}, []
            self.job.task.release_data()
            return True
        record.events.append(released(self.transport.size - 1))
        self.alone, self.transport, self.down = True, Transport(self.transport.size), None
        now.personal, self.mine = taken, self.job.chunks
        return False

    def exchange(self, now: Progress, record: Record) -> tuple[Plan, ExactSums]:
        """Carry out the next round: who counts, and how far, was decided before."""
        if self.plans is None:
            begun = now.clock["sim_seconds"]
            self.plans = self.job.planner.plans(self.first, lambda: now.stage.number, now.flights, begun)
        plan = next(self.plans)
        down, self.down = self.down or self._tell(now), None
        self.transport.count()
        told = self.job.layout, plan.invited, plan.miss_probability, self.job.task.device
        sums = ExactSums(*told, self.transport.size, self.job.sent(plan))
        if plan.arrivals is not None:
            now.served[now.round] = now.shared
            sums.arrived = now.arrived(plan) if self.serves else None
        kept: list[Message] = []
        if (limits := self.job.guard.limits(now.norms)) is not None:
            record.limits, record.norms = limits, np.zeros((self.job.config.clients, len(limits)))
        with record.timed("compute_seconds"):
            self._between(now)
            for part in plan.parts():
                if self.job.algorithm.goes_on and plan.arrivals is not None and not part.counted.any():
                    whole, calls = replace(part, depth=np.ones_like(part.depth)), self.job.task.oracle_calls.copy()
                    record.visits += visit(self.job, whole, self.mine, now, None)
                    self.job.task.oracle_calls[:] = calls
                else:
                    record.visits += visit(self.job, part, self.mine, now, sums, kept, record)
        if self.job.task.slots is not None:
            self.job.task.slots.draw_ahead()
        record.gradients = int(self.job.task.oracle_calls.max())
        self.job.task.oracle_calls[:] = 0
        with record.timed("wait_seconds"):
            sums = self.transport.close(sums)
        if self.job.iterated is not None:

            def reduce(responses: ExactSums) -> ExactSums:
                with record.timed("wait_seconds"):
                    return self.transport.share(responses)

            with record.timed("compute_seconds"):
                sums.iterated = iterate(self.job.iterated, now.shared, kept, reduce, self.transport.size)
        sent, received = np.add(self.transport.count(), down).tolist()
        record.wire = received, sent
        if plan.arrivals is not None:
            own = plan.arrivals.served
            if not self.serves:  # those states that its own clients have in their hands
                own = own[np.isin(plan.arrivals.waiting, np.concatenate([chunk.clients for chunk in self.mine]))]
            now.served = {v: now.served[v] for v in {*own.tolist()} if v in now.served}
        return plan, sums if self.serves else ExactSums(())

    def _tell(self, now: Progress) -> tuple[int, int]:
        """Give every rank the server's state; return the bytes that this rank has sent and received."""
        self.transport.count()
        now.shared = self.transport.invite(now.shared)
        return self.transport.count()

    def _between(self, now: Progress) -> None:
        """Let all clients do what they do when a round has ended, but those that are held out."""
        algorithm, task = self.job.algorithm, self.job.task

        def after(own: State, some: Visits) -> State:
            return algorithm.between(task, now.shared, {name: value.clone() for name, value in own.items()}, some)

        for chunk in self.mine if now.round and algorithm.between_rounds else ():
            rows = self.job.members(chunk.clients)
            if len(rows):
                seen = Visits.for_test(now.round, chunk.clients[rows])
                places = on_device(torch.from_numpy(rows), task.device)
                personal = now.personal[chunk.number]
                own = {name: value[places] for name, value in personal.items()}
                for name, value in evenly(after, task, own, seen).items():
                    personal[name][places] = value

    def scores(self, now: Progress) -> Floats:
        """Let every rank test its own clients' models; what it tests is what the next round begins with."""
        self.down = self._tell(now)
        if self.job.task.gathers:
            mine = np.array([client for chunk in self.mine for client in chunk.clients.tolist()], dtype=np.int64)
            found = self.transport.reduce(self.job.statistics(now.shared, mine))
            gathered = batchnorm.with_statistics(self.job.task, now.shared, found) if self.serves else now.shared
            now.shared = self.transport.invite(gathered)
        sums = np.zeros((self.job.scores, self.job.config.clients))
        hosted = [(chunk.clients, now.personal[chunk.number]) for chunk in self.mine]
        for (clients, _), scores in zip(hosted, self.job.scored(now.round, now.shared, hosted)):
            sums[:, clients] = scores
        return self.transport.reduce(sums)

    def together(self, record: Record, reason: str) -> str:
        """Bring every rank's figures together, and why it is to stop."""
        config = self.job.config
        return record.gather(self.transport, reason, max(config.clients, self.job.planner.slots))

    def personal(self, now: Progress) -> Iterator[Saved]:
        """Yield what this rank hosts; where ranks see other folders, let all hand over theirs to the server."""
        if not self.apart:
            return self.transport.collect(self.job.chunks, now.personal, self.job.like)
        return ((chunk.clients, arrays(now.personal[chunk.number])) for chunk in self.mine)

    @property
    def homes(self) -> Ints:
        homes = super().homes
        for chunk in () if self.alone or not self.apart else self.job.chunks:
            homes[chunk.clients] = chunk.rank
        return homes


def visit(
    job: Job,
    plan: Plan,
    chunks: Sequence[Chunk],
    now: Progress,
    sums: ExactSums | None,
    kept: list[Message] | None = None,
    record: Record | None = None,
) -> int:
    """Do the visits of some chunks that count, add their messages to `sums`, keep the personal state; return how many.

    What the algorithm keeps of the messages is put into `kept`, what was rejected is noted in `record`. Without `sums`
    the visits do not count: what they leave is the personal state.
    """
    record, count, device = record or Record.open(), 0, job.task.device
    # a rank to whose clients a state was not sent does not have it
    shared = now.shared if plan.arrivals is None else now.served.get(plan.round, {})
    job.bundles.hold(chunks)
    for parts, own, work in job.bundles.work(shared, _parts(job, plan, chunks, now)):
        clients, visits = own.clients, plan.places(own.clients)
        sieve = job.guard.sieve(len(clients), record.limits)
        take: Callable[[Message], None] = _nothing
        if sums is not None:
            take = partial(sums.add, norms=sieve.lengths)
            if plan.arrivals is not None:
                factors = plan.arrivals.factors[np.searchsorted(plan.cohort, clients)]
                take = partial(take, factors=dict.fromkeys(job.changes, factors))
        if kept is not None and job.keeps:
            kept.append(blank(job.keeps, len(clients)))
            take = partial(_take, take, kept[-1])
        after, rejected = drained(sieve.through(work), take), job.guard.rejections(visits, sieve)
        depth = np.array([rejected[place].depth if place in rejected else 0 for place in visits.tolist()])
        start = 0
        for part in parts:
            end = start + len(part.visits.clients)
            places = part.chunk.places(part.visits.clients)
            for name, value in after.items():
                rows = np.flatnonzero(job.layers.of_state(name) >= depth[start:end])
                to = on_device(torch.from_numpy(places[rows]), device)
                new = value[start:end]
                if len(rows) < len(places):
                    new = new[on_device(torch.from_numpy(rows), device)]
                now.personal[part.chunk.number][name][to] = new
            start = end
        record.rejected |= rejected
        if record.limits is not None:
            record.norms[clients] = sieve.norms
        count += len(clients)
    return count


def _parts(job: Job, plan: Plan, chunks: Iterable[Chunk], now: Progress) -> Iterator[Part]:
    """Yield the visits that count of each chunk that has any."""
    for chunk in chunks:
        rows = plan.rows(chunk.clients)
        if len(rows):
            own = now.personal[chunk.number]
            if own:
                places = on_device(torch.from_numpy(chunk.places(plan.cohort[rows])), job.task.device)
                own = {name: value[places] for name, value in own.items()}
            yield Part(chunk, own, job.visits(plan, rows))


def _nothing(message: Message) -> None:
    pass


def _take(add: Callable[[Message], None], kept: Message, message: Message) -> None:
    add(message)
    keep(message, kept)
