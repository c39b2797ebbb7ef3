"""What a config would do: cohorts, bytes and memory, without running it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from math import inf, isnan, prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpcfl.algorithms import ServerState
from hpcfl.comm.placement import lane_topologies
from hpcfl.config import Config
from hpcfl.data import Federation, Header
from hpcfl.data.base import Range

if TYPE_CHECKING:
    from hpcfl.engine.job import Job
    from hpcfl.schedule.plan import Plan

PREVIEW = 200  # rounds over which the plan is averaged
LOOKED_AT = 256 << 20
"""Bytes of samples, as float32, up to which clients' features are looked at."""
FARTHEST = 100.0
"""Largest magnitude of a feature that raises no doubt.

The curvature along a weight grows with the square of its feature, and the step that is stable falls with it: at 100 it
is 10⁴ times shorter than for features of order 1, which usual step sizes suit. Pixels of 0 to 255 are beyond it. No
standardised feature is in fewer than 10⁴ samples: it is at most √n in n of them.
"""


def report(config: Config, header: Header, data_dir: Path | None, ranks: int) -> Iterator[str]:
    """Yield one fact per line about a config that is valid.

    Parameters
    ----------
    ranks : int
        For how many MPI ranks memory and placement are stated.
    """
    from hpcfl.engine.job import Job

    job = Job.of(config, data_dir, ranks)
    model = int(job.layers.bytes.sum())
    size = max(len(chunk.clients) for chunk in job.chunks)
    held = max(sum(len(c.clients) for c in job.chunks if c.rank == rank) for rank in {c.rank for c in job.chunks})
    samples = int(job.task.federation.train_sizes.max())
    wire = sum(b.bins * 8 * prod(b.shape) for group in job.layout for b in group.values())
    yield f"config        valid: {config.algorithm.name}, {config.rounds} rounds, {config.clients} clients"
    yield f"data          {header.train} training and {header.test} test samples, at most {samples} per client"
    yield from _rounds(job)
    yield from _stages(job)
    yield f"message       {model} bytes per whole visit; {wire} bytes per reduction and rank"
    if job.iterated is not None:
        summed = sum(b.bins * 8 * prod(b.shape) for group in job.iterated.layout for b in group.values())
        yield f"further sums  {summed} bytes each; {_kept(job)} bytes of each visit are held for them"
    phi, share = config.oracle.phi, int(job.layers.numbers.sum()) / job.task.parameter_count
    yield f"oracle        p = {job.task.parameter_count}, φ = {phi:g}; {share:.4g} vectors of p numbers per whole visit"
    yield f"chunks        {len(job.chunks)} of {size} clients; at most {held} clients per rank on {ranks} ranks"
    foreign = [layer.name for layer in job.task.layers if layer.unbatched]
    if foreign:
        yield f"note          {', '.join(foreign)}: torch's dropout runs client by client, hpcfl's does not"
    state = ServerState(job.algorithm.init_server(job.task), job.algorithm.init_extras(job.task))
    for kind, text in (job.planner.warnings | job.algorithm.warnings(job.task, state)).items():
        yield f"warning       {kind}: {text}"
    yield from _features(config, header.ranges, job.task.federation)
    if config.clock == "wall":
        server, client = bounds(job, ranks)
        yield f"lanes         {_lanes(job, ranks)} on {ranks} ranks of one host"
        yield (
            f"memory        at most {server / 1e6:.3g} MB at the server, {client / 1e6:.3g} MB per client rank, "
            "beside data, torch and MPI"
        )
    else:
        yield f"memory        about {_megabytes(job, size, held)} MB per client rank beside torch and MPI"


def bounds(job: Job, ranks: int) -> tuple[int, int]:
    """Return the most bytes that rounds in real time take at the server and on a client rank.

    The server: one message per lane, and the shared state, its successor and a copy on its way out; where ranks host
    several clients, exact running sums (four times the message) too; and what is held of each visit for further sums.
    A client rank: four times the model, or the message where that is larger (the state served, the gradients or the
    model being trained, the change, and the buffers on their way out), and twice the personal state of its clients,
    acknowledged and provisional.
    """
    lanes = _lanes(job, ranks)
    message = _message(job)
    hosted = max(len(job.hosted(rank)) for rank in range(1, ranks))
    server = (lanes + 3 + 4 * (hosted > 1)) * message + job.config.clients * _kept(job)
    return server, 4 * max(job.task.nbytes, message) + 2 * hosted * job.personal_bytes


def _kept(job: Job) -> int:
    return sum(block.bytes for block in job.keeps.values())


def _message(job: Job) -> int:
    """Return the bytes of one visit's message."""
    return sum(block.bytes for group in job.layout for block in group.values())


