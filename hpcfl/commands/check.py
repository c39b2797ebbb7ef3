"""What a config would do: cohorts, bytes and memory, without running it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, chain
from math import inf, isnan, prod
from pathlib import Path
from typing import Any

import numpy as np

from hpcfl.algorithms import ServerState
from hpcfl.base.errors import RunError, count_of, listed
from hpcfl.base.lazy import torch
from hpcfl.base.rng import key_as_seed
from hpcfl.commands.contributed import contributed
from hpcfl.config import Config
from hpcfl.data import Federation, Header
from hpcfl.data.base import Range, too_large
from hpcfl.engine.job import Job
from hpcfl.engine.record import columns
from hpcfl.engine.trial import tried
from hpcfl.learning.config import METRICS
from hpcfl.mpi.devices import described
from hpcfl.mpi.placement import TWO_LEVEL, Tree, lane_topologies, tree
from hpcfl.schedule.counterfactual import Counterfactual
from hpcfl.schedule.plan import Plan
from hpcfl.schedule.planner import Planner
from hpcfl.sums.message import Block

Facts = Iterator[tuple[str, str]]
"""What a line is about, and what it says."""
PREVIEW = 200  # rounds over which the plan is averaged
OTHER_SEEDS, THEIR_ROUNDS = 9, 50
SHORT = 20_000  # visits up to which rounds are planned by other seeds too
LOOKED_AT = 256 << 20
"""Bytes of samples, as float32, up to which clients' features are looked at."""


def report(config: Config, header: Header, data_dir: Path | None, ranks: int, like: Any = None) -> Iterator[str]:
    """Yield one fact per line about a config that is valid; memory and placement are stated for `ranks` MPI ranks.

    With `like` also what a round's messages would take.
    """
    job = Job.of(config, data_dir, ranks)
    tried(job, job.begin(0), data_dir)
    if config.task.own:
        columns(job)  # they must have names of their own
    federation = job.task.federation
    samples, (size, held) = int(federation.train_sizes.max()), _largest(job)
    facts = chain(
        [("config", f"valid: {config.algorithm.name}, {config.rounds} rounds, {config.clients} clients")],
        [("data", f"{header.train} training and {header.test} test samples, at most {samples} per client")],
        _computed(job),
        _closing(job, ranks),
        _rounds(job, ranks),
        _sent(job, ranks),
        [("chunks", f"{len(job.chunks)} of {size} clients; at most {held} clients per rank on {ranks} ranks")],
        _warnings(job),
        () if header.tokens else features(config, header.ranges, federation),
        _memory(job, ranks, like.per_host if like else ranks),
        () if like is None else contributed("prediction")(job, like),
    )
    yield from (f"{name:<14}{text}" for name, text in facts)


def _computed(job: Job) -> Facts:
    """The layers that were traced of a module from outside, what is minimised and measured where the config says it.

    And what would compute if the run began here, where that is not the CPU because the config says so.
    """
    config, task = job.config, job.config.task
    if (whole := job.task.whole) is not None:
        sizes = {name: value.numel() for name, value in whole.tensors.items()}
        layers = "; ".join(f"{', '.join(names)} ({sum(sizes[name] for name in names)})" for names in whole.groups)
        yield "model", f"{job.task.computing} ({job.task.why}); layers 1 … {len(whole.groups)}: {layers}"
    if frozen := job.task.frozen:
        count, learn = job.task.parameter_count, len(job.task.initial())
        total = count + sum(value.numel() for value in frozen.values())
        drawn = "" if config.model.initial else "; the others are drawn, not of a file"
        yield "trained", f"{count:,} of {total:,} parameters ({learn} of {learn + len(frozen)} tensors){drawn}"
    if task.loss != "auto" or task.metrics != METRICS:
        yield "task", f"loss: {task.loss}; metrics: {', '.join(task.metrics) or 'none'}"
    if config.device == config.server_device == "cpu":
        return
    if not torch.cuda.device_count():
        asked = [key for key in ("device", "server_device") if getattr(config, key) == "cuda"]
        refused = f"; {asked[0]} = 'cuda' is refused here" if asked else ""
        yield "device", f"cpu: torch {torch.__version__} sees no GPU on this host{refused}"
        return
    both = config.device, config.server_device
    client, server = ("the CPU" if each == "cpu" else described("cuda:0") for each in both)
    bits = ", the same bits each time" if config.reproducible else ""
    yield "device", f"{client}{bits}; at most {config.ranks_per_device} per GPU; a server by itself: {server}"


