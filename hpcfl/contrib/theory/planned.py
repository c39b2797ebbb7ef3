"""What the planned deadlines of a config are, and which part of the batch suits them best (ADEL-FL).

ADEL-FL takes one factor m of all batches: a visit then takes m times as long, and the bound has ``B = Σ_u σ_u²/(U² m
b_u)`` beside C (see `hpcfl.schedule.deadlines`). Here m is on a grid, and each has its own deadlines. What does not
depend on m is left out of B, and both are over G².
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hpcfl.base.types import Floats
from hpcfl.engine.job import Job
from hpcfl.schedule.deadlines import excess, planned
from hpcfl.schedule.link import Link
from hpcfl.schedule.participation import Participation

PARTS = np.arange(10, 21) / 20
"""m, from ½ to 1."""


def facts(job: Job) -> Iterator[tuple[str, str]]:
    """Yield lines for `hpcfl check`."""
    config, planner = job.config, job.planner
    keys, users, batch = config.participation, config.participation.invited(config.clients), job.algorithm
    ends = [planner.participation.closes_after(each, ()) for each in range(config.rounds)]
    yield "deadlines", f"{ends[0]:.4g} s in the first round, {ends[-1]:.4g} s in the last, {sum(ends):.4g} s in all"
    samples = getattr(batch, "batch", 0)
    if not samples or users == 1 or config.link != Link() or config.queue.model != "none":
        return  # nothing can be scaled, or not all of a visit's seconds are
    best = min(PARTS, key=lambda part: bound(planner.missing, keys, config.rounds, users, samples, part))
    to = f"algorithm.batch = {round(best * samples)}, speed.scale = {best * config.speed.scale:.4g}"
    yield "batch", "as it is suits them best" if best == 1 else f"{best:g} of it suits them best: {to}"


def bound(
    missing: Callable[[float], Floats], keys: Participation, rounds: int, users: int, batch: int, part: float
) -> float:
    """Return ``Σ_t (B + C_t)/(t + γ)`` over G² with the deadlines that are planned for a `part` of the batch."""
    assert keys.planned_seconds is not None
    how = keys.planned_seconds / part, keys.planned_least / part, keys.planned_gamma
    ends = planned(missing, rounds, *how)  # in seconds of a whole batch
    layers = len(missing(ends[0]))
    spread = 4 * users / (users - 1) * np.array([layers + excess(missing(each)) for each in ends])
    noise = keys.planned_noise / (users * max(1, round(part * batch)))
    return float(((noise + spread) / (np.arange(1, rounds + 1) + keys.planned_gamma)).sum())
