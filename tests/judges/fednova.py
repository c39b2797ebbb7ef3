"""FedNova: Wang et al., "Tackling the objective inconsistency problem", NeurIPS 2020, eqs. 6 to 9 and Table 1."""

from __future__ import annotations

from collections.abc import Callable

from judges.corrections import Correction
from judges.fedavg import near
from judges.plain import Batches, Client, Params, change, descend, loss_on, mean, sgd


def length(steps: int, momentum: float, alpha: float) -> float:
    """‖a‖₁: what the gradients of so many local steps count together. `alpha` is ημ of a proximal term."""
    if alpha:
        return sum((1 - alpha) ** k for k in range(steps))
    return sum(momentum ** (j - k) for j in range(steps) for k in range(j + 1))


def fednova(
    w: Params,
    data: list[Client],
    arrived: list[list[int]],
    batches: Batches,
    weights: dict[int, float],
    *,
    lr: float,
    momentum: float = 0.0,
    decay: float = 0.0,
    mu: float = 0.0,
    correct: Correction | None = None,
    whole: Callable[[int], dict[int, int]] = lambda round_: {},
) -> tuple[Params, list[float]]:
    """Return the model after all rounds, and each round's mean training loss.

    ``w ← w + τ_eff Σ p_i Δ_i / ‖a_i‖₁`` with ``τ_eff = Σ p_i ‖a_i‖₁``; with a proximal term ``Σ p_i τ_i``, as the
    authors' code has it. Who took no step is left out. Where the mean is corrected, p_i are those of all for whom it
    stands, with the steps of their `whole` visits.
    """
    losses = []
    for round_, clients in enumerate(arrived):
        direction, effective, loss = {}, {}, {}
        for i in clients:
            steps = batches(round_, i)
            after, loss[i] = descend(w, near(w, loss_on(data[i]), mu), steps, sgd(lr, momentum, decay))
            a = length(len(steps), momentum, lr * mu)
            direction[i] = {name: value / a for name, value in change(after, w).items()}
            effective[i] = len(steps) if mu else a
        losses.append(mean(loss, weights) if clients else float("nan"))
        if correct is not None:
            steps = {i: n if mu else length(n, momentum, 0.0) for i, n in whole(round_).items()}
            found = correct(round_, direction, weights)
            w = {name: w[name] + mean(steps, weights) * found[name] if name in found else w[name] for name in w}
        elif clients:
            tau = mean(effective, weights)
            each = {name: mean({i: d[name] for i, d in direction.items()}, weights) for name in w}
            w = {name: w[name] + tau * each[name] for name in w}
    return w, losses
