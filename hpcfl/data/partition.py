"""Cutting one pool of labelled samples into disjoint parts, one per client.

Every cut returns the clients' sample indices in ascending order, a list of int64 ``[n_i]``; all draws are the given
generator's. Labels are int64 ``[n]``, classes ``0 .. C - 1``.

An HDF5 file says which samples each client holds, so that a split can be done again elsewhere: ``clients/<id>/train``
and, if the client tests, ``clients/<id>/test`` are integers ``[n]``, places in the training pool and in the test pool
of a source, counted from 0. ``server/train`` are those of the server itself, if it holds any.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcfl.base.errors import UsageError, listed, refusal
from hpcfl.base.types import Floats, Ints
from hpcfl.data.base import check_clients
from hpcfl.data.formats.files import check_all
from hpcfl.data.formats.hdf5_file import client_ids, dataset, linked, opened

Parts = list[Ints]
Holds = NDArray[np.bool_]
NAMES = ("train", "test")


class Split(NamedTuple):
    """Who holds which samples of a training pool and of a test pool, each part in the order in which it is held."""

    train: Parts
    test: Parts
    server: Ints


def iid(labels: Ints, clients: int, rng: np.random.Generator) -> Parts:
    """Give every client equally many samples, without regard to labels; ``n % clients`` samples are left out."""
    size = len(labels) // clients
    return list(np.sort(rng.permutation(len(labels))[: size * clients].reshape(clients, size), axis=1))


def shards(labels: Ints, clients: int, classes: int, rng: np.random.Generator) -> Parts:
    """Give every client samples of exactly `classes` distinct classes.

    Each class is held by about ``clients * classes / C`` clients. All samples of a class that is held are
    given away, in shares such that the clients' sizes differ by no more than rounding wherever the classes
    allow it. Classes are left out only where ``clients * classes < C``. UsageError as of `holders`.
    """
    counts = np.bincount(labels)
    holds = holders(counts, clients, classes, rng)
    spare = np.where(holds.any(axis=0), counts - holds.sum(axis=0), 0)
    return _deal(labels, holds + _apportion(_even_rows(holds, spare), spare), rng)


def grouped(labels: Ints, clients: int, classes: int, groups: int, rng: np.random.Generator) -> Parts:
    """Give each block of clients classes of its own, and within it every client `classes` of these, as `shards` does.

    Clients and classes are cut in their order into `groups` parts as equal as can be (SRPFL, appendix C: correlated
    heterogeneity). UsageError if a group's classes are too few or too small for its clients.
    """
    parts: Parts = []
    present = np.unique(labels)
    if 1 < groups > (most := len(present) // classes):
        each = f"for data.classes = {classes} of {len(present)} in each"
        raise refusal("data.label_groups", f"at most {most}, {each}", groups, max(1, most))
    for owners, held in zip(np.array_split(np.arange(clients), groups), np.array_split(present, groups)):
        pool = np.flatnonzero(np.isin(labels, held))
        parts += [pool[part] for part in shards(labels[pool], len(owners), classes, rng)]
    return parts


def dirichlet(labels: Ints, clients: int, alpha: float, rng: np.random.Generator) -> Parts:
    """Give every client equally many samples, of classes in proportions ``q_i ~ Dir(alpha * p)``.

    As in Hsu et al. (2019), `p` are the classes' shares of the pool, of sum 1: ``Dir(a, ..., a)`` over C balanced
    classes is ``alpha = C * a``. A class that runs out is replaced by the client's others; ``n % clients`` remain.
    """
    left = np.bincount(labels)
    present = left > 0
    wanted = np.zeros((clients, len(left)))
    wanted[:, present] = rng.dirichlet(alpha * left[present] / len(labels), size=clients)
    counts = np.zeros(wanted.shape, dtype=np.int64)
    for i in range(clients):
        while (missing := len(labels) // clients - counts[i].sum()) > 0:
            weights = np.where(left > 0, wanted[i], 0.0)
            if weights.sum() < 1e-200:  # nothing the client wants is left, or too little of it to be normalised
                weights = left.astype(np.float64)
            drawn = np.minimum(rng.multinomial(missing, weights / weights.sum()), left)
            counts[i] += drawn
            left = left - drawn
    return _deal(labels, counts, rng)


def follow(labels: Ints, moulds: list[Ints], rng: np.random.Generator) -> Parts:
    """Cut a second pool like a first: class c goes to the clients in proportion to what they hold of it.

    `moulds` are the labels of each client's part of the first pool; classes in none of them are left out.
    """
    width = 1 + max(int(part.max(initial=0)) for part in [labels, *moulds])
    weights = np.stack([np.bincount(part, minlength=width) for part in moulds]).astype(np.float64)
    return _deal(labels, _apportion(weights, np.bincount(labels, minlength=width)), rng)


def thin(labels: Ints, parts: Parts, law: str, spread: float, rng: np.random.Generator) -> Parts:
    """Make the parts unequal: each keeps a random share of its samples, the largest share being all.

    Shares are in proportion to ``exp(spread * z)``, ``z ~ N(0, 1)`` (`law` "log-normal"), or to ``1 - spread * u``,
    ``u ~ U[0, 1)`` ("uniform"). Each class in a part keeps at least one sample.
    """
    if law == "log-normal":
        drawn = rng.standard_normal(len(parts))
        shares = np.exp(spread * (drawn - drawn.max()))  # exp of what is at most 0 does not overflow
    else:
        shares = 1 - spread * rng.random(len(parts))
        shares /= shares.max()
    return [keep(labels, part, round(share * len(part)), rng) for part, share in zip(parts, shares)]


def keep(labels: Ints, part: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Return `count` random samples of a part in ascending order, at least one of each class that it holds."""
    order = rng.permutation(part)
    _, firsts = np.unique(labels[order], return_index=True)
    order = np.concatenate([order[firsts], np.delete(order, firsts)])
    return np.sort(order[: max(count, len(firsts))])


