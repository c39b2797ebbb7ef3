"""What models begin with: values drawn by the seed, or a file's (``model.initial``), a dataset for each tensor.

A dataset at the root holds for all clients; ``clients/<number>/<tensor>`` takes its place for one client, in a layer
that is personal. What else a method's shared state begins with may stand at the root by its name. A file of safetensors
or of a state dict, ``torch.save(module.state_dict(), file)``, has what holds for all; only tensors are read of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcfl.base.errors import UsageError, did_you_mean
from hpcfl.base.lazy import torch
from hpcfl.base.types import Precision, Shape, State
from hpcfl.data import Federation
from hpcfl.data.formats.files import reading
from hpcfl.data.formats.hdf5_file import dataset, opened

OWN, SAFE, STATE_DICT = "clients", ".safetensors", (".pt", ".pth")
Shapes = Mapping[str, Shape]


class InitialFile:
    """A file of initial values; all of them are checked, those at the root are kept.

    Raises
    ------
    UsageError
        In one line: if the file cannot be read, if a dataset is not of float32 or float64, or not finite in the run's
        precision, if a group is not that of a client.
    """

    def __init__(self, path: Path, clients: int, precision: Precision) -> None:
        self.path, self.dtype = path, np.dtype(np.float64 if precision == "double" else np.float32)
        self.own: dict[int, dict[str, Shape]] = {}
        if path.suffix in (SAFE, *STATE_DICT):
            self.shared = {name: self._checked(name, value) for name, value in _tensors(path).items()}
            return
        with opened(path) as file:
            self.shared = {name: self._values(file, name) for name in file if name != OWN}
            groups = file.get(OWN, {})
            if not isinstance(groups, dict | h5py.Group):
                raise UsageError(f"{path}: {OWN} is a dataset, expected groups {OWN}/0 … {OWN}/{clients - 1}")
            for client in groups:
                if len(client) > 9 or not client.isdecimal() or str(int(client)) != client or int(client) >= clients:
                    raise UsageError(f"{path}: {OWN}/{client}: expected one of {OWN}/0 … {OWN}/{clients - 1}")
            self.own = {
                int(client): {name: self._values(file, f"{OWN}/{client}/{name}").shape for name in group}
                for client, group in groups.items()
            }

    def _values(self, file: h5py.File, name: str) -> NDArray[Any]:
        """Return a dataset in the run's precision."""
        return self._checked(name, dataset(file, name))

    def _checked(self, name: str, stored: Any) -> NDArray[Any]:
        if stored.dtype.kind != "f" or stored.dtype.itemsize not in (4, 8):
            raise UsageError(f"{self.path}: {name} is of {stored.dtype}, expected float32 or float64")
        with np.errstate(over="ignore"):
            values: NDArray[Any] = np.asarray(stored[()], self.dtype)
        if not np.isfinite(values).all():
            raise UsageError(f"{self.path}: {name} holds what is not finite in {self.dtype}, expected finite numbers")
        return values

    def of(self, client: int) -> dict[str, NDArray[Any]]:
        """Return a client's own values, in the run's precision."""
        if client not in self.own:
            return {}
        with opened(self.path) as file:
            return {name: self._values(file, f"{OWN}/{client}/{name}") for name in self.own[client]}

    def check_model(self, models: Sequence[Shapes], drawable: Collection[str]) -> None:
        """Raise UsageError where a tensor of the clients' `models` has another shape, or is missing.

        What is `drawable` may be missing.
        """
        for client, model in enumerate(models):
            own = self.own.get(client, {})
            for name, shape in model.items():
                there = own[name] if name in own else self.shape(name)
                if there == shape or (there is None and name in drawable):
                    continue
                if there is None:
                    or_own = f", nor {OWN}/{client}/{name}" if self.own or shape != models[0][name] else ""
                    raise UsageError(f"{self.path}: there is no {name}{or_own}; expected one of shape {list(shape)}")
                where = f"{OWN}/{client}/{name}" if name in own else name
                whose = f" for client {client}" if name not in own and shape != models[0][name] else ""
                self.check_shape(where, there, shape, whose)

    def shape(self, name: str) -> Shape | None:
        return self.shared[name].shape if name in self.shared else None

    def check_shape(self, name: str, there: Shape, shape: Shape, whose: str = "") -> None:
        if there != shape:
            raise UsageError(f"{self.path}: {name} has shape {list(there)}, expected {list(shape)}{whose}")

    def without(self, fixed: State) -> None:
        """Leave out second names of tied tensors, and what never changes; UsageError where the model has others."""
        for name in fixed.keys() & self.shared.keys():
            there, wanted = self.shared.pop(name), fixed[name].cpu().numpy()
            if there.shape != wanted.shape or not np.allclose(there, wanted, 1e-6, 1e-6):  # made in another precision
                raise UsageError(
                    f"{self.path}: {name} is tied or never changes: expected the values that the model has"
                )

    def renamed(self, names: Collection[str]) -> None:
        """Call tensors as the model does where a plain module has a place in between: ``fc1.1.weight``."""
        bare = {name: re.sub(r"\.\d+(?=\.[^.]+$)", "", name) for name in self.shared if name not in names}
        self.shared = {bare[name] if bare.get(name) in names else name: value for name, value in self.shared.items()}


