"""Which of the released code's choices its accuracy comes from, on the authors' own noisy features (FLIC, Figure 3).

    python analysis/flic_released.py --data-dir DIR --out runs/flic-released --seeds 1 2 3

DIR, by default HPCFL_DATA, holds flic/toy_nf.npz: training samples x{u}, y{u} and test samples tx{u}, ty{u} of clients
u = 0 … 99. Runs Local, FLIC-Class as the text has it, as released (the overlay flic-released), as released with each
choice as in the text by turns, as in the text with each choice (and one pair) as released by turns, and FLIC-HL as
released: 50 rounds, 10 of 100 clients each, 10 local epochs, 30 epochs of alignment before in batches of 100.
Accuracies are weighted by test samples. Prints per case mean ± standard deviation over seeds, and the difference to the
released case (of the text's with one choice: to the text's), seed by seed, with its standard error. Runs that are there
already are only read; `--cases` carries out some, `--list` names all. With `--pad` features are padded with zeros to
the widest client's, and all clients are computed together; the first layer's initial values are then those of 15
features. Costs 1 to 3 minutes per run, with `--most 100` half a minute. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from rich.console import Console
from rich.table import Table

import hpcfl
from hpcfl.base.errors import UsageError
from hpcfl.config import load
from hpcfl.config.presets import read_overlay

SOURCE = "flic/toy_nf.npz"
FILE = "toy_nf.h5"
CLIENTS, WIDEST = 100, 15
TEXT: dict[str, Any] = {
    "rounds": 50,
    "clients": CLIENTS,
    "algorithm": {"name": "flic", "epochs": 10, "pretrain": 30, "pretrain_batch": 100, "evaluation": "tuned"},
    "participation": {"invite": "uniform", "size": 10},
    "data": {"name": "hdf5", "file": FILE},
    "model": {"name": "latent"},
    "evaluate": {"every": 50, "last": 1},
}
LOCAL: dict[str, Any] = TEXT | {
    "algorithm": {"name": "local", "optimizer": "adam", "lr": 1e-3, "batch": 100, "epochs": 10, "evaluation": "tuned"},
    "model": {"name": "latent", "widths": [64]},
}
CHOICES: dict[str, tuple[str, ...]] = {
    "joint step": ("local_step",),
    "anchors step per batch": ("anchor_every",),
    "anchors by means": ("anchor_loss",),
    "sampled distance": ("distance",),
    "spread 10": ("spread",),
    "covariance e·I": ("deviation",),
    "weight decay": ("weight_decay",),
    "re-alignment of all": ("realign_who",),
    "re-alignment at the end": ("evaluation",),
    "re-alignment": ("realign", "realign_who", "evaluation"),
    "re-alignment and spread 10": ("realign", "realign_who", "evaluation", "spread"),
}
"""What the released code does differently, and the keys that say so."""
Case = tuple[dict[str, Any], Sequence[str], dict[str, Any]]
"""A config, overlays on it, keys of the algorithm on top."""


def cases() -> dict[str, Case]:
    """Return all cases by name."""
    released = read_overlay("flic-released")["algorithm"]
    text = load(TEXT).algorithm.model_dump() | TEXT["algorithm"]
    found: dict[str, Case] = {
        "Local": (LOCAL, (), {}),
        "text": (TEXT, (), {}),
        "released": (TEXT, ("flic-released",), {}),
        "FLIC-HL released": (TEXT, ("flic-released", "flic-hl-released"), {}),
    }
    for name, keys in CHOICES.items():
        found[f"released without {name}"] = TEXT, ("flic-released",), {key: text[key] for key in keys}
        if name not in (
            "re-alignment of all",
            "re-alignment at the end",
        ):  # a part of it, which means nothing by itself
            found[f"text with {name}"] = TEXT, (), {key: released[key] for key in keys}
    return found


def convert(data_dir: Path, out: Path, pad: bool, most: int) -> None:
    """Write the authors' split as a file of clients."""
    arrays, path = np.load(data_dir / SOURCE), out / FILE
    out.mkdir(parents=True, exist_ok=True)
    kept = [client for client in range(CLIENTS) if len(arrays[f"y{client}"]) <= most]
    with h5py.File(path.with_suffix(".part"), "w") as file:
        for number, client in enumerate(kept):
            for split, letter in (("train", ""), ("test", "t")):
                group = file.create_group(f"clients/{number}/{split}")
                x = arrays[f"{letter}x{client}"].astype(np.float32)
                group["features"] = np.pad(x, ((0, 0), (0, WIDEST - x.shape[1]))) if pad else x
                group["labels"] = arrays[f"{letter}y{client}"].astype(np.int64)
    path.with_suffix(".part").rename(path)


