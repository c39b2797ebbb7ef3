"""Rounds with ten thousand ranks and more, over a network that is none: what the server says and hears in a round.

    .venv/bin/python benchmarks/simulated_ranks.py --ranks 10000 --rounds 20
    .venv/bin/python benchmarks/simulated_ranks.py --ranks 10000 --rounds 20 --leaders 100 --fan-out 32

The server and all ranks that lead others are those of any run, each a coroutine of `hpcfl.testing.network`. All others
are puppets: no coroutine and no torch, but the same messages (visit, state, frames, closing, leaving). A share of
them is killed, suspended or has a slow link; puppets do not lead, so no leader is among these. Each layer that a client
sends is full of its number, so each sum is known, and every killed rank and nobody else has to be lost. A look takes
`--look` microseconds per lane, on the network's clock too: so long those who have looked wait at least. Memory that is
given to MPI twice is not looked for here: that takes the square of the ranks.

Prints one JSON line last: messages and bytes of the server per round, and of the leader with the most, late_ms (from
the deadline to the end of the round, on the network's clock), and seconds of this machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from hpcfl.algorithms.base import Algorithm, Block, Client, Layout, State, Task, Visits
from hpcfl.config import from_table
from hpcfl.engine.job import Job
from hpcfl.mpi.channel import Connected, direct
from hpcfl.mpi.placement import tree
from hpcfl.realtime import start
from hpcfl.realtime.orders import HEAD, Command, Op
from hpcfl.sums.frames import FrameFormat, frame_formats
from hpcfl.sums.packing import Packing
from hpcfl.testing.network import Comm, Network, Process, Request, Violation, in_place

LAYERS, ENTRIES = 2, 4
DEADLINE = 0.5  # seconds
FAULTS = ("kill", "freeze", "slow")


class Numbers(Algorithm):
    """Layers full of the client's number."""

    name: Literal["numbers"] = "numbers"
    layerwise: ClassVar[bool] = True

    def layers(self, task: Task) -> tuple[tuple[str, ...], ...]:
        """Return the names of the layers."""
        return tuple((f"layer {number}",) for number in range(1, LAYERS + 1))

    def layout(self, task: Task) -> Layout:
        """Return one group per layer, last layer first."""
        return tuple({name: Block((ENTRIES,))} for (name,) in reversed(self.layers(task)))

    def init_server(self, task: Task) -> State:
        """Return zeros."""
        return {name: torch.zeros(ENTRIES) for (name,) in self.layers(task)}

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        """Send the layers, last layer first."""
        numbers = torch.from_numpy(visits.clients + 1.0).float()[:, None].expand(-1, ENTRIES).contiguous()
        for (name,) in reversed(self.layers(task)):
            yield {name: (numbers, visits.ones(len(numbers)))}
        return {}


