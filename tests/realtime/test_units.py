"""The parts of rounds in real time, one by one, without MPI."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import product
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.runs import job_in_real_time
from hpcfl.base.errors import UsageError
from hpcfl.engine.executor import Executor, Worker, acknowledgment
from hpcfl.engine.job import Job
from hpcfl.engine.pace import LayerSender, Pace, SumSender, WholeSender
from hpcfl.engine.record import Record
from hpcfl.engine.simulated import visit
from hpcfl.engine.uneven import drained
from hpcfl.learning.batches import Visits
from hpcfl.mpi.placement import Chunk, Topology, check_width, cut, lane_topologies
from hpcfl.realtime.orders import HEAD, Command, Op
from hpcfl.schedule.plan import Attempt, Timeline
from hpcfl.sums.frames import REJECTED, FrameFormat, StagedFrame, Staging, VisitFormats, frame_formats
from hpcfl.sums.guard import NO_GROUP, Sieve
from hpcfl.sums.message import Block, ExactSums

PATIENCE = 60.0  # seconds that a thread is given to end; no thread needs them

# ---- what is asked: Command


@pytest.mark.parametrize("clients", [1, 64, 65, 200])
@pytest.mark.parametrize("op", Op)
def test_calls_and_back(op: Op, clients: int) -> None:
    cohort = np.array([client for client in (0, 1, 62, 63, 64, 127, 128, 199) if client < clients])
    stopped, work = (0, (100, 7)) if op == Op.VISIT else (85, (0, 0))  # which share a place
    call = Command(op, 2**40, 3, 0.1, 6, stopped, False, counted=np.array([2, 0, 5]), cohort=cohort, work=work)
    packed = call.packed(3, clients)
    assert packed.dtype == np.int64
    assert len(packed) == len(Command.empty(3, clients)) == HEAD + 3 + -(-clients // 64)
    found = Command.unpacked(packed, 3)
    assert (found.op, found.round, found.attempt, found.closes_after, found.stage) == (op, 2**40, 3, 0.1, 6)
    assert (found.stopped, found.work, found.hard) == (stopped, work, False)
    assert found.counted.tolist() == [2, 0, 5]
    assert found.cohort.tolist() == cohort.tolist()


def test_calls_of_nothing() -> None:
    found = Command.unpacked(Command(Op.CLOSE, closes_after=inf, hard=True).packed(2, 130), 2)
    assert (found.op, found.round, found.closes_after, found.stopped, found.hard) == (Op.CLOSE, 0, inf, False, True)
    assert found.counted.tolist() == [0, 0]
    assert found.cohort.tolist() == []


@pytest.mark.parametrize("seed", range(5))
def test_any_cohort_and_back(seed: int) -> None:
    rng = np.random.default_rng(seed)
    clients = int(rng.integers(1, 300))
    cohort = np.flatnonzero(rng.random(clients) < 0.5)
    assert Command.unpacked(Command(Op.VISIT, cohort=cohort).packed(1, clients), 1).cohort.tolist() == cohort.tolist()


# ---- who is on which lane: Topology

HOSTS = ["a", "a", "b", "b", "a"]
HOSTED = ((0, 4), (1, 5), (2, 6), (3,))  # by ranks 1 … 4


def seated(width: int | str, hosts: Sequence[str] = HOSTS, clients: int = 7) -> list[Topology]:
    return lane_topologies(width, hosts, cut(1, np.ones(clients), len(hosts)))


@pytest.mark.parametrize(
    ("width", "ranks"),
    [
        (1, [(1,), (2,), (3,), (4,)]),
        (2, [(1, 2), (3, 4)]),
        (3, [(1, 2, 3), (4,)]),
        (4, [(1, 2, 3, 4)]),
        ("all", [(1, 2, 3, 4)]),
        ("node", [(1, 4), (2, 3)]),
        ("auto", [(1,), (2,), (3,), (4,)]),
    ],
)
def test_lanes_of_every_width(width: int | str, ranks: list[tuple[int, ...]]) -> None:
    found = seated(width)
    assert [topology.ranks for topology in found] == ranks
    for topology in found:
        assert topology.hosted == tuple(HOSTED[rank - 1] for rank in topology.ranks)


def test_a_server_alone_on_its_host_makes_no_lane() -> None:
    assert [topology.ranks for topology in seated("node", ["s", "x", "y", "x"])] == [(1, 3), (2,)]


@pytest.mark.parametrize(("ranks", "lanes"), [(64, 63), (65, 2)])
def test_many_ranks_share_the_lane_of_their_node(ranks: int, lanes: int) -> None:
    found = seated("auto", [f"host{rank // 33}" for rank in range(ranks)], clients=100)
    assert len(found) == lanes
    assert sorted(rank for topology in found for rank in topology.ranks) == list(range(1, ranks))
    assert sorted(client for topology in found for client in topology.clients) == list(range(100))


def test_turns_places_and_single_ranks() -> None:
    topology = seated(3)[0]
    assert topology.clients.tolist() == [0, 4, 1, 5, 2, 6]
    assert [topology.clients[topology.places(local_rank)].tolist() for local_rank in range(3)] == [
        [0, 4],
        [1, 5],
        [2, 6],
    ]
    assert topology.turns(np.arange(7), False) == [[[[0]], [[1]], [[2]]], [[[4]], [[5]], [[6]]]]
    assert topology.turns(np.array([2, 3, 4, 6]), False) == [[[[4]], [], [[2]]], [[], [], [[6]]]]
    assert topology.turns(np.array([3]), False) == []
    assert topology.single(1) == Topology((2,), (((1,), (5,)),))


def test_turns_of_chunks() -> None:
    """Fast clients first: those of a chunk are visited together, in the order of their ids."""
    (topology,) = lane_topologies("all", ["a"] * 3, cut(3, np.array([5.0, 4, 3, 2, 1, 0, 6, 7]), 3))
    assert topology.chunks == (((5, 4, 3), (6, 7)), ((2, 1, 0),))
    assert topology.hosted == ((5, 4, 3, 6, 7), (2, 1, 0))
    assert (topology.most(False), topology.most(True)) == (3, 5)
    assert topology.clients[topology.places(1)].tolist() == [2, 1, 0]
    assert topology.turns(np.arange(8), False) == [[[[3, 4, 5]], [[0, 1, 2]]], [[[6, 7]], []]]
    assert topology.turns(np.arange(8), True) == [[[[3, 4, 5], [6, 7]], [[0, 1, 2]]]]
    assert topology.turns(np.array([0, 2, 6]), False) == [[[[6]], [[0, 2]]]]
    assert topology.turns(np.array([6]), True) == [[[[6]], []]]
    assert topology.turns(np.array([], dtype=np.int64), True) == []
    assert topology.single(0) == Topology((1,), (((5, 4, 3), (6, 7)),))


@pytest.mark.parametrize(("width", "ranks"), [(1, 2), (3, 4), ("all", 2), ("node", 2), ("auto", 2)])
def test_widths_that_fit(width: int | str, ranks: int) -> None:
    check_width(width, ranks)


def test_widths_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match=r"lane_width: expected 1 … 3 .* got 4; did you mean 3\?$"):
        check_width(4, 4)
    with pytest.raises(UsageError, match=r"at least 2 ranks, got 1"):
        check_width("auto", 1)


# ---- when a round is over


@pytest.mark.parametrize(
    ("ends", "quorum", "arrived", "awaited", "seconds"),
    list(product((1.0, inf), (None, 3), (0, 2, 3, 4), (0, 1), (0.0, 0.999, 1.0, 2.0))),
)
def test_every_way_for_a_round_to_be_over(
    ends: float, quorum: int | None, arrived: int, awaited: int, seconds: float
) -> None:
    late = ends == 1.0 and seconds in (1.0, 2.0)
    plenty = quorum == 3 and arrived in (3, 4)
    attempt = Attempt(0, 7, np.ones(1), 0, 0, np.arange(7), ends, quorum)
    assert (seconds >= attempt.ends(arrived, seconds) or awaited == 0) == (late or plenty or awaited == 0)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"close": "all"}, (inf, None)),
        ({"close": "first", "first": 3}, (inf, 3)),
        ({"close": "deadline", "deadline": 0.25}, (0.25, None)),
        ({"close": "first", "first": 3, "deadline": 0.25}, (0.25, 3)),
        ({"close": "quorum", "quorum": 3, "grace": 0.5}, (inf, 3)),
    ],
)
def test_rules_by_name(keys: dict[str, Any], expected: tuple[float, int | None]) -> None:
    attempt = job_in_real_time(3, participation=keys).planner.attempt(0)
    assert (attempt.closes_after, attempt.quorum, attempt.grace) == (*expected, keys.get("grace", 0.0))


def test_a_grace_begins_when_the_quorum_is_there_and_ends_by_the_deadline() -> None:
    attempt = Attempt(0, 7, np.ones(1), 0, 0, np.arange(7), 2.0, 3, grace=0.5)
    assert [attempt.ends(arrived, 1.0) for arrived in (2, 3, 4)] == [2.0, 1.5, 1.5]
    assert attempt.ends(3, 1.75) == 2.0


# ---- the second thread: Worker


def taken(worker: Worker) -> list[Any]:
    """Everything that a piece of work puts."""
    found = []
    while worker.busy:
        if (item := worker.take(0.01)) is not None:
            found.append(item)
    return found


def test_results_come_in_their_order() -> None:
    worker = Worker()
    assert not worker.busy
    assert worker.take(0) is None
    for count in (3, 0, 5):
        worker.start(lambda put, count=count: [put(number) for number in range(1, count + 1)])
        assert worker.busy
        assert taken(worker) == list(range(1, count + 1))
        assert worker.take(0) is None


def test_results_are_there_before_the_work_has_ended() -> None:
    worker, go = Worker(), threading.Event()

    def work(put: Callable[[Any], None]) -> None:
        put("first")
        go.wait(PATIENCE)
        put("second")

    worker.start(work)
    assert worker.take(PATIENCE) == "first"
    assert worker.take(0.001) is None
    assert worker.busy  # nothing to take is not the end
    go.set()
    assert worker.take(PATIENCE) == "second"
    assert worker.take(PATIENCE) is None
    assert not worker.busy


@pytest.mark.parametrize("kind", [ArithmeticError, SystemExit, KeyboardInterrupt])
def test_what_the_work_raises_is_raised_where_it_is_awaited(kind: type[BaseException]) -> None:
    worker = Worker()

    def work(put: Callable[[Any], None]) -> None:
        put("before")
        raise kind("no luck")

    worker.start(work)
    assert worker.take(PATIENCE) == "before"
    with pytest.raises(kind, match="no luck"):
        worker.take(PATIENCE)
    assert not worker.busy
    worker.start(lambda put: put("after"))  # the thread lives on
    assert taken(worker) == ["after"]


# ---- how groups travel: FrameFormat, Staging, StagedFrame

LAYOUT = (
    {"loss": Block(())},
    {"b.weight": Block((2, 2)), "b.bias": Block((2,))},
    {"a.weight": Block((3,))},
)


@pytest.fixture(params=[2**20, 12], ids=["in the head", "large blocks apart"])
def _size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks of so many bytes travel by themselves."""
    monkeypatch.setattr("hpcfl.sums.frames.APART_BYTES", request.param)


