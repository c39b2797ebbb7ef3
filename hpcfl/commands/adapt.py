"""Clients that never took part in a run: their own layers learn, the shared ones are as the run left them.

So does SRPFL serve a client that joins later (Tziotis et al., remark 4.8). They are clients of the run, or newcomers in
a file of their own, in the format of ``data.name = "hdf5"``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from rich.table import Column, Table

from hpcfl import config as configs
from hpcfl import store
from hpcfl.algorithms import algorithm_class, algorithms
from hpcfl.base.digests import origin
from hpcfl.base.errors import UsageError, listed, refusal
from hpcfl.base.lazy import torch
from hpcfl.base.types import Floats, Ints, State
from hpcfl.commands.show import digest
from hpcfl.config import Config
from hpcfl.data import ClientData, Federation, Header
from hpcfl.data.formats import hdf5_file
from hpcfl.data.hdf5 import Hdf5, Hdf5Federation
from hpcfl.data.pooled import BLACK, Pooled
from hpcfl.engine.uneven import evenly
from hpcfl.launch.request import check_writable
from hpcfl.learning.batches import Visits
from hpcfl.learning.evaluate import client_scores
from hpcfl.learning.task import Task
from hpcfl.mpi.placement import chunk_size, cut_by_kind
from hpcfl.results.trained import newest, recorded_chunk, threads, with_shared
from hpcfl.store.atomic import created, replace

SCORES = ("accuracy_before", "accuracy_after", "loss_before", "loss_after")
COLUMNS = ("client", "train_samples", "test_samples", *SCORES)
CURVE = ("accuracy", "loss", "gradients")
"""What a curve is of: means over a client's own test part, and gradients of single samples that it has computed."""


@dataclass(frozen=True, eq=False)
class Newcomers(Federation):
    """The run's clients, without samples, and after them those of the file: its i-th has the number `first` + i.

    This number keys what is random of a newcomer, so that it shares nothing with a client of the run, whoever else
    adapts.
    """

    first: int
    own: Hdf5Federation

    def client(self, i: int) -> ClientData:
        return self.own.client(i - self.first)


@dataclass(frozen=True)
class NewcomersFile:
    """A file of newcomers that suits a run, as a `source`; `ids` are in their natural order."""

    path: Path
    ids: list[str]
    source: Hdf5

    @classmethod
    def judged(cls, path: Path, config: Config, header: Header) -> NewcomersFile:
        """Look at all of a file but large features; UsageError where it is damaged or its clients do not suit the run.

        `header` is that of the run's data. Features are to be as the run's model sees them: they are scaled only if the
        run's own come from such a file too.
        """
        contents = hdf5_file.survey(path)
        scale = config.data.scale if isinstance(config.data, Hdf5) else None
        source = Hdf5(file=str(path), scale=scale)
        file = cls(path, [part.group.split("/")[1] for part in contents.train], source)
        source.check(len(file.ids), None)
        parts = [part for pair in zip(contents.train, contents.test) for part in pair]
        if parts[0].real != header.targets:
            now, then = ("real targets", "classes") if parts[0].real else ("classes", "real targets")
            raise UsageError(f"{path}: {parts[0].group}/labels are {now}, those of the run {then}")
        if parts[0].label_shape != header.label_shape:
            got = f"{parts[0].group}/labels have shape {parts[0].label_shape} per sample"
            raise UsageError(f"{path}: {got}, those of the run {header.label_shape}")
        for part in parts if not header.targets else ():
            if part.largest >= header.classes:
                held, last = f"{part.group}/labels hold class {part.largest}", header.classes - 1
                raise UsageError(f"{path}: {held}, expected classes of the run: 0 … {last}")
        for name, part in zip(file.ids, contents.train):
            where = f"{path}: client '{name}' has {part.features}"
            if part.shape != header.shapes[0] and not config.algorithm.any_shape:
                shaped = [(other, kind) for other in algorithms() if (kind := algorithm_class(other)).any_shape]
                able = [other for other, kind in shaped if kind.model_construct(name=other).adapt_epochs > 0]
                one = f"algorithm '{config.algorithm.name}' shares one model"
                said = f"{where}, the run's have the shape {header.shapes[0]}: {one}"
                raise UsageError(f"{said}; expected the same, or a run of {', '.join(able)}")
            try:
                config.model.check(part.shape, header.classes)
            except UsageError as error:
                raise UsageError(f"{where}: {error}") from None
        return file

    def federate(self, config: Config, header: Header) -> Newcomers:
        own = self.source.federate(len(self.ids), config.seed, None)
        assert isinstance(own, Hdf5Federation)
        first, none = config.clients, np.zeros(config.clients, dtype=np.int64)
        train, test = (np.append(none, part) for part in (own.train_sizes, own.test_sizes))
        shapes = [header.shapes[0]] * first + list(own.shapes)
        augment = BLACK[config.data.scale] if isinstance(config.data, Pooled) and config.data.augment else None
        return Newcomers(header.classes, train, test, shapes, first, own, augment=augment)

    def picked(self, text: str | None) -> Ints:
        """Places of the ids in ``"w3,w5"``, ascending, or of all for ``"all"`` and None, int64 [n]."""
        if text is None or text.strip() == "all":
            return np.arange(len(self.ids))
        words = [word.strip() for word in text.split(",")]
        for word in words:
            if word not in self.ids:
                raise UsageError(f"--client {text}: expected ids in {self.path} ({listed(self.ids)}), got '{word}'")
        return np.array(sorted({self.ids.index(word) for word in words}))

    @property
    def facts(self) -> dict[str, str]:
        about = origin(self.path)
        return {"data": about["file"], "data_sha256": about["sha256"]}


