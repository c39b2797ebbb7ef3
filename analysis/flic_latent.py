"""The latent space of a run in two dimensions, and how near it brings clients of different feature spaces (FLIC).

    python analysis/flic_latent.py runs/flic-digits -o latent.png
    python analysis/flic_latent.py runs/flic-digits -o latent.png --method tsne --part train

Draws the clients' embedded samples (colour: class; marker: domain, or number of features) and the means of the anchors
(stars), projected together. The *ratio* is of distances between class means in the latent space: of one class between
groups of clients, over those of different classes, within and between groups. Groups are the two domains of
`two_digits`, else the clients. Below 1, what clients embed is told apart by class rather than by feature space.
`ratio_untrained` is that of the embeddings before they have learned anything. Costs seconds, t-SNE more. Prints one
JSON line last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import hpcfl
from hpcfl.base.errors import UsageError
from hpcfl.results.trained import Models

MARKERS = "o^sDvPX<>p"
DRAWN = 4000
"""At most so many samples are drawn; the ratio is of all."""
COMPARED = {
    True: "means of each class's embedded samples, as the clients of each of the two domains embed them",
    False: "means of each class's embedded samples, as each client embeds them",
}
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Samples:
    """All clients' samples: in the latent space ``[n, k]`` as learned and before, class, group and marker ``[n]``.

    Attributes
    ----------
    words : list of str
        What each marker stands for.
    """

    learned: Array
    untrained: Array
    classes: Array
    groups: Array
    markers: Array
    words: list[str]


def embedded(models: Models, part: str) -> Samples:
    """Return the samples of all clients that have any; UsageError where labels are no classes."""
    groups, markers, words = kinds(models)
    found = []
    for model in sorted(models, key=lambda model: model.client):
        x, y = getattr(model.data, f"{part}_features"), getattr(model.data, f"{part}_labels")
        if np.issubdtype(y.dtype, np.floating):
            raise UsageError("data: the labels are real numbers; expected a run of a classification")
        if len(y):
            own = (np.full(len(y), values[model.client]) for values in (groups, markers))
            found.append((model.embed(x), model.untrained.embed(x), y, *own))
    if not found:
        raise UsageError(f"--part {part}: no client has any samples; did you mean --part train?")
    learned, untrained, classes, groups, markers = (np.concatenate(column) for column in zip(*found))
    if not np.isfinite(learned).all():
        raise UsageError("model: what it embeds is not finite; expected a run that did not diverge")
    return Samples(learned, untrained, classes, groups, markers, words)


def kinds(models: Models) -> tuple[Array, Array, list[str]]:
    """Return each client's group and marker, and what markers stand for: domains, or ranges of numbers of features."""
    domains = getattr(models.federation, "domains", None)
    if domains is not None:
        source = models.config.data
        return domains, domains, [str(getattr(source, name)) for name in ("first", "second")]
    widths = np.array([np.prod(shape, dtype=int) for shape in models.federation.shapes])
    ranges = np.array_split(np.unique(widths), min(len(MARKERS), len(np.unique(widths))))
    markers = np.searchsorted([own[-1] for own in ranges], widths)
    words = [f"{own[0]}" if len(own) == 1 else f"{own[0]} to {own[-1]}" for own in ranges]
    return np.arange(len(widths)), markers, [f"{word} features" for word in words]


def ratio(z: Array, classes: Array, groups: Array) -> float | None:
    """Return the mean distance between groups' means of one class, over that of means of different classes.

    None where no class is in two groups, or all samples are of one class.

    Parameters
    ----------
    z : array [n, k]
    classes, groups : int64 [n]
    """
    found, place = np.unique(np.stack([classes, groups], 1), axis=0, return_inverse=True)
    means = np.zeros((len(found), z.shape[1]))
    np.add.at(means, place.reshape(-1), z)
    means /= np.bincount(place.reshape(-1))[:, None]
    apart = np.linalg.norm(means[:, None] - means, axis=-1)
    pairs, alike = np.triu(np.ones_like(apart, dtype=bool), 1), found[:, None, 0] == found[:, 0]
    if not (pairs & alike).any() or not (pairs & ~alike).any():
        return None
    # each class counts as much as any other, in however many groups it is
    same = [apart[pairs & alike & (found[:, None, 0] == c)].mean() for c in np.unique(found[(pairs & alike).any(1), 0])]
    return float(np.mean(same) / apart[pairs & ~alike].mean())