def _closing(job: Job, ranks: int) -> Facts:
    """Who takes no part, when rounds close, and what then becomes of visits that are not complete."""
    clients, rules = job.config.clients, job.config.rules
    if held := sorted({*range(clients)} - {*job.planner.members.tolist()}):
        yield "held out", f"{len(held)} of {clients} clients take no part: {listed(held)}"
    ends = list[str]()

    def with_(visits: int, what: str) -> str:
        after = f"{rules.grace:g} s after" if rules.grace else "within the slack after" if rules.slack else "with"
        return f"{after} {visits} {what}"

    if rules.every_client and rules.buffer is not None:
        ends.append(f"when all have reported, {rules.buffer / rules.at_work(clients):g} times in the harmonic mean")
    elif rules.buffer is not None:
        ends.append(with_(rules.buffer, "arrivals"))
    if rules.enough is not None:
        ends.append(with_(rules.enough, "visits"))
    if isinstance(rules.bound, float):
        ends.append(f"after {rules.bound:g} s")
    elif rules.bound is not None:
        kinds = {"adaptive": "an adaptive deadline", "planned": "planned deadlines"}
        ends.append(f"by {kinds.get(str(rules.bound), 'a schedule of deadlines')}")
    if rules.scheduled:
        ends.append(f"as {rules.dispatch} says")
    if rules.by_arrivals:
        at_work, most = _at_work(job, ranks), rules.max_staleness
        old = "" if most is None else f", of {most} versions before at most"
        capped = ", one on each client rank" if at_work < rules.at_work(clients) else ""
        yield "closes", f"{' or '.join(ends)}, {at_work} clients being at work{capped}{old}"
        return
    parts = "steps count" if rules.by_steps else "layers count"
    under_way = "nothing counts" if job.planner.whole and not rules.by_steps else parts
    yield "closes", f"{' or '.join(ends)}; of visits under way {under_way}" if ends else "with the last visit"
    if job.config.participation.deadline == "planned":
        yield from contributed("planned deadlines")(job)


def _rounds(job: Job, ranks: int) -> Facts:
    """What the plans of the first rounds say; how fast real hardware is, nobody knows before."""
    speed, clock = job.config.speed, job.config.clock
    at_work = f"{_at_work(job, ranks)} at work" if job.config.rules.by_arrivals else ""
    if clock == "wall" and not speed.known(clock):
        first = job.planner.plan(job.planner.attempt(0))
        yield "cohort", at_work or f"{len(first.cohort)} invited"
        yield "layers", f"{first.layers}" + ("" if at_work else "; chances to reach them by a deadline are not known")
        yield "time", "real" + ("" if isnan(end := first.closes_after) else f", a first deadline of {end:.3g} s")
        return
    plans = _planned(job, min(PREVIEW, job.config.rounds), ranks)
    counted = sum(int(plan.counted.sum()) for plan in plans) / len(plans)
    came = {*chain.from_iterable(plan.cohort[plan.counted].tolist() for plan in plans)}
    never = sorted({*chain.from_iterable(plan.cohort.tolist() for plan in plans)} - came)
    layers = ", ".join(f"{chance:.3g}" for chance in plans[0].miss_probability)
    rounds = f"{len(plans)} rounds {'recorded' if speed.replays else 'drawn'}"
    sizes = [len(plan.cohort) for plan in plans]
    invited = f"{sizes[0]} invited"
    if min(sizes) < max(sizes):
        invited = f"{sum(sizes) / len(sizes):.1f} invited on average ({min(sizes)} to {max(sizes)})"
    yield "cohort", f"{at_work or invited}, {counted:.1f} counted on average ({rounds})"
    if never and job.config.rules.bound is not None and job.config.doubling.when == "never":
        who = listed((job.task.federation.names or range(job.config.clients))[client] for client in never)
        yield "never", f"no visit of {count_of(len(never), 'client')} counts in these rounds: {who}"
    known = f"chance that nobody reaches layer 1 … L: {layers}"
    if speed.persists:
        known += " (over all rounds, not given those before)"
    if isnan(plans[0].miss_probability[0]):
        known = "chances to reach them in time are not known"
    yield "layers", f"{plans[0].layers}" + ("" if at_work else f"; {known}")
    steps = plans[0].step_chances
    if steps is not None and (least := steps[steps > 0].min(initial=1.0)) < 1:
        yield "steps", f"the last of a visit's counts up to {1 / least:.3g} times, one over its chance"
    seconds, repeats = (sum(each) / len(plans) for each in zip(*((plan.duration, plan.repeats) for plan in plans)))
    attempts = f", {repeats:.3g} void attempts included" if repeats else ""
    yield "time", f"{seconds:.3g} simulated seconds per round{attempts}"
    if job.config.participation.deadline != "planned":  # the first rounds are no sample of the others
        yield "in all", _predicted(job, plans, ranks)


