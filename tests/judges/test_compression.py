"""What is left of changes that are compressed, and how many bytes they take."""

from __future__ import annotations

from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpcfl
from hpcfl.algorithms.compression import Compression
from judges import world
from judges.compression import Compressed, grid, half, some, top
from judges.fedavg import fedavg
from judges.plain import sgd

ORDER = [f"{layer}.{part}" for layer in reversed(world.LAYERS) for part in ("weight", "bias")]
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "top-k": ({"compress": "top-k", "share": 0.3}, top(0.3)),
    "top-k alone": ({"compress": "top-k", "share": 0.3, "feedback": False}, top(0.3)),
    "random-k": ({"compress": "random-k", "share": 0.3}, some(0.3, False)),
    "random-k alone": ({"compress": "random-k", "share": 0.3, "feedback": False}, some(0.3, True)),
    "qsgd": ({"compress": "qsgd", "levels": 3}, grid(3)),
    "bf16": ({"compress": "bf16"}, half),
}


def draw(round_: int, client: int, name: str) -> np.random.Generator:
    return hpcfl.keyed(world.SEED, f"compress {name}", round_, client)


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_compressed_changes(tmp_path: Path, case: str, chunk: int) -> None:
    keys, rule = CASES[case]
    algorithm = {"name": "fedavg", "lr": 0.2, "epochs": 2, "batch": world.BATCH}
    found = world.play(
        tmp_path, algorithm=algorithm, participation=world.SOME, message=keys, batch_clients=chunk, rounds=6
    )
    feedback = keys.get("feedback", keys["compress"] != "qsgd")
    correct = Compressed(rule, ORDER, draw, feedback)
    w, losses = fedavg(
        *(world.start(), world.clients(), found.who(), partial(world.batches, epochs=2), lambda *_: sgd(0.2)),
        world.weights(),
        correct=correct,
    )
    world.near(found.shared, w)
    world.equal(found.rows["loss"], losses)
    for client, own in enumerate(found.personal):
        left = {f"residual:{n}": correct.left.get((client, n), torch.zeros_like(w[n])) for n in ORDER}
        assert own.keys() == (left.keys() if feedback else set())
        if feedback:
            world.near(own, left)


@pytest.mark.parametrize("case", ["random-k alone", "qsgd"])
def test_what_is_unbiased_is_so(case: str) -> None:
    """By 4,000 draws: within 4 standard errors at each number."""
    rule = Compression(**CASES[case][0])
    value = torch.tensor([[0.3, -2.0, 0.0, 1.1, 0.7, -0.2, 5.0]]).expand(4000, -1)
    sent = rule.compressed(value.clone(), [hpcfl.keyed(1, "test", each) for each in range(4000)]).double()
    error = sent.std(0) / 4000**0.5
    assert ((sent.mean(0) - value[0]).abs() <= 4 * error + 1e-6).all()


def test_bytes_are_those_that_are_said(tmp_path: Path) -> None:
    numbers = {name: value.numel() for name, value in world.start().items()}
    wanted = {
        "top-k": sum(ceil(0.3 * n) * (8 + 4) for n in numbers.values()),
        "random-k": sum(ceil(0.3 * n) * 8 for n in numbers.values()),
        "qsgd": sum(8 + ceil(n * 3 / 8) for n in numbers.values()),
        "bf16": sum(2 * n for n in numbers.values()),
    }
    for case, each in wanted.items():
        algorithm = {"name": "fedavg", "lr": 0.2, "batch": world.BATCH}
        link = {"up": "100 B/s"}
        found = world.play(tmp_path, algorithm=algorithm, message=CASES[case][0], rounds=1, link=link)
        assert found.rows["message_bytes"].tolist() == [6 * each]
        world.equal(found.rows["visit_seconds"][0], np.full(6, 1 + each / 100))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"algorithm": {"name": "scaffold"}}, "keep what they have sent, which must arrive as it is"),
        ({"weighting": {"correct": "remembered"}}, "with weighting.correct = 'remembered' clients keep"),
        ({"algorithm": {"name": "local"}}, "does more than to send changes of a model"),
        ({"algorithm": {"name": "fedrolex"}}, "sends other parts of the model in each round"),
        ({"message": {"compress": "bf16", "share": 0.1}}, "message.share = 0.1 has no meaning"),
        ({"message": {"compress": "qsgd", "feedback": True}}, "message.feedback = true has no meaning"),
    ],
)
def test_what_does_not_go_with_it_is_refused(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    keys: dict[str, Any] = {"algorithm": {"name": "fedavg"}, "message": {"compress": "top-k"}, **sections}
    with pytest.raises(hpcfl.UsageError, match=said):
        world.config(tmp_path, **keys).check_values()
