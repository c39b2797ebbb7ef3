"""The error of FedLRGD's re-weighted gradient by the rank r, beside r^(-η/d) (Jadbabaie, Makur & Shah, Theorem 1).

    hpcfl sweep fedlrgd-rough --grid algorithm.rank=2,4,8,16,32,64,128 --grid data.dimension=1,2,3 \
        --grid model.smoothness=1,2,4 --seeds 1-3 --out runs/error
    python analysis/error_by_rank.py runs/error/*/ -o error_by_rank.png

*error* is ‖∇F̂(θ) - ∇F(θ)‖ with the weights that a run has found, at parameters θ of the law of ϑ that are not among
its ϑ: the median, and the root of the mean square (*rms*), which few θ far out decide. *best* is the left side of
Theorem 1: what the best matrices of rank r leave of the gradients of all n samples at these θ, as the root of the mean
over samples and θ of the squared Euclidean norm over coordinates. It depends on no weights, and the theorem bounds it
by a constant times r^(-η/d); of the error there is no such bound without one of the inverse of G^(i). Of few θ or
samples less is left than of many once r is no small part of their number, and *best* ends too steeply: see --points.

Slopes are of straight lines through log error against log r, a line for each seed, over the ranks up to the first error
below a floor: `algorithm.truncation`, and 1e-13 for *best*; *late* ones are of the last three of these ranks. *bend* is
the second-order coefficient of the parabola: negative where the error falls ever faster. Means and standard errors are
over seeds. Runs may differ in rank, dimension, link, smoothness and seed alone. Costs seconds per seed, dimension and
link. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, e, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

import hpcfl
from hpcfl.base.errors import UsageError
from hpcfl.base.rng import keyed
from hpcfl.config import presets

if TYPE_CHECKING:
    from torch import Tensor

    from hpcfl.results.trained import Models

POINTS = 384
"""Parameters θ at which errors are measured: more than the largest rank, or nothing is left of the matrices."""
RESOLVED = 1e-13
"""What float64 resolves of singular values, relative to gradients of order 1."""
FREE = ("algorithm.rank", "data.dimension", "data.labels", "model.link", "model.smoothness", "seed")
MEMORY = 2**28
LEAST = 1e-9
"""Least value in the picture."""
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """What was measured of one run.

    Attributes
    ----------
    law : str
        The link, and the order of a rough one.
    smoothness : float, optional
        η of a rough link; None: analytic.
    error, rms, relative : float
        Median and root of the mean square of ‖∇F̂ - ∇F‖, and the median relative to ‖∇F‖.
    best : float
        The left side of Theorem 1, not squared.
    condition : float
        Largest condition number of G^(i), over the coordinates.
    truncated : int
        Coordinates in which singular values were left out.
    """

    law: str
    smoothness: float | None
    dimension: int
    seed: int
    rank: int
    error: float
    rms: float
    relative: float
    best: float
    condition: float
    truncated: int


def read(folder: Path, data_dir: Path | None) -> Models:
    """Return what a run left; UsageError where it has no weights of FedLRGD's, or its loss is of unknown smoothness."""
    models = hpcfl.open_models(folder, data_dir)
    for key, expected in (("algorithm.name", "fedlrgd"), ("data.name", "unit_cube"), ("model.name", "glm")):
        if (got := settings(models)[key]) != expected:
            raise UsageError(f"{folder}: {key} = '{got}': expected '{expected}'")
    if float(models.extras["heard"]) <= 0:
        raise UsageError(f"{folder}: has no weights: expected a run in which clients' sums have arrived")
    return models


def check_alike(runs: Sequence[Models]) -> None:
    """Refuse runs that differ in more than what is compared."""
    found = [settings(models) for models in runs]
    for key in sorted(set().union(*found) - set(FREE)):
        values = sorted({str(own.get(key)) for own in found})
        if len(values) > 1:
            raise UsageError(f"{key}: the runs have {', '.join(values)}; expected one of them only")


def settings(models: Models) -> dict[str, Any]:
    """Return a run's config by dotted keys."""
    return dict(presets.flat(models.config.model_dump(mode="json")))


# what is measured


