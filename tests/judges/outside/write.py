"""``python -m judges.outside.write FOLDER``: small runs of hpcfl as arrays, for judges that do not have it.

A run is ``NAME.npz``: of n visits, in the order in which they arrived, ``step``, ``client`` and ``version`` [n] (which
step they counted in, and how many had been taken when they began), of each block that they sent ``change:BLOCK``
[n, ...] and ``weight:BLOCK`` [n]; ``state:TENSOR`` [steps + 1, ...]; and ``settings``, the run's config as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcfl.math.gaussian import bures_factor_squared
from judges import world
from judges.arrivals import Visit, trace
from judges.outside import hook

TRAINING = {"lr": 0.2, "batch": world.BATCH, "epochs": 1}
PACES = np.array([0.9, 3.5, 1.7, 0.4, 2.6, 1.3])
PAIRS = {"rounds": 5, "participation": {"invite": "uniform", "size": 2}}
BUFFER = {"rounds": 5, "participation": {"close": "arrivals", "buffer": 2, "concurrency": 4}, "speed": PACES}


def averaging(weights: str = "samples", steps: int = 0, **sections: Any) -> dict[str, Any]:
    keys = {**TRAINING, "weights": weights, **({"epochs": 0, "steps": steps} if steps else {})}
    return {"algorithm": {"name": "judges.outside.hook:Averaging", **keys}, **sections}


def scheduled(rule: str, weights: str, rounds: int, **sections: Any) -> dict[str, Any]:
    speed = {"model": "lognormal", "mean": 2.0, "between": 0.6, "within": 0.3}
    rules = {"participation": {"close": "arrivals", "dispatch": rule}, "speed": speed, **sections}
    return averaging(weights, 9, rounds=rounds, **rules)


GROUPS = {
    "server": {"optimizer": "momentum", "lr": 0.9, "betas": [0.0]},
    "scheduler": {"least_steps": 2, "patience": 1.2},
    "staleness": {"weight": "polynomial", "a": 0.5, "divisor": "clients"},
}
QUEUE = {
    "scheduler": {"least_steps": 2, "period": 3.0, "margin": 0.2, "allowance": 0.1},
    "staleness": {"weight": "harmonic", "a": 1.0, "divisor": "weights"},
    "queue": {"model": "lognormal", "mean": 0.7, "within": 0.9},
}
ANCHORS = {"covariances": "bures", "tolerance": 1e-12, "weights": "samples", "average": "holders", "lambda1": 1.0}
ANCHORS |= {"anchor_optimizer": "sgd", "anchor_lr": 0.3, "anchor_steps": 5}
RUNS: dict[str, dict[str, Any]] = {
    "fedavg": averaging(**PAIRS),
    "fedavg-uniform": averaging("uniform", **PAIRS),
    "fedavgm": averaging(server={"optimizer": "momentum", "lr": 1.0, "betas": [0.8]}, **PAIRS),
    "fedadam": averaging(server={"optimizer": "adam", "lr": 0.05, "betas": [0.9, 0.99], "tau": 0.02}, **PAIRS),
    "fedyogi": averaging(server={"optimizer": "yogi", "lr": 0.05, "betas": [0.9, 0.99], "tau": 0.02}, **PAIRS),
    "fedadagrad": averaging(server={"optimizer": "adagrad", "lr": 0.05, "betas": [0.0], "tau": 0.02}, **PAIRS),
    "fedbuff": averaging("uniform", staleness={"weight": "polynomial", "a": 0.5}, **BUFFER),
    "fedasync": {
        "algorithm": {"name": "judges.outside.hook:Mixing", **TRAINING, "mu": 0.1, "alpha": 0.6},
        "participation": {"close": "arrivals", "buffer": 1},
        "staleness": {"weight": "hinge", "a": 2.0, "b": 1},
        "rounds": 10,
        "speed": PACES,
    },
    "fedcompass": scheduled("fedcompass", "uniform", 8, **GROUPS),
    "fedqueue": scheduled("fedqueue", "samples", 4, **QUEUE),
    "flic": {
        "algorithm": {"name": "judges.outside.hook:Aligning", "batch": 26, **ANCHORS},
        "model": {"name": "latent", "widths": [5], "dimension": 3, "hidden": [4], "initial": None},
        "participation": {"invite": "uniform", "size": 4},
        "rounds": 3,
    },
}


def write(name: str, folder: Path) -> None:
    hook.SENT.clear()
    hook.STATES.clear()
    found = world.play(folder, **RUNS[name])
    rounds: list[list[Visit]] = [[(client, step, 0) for client in who] for step, who in enumerate(found.who())]
    steps = trace(found.rows) if "arrival_client" in found.rows else rounds
    visits = [(step, visit) for step, came in enumerate(steps) for visit in came]
    sent = [hook.SENT[visit] for _, visit in visits]
    arrays = {
        "step": [step for step, _ in visits],
        "client": [client for _, (client, _, _) in visits],
        "version": [version for _, (_, version, _) in visits],
        "settings": json.dumps(RUNS[name], default=np.ndarray.tolist),
        **{f"change:{block}": np.stack([message[block][0].numpy() for message in sent]) for block in sent[0]},
        **{f"weight:{block}": [message[block][1] for message in sent] for block in sent[0]},
        **{f"state:{tensor}": np.stack([each[tensor].numpy() for each in hook.STATES]) for tensor in hook.STATES[0]},
    }
    np.savez(folder / f"{name}.npz", **arrays)


def distances(path: Path, count: int = 10) -> None:
    """Write 𝔅²(LLᵀ, ZᵀZ/n) as hpcfl has it, of drawn factors L and centred points Z, of 2 and 8 dimensions."""
    rng, arrays = np.random.default_rng(7), {}
    for k in (2, 8):
        factors, points = rng.normal(size=(count, k, k)), rng.normal(size=(count, 20, k))
        points -= points.mean(1, keepdims=True)
        found = bures_factor_squared(torch.from_numpy(factors), torch.from_numpy(points), 20)
        arrays |= {f"factors{k}": factors, f"points{k}": points, f"squared{k}": found.numpy()}
    np.savez(path, **arrays)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in RUNS:
        write(name, folder)
    distances(folder / "distances.npz")
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=12"]
    (folder / "commit").write_text(subprocess.run(git, capture_output=True, text=True).stdout.strip())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
