"""Who adapts to what, judged from a run folder and headers before torch is there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcfl import config as configs
from hpcfl import store
from hpcfl.algorithms import algorithm_class, algorithms
from hpcfl.base.errors import UsageError
from hpcfl.base.types import Ints
from hpcfl.comm.launcher import world
from hpcfl.commands.show import digest
from hpcfl.engine.trained import newest
from hpcfl.launch.request import check_writable

if TYPE_CHECKING:
    from hpcfl.config import Config


@dataclass(frozen=True)
class Wish:
    """Who is to adapt to what.

    Attributes
    ----------
    newest : Path
        The run's newest whole checkpoint.
    saved : hpcfl.store.Checkpoint
        What it holds, without personal state.
    clients : int64 [n]
        Ascending ids.
    epochs : int
        Passes over each client's training data.
    out : Path, optional
        The HDF5 file to write.
    """

    folder: Path
    config: Config
    data: Path | None
    newest: Path
    saved: store.Checkpoint
    clients: Ints
    epochs: int
    out: Path | None

    @property
    def facts(self) -> dict[str, Any]:
        """What the figures are of: run, round, state_sha256, algorithm, epochs."""
        return {
            "run": str(self.folder),
            "round": self.saved.round,
            "state_sha256": digest(self.saved.shared),
            "algorithm": self.config.algorithm.name,
            "epochs": self.epochs,
        }


def check_alone() -> None:
    """Raise UsageError where a launcher started this process."""
    if world() is not None:
        raise UsageError("hpcfl adapt was started by an MPI launcher, but is one process: expected it without mpirun")


def judged(path: Path, chosen: str | None, epochs: int | None, data_dir: Path | None, out: Path | None) -> Wish:
    """Return what is asked for, from headers and checkpoints alone.

    Parameters
    ----------
    path : Path
        The run folder.
    chosen : str, optional
        Client ids with commas between them, or ``"all"``; None: those that never took part.
    epochs : int, optional
        At least 1; None: the algorithm's own number.
    data_dir : Path, optional
        Folder of the data sets; None: where the run found them.
    out : Path, optional
        A file that does not exist.

    Raises
    ------
    UsageError
        If there is no run or no checkpoint, its algorithm cannot adapt, a client is not known or nobody is left, the
        file is there or cannot be written, or the data are not there.
    RunError
        If no checkpoint can be read whole.
    """
    folder = store.run_folder(path)
    attributes = store.run_attributes(folder)
    config = configs.from_text(attributes["config"])
    _check_algorithm(config)
    last = newest(folder)
    saved = store.load(last, personal=False)
    clients = absent(folder, config.clients, saved.round) if chosen is None else picked(chosen, config.clients)
    if out is not None:
        if os.path.lexists(out):
            raise UsageError(f"--out {out} already exists: expected a new file")
        check_writable(out)
    data = store.data_folder(attributes, data_dir)
    header = config.data.check(config.clients, data)
    config.check_shapes(header)
    return Wish(folder, config, data, last, saved, clients, epochs or config.algorithm.adapt_epochs, out)


def _check_algorithm(config: Config) -> None:
    """Refuse a method without layers that learn alone."""
    if not config.algorithm.adapt_epochs:
        able = [name for name in algorithms() if algorithm_class(name).model_construct(name=name).adapt_epochs]
        raise UsageError(
            f"algorithm.name = '{config.algorithm.name}' has no layers that a client could adapt; "
            f"expected a run of {', '.join(able)}"
        )


def picked(text: str, clients: int) -> Ints:
    """Return the ids in ``"3,5"``, ascending, or all for ``"all"``, int64 [n]; UsageError where one is not known."""
    if text.strip() == "all":
        return np.arange(clients)
    found = set()
    for word in text.split(","):
        try:
            client = int(word)
        except ValueError:
            raise UsageError(
                f"--client {text}: expected ids with commas between them, or 'all'; got '{word}'"
            ) from None
        if not 0 <= client < clients:
            near = min(max(client, 0), clients - 1)
            raise UsageError(f"--client {text}: expected ids 0 … {clients - 1}, got {client}; did you mean {near}?")
        found.add(client)
    return np.array(sorted(found))


def absent(folder: Path, clients: int, rounds: int) -> Ints:
    """Return the clients of which nothing counted in the first `rounds` rounds, int64 [n]; UsageError if none is."""
    data = store.open_run(folder)
    counted = np.zeros(clients, dtype=bool)
    if "arrived" in data:  # rounds after the checkpoint are no part of its state
        counted = (data["arrived"].values[data["round"].values < rounds] == 1).any(0)
    if counted.all():
        raise UsageError(f"all clients of '{folder}' have taken part: expected --client ID[,ID...] or --client all")
    return np.flatnonzero(~counted)
