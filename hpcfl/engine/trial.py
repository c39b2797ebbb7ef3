"""Before round 0: what is the user's is tried for nothing, on one client, and leaves no trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NoReturn

import numpy as np

from hpcfl.algorithms.base import Message, ServerState, Task, Visits
from hpcfl.base.blame import blaming, place_of
from hpcfl.base.errors import RunError, in_place, listed
from hpcfl.base.lazy import Tensor, torch
from hpcfl.engine.border import differing, kind, like, samples_of
from hpcfl.engine.job import Job, Progress
from hpcfl.engine.uneven import Sent, collected
from hpcfl.learning import build
from hpcfl.learning.evaluate import server_scores
from hpcfl.models.modules import tracing
from hpcfl.sums.guard import METRIC
from hpcfl.sums.message import Arrived, ExactSums

AT_ONCE = 32  # samples of the batch on which model and loss are tried
SMALL = 2**26  # bytes of data that may be made twice
ELSEWHERE = (
    "what outlasts a visit belongs in `init_client`, `init_server` or `init_extras`, and random numbers come from "
    "hpcfl.keyed"
)


def tried(job: Job, now: Progress, data_dir: Path | None) -> None:
    """Try what is the user's on one client, the one with the fewest samples, and leave no trace of that.

    It is one batch's gradient where model, loss or data are the user's, and a whole visit, the server's step, a test
    and the metrics where the method is; each twice, with the same bits, or nearly so on a GPU that need not give them.
    So are data of the user's made once more, but large ones. RunError names the user's file.
    """
    config = job.config
    own = {key: name for key, name in config.named if key != "speed.model"}
    sizes, members = job.task.federation.train_sizes, job.planner.members
    having = [client for client in members.tolist() if sizes[client] > 0]
    if not own or not having:
        return
    task = copy(job.task)  # what is held and counted is this one's own
    task.release_held()
    task.slots = None
    task.oracle_calls, layers = job.task.oracle_calls.copy(), len(job.layers.tensors)
    client = min(having, key=lambda each: (sizes[each] < 2, sizes[each]))  # no module can normalise a single sample
    clients = np.array([client])
    visits = Visits(0, clients, np.ones(1, np.int64), sizes[clients], np.ones((1, layers)))

    def first() -> str:
        return " in round 0"

    with tracing.seeded(0):
        task.hold(clients)
        if own.keys() - {"algorithm.name"}:
            with blaming(first, ("model.name", "task.loss", "data.name")):
                _try_batch(task, visits, own, _within(job))
        shapes, counts = task.federation.shapes, (sizes + task.federation.test_sizes).tolist()
        if "data.name" in own and sum(4 * count * prod(shape) for count, shape in zip(counts, shapes)) <= SMALL:
            other = config.federation(data_dir).client(client)
            for part, values in vars(task.federation.client(client)).items():
                if not np.array_equal(values, getattr(other, part), equal_nan=values.dtype.kind == "f"):
                    line = f"{part} of client {client} are others when they are made again"
                    name = own["data.name"]
                    raise RunError(
                        f"data.name = '{name}': {line}: random numbers come from hpcfl.keyed{place_of(name)}"
                    )
        if "algorithm.name" in own and job.algorithm.invites(0):
            with blaming(first, ("algorithm.name",)):
                _try_method(replace(job, task=task), now, visits)
    if task.whole is not None:
        task.whole.begin([], {})


def _within(job: Job) -> float:
    """Return by which share of the largest number what is computed again may differ."""
    return 0.0 if job.task.device.type == "cpu" or job.config.reproducible else tracing.CLOSE


def _try_batch(task: Task, visits: Visits, own: Mapping[str, str], within: float) -> None:
    """Try the gradient of one batch."""

    def refuse(what: str, *keys: str) -> NoReturn:
        key = next(key for key in (*keys, *own) if key in own)
        raise RunError(f"{key} = '{own[key]}': {what}{place_of(own[key])}")

    client = int(visits.clients[0])
    params = {name: value[None].clone() for name, value in task.initial(client).items()}
    batch = next(task.batches(visits, AT_ONCE, steps=1))
    held = {"features": batch.x, "labels": batch.y} | {f"the parameter {name}": each for name, each in params.items()}
    before = {name: value.clone() for name, value in held.items()}
    outputs = task.forward(params, batch.x, batch.key).detach()
    if not outputs.isfinite().all():
        features = "" if batch.x.isfinite().all() else f", as are features of client {client}"
        refuse(f"outputs are not finite{features}", *(("data.name",) if features else ()), "model.name", "data.name")
    build.check_outputs(
        task.loss, outputs[0], batch.y[0], task.federation.classes, f"model.name = '{own.get('model.name')}'"
    )
    found, losses = task.gradients(params, batch)
    if not losses.isfinite().all():
        refuse(f"the loss is {losses.tolist()[0]}, expected a finite one", "task.loss", "data.name", "model.name")
    if not all(each.isfinite().all() for each in found.values()):
        refuse("gradients are not finite", "task.loss", "model.name")
    if not any(each.any() for each in found.values()):  # of few samples they may be, as where none has an event
        whole, _ = task.gradients(params, next(task.batches(visits, 0, steps=1)))
        if not any(each.any() for each in whole.values()):
            refuse("all gradients are 0: the loss does not depend on the parameters", "task.loss", "model.name")
    if name := _apart(before, held):
        refuse(in_place(name), "task.loss" if name == "labels" else "model.name")
    again, other = task.gradients(params, batch)
    if _apart({**found, "loss": losses}, {**again, "loss": other}, within):
        refuse(
            "gradients of the same batch differ when computed again: expected random numbers of torch's, NumPy's or "
            "Python's global generator alone, and nothing else that outlasts a step",
            *("model.name", "task.loss"),
        )


def _try_method(job: Job, now: Progress, visits: Visits) -> None:
    """Try a visit, the server's step, a test and the metrics."""
    border, task, method = job.border, job.task, job.algorithm
    (client,) = visits.clients.tolist()
    given = {f"'{name}' of the shared state": each for name, each in now.shared.items()} | samples_of(task, visits)
    before, shared = {name: each.clone() for name, each in given.items()}, dict(now.shared)
    begun, again = (border.begun(method.init_client(task, client), "init_client") for _ in range(2))
    if name := _apart(begun, again):
        border.refuse(f"init_client gave other numbers for '{name}' when asked again: {ELSEWHERE}")
    if name := _apart(now.shared, task.start.given(border.begun(method.init_server(task), "init_server"))):
        border.refuse(f"init_server gave other numbers for '{name}' when asked again: {ELSEWHERE}")

    def visit() -> Sent:
        own = {name: value[None].clone() for name, value in begun.items()}
        return collected(border.client(task, now.shared, own, visits))

    sent, after = visit()
    blocks = {name: part for message in sent for name, part in message.items()}
    if now.shared.keys() != shared.keys():
        border.refuse("client changes the names of the shared state, which it is given")
    if name := _apart(before, given):
        border.refuse(f"client: {in_place(name)}")
    if name := next((name for name, (value, _) in blocks.items() if not value.isfinite().all()), ""):
        border.refuse(f"client sent '{name}' that is not finite in round 0")
    counted = any(weight.any() for name, (_, weight) in blocks.items() if name != METRIC)
    if not counted and not method.sends_loss_only:
        border.refuse(f"client sent weight 0 with all blocks but '{METRIC}' in round 0: nothing of it counts")
    messages, later = visit()
    values = {name: value for name, (value, _) in blocks.items()}
    others = {name: value for message in messages for name, (value, _) in message.items()}
    within = _within(job)
    if name := _apart(values, others, within) or _apart(after, later, within):
        border.refuse(f"client gave other numbers for '{name}' when asked the same again: {ELSEWHERE}")
    if job.iterated is None:
        _try_server(job, now, visits, sent)


