"""What a round in real time costs in messages: a model of times, in seconds, bytes and bytes per second.

A message of B bytes takes ``α + B/β`` (Hockney 1994: latency α, bandwidth β), and the server's thread is busy with it
for ``o`` seconds (the overhead of LogP, Culler et al. 1993), in which it can do nothing else. What differs between a
rank on the server's own host and one on another is a `Link` for each.

A lane of w client ranks is a binomial tree over w + 1 ranks (`hpcfl.mpi.launcher.TREES`): ``k = ⌈log₂(w + 1)⌉``
levels, and as many copies that the server itself sends or receives; w = 1 is one message from rank to rank. Over L such
lanes, of which each carries B bytes in m messages, one way takes

    k·α  +  L·k·m·o  +  max( k·B/β_rank,  c·B/β_host,  Σ_places L·k·B/β_server )

- ``k·α``: until the first message has gone through the tree.
- ``L·k·m·o``: the server's serial part for messages, however small.
- the largest of three for their bytes: what one rank moves, alone on its lane (β_rank = `alone`) or per level of a
  tree (`tree`); what one host moves, with c copies between it and the server; what the server moves, whose copies to
  its own host and to others are made by one thread and so are added.

Sums: the server adds up L frames of B bytes of each turn, ``turns·L·B/σ``. Looks: while it waits, the server asks after
all requests at once; a look over r requests takes ``a + b·r``. It looks at least three times after each sleep
(`hpcfl.mpi.waiting.STEPS`), and sleeps at least once for the state and for each turn: ``3·(1 + turns)·(a + b·r)``. What
the server's Python takes for each lane and turn beside all this, `lane`, is counted with the way down. So is `wake`:
ranks that wait for a round sleep between two looks, and the last of them to look holds it up.

Left out: computing, the server's step, what a sum costs however small it is, and that frames come while others still
compute; nothing overlaps here. The tree's inner ranks are taken to answer at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from hpcfl.mpi.placement import FAN_OUT, PER_LANE, limit

LOOKS = 3
"""Looks after each sleep; `hpcfl.mpi.waiting.STEPS`, which is not imported here because it loads MPI."""


Known = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, ge=1e-12, allow_inf_nan=False)]
"""What a document of such figures may say."""


@dataclass(frozen=True)
class Rates:
    """Bytes per second, from the server (`down`) and to it (`up`)."""

    down: Positive
    up: Positive


@dataclass(frozen=True)
class Link:
    """How the server reaches the ranks of one place: its own host, or the others.

    Attributes
    ----------
    latency : float
        Seconds that a message of a few bytes takes from one rank to the other.
    alone : Rates
        With one rank at a time.
    host : Rates
        With all ranks of one host at a time.
    server : Rates
        With all ranks of this place at a time.
    tree : Rates
        Per level of a binomial tree: broadcasts down, sums up.
    """

    latency: Known
    alone: Rates
    host: Rates
    server: Rates
    tree: Rates


@dataclass(frozen=True)
class Costs:
    """What was measured of a server and its ranks.

    Attributes
    ----------
    within, between : Link, optional
        To ranks on the server's host, and on others; None where there was none.
    sent, received : float
        Seconds of the server's thread per message.
    look, request : float
        Seconds of one look at no request, and what each one adds.
    sums : float
        Bytes per second at which the server adds up frames.
    lane : float
        Seconds of the server per lane and turn, beside messages; 0 where this was not measured.
    wake : float
        Seconds beside the latency until the last of all ranks, which sleep, has noticed a message; 0 likewise.
    """

    within: Link | None
    between: Link | None
    sent: Known
    received: Known
    look: Known
    request: Known
    sums: Positive
    lane: Known = 0.0
    wake: Known = 0.0


@dataclass(frozen=True)
class Load:
    """What a round carries for each lane.

    Attributes
    ----------
    state, frame : int
        Bytes of the shared state, and of what one turn of a lane's ranks sends.
    down, up : int
        Messages in which the state travels, its command included, and a frame.
    turns : int
        Turns per lane: the most visits of a rank, where it sends each by itself.
    summed : int
        Bytes of an exact sum of frames, as leaders would send it.
    """

    state: int
    frame: int
    down: int = 2
    up: int = 1
    turns: int = 1
    summed: int = 0


@dataclass(frozen=True)
class Layout:
    """How the client ranks are cut into lanes.

    Attributes
    ----------
    width : int or str
        `lane_width` in a config.
    ranks : int
        The most client ranks of a lane.
    within, between : int
        Lanes whose ranks are on the server's host, and those that reach others.
    per_host : int
        Copies of each message between the server and one other host.
    """

    width: int | str
    ranks: int
    within: int
    between: int
    per_host: int

    @property
    def lanes(self) -> int:
        return self.within + self.between

    @property
    def communicators(self) -> int:
        """How many the server needs for these lanes alone."""
        return self.lanes * PER_LANE if self.ranks > 1 else 0


@dataclass(frozen=True)
class Prediction:
    """Seconds of the parts of one round."""

    down: float
    up: float
    sums: float
    looks: float

    @property
    def parts(self) -> dict[str, float]:
        return {"state down": self.down, "frames up": self.up, "sums": self.sums, "looks": self.looks}

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def bottleneck(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=self.parts.__getitem__)


def levels(ranks: int) -> int:
    """Levels of a binomial tree from the server to so many client ranks, ``⌈log₂(ranks + 1)⌉``."""
    return ranks.bit_length()


def one_way(costs: Costs, layout: Layout, nbytes: float, messages: int, up: bool) -> float:
    """Seconds until every lane of a layout has carried so many bytes, in so many messages: down, or `up`."""
    k, overhead = levels(layout.ranks), costs.received if up else costs.sent
    latency, slowest, server = 0.0, 0.0, 0.0
    for lanes, copies, link in ((layout.within, 0, costs.within), (layout.between, layout.per_host, costs.between)):
        if lanes:
            assert link is not None, "a layout reaches a place that was not measured"
            latency = max(latency, link.latency)
            rank = k * nbytes / _rate(link.alone if layout.ranks == 1 else link.tree, up)
            slowest = max(slowest, rank, copies * nbytes / _rate(link.host, up))
            server += lanes * k * nbytes / _rate(link.server, up)
    return k * latency + layout.lanes * k * messages * overhead + max(slowest, server)


def predict(costs: Costs, layout: Layout, load: Load) -> Prediction:
    """Predict one round in which every lane takes part."""
    return Prediction(
        one_way(costs, layout, load.state, load.down, up=False) + layout.lanes * load.turns * costs.lane + costs.wake,
        load.turns * one_way(costs, layout, load.frame, load.up, up=True),
        load.turns * layout.lanes * load.frame / costs.sums,
        LOOKS * (1 + load.turns) * look_seconds(costs, layout.lanes * load.up),
    )


def look_seconds(costs: Costs, requests: int) -> float:
    """Seconds of one look at so many requests."""
    return costs.look + costs.request * requests


def layout(ranks: int, per_host: int, width: int | str) -> Layout:
    """Return how `ranks` ranks, rank 0 serving, are cut into lanes where each host has `per_host` of them.

    Numbered host by host, as launchers do: the server's host is the first one.
    """
    clients, here = ranks - 1, min(per_host, ranks) - 1
    away = clients - here
    other = min(per_host, away)  # ranks of another host
    if width == "node":
        return Layout("node", max(here, other), int(here > 0), -(-away // per_host), levels(other))
    if width == "all":
        return Layout("all", clients, int(not away), int(away > 0), min(1, away))
    lanes, step = -(-clients // int(width)), int(width)
    within = here // step if away else lanes
    return Layout(step, step, within, lanes - within, levels(step) * -(-other // step))


def fits(mpi: str, layout: Layout) -> bool:
    """Whether a process of the MPI of this name has communicators enough for a layout."""
    return layout.communicators <= limit(mpi)


def layouts(ranks: int, per_host: int, mpi: str = "") -> list[Layout]:
    """Return the layouts to choose from: a lane per rank, lanes per node, all in one lane.

    Where the MPI has too few communicators for one of them, the narrowest lanes for which it has enough are another.
    """
    found = [layout(ranks, per_host, width) for width in (1, "node", "all")]
    if not all(fits(mpi, each) for each in found):
        narrowest = -(-(ranks - 1) // int(limit(mpi) // PER_LANE))
        found.insert(2, layout(ranks, per_host, max(2, narrowest)))
    return found


def two_levels(costs: Costs, ranks: int, per_host: int, load: Load, fan_out: int = FAN_OUT) -> Prediction:
    """Predict one round over two levels: a leader per host sums its ranks' frames, leaders are a tree to the server.

    Every leader is taken to be as fast as the server: it has a lane per rank of its host, adds up their frames, and
    sends one exact sum on, to the leader above it, which adds up those of at most `fan_out` leaders. State and sums are
    stored and sent on at each of the tree's levels.
    """
    hosts = -(-ranks // per_host)
    children = min(fan_out, hosts - 1)
    depth = 0
    while sum(fan_out**level for level in range(1, depth + 1)) < hosts - 1:
        depth += 1
    inside, above = layout(min(per_host, ranks), ranks, 1), Layout(1, 1, 0, children, 1)
    down = one_way(costs, inside, load.state, load.down, up=False) + (1 + depth) * costs.wake  # leaders sleep too
    down += depth * one_way(costs, above, load.state, load.down, up=False)
    up = one_way(costs, inside, load.frame, load.up, up=True) * load.turns
    up += depth * one_way(costs, above, load.summed, load.up, up=True)
    sums = load.turns * (inside.lanes + (depth > 0)) * load.frame / costs.sums  # a leader's own frame too
    sums += depth * children * load.summed / costs.sums
    looks = LOOKS * (1 + load.turns + 2 * depth) * look_seconds(costs, max(inside.lanes, children) * load.up)
    return Prediction(down, up, sums, looks)


def _rate(rates: Rates, up: bool) -> float:
    return rates.up if up else rates.down