def _predicted(job: Job, plans: Sequence[Plan], ranks: int) -> str:
    """Return in words how long all rounds take, by this seed and by others."""
    rounds, planner = job.config.rounds, job.planner

    def seconds(plans: Sequence[Plan]) -> float:
        return sum(plan.duration for plan in plans) * rounds / len(plans)

    said = f"{seconds(plans):.4g} s for {rounds} round{'s' * (rounds > 1)}"
    if job.config.clock == "wall":
        said += " and what the machine itself takes"
    replayed = job.config.speed.replays or isinstance(job.config.speed, Counterfactual)
    if replayed or len(plans) * planner.clients > SHORT:
        return said
    others, some = list[float](), min(len(plans), THEIR_ROUNDS)
    for number in range(OTHER_SEEDS):
        seed = key_as_seed(job.config.seed, "prediction", number)
        times = planner.visit_times and replace(planner.visit_times, seed=seed)
        with suppress(RunError):  # of too few visits
            others.append(seconds(_planned(job, some, ranks, replace(planner, seed=seed, visit_times=times))))
    by = f"{len(others)} other seeds" + (f", reckoned from {some} rounds of each," if some < rounds else "")
    return f"{said}; by {by} {min(others):.4g} to {max(others):.4g} s" if others else said


def _sent(job: Job, ranks: int) -> Facts:
    """What theory has of a method's own steps, how participants double, what each visit sends, and what all costs."""
    config, limits = job.config, job.planner.stage_limits
    name = config.algorithm.name  # of one class only: others are not loaded
    if name in ("salf", "fedlrgd") and config.server.optimizer == "none":
        yield from contributed(f"bounds of {name}")(job)
    if limits:
        visits = ", ".join(str(job.planner.visits(number)) for number in range(len(limits) + 1))
        known = ", ".join(f"{rounds:g}" for rounds in limits) + " rounds"
        ends = known if limits[0] < inf else f"as long as {config.doubling.when} says"
        what = "visits" if config.doubling.by == "clients" else "visits' worth of samples"
        yield "stages", f"{visits} {what}; all but the last take {ends}"
    withheld = {job.algorithm.withholds(round_) for round_ in range(config.fragments.count)}
    parts = {*job.parts.tolist()}
    sizes = sorted({int(job.layers.sent(part, True, each).sum()) for part in parts for each in withheld})
    whole = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    yield "message", f"{whole} bytes per whole visit; {_reduced(job.layout)} bytes per reduction and rank"
    if job.iterated is not None:
        summed = _reduced(job.iterated.layout)
        yield "further sums", f"{summed} bytes each; {_kept(job)} bytes of each visit are held for them"
    if config.oracle.phi is None:
        return
    count = job.task.parameter_count
    share, phi = int(job.layers.numbers.sum()) / count, config.oracle.phi
    recorded = "" if config.oracle.record else "; not recorded, oracle.record being false"
    yield "oracle", f"p = {count}, φ = {phi:g}; {share:.4g} vectors of p numbers per whole visit{recorded}"
    timed = config.clock == "simulated" or config.times_known
    if timed and (found := contributed("oracle complexity")(job, _planned(job, min(PREVIEW, config.rounds), ranks))):
        yield "", found


