"""Federated learning as an ordinary MPI batch job.

What is named here is public; all else may change.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcfl.algorithms import Algorithm
    from hpcfl.algorithms.base import ServerState
    from hpcfl.algorithms.fedavg import FedAvg
    from hpcfl.algorithms.local_sgd import LocalSgd
    from hpcfl.base.errors import Diverged, RunError, Stopped, UsageError
    from hpcfl.base.rng import keyed
    from hpcfl.config import Config
    from hpcfl.data import ClientData, Federation, Header, InMemory, Source
    from hpcfl.launch.api import Run, run
    from hpcfl.learning.batches import Batch, Visits
    from hpcfl.learning.optim import zeros
    from hpcfl.learning.task import ClientBatch, Task
    from hpcfl.results.run_table import group_figures, open_sweep
    from hpcfl.results.trained import open_models
    from hpcfl.schedule.speeds import Speed
    from hpcfl.store import open_run
    from hpcfl.sums.message import Sums

    __version__: str

__all__ = [
    "Algorithm",
    "Batch",
    "ClientBatch",
    "ClientData",
    "Config",
    "Diverged",
    "FedAvg",
    "Federation",
    "Header",
    "InMemory",
    "LocalSgd",
    "Run",
    "RunError",
    "ServerState",
    "Source",
    "Speed",
    "Stopped",
    "Sums",
    "Task",
    "UsageError",
    "Visits",
    "__version__",
    "group_figures",
    "keyed",
    "open_models",
    "open_run",
    "open_sweep",
    "run",
    "zeros",
]

_PLACES = {
    "Algorithm": "hpcfl.algorithms",
    "ServerState": "hpcfl.algorithms.base",
    "FedAvg": "hpcfl.algorithms.fedavg",
    "LocalSgd": "hpcfl.algorithms.local_sgd",
    **dict.fromkeys(("Diverged", "RunError", "Stopped", "UsageError"), "hpcfl.base.errors"),
    "keyed": "hpcfl.base.rng",
    "Config": "hpcfl.config",
    **dict.fromkeys(("ClientData", "Federation", "Header", "InMemory", "Source"), "hpcfl.data"),
    "open_models": "hpcfl.results.trained",
    **dict.fromkeys(("Run", "run"), "hpcfl.launch.api"),
    "Speed": "hpcfl.schedule.speeds",
    **dict.fromkeys(("Batch", "Visits"), "hpcfl.learning.batches"),
    "ClientBatch": "hpcfl.learning.task",
    "Task": "hpcfl.learning.task",
    "zeros": "hpcfl.learning.optim",
    "Sums": "hpcfl.sums.message",
    "open_run": "hpcfl.store",
    "group_figures": "hpcfl.results.run_table",
    "open_sweep": "hpcfl.results.run_table",
}


def __getattr__(name: str) -> Any:
    """Return what is first asked for here: commands note signals before NumPy and HDF5 are loaded."""
    if name == "__version__":
        return version("hpcfl")
    if name not in _PLACES:
        raise AttributeError(f"module 'hpcfl' has no attribute '{name}'")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__
