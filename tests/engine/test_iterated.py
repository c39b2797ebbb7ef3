"""Further sums over the messages that counted: the geometric median of what clients send, by Weiszfeld's iteration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from helpers.toys import Rounds, mlp_task, planned, same_bits
from hpcfl.algorithms import Algorithm, IteratedReduction
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.base.errors import UsageError
from hpcfl.base.rng import keyed
from hpcfl.config import from_table
from hpcfl.engine.iterated import blank, iterate, keep
from hpcfl.engine.job import Job, Progress
from hpcfl.engine.received import ReceivedSums, messages
from hpcfl.engine.record import Record
from hpcfl.engine.simulated import Simulated
from hpcfl.mpi.placement import Topology, check_single, cut
from hpcfl.mpi.transport import Transport
from hpcfl.sums.frames import frame_formats
from hpcfl.sums.message import Block
from hpcfl.sums.packing import APART_BYTES
from hpcfl.testing.runs import table
from realtime.test_sums import Messages

ITERATIONS = 4
SUMMED = 64 + 128 + 64  # bytes of one further sum: the weights, and per block three grids, in multiples of 64
POINT = Block((3,), torch.float64)


def point(round_: int, client: int) -> np.ndarray:
    return keyed(5, "points", round_, client).normal(size=3)


class Weiszfeld(IteratedReduction):
    kept = frozenset({"point"})
    layout = ({"pull": POINT}, {"inverse": Block((), torch.float64)})

    def query(self, shared):
        assert shared.keys() == {"centre"}
        centre = shared["centre"]
        for _ in range(ITERATIONS):
            sums = yield {"centre": centre}
            if not sums.weight("inverse"):
                return {"nobody": centre}
            centre = sums.total("pull") / sums.total("inverse")
        return {"centre": centre}

    def response(self, query, message):
        value, weight = message["point"]
        assert value.shape == (len(weight), 3)
        inverse = 1 / (value - query["centre"]).norm(dim=1)  # infinite at the first centre: where nothing was sent
        return {"pull": (value * inverse.unsqueeze(1), weight), "inverse": (inverse, weight)}


class Median(Algorithm):
    """Each client sends a point, weighted by its samples; the server moves to their geometric median."""

    name: Literal["median"] = "median"

    @property
    def iterates(self):
        return True

    def iterated_reduction(self, task):
        return Weiszfeld()

    def layers(self, task):
        return (("point",),)

    def layout(self, task):
        return ({"loss": Block(())}, {"point": POINT})

    def init_server(self, task):
        return {"centre": torch.zeros(3, dtype=torch.float64)}

    def client(self, task, shared, personal, visits):
        points = torch.from_numpy(np.stack([point(visits.round, int(client)) for client in visits.clients]))
        weight = visits.weights("samples")
        yield {"loss": (points.square().sum(1), weight)}
        yield {"point": (points, weight)}
        return personal

    def server(self, task, shared, sums):
        return shared | {"centre": sums.iterated.get("centre", shared["centre"])}


def weiszfeld(points: np.ndarray, weights: np.ndarray, centre: np.ndarray) -> np.ndarray:
    for _ in range(ITERATIONS):
        pull = weights / np.sqrt(((points - centre) ** 2).sum(1))
        centre = (pull[:, None] * points).sum(0) / pull.sum()
    return centre


SIZES = [5, 3, 8, 1, 2, 9, 4]


@pytest.mark.parametrize("per_chunk", [1, 3])
def test_the_median_of_what_counted_is_found(per_chunk: int) -> None:
    """Of clients 1 and 4 nothing counts in the first round; the second starts where the first ended."""
    rounds, centre = Rounds(Median(), mlp_task(SIZES), per_chunk), np.zeros(3)
    for round_, depth in enumerate(([1, 2, 1, 1, 2, 1, 1], [1] * 7)):
        counted = np.flatnonzero(np.array(depth) == 1)
        rounds.step(planned(depth, 1, round_))
        points = np.stack([point(round_, int(client)) for client in counted])
        centre = weiszfeld(points, np.array(SIZES, float)[counted], centre)
        np.testing.assert_allclose(rounds.state["centre"].numpy(), centre, rtol=1e-13, atol=0)


def test_where_nobody_counted_the_sums_have_weight_0() -> None:
    sums = Rounds(Median(), mlp_task(SIZES)).step(planned([2] * 7, 1))
    assert sums.iterated.keys() == {"nobody"}


def test_who_keeps_nothing_finds_nothing() -> None:
    rounds = Rounds(FedAvg(), mlp_task(SIZES))
    assert (rounds.job.keeps, rounds.job.iterated, rounds.job.algorithm.iterates) == ({}, None, False)
    assert rounds.step(planned([1] * 7, 3)).iterated == {}


def test_only_blocks_of_the_layout_are_kept() -> None:
    class Misspelt(Weiszfeld):
        kept = frozenset({"point", "pont"})

    class Wrong(Median):
        def iterated_reduction(self, task):
            return Misspelt()

    with pytest.raises(ValueError, match=r"\['pont'\] are no blocks"):
        Rounds(Wrong(), mlp_task(SIZES)).collect(planned([1] * 7, 1))


def test_what_was_not_sent_is_0_and_its_answers_do_not_matter() -> None:
    """Of four visits two send points, one says that its own is worth nothing, and one sends none."""
    sent = torch.arange(9.0).reshape(3, 3).t()  # float32, and not as rows lie in memory
    kept = blank({"point": POINT}, 4)
    keep({"loss": (torch.ones(4), torch.ones(4)), "point": (sent, torch.tensor([2.0, 0.0, 1.0]))}, kept)
    sent.zero_()  # what is kept is a copy
    value, weight = kept["point"]
    assert (value.dtype, value.tolist()) == (torch.float64, [[0, 3, 6], [0, 0, 0], [2, 5, 8], [0, 0, 0]])
    assert weight.tolist() == [2, 0, 1, 0]
    shared = {"centre": torch.zeros(3, dtype=torch.float64)}  # where an answer to nothing is infinite
    centre = iterate(Weiszfeld(), shared, [kept], lambda own: own)["centre"]
    expected = weiszfeld(np.array([[0.0, 3, 6], [2, 5, 8]]), np.array([2.0, 1.0]), np.zeros(3))
    np.testing.assert_allclose(centre.numpy(), expected, rtol=1e-13, atol=0)


# ---- any number of ranks


def in_step(ranks: int) -> Job:
    """Seven clients in chunks of two, of five invited the first four count."""
    config, task = from_table(table("fedavg", "mlp", True)), mlp_task(SIZES)
    chunks = cut(2, config.speed.paces(config.seed, 7), ranks)
    return Job(config, task, Median(), chunks)


def played(job: Job, transport: Any) -> tuple[list[dict[str, torch.Tensor]], Progress, list[tuple[int, int]]]:
    """What the server finds in each of three rounds, its state after them, and the bytes received and sent in each."""
    rounds, now = Simulated(job, transport, 0), job.begin(transport.rank)
    everything, moved = [], []
    for _ in range(3):
        record = Record.open()
        _, sums = rounds.exchange(now, record)
        if rounds.serves:
            now.shared = job.algorithm.server(job.task, now.shared, sums)
            everything.append(sums.iterated)
        now.round += 1
        moved.append(record.wire)
    return everything, now, moved


@pytest.mark.mpi
def test_any_number_of_ranks_finds_the_same_to_the_bit(world: Any) -> None:
    from hpcfl.mpi.collective import Collective

    alone, last, _ = played(in_step(1), Transport())
    assert all(each.keys() == {"centre"} for each in alone)
    if world.comm is None:
        return
    tree = Collective(world.comm)
    together, now, moved = played(in_step(world.size), tree)
    tree.leave()
    if world.rank == 0:
        assert all(same_bits(one, other) for one, other in zip(alone, together, strict=True))
        assert torch.equal(now.shared["centre"], last.shared["centre"])
    carried = ITERATIONS * SUMMED
    down, up = 8 * 3, 64 + 64 + 128  # the shared state; the sums of the round, weights, loss and points
    others = world.size - 1  # each has a copy, and the server gives and takes all of them
    own = ((up + carried) * others, (down + carried) * others) if world.rank == 0 else (down + carried, up + carried)
    assert moved == [own if others else (0, 0)] * 3


# ---- real time


def pending(visits: list[tuple[int, int]]) -> Any:
    """A pending of one lane: each rank has sent its client's point with a weight."""
    groups = frame_formats(Median().layout(None), len(visits))
    data = [group.zeros() for group in groups]
    for local_rank, (client, weight) in enumerate(visits):
        for group, frame in zip(groups, data):
            group.sign(frame, local_rank, 0.5)
        groups[1].weigh(data[1], local_rank, "point", weight)
        groups[1].value(data[1], "point").copy_(torch.from_numpy(point(0, client)))
    return Messages(groups, data)


