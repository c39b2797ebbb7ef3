"""Freeze what presets give today: ``python tests/golden/freeze.py`` writes frozen.json, tests/test_frozen.py compares.

Runs are started by the command line and read from their folders, so nothing here depends on how the package is
organised. The file is made anew only where results are meant to change; MNIST must be in ``HPCFL_DATA`` then. Columns
and norms are compared on any machine, digests on those of the kinds that the file names; ``--add`` adds the kind of
this machine, and presets that the file lacks, by code that is known to give what is frozen.

``salf-wall-digits/`` is a run by the wall clock, to be replayed. It was recorded once, on three ranks, four rounds and
``participation.deadline = 0.5``; its checkpoint was removed, and the columns that neither a replay nor ``hpcfl show``
reads. Its state had the digest that is frozen of the replay. When run folders got a format number, it was written anew,
with the same rows.

Not frozen are presets whose data are neither bundled nor MNIST's (cifar, emnist, femnist, sent140, usps, textcaps);
those that take longer (flic-toy-*, flic-hl-*, flic-released-*, flic-two-digits-small, flic-barycenter, fedhenn-toy-lm,
fedhenn-toy-nf, local-toy-lm, local-toy-nf); and those that in four rounds have nothing of their own but data
(fedhenn-toy-nf-small, fedhenn-two-digits-small, local-toy-lm-small, local-two-digits-small), a model (table2-mlp-salf,
table2-cnn-drop, table2-cnn-vanilla), or keys that other presets have (flanp-ft-, fedavg-ft-, fedrep-, lg-,
srpfl-fedrep-, srpfl-lg-, srpfl-fig4-, -fig5-, -fig7- and -fig8-stragglers-mnist-small); and salf-ridge, which is held
against theory.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

import hpcfl
from hpcfl.commands.cli import main as command

HERE = Path(__file__).parent
FILE = HERE / "frozen.json"

ALWAYS = ("rounds=4", "clock=simulated")
REPLAY = f"speed={{model='trace', run='{HERE / 'salf-wall-digits'}'}}"
STRAGGLERS = "speed={model='groups', means_of=[0.1, 10.0], shares_of=[0.9, 0.1]}"  # as srpfl-fig8-stragglers-*
AT_THE_END = ("evaluate.every=4", "evaluate.last=1")
SHORT = (*AT_THE_END, "algorithm.epochs=1", "algorithm.head_epochs=2")
FIRST = ("participation.close=first", "participation.first=10")
BUNDLED: dict[str, tuple[str, ...]] = {  # smaller chunks where there is but one: three ranks need two
    "async-digits": (),
    "diloco-digits": ("algorithm.steps=5",),
    "drop-digits": (),
    "fedave-breast-cancer": ("batch_clients=4",),
    "fedave-logistic": ("batch_clients=20",),
    "fedave-softmax-digits": ("batch_clients=8",),
    "fedasync-digits": (),
    "fedavg-digits": (),
    "fedbuff-digits": (),
    "fedhenn-toy-lm-small": ("algorithm.epochs=1", "data.samples_per_class=400"),
    "fedlrgd-breast-cancer": ("batch_clients=4",),
    "fedlrgd-logistic": ("batch_clients=20",),
    "fedlrgd-rough": (),
    "fedlrgd-softmax-digits": ("batch_clients=8",),
    "fedrep-linear": (),
    "flic-digits": ("algorithm.pretrain=1", "algorithm.epochs=2", "algorithm.tune_epochs=1"),
    "flic-linear": (),
    "flic-toy": ("algorithm.pretrain=1", "algorithm.epochs=2"),
    "local-toy-nf-small": ("algorithm.epochs=2", "data.samples_per_class=400"),
    "ringmaster-digits": (),
    "salf-digits": (),
    "salf-wall-digits": (REPLAY,),
    "srpfl-fedrep-digits": (),
    "srpfl-lg-digits": (STRAGGLERS,),
    "srpfl-linear": (),
    "wait-digits": (),
}
MNIST: dict[str, tuple[str, ...]] = {
    "hf-maml-mnist-small": (*AT_THE_END, *FIRST, "algorithm.steps=2"),
    "srpfl-fig6-dynamic-partial-mnist-small": SHORT,
    "srpfl-fig8-correlated-mnist-small": SHORT,
    "srpfl-fig8-imbalanced-mnist-small": (*SHORT, "data.train_samples=8000"),
    "table2-cnn-salf": (*AT_THE_END, "data.train_samples=5000"),
    "table2-mlp-drop": AT_THE_END,
    "table2-mlp-vanilla": AT_THE_END,
}
RUNS = BUNDLED | MNIST


def kind() -> dict[str, str]:
    """Return what the last bits depend on besides hpcfl: the processor and its vector units, and two libraries."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    known = dict(re.findall(r"^(.*?)\s*: (.*)$", text.partition("\n\n")[0], re.MULTILINE))
    names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    units = sorted(word for word in known.get("flags", "").split() if word.startswith(("avx", "fma", "amx")))
    chosen = os.environ.get("OPENBLAS_CORETYPE")  # whose products numpy is to compute as, whatever the processor
    return {
        "processor": " ".join([platform.machine(), *(f"{name} {known[name]}" for name in names if name in known)]),
        "units": " ".join(units),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        **({"blas": chosen} if chosen else {}),
    }