class Rarely(Network):
    """A network on which who looks takes a while for it, and puppets have no thread."""

    def __init__(self, looks: dict[int, float], *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.looks, self.puppets = looks, dict[int, Puppet]()
        self._looked: dict[int, float] = {}
        self._stirred: dict[Process, int] = {}
        self.messages, self.bytes = Counter[int](), Counter[int]()  # of each rank that leads, the server among them

    def send(self, key: tuple[Any, ...], data: Any) -> Request:
        for rank in self.looks.keys() & key[1:3]:
            self.messages[rank] += 1
            self.bytes[rank] += data.nbytes
        return super().send(key, data)

    def stir(self, rank: int) -> None:
        if (puppet := self.puppets.get(rank)) is not None:
            self.at(self.now, puppet.look)
            return
        for process in self._processes[rank]:
            if process.due < inf and self._stirred.get(process) != process.turn:
                self._stirred[process] = process.turn
                self.at(self._looked.get(rank, 0.0) + self.looks[rank], process, process.turn)

    def wait(self, seconds: float, wake: bool = True) -> bool:
        return super().wait(max(seconds, self.looks[self.current]) if wake else seconds, wake)

    def _take_turn(self, process: Process) -> None:
        self._looked[process.rank] = self.now
        super()._take_turn(process)

    def _take(self, request: Request) -> None:
        pass

    def _release(self, request: Request) -> None:
        pass

    def thaws(self, rank: int) -> float:
        """Return when a rank goes on."""
        return self._frozen.get(rank, 0.0)


class Puppet:
    """A client rank that leads nobody, alone on its lane, with one client."""

    def __init__(self, network: Rarely, job: Job, comm: Comm, parent: int, seconds: float) -> None:
        self.network, self.rank, self.seconds = network, comm.me, seconds
        self.control, self.data = direct(comm, parent, leads=False)  # type: ignore[arg-type]
        self.command = Command.empty(1, job.config.clients)
        self.templates, packing = heads(job.layout), Packing(job.algorithm.init_server(job.task))
        self.client = float(comm.me)
        self.state = [np.zeros(len(part), dtype=np.uint8) for part in packing.received(packing.zeros())]
        self.held, self._steps = 0, self._run()
        self._requests: Sequence[Request] = ()
        self._due, self._ends = inf, False
        network.puppets[self.rank] = self
        network.at(0.0, self._go)

    def look(self) -> None:
        """Go on if what is awaited has come."""
        if self.rank in self.network.dead:
            return
        if self.network.now < (thaw := self.network.thaws(self.rank)):
            self.network.at(thaw, self.look)
            return
        heard = self._ends and all(each.done for each in self._heard)
        if heard or self.network.now >= self._due or all(each.done for each in self._requests):
            self._go()

    def _go(self) -> None:
        self._requests, self._due, self._ends = next(self._steps, ((), inf, False))
        if self._due < inf:
            self.network.at(self._due, self.look)
        elif self._requests and all(each.done for each in self._requests):
            self.network.at(self.network.now, self.look)
        elif not self._requests:
            self.network.puppets[self.rank] = GONE  # type: ignore[assignment]

    def _run(self) -> Iterator[tuple[Sequence[Request], float, bool]]:
        """Yield requests that are awaited, until when, and whether a command ends that."""
        arrival = np.zeros((2, 1), dtype=np.int64)
        yield self.control.agree(*arrival), inf, False
        while True:
            self._heard = self.control.down(self.command)
            yield self._heard, inf, False
            op = int(self.command[0])
            if op == Op.VISIT:
                posted = 0
            while op == Op.VISIT:
                state = int(self.command[HEAD - 1])
                if not state or state != self.held:
                    self.held = state
                    yield [each for part in self.state for each in self.data.down(part)], inf, False
                begun, posted = self.network.now, 0
                self._heard = self.control.down(self.command)
                for number in range(len(self.templates)):
                    due = begun + self.seconds * (number + 1) / len(self.templates)
                    yield [NEVER], max(due, self.network.now), True
                    if all(each.done for each in self._heard):
                        break
                    self._post(number, self.network.now - begun)
                    posted += 1
                yield self._heard, inf, False
                op = int(self.command[0])
            if op == Op.CLOSE:
                own, found = np.array([posted], dtype=np.int64), np.zeros(1, dtype=np.int64)
                yield self.control.agree(own, found), inf, False
                for number in range(posted, max(posted, int(found[0]))):
                    self._post(number, 0.0, flag=0.0)
                yield self.control.meet(), inf, False
            elif op == Op.LEAVE:
                yield self.data.meet(), inf, False
                return
            else:
                raise Violation(f"a puppet cannot {Op(op).name}")

    def _post(self, number: int, seconds: float, flag: float = 1.0) -> None:
        head, values = self.templates[number]
        head = head * flag
        head[1] = seconds
        head[values] = flag * self.client
        self.data.summed(head)


NEVER, GONE = Request(-1), SimpleNamespace(look=lambda: None)


def heads(layout: Layout) -> list[tuple[Any, slice]]:
    """Return the head of each group as a client alone on its lane signs it, and where its values are."""
    return list(map(head, frame_formats(layout, 1)))


def head(group: FrameFormat) -> tuple[Any, slice]:
    """Return one of these."""
    frame, (name,) = group.zeros(), group.blocks
    group.sign(frame, 0, 0.0)
    group.weigh(frame, 0, name, 1.0)
    return frame[0].numpy(), group.small[name]


@cache
def job_of(ranks: int, leaders: int, fan_out: int) -> Job:
    """Return a job of one client per rank."""
    table: dict[str, Any] = {
        **{"clock": "wall", "clients": ranks - 1, "rounds": 1, "threads": 1},
        **{"data": {"name": "unit_cube", "samples": 1, "test_samples": 0}, "model": {"name": "mlp", "hidden": [2]}},
        **{"algorithm": {"name": "salf", "missing": "none"}, "lane_width": "two-level" if leaders else 1},
        **{"participation": {"close": "deadline", "deadline": DEADLINE}},
    }
    if leaders:
        table |= {"leaders": leaders, "fan_out": fan_out}
    return replace(Job.of(from_table(table), None, ranks), algorithm=Numbers())


def play(asked: argparse.Namespace) -> dict[str, Any]:
    """Play the rounds of a job; return what was measured."""
    began, rng = time.perf_counter(), np.random.default_rng(asked.seed)
    job, ranks = job_of(asked.ranks, asked.leaders, asked.fan_out), asked.ranks
    hosts = ["h"] * ranks
    nodes = tree(asked.leaders, asked.fan_out, hosts) if asked.leaders else None
    below = {rank: len(nodes.below(rank)) if nodes else 0 for rank in range(1, ranks)}
    leads = {rank for rank in below if below[rank]}
    below[0] = len(nodes.below(0)) if nodes else ranks - 1
    looks = {rank: asked.look / 1e6 * below[rank] for rank in (0, *leads)}
    network = Rarely(looks, ranks, asked.seed, skew=0.0, failures=True)
    plain = [rank for rank in range(1, ranks) if rank not in leads]
    chosen = rng.permutation(plain)[: round(asked.faulty * ranks)].tolist()
    struck = {fault: chosen[place :: len(FAULTS)] for place, fault in enumerate(FAULTS)}
    found: dict[str, Any] = {"ranks": ranks, "rounds": asked.rounds, "leaders": len(leads), "faulty": len(chosen)}
    found["lanes"] = below[0]
    over: list[int] = []

    def comm(rank: int) -> Any:
        made = Comm(network, "shared", (), rank)
        made.members = range(ranks)  # type: ignore[assignment]
        return made

    def lead(rank: int) -> None:
        start.serve(job, comm(rank), hosts, job.begin(rank), lambda: None, connected=Connected({}, [comm(rank)]))

    def serve() -> None:
        own = comm(0)
        lanes = {} if nodes else {rank - 1: direct(own, rank, leads=True) for rank in range(1, ranks)}
        stop, connected = SimpleNamespace(requested=lambda: ""), Connected(lanes, [own])
        server = start.lead(job, own, hosts, Path("/nowhere"), stop, job.begin(0), connected=connected)  # type: ignore[arg-type]
        late, counted = [], 0
        found["started_s"] = round(time.perf_counter() - began, 1)
        first, messages, nbytes = network.now, Counter(network.messages), Counter(network.bytes)
        for fault, those in struck.items():
            for rank in those:
                when = first + float(rng.uniform(0, asked.rounds * DEADLINE))
                network.at(when, lambda fault=fault, rank=rank: befall(network, fault, rank))  # type: ignore[misc]
        for number in range(asked.rounds):
            shared = {name: value + number for name, value in job.begin(0).shared.items()}
            plan, sums = server.run_round(number, shared)
            late.append(1000 * (plan.duration - DEADLINE))
            counted += check(plan, sums)
        for what, now, before in (("messages", network.messages, messages), ("bytes", network.bytes, nbytes)):
            per_round = {rank: round((now[rank] - before[rank]) / asked.rounds) for rank in looks}
            found[f"{what}_per_round"] = per_round.pop(0)
            found[f"leaders_{what}_per_round"] = max(per_round.values(), default=0)
        found["late_ms"] = {"median": round(median(late), 1), "worst": round(max(late), 1)}
        found["counted"] = round(counted / asked.rounds)
        server.lanes.wait_for_all(60.0)
        missing, _ = server.leave(asked.rounds, 0, True)
        lost = sorted(server.lanes.lost)
        if lost != sorted(struck["kill"]) or missing:
            raise Violation(f"lost: {lost}, killed: {sorted(struck['kill'])}, missing: {missing}")
        over.append(0)

    with in_place(network):
        network.spawn(0, serve)
        for rank in leads:
            network.spawn(rank, lambda rank=rank: lead(rank))  # type: ignore[misc]
        for rank in plain:
            parent = nodes.above(rank)[0] if nodes else 0
            Puppet(network, job, comm(rank), parent, float(rng.uniform(0.2, 0.9)) * DEADLINE)
        network.run(lambda: bool(over), 600.0)
    return found | {"events": network.events, "seconds": round(time.perf_counter() - began, 1)}


def befall(network: Network, fault: str, rank: int) -> None:
    """Let something befall a rank."""
    if fault == "kill":
        network.kill(rank)
    else:
        getattr(network, fault)(rank, {"freeze": 2.0, "slow": 1e4}[fault])


def check(plan: Any, sums: Any) -> int:
    """Raise Violation where the sums are not those of the visits that counted; return how many these are."""
    for layer in range(1, LAYERS + 1):
        counted = plan.cohort[plan.depth <= layer]
        total = sums.total(f"layer {layer}")
        if not bool((total == float((counted + 1).sum())).all()):
            raise Violation(f"round {plan.round}: another sum of layer {layer}: {total}")
    return int((plan.depth <= 1).sum())


def main() -> None:
    """Play what is asked for and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--faulty", type=float, default=0.01, help="share of the ranks")
    parser.add_argument("--leaders", type=int, default=0, help="0: flat lanes")
    parser.add_argument("--fan-out", type=int, default=32, help="how many leaders the server speaks with")
    parser.add_argument("--look", type=float, default=5.0, help="microseconds per lane")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(vars(asked) | play(asked)))


if __name__ == "__main__":
    main()