def _planned(job: Job, rounds: int, ranks: int, planner: Planner | None = None) -> list[Plan]:
    """The plans of the first rounds; stages of doubling participant sets end only where that is known before."""
    planner = planner or job.planner
    stage, planned = planner.first_stage, list[Plan]()
    if planner.participation.by_arrivals:
        fewer = planner.participation.model_copy(update={"concurrency": _at_work(job, ranks)})
        planner = replace(planner, participation=fewer)
    plans = planner.plans(0, lambda: stage.number)
    for round_ in range(rounds):
        planned.append(next(plans))
        stage = planner.next_stage(round_, stage, -1.0)
    return planned


def _reduced(layout: Iterable[Mapping[str, Block]]) -> int:
    """Bytes of the exact sums of all blocks."""
    return sum(block.sum_bytes for group in layout for block in group.values())


def _largest(job: Job) -> tuple[int, int]:
    """Most clients of a chunk, and of a rank."""
    hosting = {chunk.rank for chunk in job.chunks}
    return job.chunk, max(sum(len(chunk.clients) for chunk in job.hosted(rank)) for rank in hosting)


def _warnings(job: Job) -> Facts:
    if foreign := [layer.name for layer in job.task.layers if layer.unbatched]:
        yield "note", f"{', '.join(foreign)}: torch's dropout runs client by client, hpcfl's does not"
    state = ServerState(job.algorithm.init_server(job.task), job.algorithm.init_extras(job.task))
    for kind, text in (job.warnings | job.algorithm.warnings(job.task, state)).items():
        yield "warning", f"{kind}: {text}"


def features(config: Config, known: tuple[Range, ...], federation: Federation) -> Facts:
    """Warn of clients whose training features are too large; say of how many clients that is known, if not of all."""
    ranges = known
    if not known:
        samples = (federation.train_sizes + federation.test_sizes).tolist()  # a client's are read together
        sizes = accumulate(4 * count * prod(shape) for count, shape in zip(samples, federation.shapes))
        some = map(federation.client, range(sum(size <= LOOKED_AT for size in sizes)))
        values = (client.train_features for client in some)
        ranges = tuple((float(np.min(each, initial=0)), float(np.max(each, initial=0))) for each in values)
    clients = f"{federation.clients} clients"
    looked_at = clients if len(ranges) == federation.clients else f"the first {len(ranges)} of {clients}"
    if text := too_large(ranges, looked_at, config.data):
        yield "warning", text
    elif looked_at != clients:
        yield "note", f"features: those of {looked_at} were looked at"


def _memory(job: Job, ranks: int, per_host: int) -> Facts:
    if job.config.clock == "wall":
        server, client = bounds(job, ranks, per_host)
        where = "of one host" if per_host >= ranks else f"with {per_host} on each host"
        lanes = f"{_lanes(job, ranks, per_host)} on {ranks} ranks {where}"
        if job.config.lane_width == TWO_LEVEL:
            to = "by way of" if job.config.participation.by_arrivals else "to"
            lanes += f", {to} leaders, of whom there are {len(_tree(job, ranks, per_host).nodes)}"
        yield "lanes", lanes
        states = 2 * _versions(job, ranks) * job.task.nbytes
        of_these = f" ({states / 1e6:.3g} of them for states in clients' hands, and copies)" if states else ""
        each = f"{server / 1e6:.3g} MB at the server{of_these}, {client / 1e6:.3g} MB per client rank"
        if job.config.lane_width == TWO_LEVEL:
            each += f", {(client + _leading(job, ranks, per_host)) / 1e6:.3g} MB on one that leads others"
        yield "memory", f"at most {each}, beside data, torch and MPI"
        return
    federation, (size, held) = job.task.federation, _largest(job)
    data = max(int(count) * prod(shape) * 4 for count, shape in zip(federation.train_sizes, federation.shapes))
    # parameters and gradients of a chunk, sums; personal state, data and kept blocks of the clients of a rank
    each_client = job.personal_bytes + data + _kept(job)
    states = _versions(job, ranks) * job.task.nbytes  # the server has all of them, a client rank those of its clients
    versions = min(states, held * job.task.nbytes)
    copies = job.task.nbytes + held * job.personal_bytes + versions  # of what a checkpoint is written from
    total = max(job.task.nbytes, _message(job)) * (3 * size + 6) + held * each_client + versions + copies
    of_these = f", {versions / 1e6:.3g} of them for states in clients' hands" if versions else ""
    of_these += f", {copies / 1e6:.3g} of them copies for checkpoints"
    at_server = f"; {2 * states / 1e6:.3g} MB at the server for such states, and copies" if states and ranks > 1 else ""
    yield "memory", f"about {total / 1e6:.3g} MB per client rank beside torch and MPI{of_these}{at_server}"