@dataclass(frozen=True)
class AdaptRequest:
    """Who is to adapt to what.

    Attributes
    ----------
    saved : Checkpoint
        The newest whole one, without personal state.
    clients : int64 [n]
        Numbers of clients of the run, or of `file`, where they begin with ``config.clients``.
    epochs : tuple of int
        After how many epochs they are tested, ascending; the last is when they are done.
    """

    folder: Path
    config: Config
    data: Path | None
    newest: Path
    saved: store.Checkpoint
    clients: Ints
    epochs: tuple[int, ...]
    out: Path | None
    header: Header
    file: NewcomersFile | None
    chunk: int | None

    @property
    def facts(self) -> dict[str, Any]:
        """What the figures are of."""
        return {
            "run": str(self.folder),
            "round": self.saved.round,
            "state_sha256": digest(self.saved.shared),
            "algorithm": self.config.algorithm.name,
            "epochs": self.epochs[-1],
            **(self.file.facts if self.file else {}),
        }

    def label(self, client: int) -> int | str:
        """A client's id: its number, or what the file calls it."""
        return client if self.file is None else self.file.ids[client - self.config.clients]


def adapt_request(
    folder: Path,
    chosen: str | None,
    epochs: str | None,
    data_dir: Path | None,
    out: Path | None,
    newcomers: Path | None = None,
    trust: bool = False,
) -> AdaptRequest:
    """Judge what is asked for, from headers and checkpoints alone: torch is not loaded.

    `chosen` are client ids with commas between them or ``"all"``, None: who has not taken part. `epochs` are numbers
    with commas between them, None: the algorithm's own. `out` is a file that does not exist, `newcomers` one of clients
    that are to adapt in place of the run's. With `trust` code is imported that has not run here.

    Raises
    ------
    UsageError
        If there is no run or no checkpoint, its algorithm cannot adapt, a client is not known or nobody is left, `out`
        is there or cannot be written, the data are not there, or the newcomers do not suit the run.
    RunError
        If no checkpoint can be read whole.
    """
    folder = store.run_folder(folder)
    attributes = store.run_attributes(folder)
    config = configs.of_run(attributes, folder, trust=trust)
    if not config.algorithm.adapt_epochs:
        able = [name for name in algorithms() if algorithm_class(name).model_construct(name=name).adapt_epochs]
        name = f"algorithm.name = '{config.algorithm.name}'"
        raise UsageError(f"{name} has no layers that a client could adapt; expected a run of {', '.join(able)}")
    last = newest(folder)
    saved = store.load(last, personal=False)
    if newcomers is None:
        clients = absent(folder, config, saved.round) if chosen is None else picked(chosen, config.clients)
    if out is not None:
        if os.path.lexists(out):
            raise UsageError(f"--out {out} already exists: expected a new file")
        check_writable(out)
    data = store.data_folder(attributes, data_dir)
    header = config.data.check(config.clients, data)
    config.check_shapes(header)
    file = None if newcomers is None else NewcomersFile.judged(newcomers, config, header)
    if file is not None:
        clients = config.clients + file.picked(chosen)
    tested = (config.algorithm.adapt_epochs,) if epochs is None else numbers(epochs)
    chunk = recorded_chunk(attributes)
    return AdaptRequest(folder, config, data, last, saved, clients, tested, out, header, file, chunk)


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of epochs in ``"1,2,5"``; UsageError where they are none, or do not ascend."""
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if list(found) != sorted({*found}) or not found or found[0] < 0 or found[-1] < 1:
        expected = "a number of at least 1, or ascending ones with commas between them"
        raise UsageError(f"--epochs {text}: expected {expected}")
    return found[1:] if found[0] == 0 else found


def picked(text: str, clients: int) -> Ints:
    """The ids in ``"3,5"``, ascending, or all for ``"all"``, int64 [n]; UsageError where one is not known."""
    if text.strip() == "all":
        return np.arange(clients)
    ids = set()
    for word in text.split(","):
        try:
            client = int(word)
        except ValueError:
            expected = "ids with commas between them, or 'all'"
            raise UsageError(f"--client {text}: expected {expected}; got '{word}'") from None
        if not 0 <= client < clients:
            raise refusal(f"--client {text}", f"ids 0 … {clients - 1}", client, min(max(client, 0), clients - 1))
        ids.add(client)
    return np.array(sorted(ids))


def absent(folder: Path, config: Config, rounds: int) -> Ints:
    """The clients that were held out, else those of which nothing counted in the first `rounds` rounds, int64 [n].

    UsageError if there are none.
    """
    held = config.rules.held_out(config.clients)
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
        train_samples, test_samples, `SCORES` (on its own test part; None where it has none) and gradients; mean: of
        `SCORES`, over clients. With several numbers of epochs also curve, from 0 epochs on: each client has a list of
        epochs and `CURVE`, and so have their means.

    Raises
    ------
    UsageError
        If the data do not fit the checkpoint, the model has no layer to adapt, or the file cannot be written.
    """
    config, clients = request.config, request.clients
    torch.set_num_threads(threads(config))
    file = request.file
    federation = config.federation(request.data) if file is None else file.federate(config, request.header)
    task, shared = with_shared(config, federation, request.saved)
    if file is None:
        method, shapes = config.method(task), federation.shapes
        store.check_personal(request.newest, clients, lambda client: method.init_client(task, client), shapes)
    names = config.algorithm.personal_names(task)
    if not names:
        raise UsageError(f"algorithm: '{config.algorithm.name}' shares all layers here: none is left to adapt")
    size = request.chunk or chunk_size(config.batch_clients, config.clients, task.nbytes)
    rows: dict[int, dict[str, Any]] = {}
    with _file(request, request.out) if request.out else contextlib.nullcontext() as out:
        for part in cut_by_kind(size, clients, task.federation.shapes):
            added, params = _adapt_chunk(request, task, shared, part)
            rows |= dict(zip(part.tolist(), added))
            if out is not None:
                tensors = {name: value.cpu().numpy() for name, value in params.items() if name in names}
                for place, row in enumerate(added):
                    known = {name: value for name, value in row.items() if value is not None and name != "curve"}
                    group = out.create_group(f"clients/{row['client']}")
                    group.attrs.update(known)
                    for name, values in tensors.items():
                        group[name] = values[place]
    layers = [name for name in dict.fromkeys([*task.initial(), *sorted(names)]) if name in names]
    found = [rows[client] for client in clients.tolist()]
    figures: dict[str, Any] = {"clients": found, "mean": _means(found, SCORES)}
    if len(request.epochs) > 1:
        points = zip(*(row["curve"] for row in found))
        figures["curve"] = [{"epochs": each[0]["epochs"], **_means(each, CURVE)} for each in points]
    return {**request.facts, "layers": layers, **figures}


