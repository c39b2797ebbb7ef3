"""Approximate rank of the gradient of a trained network over samples and parameters (FedLRGD, appendix C).

    python analysis/gradient_rank.py --data mnist --samples 60 --out k60.h5 --picture k60.png
    python analysis/gradient_rank.py --theta k60.h5 --samples 90 --out k90.h5
    mpirun -n 4 python analysis/gradient_rank.py --theta k60.h5 --all-weights --out all.h5
    python analysis/gradient_rank.py --from k60.h5 k90.h5 all.h5 --picture all.png

Trains a network on a whole training set, without any federation, to theta*. Then draws k test samples x_i and k
perturbed parameter vectors theta^(j) = theta* + |theta*|_1 / p * N(0, I), forms for some 500 weights q the matrix
M_q[i, j] = df/dtheta_q (x_i; theta^(j)) of derivatives of the cross-entropy, and counts how many of its largest
singular values hold 90 % of its squared Frobenius norm: its approximate rank. FedLRGD supposes that it is small.
Weights (biases among them) are drawn uniformly from those with |theta*_q| >= 0.005. Matrices that are zero have no
approximate rank: they are counted and left out of all shares. Zero are those of first-layer weights whose pixel is
black in all of the samples.

networks  mnist: dense layers 784-784-10 (p = 623,290). cifar10: two convolutions of 40 filters 3 x 3, stride 1, zero
          padding, 2 x 2 max-pooling, dense layers 150 and 10 (p = 1,553,220). digits (scikit-learn's, needs no files,
          for a try): 64-64-10. Initial weights are Glorot uniform, biases zero; Adam and RMSprop have Keras' constants
          (learning rate 1e-3, epsilon 1e-7, rho 0.9): what the paper leaves open is as Keras has it.
output    The HDF5 file holds slices [q, i, j], singular_values [q, k], approximate_ranks and rows_needed [q]
          (0: zero matrix), weights [q] (places in theta) and their names, samples [k] (places in the test set),
          theta [p], and the settings and accuracies as attributes. Any such file serves as --theta. Derivatives are
          computed and kept in float64: for well classified samples they are differences of nearly equal numbers.
ranks     Under mpirun, rank 0 trains while the others sleep; then each rank takes a share of the weights, and of the
          work: it computes a share of all matrices' columns, which change hands before singular values are found.
          The answer is the same to the bit on any number of ranks.
costs     On 2 cores a minute of training for mnist with 784 nodes, then seconds.

Prints one JSON line last: at_most_5 and at_most_10 are shares of the non-zero matrices, median and most of their
approximate ranks. rows_median is that of the rows (samples) that hold 90 % of a matrix by themselves, rank_is_rows the
share of matrices whose approximate rank is no less than that: of low rank because few samples have a large gradient.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from math import ceil, inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gradient_ranks import files
from gradient_ranks.files import Array, Case, Setting, Trained

from hpcfl.base.errors import ErrorOnOtherRank, UsageError, UserError, did_you_mean
from hpcfl.data.bundled import Digits
from hpcfl.data.cifar import Cifar10
from hpcfl.data.mnist import Mnist
from hpcfl.data.pooled import Pool, Pooled
from hpcfl.launch.failure import fail, raise_together
from hpcfl.mpi.launcher import world
from hpcfl.store.atomic import replace

if TYPE_CHECKING:
    from gradient_ranks.network import Network
    from gradient_ranks.sharing import Draw

SOURCES: dict[str, Pooled] = {"mnist": Mnist(), "cifar10": Cifar10(), "digits": Digits()}
FILTERS: dict[str, tuple[int, ...]] = {"mnist": (), "cifar10": (40, 40), "digits": ()}
HIDDEN = {"mnist": (784,), "cifar10": (150,), "digits": (64,)}
EPOCHS = {"mnist": 25, "cifar10": 15, "digits": 25}
CHOICES = {"data": tuple(SOURCES), "activation": ("logistic", "relu"), "optimizer": ("adam", "rmsprop")}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options; those of `Setting` are None where they are not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, training = parser.add_argument, parser.add_argument_group("training").add_argument
    training("--data", metavar="NAME", help="mnist (default), cifar10 or digits")
    training("--hidden", action="append", metavar="WIDTHS", help="widths of hidden dense layers: 1000, or 784,784")
    training("--activation", metavar="NAME", help="logistic (default) or relu, after every hidden layer")
    training("--optimizer", metavar="NAME", help="adam (default) or rmsprop")
    training("--epochs", type=int, metavar="N", help="default: 25, cifar10 15")
    training("--batch", type=int, metavar="N", help="samples of a step (default 200)")
    training("--lr", type=float, metavar="RATE", help="learning rate (default 1e-3)")
    training("--theta", type=Path, metavar="FILE.h5", help="take theta* from an output file instead of training")
    add("--samples", type=int, default=60, metavar="K", help="test samples, and perturbations (default %(default)s)")
    add("--weights", type=int, default=500, metavar="N", help="weights to be drawn (default %(default)s)")
    add("--all-weights", action="store_true", help="draw among all weights, those near zero too")
    add("--perturbation", type=float, default=1.0, metavar="TIMES", help="of |theta*|_1 / p (default: once)")
    add("--seed", type=int, default=1, help="of training and of all that is drawn (default %(default)s)")
    add("--data-dir", type=Path, help="folder of the data sets (default: HPCFL_DATA)")
    add("--out", type=Path, metavar="FILE.h5", help="where to write what was found")
    add("--picture", type=Path, metavar="FILE.png", help="where to draw the histograms")
    add("--from", dest="files", nargs="+", type=Path, metavar="FILE.h5", help="only show these output files")
    return parser.parse_args(words)


def setting(options: argparse.Namespace) -> Setting:
    """Return how theta* is to be found, by the options and the data set's defaults; UsageError names a wrong one."""
    for name, choices in CHOICES.items():
        if getattr(options, name) not in (None, *choices):
            raise UsageError(
                f"--{name} {getattr(options, name)}: unknown{did_you_mean(getattr(options, name), choices)}"
            )
    data = options.data or "mnist"
    found = Setting(
        data,
        widths(options.hidden) or HIDDEN[data],
        options.activation or "logistic",
        options.optimizer or "adam",
        EPOCHS[data] if options.epochs is None else options.epochs,
        200 if options.batch is None else options.batch,
        1e-3 if options.lr is None else options.lr,
        options.seed,
    )
    for name in ("epochs", "batch"):
        if getattr(found, name) < 1:
            raise UsageError(f"--{name} {getattr(found, name)}: expected at least 1")
    if not 0 < found.lr < inf:
        raise UsageError(f"--lr {found.lr}: expected a number above 0")
    return found


