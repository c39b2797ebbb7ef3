"""Cutting one pool of labelled samples into disjoint parts, one per client.

Every function returns the clients' sample indices in ascending order; all draws are the given generator's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.errors import UsageError
from hpcfl.data.base import Integers

Parts = list[Integers]
Weights = NDArray[np.float64]


def iid(labels: Integers, clients: int, rng: np.random.Generator) -> Parts:
    """Give every client equally many samples, drawn without regard to labels.

    The ``len(labels) % clients`` samples that remain (at most ``clients - 1``) are left out.

    Parameters
    ----------
    labels : int64 [n]
        Only their number matters.
    clients : int
        Number of parts; with more clients than samples all parts are empty.
    rng : numpy.random.Generator
        Source of the permutation.

    Returns
    -------
    list of int64 [n // clients]
    """
    size = len(labels) // clients
    order = rng.permutation(len(labels))[: size * clients]
    return list(np.sort(order.reshape(clients, size), axis=1))


def shards(labels: Integers, clients: int, classes: int, rng: np.random.Generator) -> Parts:
    """Give every client samples of exactly `classes` distinct classes.

    Each class is held by about ``clients * classes / C`` clients. All samples of a class that is held are
    given away, in shares such that the clients' sizes differ by no more than rounding wherever the classes
    allow it. Classes are left out only where ``clients * classes < C``.

    Parameters
    ----------
    labels : int64 [n]
        Classes ``0 .. C - 1``.
    clients, classes : int
        Number of parts, and of distinct classes in each.
    rng : numpy.random.Generator
        Decides who holds which class and which samples.

    Raises
    ------
    UsageError
        If the classes are too few or too small for every client to have a sample of each of its classes.
    """
    counts = np.bincount(labels)
    holds = holders(counts, clients, classes, rng)
    spare = np.where(holds.any(axis=0), counts - holds.sum(axis=0), 0)
    return _deal(labels, holds + _apportion(_even_rows(holds, spare), spare), rng)


def holders(counts: Integers, clients: int, classes: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Decide who holds which class, bool [clients, C]: `classes` distinct ones each, all classes as often as can be.

    Parameters
    ----------
    counts : int64 [C]
        Samples of each class; no class has more holders than samples.
    clients, classes : int
        Number of clients, and of distinct classes that each is dealt.
    rng : numpy.random.Generator
        Decides who holds what.

    Raises
    ------
    UsageError
        If the classes are too few or too small.
    """
    return _holders(_quotas(counts, clients, classes, rng), clients, classes, rng)


def grouped(labels: Integers, clients: int, classes: int, groups: int, rng: np.random.Generator) -> Parts:
    """Give each block of clients classes of its own, and within it every client `classes` of these, as `shards` does.

    Clients and classes are cut in their order into `groups` parts as equal as can be (SRPFL, appendix C: correlated
    heterogeneity).

    Raises
    ------
    UsageError
        If a group's classes are too few or too small for its clients.
    """
    parts: Parts = []
    present = np.unique(labels)
    if 1 < groups > (most := len(present) // classes):
        raise UsageError(
            f"data.label_groups = {groups}: the training samples are of {len(present)} classes, expected at least "
            f"{groups * classes}, data.classes = {classes} per group; did you mean {max(1, most)}?"
        )
    for owners, held in zip(np.array_split(np.arange(clients), groups), np.array_split(present, groups)):
        pool = np.flatnonzero(np.isin(labels, held))
        parts += [pool[part] for part in shards(labels[pool], len(owners), classes, rng)]
    return parts


def dirichlet(labels: Integers, clients: int, alpha: float, rng: np.random.Generator) -> Parts:
    """Give every client equally many samples, of classes in proportions ``q_i ~ Dir(alpha * p)``.

    As in Hsu et al. (2019), `p` holds the classes' shares of the pool and sums to 1; codes that draw from
    ``Dir(a, ..., a)`` over C balanced classes correspond to ``alpha = C * a``. A class that runs out is
    replaced by the client's others. At most ``clients - 1`` samples are left out.

    Parameters
    ----------
    labels : int64 [n]
        Classes ``0 .. C - 1``; ``n >= clients`` gives every client at least one sample.
    clients : int
        Number of parts.
    alpha : float
        Concentration: small for one class per client, large for the pool's proportions.
    rng : numpy.random.Generator
        Source of the proportions and of the samples.
    """
    left = np.bincount(labels)
    present = left > 0
    wanted = np.zeros((clients, len(left)))
    wanted[:, present] = rng.dirichlet(alpha * left[present] / len(labels), size=clients)
    counts = np.zeros(wanted.shape, dtype=np.int64)
    for i in range(clients):
        counts[i] = _draw(wanted[i], left, len(labels) // clients, rng)
        left = left - counts[i]
    return _deal(labels, counts, rng)


def follow(labels: Integers, moulds: list[Integers], rng: np.random.Generator) -> Parts:
    """Cut a second pool like a first: class c goes to the clients in proportion to what they hold of it.

    Parameters
    ----------
    labels : int64 [n]
        Labels of the pool to be cut.
    moulds : list of int64 [n_i]
        Labels of each client's part of the first pool; classes in none of them are left out.
    rng : numpy.random.Generator
        Decides which samples.
    """
    width = 1 + max(int(part.max(initial=0)) for part in [labels, *moulds])
    weights = np.stack([np.bincount(part, minlength=width) for part in moulds]).astype(np.float64)
    return _deal(labels, _apportion(weights, np.bincount(labels, minlength=width)), rng)


def thin(labels: Integers, parts: Parts, law: str, spread: float, rng: np.random.Generator) -> Parts:
    """Make the parts unequal: each keeps a random share of its samples, the largest share being all.

    Parameters
    ----------
    labels : int64 [n]
        Labels of the pool.
    parts : list of int64 [n_i]
        What the clients would hold; each class in a part keeps at least one sample.
    law : {"log-normal", "uniform"}
        Shares in proportion to ``exp(spread * z)``, ``z ~ N(0, 1)``, or to ``1 - spread * u``, ``u ~ U[0, 1)``.
    spread : float
        Above 0; at most 1 for ``"uniform"``.
    rng : numpy.random.Generator
        Source of the shares and of the samples that are kept.
    """
    shares = _shares(len(parts), law, spread, rng)
    return [keep(labels, part, round(share * len(part)), rng) for part, share in zip(parts, shares)]


def _shares(count: int, law: str, spread: float, rng: np.random.Generator) -> Weights:
    """Return so many shares, the largest 1."""
    if law == "log-normal":
        drawn = rng.standard_normal(count)
        shares: Weights = np.exp(spread * (drawn - drawn.max()))  # exp of what is at most 0 does not overflow
    else:
        shares = 1 - spread * rng.random(count)
        shares /= shares.max()
    return shares


def keep(labels: Integers, part: Integers, count: int, rng: np.random.Generator) -> Integers:
    """Return `count` random samples of a part in ascending order, at least one of each class that it holds."""
    order = rng.permutation(part)
    _, firsts = np.unique(labels[order], return_index=True)
    order = np.concatenate([order[firsts], np.delete(order, firsts)])
    return np.sort(order[: max(count, len(firsts))])


def _quotas(counts: Integers, clients: int, classes: int, rng: np.random.Generator) -> Integers:
    """Return how many clients hold each class: the most even numbers that class sizes and clients allow."""
    limit = np.minimum(counts, clients)
    total = clients * classes
    if limit.sum() < total:
        raise UsageError(
            f"data.classes = {classes}: training samples per class are {counts[counts > 0].min()} to {counts.max()}, "
            f"too few for clients = {clients}; did you mean {limit.sum() // clients}?"
        )
    quotas = np.zeros_like(counts)
    while total > 0:
        room = np.flatnonzero(quotas < limit)
        step = min(total // len(room), (limit - quotas)[room].min())
        if step == 0:
            room, step = rng.choice(room, total, replace=False), 1
        quotas[room] += step
        total -= step * len(room)
    return quotas


def _holders(quotas: Integers, clients: int, classes: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Return who holds which class, bool [clients, C], given how many clients hold each."""
    left = quotas.copy()
    holds = np.zeros((clients, len(quotas)), dtype=np.bool_)
    for row in holds:
        # Largest remaining quota first never leaves a client too few distinct classes (Gale and Ryser).
        picked = np.lexsort((rng.random(len(left)), -left))[:classes]
        row[picked] = True
        left[picked] -= 1
    # Neighbours were dealt complementary classes: permute, lest client ids tell who resembles whom.
    return rng.permutation(holds)


def _even_rows(holds: NDArray[np.bool_], totals: Integers) -> Weights:
    """Scale the pattern `holds` to column sums `totals` and rows as equal as it allows (Sinkhorn)."""
    weights = holds.astype(np.float64)
    share = totals.sum() / len(holds)
    for _ in range(200):
        weights *= totals / np.maximum(weights.sum(axis=0), 1e-300)
        rows = weights.sum(axis=1, keepdims=True)
        if np.abs(rows - share).max() < 0.1:
            break
        weights *= share / np.maximum(rows, 1e-300)
    return weights


def _apportion(weights: Weights, totals: Integers) -> Integers:
    """Scale each column to its total and round to integers; what rounding owes a row, its next column gets.

    Returns int64 [clients, C]: zero where `weights` is; columns sum to `totals`, or 0 where without weight.
    """
    counts = np.zeros(weights.shape, dtype=np.int64)
    owed = np.zeros(len(weights))
    for c in np.flatnonzero(weights.sum(axis=0) > 0):
        held = np.flatnonzero(weights[:, c])
        exact = weights[held, c] * (totals[c] / weights[held, c].sum())
        wanted = np.maximum(exact + owed[held], 0)
        wanted *= totals[c] / max(wanted.sum(), 1e-300)
        counts[held, c] = wanted
        missing = totals[c] - counts[held, c].sum()
        first = np.argsort(counts[held, c] - wanted, kind="stable")[:missing]
        counts[held[first], c] += 1
        owed[held] += exact - counts[held, c]
    return counts


def _draw(wanted: Weights, left: Integers, size: int, rng: np.random.Generator) -> Integers:
    """Draw `size` labels in proportions `wanted` from a pool that has `left` of each; return counts [C]."""
    taken = np.zeros_like(left)
    while size > 0:
        weights = np.where(left > taken, wanted, 0.0)
        if weights.sum() < 1e-200:  # nothing the client wants is left, or too little of it to be normalised
            weights = (left - taken).astype(np.float64)
        drawn = np.minimum(rng.multinomial(size, weights / weights.sum()), left - taken)
        taken += drawn
        size -= int(drawn.sum())
    return taken


def _deal(labels: Integers, counts: Integers, rng: np.random.Generator) -> Parts:
    """Give client i ``counts[i, c]`` random samples of each class c."""
    samples, owners = [], []
    for c in range(counts.shape[1]):
        owner = np.repeat(np.arange(len(counts)), counts[:, c])
        samples.append(rng.permutation(np.flatnonzero(labels == c))[: len(owner)])
        owners.append(owner)
    sample, owner = np.concatenate(samples), np.concatenate(owners)
    ends = np.cumsum(counts.sum(axis=1))
    return np.split(sample[np.lexsort((sample, owner))], ends[:-1])