def sealed(group: FrameFormat, local_rank: int, blocks: dict[str, tuple[Any, float]]) -> StagedFrame:
    """A group with these blocks in it."""
    staging = Staging(torch.device("cpu"))
    staged = staging.open(group)
    for name, (value, weight) in blocks.items():
        staging.write(staged, local_rank, name, torch.tensor(value), weight)
    group.sign(staged.parts, local_rank, 0.5 + local_rank)
    return staging.close(staged)


@pytest.mark.usefixtures("_size")
def test_a_rank_alone_sends_values_as_they_are() -> None:
    group = FrameFormat(LAYOUT[1], 1)
    found = sealed(group, 0, {"b.weight": ([[1.0, 2.0], [3.0, 4.0]], 3.0)})
    assert found.Test()
    assert (group.signs(found.parts)[0, :, 0] > 0).tolist() == [True]
    assert group.signs(found.parts)[1].tolist() == [[0.5]]
    assert group.value(found.parts, "b.weight").tolist() == [1.0, 2.0, 3.0, 4.0]
    assert group.weights(found.parts, "b.weight").tolist() == [3.0]
    assert group.value(found.parts, "b.bias").tolist() == [0.0, 0.0]
    assert group.weights(found.parts, "b.bias").tolist() == [0.0]


@pytest.mark.usefixtures("_size")
def test_sums_of_several_ranks_tell_them_apart() -> None:
    group = FrameFormat(LAYOUT[1], 3)
    first = sealed(group, 0, {"b.weight": ([[1.0, 2.0], [3.0, 4.0]], 2.0), "b.bias": ([1.0, 1.0], 2.0)})
    third = sealed(group, 2, {"b.bias": ([0.5, -1.0], 4.0)})
    frames = zip(group.zeros(), first.parts, Staging(torch.device("cpu")).nothing(group).parts, third.parts)
    summed = [torch.stack(parts).sum(0) for parts in frames]  # the server's own, and three ranks'
    assert (group.signs(summed)[0, :, 0] > 0).tolist() == [True, False, True]
    assert group.signs(summed)[1, :, 0].tolist() == [0.5, 0.0, 2.5]
    assert group.weights(summed, "b.weight").tolist() == [2.0, 0.0, 0.0]
    assert group.weights(summed, "b.bias").tolist() == [2.0, 0.0, 4.0]
    assert group.value(summed, "b.weight").tolist() == [2.0, 4.0, 6.0, 8.0]
    assert group.value(summed, "b.bias").tolist() == [4.0, -2.0]