def _try_server(job: Job, now: Progress, visits: Visits, sent: Iterable[Message]) -> None:
    """Try the server's step, a test and the metrics."""
    border, task, method = job.border, job.task, job.algorithm
    sums = ExactSums(job.layout, visits.clients, np.zeros(visits.arrival.shape[1]), task.device)
    for message in sent:
        sums.add(message)
    if job.config.rules.by_arrivals:
        sums.arrived = Arrived(visits.clients, np.zeros(1, np.int64), np.ones(1), {0: now.shared})
    before = {name: value.clone() for name, value in now.shared.items()}
    state, again = (border.step(ServerState(now.shared, now.extras), sums) for _ in range(2))
    if name := _apart(before, now.shared):
        border.refuse(f"the server's step {in_place(name)}")
    if name := next((name for name, value in state.shared.items() if not value.isfinite().all()), ""):
        border.refuse(f"the server's step made '{name}' that is not finite of what is")
    if name := _apart(state.shared, again.shared, _within(job)):
        border.refuse(f"the server's step gave other numbers for '{name}' when asked the same again: {ELSEWHERE}")
    personal = {name: value[None] for name, value in method.init_client(task, int(visits.clients[0])).items()}
    params = method.model(task, state.shared, personal, Visits.for_test(1, visits.clients))
    if not isinstance(params, Mapping):
        border.refuse(f"model returned {kind(params)}, expected the model's tensors, {{name: [c, …]}}")
    wanted = like({name: value[None] for name, value in task.initial(int(visits.clients[0])).items()})
    got = {name: each for name, each in like(params).items() if name in wanted}
    if wrong := differing(wanted, got, "for a client"):
        border.refuse(f"model: {wrong}")
    job.scored(1, state.shared, [(visits.clients, personal)])
    if method.evaluates_shared:
        server_scores(task, state.shared)
    metrics = method.metrics(task, state)
    if not isinstance(metrics, Mapping) or not metrics.keys() <= method.metric_columns.keys():
        said = kind(metrics) if not isinstance(metrics, Mapping) else listed(map(repr, metrics))
        border.refuse(f"metrics returned {said}, expected numbers by the names in metric_columns")
    for name, value in metrics.items():
        if not isinstance(value, int | float | np.number | torch.Tensor):
            border.refuse(f"metrics returned {kind(value)} as '{name}', expected a number")


def _apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor], within: float = 0.0) -> str:
    """Return the first name whose numbers differ, or do by more than a share of the largest; "" where none do.

    What is not finite is equal to itself.
    """

    def alike(value: Tensor, again: Tensor | None) -> bool:
        if again is None or value.shape != again.shape:
            return False
        same = torch.equal(value, again) or torch.equal(value.nan_to_num(), again.nan_to_num())
        return same or (within > 0 and tracing.share_apart(value, again) <= within)

    return next((name for name, value in one.items() if not alike(value, other.get(name))), "")
