"""Federated averaging: McMahan et al., AISTATS 2017, Algorithm 1 (arXiv 1602.05629).

With `arrived` short of those who were invited it is the baseline that drops stragglers, with shorter `batches` for some
it is FedAvg of partial work. `correct` and `server` stand for what other papers put in place of the plain mean and of
the plain step along it.
"""

from __future__ import annotations

from collections.abc import Callable

from judges.corrections import Correction, plain
from judges.plain import Batches, Client, Objective, Params, Step, change, descend, loss_on, mean
from judges.server import Server, move


def fedavg(
    w: Params,
    data: list[Client],
    arrived: list[list[int]],
    batches: Batches,
    local: Callable[[int, int], Step],
    weights: dict[int, float],
    *,
    correct: Correction = plain,
    server: Server = move,
    proximal: float = 0.0,
    keep: bool = False,
    reached: Callable[[int, int, str], bool] = lambda round_, client, name: True,
    counts: Callable[[int, int], float] = lambda client, step: 1.0,
) -> tuple[Params, list[float]]:
    """Return the model after all rounds, and each round's mean training loss.

    `local` is the local optimiser by round and client, whose memory clients `keep` or begin anew. Of some visits only
    those tensors count, and are kept of, that backpropagation had `reached` in their last step. FedProx (Li et al.,
    MLSys 2020, Algorithm 2): clients minimise ``F_i(y) + μ/2 ‖y − w‖²``, `proximal` being μ. What a client's step k,
    from 0 on, changes `counts` so many times.
    """
    losses, memory = [], {i: {} for i in weights}
    for round_, clients in enumerate(arrived):
        changes, loss = {}, {}
        for i in clients:
            held = dict(memory[i])
            task = near(w, loss_on(data[i]), proximal)
            y, moves, seen = w, dict.fromkeys(w, 0.0), []
            for k, rows in enumerate(batches(round_, i)):
                after, one = descend(y, task, [rows], local(round_, i), held)
                moves = {name: moves[name] + counts(i, k) * d for name, d in change(after, y).items()}
                y = after
                seen.append(one)
            loss[i] = sum(seen) / len(seen)
            memory[i] |= {name: value for name, value in held.items() if keep and reached(round_, i, name)}
            changes[i] = {name: d for name, d in moves.items() if reached(round_, i, name)}
        losses.append(mean(loss, weights) if clients else float("nan"))
        w = server(w, correct(round_, changes, weights))
    return w, losses


def near(w: Params, objective: Objective, mu: float) -> Objective:
    """An objective with FedProx's term."""
    if not mu:
        return objective
    return lambda y, rows: objective(y, rows) + mu / 2 * sum((y[name] - w[name]).square().sum() for name in w)