def widths(given: Sequence[str] | None) -> tuple[int, ...]:
    """Return the widths that the values of ``--hidden`` list."""
    words = [word.strip() for text in given or () for word in text.split(",")]
    for word in words:
        if not word.isdigit() or int(word) < 1:
            raise UsageError(f"--hidden '{word}': expected widths of at least 1, such as 784 or 784,784")
    return tuple(map(int, words))


def check(options: argparse.Namespace) -> None:
    """Refuse before anything costs time what could not be drawn or written; UsageError."""
    for name in ("samples", "weights"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} {getattr(options, name)}: expected at least 1")
    if not 0 <= options.perturbation < inf:
        raise UsageError(f"--perturbation {options.perturbation}: expected a number, at least 0")
    if not 0 <= options.seed < 2**64:
        raise UsageError(f"--seed {options.seed}: expected at least 0 and below 2**64")
    for name in ("out", "picture"):
        path = getattr(options, name)
        if path and not path.parent.is_dir():
            raise UsageError(f"--{name} {path}: there is no folder {path.parent}")
        if path and path.is_dir():
            raise UsageError(f"--{name} {path}: is a folder, expected a file's name")
    if options.picture:
        from matplotlib.backend_bases import FigureCanvasBase

        kind, kinds = options.picture.suffix.removeprefix("."), FigureCanvasBase.get_supported_filetypes()
        if kind not in kinds:
            raise UsageError(f"--picture {options.picture}: no picture of that kind{did_you_mean(kind, kinds)}")