@pytest.mark.parametrize("weight", [2.0**24 + 1, 10**14 + 1, 0.1])
def test_weights_are_told_to_48_bits(weight: float) -> None:
    group = FrameFormat(LAYOUT[0], 1)
    found = sealed(group, 0, {"loss": (1.0, weight)})
    assert group.weights(found.parts, "loss")[0] == pytest.approx(weight, rel=2.0**-47)
    assert weight == 0.1 or group.weights(found.parts, "loss")[0] == weight


@pytest.mark.usefixtures("_size")
def test_float64_blocks_keep_their_bits() -> None:
    group = FrameFormat({"h": Block((3,), torch.float64), "s": Block((1,), torch.float64)}, 1)
    values = {"h": ([0.1, 1e300, -1 / 3], 1.0), "s": ([1 / 7], 0.1)}
    tensors = {name: (torch.tensor(value, dtype=torch.float64), weight) for name, (value, weight) in values.items()}
    staging = Staging(torch.device("cpu"))
    staged = staging.open(group)
    for name, (value, weight) in tensors.items():
        staging.write(staged, 0, name, value, weight)
    for name, (value, weight) in tensors.items():
        assert torch.equal(group.value(staged.parts, name), value)
        assert group.weights(staged.parts, name).tolist() == [weight]


