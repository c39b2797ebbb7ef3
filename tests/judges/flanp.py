"""FLANP: Reisizadeh et al., "Straggler-resilient federated learning", JSAIT 2022, Algorithm 1, here around FedAvg."""

from __future__ import annotations

from collections.abc import Callable

from judges.plain import Batches, Client, Params, descend, loss_on, mean, sgd


def flanp(
    w: Params,
    data: list[Client],
    seconds: list[float],
    batches: Batches,
    weights: dict[int, float],
    *,
    first: int,
    rounds: int,
    lr: float,
    stage_ends: Callable[[int, int, float], bool],
) -> tuple[Params, list[float], list[list[int]], list[float]]:
    """Return the model, and of each round the mean training loss, who took part, and how long it took.

    A round is done when the fastest n clients are; n doubles from stage to stage. `stage_ends` says so by the stage's
    number, its rounds so far, and the square of the averaged gradient: the round's change over the step size.
    """
    order = sorted(range(len(data)), key=lambda i: seconds[i])
    n, stage, done = first, 0, 0
    losses, who, times = [], [], []
    for round_ in range(rounds):
        clients = sorted(order[:n])
        visits = {i: descend(w, loss_on(data[i]), batches(round_, i), sgd(lr)) for i in clients}
        after = {name: mean({i: model[name] for i, (model, _) in visits.items()}, weights) for name in w}
        losses.append(mean({i: loss for i, (_, loss) in visits.items()}, weights))
        who.append(clients)
        times.append(seconds[order[n - 1]])
        square = sum(float(((after[name] - w[name]) / lr).square().sum()) for name in w)
        w, done = after, done + 1
        if n < len(data) and stage_ends(stage, done, square):
            n, stage, done = min(2 * n, len(data)), stage + 1, 0
    return w, losses, who, times
