"""The clients' models as a run left them, ready to embed and to predict: what studies after a run start from.

Judged from headers and checkpoints; torch is imported only when there are models to be made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from hpcfl import config as configs
from hpcfl import store
from hpcfl.algorithms import Algorithm
from hpcfl.base.config import recorded as config_table
from hpcfl.base.digests import changed, is_file, kept
from hpcfl.base.errors import UsageError, check_within
from hpcfl.base.lazy import torch
from hpcfl.base.types import Computing, State
from hpcfl.config import Config
from hpcfl.data import ClientData, Federation
from hpcfl.data.absent import Absent
from hpcfl.data.base import packed
from hpcfl.engine.checkpointing import restored
from hpcfl.engine.job import kinds, stacked
from hpcfl.engine.record import about_clients
from hpcfl.engine.uneven import evenly
from hpcfl.learning.batches import Visits
from hpcfl.learning.initial_values import InitialFile
from hpcfl.learning.loss import class_axis
from hpcfl.learning.task import Task
from hpcfl.mpi.devices import chosen
from hpcfl.mpi.placement import Chunk, chunk_size, cut
from hpcfl.store.inside import tell

Array = npt.NDArray[Any]
STORED = ("stored", "shared")
"""What methods call the protocol of evaluation in which nothing learns before the test."""


class NotHereError(UsageError):
    """What a model is made of is not on this machine: its code, or samples to try it on."""


def open_models(
    run: Path | str, data_dir: Path | str | None = None, stored: bool = False, force: bool = False, trust: bool = False
) -> Models:
    """Return the models of all clients at the newest whole checkpoint of a run that has finished or was stopped.

    The run folder may have been made elsewhere. Where its data, or classes from outside the package, are not here, what
    needs them raises when it is asked for.

    Parameters
    ----------
    run : Path or str
        The run folder, or the run.h5 in it.
    data_dir : Path or str, optional
        Folder of the data sets, which have to be there; None: where the run found them, if they are there.
    stored : bool
        Models as they are stored. False: as the run tests them, by ``algorithm.evaluation``: they may learn first.
    force : bool
        Take files and classes from outside that have changed since the run began as they are.
    trust : bool
        Import the code that the folder names, now and later. False: only what has run here under this user.

    Raises
    ------
    UsageError
        If there is no run or no checkpoint, the data in `data_dir` are not those of the run, or the class of the model,
        one from outside the package, is not here or is not trusted.
    RunError
        If no checkpoint can be read whole.

    Examples
    --------
    >>> run = hpcfl.run("fedavg-digits", settings={"rounds": 2, "evaluate.every": 1}, out="runs/two", quiet=True)
    >>> models = hpcfl.open_models("runs/two")
    >>> models
    the models of 10 clients after round 2 of runs/two
    >>> models.shared["fc1.weight"].shape
    (32, 64)
    """
    folder = store.run_folder(run)
    attributes, path = store.run_attributes(folder), newest(folder)
    try:
        config, absent = configs.to_read(attributes, folder, force, trust)
    except UsageError as error:
        raise NotHereError(str(error)) from None
    saved = store.load(path, personal=False)
    federation = _data(config, folder, attributes, Path(data_dir) if data_dir else None, absent.get("data", ""))
    # what may learn before a test is refused where it would do so by another loss
    reason = absent.get("task", "")
    known = _recorded_clients(folder, attributes, reason) if reason and "samples" in attributes else federation
    try:
        task, shared = with_shared(config, known, saved, recorded(attributes), absent)
    except UsageError as error:
        raise NotHereError(str(error)) if isinstance(known, Absent) else error from None
    if "algorithm" in absent:
        algorithm = config.algorithm
    else:
        evaluation = type(config.algorithm).model_fields.get("evaluation")
        words = [word for word in STORED if stored and evaluation and word in get_args(evaluation.annotation)]
        asked = config.algorithm.model_copy(update={"evaluation": words[0]}) if words else None
        algorithm = config.method(task, asked)
        if not isinstance(known, Absent):
            like = config.method(task).init_client
            store.check_personal(path, range(config.clients), lambda client: like(task, client), known.shapes)
    facts = algorithm, saved.round, saved.shared, saved.extras, path, task, shared, recorded_chunk(attributes)
    return Models(config, *facts, federation, absent)


def _data(config: Config, folder: Path, attributes: Mapping[str, str], data_dir: Path | None, why: str) -> Federation:
    """Return the data of a run, or, where they are not here and none were named, what it has recorded of them.

    `why` is what is known to be missing. UsageError where data that were named are not those of the run.
    """
    data = store.data_folder(attributes, data_dir)
    try:
        if why:
            raise UsageError(why)
        try:
            config.check_shapes(config.data.check(config.clients, data))
        except UsageError as error:
            raise UsageError(f"data_dir = {str(data)!r}: expected where the run's data are: {error}") from None
        federation = config.federation(data)
        now = {fact.name: fact.values for fact in about_clients(federation)}
        for fact in store.read_facts(folder):
            differs = np.flatnonzero(fact.values != now[fact.name]) if fact.name in now else ()
            for client in differs[:1]:
                here, then = now[fact.name][client], fact.values[client]
                there = f"client {client} has {here} as {fact.name}, in the run {then}"
                raise UsageError(f"data_dir = {str(data)!r}: {there}: expected the data of the run")
        return federation
    except UsageError as error:
        if data_dir is not None or "samples" not in attributes:
            raise
        return _recorded_clients(folder, attributes, str(error))


def _recorded_clients(folder: Path, attributes: Mapping[str, str], why: str) -> Federation:
    facts = {fact.name: fact.values for fact in store.read_facts(folder)}
    if lacking := [name for name in ("train_samples", "test_samples") if name not in facts]:
        raise UsageError(f"{folder / 'run.h5'} has no {lacking[0]} of the clients: expected one number for each")
    return Absent.of(json.loads(attributes["samples"]), facts["train_samples"], facts["test_samples"], why)


def shared_weights(folder: Path, why: str) -> State:
    """Return the shared tensors of a run's model as its checkpoint has them, of which a line tells.

    `why` is why there is no module with these; raised where the run has not recorded their names.
    """
    folder = store.run_folder(folder)
    attributes = store.run_attributes(folder)
    if "tensors" not in attributes:
        raise NotHereError(why)
    known, shared = json.loads(attributes["tensors"]), store.load(newest(folder), personal=False).shared
    if missing := [name for name in known["names"] if name not in shared]:
        raise UsageError(f"'{folder}': '{min(missing)}' is not shared, and {why}")
    tell(f"'{folder}': the model's own tensors alone, without what never changes and second names of tied ones: {why}")
    names = [*known["names"], *(name for name in known["buffers"] if name in shared)]
    found = {name: torch.from_numpy(shared[name].copy()) for name in names}
    if frozen := known.get("frozen"):
        key, table = "model.initial", config_table(attributes["config"])
        if (began := json.loads(attributes.get("files", "{}")).get(key)) is None:
            raise UsageError(f"'{folder}': '{frozen[0]}' is frozen: expected {key} among the files of run.h5, got none")
        path = kept(folder, key, began)
        path = path if is_file(path) else Path(began["file"])
        if reason := changed(key, began, "expected it there", path):
            raise UsageError(reason)
        values = InitialFile(path, table.get("clients", 1), table.get("precision", "single")).shared
        if lost := [name for name in frozen if name not in values]:
            raise UsageError(f"{path}: there is no {lost[0]}, which is frozen")
        found |= {name: torch.from_numpy(values[name]) for name in frozen}
    return {name: value.long() if known["buffers"].get(name) else value for name, value in found.items()}


def newest(folder: Path) -> Path:
    """Return a run's newest whole checkpoint; UsageError where there is none at all, RunError where none is whole."""
    path = store.latest(folder)
    if path is None:
        raise UsageError(f"'{folder}' has no checkpoint: expected a run that has finished or was stopped")
    return path