def _tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Return the tensors of a file of safetensors or of a state dict; integers, which buffers may be, as float64."""
    kind = "a file of safetensors" if path.suffix == SAFE else "a state dict, as torch.save writes it"
    with reading(path, kind, Exception):  # these libraries raise almost anything
        if path.suffix == SAFE:
            from safetensors.numpy import load_file

            found: dict[str, NDArray[Any]] = load_file(path)
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True)  # nothing of it is carried out
            found = {name: each.numpy() for name, each in tensors.items()}
        return {name: each.astype(np.float64) if each.dtype.kind in "iub" else each for name, each in found.items()}


class Start:
    """What the clients' models begin with: values `drawn` by the seed for features of each shape, or those of a file.

    They are the modules' own, into which a file's are put. `frozen` are the names of those that are not trained, which
    the file must have; what is trained it may then lack. `fixed` is what else a state dict of the model has.

    The file may lack those of newcomers: clients from number `members` on (None: there are none). `lost` says why there
    is no file though there was one: then nobody is told what a client began with.
    """

    lost = ""

    def __init__(
        self,
        drawn: dict[Shape, State],
        federation: Federation,
        file: str | None,
        precision: Precision,
        members: int | None,
        frozen: Collection[str],
        fixed: State,
    ) -> None:
        self.drawn, self._shapes, self._frozen = drawn, federation.shapes, frozen
        self._file: InitialFile | None = None
        if file is not None:
            self._file = InitialFile(Path(file), federation.clients, precision)
            shapes = {shape: _shapes_of(state) for shape, state in drawn.items()}
            self._file.renamed(next(iter(drawn.values())))
            drawable = next(iter(drawn.values())).keys() - {*frozen} if frozen else ()
            self._file.check_model([shapes[shape] for shape in self._shapes[:members]], drawable)
            for shape, state in drawn.items():
                given = self._file.shared.items()
                for name, value in given:
                    if shapes[shape].get(name) == value.shape:
                        state[name].copy_(torch.from_numpy(value))
            self._file.without(fixed)
        for state in drawn.values():
            for name in frozen:
                del state[name]

    def of(self, client: int | None) -> State:
        """Return what a client's model begins with; None: the first one's, without what is its own."""
        if client is not None and self.lost:
            raise UsageError(self.lost)
        state = dict(self.drawn[self._shapes[client or 0]])
        if self._file is not None and client is not None:
            state |= {name: torch.from_numpy(value) for name, value in self._file.of(client).items()}
        return state

    def given(self, state: State) -> State:
        """Return what a method begins with beside the model, with what the file has of it in its place."""
        if self._file is None:
            return state
        given, model = self._file.shared, self.drawn[self._shapes[0]]
        names = [name for name in state if name in given and name not in model]
        return state | {name: torch.from_numpy(given[name]).to(state[name], copy=True) for name in names}

    def check_method(self, method: str, shared: State, personal: Collection[str]) -> None:
        """Raise UsageError where the file holds what a method does not begin with, or lacks what it does.

        `shared` is its shared state; `personal` are the names of those tensors of the model that are a client's own.
        """
        if (file := self._file) is None:
            return
        model = self.drawn[self._shapes[0]]
        for name in file.shared:
            if name not in (*model, *shared, *self._frozen):
                raise UsageError(f"{file.path}: {name}: no such tensor{did_you_mean(name, {*model, *shared})}")
        for name, shape in _shapes_of(shared).items():
            there = file.shape(name)
            if there is None and name in model and not self._frozen:
                raise UsageError(f"{file.path}: there is no {name}, which clients share; expected {list(shape)}")
            if there is not None:
                file.check_shape(name, there, shape)
        for client, own in file.own.items():
            for name in own:
                where = f"{file.path}: {OWN}/{client}/{name}"
                if name not in model:
                    raise UsageError(f"{where}: no such tensor{did_you_mean(name, personal or model)}")
                if name not in personal:
                    raise UsageError(f"{where}: algorithm.name = '{method}' has no {name} of a client's own")


def _shapes_of(state: State) -> dict[str, Shape]:
    return {name: tuple(value.shape) for name, value in state.items()}
