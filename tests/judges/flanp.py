"""FLANP: Reisizadeh et al., "Straggler-resilient federated learning", JSAIT 2022, Algorithm 1, here around FedAvg.

The rounds of a stage by theory are those of SRPFL (Tziotis et al., TMLR 2023, appendix B).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, inf, log, sqrt

from judges.plain import Batches, Client, Params, descend, loss_on, mean, sgd


def flanp(
    w: Params,
    data: list[Client],
    seconds: list[list[float]],
    batches: Batches,
    weights: dict[int, float],
    *,
    first: int,
    lr: float,
    stage_ends: Callable[[int, list[float], list[float]], bool],
    by_samples: bool = False,
    communication: float = 0.0,
    deadline: float = inf,
) -> tuple[Params, list[float], list[list[int]], list[float], list[int]]:
    """Return the model, and of each round the mean training loss, who took part, how long it took, and its stage.

    A round is done when the fastest n clients are, or (SRPFL, appendix C) the fastest that together hold n clients'
    share of the samples, or at the `deadline`; n doubles from stage to stage. `stage_ends` is asked with the stage's
    number, the squares of its rounds' averaged gradients (the model's change over the step size), and their losses.
    """
    n, stage, squares, losses = first, 0, [], []
    all_losses, who, times, stages = [], [], [], []
    share = sum(len(y) for _, y in data) / len(data)
    for round_, pace in enumerate(seconds):
        while n < len(data) and stage_ends(stage, squares, losses):
            n, stage, squares, losses = min(2 * n, len(data)), stage + 1, [], []
        stages.append(stage)
        order = sorted(range(len(data)), key=pace.__getitem__)
        fastest = order[:n]
        if by_samples and n < len(data):
            enough = [i for i in range(1, 1 + len(data)) if sum(len(data[j][1]) for j in order[:i]) >= n * share]
            fastest = order[: enough[0]]
        times.append(min(pace[fastest[-1]], deadline) + communication)
        who.append(sorted(i for i in fastest if pace[i] <= deadline))
        visits = {i: descend(w, loss_on(data[i]), batches(round_, i), sgd(lr)) for i in who[-1]}
        all_losses.append(mean({i: loss for i, (_, loss) in visits.items()}, weights) if visits else float("nan"))
        if visits:
            after = {name: mean({i: model[name] for i, (model, _) in visits.items()}, weights) for name in w}
            squares.append(sum(float(((after[name] - w[name]) / lr).square().sum()) for name in w))
            losses.append(all_losses[-1])
            w = after
    return w, all_losses, who, times, stages


class Theory:
    """Where a stage ends by SRPFL's theory: `times` are E[T_(n)] of each stage's n, `a` the contraction.

    The distance falls by ``d ← d √(1 − a) + a / √(2^r (1 − a))`` a round (Theorem 4.7) and a stage ends at ``X_{r+1}``
    (206), if `skip`: a stage that would end above it takes no round. Else only the first one ends so, and the others
    take t_r rounds (203).
    """

    def __init__(self, times: Sequence[float], a: float, communication: float, distance: float, skip: bool) -> None:
        self.times, self.a, self.cost, self.distance, self.skip = times, a, communication, distance, skip

    def ends_at(self, stage: int) -> float:
        t1, t2, s = self.times[stage], self.times[stage + 1], sqrt(1 - self.a)
        ratio = (t1 + self.cost) * (1 - 1 / sqrt(2)) / (t2 - t1)
        return self.a / (sqrt(2**stage * (1 - self.a)) * (1 - s)) * (1 + ratio)

    def __call__(self, stage: int, squares: list[float], losses: list[float]) -> bool:
        if squares:
            self.distance = self.distance * sqrt(1 - self.a) + self.a / sqrt(2**stage * (1 - self.a))
        if stage == 0 or self.skip:
            return self.distance <= self.ends_at(stage)
        t0, t1, t2 = self.times[stage - 1 : stage + 2]
        return len(squares) >= ceil(2 * log(sqrt(2) * (t2 - t1) / (t1 - t0)) / log(1 / (1 - self.a)))


class Plateau:
    """A stage ends after so many rounds in which the loss has not fallen by a share of the least so far."""

    def __init__(self, patience: int, tolerance: float) -> None:
        self.patience, self.tolerance = patience, tolerance

    def __call__(self, stage: int, squares: list[float], losses: list[float]) -> bool:
        best, since = inf, 0
        for loss in losses:
            fallen = best == inf or loss < best - self.tolerance * abs(best)
            best, since = (loss, 0) if fallen else (best, since + 1)
        return since >= self.patience