def threads(config: Config) -> int:
    """Threads per operation of a process that takes a run up alone."""
    return 1 if config.threads == "auto" else config.threads


def recorded(attributes: Mapping[str, str]) -> Computing:
    """Return how a run computes the clients of a chunk."""
    found: Computing = json.loads(attributes.get("computing", "{}")).get("how", "vmapped")
    return found


def recorded_chunk(attributes: Mapping[str, str]) -> int | None:
    """Return the size of a run's chunks; None where it is not recorded and follows from the config."""
    return int(attributes["chunk"]) if "chunk" in attributes else None


def with_shared(
    config: Config,
    federation: Federation,
    saved: store.Checkpoint,
    computing: Computing | None = None,
    absent: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Task, State]:
    """Return a run's task with some clients' data, and its shared state; UsageError where these do not fit it.

    What is `absent` of the config is why by section; without data or method the state is taken as it was saved.
    """
    where = chosen("cpu" if config.device == "cpu" else "auto", "device", 0)  # a run on a GPU is read anywhere
    kinds = config.precision, config.clients, config.task, computing
    task = Task(config.model, federation, config.seed, where, *kinds)
    task.start.lost = absent.get("model.initial", "")
    if "speed" not in absent:
        task.paces = config.speed.paces(config.seed, config.clients)
    if "algorithm" in absent or isinstance(federation, Absent):
        return task, as_tensors(saved.shared, task.device)
    like = config.method(task).init_server(task)
    store.check_shared(saved.shared, like)
    return task, restored(like, saved.shared)