def _lanes(job: Job, ranks: int) -> int:
    return len(lane_topologies(job.config.lane_width, ["here"] * ranks, job.chunks))


def _rounds(job: Job) -> Iterator[str]:
    """Yield what the plans of the first rounds say; how fast real hardware is, nobody knows before."""
    speed, clock = job.config.speed, job.config.clock
    if clock == "wall" and not speed.known(clock):
        first = job.planner.plan(job.planner.attempt(0))
        yield f"cohort        {len(first.cohort)} invited"
        yield f"layers        {first.layers}; chances to reach them in time are not known"
        yield "time          real" + ("" if isnan(end := first.closes_after) else f", a first deadline of {end:.3g} s")
        return
    plans = _planned(job, min(PREVIEW, job.config.rounds))
    counted = sum(int(plan.counted.sum()) for plan in plans) / len(plans)
    layers = ", ".join(f"{chance:.3g}" for chance in plans[0].miss_probability)
    rounds = f"{len(plans)} rounds {'recorded' if speed.replays else 'drawn'}"
    yield f"cohort        {len(plans[0].cohort)} invited, {counted:.1f} counted on average ({rounds})"
    yield f"layers        {plans[0].layers}; chance that nobody reaches layer 1 … L: {layers}"
    seconds = sum(plan.duration for plan in plans) / len(plans)
    yield f"time          {seconds:.3g} simulated seconds per round{_repeated(plans)}"


def _planned(job: Job, rounds: int) -> list[Plan]:
    """Return the plans of the first rounds; stages of doubling participant sets end only where that is known before."""
    stage, found = job.planner.first_stage, []
    plans = job.planner.plans(0, lambda: stage.number)
    for round_ in range(rounds):
        found.append(next(plans))
        stage = job.planner.next_stage(round_, stage, -1.0)
    return found


def _features(config: Config, known: tuple[Range, ...], federation: Federation) -> Iterator[str]:
    """Warn of clients whose training features are too large; say of how many clients that is known, if not of all."""
    ranges = known or tuple(_ranges(federation))
    farthest = [max(both, key=abs) for both in ranges]
    beyond = [client for client, value in enumerate(farthest) if not abs(value) <= FARTHEST]
    clients = f"{federation.clients} clients"
    seen = clients if len(ranges) == federation.clients else f"the first {len(ranges)} of {clients}"
    if beyond:
        pixels = all(least >= 0 and most <= 255 for least, most in ranges)
        unscaled = getattr(config.data, "scale", "no such key") is None
        remedy = "data.scale = 'unit'" if pixels and unscaled else "features standardised to mean 0 and deviation 1"
        yield (
            f"warning       features: client {beyond[0]} holds {farthest[beyond[0]]:g}: beyond ±{FARTHEST:g}, as in "
            f"{len(beyond)} of {seen}, training by gradients may diverge: expected {remedy}"
        )
    elif seen != clients:
        yield f"note          features: those of {seen} were looked at"


def _ranges(federation: Federation) -> Iterator[Range]:
    """Yield the least and the largest training feature of each client, as long as they come in `LOOKED_AT` bytes."""
    samples = (federation.train_sizes + federation.test_sizes).tolist()  # a client's are read together
    sizes = accumulate(4 * count * prod(shape) for count, shape in zip(samples, federation.shapes))
    for client in range(sum(size <= LOOKED_AT for size in sizes)):
        features = federation.client(client).train_features
        yield float(np.min(features, initial=0)), float(np.max(features, initial=0))


def _stages(job: Job) -> Iterator[str]:
    """Say how participant sets double, if they do."""
    config, limits = job.config, job.planner.stage_limits
    if not limits:
        return
    sizes = [job.planner.visits(number) for number in range(len(limits) + 1)]
    visits = ", ".join(str(size) for size in sizes)
    known = limits[0] < inf
    ends = (
        ", ".join(f"{rounds:g}" for rounds in limits) + " rounds"
        if known
        else f"as long as {config.doubling.when} says"
    )
    what = "visits" if config.doubling.by == "clients" else "visits' worth of samples"
    yield f"stages        {visits} {what}; all but the last take {ends}"


def _repeated(plans: list[Plan]) -> str:
    """Say how often rounds are repeated, if they are."""
    repeats = sum(plan.repeats for plan in plans)
    return f", {repeats / len(plans):.3g} void attempts included" if repeats else ""


def _megabytes(job: Job, size: int, held: int) -> int:
    """Return parameters and gradients of a chunk, sums, the hosted clients' personal state, data and kept blocks."""
    federation = job.task.federation
    data = max(int(count) * prod(shape) * 4 for count, shape in zip(federation.train_sizes, federation.shapes))
    each = max(job.task.nbytes, _message(job))
    return round((each * (3 * size + 6) + held * (job.personal_bytes + data + _kept(job))) / 1e6)
