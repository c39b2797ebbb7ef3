"""Clients that never took part in a run: their own layers learn, the shared ones are as the run left them.

So does SRPFL serve a client that joins later (Tziotis et al., remark 4.8).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.base.types import Ints
from hpcfl.comm.placement import chunk_size, cut_by_kind
from hpcfl.commands.adapt_request import Wish
from hpcfl.store.atomic import created, replace

if TYPE_CHECKING:
    from hpcfl.base.types import State
    from hpcfl.learning.task import Task

SCORES = ("accuracy_before", "accuracy_after", "loss_before", "loss_after")


def adapted(wish: Wish) -> dict[str, Any]:
    """Let the clients adapt, test them before and after, write the file if one is wished for.

    Returns
    -------
    dict
        `Wish.facts`; layers (names of the tensors that learned); clients: one dict each of client, train_samples,
        test_samples and `SCORES` (on its own test part; None where it has none); mean: of `SCORES`, over clients.

    Raises
    ------
    UsageError
        If the data do not fit the checkpoint, the model has no layer to adapt, or the file cannot be written.
    """
    import torch

    from hpcfl.engine.trained import loaded, threads

    torch.set_num_threads(threads(wish.config))
    task, shared = loaded(wish.config, wish.data, wish.saved, wish.newest, wish.clients.tolist())
    own = wish.config.algorithm.personal_names(task)
    if not own:
        raise UsageError(f"algorithm: '{wish.config.algorithm.name}' shares all layers here: none is left to adapt")
    size = chunk_size(wish.config.batch_clients, wish.config.clients, task.nbytes, wish.config.one_by_one)
    rows: list[dict[str, Any]] = []
    with _file(wish) as file:
        for part in cut_by_kind(size, wish.clients, task.federation.shapes):
            found, params = _chunk(wish, task, shared, part)
            rows += found
            if file is not None:
                _write(file, found, {name: value.cpu().numpy() for name, value in params.items() if name in own})
    rows.sort(key=lambda row: row["client"])
    means = {name: _mean([row[name] for row in rows]) for name in SCORES}
    layers = [name for name in dict.fromkeys([*task.initial(), *sorted(own)]) if name in own]
    return {**wish.facts, "layers": layers, "clients": rows, "mean": means}


def _chunk(wish: Wish, task: Task, shared: State, clients: Ints) -> tuple[list[dict[str, Any]], State]:
    """Return the rows of some clients, and their parameters ``{name: [c, …]}``."""
    from hpcfl.learning.batches import Visits

    federation, algorithm = task.federation, wish.config.algorithm
    sizes = federation.test_sizes[clients]
    seen = Visits.for_test(wish.saved.round, clients)
    columns = {"client": clients, "train_samples": federation.train_sizes[clients], "test_samples": sizes}
    params: State = {}
    for when, epochs in (("before", 0), ("after", wish.epochs)):
        params = algorithm.adapted(task, shared, seen, epochs)
        losses, correct = task.tested(params, clients)
        columns |= {f"accuracy_{when}": _per_sample(correct, sizes), f"loss_{when}": _per_sample(losses, sizes)}
    return [dict(zip(columns, row)) for row in zip(*(values.tolist() for values in columns.values()))], params


def _per_sample(sums: Any, sizes: Ints) -> Any:
    """Return means as objects, None where there is nothing to take them over."""
    means = sums / np.where(sizes > 0, sizes, np.nan)
    return np.where(np.isnan(means), None, means)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


@contextlib.contextmanager
def _file(wish: Wish) -> Iterator[h5py.File | None]:
    """Yield the file to write to, which is there once it is whole; None where none is wished for."""
    if wish.out is None:
        yield None
        return
    try:
        wish.out.parent.mkdir(parents=True, exist_ok=True)
        with replace(wish.out) as new, created(new) as file:
            file.attrs.update(wish.facts)
            yield file
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # h5py's own text names the temporary file
        raise UsageError(f"--out {wish.out} cannot be written: {reason}") from None


def _write(file: h5py.File, rows: Sequence[Mapping[str, Any]], tensors: Mapping[str, Any]) -> None:
    """Add a group per client: its tensors, and its figures as attributes."""
    for place, row in enumerate(rows):
        group = file.create_group(f"clients/{row['client']}")
        group.attrs.update({name: value for name, value in row.items() if value is not None})
        for name, values in tensors.items():
            group[name] = values[place]


def headline(found: Mapping[str, Any]) -> str:
    """Return in one line what was adapted to what."""
    return (
        f"{found['run']}: {found['algorithm']} after {found['round']} rounds, state {found['state_sha256'][:12]}; "
        f"{', '.join(found['layers'])} learned for {found['epochs']} epochs"
    )


def table(found: Mapping[str, Any]) -> Any:
    """Return the clients and their means as a table for the terminal."""
    from rich.table import Table

    shown = Table()
    names = ("client", "train_samples", "test_samples", *SCORES)
    for name in names:
        shown.add_column(name.replace("_", " "), justify="right")
    for row in found["clients"]:
        shown.add_row(*(_cell(row[name]) for name in names))
    shown.add_section()
    shown.add_row("mean", "", "", *(_cell(found["mean"][name]) for name in SCORES))
    return shown


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4f}"
