"""The round loop. Nothing here knows an algorithm, a clock or MPI by name."""

from __future__ import annotations

from math import inf

import numpy as np

from hpcfl.algorithms.base import ServerState
from hpcfl.base.errors import Diverged, Ended, Interrupted, LearntNothing, Stopped
from hpcfl.base.lazy import torch
from hpcfl.base.types import Floats
from hpcfl.engine.checkpointing import Saver
from hpcfl.engine.ending import Ending
from hpcfl.engine.job import Job, Progress
from hpcfl.engine.record import Record, Recorder
from hpcfl.engine.rounds import Rounds
from hpcfl.engine.stopping import Stop
from hpcfl.learning.evaluate import server_finite, server_objective, server_scores
from hpcfl.learning.task import SERVER
from hpcfl.schedule.plan import Plan


def run(
    job: Job,
    rounds: Rounds,
    recorder: Recorder | None,
    now: Progress,
    stop: Stop,
    saver: Saver,
    ending: Ending | None = None,
) -> None:
    """Run the rounds that are left, or those in which this rank is needed.

    `recorder` and `ending` are the server's. The last checkpoint may still be under way when this returns or raises.

    Raises
    ------
    Stopped
        On every rank that was not released, after the same round, once a checkpoint is begun.
    Diverged
        On every rank after the same round, which has no checkpoint.
    Ended
        On the server, on others as Stopped, where the run has come to an earlier end by itself.
    """
    config = job.config
    while now.round < config.rounds:
        job.moves.to(now.round)
        record = Record.open(rounds.phases)
        if rounds.release(now, record):
            return
        job.task.oracle_calls[:] = 0  # what tests and figures have computed is no part of a round
        try:
            plan, record.sums = rounds.exchange(now, record)
        except Interrupted as early:
            rounds.together(record, "")
            if recorder is not None:
                recorder.log(now.round, record.events)
            if now.round > saver.saved:
                saver.save(now, {})
            raise Stopped(now.round, str(early)) from None
        if rounds.serves:
            step(job, now, record, plan)
        now.round += 1
        if config.evaluate.due(now.round, config.rounds):
            record.scores = evaluate(job, rounds, now, record)
        own = "" if ending is None else ending.after(figures(now, record, plan))
        reason = close(job, rounds, now, record, plan, own or stop.requested())
        record.saving = saver.look()
        if recorder is not None:
            recorder.row(plan, record, record.sums, now.clock)
        if fault := record.broken or job.guard.diverged(plan.arrived(record.rejected), record.rejected):
            raise Diverged(now.round, f"round {plan.round}: {fault}")
        if record.fruitless:
            raise LearntNothing(now.round, f"round {plan.round}: {record.fruitless}")
        if reason or config.checkpoint.due(now.round, config.rounds):
            saver.save(now, record.scores)
        if reason and now.round < config.rounds:
            raise Ended(now.round, own) if own else Stopped(now.round, reason)


def figures(now: Progress, record: Record, plan: Plan) -> dict[str, float]:
    """Return what is known of the round that has just been done, by name; scores where it was tested."""
    seconds = {"sim_seconds": plan.duration, "wall_seconds": record.elapsed()}
    known: dict[str, float] = {"round": plan.round, "invited": len(plan.cohort), "arrived": int(plan.counted.sum())}
    known |= {name: now.clock[name] + more for name, more in seconds.items()}
    known |= {name: float(value) for name, value in record.scores.items() if np.ndim(value) == 0}
    return known if record.loss is None else {**known, "loss": record.loss}