def pool(data: str, folder: Path | None) -> tuple[Pool, list[int], int]:
    """Return all samples, the shape of one, and the number of classes."""
    source = SOURCES[data]
    folder = folder or (Path(os.environ["HPCFL_DATA"]) if os.environ.get("HPCFL_DATA") else None)
    found = source.load(0, folder)
    return found, list(found.header.shapes[0]), found.classes


def learned(how: Setting, net: Network, samples: Pool) -> Trained:
    """Train, and tell of every epoch on standard error; UsageError where it diverges."""
    from gradient_ranks.training import accuracy, trained

    begun, theta = time.perf_counter(), np.empty(0)
    steps = trained(net, samples.train_pixels, samples.train_labels, samples.peak, how)
    for epoch, (loss, theta) in enumerate(steps, start=1):
        print(f"epoch {epoch} of {how.epochs}: training loss {loss:.5f}", file=sys.stderr, flush=True)
        if not isfinite(loss) or not np.isfinite(theta).all():
            raise UsageError(f"--lr {how.lr:g}: training diverged in epoch {epoch}; expected a smaller rate")
    seconds = time.perf_counter() - begun
    train = accuracy(net, theta, samples.train_pixels, samples.train_labels, samples.peak)
    test = accuracy(net, theta, samples.test_pixels, samples.test_labels, samples.peak)
    return Trained(how, theta, train, test, seconds)


def reused(options: argparse.Namespace) -> Trained:
    """Return theta* of an output file; UsageError where an option says that it is to be trained otherwise."""
    found = files.trained(options.theta)
    for name in ("data", "hidden", "activation", "optimizer", "epochs", "batch", "lr"):
        given = widths(options.hidden) or None if name == "hidden" else getattr(options, name)
        was = getattr(found.setting, name)
        if given not in (None, was):
            raise UsageError(f"--{name} {given}: {options.theta} was trained with {was}; leave one of them out")
    return found


def drawn(options: argparse.Namespace) -> tuple[Draw, dict[str, Any]]:
    """Train or read theta*, draw samples and weights; return them and the study's attributes."""
    check(options)
    old = reused(options) if options.theta else None
    how = old.setting if old else setting(options)
    samples, shape, classes = pool(how.data, options.data_dir)
    k, there = options.samples, len(samples.test_labels)
    if k > there:
        raise UsageError(f"--samples {k}: there are {there} test samples; did you mean {there}?")
    from gradient_ranks.network import Network
    from gradient_ranks.sharing import Draw
    from gradient_ranks.slices import SHARE, TRIVIAL, drawn_samples, drawn_weights, spread

    form: dict[str, Any] = {"shape": shape, "filters": FILTERS[how.data], "hidden": how.hidden, "classes": classes}
    form |= {"activation": how.activation}
    net = Network(**form)
    found = old or learned(how, net, samples)
    if len(found.theta) != net.size:
        raise UsageError(f"--theta {options.theta}: {len(found.theta)} weights; expected {net.size} for {how.data}")
    least = 0.0 if options.all_weights else TRIVIAL
    weights, eligible = drawn_weights(options.seed, found.theta, options.weights, least)
    if not eligible:
        raise UsageError(f"all weights are below {least}: nothing to draw; did you mean --all-weights?")
    rows = drawn_samples(options.seed, there, k)
    arrays = {"theta": found.theta, "pixels": samples.test_pixels[rows], "labels": samples.test_labels[rows]}
    arrays |= {"samples": rows, "weights": weights}
    told = {name: getattr(found, name) for name in ("train_accuracy", "test_accuracy", "training_seconds")}
    told |= {
        "parameters": net.size,
        "eligible": eligible,
        "least": least,
        "share": SHARE,
        "spread": spread(found.theta),
    }
    told |= {name: getattr(options, name) for name in ("all_weights", "samples", "seed", "perturbation")}
    facts = {"network": form, "peak": samples.peak, "seed": options.seed, "perturbation": options.perturbation}
    return Draw(facts, arrays), asdict(how) | told | {"weights": len(weights)}