@pytest.mark.usefixtures("_size")
@pytest.mark.parametrize("ranks", [1, 2])
def test_of_chunks_exact_sums_travel(ranks: int) -> None:
    """Each visit signs at a place of its own, and nobody at that of a visit that is not there."""
    formats, put = frame_formats(LAYOUT, ranks, visits=4), []  # type: ignore[var-annotated]
    pace: Any = SimpleNamespace(over=threading.Event(), wait=lambda number: None, seconds=lambda: 0.25)
    sender = SumSender(formats, 0, Staging(torch.device("cpu")), pace, put.append)
    third, sums = torch.tensor(1 / 3), ExactSums(LAYOUT)  # float32
    for value, weight in (([[1.0, third], [-2.0, 0.5]], [3.0, 2.0]), ([[2.0**-30, 7.0]], [1.0])):
        message = {"b.bias": (torch.tensor(value), torch.tensor(weight, dtype=torch.float64))}
        sender.take(message)
        sender.end(np.full(len(value), NO_GROUP), [2**30 + 1, 7][: len(value)])
        sums.add(message)
    assert put == []
    sender.finish()
    assert len(put) == len(formats)
    group, parts = formats[1], put[1].parts
    assert {part.dtype for part in parts} == {torch.float64}
    assert [len(part) for part in parts] == [len(part) for part in group.zeros()]
    np.testing.assert_array_equal(group.bins(parts, "b.bias")[::-1].sum(0), sums.total("b.bias"))
    assert group.bins(parts, "b.bias").sum(0).tolist() == [-1.0 + 2.0**-30, 3 * third.double().item() + 8.0]
    assert not group.bins(parts, "b.weight").any()
    assert group.weights(parts, "b.bias").tolist() == [6.0, 0.0][:ranks]
    assert group.signs(parts)[0].tolist() == [[1.0, 1.0, 1.0, 0.0], [0.0] * 4][:ranks]
    assert group.signs(parts)[1, 0].tolist() == [0.25, 0.25, 0.25, 0.0]
    assert [group.gradients(parts, 0, place) for place in range(4)] == [2**30 + 1, 7, 2**30 + 1, 0]
    assert [len(part) for part in Staging(torch.device("cpu")).nothing(group).parts] == [len(part) for part in parts]


@pytest.mark.usefixtures("_size")
def test_frames_of_nothing_say_nothing_of_those_before() -> None:
    staging, group = Staging(torch.device("cpu")), FrameFormat(LAYOUT[1], 2)
    for _ in range(3):
        used = staging.open(group)
        staging.write(used, 1, "b.weight", torch.ones(2, 2), 7.0)
        group.sign(used.parts, 1, 1.0)
        assert group.value(used.parts, "b.weight").tolist() == [7.0] * 4
        assert all(int(part.count_nonzero()) == 0 for part in staging.nothing(group).parts)
    empty = staging.nothing(group)
    assert [len(part) for part in empty.parts] == [len(part) for part in group.zeros()]
    assert all(int(part.count_nonzero()) == 0 for part in empty.parts)