def test_messages_that_the_server_holds_give_the_bits_of_simulated_time() -> None:
    """Clients 0 to 3 are in frames that were summed up and used again, of client 6 the point came too late."""
    task, shared, blocks = mlp_task(SIZES), Median().init_server(None), {"point": POINT}
    rounds = Rounds(Median(), task, 1)
    rounds.now.shared = shared
    expected = rounds.collect(planned([1] * 6 + [2], 1)).iterated
    copied = []
    for client in range(4):
        passing = pending([(client, SIZES[client])])
        copied += messages(passing, 2, blocks)
        for frame in passing.frames:
            frame[0].fill_(torch.nan)
    kept = [(pending([(client, SIZES[client])]), 2) for client in (5, 4)] + [(pending([(6, SIZES[6])]), 1)]
    held = ReceivedSums(Median().layout(None), 7, np.zeros(1), kept, None, copied)
    assert same_bits(iterate(Weiszfeld(), shared, held.messages(blocks), lambda own: own), expected)


def test_large_and_narrow_blocks_are_kept_as_they_were_sent() -> None:
    """A block that travels by itself, and one of single precision that travels with doubles."""
    layout = {
        "large": Block((2, APART_BYTES // 8), torch.float64),
        "narrow": Block((3,)),
        "double": Block((), torch.float64),
    }
    group = frame_formats((layout,), 1)[0]
    frame = group.zeros()
    group.weigh(frame, 0, "large", 1.0)
    group.weigh(frame, 0, "narrow", 123_457.0)
    group.value(frame, "large").copy_(torch.arange(APART_BYTES // 4))
    group.value(frame, "narrow").copy_(torch.tensor([0.1, 0.2, 0.3]))
    (found,) = messages(Messages([group], [frame]), 1, layout)  # type: ignore[arg-type]
    assert {name: (tuple(value.shape), value.dtype) for name, (value, _) in found.items()} == {
        name: ((1, *block.shape), block.dtype) for name, block in layout.items()
    }
    assert found["large"][0].flatten().tolist() == list(range(APART_BYTES // 4))
    assert torch.equal(found["narrow"][0], torch.tensor([[0.1, 0.2, 0.3]]))
    assert [weight.tolist() for _, weight in found.values()] == [[1.0], [123_457.0], [0.0]]


def in_real_time(**more: Any) -> Job:
    """Three clients, one by one."""
    values = table("fedavg", "mlp", False, clients=3, speed={"model": "none"}, clock="wall")
    config, task = from_table({**values, "participation": {"close": "all"}, **more}), mlp_task(SIZES[:3])
    return Job(config, task, Median(), cut(1, np.ones(3), 4))


def of_clients(points: list[tuple[int, float]]) -> np.ndarray:
    """The median where each client's point has its number in every entry, as `Rank` has it."""
    return weiszfeld(np.array([[client] * 3 for client, _ in points], float), np.array([w for _, w in points]), START)


START = np.array([0.3, 0.4, 0.5])


@pytest.mark.mpi
def test_void_and_late_visits_are_not_asked() -> None:
    """Client 1 alone is complete at first, which is too few; then 0 and 1 are, and the point of 2 is late."""
    from realtime.test_server import SOON, ranks_of, server_of

    job = in_real_time(participation=SOON)
    server = server_of(job, ranks_of(job, [[1, 2], [2, 2], [0, 1]]))
    now = Progress(5, {"centre": torch.from_numpy(START)}, {})
    record = Record.open()
    plan, sums = server.exchange(now, record)
    assert (plan.repeats, plan.depth.tolist()) == (1, [1, 1, 2])
    np.testing.assert_allclose(sums.iterated["centre"].numpy(), of_clients([(0, 1.0), (1, 1.0)]), rtol=1e-13)
    assert record.seconds.keys() == {"wait_seconds", "server_seconds"}


@pytest.mark.mpi
def test_what_a_rank_of_several_clients_sent_first_is_asked_too() -> None:
    """A lane uses its buffers again once visits are summed up."""
    from hpcfl.realtime.orders import Command, Op
    from hpcfl.realtime.outcome import RoundOutcome
    from realtime.test_server import look, ranks_of

    job = in_real_time()
    (rank,) = ranks_of(job, [[4]], [(0, 1)])
    outcome = RoundOutcome(job, job.planner.attempt(0, cohort=np.arange(3)), [rank.lane], 0.0)
    rank.lane.invite(Command(Op.VISIT, cohort=np.arange(3)), [])
    look(rank)
    outcome.sum_up(rank.lane)
    look(rank)
    outcome.finish(np.inf)
    held = outcome.sums(job.planner.plan(outcome.attempt))
    messages = held.messages(job.keeps)
    assert [each["point"][0].tolist() for each in messages] == [[[0.0] * 3], [[1.0] * 3]]
    assert held.total("point").tolist() == [1.0] * 3


@pytest.mark.mpi
def test_where_nobody_is_invited_the_sums_have_weight_0() -> None:
    from realtime.test_server import server_of

    class Quiet(Median):
        def invites(self, round):
            return False

    job = replace(in_real_time(), algorithm=Quiet())
    rounds, record = server_of(job, []), Record.open()
    _, sums = rounds.exchange(Progress(0, Median().init_server(job.task), {}), record)
    assert sums.iterated.keys() == {"nobody"}
    assert rounds.together(record, "") == ""
    assert record.by_rank[2].tolist() == [0.0]  # nobody was waited for


# ---- what is refused


@pytest.mark.parametrize("width", [2, "all"])
def test_lanes_of_several_ranks_are_refused_by_the_config(width: Any) -> None:
    config = from_table(table("fedavg", "mlp", False, clock="wall", lane_width=width, speed={"model": "none"}))
    config.check_values()
    asking = config.model_copy(update={"algorithm": Median()})
    with pytest.raises(UsageError, match=rf"^lane_width: .*'median'.* expected 1, got {width!r}; did you mean 1\?$"):
        asking.check_values()
    asking.model_copy(update={"lane_width": "auto"}).check_values()
    asking.model_copy(update={"clock": "simulated"}).check_values()


@pytest.mark.parametrize("width", ["auto", "node"])
def test_lanes_of_several_ranks_are_refused_once_they_are_known(width: str) -> None:
    check_single("median", width, [Topology((1,), (((0,),),)), Topology((2,), (((1,),),))])
    with pytest.raises(UsageError, match=rf"^lane_width: .* expected 1, got '{width}'; did you mean 1\?$"):
        check_single("median", width, [Topology((1,), (((0,),),)), Topology((2, 3), (((1,),), ((2,),)))])