def finished(options: argparse.Namespace, told: dict[str, Any], draw: Draw, found: Array, singular: Array) -> Case:
    """Return the approximate ranks of the slices ``[q, i, j]``; write the file if one is wished for."""
    from gradient_ranks.network import Network
    from gradient_ranks.slices import approximate_ranks, rows_needed

    case = Case(told, approximate_ranks(singular), rows_needed(found))
    if options.out:
        arrays = {name: draw.arrays[name] for name in ("theta", "samples", "weights")}
        names = Network(**draw.facts["network"]).names(arrays["weights"])
        files.write(options.out, case, arrays | {"slices": found, "singular_values": singular}, names)
    return case


def first(comm: Any) -> bool:
    """Whether this is rank 0, or the only process."""
    return comm is None or comm.Get_rank() == 0


def study(options: argparse.Namespace, comm: Any) -> Case | None:
    """Carry out a study on all ranks; rank 0 returns what was found."""
    if not first(comm):
        import torch  # noqa: F401 - takes seconds, while rank 0 trains and not after
    prepared = raise_together(comm, lambda: drawn(options) if first(comm) else None)
    from gradient_ranks.sharing import gathered, shared, slices

    begun = time.perf_counter()
    draw = shared(comm, prepared[0] if prepared else None)
    own, count = slices(comm, draw), len(draw.arrays["weights"])
    singular = gathered(comm, np.linalg.svd(own, compute_uv=False), count)
    found = gathered(comm, own, count)
    if prepared is None:
        return None
    size = 1 if comm is None else comm.Get_size()
    told = prepared[1] | {"processes": size, "seconds": time.perf_counter() - begun}
    return finished(options, told, draw, found, singular)


def title(told: dict[str, Any]) -> str:
    """Return what sets a study apart."""
    words = [told["data"], f"K = {', '.join(map(str, told['hidden']))}", f"k = {told['samples']}"]
    words += [word for word, usual in ((told["activation"], "logistic"), (told["optimizer"], "adam")) if word != usual]
    words += [f"perturbation x {told['perturbation']:g}"] if told["perturbation"] != 1 else []
    return ", ".join([*words, *(["all weights"] if told["all_weights"] else [])])


def draw_histograms(cases: Sequence[Case], picture: Path) -> None:
    """Draw a histogram of each study's approximate ranks, all on one axis of ranks."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    wide = min(3, len(cases))
    figure, panels = plt.subplots(
        ceil(len(cases) / wide), wide, figsize=(4 * wide, 2.8 * ceil(len(cases) / wide)), squeeze=False, sharex=True
    )
    most = max(10, *(int(case.ranks.max()) for case in cases))
    for panel, case in zip(panels.flat, cases):
        panel.hist(case.ranks[case.ranks > 0], bins=np.arange(0.5, most + 1))
        panel.set_title(title(case.attributes), fontsize="small")
        panel.set(xlabel="approximate rank", ylabel="weights")
        panel.tick_params(labelbottom=True)
    for panel in list(panels.flat)[len(cases) :]:
        panel.remove()
    figure.tight_layout()
    with replace(picture) as new:
        figure.savefig(new, dpi=120)
    plt.close(figure)


def shown(options: argparse.Namespace, cases: Sequence[Case]) -> None:
    """Draw the picture if one is wished for, and print the JSON line."""
    if options.picture:
        draw_histograms(cases, options.picture)
    found = [files.summary(case) for case in cases]
    print(json.dumps({"studies": found} if options.files else found[0]))


def carried_out(options: argparse.Namespace, comm: Any) -> None:
    """Do what the options say; the files of ``--from`` are rank 0's alone."""
    if not options.files:
        case = study(options, comm)
        cases = [case] if case else []
    else:
        raise_together(comm, lambda: check(options))
        cases = raise_together(comm, lambda: [files.read(path) for path in options.files] if first(comm) else [])
    raise_together(comm, lambda: shown(options, cases) if cases else None)


def main() -> None:
    """Carry out the study, or show studies that are there."""
    options, comm = arguments(), None
    try:
        comm = world()
        carried_out(options, comm)
    except (UserError, ErrorOnOtherRank) as error:
        if comm is not None:  # before leaving, or the launcher kills the others
            from mpi4py import MPI

            MPI.Finalize()
        raise SystemExit(str(error) if isinstance(error, UserError) else 1) from None
    except Exception as error:
        fail(comm, None, error)


if __name__ == "__main__":
    main()