def accuracy(name: str, seed: int, file: Path, carry_out: bool) -> tuple[float, float] | None:
    """Return one run's accuracy, weighted by test samples, and its seconds; None where it is not done."""
    config, overlays, keys = cases()[name]
    with h5py.File(file) as there:
        count = len(there["clients"])
    folder = file.parent / f"{''.join(letter if letter.isalnum() else '-' for letter in name)}_seed={seed}"
    settings = {f"algorithm.{key}": value for key, value in keys.items()} | {"seed": seed}
    settings |= {"clients": count, "batch_clients": count, "participation.size": max(1, round(count / 10))}
    if carry_out:
        where: dict[str, Any] = {"out": folder, "data_dir": file.parent, "resume": True, "quiet": True}
        hpcfl.run(config, overlays=overlays, settings=settings, **where)
    if not (folder / "run.h5").exists() or (data := hpcfl.open_run(folder)).attrs["status"] != "done":
        return None
    last = data["client_accuracy"].dropna("round", how="all")[-1].values
    weighted = float(np.average(last, weights=data["test_samples"].values))
    return weighted, float(data["wall_seconds"][-1])


def rows(found: Mapping[str, Mapping[int, tuple[float, float]]]) -> list[dict[str, Any]]:
    """Return the figures of each case; its difference is to the case that it changes."""
    made = []
    for name, seeds in found.items():
        values = [value for value, _ in seeds.values()]
        base = found.get("text" if name.startswith("text with") else "released", {})
        less = [value - base[seed][0] for seed, (value, _) in seeds.items() if seed in base]
        row: dict[str, Any] = {"case": name, "seeds": list(seeds), "accuracy": statistics.fmean(values)}
        row["std"] = statistics.stdev(values) if len(values) > 1 else None
        row["difference"] = statistics.fmean(less) if less else None
        row["error"] = statistics.stdev(less) / sqrt(len(less)) if len(less) > 1 else None
        made.append(row | {"wall_seconds": statistics.fmean(seconds for _, seconds in seeds.values())})
    return made


def shown(found: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table, in points of per cent."""
    table = Table("case", "seeds", "accuracy", "difference", "wall s")
    for row in found:
        cells = (points(row["accuracy"], row["std"]), points(row["difference"], row["error"]))
        table.add_row(row["case"], str(len(row["seeds"])), *cells, f"{row['wall_seconds']:.0f}")
    return table


def points(mean: float | None, by: float | None) -> str:
    """Return a mean and how sure it is."""
    if mean is None:
        return "-"
    return f"{100 * mean:.2f}" + ("" if by is None else f" ± {100 * by:.2f}")


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    there = os.environ.get("HPCFL_DATA")
    parser.add_argument("--data-dir", type=Path, default=there, help=f"folder that holds {SOURCE} (HPCFL_DATA)")
    parser.add_argument("--out", type=Path, default=Path("runs/flic-released"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--cases", nargs="*", help="carry out these alone; none: only read what is there")
    parser.add_argument("--most", type=int, default=400, help="only clients of at most so many training samples")
    parser.add_argument("--pad", action="store_true", help="pad features with zeros, so that all clients go together")
    parser.add_argument("--list", action="store_true", help="name all cases and end")
    options = parser.parse_args()
    if options.list:
        raise SystemExit("\n".join(cases()))
    wanted = list(cases()) if options.cases is None else options.cases
    if unknown := [name for name in wanted if name not in cases()]:
        raise SystemExit(f"--cases {unknown[0]!r}: expected one of {', '.join(cases())}")
    file = options.out / FILE
    if not file.exists():
        if options.data_dir is None or not (options.data_dir / SOURCE).is_file():
            raise SystemExit(f"--data-dir {options.data_dir}: expected a folder that holds {SOURCE}")
        convert(options.data_dir, options.out, options.pad, options.most)
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for name in cases():
        for seed in options.seeds:
            try:
                one = accuracy(name, seed, file, name in wanted)
            except UsageError as error:
                raise SystemExit(str(error)) from None
            if one is not None:
                found.setdefault(name, {})[seed] = one
    made = rows(found)
    Console(width=120).print(shown(made))
    print(json.dumps({"flic_released": made}, allow_nan=False))


if __name__ == "__main__":
    main()
