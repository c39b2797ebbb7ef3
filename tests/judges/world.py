"""What all judges see: unequal clients, where their model begins, what is drawn for them, and what hpcfl makes of it.

A judge is a short loop, written from a method's paper, that imports torch and numpy alone. It is handed plain tensors
and says what is left of them; hpcfl leaves the same, to 1e-12 in double precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

import hpcfl
from hpcfl import config as configs
from hpcfl import store
from hpcfl.engine import loop
from hpcfl.engine.job import Job
from hpcfl.engine.record import Recorder
from hpcfl.engine.simulated import Simulated
from hpcfl.mpi.transport import Transport

SEED = 285
ROUNDS = 4
SIZES = 1, 3, 60, 7, 52, 5
"""Training samples. `BATCH` does not divide the 60's pass, in whose last step the client of 52 has none."""
BATCH = 13
CLASSES = 4
NEVER = 5
"""The client that is never invited in `ROUNDS` rounds of `SOME`; each of the others is absent once at least."""
SOME = {"invite": "uniform", "size": 3}
LAYERS = {"fc1": (5, 4), "fc2": (3, 5), "fc3": (CLASSES, 3)}
"""Three linear layers with ReLU between them: outputs and inputs of each."""
LAYER = {f"{layer}.{part}": number for number, layer in enumerate(LAYERS, 1) for part in ("weight", "bias")}
"""The layer (1 … 3) that a tensor is in."""
TOLERANCE = 1e-12

Params = dict[str, Tensor]
Client = tuple[Tensor, Tensor]
"""Training features, float64 [n, 4], and classes, int64 [n]."""


def clients() -> list[Client]:
    """Every client has a mean of its own and lacks a class."""
    rng = np.random.default_rng(11)
    held = []
    for client, size in enumerate(SIZES):
        y = (client + rng.integers(CLASSES - 1, size=size)) % CLASSES
        x = rng.normal(size=(size, 4)) + np.eye(CLASSES)[y] + 0.5 * rng.normal(size=4)
        held.append((torch.from_numpy(x.astype(np.float32)).double(), torch.from_numpy(y)))
    return held


def drawn(layers: Mapping[str, tuple[int, int]], seed: int = 12) -> Params:
    """Values of some linear layers, by the names that hpcfl's models have."""
    rng, found = np.random.default_rng(seed), {}
    for name, shape in layers.items():
        found[f"{name}.weight"] = torch.from_numpy(rng.normal(0, 0.6, shape))
        found[f"{name}.bias"] = torch.from_numpy(rng.normal(0, 0.6, shape[0]))
    return found


def weights(by: str = "samples") -> dict[int, float]:
    """What each client counts."""
    return {client: size if by == "samples" else 1 for client, size in enumerate(SIZES)}


def start() -> Params:
    """What the model begins with."""
    return drawn(LAYERS)


