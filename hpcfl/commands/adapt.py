"""Clients that never took part in a run: their own layers learn, the shared ones are as the run left them.

So does SRPFL serve a client that joins later (Tziotis et al., remark 4.8).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from hpcfl import config as configs
from hpcfl import store
from hpcfl.algorithms import algorithm_class, algorithms
from hpcfl.base.errors import UsageError, refusal
from hpcfl.base.types import Ints
from hpcfl.comm.placement import chunk_size, cut_by_kind
from hpcfl.commands.show import digest
from hpcfl.engine.trained import loaded, newest, threads
from hpcfl.launch.request import check_writable
from hpcfl.store.atomic import created, replace

if TYPE_CHECKING:
    from hpcfl.base.types import State
    from hpcfl.config import Config
    from hpcfl.learning.task import Task

SCORES = ("accuracy_before", "accuracy_after", "loss_before", "loss_after")
COLUMNS = ("client", "train_samples", "test_samples", *SCORES)


@dataclass(frozen=True)
class AdaptRequest:
    """Who is to adapt to what; `saved` is the newest whole checkpoint without personal state, `clients` int64 [n]."""

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
        """What the figures are of."""
        return {
            "run": str(self.folder),
            "round": self.saved.round,
            "state_sha256": digest(self.saved.shared),
            "algorithm": self.config.algorithm.name,
            "epochs": self.epochs,
        }


def adapt_request(
    folder: Path, chosen: str | None, epochs: int | None, data_dir: Path | None, out: Path | None
) -> AdaptRequest:
    """Judge what is asked for, from headers and checkpoints alone: torch is not loaded.

    `chosen` are client ids with commas between them or ``"all"``, None: `newcomers`. `epochs` None is
    the algorithm's own number; `out` is a file that does not exist.

    Raises
    ------
    UsageError
        If there is no run or no checkpoint, its algorithm cannot adapt, a client is not known or nobody is left, the
        file is there or cannot be written, or the data are not there.
    RunError
        If no checkpoint can be read whole.
    """
    folder = store.run_folder(folder)
    attributes = store.run_attributes(folder)
    config = configs.of_run(attributes)
    if not config.algorithm.adapt_epochs:
        able = [name for name in algorithms() if algorithm_class(name).model_construct(name=name).adapt_epochs]
        raise UsageError(
            f"algorithm.name = '{config.algorithm.name}' has no layers that a client could adapt; "
            f"expected a run of {', '.join(able)}"
        )
    last = newest(folder)
    saved = store.load(last, personal=False)
    clients = newcomers(folder, config, saved.round) if chosen is None else picked(chosen, config.clients)
    if out is not None:
        if os.path.lexists(out):
            raise UsageError(f"--out {out} already exists: expected a new file")
        check_writable(out)
    data = store.data_folder(attributes, data_dir)
    config.check_shapes(config.data.check(config.clients, data))
    return AdaptRequest(folder, config, data, last, saved, clients, epochs or config.algorithm.adapt_epochs, out)


def picked(text: str, clients: int) -> Ints:
    """The ids in ``"3,5"``, ascending, or all for ``"all"``, int64 [n]; UsageError where one is not known."""
    if text.strip() == "all":
        return np.arange(clients)
    ids = set()
    for word in text.split(","):
        try:
            client = int(word)
        except ValueError:
            raise UsageError(
                f"--client {text}: expected ids with commas between them, or 'all'; got '{word}'"
            ) from None
        if not 0 <= client < clients:
            near = min(max(client, 0), clients - 1)
            raise refusal(f"--client {text}", f"ids 0 … {clients - 1}", client, near)
        ids.add(client)
    return np.array(sorted(ids))


def newcomers(folder: Path, config: Config, rounds: int) -> Ints:
    """The clients that were held out, else those of which nothing counted in the first `rounds` rounds, int64 [n].

    UsageError if there are none.
    """
    held = config.speed.rules(config.participation).held_out(config.clients)
    if len(held):
        return held
    data = store.open_run(folder)
    counted = np.zeros(config.clients, dtype=bool)
    if "arrived" in data:  # rounds after the checkpoint are no part of its state
        counted = (data["arrived"].values[data["round"].values < rounds] == 1).any(0)
    if counted.all():
        raise UsageError(f"all clients of '{folder}' have taken part: expected --client ID[,ID...] or --client all")
    return np.flatnonzero(~counted)


def adapted(request: AdaptRequest) -> dict[str, Any]:
    """Let the clients adapt, test them before and after, write the file if one is asked for.

    Returns
    -------
    dict
        `AdaptRequest.facts`; layers (names of the tensors that learned); clients: one dict each of client,
        train_samples, test_samples and `SCORES` (on its own test part; None where it has none); mean: of `SCORES`,
        over clients.

    Raises
    ------
    UsageError
        If the data do not fit the checkpoint, the model has no layer to adapt, or the file cannot be written.
    """
    import torch

    config, clients = request.config, request.clients
    torch.set_num_threads(threads(config))
    task, shared = loaded(config, request.data, request.saved, request.newest, clients.tolist())
    names = config.algorithm.personal_names(task)
    if not names:
        raise UsageError(f"algorithm: '{config.algorithm.name}' shares all layers here: none is left to adapt")
    size = chunk_size(config.batch_clients, config.clients, task.nbytes, config.one_by_one)
    rows: list[dict[str, Any]] = []
    with _file(request) as file:
        for part in cut_by_kind(size, clients, task.federation.shapes):
            added, params = _adapt_chunk(request, task, shared, part)
            rows += added
            if file is not None:
                _write(file, added, {name: value.cpu().numpy() for name, value in params.items() if name in names})
    rows.sort(key=lambda row: row["client"])
    means = {name: _mean([row[name] for row in rows]) for name in SCORES}
    layers = [name for name in dict.fromkeys([*task.initial(), *sorted(names)]) if name in names]
    return {**request.facts, "layers": layers, "clients": rows, "mean": means}


def _adapt_chunk(request: AdaptRequest, task: Task, shared: State, clients: Ints) -> tuple[list[dict[str, Any]], State]:
    """Rows of the table, and what was learned, ``{name: [c, …]}``."""
    from hpcfl.learning.batches import Visits
    from hpcfl.learning.evaluate import client_scores

    sizes = task.federation.test_sizes[clients]
    visits = Visits.for_test(request.saved.round, clients)
    columns = {"client": clients, "train_samples": task.federation.train_sizes[clients], "test_samples": sizes}
    params: State = {}
    for when, epochs in (("before", 0), ("after", request.epochs)):
        params = request.config.algorithm.adapted(task, shared, visits, epochs)
        losses, correct = client_scores(task, params, clients)
        columns |= {f"accuracy_{when}": _per_sample(correct, sizes), f"loss_{when}": _per_sample(losses, sizes)}
    return [dict(zip(columns, row)) for row in zip(*(values.tolist() for values in columns.values()))], params


def _per_sample(sums: Any, sizes: Ints) -> Any:
    """Means as objects, None where there is nothing to take them over."""
    means = sums / np.where(sizes > 0, sizes, np.nan)
    return np.where(np.isnan(means), None, means)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


@contextlib.contextmanager
def _file(request: AdaptRequest) -> Iterator[h5py.File | None]:
    """Yield the file to write to, which is there once it is whole; None where none is asked for."""
    if request.out is None:
        yield None
        return
    try:
        request.out.parent.mkdir(parents=True, exist_ok=True)
        with replace(request.out) as new, created(new) as file:
            file.attrs.update(request.facts)
            yield file
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # h5py's own text names the temporary file
        raise UsageError(f"--out {request.out} cannot be written: {reason}") from None


def _write(file: h5py.File, rows: Sequence[Mapping[str, Any]], tensors: Mapping[str, Any]) -> None:
    """Add a group per client: its tensors, and its figures as attributes."""
    for place, row in enumerate(rows):
        group = file.create_group(f"clients/{row['client']}")
        group.attrs.update({name: value for name, value in row.items() if value is not None})
        for name, values in tensors.items():
            group[name] = values[place]


def headline(outcome: Mapping[str, Any]) -> str:
    return (
        f"{outcome['run']}: {outcome['algorithm']} after {outcome['round']} rounds, "
        f"state {outcome['state_sha256'][:12]}; {', '.join(outcome['layers'])} learned for {outcome['epochs']} epochs"
    )


def table(outcome: Mapping[str, Any]) -> Any:
    """The clients and their means as a `rich` table."""
    from rich.table import Column, Table

    shown = Table(*(Column(name.replace("_", " "), justify="right") for name in COLUMNS))
    for row in outcome["clients"]:
        shown.add_row(*(_cell(row[name]) for name in COLUMNS))
    shown.add_section()
    shown.add_row("mean", "", "", *(_cell(outcome["mean"][name]) for name in SCORES))
    return shown


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4f}"
