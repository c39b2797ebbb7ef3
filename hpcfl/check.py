"""What a config would do: cohorts, bytes and memory, without running it."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from hpcfl.config import Config
from hpcfl.data import Header

if TYPE_CHECKING:
    from hpcfl.engine import Job

PREVIEW = 200  # rounds over which the plan is averaged


def report(config: Config, header: Header, data_dir: Path | None, ranks: int) -> Iterator[str]:
    """Yield one fact per line about a config that is valid.

    Parameters
    ----------
    ranks : int
        For how many MPI ranks memory and placement are stated.
    """
    from hpcfl.engine import Job

    job = Job.of(config, data_dir, ranks)
    plans = [plan for plan, _ in zip(job.plans(0), range(min(PREVIEW, config.rounds)))]
    counted = sum(int(plan.counted.sum()) for plan in plans) / len(plans)
    layers = ", ".join(f"{chance:.3g}" for chance in plans[0].missing)
    model = int(job.layer_bytes().sum())
    size = max(len(chunk.clients) for chunk in job.chunks)
    held = max(sum(len(c.clients) for c in job.chunks if c.rank == rank) for rank in {c.rank for c in job.chunks})
    samples = int(job.task.federation.train_sizes.max())
    wire = sum(b.slabs * 8 * prod(b.shape) for group in job.layout for b in group.values())
    yield f"config        valid: {config.algorithm.name}, {config.rounds} rounds, {config.clients} clients"
    yield f"data          {header.train} training and {header.test} test samples, at most {samples} per client"
    yield f"cohort        {len(plans[0].cohort)} invited, {counted:.1f} counted on average ({len(plans)} rounds drawn)"
    yield f"layers        {len(plans[0].missing)}; chance that nobody reaches layer 1 … L: {layers}"
    yield f"time          {sum(p.closes for p in plans) / len(plans):.3g} simulated seconds per round"
    yield f"message       {model} bytes per whole visit; {wire} bytes per reduction and rank"
    yield f"chunks        {len(job.chunks)} of {size} clients; at most {held} clients per rank on {ranks} ranks"
    foreign = [stage.name for stage in job.task.stages if stage.foreign]
    if foreign:
        yield f"note          {', '.join(foreign)}: torch's dropout runs client by client, hpcfl's does not"
    yield f"memory        about {_megabytes(job, size, held)} MB per client rank beside torch and MPI"


def _megabytes(job: Job, size: int, held: int) -> int:
    """Return parameters and gradients of a chunk, sums, personal state and data of the hosted clients."""
    model = sum(value.nbytes for value in job.task.initial().values())
    personal = sum(value.nbytes for value in job.algorithm.enter(job.task, 0).values())
    shape = job.task.federation.shapes[0]
    data = int(job.task.federation.train_sizes.max()) * prod(shape) * 4
    return round((model * (3 * size + 6) + held * (personal + data)) / 1e6)
