"""Figures S1 and S2 of FLIC: what a visit does where embeddings stay as they are once they have aligned.

    python analysis/flic_visit.py [--epochs 10] [--seed 1] --out runs/flic-visit

`Choice` is FLIC with two keys more, ``algorithm.name = "flic_visit:Choice"``; jobs/papers/flic.toml uses it. The script
prints one JSON line: losses within the first visits of 20 clients of the linear mapping (FLIC-HL), for the three
choices of Figure S1. Numbers are drawn by visit and step, so visits that differ in their epochs alone have the first
ones in common, and the loss of epoch e is e times the mean over e epochs less e - 1 times that over e - 1. Losses are
means over clients, of what is minimised: of the local epochs the distance to the anchors is a part where embeddings
learn, samples of the anchors are one always. Costs 2 minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import Field

import hpcfl
from hpcfl.algorithms.flic import Flic
from hpcfl.algorithms.flic.phases import SHARED, Learner
from hpcfl.base.lazy import Tensor
from hpcfl.learning.optim import ParamGroup, train

SETTINGS = {
    "rounds": 1,
    "clients": 20,
    "participation.size": 20,
    "data.samples_per_class": 500,
    "algorithm.name": "flic_visit:Choice",
    "algorithm.local_step": "joint",
    "algorithm.evaluation": "stored",
}
CHOICES: dict[str, dict[str, Any]] = {
    "classifier": {"algorithm.embeddings": "fixed"},
    "above": {"algorithm.embeddings": "fixed", "half": True},
    "all": {"half": True},
}
"""What learns, by the figure; `half`: the second half of the epochs is that of the shared layers."""


class Choice(Flic):
    """FLIC whose embeddings may stay, and whose shared layers may have several epochs."""

    embeddings: str = Field("learn", pattern="^(learn|fixed)$")
    """``fixed``: embeddings learn in their alignment alone."""
    shared_epochs: int = Field(1, ge=1)
    """Epochs of the shared layers, after the local ones."""

    def _learner(self, *given: Any, **more: Any) -> Learner:
        return ChoiceLearner(**vars(super()._learner(*given, **more)))


class ChoiceLearner(Learner):
    """What `Choice` changes of a visit."""

    keys: Choice

    def local(self, epochs: int, above: Collection[str], embedding: bool = True, moving: bool = False) -> Tensor:
        return super().local(epochs, above, embedding and self.keys.embeddings == "learn", moving)

    def shared(self, names: Collection[str]) -> Tensor:
        batches = self.task.batches(self.visits, self.keys.batch, self.keys.shared_epochs, phase=self.offset + SHARED)
        group = ParamGroup(names, self.classifier, self.terms.above)
        return train(self.task, self.params, self._anchored(batches, self.terms), [group])


def by_epoch(means: Sequence[float]) -> list[float]:
    """Return the loss of each epoch from means over the first 1, 2, …."""
    sums = [0.0, *(number * mean for number, mean in enumerate(means, start=1))]
    return [float(f"{after - before:.5g}") for before, after in pairwise(sums)]


def losses(epochs: int, choice: dict[str, Any], seed: int, out: Path) -> list[float]:
    """Return the loss of each epoch of a visit."""
    keys = {**SETTINGS, **choice, "seed": seed}
    half = keys.pop("half", False)
    local = epochs // 2 if half else epochs

    def loss(name: str, **own: Any) -> float:
        settings = keys | {f"algorithm.{key}": value for key, value in own.items()}
        return float(hpcfl.run("flic-hl-toy-lm-small", settings=settings, out=out / name, quiet=True).data["loss"][0])

    found = by_epoch([loss(f"local-{each}", epochs=each, shared_from=1) for each in range(1, local + 1)])
    rest = range(1, epochs - local + 1)
    return found + by_epoch([loss(f"shared-{each}", epochs=local, shared_epochs=each) for each in rest])


def main() -> None:
    """Print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="of a visit: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="%(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/flic-visit"), help="folder of the runs")
    asked = parser.parse_args()
    found = {name: losses(asked.epochs, choice, asked.seed, asked.out / name) for name, choice in CHOICES.items()}
    print(json.dumps({"seed": asked.seed, **found}))


if __name__ == "__main__":
    main()
