"""Options without effect are refused, all in the same words; what a check calls valid is run."""

from __future__ import annotations

from typing import Any

import pytest

from hpcfl.algorithms import algorithms
from hpcfl.base.errors import UsageError
from hpcfl.config import Config, from_table
from hpcfl.data import Federation
from hpcfl.engine import loop
from hpcfl.engine.job import Job
from hpcfl.engine.record import Record, columns
from hpcfl.engine.simulated import Simulated
from hpcfl.mpi.transport import Transport
from hpcfl.testing.test_algorithms import values

ARRIVALS = {"close": "arrivals", "buffer": 1, "dispatch": "reporter"}
FREE: dict[str, Any] = {"speed": {"model": "exponential"}}
SHORT = {"close": "deadline", "deadline": 0.9}
SALF = {"name": "salf", "missing": "none"}

# ---- what has no effect


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"algorithm": {**SALF, "momentum": 0.5}}, "algorithm.momentum = 0.5 with algorithm.persist_optimizer = false"),
        (
            {"algorithm": {"name": "ringmaster", "weights": "uniform"}, "participation": ARRIVALS},
            "algorithm.weights = 'uniform' with algorithm.name = 'ringmaster'",
        ),
        (
            {"algorithm": {"name": "fedasync", "weights": "uniform"}, "participation": ARRIVALS},
            "algorithm.weights = 'uniform' with algorithm.name = 'fedasync'",
        ),
        (
            {"algorithm": {"name": "local"}, "guard": {"max_norm": 3.0}},
            "guard.max_norm = 3.0 with algorithm.name = 'local'",
        ),
        (
            {"algorithm": {"name": "fedlrgd"}, "guard": {"max_norm": 3.0}},
            "guard.max_norm = 3.0 with algorithm.name = 'fedlrgd'",
        ),
        ({"participation": {"partial": "steps"}}, "participation.partial = 'steps' with participation.close = 'all'"),
        (
            {"participation": {"partial": "discard"}},
            "participation.partial = 'discard' with participation.close = 'all'",
        ),
        ({"algorithm": SALF, "participation": {"partial": "layers"}}, "participation.partial = 'layers' with"),
        ({"weighting": {"correct": "known"}}, "weighting.correct = 'known' with participation.close = 'all'"),
        ({"participation": {"deadline": 3.0}}, "participation.deadline = 3.0 with participation.close = 'all'"),
        ({"participation": {"deadline": ((0, 1.0), (5, 0.5))}}, "participation.deadline = [[0, 1.0], [5, 0.5]] with"),
        ({"participation": {"deadline": "adaptive"}}, "participation.deadline = 'adaptive' with"),
        ({"participation": {"min_clients": 2}}, "participation.min_clients = 2 with participation.close = 'all'"),
        (
            {"participation": {"close": "first", "first": 3, "min_clients": 2}},
            "participation.min_clients = 2 with participation.close = 'first'",
        ),
        ({"participation": {"snapshot": 1}}, "participation.snapshot = 1 with participation.partial = 'auto'"),
        (
            {"algorithm": {"name": "local"}, "server": {"optimizer": "adam"}},
            "server.optimizer = 'adam' with algorithm.name = 'local'",
        ),
        (
            {"algorithm": {"name": "flic"}, "model": {"name": "latent"}, "server": {"optimizer": "adam"}},
            "server.optimizer = 'adam' with algorithm.name = 'flic'",
        ),
    ],
)
def test_what_has_no_effect_is_refused_in_the_same_words(keys: dict[str, Any], refused: str) -> None:
    key, beside = refused.split(" with")
    with pytest.raises(UsageError) as caught:
        from_table(values("fedavg") | {"participation": {"close": "all"}, **FREE, **keys}).check_values()
    line = str(caught.value)
    assert line.startswith(f"{key} has no meaning with{beside}")
    assert ": remove it" in line