def batches(
    round_: int, client: int, epochs: int = 2, size: int = BATCH, phase: int = 0, steps: int | None = None
) -> list[Tensor]:
    """The samples of each step of a visit: every pass has an order of its own, its last batch may be smaller.

    The order is hpcfl's own, by its keyed generator. Size 0 is a batch of all samples; so many `steps` in place of
    epochs are whole batches that run on from pass to pass.
    """
    rng, held = hpcfl.keyed(SEED, "batches", round_, client, phase), SIZES[client]
    size = min(size or held, held)
    passes = epochs if steps is None else -(-steps * size // held)
    orders = [torch.from_numpy(rng.permutation(held)) for _ in range(passes)]
    if steps is not None:
        return list(torch.cat(orders).split(size)[:steps])
    return [batch for order in orders for batch in order.split(size)]


class Unequal(hpcfl.Source):
    """The `clients`, with their first two samples for tests."""

    def check(self, count: int, data_dir: Path | None) -> Any:
        return self.federate(count, 0, data_dir).header

    def federate(self, count: int, seed: int, data_dir: Path | None) -> hpcfl.InMemory:
        held = [(x.float().numpy(), y.numpy()) for x, y in clients()[:count]]
        return hpcfl.InMemory.of([hpcfl.ClientData(x, y, x[:2], y[:2]) for x, y in held], CLASSES)


@dataclass(frozen=True)
class Outcome:
    """What a run left: the server's state, what never leaves it, each client's own, and a row for each round."""

    shared: Mapping[str, Any]
    extras: Mapping[str, Any]
    personal: list[Mapping[str, Any]]
    rows: Mapping[str, np.ndarray[Any, Any]]
    """What is recorded, by column: ``cohort``, ``arrived``, ``depth`` [rounds, clients], ``loss`` [rounds] ..."""

    def who(self, column: str = "arrived") -> list[list[int]]:
        """The clients of each round, ascending: who ``arrived``, or who was invited (``cohort``)."""
        return [np.flatnonzero(row).tolist() for row in self.rows[column]]


def config(folder: Path, **sections: Any) -> configs.Config:
    """Return the config of a run on these clients, and write the files that it names.

    Sections and keys replace those below; keys of `data` and `model` are added. `speed` may be an array: seconds
    [clients] or [rounds, clients], or integers, the first layer that is there at the deadline; `communication` is added
    to it. `initial` are clients' own first values, by client.
    """
    values = dict(start())
    for client, own in sections.pop("initial", {}).items():
        values |= {f"clients/{client}/{name}": value for name, value in own.items()}
    write(folder / "initial.h5", values)
    speed, data, model = (sections.pop(name, {}) for name in ("speed", "data", "model"))
    if isinstance(speed, np.ndarray):
        speed = table(folder / "speed.csv", speed) | {"communication": sections.pop("communication", 0.0)}
    return configs.from_table(
        {
            **{"rounds": ROUNDS, "clients": len(SIZES), "seed": SEED, "precision": "double", "batch_clients": 4},
            **{"evaluate": {"every": ROUNDS + 1, "last": 1}},
            **{"data": {"name": "judges.world:Unequal", **data}},
            **{"model": {"name": "mlp", "hidden": [5, 3], "initial": f"{folder}/initial.h5", **model}},
            **{"speed": speed, **sections},
        }
    )


def write(path: Path, values: Mapping[str, Tensor]) -> None:
    with h5py.File(path, "w") as file:
        file.update({name: value.numpy() for name, value in values.items()})


def table(path: Path, values: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Write a table of speeds; return the section that names it."""
    kind = "depth" if values.dtype.kind == "i" else "seconds"
    places = ["round", "client"][-values.ndim :]
    rows = [",".join([*places, kind])]
    rows += [",".join(map(str, (*place, value.item()))) for place, value in np.ndenumerate(values)]
    path.write_text("\n".join([*rows, ""]))
    return {"model": "table", "file": str(path)}


class Rows(Recorder):
    """Keeps in memory what a run records."""

    def __init__(self, job: Job) -> None:
        self.run_dir, self.job, self.warned, self.rejections, self.kept = Path(), job, set(), 0, []
        self.segment = SimpleNamespace(write=lambda round_, row: self.kept.append(row), event=lambda *event: None)
        self.reporter = SimpleNamespace(round=lambda done, row: None, warn=lambda kind, text, always=False: None)


def play(folder: Path, **sections: Any) -> Outcome:
    """Play a run in simulated time in this process and in memory: what `run` does, but for the files it writes."""
    return played(config(folder, **sections))


def played(settings: configs.Config) -> Outcome:
    """`play` any config."""
    settings.check(None)
    job = Job.of(settings, None, 1)
    now, recorder = job.begin(0), Rows(job)
    stop, saver = SimpleNamespace(requested=str), SimpleNamespace(look=dict, save=lambda now, scores: None)
    loop.run(job, Simulated(job, Transport(), 0), recorder, now, stop, saver)
    own: list[Mapping[str, Any]] = [{} for _ in range(settings.clients)]
    for chunk in job.chunks:
        for row, client in enumerate(chunk.clients.tolist()):
            own[client] = {name: value[row].numpy() for name, value in now.personal[chunk.number].items()}
    absent = {name: np.full(np.shape(value), np.nan) for row in recorder.kept for name, value in row.items()}
    rows = {name: np.array([row.get(name, nothing) for row in recorder.kept]) for name, nothing in absent.items()}
    return Outcome(now.shared, now.extras, own, rows)


def run(folder: Path, comm: Any = None, **sections: Any) -> Outcome | None:
    """Let hpcfl run, alone or on ranks that see one `folder`; None on all ranks but the first."""
    first = comm is None or comm.Get_rank() == 0
    done = hpcfl.run(config(folder, **sections) if first else {}, out=folder / "run", quiet=True, comm=comm)
    if not first:
        return None
    path = store.latest(done.folder)
    assert path is not None
    saved, own = store.load(path), store.load_personal(path, range(len(SIZES)))
    rows = {str(name): done.data[name].values for name in done.data.data_vars}
    return Outcome(saved.shared, saved.extras, [own.get(client, {}) for client in range(len(SIZES))], rows)


def near(found: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float = TOLERANCE) -> None:
    """Assert that all that a judge has is found."""
    assert wanted
    for name, value in wanted.items():
        equal(found[name], value, name, tolerance)


def equal(found: Any, wanted: Any, name: str = "", tolerance: float = TOLERANCE) -> None:
    """Assert that numbers agree; NaN is where NaN is."""
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=0, atol=tolerance, err_msg=name)