def _at_work(job: Job, ranks: int) -> int:
    """How many clients are at work at any time, where arrivals end rounds: in real time one of each rank at most."""
    most = job.config.rules.at_work(job.config.clients)
    return min(most, ranks - 1) if job.config.clock == "wall" else most


def _versions(job: Job, ranks: int) -> int:
    """The most states that clients have in their hands beside the newest, each being kept once."""
    rules = job.config.rules
    if not rules.by_arrivals:
        return 0
    old = inf if rules.max_staleness is None or not rules.stop_stale else rules.max_staleness + 1
    return int(min(_at_work(job, ranks), old))


def bounds(job: Job, ranks: int, per_host: int | None = None) -> tuple[int, int]:
    """Most bytes that rounds in real time take at the server and on a client rank; all on one host, or `per_host`.

    The server: one message per lane, or an exact sum (four times the message) where clients are computed in chunks, and
    the shared state, its successor and a copy on its way out; where ranks send several of them, exact running sums too;
    and what is held of each visit for further sums, or of visits that are to count alike; states in clients' hands;
    copies of these, of the shared state and of all personal state while a checkpoint is written. A client rank: four
    times the model, or the message where that is larger (the state served, the gradients or the model being trained,
    the change, and the buffers on their way out), all but the first for each client of a chunk, and two such sums; and
    twice the personal state of its clients, acknowledged and provisional. Over two levels the server has a sum per
    lane, twice a message as a rule, unless every visit arrives by itself.
    """
    message, (size, held) = _message(job), _largest(job)
    several = not job.together and max(len(job.hosted(rank)) for rank in range(1, ranks)) > 1
    each = 4 if size > 1 else 1
    copies = job.task.nbytes + job.config.clients * job.personal_bytes
    rules = job.config.participation
    alike = rules.slots(job.config.clients) if rules.every_client else 0
    held_there = (each * _lanes(job, ranks, per_host or ranks) + 3 + 4 * several + alike) * message
    if job.config.lane_width == TWO_LEVEL and not rules.by_arrivals:
        held_there = 3 * message + len(_tree(job, ranks, per_host or ranks).below(0)) * _reduced(job.layout)
    states = 2 * _versions(job, ranks) * job.task.nbytes
    server = held_there + job.config.clients * _kept(job) + states + copies
    return server, (1 + 3 * size + 8 * (size > 1)) * max(job.task.nbytes, message) + 2 * held * job.personal_bytes


def _leading(job: Job, ranks: int, per_host: int) -> int:
    """Most bytes that a rank takes for those that it leads.

    A message of each, or a sum of each leader below it, its own sum, and another state on its way down. What arrives
    one by one it passes on, as it does each state.
    """
    nodes, summed = _tree(job, ranks, per_host), _reduced(job.layout)
    if job.config.participation.by_arrivals:
        return (_message(job) + job.task.nbytes) * max(len(row) - 1 for row in nodes.nodes)
    message = (4 if _largest(job)[0] > 1 else 1) * _message(job)
    lanes = [summed if one.leads else message for rank in nodes.leaders for one in nodes.below(rank)]
    most = max(len(nodes.below(rank)) for rank in nodes.leaders)
    return max(lanes) * most + summed + job.task.nbytes


def _tree(job: Job, ranks: int, per_host: int) -> Tree:
    return tree(job.config.leaders, job.config.fan_out, [str(rank // per_host) for rank in range(ranks)])


def _kept(job: Job) -> int:
    return sum(block.bytes for block in job.keeps.values())


def _message(job: Job) -> int:
    return sum(block.bytes for group in job.layout for block in group.values())


def _lanes(job: Job, ranks: int, per_host: int) -> int:
    if job.config.lane_width == TWO_LEVEL:
        return ranks - 1 if job.config.participation.by_arrivals else len(_tree(job, ranks, per_host).below(0))
    hosts = [str(rank // per_host) for rank in range(ranks)]
    return len(lane_topologies(job.config.lane_width, hosts, job.chunks))
