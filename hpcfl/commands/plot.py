"""Accuracy against rounds and against simulated time, several runs in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcfl import store
from hpcfl.base.errors import UsageError, did_you_mean


def plot(runs: Sequence[Path], picture: Path) -> None:
    """Draw the accuracy curves of `runs` into `picture` (format by its suffix)."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    kinds = plt.figure().canvas.get_supported_filetypes()
    if picture.suffix.removeprefix(".") not in kinds:
        raise UsageError(f"'{picture}': no picture of that kind{did_you_mean(picture.suffix.removeprefix('.'), kinds)}")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for path in runs:
        data = store.open_run(path)
        if "accuracy" not in data:  # killed before its first segment was there
            continue
        accuracy, name = _accuracy(data), store.run_folder(path).resolve().name
        left.plot(accuracy["round"] + 1, accuracy, label=name)
        right.plot(data["sim_seconds"].sel(round=accuracy["round"]), accuracy, label=name)
    left.set(xlabel="round", ylabel="test accuracy")
    right.set(xlabel="simulated seconds")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    if left.lines:
        left.legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def _accuracy(data: Any) -> Any:
    """The global test accuracy where it was recorded, else the mean over the clients' own test parts."""
    accuracy = data["accuracy"]
    if not accuracy.notnull().any():
        accuracy = data["client_accuracy"].mean("client")
    return accuracy.dropna("round")