# ---- gathering a visit: Pace, LayerSender, WholeSender


def paced(enforce: str, seconds: float, over: threading.Event) -> Pace:
    """A visit of three groups, with a third, two thirds and all of its work done."""
    job: Any = SimpleNamespace(
        layers=SimpleNamespace(of_groups=np.array([3, 2, 1])),
        config=SimpleNamespace(speed=SimpleNamespace(enforce=enforce)),
    )
    drawn = Timeline.computing(np.array([seconds]), np.array([1.0, 2 / 3, 1 / 3]))
    return Pace(job, drawn, over, time.monotonic())


@pytest.mark.parametrize("enforce", ["sleep", "busy"])
def test_groups_are_ready_when_their_share_of_the_work_is_done(enforce: str) -> None:
    pace = paced(enforce, 0.06, threading.Event())
    for number, least in enumerate((0.02, 0.04, 0.06)):
        pace.wait(number)
        assert pace.seconds() >= least - 1e-6
    pace = paced(enforce, 0.0, threading.Event())
    pace.wait(2)  # as fast as it goes


def test_visits_begin_to_compute_once_they_have_what_they_begin_with_and_take_as_long_as_the_slowest() -> None:
    job: Any = SimpleNamespace(
        layers=SimpleNamespace(of_groups=np.array([2, 1])),
        config=SimpleNamespace(speed=SimpleNamespace(enforce="sleep")),
    )
    arrives = np.array([[0.05, 0.02], [0.04, 0.03]])
    drawn = Timeline(np.array([0.01, 0.0]), np.array([0.02, 0.03]), np.array([0.0, 0.015]), arrives)
    start = time.monotonic()
    pace = Pace(job, drawn, threading.Event(), start)
    assert [pace.done_at(share) - start for share in (0.0, 0.5, 1.0)] == pytest.approx([0.01, 0.025, 0.04])
    for number, least in enumerate((0.03, 0.05)):
        pace.wait(number)
        assert pace.seconds() >= least - 1e-6
    pace.stop()
    before = pace.seconds()
    pace.wait(1)
    assert pace.seconds() >= before + 0.014  # what is sent at the end still takes its time


@pytest.mark.parametrize("enforce", ["sleep", "busy"])
def test_no_visit_is_slowed_down_once_the_round_is_over(enforce: str) -> None:
    over = threading.Event()
    pace = paced(enforce, 1e6, over)
    slow = threading.Thread(target=pace.wait, args=(2,), daemon=True)
    slow.start()
    slow.join(0.05)
    assert slow.is_alive()
    over.set()
    slow.join(PATIENCE)
    assert not slow.is_alive()
    pace.wait(0)


class Visit:
    """A visit whose groups are looked at instead of sent."""

    def __init__(self, whole: bool = False, width: int = 1, local_rank: int = 0, device: str = "cpu") -> None:
        self.over, self.put, self.waits = threading.Event(), [], []  # type: ignore[var-annotated]
        self.formats, self.local_rank = frame_formats(LAYOUT, width), local_rank
        pace: Any = SimpleNamespace(over=self.over, wait=self.waits.append, seconds=lambda: 0.25)
        self.device, self.staging, self.messages = torch.device(device), Staging(torch.device(device)), []
        given = self.formats, local_rank, self.staging, pace, self.put.append
        self.sender = WholeSender(*given) if whole else LayerSender(*given)

    def finish(self) -> None:
        """End the visit."""
        if isinstance(self.sender, LayerSender):
            return self.sender.finish()
        sieve = Sieve(1, LAYOUT, whole=True)
        drained(sieve.through(each for each in self.messages), self.sender.take)
        self.sender.end(sieve.first, [0])
        return self.sender.finish()

    def take(self, **blocks: float) -> None:
        """Take blocks, all of whose entries are the same; their weight is 2."""
        shapes = {name: block.shape for group in LAYOUT for name, block in group.items()}
        message = {name.replace("_", "."): value for name, value in blocks.items()}
        weight = torch.tensor([2.0], dtype=torch.float64)
        values = {name: torch.full((1, *shapes[name]), value, device=self.device) for name, value in message.items()}
        message = {name: (value, weight) for name, value in values.items()}
        self.sender.take(message) if isinstance(self.sender, LayerSender) else self.messages.append(message)

    @property
    def found(self) -> list[dict[str, tuple[float, float]]]:
        """What has left, as ``{block: (value, weight)}``; not all entries alike: an error."""
        return [
            {name: (self.alike(group.value(sent.parts, name)), self.weight(group, sent, name)) for name in group.blocks}
            for group, sent in zip(self.formats, self.put)
        ]

    def alike(self, values: Any) -> float:
        (value,) = set(values.tolist())
        return float(value)

    def weight(self, group: FrameFormat, sent: StagedFrame, name: str) -> float:
        assert group.signs(sent.parts)[0, self.local_rank].tolist() == [1]
        return float(group.weights(sent.parts, name)[self.local_rank])