def turns(labels: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Return `count` of the samples such that classes take turns: class 0, 1, …, then again, as long as each lasts.

    Any first r of them are of as many classes as can be, and are the first r of any greater `count`.
    """
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    kinds = labels[order]
    turn = np.arange(len(order)) - np.searchsorted(kinds, kinds)  # how many of its class come before
    return order[np.lexsort((kinds, turn))[:count]]


def holders(counts: Ints, clients: int, classes: int, rng: np.random.Generator) -> Holds:
    """Decide who holds which class, bool [clients, C]: `classes` distinct ones each, all classes as often as can be.

    No class has more holders than samples, `counts` int64 [C]; UsageError if the classes are too few or too small.
    """
    left = _quotas(counts, clients, classes, rng)
    holds = np.zeros((clients, len(counts)), dtype=np.bool_)
    for row in holds:
        # Largest remaining quota first never leaves a client too few distinct classes (Gale and Ryser).
        picked = np.lexsort((rng.random(len(left)), -left))[:classes]
        row[picked] = True
        left[picked] -= 1
    # Neighbours were dealt complementary classes: permute, lest client ids tell who resembles whom.
    return rng.permutation(holds)


def _quotas(counts: Ints, clients: int, classes: int, rng: np.random.Generator) -> Ints:
    """Return how many clients hold each class: the most even numbers that class sizes and clients allow."""
    limit = np.minimum(counts, clients)
    total = clients * classes
    if limit.sum() < total:
        most, sizes = limit.sum() // clients, f"{counts[counts > 0].min()} to {counts.max()}"
        text = f"at most {most}, for {sizes} training samples a class and clients = {clients}"
        raise refusal("data.classes", text, classes, most)
    quotas = np.zeros_like(counts)
    while total > 0:
        room = np.flatnonzero(quotas < limit)
        step = min(total // len(room), (limit - quotas)[room].min())
        if step == 0:
            room, step = rng.choice(room, total, replace=False), 1
        quotas[room] += step
        total -= step * len(room)
    return quotas


def _even_rows(holds: Holds, totals: Ints) -> Floats:
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


def _apportion(weights: Floats, totals: Ints) -> Ints:
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


def _deal(labels: Ints, counts: Ints, rng: np.random.Generator) -> Parts:
    """Give client i ``counts[i, c]`` random samples of each class c."""
    samples, owners = [], []
    for c in range(counts.shape[1]):
        owner = np.repeat(np.arange(len(counts)), counts[:, c])
        samples.append(rng.permutation(np.flatnonzero(labels == c))[: len(owner)])
        owners.append(owner)
    sample, owner = np.concatenate(samples), np.concatenate(owners)
    return np.split(sample[np.lexsort((sample, owner))], np.cumsum(counts.sum(axis=1))[:-1])


def read_split(path: Path, clients: int, pool: tuple[int, int]) -> Split:
    """Return the split in a file, clients in natural order of their ids; `pool` are the sizes of both pools.

    Raises
    ------
    UsageError
        If the file is damaged or has another number of clients, a part is not what it should be, a client has no
        training samples, or a training sample is held twice.
    """
    with opened(path) as file:
        ids = client_ids(file)
        check_clients(clients, len(ids), str(path))
        for group in (f"clients/{name}" for name in ids):
            client = linked(file, group)
            if not isinstance(client, h5py.Group):
                raise UsageError(f"{path}: {group} is no group, expected {group}/train and {group}/test")
            if others := sorted(client.keys() - set(NAMES)):
                raise UsageError(f"{path}: {group} has {listed(others)}, expected train and test")
        train, test = (
            [_indices(file, f"clients/{name}/{part}", size) for name in ids] for part, size in zip(NAMES, pool)
        )
        server = _indices(file, "server/train", pool[0])
    for name, held in zip(ids, train):
        if not len(held):
            raise UsageError(f"{path}: clients/{name}/train is missing or empty, expected at least 1 training sample")
    if (twice := _repeated(np.concatenate([*train, server]))) is not None:
        owners = zip([*(f"clients/{name}" for name in ids), "server"], [*train, server])
        one, other = [owner for owner, part in owners if twice in part][:2]
        raise UsageError(f"{path}: {one} and {other} both hold training sample {twice}, expected each in one of them")
    return Split(train, test, server)


def write_split(path: Path, split: Split) -> None:
    """Write a split so that `read_split` returns it, clients by their numbers."""
    with h5py.File(path, "w") as file:
        for client, parts in enumerate(zip(split.train, split.test)):
            for name, part in zip(NAMES, parts):
                file[f"clients/{client}/{name}"] = part
        if len(split.server):
            file["server/train"] = split.server


def _indices(file: h5py.File, name: str, size: int) -> Ints:
    """Return the places in a pool of that size that a part holds, none where there is no such part."""
    if linked(file, name) is None:
        return np.zeros(0, dtype=np.int64)
    data, where = dataset(file, name), f"{file.filename}: {name}"
    if data.dtype.kind not in "iu" or data.ndim != 1:
        raise UsageError(f"{where} is {data.dtype} of shape {data.shape}, expected integers of one axis")
    pool = f"the pool of {size} {'test' if name.endswith('/test') else 'training'} samples"
    if len(data) > size:  # of any size: nothing is read
        raise UsageError(f"{where} has {len(data)} indices, expected at most {size}, each once, of {pool}")
    values = data[()]
    check_all(where, values, (values >= 0) & (values < size), f"0 to {size - 1} of {pool}", "place")
    held: Ints = values.astype(np.int64)
    if (twice := _repeated(held)) is not None:
        raise UsageError(f"{where} names sample {twice} twice, expected each index once")
    return held


def _repeated(values: Ints) -> int | None:
    """Return the least value that occurs more than once, None where there is none."""
    known, counts = np.unique(values, return_counts=True)
    return next(iter(known[counts > 1].tolist()), None)