@pytest.mark.parametrize(
    "keys",
    [
        {"algorithm": {**SALF, "momentum": 0.5, "persist_optimizer": True}},
        {  # what is remembered is averaged over all clients
            "algorithm": {"name": "ringmaster", "weights": "uniform"},
            "participation": ARRIVALS,
            "weighting": {"correct": "remembered"},
        },
        {"algorithm": {"name": "fedhenn"}, "guard": {"max_norm": 3.0}},
        {"algorithm": SALF, "participation": {"close": "all", "partial": "discard"}},  # of what is rejected in part
        {"participation": {"close": "all", "min_clients": 2}, "clock": "wall"},  # ranks may be lost
        {"participation": {"close": "first", "first": 3, "deadline": 1.0, "min_clients": 2}},
        {
            "algorithm": {"name": "flic"},
            "model": {"name": "latent", "hidden": [4]},
            "server": {"optimizer": "adam"},
        },
    ],
)
def test_what_has_an_effect_is_not_refused(keys: dict[str, Any]) -> None:
    from_table(
        values("fedavg") | {"participation": {"close": "all"}, "batch_clients": "auto", **FREE, **keys}
    ).check_values()


# ---- what is valid is run

EVERY: dict[str, dict[str, Any]] = {
    "momentum": {"server": {"optimizer": "momentum"}},
    "yogi": {"server": {"optimizer": "yogi", "tau": 0.1}},
    "norms": {"guard": {"max_norm": 5.0}},
    "known": {"weighting": {"correct": "known"}, "participation": SHORT, **FREE},
    "estimated": {"weighting": {"correct": "estimated"}, "participation": SHORT, **FREE},
    "remembered": {"weighting": {"correct": "remembered"}},
    "layers": {"participation": {**SHORT, "partial": "layers"}, **FREE},
    "steps": {"participation": {**SHORT, "partial": "steps"}, **FREE},
    "discard": {"participation": {**SHORT, "partial": "discard"}, **FREE},
    "fewest": {"participation": {**SHORT, "min_clients": 1}, **FREE},
    "first": {"participation": {"close": "first", "first": 2}, **FREE},
    "quorum": {"participation": {"close": "quorum", "quorum": 2, "grace": 0.1}, **FREE},
    "uniform": {"participation": {"invite": "uniform", "size": 3}, "speed": {"model": "none"}},
    "newcomers": {"participation": {"hold_out": 2}, "speed": {"model": "none"}},
    "arrivals": {"participation": {**ARRIVALS, "buffer": 2}, **FREE},
    "stale": {"participation": ARRIVALS, "staleness": {"weight": "polynomial"}, **FREE},
    "every client": {
        "participation": {"close": "arrivals", "buffer": 7, "every_client": True, "max_staleness": 0},
        **FREE,
    },
    "doubling": {
        "participation": {"close": "first", "first": 2},
        "doubling": {"when": "gradient"},
        **FREE,
    },
    "double": {"precision": "double"},
    "objective": {"evaluate": {"objective": True}},
    "single": {"batch_clients": 1},
}


def one_round(config: Config, federation: Federation) -> None:
    """Do what a run does before its first row is written."""
    job = Job.of(config, None, 1, federation=federation)
    columns(job)
    now, record, rounds = job.begin(0), Record.open(), Simulated(job, Transport(), 0)
    plan, record.sums = rounds.exchange(now, record)
    loop.step(job, now, record, plan)
    now.round += 1
    loop.evaluate(job, rounds, now, record)
    loop.close(job, rounds, now, record, plan, "")


@pytest.mark.parametrize("name", algorithms())
def test_what_a_check_calls_valid_is_run(name: str) -> None:
    """Each method with each of these keys; what is refused is refused in a line."""
    plain = values(name) | {"rounds": 1}
    if plain["data"]["name"] == "digits":
        plain["data"] = plain["data"] | {"train_samples": 70}
    held = from_table(plain)
    federation = held.data.federate(held.clients, held.seed, None)
    valid, wrong = [], []
    for case, keys in EVERY.items():
        config = from_table(plain | keys)
        try:
            config.check(None)
        except UsageError:
            continue
        valid.append(case)
        try:
            one_round(config, federation)
        except Exception as error:  # whatever it is, the check has said nothing of it
            wrong.append(f"{case}: {type(error).__name__}: {error}")
    assert not wrong
    assert {"double", "objective"} <= set(valid)