@pytest.mark.usefixtures("_size")
def test_a_group_leaves_when_all_of_it_is_there() -> None:
    visit = Visit()
    visit.take(loss=0.5)
    assert visit.found == [{"loss": (0.5, 2.0)}]
    visit.take(b_bias=1.0)
    assert len(visit.put) == 1
    visit.take(b_weight=3.0)
    assert visit.found[1] == {"b.weight": (3.0, 2.0), "b.bias": (1.0, 2.0)}
    visit.take(a_weight=4.0)
    visit.finish()
    assert visit.found[2] == {"a.weight": (4.0, 2.0)}
    assert visit.waits == [0, 1, 2]
    assert len(visit.put) == 3


@pytest.mark.usefixtures("_size")
def test_on_a_common_lane_values_are_weighted() -> None:
    visit = Visit(width=3, local_rank=1)
    visit.take(loss=0.5, b_bias=1.0, b_weight=3.0)
    assert visit.found == [{"loss": (1.0, 2.0)}, {"b.weight": (6.0, 2.0), "b.bias": (2.0, 2.0)}]
    assert visit.formats[1].weights(visit.put[1].parts, "b.bias").tolist() == [0.0, 2.0, 0.0]


@pytest.mark.usefixtures("_size")
def test_blocks_that_are_not_sent_weigh_nothing() -> None:
    visit = Visit()
    visit.take(b_weight=3.0, a_weight=4.0)  # no loss, no bias
    assert visit.found == [
        {"loss": (0.0, 0.0)},
        {"b.weight": (3.0, 2.0), "b.bias": (0.0, 0.0)},
        {"a.weight": (4.0, 2.0)},
    ]
    visit = Visit()
    visit.take(loss=1.0)
    visit.finish()
    assert [list(group.values()) for group in visit.found[1:]] == [[(0.0, 0.0), (0.0, 0.0)], [(0.0, 0.0)]]


def test_a_block_cannot_follow_its_group() -> None:
    visit = Visit()
    visit.take(loss=1.0, a_weight=1.0)
    with pytest.raises(ValueError, match=r"block 'b\.weight' comes after its group has left"):
        visit.take(b_weight=1.0)


def test_what_was_yielded_stays_as_it_is() -> None:
    visit = Visit()
    value = torch.ones(1, 3)
    visit.sender.take({"a.weight": (value, torch.ones(1))})
    value += 1
    with pytest.raises(ValueError, match=r"block 'a\.weight' was changed after it was yielded"):
        visit.finish()


def test_a_whole_visit_leaves_all_at_once() -> None:
    visit = Visit(whole=True)
    visit.take(loss=1.0, b_bias=2.0, b_weight=3.0)
    visit.take(a_weight=4.0)
    assert visit.put == []
    visit.finish()
    assert visit.waits == [0, 1, 2]
    assert [list(group) for group in visit.found] == [["loss"], ["b.weight", "b.bias"], ["a.weight"]]


@pytest.mark.parametrize("whole", [True, False])
def test_nothing_leaves_once_the_round_is_over(whole: bool) -> None:
    visit = Visit(whole)
    visit.take(loss=1.0)
    before = len(visit.put)
    visit.over.set()
    visit.take(b_bias=2.0, b_weight=3.0, a_weight=4.0)
    visit.finish()
    assert len(visit.put) == before == (0 if whole else 1)


# ---- the clients of a rank: Executor


@pytest.fixture(scope="module")
def salf() -> Job:
    return job_in_real_time(3)


def hosted(job: Job, rank: int) -> Executor:
    return Executor(job, job.hosted(rank), job.begin(rank).personal)


def told(depths: dict[int, int]) -> dict[int, int]:
    """What a rank hears of round 1: the first layer of each visit that counted, 0 where nothing is known."""
    return {client: acknowledgment(1, 0, depth) if depth else 0 for client, depth in depths.items()}


def visited(job: Job, executor: Executor, clients: list[int], over: threading.Event | None = None) -> list[StagedFrame]:
    put: list[StagedFrame] = []
    asked = job.planner.attempt(1)
    shared = job.algorithm.init_server(job.task)
    turns = [[[client]] if client >= 0 else [] for client in clients]
    executor.visits(asked, shared, turns, VisitFormats(job.layout, 1), 0, over or threading.Event(), put.append)
    return put