def _adapt_chunk(request: AdaptRequest, task: Task, shared: State, clients: Ints) -> tuple[list[dict[str, Any]], State]:
    """Rows of the table, and what was learned, ``{name: [c, …]}``."""
    method, visits = request.config.method(task), Visits.for_test(request.saved.round, clients)
    trained, tests, params = task.federation.train_sizes[clients], task.federation.test_sizes[clients], {}
    curves: list[list[dict[str, Any]]] = [[] for _ in clients]
    for epochs in (0, *request.epochs):
        task.oracle_calls[:] = 0
        params = evenly(lambda _, some: method.adapted(task, shared, some, epochs), task, {}, visits)  # noqa: B023
        gradients = task.oracle_calls[clients].tolist()
        sums = dict(zip(("loss", *task.metrics), client_scores(task, params, clients)))
        accuracies = sums.get("accuracy", np.full(len(clients), np.nan))
        points = zip(_per_sample(accuracies, tests), _per_sample(sums["loss"], tests), gradients)
        for curve, point in zip(curves, points):
            curve.append({"epochs": epochs, **dict(zip(CURVE, point))})
    rows = []
    for client, train, test, curve in zip(clients.tolist(), trained.tolist(), tests.tolist(), curves):
        scores = [curve[at][name] for name in ("accuracy", "loss") for at in (0, -1)]
        row = dict(zip(COLUMNS, (request.label(client), train, test, *scores))) | {"gradients": curve[-1]["gradients"]}
        rows.append(row | ({"curve": curve} if len(request.epochs) > 1 else {}))
    return rows, params


