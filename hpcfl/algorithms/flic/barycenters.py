"""The clients' anchors reduced to Wasserstein barycenters, by further sums over the messages that counted.

``S ← S^{-½} (Σ_i w_i (S^½ Σ_i S^½)^½)² S^{-½}`` from the weighted mean of the Σ_i on. A visit answers for the anchors
that it has changed: one eigendecomposition each per iteration. For all others, which are as they were served, whoever
asks answers once. Products travel as triangles: they are symmetric.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import cache

from hpcfl.algorithms.base import Block, IteratedReduction, Message, State, Sums
from hpcfl.algorithms.flic.config import FACTORS
from hpcfl.base.lazy import Tensor, torch
from hpcfl.math.barycenter import barycenter_term, covariance, fixed_point, relative_change, sqrtm_and_inverse

ROOT, SINCE, COUNTED = "root", "change", "counted"
"""S^½ and its last change, in a query; the weights of all that counted, in a response."""


class Barycenters(IteratedReduction):
    """The barycenters of all anchors: C of k coordinates each."""

    def __init__(self, count: int, dimension: int, tolerance: float, iterations: int) -> None:
        self.tolerance, self.iterations = tolerance, iterations
        self.kept = frozenset(sent(number) for number in range(count))
        triangle = Block((dimension * (dimension + 1) // 2,), torch.float64)
        numbers = Block((count,), torch.float64)
        self.layout = ({sent(number): triangle for number in range(count)} | {SINCE: numbers, COUNTED: numbers},)

    def query(self, shared: State) -> Generator[State, Sums, State]:
        """Iterate from the mean covariance on.

        The change that tells when to stop is summed up too, one iteration later, so that all ranks stop alike. Finds
        ``factors`` [C, k, k], symmetric roots; ``iterations`` [C]; ``changed`` bool [C], True where any visit has
        changed the anchor: only then its factor means anything.
        """
        factors = shared[FACTORS].cpu()
        served = covariance(factors)
        since = torch.full((len(factors),), max(1.0, 2 * self.tolerance), dtype=torch.float64)
        query = {FACTORS: factors, SINCE: since, ROOT: torch.zeros(0, dtype=torch.float64)}
        first = yield query
        counted = first.total(COUNTED)
        changed = torch.tensor([first.weight(sent(number)) for number in range(len(factors))], dtype=torch.float64)
        going, taken = changed > 0, torch.zeros(len(factors), dtype=torch.int64)
        now = _mean(first, counted, changed, served)
        roots, inverses = torch.zeros_like(now), torch.zeros_like(now)
        for _ in range(self.iterations if bool(going.any()) else 0):
            roots[going], inverses[going] = sqrtm_and_inverse(now[going])
            sums = yield query | {SINCE: since, ROOT: torch.where(going[:, None, None], roots, 0.0)}
            going = going & (sums.mean(SINCE) > self.tolerance)
            if not going.any():
                break
            rest, idle = torch.zeros_like(served), going & (counted > changed)
            if idle.any():  # the part of the visits that return the anchors as they were served
                rest[idle] = barycenter_term(roots[idle], served[idle])
            before, now = now, now.clone()
            now[going] = fixed_point(inverses[going], _mean(sums, counted, changed, rest)[going])
            since, taken = relative_change(before, now), taken + going
        if going.any():
            roots[going], _ = sqrtm_and_inverse(now[going])
        return {"factors": roots, "iterations": taken, "changed": changed > 0}

    def response(self, query: State, message: Message) -> Message:
        """Return what some visits' changes ``L_i − L`` add: their covariances first, then ``(S^½ Σ_i S^½)^½``."""
        factors, roots = query[FACTORS], query[ROOT]
        rows, terms = len(message[sent(0)][1]), {}
        for number, factor in enumerate(factors):
            value, weight = message[sent(number)]
            moved = (value != 0).flatten(1).any(1).cpu()
            if len(roots):
                moved = moved & bool(roots[number].any())
            lower = _lower(len(factor))
            triangles = value.new_zeros(rows, lower.shape[1], dtype=torch.float64)
            for row in torch.nonzero(moved).flatten().tolist():
                cov = covariance(factor + value[row])
                triangles[row] = (barycenter_term(roots[number], cov) if len(roots) else cov)[lower[0], lower[1]]
            terms[sent(number)] = triangles, weight * moved
        ones = torch.ones(rows, dtype=torch.float64)
        weights = torch.stack([message[sent(number)][1] for number in range(len(factors))], 1)
        return terms | {SINCE: (query[SINCE].expand(rows, -1), ones), COUNTED: (weights, ones)}


def sent(number: int) -> str:
    """Return the name of the block of an anchor's factor."""
    return f"{FACTORS}.{number}"


def _mean(sums: Sums, counted: Tensor, changed: Tensor, rest: Tensor) -> Tensor:
    """Return the mean over all that counted: of the visits that changed an anchor as summed, of the others `rest`."""
    rows, columns = _lower(rest.shape[-1])
    total = torch.zeros_like(rest)
    for number, matrix in enumerate(total):
        matrix[rows, columns] = matrix[columns, rows] = sums.total(sent(number))
    whole = total + (counted - changed)[:, None, None] * rest
    return whole / torch.where(counted > 0, counted, 1.0)[:, None, None]


@cache
def _lower(size: int) -> Tensor:
    return torch.tril_indices(size, size)