@dataclass(frozen=True, eq=False, repr=False)
class Models:
    """The models of a run's clients. Iterating makes them, some clients at a time, in the run's order of computing.

    Attributes
    ----------
    algorithm : Algorithm
        With the protocol of evaluation that is asked for.
    round : int
        How many rounds are done.
    federation : Federation
        The clients' data; asking for samples raises UsageError where they are not here.
    absent : dict of str to str
        What of the config is not here, and why, by section.
    shared, extras : dict of str to array
        The server's state by name, and what never left the server: FLIC's anchors ``anchor.means`` [C, k], and
        ``anchor.factors`` [C, k, k] if they learn; FedLRGD's ``weights`` [r, p].
    """

    config: Config
    algorithm: Algorithm
    round: int
    shared: dict[str, Array]
    extras: dict[str, Any]
    path: Path
    task: Task
    state: State
    chunk: int | None
    federation: Federation
    absent: Mapping[str, str]

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.path.parents[1]

    def __repr__(self) -> str:
        return f"the models of {len(self)} clients after round {self.round} of {self.folder}"

    def __len__(self) -> int:
        return self.config.clients

    def __iter__(self) -> Iterator[ClientModel]:
        for chunk in self._chunks():
            yield from self._of(chunk)

    def _of(self, chunk: Chunk) -> Iterator[ClientModel]:
        if "algorithm" in self.absent:
            raise UsageError(f"{self.absent['algorithm']}; module() gives the shared model without it")
        with ExitStack() as after:
            after.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(threads(self.config))
            visits = Visits.for_test(self.round, chunk.clients)
            model = partial(self.algorithm.model, self.task, self.state)
            held = store.load_personal(self.path, chunk.clients.tolist())
            own = [as_tensors(held.get(client, {}), self.task.device) for client in chunk.clients.tolist()]
            params = evenly(model, self.task, stacked(own), visits)
        latent = self.task.latent if self.config.model.name == "latent" or self.task.whole is not None else None
        embedding = None if latent is None else latent[0]
        for row, client in enumerate(chunk.clients.tolist()):
            names = [*self.task.initial(), *(name for name in self.task.buffer_names if name in params)]
            state = {name: params[name][row].detach().clone() for name in names}
            yield ClientModel(client, state, self.task, self.federation, embedding)

    def module(self, client: int | None = None) -> torch.nn.Module:
        """Return a client's model as a plain module; None: that which all share.

        Raises
        ------
        UsageError
            Without `client` if the method shares only some of the layers; if there is no such client.
        """
        if client is None:
            missing = self.task.initial().keys() - self.state.keys()
            if missing:
                what = f"algorithm.name = '{self.algorithm.name}' does not share '{min(missing)}'"
                raise UsageError(f"{what}: expected module(client=0 … {len(self) - 1})")
            names = *self.task.initial(), *self.task.buffer_names
            params = {name: self.state[name] for name in names if name in self.state}
        else:
            check_within("client", client, 0, len(self) - 1)
            chunk = next(chunk for chunk in self._chunks() if client in chunk.clients)
            params = next(model.params for model in self._of(chunk) if model.client == client)
        return self.task.module(params)

    def _chunks(self) -> list[Chunk]:
        """Return the clients as the run computes them together: that decides about the last bits.

        Not where the law of their speeds, which orders them, is not here.
        """
        config = self.config
        kind = self.task.nbytes, self.task.looped, self.task.heavy
        size = self.chunk or chunk_size(config.batch_clients, config.clients, *kind)
        paces = np.zeros(config.clients) if size == 1 else self.task.paces
        return cut(size, paces, 1, kinds(self.algorithm, self.task))