def test_visits_are_those_of_simulated_time(salf: Job) -> None:
    """To the bit, and so is the state that is kept, once it is acknowledged."""
    executor = hosted(salf, 1)
    clients = list(executor.states)
    assert clients == [0, 2, 4, 6]
    put = visited(salf, executor, [2, -1, 6])
    groups = frame_formats(salf.layout, 1)
    assert len(put) == 3 * len(groups)
    now, plan = salf.begin(1), salf.planner.plan(salf.planner.attempt(1))
    for place, client in ((0, 2), (2, 6)):
        sums = ExactSums(salf.layout)
        (chunk,) = [chunk for chunk in salf.hosted(1) if client in chunk.clients]
        assert visit(salf, plan, [chunk], now, sums) == 1
        for number, group in enumerate(groups):
            sent = put[place * len(groups) + number].parts
            for name in group.blocks:
                assert group.weights(sent, name).tolist() == [sums.weight(name)] == [1.0]
                assert torch.equal(group.value(sent, name).double(), sums.total(name).flatten())
    assert all((part == 0).all() for sent in put[len(groups) : 2 * len(groups)] for part in sent.parts)
    assert all((value == 0).all() for state in executor.personal().values() for value in state.values())
    executor.acknowledge(told({0: 0, 2: 1, 4: 0, 6: 1}))
    for client in (2, 6):
        (chunk,) = [chunk for chunk in salf.hosted(1) if client in chunk.clients]
        for name, value in now.personal[chunk.number].items():
            assert torch.equal(executor.states[client][name], value)
            assert value.abs().sum() > 0
    assert not any(value.any() for value in executor.states[0].values())
    shapes = {name: value.shape for name, value in salf.like(0).items()}
    states = executor.personal()
    assert len(states) == 4
    assert all({name: value.shape for name, value in state.items()} == shapes for state in states.values())


def test_a_chunk_sends_the_sums_of_simulated_time() -> None:
    """To the bit; a visit that is not finite counts for nothing, and the others do."""
    keys: dict[str, Any] = {"name": "fedavg", "momentum": 0.5, "persist_optimizer": True}
    job = job_in_real_time(2, algorithm=keys, batch_clients=4)
    executor, now, put = hosted(job, 1), job.begin(1), []  # type: ignore[var-annotated]
    groups = frame_formats(job.layout, 1, 4)
    assert [chunk.clients.tolist() for chunk in job.chunks] == [[0, 1, 2, 3], [4, 5, 6]]
    for state in (executor.states[0], now.personal[0]):
        next(iter(state.values()))[1] = float("nan")  # client 1's momentum
    attempt, shared = job.planner.attempt(1), job.algorithm.init_server(job.task)
    over = threading.Event()
    executor.visits(attempt, shared, [[[0, 1, 2, 3]], [[4, 5, 6]]], VisitFormats(job.layout, 1, 4), 0, over, put.append)
    assert len(put) == 2 * len(groups)
    for number, chunk in enumerate(job.chunks):
        sums, record = ExactSums(job.layout), Record.open()
        visit(job, job.planner.plan(attempt), [chunk], now, sums, None, record)
        assert list(record.rejected) == ([1] if number == 0 else [])
        for place, group in enumerate(groups):
            sent = put[number * len(groups) + place].parts
            for name in group.blocks:
                assert group.weights(sent, name).tolist() == [sums.weight(name)]
                np.testing.assert_array_equal(group.bins(sent, name)[::-1].sum(0), sums.total(name).flatten())
            bad = record.rejected[1].group if number == 0 else -1
            flags = [1.0, REJECTED if bad == place else 0.0, 1.0, 1.0] if number == 0 else [1.0, 1.0, 1.0, 0.0]
            assert group.signs(sent)[0, 0].tolist() == flags
    executor.acknowledge(told({0: 1, 1: 4, 2: 1, 3: 1, 4: 0, 5: 0, 6: 0}))
    for name, value in now.personal[0].items():
        assert torch.equal(executor.states[0][name].nan_to_num(), value.nan_to_num()), name
        assert not executor.states[1][name].any()


def test_nothing_of_a_chunk_leaves_where_its_round_closes() -> None:
    job, over, put = job_in_real_time(2, algorithm={"name": "fedavg"}, batch_clients=4), threading.Event(), []  # type: ignore[var-annotated]
    executor = hosted(job, 1)
    steps = job.task.batches

    def closing(visits: Visits, *given: Any, **more: Any) -> Any:
        for step, batch in enumerate(steps(visits, *given, **more)):
            if step == 1:
                over.set()
            yield batch

    job.task.batches = closing  # type: ignore[method-assign]
    turns = [[[0, 1, 2, 3], [4, 5, 6]]]
    attempt, shared = job.planner.attempt(1), job.algorithm.init_server(job.task)
    executor.visits(attempt, shared, turns, VisitFormats(job.layout, 1, 7), 0, over, put.append)
    assert over.is_set()
    assert put == []


