"""A fragment of the model in each round, around several methods, against loops that know no hpcfl."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hpcfl
from hpcfl.algorithms import algorithms
from hpcfl.algorithms.fragments import Fragments, dealt
from hpcfl.config import from_table
from hpcfl.testing.played import Played
from hpcfl.testing.test_algorithms import ARRIVING, values
from judges import arrivals, fragments, world
from judges.corrections import Known, Remembered, plain
from judges.fedavg import fedavg
from judges.fednova import fednova
from judges.plain import sgd
from judges.salf import salf
from judges.server import Delayed, FedOpt, Momentum, Server, move
from judges.steps import Sgd

COUNT, ROUNDS = 3, 7
PARTS = fragments.dealt({name: value.numel() for name, value in world.start().items()}, COUNT)
KEYS: dict[str, Any] = {"lr": 0.2, "batch": world.BATCH, "epochs": 2}
SERVERS: dict[str, tuple[dict[str, Any], Callable[[], Server]]] = {
    "none": ({}, lambda: move),
    "nesterov": ({"optimizer": "nesterov", "lr": 0.6, "betas": [0.8]}, lambda: Momentum(0.6, 0.8, nesterov=True)),
    "adam": ({"optimizer": "adam", "lr": 0.05, "tau": 0.02}, lambda: FedOpt("adam", 0.05, 0.9, 0.99, 0.02)),
    "delayed": (
        {"optimizer": "delayed-nesterov", "lr": 0.8, "betas": [0.7], "cycle": 2, "share": 0.3},
        lambda: Delayed(0.8, 0.7, 2, 0.3),
    ),
}


def sent(round_: int, client: int, name: str) -> bool:
    return name in PARTS[round_ % COUNT]


def play(folder: Path, **sections: Any) -> world.Outcome:
    return world.play(folder, **{"rounds": ROUNDS, "fragments": {"count": COUNT}, **sections})


def test_who_is_in_which() -> None:
    sizes = {"a": 25, "b": 22, "c": 3, "d": 3}
    assert dealt(sizes, (), 2) == [{"a", "d"}, {"b", "c"}]
    assert dealt(sizes, ("b",), 3) == [{"a"}, {"c", "d"}, {"b"}]
    assert dealt(sizes, ("b",), 1) == [{"a", "b", "c", "d"}]
    assert [sorted(each) for each in dealt({n: v.numel() for n, v in world.start().items()}, (), COUNT)] == [
        sorted(each) for each in PARTS
    ]


def test_each_once_in_a_cycle() -> None:
    shuffled = [Fragments(count=4, schedule="shuffled").turn(3, t) for t in range(400)]
    cycles = [tuple(shuffled[t : t + 4]) for t in range(0, 400, 4)]
    assert {tuple(sorted(each)) for each in cycles} == {(0, 1, 2, 3)}
    assert len(set(cycles)) > 12
    assert [Fragments(count=4).turn(3, t) for t in range(6)] == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(("server", "chunk"), [("none", 4), ("nesterov", 1), ("adam", 4), ("delayed", 4)])
def test_fedavg(tmp_path: Path, server: str, chunk: int) -> None:
    keys, made = SERVERS[server]
    found = play(
        tmp_path,
        algorithm={"name": "fedavg", **KEYS},
        server=keys,
        participation=world.SOME,
        batch_clients=chunk,
    )
    who = found.who()
    w, losses = fedavg(
        *(world.start(), world.clients(), who, partial(world.batches, epochs=2), lambda *_: sgd(0.2), world.weights()),
        server=fragments.Each(PARTS, made),
        reached=sent,
    )
    world.near(found.shared, w)
    world.equal(found.rows["loss"], losses)


LATE = {"close": "deadline", "deadline": 1.0}
GROUPS = {"model": "groups", "means_of": [0.3, 0.9], "shares_of": [0.5, 0.5], "kind": "dynamic", "sorted": True}


@pytest.mark.parametrize("correct", ["known", "fedvarp", "mifa"])
def test_corrected(tmp_path: Path, correct: str) -> None:
    more = {"mean": "all"} if correct == "mifa" else {}
    found = play(
        tmp_path,
        algorithm={"name": "fedavg", **KEYS},
        participation=LATE,
        speed=GROUPS,
        weighting={"correct": "known" if correct == "known" else "remembered", **more},
        server=SERVERS["nesterov"][0],
    )
    who = found.who()
    assert any(len(each) < 6 for each in who)
    chance = [1 - np.exp(-1 / mean) for mean in (0.3, 0.9)]
    rule = {
        "known": lambda: Known(lambda client, name: chance[client // 3], found.who("cohort")),
        "fedvarp": lambda: Remembered(world.start(), lambda t: 1.0, everybody=False),
        "mifa": lambda: Remembered(world.start(), lambda t: 1.0, everybody=True),
    }[correct]()
    w, _ = fedavg(
        *(world.start(), world.clients(), who, partial(world.batches, epochs=2), lambda *_: sgd(0.2), world.weights()),
        server=SERVERS["nesterov"][1](),
        correct=fragments.among(PARTS, rule),
        reached=sent,
    )
    world.near(found.shared, w)


def test_fednova(tmp_path: Path) -> None:
    found = play(tmp_path, algorithm={"name": "fednova", **KEYS}, participation=world.SOME)
    w = world.start()
    for round_, who in enumerate(found.who()):
        after, _ = fednova(
            *(w, world.clients(), [who], lambda _, i, now=round_: world.batches(now, i, epochs=2), world.weights()),
            lr=0.2,
        )
        w = {name: after[name] if sent(round_, 0, name) else value for name, value in w.items()}
    world.near(found.shared, w)


def test_salf(tmp_path: Path) -> None:
    depth = np.random.default_rng(4).integers(1, 5, (ROUNDS, len(world.SIZES)))
    found = play(
        tmp_path,
        algorithm={"name": "salf", "lr": 0.2, "batch": world.BATCH, "missing": "none"},
        participation=LATE,
        speed=depth,
        server=SERVERS["nesterov"][0],
    )
    layers = [[name for name, number in world.LAYER.items() if number == layer] for layer in (1, 2, 3)]
    w, _, _ = salf(
        *(world.start(), world.clients(), [dict(enumerate(row)) for row in depth.tolist()]),
        *(partial(world.batches, steps=1), layers),
        lr=lambda round_: 0.2,
        correct=fragments.among(PARTS, plain),
        server=SERVERS["nesterov"][1](),
    )
    world.near(found.shared, w)


PACES = np.array([0.9, 3.5, 1.7, 0.4, 2.6, 90.0])


@pytest.mark.parametrize("server", ["none", "nesterov", "delayed"])
@pytest.mark.parametrize("rule", ["fedbuff", "ca2fl"])
def test_arrivals(tmp_path: Path, server: str, rule: str) -> None:
    keys, made = SERVERS[server]
    found = play(
        tmp_path,
        rounds=12,
        algorithm={"name": "fedavg", **KEYS, "weights": "uniform"},
        participation={"close": "arrivals", "buffer": 3, "concurrency": 4},
        weighting={"correct": "remembered"} if rule == "ca2fl" else {},
        server=keys,
        speed=PACES,
    )
    steps = arrivals.trace(found.rows)
    assert any(len({version % COUNT for _, version, _ in visits}) > 1 for visits in steps)  # of several fragments
    batches = lambda version, i, number: world.batches(version, i, phase=2**16 * number)  # noqa: E731
    whole, turn = arrivals.local(world.clients(), batches, lambda: Sgd(0.2)), {"now": 0}

    def work(w: dict[str, Tensor], i: int, version: int, number: int) -> dict[str, Tensor]:
        return {name: d for name, d in whole(w, i, version, number).items() if sent(version, i, name)}

    def moves(w: dict[str, Tensor], delta: dict[str, Tensor]) -> dict[str, Tensor]:
        came = {name for _, version, _ in steps[turn["now"]] for name in PARTS[version % COUNT]}
        turn["now"] += 1
        return optimiser(w, {name: d for name, d in delta.items() if name in came})

    optimiser = fragments.Each(PARTS, made)
    weights = world.weights("uniform")
    buffer = arrivals.ca2fl(weights, moves) if rule == "ca2fl" else arrivals.fedbuff(lambda x: 1.0, weights, moves)
    world.near(found.shared, arrivals.played(world.start(), steps, work, buffer))


def test_bytes_and_seconds_are_those_of_the_fragment(tmp_path: Path) -> None:
    each = [8 * sum(world.start()[name].numel() for name in names) for names in PARTS]
    found = play(tmp_path, algorithm={"name": "fedavg", **KEYS}, link={"up": "100 B/s"}, rounds=4)
    assert found.rows["message_bytes"].tolist() == [6 * each[t % COUNT] for t in range(4)]
    world.equal(found.rows["visit_seconds"], [np.full(6, 1 + each[t % COUNT] / 100) for t in range(4)])
    rules = {"close": "arrivals", "buffer": 2}
    found = play(tmp_path, algorithm={"name": "fedavg", **KEYS}, participation=rules, speed=PACES, rounds=9)
    steps = arrivals.trace(found.rows)
    wanted = [sum(each[version % COUNT] for _, version, _ in visits) for visits in steps]
    assert found.rows["message_bytes"].tolist() == wanted
    assert len(set(wanted)) > 1


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"algorithm": {"name": "local"}}, "does more than to send changes of a model"),
        ({"algorithm": {"name": "scaffold"}}, "clients keep what they have sent of the whole model"),
        ({"algorithm": {"name": "feddyn"}}, "does more than to send changes of a model"),
        ({"algorithm": {"name": "fedrolex"}}, "sends other parts of the model in each round"),
        ({"algorithm": {"name": "salf", "missing": "empirical"}, "participation": LATE}, "counts the rounds in which"),
        ({"weighting": {"correct": "estimated"}}, "counts the rounds from one arrival to the next"),
        ({"fragments": {"schedule": "shuffled"}}, "fragments.schedule = 'shuffled' has no meaning"),
    ],
)
def test_what_does_not_go_with_it_is_refused(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    keys: dict[str, Any] = {"algorithm": {"name": "fedavg"}, "fragments": {"count": 2}, **sections}
    with pytest.raises(hpcfl.UsageError, match=said):
        world.config(tmp_path, **keys).check_values()


REFUSED = (
    *("feddyn", "fedhenn", "fedlrgd", "fedrolex", "flic", "focus", "linear_fedrep", "local", "ringleader"),
    "scaffold",
)


@pytest.mark.parametrize("name", sorted(algorithms()))
def test_every_method_moves_a_fragment_or_is_refused(name: str) -> None:
    """The first round moves what is in the first fragment, of a model of six tensors."""
    config = from_table(values(name) | {"fragments": {"count": 2}, "speed": ARRIVING})
    if name in REFUSED:
        with pytest.raises(hpcfl.UsageError, match=r"^fragments\.count: expected 1, since"):
            config.check_values()
        return
    config.check_values()
    played = Played(config)
    before, parts = played.now.shared, played.job.algorithm.in_turn
    after = played.play(1).now.shared
    moved = {n for n in frozenset().union(*parts) if not torch.equal(before[n], after[n])}
    assert moved
    assert moved <= parts[0]


def test_more_fragments_than_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(hpcfl.UsageError, match="expected at most 6, as many as the model has tensors"):
        play(tmp_path, algorithm={"name": "fedavg", **KEYS}, fragments={"count": 7})
