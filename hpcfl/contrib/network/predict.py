"""What a round in real time would take on so many ranks, as far as messages go, by what was measured of a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcfl.base.errors import UsageError, count_of, refusal
from hpcfl.base.types import Ints
from hpcfl.config import Config
from hpcfl.contrib.network.measure import Network, read
from hpcfl.contrib.network.model import Layout, Load, Prediction, fits, layouts, predict, two_levels
from hpcfl.engine.job import Job
from hpcfl.mpi.placement import TWO_LEVEL, Topology, lane_topologies, limit
from hpcfl.realtime.orders import Command
from hpcfl.sums.frames import frame_formats
from hpcfl.sums.packing import Packing

SHORT: dict[int | str, str] = {1: "per rank", "node": "per node", "all": "one lane", TWO_LEVEL: "two levels"}
BUSY = 1.0
"""Load per core beyond which a measurement is doubted."""
NEAR = 1.1
"""Times as long as the fastest layout that a narrower one may take: lanes of fewer ranks wait for fewer others."""


@dataclass(frozen=True)
class Like:
    """So many ranks, `per_host` on each host, between which messages are as fast as in a `network`."""

    network: Network
    ranks: int
    per_host: int

    @classmethod
    def of(cls, file: Path, ranks: int | None, per_host: int | None) -> Like:
        """Read what was measured, for as many ranks per host as there were where nothing else is asked for.

        UsageError where the file is nothing of that kind, or says nothing of such ranks.
        """
        if ranks is None:
            raise UsageError("--like FILE predicts a round for so many ranks: expected --ranks N with it")
        if ranks < 2:
            raise refusal("--ranks", "at least 2 with --like, a server and client ranks", ranks, 2)
        network = read(file)
        like = cls(network, ranks, per_host or network.per_host)
        if ranks > like.per_host and network.costs.between is None:
            what = f"within one host, and {ranks} ranks are on {like.hosts[-1] + 1} hosts with {like.per_host} on each"
            raise UsageError(f"--like '{file}': was measured {what}; did you mean --per-host {ranks}?")
        if like.per_host > 1 and network.costs.within is None:
            what = f"with the server alone on its host, not with {like.per_host} ranks"
            raise UsageError(f"--like '{file}': was measured {what}; did you mean --per-host 1?")
        return like

    def check(self, config: Config) -> None:
        """Raise UsageError for a config of which nothing can be predicted."""
        if config.clock != "wall":
            raise refusal("--like predicts rounds in real time: clock", "'wall'", config.clock, "--set clock=wall")

    @property
    def hosts(self) -> list[int]:
        """Which host each rank is on."""
        return [rank // self.per_host for rank in range(self.ranks)]


def facts(job: Job, like: Like) -> Iterator[tuple[str, str]]:
    """Yield, line by line, what the messages of a round would cost in each layout, and which one to choose."""
    network, rules = like.network, job.config.rules
    hosts, measured = like.hosts[-1] + 1, len(network.hosts)
    there = f"{network.mpi}, measured {network.date} on {count_of(network.ranks, 'rank')}, {count_of(measured, 'host')}"
    yield "like", f"{there}; for {count_of(like.ranks, 'rank')}, {count_of(hosts, 'host')} of {like.per_host}"
    if network.load > BUSY:
        text = f"load {network.load:.1f} per core when it was measured, so figures tell of other work too"
        yield "warning", f"busy: {text}"
    if rules.by_arrivals:
        yield "a round", "not predicted: arrivals end rounds, whose visits overlap"
        return
    cohort, names = job.planner.attempt(0).cohort, [str(host) for host in like.hosts]
    alone = loaded(job, lane_topologies(1, names, job.chunks), cohort)
    each = f"{alone.state} bytes down and {alone.frame} up for each lane and turn"
    yield "a round", f"{count_of(len(cohort), 'visit')}, {each}, computing left out; no two parts overlap"
    predicted: list[tuple[Layout, Prediction]] = []
    leaders = [Layout(TWO_LEVEL, 1, 0, hosts, 1)] if hosts > 1 else []
    for layout in layouts(like.ranks, like.per_host, network.mpi) + leaders:
        name = SHORT.get(layout.width, f"lanes of {layout.width}")
        if refused := _refused(job, layout, network.mpi):
            yield name, refused
            continue
        if layout.width == TWO_LEVEL:
            seconds = two_levels(network.costs, like.ranks, like.per_host, alone, job.config.fan_out)
        else:
            lanes = lane_topologies(layout.width, names, job.chunks)
            active = taking_part(layout, lanes, cohort, like.hosts)
            seconds = predict(network.costs, active, loaded(job, lanes, cohort))
        predicted.append((layout, seconds))
        yield name, _told(seconds)
    yield from _choice(job, predicted)


def loaded(job: Job, lanes: Sequence[Topology], cohort: Ints) -> Load:
    """Return what a round with this cohort carries on the lanes that take part, at most."""
    busy = [(lane, turns) for lane in lanes if (turns := len(lane.turns(cohort, job.together)))]
    widest, most = max(len(lane.ranks) for lane, _ in busy), max(lane.most(job.together) for lane, _ in busy)
    sizes = [part for group in frame_formats(job.layout, widest, most) for part in group.sizes()]
    state = Packing(job.algorithm.init_server(job.task))
    command = Command.empty(max(len(lane.clients) for lane, _ in busy), job.config.clients)
    return Load(
        state.nbytes + command.nbytes,
        sum(size * dtype.itemsize for size, dtype in sizes),
        1 + len(state.parts),
        len(sizes),
        max(turns for _, turns in busy),
        sum(block.sum_bytes for group in job.layout for block in group.values()),
    )


def taking_part(layout: Layout, lanes: Sequence[Topology], cohort: Ints, hosts: Sequence[int]) -> Layout:
    """Return the same layout with the lanes alone that host anybody of a cohort."""
    busy = [lane for lane in lanes if lane.turns(cohort, together=True)]
    within = sum(hosts[lane.ranks[-1]] == 0 for lane in busy)
    between = len(busy) - within
    copies = -(-layout.per_host * between // max(1, layout.between))
    return replace(layout, within=within, between=between, per_host=copies)


def _refused(job: Job, layout: Layout, mpi: str) -> str:
    """Return why a run could not have these lanes, and what it could have; "" where it could."""
    shared = layout.ranks > 1 or (layout.width == TWO_LEVEL and not job.config.passes_singles)
    if job.config.singles and shared:
        return f"refused: {job.config.singles} single messages, which ranks that share a lane add up on the way"
    if fits(mpi, layout):
        return ""
    most = int(limit(mpi) * layout.lanes // layout.communicators)
    takes = f"{layout.lanes} lanes take {layout.communicators} communicators of the server"
    return f"not with {mpi}: {takes}, which can make {limit(mpi):g}, for {most} lanes"


def _choice(job: Job, predicted: Sequence[tuple[Layout, Prediction]]) -> Iterator[tuple[str, str]]:
    """Yield the layout to choose, and why."""
    if not predicted:
        yield "choose", "fewer ranks: none of these layouts is possible"
        return
    rules, fastest = job.config.rules, min(each.total for _, each in predicted)
    early = rules.enough is not None or rules.bound is not None
    near = [pair for pair in predicted if early or pair[1].total <= NEAR * fastest]
    layout, best = min(near, key=lambda pair: (pair[0].ranks, pair[1].total))
    why = "the narrowest lanes that take at most a tenth longer than the fastest"
    if early:
        why = "rounds close before the last visit, and ranks that share a lane wait for each other"
    yield "choose", f"lane_width = {layout.width!r}: {why}"
    if isinstance(rules.bound, float) and best.total > rules.bound:
        yield "warning", f"deadline: messages alone take {best.total:.3g} s of the {rules.bound:g} s of a round"


def _told(prediction: Prediction) -> str:
    parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in prediction.parts.items())
    return f"{prediction.total:.3g} s: {parts}; most: {prediction.bottleneck}"
