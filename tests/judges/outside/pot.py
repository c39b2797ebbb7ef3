"""POT's barycenters and distances of Gaussians, beside FLIC's: ``python -m judges.outside.pot FOLDER [FILE]``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import ot

from judges.outside.read import Row, Run, compare, judge, read

Array = np.ndarray


def laws(state: dict[str, Array], number: int) -> tuple[Array, Array]:
    """Return the mean and the covariance of an anchor, L Lᵀ of its factor."""
    mean, factor = state["anchor.means"][number], state["anchor.factors"][number]
    return mean, factor @ factor.T


def anchors(run: Run) -> Iterator[tuple[tuple[Array, Array], tuple[Array, Array]]]:
    """Yield POT's and hpcfl's law of each anchor that anybody changed in a step, the barycenter of theirs."""
    for step, (before, after) in enumerate(zip(run.states, run.states[1:])):
        for number in range(len(before["anchor.means"])):
            held = [visit for visit in run.steps[step] if visit.weights[f"anchor.means.{number}"]]
            theirs = [
                laws(
                    {kind: before[kind] + visit.change[f"{kind}.{number}"] for kind in before if "anchor" in kind},
                    number,
                )
                for visit in held
            ]
            weights = np.array([visit.weights[f"anchor.means.{number}"] for visit in held])
            means, covariances = map(np.stack, zip(*theirs))
            weights /= weights.sum()
            found = ot.gaussian.bures_wasserstein_barycenter(means, covariances, weights, num_iter=1000, eps=1e-13)
            yield found, laws(after, number)


def rows(folder: Path) -> Iterator[Row]:
    run = read(folder / "flic.npz")
    found, wanted = zip(*anchors(run))
    counts = {"steps": len(run.steps), "visits": len(run.visits)}
    for place, what in enumerate(("means", "covariances")):
        both = ([law[place] for law in some] for some in (found, wanted))
        yield compare(f"FLIC's anchors, {what}", "ot.bures_wasserstein_barycenter", *both, **counts)
    with np.load(folder / "distances.npz") as file:
        for k in (2, 8):
            covariances = [factor @ factor.T for factor in file[f"factors{k}"]]
            others = [points.T @ points / len(points) for points in file[f"points{k}"]]
            zero = np.zeros(k)
            roots = [ot.gaussian.bures_wasserstein_distance(zero, zero, *both) for both in zip(covariances, others)]
            row = f"𝔅² in {k} dimensions", "ot.bures_wasserstein_distance"
            yield compare(*row, np.square(roots), file[f"squared{k}"])


if __name__ == "__main__":
    judge(["POT", "numpy"], rows)