def step(job: Job, now: Progress, record: Record, plan: Plan) -> None:
    """Take the server's step at the end of round ``now.round``, and note what is known of it."""
    before, kept, sums = now.shared, now.extras, record.sums
    sums.round = now.round
    with record.timed("server_seconds"):
        state = job.border.step(ServerState(now.shared, now.extras), sums)
    now.shared, now.extras = state.shared, state.extras
    record.server_gradients = int(job.task.oracle_calls[SERVER])
    record.signal = job.config.doubling.signal(before, now.shared, sums, job.algorithm.learning_rate(now.round))
    with record.phases.phase("server"):
        record.metrics = job.algorithm.metrics(job.task, state)
        record.warnings = job.algorithm.warnings(job.task, state)
    told = "loss" in sums and sums.weight("loss") > 0
    loss = sums.mean("loss") if told else torch.zeros(())
    record.broken, moved, number = job.guard.stepped(before, now.shared, loss)
    record.loss = number if told else record.loss
    counted = any(sums.weight(name) for name in sums)
    moved |= counted and job.algorithm.collects(kept, now.extras)
    record.told |= now.watch.saw(now.round, len(plan.at_work) > 0, counted, record.loss, moved)


def close(job: Job, rounds: Rounds, now: Progress, record: Record, plan: Plan, reason: str) -> str:
    """Bring the ranks' figures together and note what of them matters later; return why the run is to stop, if so."""
    if rounds.serves and now.round == job.config.rounds:
        why = now.watch.ended()
        record.fruitless = record.fruitless or (why and why + _too_late(plan))
    now.clock["sim_seconds"] += plan.duration
    now.clock["wall_seconds"] += record.elapsed()
    reason = rounds.together(record, reason)
    record.stage, now.stage = now.stage.number, job.planner.next_stage(plan.round, now.stage, record.signal)
    now.norms.saw(record.norms)
    return reason


def _too_late(plan: Plan) -> str:
    """Return in words that a deadline left out even the fastest visit, "" where it did not."""
    deadline, fastest = plan.closes_after, float(plan.seconds.min(initial=inf))
    late = not plan.counted.any() and deadline < fastest < inf
    return f"; this one closed after {deadline:.3g} s, and its fastest visit takes {fastest:.3g} s" if late else ""


def evaluate(job: Job, rounds: Rounds, now: Progress, record: Record) -> dict[str, Floats | float]:
    """Score the new state: at the server on the global test set, at each client on its own test part.

    The server notes in `record` what that says of what the run learns.
    """
    with rounds.phases.phase("evaluation"):
        sums = rounds.scores(now)
        if not rounds.serves:
            return {}
        members = np.isin(np.arange(job.config.clients), job.planner.members)
        sizes = np.where(members & (job.task.federation.test_sizes > 0), job.task.federation.test_sizes, np.nan)
        columns = "test_loss", *job.task.metrics
        scores: dict[str, Floats | float] = {}
        for name, own in zip(columns, sums / sizes):
            known = own[~np.isnan(own)]
            scores[f"client_{name}"], scores[f"mean_client_{name}"] = own, known.mean() if len(known) else np.nan
        together = server_scores(job.task, now.shared) if job.algorithm.evaluates_shared else None
        if together is not None:
            scores |= dict(zip(columns, together[0] / together[1]))
        losses = np.append(scores["client_test_loss"], scores.get("test_loss", np.nan))
        finite = np.append(sums[len(columns)] / sizes, np.nan)
        if together is not None:
            finite[-1] = np.isfinite(losses[-1]) or server_finite(job.task, now.shared) / together[1]
        record.fruitless, told = now.watch.tested(
            losses,
            float(scores.get("test_loss", scores["mean_client_test_loss"])),
            finite,
            any(value.numel() > 1 for value in now.shared.values()),
            job.chance,
            now.round == job.config.rounds,
        )
        record.told |= told
        if job.config.evaluate.objective:
            scores["objective"] = objective(job, now, sums[-1])
        return scores


def objective(job: Job, now: Progress, sums: Floats) -> float:
    """Return the mean of loss and penalty over all training samples from the clients' `sums` [clients]; NaN: unknown.

    Those of clients that are held out are not among them. What is added, and in which order, does not depend on who has
    computed it.
    """
    server_sum, count = server_objective(job.task, now.shared)
    held = int(job.task.federation.train_sizes[job.planner.members].sum())
    return float(np.append(sums, server_sum).sum()) / (count + held)