def gradients(models: Models, points: Tensor) -> Tensor:
    """Return ``g_i(x_j; θ_k)`` of all samples, the clients' and then the server's, float64 ``[i, k, j]``.

    Parameters
    ----------
    points : Tensor [k, p]
        θ.
    """
    from hpcfl.algorithms.fedlrgd.low_rank import Bound, Surrogates
    from hpcfl.contrib.theory.optimum import PooledObjective

    task, held = models.task, models.task.server_batch()
    assert held is not None  # no run of FedLRGD's begins without
    every, p = PooledObjective(task), task.parameter_count
    batch = replace(held, x=every.x[None].to(held.x), y=every.y[None].to(held.y))
    bare = task.without_penalty() if settings(models)["algorithm.penalty"] == "exact" else task
    bound = Bound.of(MEMORY, p, len(every.y), held.x.itemsize)
    return Surrogates(bare, batch, len(every.y), bound).matrices(points, slice(None))


def fresh(models: Models, count: int) -> Tensor:
    """Return parameters of the law of ϑ that are not among them, ``[k, p]``."""
    import torch

    from hpcfl.algorithms.fedlrgd.low_rank import flat

    theta = flat(models.task.initial())
    drawn = keyed(models.config.seed, "error by rank").standard_normal((count, len(theta)))
    points: Tensor = theta + settings(models)["algorithm.scale"] * torch.from_numpy(drawn).to(theta)
    return points


def errors(matrices: Tensor, weights: Tensor, server: int) -> tuple[Array, Array]:
    """Return ‖∇F̂ - ∇F‖ and ‖∇F‖ at each θ, ``[k]``.

    Parameters
    ----------
    matrices : float64 [p, k, n]
        Of all samples, the last `server` ones of which the server holds.
    weights : float64 [r, p]
        Of the first of these.
    """
    import torch

    own = matrices[:, :, matrices.shape[2] - server :][:, :, : len(weights)]
    exact = matrices.mean(2)
    apart = torch.einsum("ikj,ji->ik", own, weights) - exact
    return apart.norm(dim=0).numpy(), exact.norm(dim=0).numpy()


def tails(matrices: Tensor, ranks: Sequence[int]) -> list[float]:
    """Return the root of the sum over i of ``‖M_i - (M_i)_r‖²/(nk)`` for each rank r; matrices are ``[i, k, n]``."""
    import torch

    squares, cells = torch.linalg.svdvals(matrices).square(), matrices.shape[1] * matrices.shape[2]
    return [sqrt(float(squares[:, rank:].sum()) / cells) for rank in ranks]


def measured(members: Sequence[Models], count: int) -> list[Row]:
    """Return what was measured of runs that differ in their rank alone."""
    import torch

    first, of = members[0], settings(members[0])
    matrices = gradients(first, fresh(first, count)).cpu()
    ranks = [settings(models)["algorithm.rank"] for models in members]
    eta = of["model.smoothness"] if of["model.link"] == "rough" else None
    law = of["model.link"] if eta is None else f"rough, η = {eta:g}"
    head = law, eta, of["data.dimension"], of["seed"]
    found = []
    for models, rank, best in zip(members, ranks, tails(matrices, ranks)):
        error, exact = errors(matrices, torch.from_numpy(models.extras["weights"]), of["data.server"])
        sizes = float(np.median(error)), float(np.sqrt(np.square(error).mean())), float(np.median(error / exact))
        condition, cut = (float(models.extras[name]) for name in ("worst_condition", "truncated"))
        found.append(Row(*head, rank, *sizes, best, condition, int(cut)))
    return found


# what follows


def line(ranks: Sequence[int], values: Sequence[float], floor: float) -> dict[str, float | None]:
    """Return slope, late slope and bend of log values against log ranks, up to the first value below the floor.

    That one counts as the floor, which makes no slope steeper. None where there are fewer than 2, 3 or 3 of these.
    """
    pairs = sorted(zip(ranks, values))
    below = [place for place, (_, value) in enumerate(pairs) if value < floor]
    end = below[0] + 1 if below else len(pairs)
    x, y = np.log([(rank, max(value, floor)) for rank, value in pairs[:end]]).T
    return {
        "slope": float(np.polyfit(x, y, 1)[0]) if end > 1 else None,
        "late": float(np.polyfit(x[-3:], y[-3:], 1)[0]) if end > 2 else None,
        "bend": float(np.polyfit(x, y, 2)[0]) if end > 2 else None,
    }


