"""Initial values from a file (``model.initial``): one dataset for each tensor of a model.

A dataset at the root holds for all clients; ``clients/<number>/<tensor>`` takes its place for one client, in a layer
that is personal. What else a method's shared state begins with may stand at the root by its name. torch is not loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcfl.base.errors import UsageError, did_you_mean
from hpcfl.base.types import Shape
from hpcfl.data.formats.hdf5_file import dataset, opened

OWN = "clients"
Shapes = Mapping[str, Shape]


class InitialFile:
    """A file of initial values; all of them are checked, those at the root are kept.

    Raises
    ------
    UsageError
        In one line: if the file cannot be read, if a dataset is not of float32 or float64, or not finite in the run's
        precision, if a group is not that of a client.
    """

    def __init__(self, path: Path, clients: int, precision: Literal["single", "double"]) -> None:
        self.path, self.dtype = path, np.dtype(np.float64 if precision == "double" else np.float32)
        with opened(path) as file:
            self.shared = {name: self._values(file, name) for name in file if name != OWN}
            groups = file.get(OWN, {})
            if not isinstance(groups, dict | h5py.Group):
                raise UsageError(f"{path}: {OWN} is a dataset, expected groups {OWN}/0 … {OWN}/{clients - 1}")
            for client in groups:
                if len(client) > 9 or not client.isdecimal() or str(int(client)) != client or int(client) >= clients:
                    raise UsageError(f"{path}: {OWN}/{client}: expected one of {OWN}/0 … {OWN}/{clients - 1}")
            self.own: dict[int, dict[str, Shape]] = {
                int(client): {name: self._values(file, f"{OWN}/{client}/{name}").shape for name in group}
                for client, group in groups.items()
            }

    def _values(self, file: h5py.File, name: str) -> NDArray[Any]:
        """Return a dataset in the run's precision."""
        stored = dataset(file, name)
        if stored.dtype.kind != "f" or stored.dtype.itemsize not in (4, 8):
            raise UsageError(f"{self.path}: {name} is of {stored.dtype}, expected float32 or float64")
        with np.errstate(over="ignore"):
            values: NDArray[Any] = np.asarray(stored[()], self.dtype)
        if not np.isfinite(values).all():
            raise UsageError(f"{self.path}: {name} holds what is not finite in {self.dtype}, expected finite numbers")
        return values

    def of(self, client: int) -> dict[str, NDArray[Any]]:
        """Return a client's own values, in the run's precision."""
        with opened(self.path) as file:
            return {name: self._values(file, f"{OWN}/{client}/{name}") for name in self.own.get(client, ())}

    def check_model(self, models: Sequence[Shapes]) -> None:
        """Raise UsageError where a tensor of the clients' `models` is missing or has another shape."""
        for client, model in enumerate(models):
            own = self.own.get(client, {})
            for name, shape in model.items():
                there = own[name] if name in own else self._shape(name)
                if there == shape:
                    continue
                if there is None:
                    or_own = f", nor {OWN}/{client}/{name}" if self.own or shape != models[0][name] else ""
                    raise UsageError(f"{self.path}: there is no {name}{or_own}; expected one of shape {list(shape)}")
                where = f"{OWN}/{client}/{name}" if name in own else name
                whose = f" for client {client}" if name not in own and shape != models[0][name] else ""
                self._check_shape(where, there, shape, whose)

    def check_method(self, method: str, model: Collection[str], shared: Shapes, personal: Collection[str]) -> None:
        """Raise UsageError where a dataset is none of what a method begins with, or one that it needs is missing.

        `shared` are the shapes of its shared state, of which `model` names the model's tensors; `personal` are the
        names of those that clients begin with by themselves.
        """
        for name in self.shared:
            if name not in (*model, *shared):
                raise UsageError(f"{self.path}: {name}: no such tensor{did_you_mean(name, {*model, *shared})}")
        for name, shape in shared.items():
            there = self._shape(name)
            if there is None and name in model:
                raise UsageError(f"{self.path}: there is no {name}, which clients share; expected {list(shape)}")
            if there is not None:
                self._check_shape(name, there, shape)
        for client, own in self.own.items():
            for name in own:
                where = f"{self.path}: {OWN}/{client}/{name}"
                if name not in model:
                    raise UsageError(f"{where}: no such tensor{did_you_mean(name, personal or model)}")
                if name not in personal:
                    raise UsageError(f"{where}: algorithm.name = '{method}' has no {name} of a client's own")

    def _shape(self, name: str) -> Shape | None:
        return self.shared[name].shape if name in self.shared else None

    def _check_shape(self, name: str, there: Shape, shape: Shape, whose: str = "") -> None:
        if there != shape:
            raise UsageError(f"{self.path}: {name} has shape {list(there)}, expected {list(shape)}{whose}")