def has_data(name: str) -> bool:
    return name not in MNIST or (Path(os.environ.get("HPCFL_DATA", "")) / "mnist").is_dir()


def play(name: str, folder: Path) -> Path:
    """Run a preset on all ranks of this job and return its run folder."""
    options = [word for setting in (*ALWAYS, *RUNS[name]) for word in ("--set", setting)]
    code = command(["run", name, *options, "--out", str(folder), "--quiet"])
    if code:
        raise RuntimeError(f"hpcfl run {name} ended with {code}")
    return folder


def state(run: Path) -> tuple[dict[str, Any], list[tuple[int, str, Any]]]:
    """Return what the last checkpoint holds: the server's tensors by name, and personal ones client by client."""
    newest = max((run / "checkpoints").iterdir())
    with h5py.File(newest / "server.h5") as file:
        shared = {name: item[()] for name, item in file["shared"].items()}
        shared |= {f"server.{name}": item[()] for name, item in file["extras"].items()}
    personal = []
    for path in newest.glob("rank-*.h5"):
        with h5py.File(path) as file:
            personal += [
                (int(client), name, item[row])
                for group in file["personal"].values()
                for row, client in enumerate(group["ids"][:])
                for name, item in group["tensors"].items()
            ]
    return shared, sorted(personal, key=lambda entry: entry[:2])


def record(run: Path) -> dict[str, Any]:
    """Return what is frozen of a run; of a tensor in personal state, the norm is the sum of the clients' norms."""
    shared, personal = state(run)
    own: dict[str, float] = {}
    for _, name, value in personal:
        own[name] = own.get(name, 0.0) + norm(value)
    return {
        "digests": {
            "state_sha256": shown(run)["state_sha256"],
            "personal_sha256": digest((f"{client} {name}", value) for client, name, value in personal),
            "server_sha256": digest((name, shared[name]) for name in sorted(shared) if name.startswith("server.")),
        },
        **columns(run),
        "shared_norms": {name: rounded(norm(value)) for name, value in sorted(shared.items())},
        "personal_norms": {name: rounded(value) for name, value in sorted(own.items())},
    }


def shown(run: Path) -> dict[str, Any]:
    """Return what ``hpcfl show --json`` prints of a run."""
    with redirect_stdout(StringIO()) as out:
        command(["show", "--json", str(run)])
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def columns(run: Path) -> dict[str, list[Any]]:
    """Return recorded columns, an entry per round; of those by client a character per client, or the mean."""
    data = hpcfl.open_run(run)
    return {
        "sim_seconds": data["sim_seconds"].values.tolist(),
        "message_bytes": data["message_bytes"].values.tolist(),
        "arrived": ["".join(map(str, row)) for row in data["arrived"].values],
        "depth": ["".join("-" if depth < 0 else f"{depth:x}" for depth in row) for row in data["depth"].values],
        "accuracy": or_none(data["accuracy"].values),
        "client_accuracy": or_none(data["client_accuracy"].mean("client").values),
    }


def or_none(values: Any) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]


def digest(tensors: Iterable[tuple[str, Any]]) -> str:
    """Return SHA-256 of names, types, shapes and bytes."""
    found = hashlib.sha256()
    for name, value in tensors:
        found.update(f"{name} {value.dtype.str} {value.shape}\n".encode())
        found.update(np.ascontiguousarray(value).tobytes())
    return found.hexdigest()


def norm(value: Any) -> float:
    return float(np.linalg.norm(np.asarray(value, np.float64).ravel()))


def rounded(value: float) -> float:
    return float(f"{value:.6g}")


def main(add: bool) -> None:
    """Write frozen.json: anew, or with what it lacks of this kind of machine beside what it has.

    Made anew, it keeps other kinds' digests of the runs that are as they were on this one.
    """
    with tempfile.TemporaryDirectory() as scratch:
        runs = {name: record(play(name, Path(scratch) / name)) for name in RUNS}
    known, digests = json.loads(FILE.read_text()), {name: run.pop("digests") for name, run in runs.items()}
    others = [each for each in known["kinds"] if each["kind"] != kind()]
    if add:
        runs |= known["runs"]
    else:
        before = next((each["digests"] for each in known["kinds"] if each["kind"] == kind()), {})
        same = {name for name, value in digests.items() if before.get(name) == value}
        for each in others:
            each["digests"] = {name: value for name, value in each["digests"].items() if name in same}
    kinds = [*others, {"kind": kind(), "digests": digests}]
    text = json.dumps({"kinds": kinds, "runs": runs}, indent=1)
    FILE.write_text(re.sub(r"\[[^][{]*\]", lambda found: " ".join(found[0].split()), text) + "\n")


if __name__ == "__main__":
    main("--add" in sys.argv[1:])
