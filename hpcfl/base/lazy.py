"""Libraries that take long to load: each is when something of it is first used.

Listing, showing and verifying runs need none of them, and a run sets its threads before torch asks for their number. To
load MPI is to start it: a process alone does not, and need not have it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Lazy(ModuleType):
    """A module that is imported by its name when it is first asked for something.

    It has the names of a library from then on: looking through costs as much as a small operation. Those of this
    package are looked up each time, and so may be replaced.
    """

    def __getattr__(self, name: str) -> Any:
        """Return what the module has."""
        module = import_module(self.__name__)
        if not self.__name__.startswith("hpcfl."):
            vars(self).update({key: value for key, value in vars(module).items() if not key.startswith("__")})
        return getattr(module, name)


if TYPE_CHECKING:
    import pandas as pandas
    import torch as torch
    import xarray as xarray
    from mpi4py import MPI as MPI
    from torch import Tensor as Tensor
else:
    MPI, pandas, torch, xarray = map(Lazy, ("mpi4py.MPI", "pandas", "torch", "xarray"))
    Tensor = Any  # for annotations, which nobody evaluates


def no_grad(function: Callable[P, T]) -> Callable[P, T]:
    """Do what `torch.no_grad` does to a function, without torch until it is called."""

    @wraps(function)
    def quiet(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.no_grad():
            return function(*args, **kwargs)

    return quiet