def needed(dimension: int, smoothness: float) -> int:
    """Return the least rank of which Theorem 1 speaks, ``e √d 2^d (l + d)^d`` with ``l = ⌈η⌉ - 1``."""
    per_axis = 2 * (ceil(smoothness) - 1 + dimension)
    return ceil(e * sqrt(dimension) * float(per_axis**dimension))


def spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """Return the mean and its standard error; None: too few."""
    known = [value for value in values if value is not None]
    error = float(np.std(known, ddof=1) / sqrt(len(known))) if len(known) > 1 else None
    return {"mean": float(np.mean(known)) if known else None, "error": error}


def slopes(rows: Sequence[Row], floor: float) -> list[dict[str, Any]]:
    """Return slopes and bends of each dimension and link, and whether mean slopes are at most -η/d."""
    cases: dict[tuple[int, float, str], dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        cases[row.dimension, row.smoothness or np.inf, row.law][row.seed].append(row)
    found = []
    for (dimension, eta, law), seeds in sorted(cases.items()):
        case: dict[str, Any] = {"dimension": dimension, "law": law, "seeds": sorted(seeds)}
        exponent = -eta / dimension if np.isfinite(eta) else None
        case |= {"theory": exponent, "needed": needed(dimension, eta) if exponent else None}
        for name, least in (("error", floor), ("rms", floor), ("best", RESOLVED)):
            members = [seeds[seed] for seed in case["seeds"]]
            lines = [line([row.rank for row in own], [getattr(row, name) for row in own], least) for own in members]
            case[name] = {key: spread([each[key] for each in lines]) for key in ("slope", "late", "bend")}
            means = {key: case[name][key]["mean"] for key in ("slope", "late")}
            fast = {key: None if mean is None or exponent is None else mean <= exponent for key, mean in means.items()}
            case[name] |= {"as_fast": fast}
            case[name] |= {"slopes": [each["slope"] for each in lines]}
        found.append(case)
    return found


def steepening(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return by how much slopes change from each rough link to the next smoother one, or to the analytic ones.

    Differences are taken seed by seed; negative is steeper.
    """
    found = []
    for place, one in enumerate(cases):
        later = [case for case in cases[place + 1 :] if case["dimension"] == one["dimension"]]
        following = later[:1] if later and later[0]["theory"] is not None else later
        for other in following if one["theory"] is not None else ():
            pair = {"dimension": one["dimension"], "from": one["law"], "to": other["law"]}
            for name in ("error", "rms", "best"):
                left, right = (dict(zip(case["seeds"], case[name]["slopes"])) for case in (one, other))
                both = [seed for seed in left if left[seed] is not None and right.get(seed) is not None]
                pair[name] = spread([right[seed] - left[seed] for seed in both])
            found.append(pair)
    return found


def medians(rows: Sequence[Row], law: str, dimension: int, name: str) -> tuple[list[int], list[float]]:
    """Return the ranks of a link and dimension, and the median over seeds at each."""
    at: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if (row.law, row.dimension) == (law, dimension):
            at[row.rank].append(getattr(row, name))
    return sorted(at), [float(np.median(at[rank])) for rank in sorted(at)]


# what is shown


def shown(rows: Sequence[Row], cases: Sequence[dict[str, Any]]) -> list[Table]:
    """Return the tables of errors and of slopes."""
    ranks = sorted({row.rank for row in rows})
    sizes = Table("d", "link", "", *map(str, ranks), title="median over seeds, by rank")
    columns = [f"{key} of {name}" for name in ("error", "rms", "best") for key in ("slope", "late", "bend")]
    lines = Table("d", "link", "-η/d", *columns, "r needed", title="mean slopes and their standard errors")
    for case in cases:
        head = str(case["dimension"]), case["law"]
        for name in ("error", "rms", "relative", "best", "condition", "truncated"):
            at = dict(zip(*medians(rows, case["law"], case["dimension"], name)))
            sizes.add_row(*head, name, *(f"{at[rank]:.1e}" if rank in at else "-" for rank in ranks))
        fits = [case[name][key] for name in ("error", "rms", "best") for key in ("slope", "late", "bend")]
        theory = "-" if case["theory"] is None else f"{case['theory']:.2f}"
        lines.add_row(*head, theory, *map(figure, fits), str(case["needed"] or "-"))
    return [sizes, lines]


def figure(found: dict[str, float | None]) -> str:
    """Return a mean and its standard error in words."""
    mean, error = found["mean"], found["error"]
    return "-" if mean is None else f"{mean:.2f}" if error is None else f"{mean:.2f} ± {error:.2f}"


def draw(rows: Sequence[Row], cases: Sequence[dict[str, Any]], picture: Path) -> None:
    """Draw a panel per dimension: errors solid, the best of rank r dotted, the law from the first point on dashed."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    dimensions, laws = sorted({row.dimension for row in rows}), list(dict.fromkeys(case["law"] for case in cases))
    size = 4.2 * len(dimensions), 4.2
    image, panels = plt.subplots(1, len(dimensions), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for panel, dimension in zip(panels[0], dimensions):
        for case in (case for case in cases if case["dimension"] == dimension):
            colour = f"C{laws.index(case['law'])}"
            ranks, values = medians(rows, case["law"], dimension, "error")
            panel.plot(ranks, values, f"{colour}-o", markersize=3, label=case["law"])
            ranks, best = medians(rows, case["law"], dimension, "best")
            panel.plot(ranks, best, f"{colour}:", linewidth=1)
            if case["theory"]:
                guide = [values[0] * (rank / ranks[0]) ** case["theory"] for rank in ranks]
                panel.plot(ranks, guide, f"{colour}--", linewidth=0.8, alpha=0.6)
        panel.set(title=f"d = {dimension}", xlabel="rank r", xscale="log", yscale="log")
        panel.set_xticks(ranks, [str(rank) for rank in ranks])
        panel.grid(alpha=0.3)
    panels[0][0].set_ylim(bottom=LEAST)
    panels[0][0].set_ylabel("error of the gradient")
    for style, label in (("-", "re-weighted"), (":", "best of rank r"), ("--", r"$r^{-\eta/d}$")):
        panels[0][-1].plot([], [], f"k{style}", linewidth=1, label=label)
    panels[0][-1].legend(fontsize="x-small", loc="lower left")
    image.savefig(picture, dpi=90)


def main() -> None:
    """Print the tables and the JSON line, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="where to draw the picture")
    parser.add_argument("--points", type=int, default=POINTS, help="parameters θ to measure at: default %(default)s")
    parser.add_argument("--data-dir", type=Path, help="folder of the data sets (default: where the runs found them)")
    parser.add_argument("--brief", action="store_true", help="in the JSON line medians over seeds instead of runs")
    options = parser.parse_args()
    try:
        runs = [read(folder, options.data_dir) for folder in sorted(options.runs)]
        check_alike(runs)
        most = max(settings(models)["algorithm.rank"] for models in runs)
        if options.points <= most:
            raise UsageError(f"--points {options.points}: expected more than the largest rank, {most}")
    except UsageError as error:
        raise SystemExit(str(error)) from None
    groups: dict[str, list[Models]] = defaultdict(list)
    for models in runs:
        groups[json.dumps(settings(models) | {"algorithm.rank": None})].append(models)
    rows = [row for members in groups.values() for row in measured(members, options.points)]
    cases = slopes(rows, settings(runs[0])["algorithm.truncation"])
    for table in shown(rows, cases):
        Console(width=150).print(table)
    if options.output:
        draw(rows, cases, options.output)
    found = {"slopes": cases, "steepening": steepening(cases), "runs": [asdict(row) for row in rows]}
    if options.brief:
        del found["runs"]
        for case in cases:
            named = {name: medians(rows, case["law"], case["dimension"], name) for name in ("error", "best")}
            case["medians"] = {"rank": named["best"][0], **{name: values for name, (_, values) in named.items()}}
    print(json.dumps({"points": options.points} | found))


if __name__ == "__main__":
    main()