def projected(points: Array, method: str) -> Array:
    """Return points ``[n, k]`` in the plane, ``[n, 2]``."""
    if method == "pca":
        from sklearn.decomposition import PCA

        return np.asarray(PCA(2, svd_solver="full").fit_transform(points))
    from sklearn.manifold import TSNE

    return np.asarray(TSNE(2, perplexity=min(30.0, len(points) / 4), init="pca", random_state=0).fit_transform(points))


def draw(samples: Samples, anchors: Array, meta: Sequence[int], method: str, picture: Path) -> None:
    """Draw some of the samples, evenly spaced among all, and the anchors' means ``[C, k]``."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    picked = np.linspace(0, len(samples.classes) - 1, min(DRAWN, len(samples.classes))).astype(int)
    flat = projected(np.concatenate([samples.learned[picked], anchors]), method)
    points, stars = flat[: len(picked)], flat[len(picked) :]
    colours = plt.get_cmap("tab10" if samples.classes.max() < 10 else "tab20")
    figure, panel = plt.subplots(figsize=(7, 6))
    for number, word in enumerate(samples.words):
        rows = samples.markers[picked] == number
        (x, y), inks = points[rows].T, colours(samples.classes[picked][rows] % colours.N)
        panel.scatter(x, y, c=inks, marker=MARKERS[number], s=14, alpha=0.6, linewidths=0)
        panel.scatter([], [], c="gray", marker=MARKERS[number], s=30, label=word)
    # anchors of groups of classes have no class's colour
    inks = "white" if meta else colours(np.arange(len(stars)) % colours.N)
    if len(stars):
        x, y = stars.T
        panel.scatter(x, y, c=inks, marker="*", s=260, edgecolors="black")
        panel.scatter([], [], c="white", marker="*", s=60, edgecolors="black", label="anchors")
    for number in np.unique(samples.classes):
        panel.scatter([], [], color=colours(number % colours.N), marker="s", s=30, label=f"class {number}")
    panel.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    panel.set(xticks=[], yticks=[], title=f"latent space by {'PCA' if method == 'pca' else 't-SNE'}")
    figure.savefig(picture, bbox_inches="tight", dpi=150)


def main() -> None:
    """Draw the picture and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True, help="where to draw the picture")
    parser.add_argument("--method", choices=("pca", "tsne"), default="pca")
    parser.add_argument("--part", choices=("test", "train"), default="test", help="whose samples: default %(default)s")
    parser.add_argument("--data-dir", type=Path, help="folder of the data sets (default: where the run found them)")
    options = parser.parse_args()
    try:
        models = hpcfl.open_models(options.run, options.data_dir)
        samples = embedded(models, options.part)
    except UsageError as error:
        raise SystemExit(str(error)) from None
    anchors = models.shared.get("anchor.means", np.empty((0, samples.learned.shape[1])))
    draw(samples, anchors, getattr(models.algorithm, "meta", ()), options.method, options.output)
    figures = {
        "ratio": ratio(samples.learned, samples.classes, samples.groups),
        "ratio_untrained": ratio(samples.untrained, samples.classes, samples.groups),
        "classes": len(np.unique(samples.classes)),
        "clients": len(models),
        "compared": COMPARED[hasattr(models.federation, "domains")],
    }
    print(json.dumps({"run": str(options.run), "round": models.round, "part": options.part} | figures))


if __name__ == "__main__":
    main()