@dataclass(frozen=True, eq=False)
class ClientModel:
    """One client's model and data.

    `params` are what the method predicts with, by the names of the model's tensors; `embedding` is how many of the
    model's layers are below its latent space, None where it has none.
    """

    client: int
    params: State
    task: Task
    federation: Federation
    embedding: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.federation.shapes[self.client]

    @cached_property
    def data(self) -> ClientData:
        """The client's training and test features and labels, as the run has them; UsageError if they are not here."""
        return self.federation.client(self.client)

    @cached_property
    def _like(self) -> ClientData:
        """Samples of the kind of the client's own."""
        return self.federation.made_up(self.shape) if isinstance(self.federation, Absent) else self.data

    @property
    def untrained(self) -> ClientModel:
        """The same client's model before it has learned anything."""
        return replace(self, params=self.task.initial(self.client))

    def embed(self, x: Array) -> Array:
        """Return latent coordinates ``[n, k]`` of features ``[n, *shape]``, in the run's precision.

        They are what all layers below the latent space make of them; UsageError where the model has no latent space.
        """
        if self.embedding is None:
            first = self.task.layers[0].name
            expected = "an embedding, name = 'latent' or task.embedding"
            raise UsageError(f"model: its first layer is '{first}': expected {expected}")
        return self._outputs(x, self.embedding).reshape(len(x), -1)

    def predict(self, x: Array | tuple[Array, ...]) -> Array:
        """Return classes, int64 ``[n, …]``; the outputs in the run's precision where labels are no classes.

        An output of a single number is a value, ``[n]``, where a label is one too. Features of several tensors are a
        tuple of arrays.
        """
        x = packed(x)[0] if isinstance(x, tuple) else x
        outputs, labels = torch.from_numpy(self._outputs(x, None)), self._like.train_labels
        shape = (1, len(x), *labels.shape[1:])
        axis = None if labels.dtype.kind == "f" else class_axis(outputs[None], torch.empty(shape))
        if axis is not None:
            return outputs[None].argmax(axis)[0].numpy()
        return (outputs[:, 0] if labels.ndim == 1 and outputs.shape[1:] == (1,) else outputs).numpy()

    def _outputs(self, x: Array, last: int | None) -> Array:
        """Return what the layers before number `last` (None: all) make of features, ``[n, …]``."""
        if x.shape[1:] != self.shape:
            raise UsageError(f"x: client {self.client} has features of shape {self.shape}, got {x.shape[1:]}")
        params = {name: value.unsqueeze(0) for name, value in self.params.items()}
        rows = torch.from_numpy(np.asarray(x, self._like.train_features.dtype)).to(self.task.device)
        rows = rows.to(self.task.dtype) if rows.is_floating_point() else rows
        outputs: Array = self.task.outputs(params, rows, last).cpu().numpy()
        return outputs


def as_tensors(saved: Mapping[str, Any], device: Any) -> State:
    """Return what a checkpoint holds as tensors."""
    return {name: torch.from_numpy(np.asarray(value)).to(device, copy=True) for name, value in saved.items()}