def test_nobody_begins_a_visit_that_is_over(salf: Job) -> None:
    executor, over = hosted(salf, 2), threading.Event()
    over.set()
    assert visited(salf, executor, [1, 3], over) == []
    executor.acknowledge(told({1: 4, 3: 4, 5: 0}))
    assert all((value == 0).all() for state in executor.personal().values() for value in state.values())


def test_a_visit_ends_at_the_block_after_which_the_round_is_over(salf: Job) -> None:
    executor, over, put = hosted(salf, 1), threading.Event(), []  # type: ignore[var-annotated]

    def last(staged: StagedFrame) -> None:
        put.append(staged)
        if len(put) == 2:  # the loss and layer 3
            over.set()

    given = salf.planner.attempt(1), salf.algorithm.init_server(salf.task), [[[0]], [[2]]], VisitFormats(salf.layout, 1)
    executor.visits(*given, 0, over, last)
    assert len(put) == 2
    executor.acknowledge(told({0: 3, 2: 0, 4: 0, 6: 0}))
    advanced = [name for name, value in executor.states[0].items() if value.any()]
    assert advanced == list(salf.layout[1])


@pytest.mark.parametrize("last", [0, 1, 2, 3])
def test_what_has_left_as_a_whole_counts_though_the_round_closes_then(last: int) -> None:
    """Once one group has left all do; the state is there although the round was over before the visit's end."""
    job = job_in_real_time(3, algorithm={"name": "fedavg", "momentum": 0.9, "persist_optimizer": True})
    executor, over, put = hosted(job, 1), threading.Event(), []  # type: ignore[var-annotated]
    groups, shared = VisitFormats(job.layout, 1), job.algorithm.init_server(job.task)

    def close(staged: StagedFrame) -> None:
        if len(put) == last:
            over.set()
        put.append(staged)

    executor.visits(job.planner.attempt(1), shared, [[[0]], [[2]]], groups, 0, over, close)
    assert len(put) == len(groups.all) == 4
    executor.acknowledge(told({0: 1, 2: 0, 4: 0, 6: 0}))
    assert all(value.any() for value in executor.states[0].values())
    assert not any(value.any() for value in executor.states[2].values())


def holding(new: dict[str, float]) -> Executor:
    """A chunk of clients 5 and 3 with layers a (1) and b (2) and a count; of both visits the state is provisional."""
    job: Any = SimpleNamespace(
        layers=SimpleNamespace(of_state=lambda name: {"a": 1, "b": 2}.get(name, 1)),
        task=SimpleNamespace(device=torch.device("cpu")),
    )
    executor = Executor(job, [Chunk(7, np.array([5, 3]), 1)], {7: {name: torch.zeros(2) for name in new}})
    visits = Visits.for_test(0, np.array([3, 5]))
    executor._keep(visits, {name: torch.tensor([value, -1.0]) for name, value in new.items()})
    return executor


@pytest.mark.parametrize(
    ("depth", "advanced"), [(1, {"a", "b", "count"}), (2, {"b"}), (3, set()), (0, set())], ids=["1", "2", "3", "0"]
)
def test_state_advances_with_what_counted(depth: int, advanced: set[str]) -> None:
    """Blocks by themselves; names that are no block's with complete visits only."""
    executor = holding({"a": 1.0, "b": 2.0, "count": 3.0})
    executor.acknowledge({3: depth, 5: 0})
    own = {"a": 1.0, "b": 2.0, "count": 3.0}
    assert executor.personal()[3] == {name: value if name in advanced else 0.0 for name, value in own.items()}
    executor.acknowledge({3: 1})  # known by now, unless nothing was known before
    known = advanced if depth else own.keys()
    assert executor.personal()[3] == {name: value if name in known else 0.0 for name, value in own.items()}
    assert executor.personal()[5] == dict.fromkeys(own, 0.0)
    for other in (acknowledgment(0, 1, 1), acknowledgment(1, 0, 1)):  # of other visits
        executor.acknowledge({5: other})
        assert executor.personal()[5] == dict.fromkeys(own, 0.0)
    executor.acknowledge({5: 1})
    assert executor.personal()[5] == dict.fromkeys(own, -1.0)
