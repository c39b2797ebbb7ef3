"""Decoupled DiLoCo against a loop from the paper, and what it comes to where it is DiLoCo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hpcfl
from hpcfl.algorithms.base import Block
from hpcfl.algorithms.decoupled_diloco import Merge
from hpcfl.config import load
from hpcfl.engine.iterated import iterate
from hpcfl.engine.job import Job
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.plan import Fate
from hpcfl.testing.played import Played
from judges import arrivals, decoupled, fragments, world
from judges.decoupled import mean, radial, vector, weight
from judges.server import Momentum
from judges.steps import Adam

AGAIN, STEPS = 2**16, 3
EXAMPLES = Path(__file__).parents[2] / "examples"
PACES = np.array([0.9, 3.5, 1.7, 0.4, 2.6, 5.3])
INNER: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3, "betas": [0.9, 0.95], "batch": world.BATCH, "steps": STEPS}
NESTEROV: dict[str, Any] = {"optimizer": "nesterov", "lr": 0.7, "betas": [0.9]}


def batches(version: int, client: int, number: int) -> list[Tensor]:
    return world.batches(version, client, steps=STEPS, phase=AGAIN * number)


def judged(found: world.Outcome, count: int, keys: dict[str, Any]) -> None:
    parts = fragments.dealt({name: value.numel() for name, value in world.start().items()}, count)
    by = keys.get("weights", "tokens")
    depth = arrivals.depths(found.rows)
    w, workers = decoupled.decoupled(
        *(world.start(), world.clients(), arrivals.trace(found.rows)),
        *(lambda now, visit: depth[visit] == 1, batches, parts),
        lambda: Adam(0.02, (0.9, 0.95), decay=0.3, decoupled=True),
        lambda i, tokens, steps: {"tokens": weight(tokens, steps), "samples": world.SIZES[i], "uniform": 1.0}[by],
        *(lambda name: radial if keys.get("merge") != "mean" else mean, Momentum(0.7, 0.9, nesterov=True)),
    )
    world.near(found.shared, w)
    for worker, own in zip(workers, found.personal):
        for name in w:
            world.equal(own[f"own:{name}"], worker.own[name], name)
            world.equal(own[f"steps:{name}"], worker.steps[name], name)
            world.equal(own[f"samples:{name}"], worker.tokens[name], name)
            world.equal(own[f"m {name}"], worker.optimiser.m[name], name)


@pytest.mark.parametrize("oldest", [None, 0])
@pytest.mark.parametrize(
    ("count", "chunk", "keys"),
    [
        (3, 4, {}),
        (2, 1, {"merge": "mean"}),
        (1, 4, {"weights": "samples"}),
        (3, 4, {"weights": "uniform", "merge": "mean"}),
    ],
)
def test_arrivals(tmp_path: Path, count: int, chunk: int, keys: dict[str, Any], oldest: int | None) -> None:
    """With a bound of 0 who is late does not count, and goes on from where it stands."""
    rules: dict[str, Any] = {"close": "arrivals", "buffer": 2, "grace": 0.5}
    found = world.play(
        tmp_path,
        rounds=14,
        batch_clients=chunk,
        algorithm={"name": "decoupled_diloco", **INNER, **keys},
        participation=rules | ({} if oldest is None else {"max_staleness": oldest}),
        server=NESTEROV,
        fragments={"count": count},
        speed=PACES,
    )
    depth = set(arrivals.depths(found.rows).values())
    assert depth == ({1} if oldest is None else {1, 4})
    assert found.rows["arrival_staleness"].max() > 1
    judged(found, count, keys)


def test_late_visits_are_computed_and_recorded(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"rounds": 8, "algorithm": {"name": "decoupled_diloco", **INNER}, "speed": PACES}
    found = world.play(tmp_path, participation={"close": "arrivals", "buffer": 2, "max_staleness": 0}, **keys)
    came, late = found.rows["arrival_client"] >= 0, found.rows["arrival_depth"] == 4
    assert (came & ~late).sum(1).tolist() == [2] * 8
    assert (found.rows["arrival_staleness"][late] > 0).all()
    assert late.sum() > 5
    assert found.rows["visits"].sum() == came.sum()
    assert found.rows["message_bytes"].tolist() == [2 * 8 * sum(v.numel() for v in world.start().values())] * 8
    assert 0 < (found.rows["fate"] == Fate.LATE).sum() <= late.sum()  # of several visits of a client the last one


def test_the_grace_is_what_is_left_of_the_overlap(tmp_path: Path) -> None:
    """By the seconds of each step of the server, and of those who have come."""
    rules = {"close": "arrivals", "buffer": 2, "slack": 0.9, "overlap": 4}
    assert decoupled.grace(0.9, 2, 1.0, 0.5, 0.3) == pytest.approx(1.08)
    assert Participation(close="arrivals", buffer=1, slack=0.9).goes_on_for(1.0, 0.5, 0.3) == pytest.approx(1.08)
    found = world.play(
        tmp_path,
        rounds=10,
        algorithm={"name": "decoupled_diloco", **INNER},
        participation=rules,
        speed=PACES,
        communication=0.1,
    )
    begun, ends, longer = 0.0, found.rows["round_seconds"].cumsum(), 0
    for row, times, end in zip(found.rows["arrival_client"], found.rows["arrival_seconds"], ends):
        came, wanted = PACES[row[row >= 0]] / STEPS, np.inf
        for k in range(2, len(came) + 1):
            more = decoupled.grace(0.9, 4, came[:k].mean(), times[k - 1] - begun, 0.1)
            wanted = min(wanted, times[k - 1] + more)
        longer += len(came) > 2
        assert end == pytest.approx(wanted, rel=1e-12)
        begun = end
    assert 0 < longer < 10


def test_what_was_merged_last_is_what_comes_down(tmp_path: Path) -> None:
    numbers = {name: value.numel() for name, value in world.start().items()}
    each = [8 * sum(numbers[name] for name in part) for part in fragments.dealt(numbers, 2)]
    link = {"up": "100 B/s", "down": "400 B/s"}
    keys: dict[str, Any] = {"algorithm": {"name": "decoupled_diloco", **INNER}, "fragments": {"count": 2}, "rounds": 3}
    found = world.play(tmp_path, link=link, **keys)
    down = [each[0] + each[1], each[0], each[1]]
    times = 4 * len(numbers)  # how often each tensor was merged
    wanted = [np.full(6, 1 + each[t % 2] / 100 + (down[t] + times) / 400) for t in range(3)]
    world.equal(found.rows["visit_seconds"], wanted)


def bits(state: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in state.items() if not name.startswith("merged:")}


@pytest.mark.parametrize("close", ["all", "arrivals"])
@pytest.mark.parametrize("speed", ["none", "exponential"])
def test_with_one_fragment_it_is_diloco_to_the_bit(close: str, speed: str) -> None:
    """The mean of equal weights; where arrivals end rounds nobody is late, or has to wait."""
    inner = {"steps": 5, "lr": 0.003, "batch": 16, "weight_decay": 0.1, "betas": [0.9, 0.95]}
    keys: dict[str, Any] = {f"algorithm.{name}": value for name, value in inner.items()}
    keys |= {"speed": {"model": speed}, "rounds": 4}
    own = {"algorithm.name": "decoupled_diloco", "algorithm.merge": "mean", "algorithm.weights": "uniform"}
    if close == "arrivals":
        own |= {"participation.close": close, "participation.buffer": 8, "participation.once_per_version": True}
    one, other = (Played(load("diloco-digits", keys | more)).play(4) for more in ({}, own))
    assert bits(one.now.shared) == bits(other.now.shared)
    assert all(float(value) == 4 for name, value in other.now.shared.items() if name.startswith("merged:"))


def merged(changes: list[Tensor], weights: list[float], how: str = "radial") -> Tensor | None:
    """What hpcfl makes of changes of one tensor; None: directions cancel."""
    blocks = {"w": Block(tuple(changes[0].shape), changes[0].dtype)}
    merge = Merge(blocks, blocks if how == "radial" else ())
    theta = vector(*range(1, 1 + len(changes[0]))).to(changes[0])
    message = {"w": (torch.stack([theta + each for each in changes]), torch.tensor(weights, dtype=torch.float64))}
    return iterate(merge, {"w": theta}, [message], lambda sums: sums).get("w")


def test_toys() -> None:
    assert np.allclose(decoupled.toy(), [0.335, -0.2145])
    assert weight(100, 10) == 1000
    two = [vector(2, 0), vector(0, 2)]
    for found, wanted in ((merged(two, [1, 1]), vector(2**0.5, 2**0.5)), (merged(two, [1, 1], "mean"), vector(1, 1))):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    one = vector(0.3, -1.7, 2.0)
    torch.testing.assert_close(merged([one], [7]), one, rtol=0, atol=1e-12)
    along = [2 * one, 0.5 * one, 3 * one]
    torch.testing.assert_close(merged(along, [1, 4, 2]), 10 / 7 * one, rtol=0, atol=1e-12)
    assert merged([one, -one], [1, 1]) is None
    assert merged([0 * one], [1]) is None
    assert merged([0 * one.float()], [1]) is None
    torch.testing.assert_close(merged([0 * one.float(), one.float()], [1, 1]), one / 2, rtol=0, atol=1e-6)
    drawn = [torch.randn(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in range(4)]
    ω = [3.0, 1.0, 10.0, 2.0]
    torch.testing.assert_close(merged(drawn, ω), radial(zip(ω, drawn)), rtol=0, atol=1e-12)


def test_embeddings_are_merged_by_the_mean_in_a_fragment_of_their_own() -> None:
    algorithm = {"name": "decoupled_diloco", "lr": 0.003, "batch": 8, "steps": 2}
    table = {"algorithm": algorithm, "fragments": {"count": 3}, "clients": 8, "rounds": 1}
    made = Job.of(load(str(EXAMPLES / "next-token.toml"), overlays=table), None, 1)
    tables = {"tokens.weight", "places.weight"}
    assert made.algorithm.in_turn[-1] == tables
    rule = made.iterated
    assert isinstance(rule, Merge)
    assert set(rule.radial) == rule.kept - tables == made.algorithm.in_turn[0] | made.algorithm.in_turn[1]
    most = len(rule.kept) - 1
    with pytest.raises(hpcfl.UsageError, match=f"expected at most {most}, .* embeddings being one, got {most + 1}"):
        Job.of(load(str(EXAMPLES / "next-token.toml"), overlays={**table, "fragments": {"count": most + 1}}), None, 1)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"participation": {"close": "deadline"}}, "participation.close: expected 'arrivals' or 'all'"),
        ({"participation": {"close": "arrivals", "buffer": 2, "max_seconds": 1.0}}, "participation.max_seconds"),
        ({"message": {"compress": "top-k"}}, "clients keep what they have sent"),
        ({"staleness": {"weight": "polynomial"}}, "which must count as a whole"),
        ({"weighting": {"correct": "remembered"}}, "does more with what clients send"),
        ({"algorithm": {"epochs": 1}}, "algorithm.epochs"),
        ({"participation": {"close": "arrivals", "buffer": 2, "slack": 0.9, "grace": 1.0}}, "participation.grace"),
        ({"participation": {"close": "arrivals", "buffer": 2, "overlap": 3}}, "participation.overlap = 3 has no mean"),
    ],
)
def test_what_does_not_go_with_it_is_refused(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    keys: dict[str, Any] = {"algorithm": {}, "participation": {"close": "arrivals", "buffer": 2}, **sections}
    keys["algorithm"] = {"name": "decoupled_diloco", **keys["algorithm"]}
    with pytest.raises(hpcfl.UsageError, match=said):
        world.config(tmp_path, **keys).check_values()