def _per_sample(sums: Floats, sizes: Ints) -> list[float | None]:
    """Means, None where there is nothing to take them over."""
    means = sums / np.where(sizes > 0, sizes, np.nan)
    return [None if np.isnan(mean) else float(mean) for mean in means]


def _means(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, float | None]:
    known = {name: [row[name] for row in rows if row[name] is not None] for name in names}
    return {name: float(np.mean(values)) if values else None for name, values in known.items()}


@contextlib.contextmanager
def _file(request: AdaptRequest, out: Path) -> Iterator[h5py.File]:
    """Yield the file to write to, which is there once it is whole."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replace(out) as new, created(new) as file:
            file.attrs.update(request.facts)
            yield file
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # h5py's own text names the temporary file
        raise UsageError(f"--out {out} cannot be written: {reason}") from None


def headline(outcome: Mapping[str, Any]) -> str:
    run = f"{outcome['run']}: {outcome['algorithm']} after {outcome['round']} rounds"
    learned = f"{', '.join(outcome['layers'])} learned for {outcome['epochs']} epochs"
    data = f" on {outcome['data']} ({outcome['data_sha256'][:12]})" if "data" in outcome else ""
    return f"{run}, state {outcome['state_sha256'][:12]}; {learned}{data}"


def table(outcome: Mapping[str, Any]) -> Any:
    """The clients and their means as a `rich` table: a column of accuracy for each number of epochs, or `SCORES`."""
    rows, points = outcome["clients"], outcome.get("curve", [])
    names = COLUMNS[:3] if points else COLUMNS
    columns = [*(name.replace("_", " ") for name in names), *(f"accuracy {point['epochs']}" for point in points)]
    shown = Table(*(Column(name, justify="right") for name in columns))
    for row in rows:
        shown.add_row(*map(_cell, [*(row[name] for name in names), *(at["accuracy"] for at in row.get("curve", []))]))
    shown.add_section()
    means = [*(outcome["mean"][name] for name in names[3:]), *(point["accuracy"] for point in points)]
    shown.add_row("mean", "", "", *map(_cell, means))
    return shown


def _cell(value: float | str | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
