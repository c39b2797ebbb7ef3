"""What is public, by the module that has it: ``hpcfl/__init__.py`` reads it from here."""

from .algorithms import Algorithm
from .algorithms.base import ServerState
from .algorithms.fedavg import FedAvg
from .algorithms.local_sgd import LocalSgd
from .base.errors import Diverged, RunError, Stopped, UsageError
from .base.rng import keyed
from .commands.functions import Sweep, check, list, show, stop, sweep  # noqa: A004
from .config import Config
from .data import ClientData, Federation, Header, InMemory, Source
from .launch.api import Run, resume, run
from .launch.export import export
from .launch.saved import save_data
from .learning.batches import Batch, Visits
from .learning.optim import zeros
from .learning.task import ClientBatch, Task
from .results.figures import figure
from .results.run_table import group_figures, open_sweep
from .results.targets import compare
from .results.trained import open_models
from .schedule.speeds import Speed
from .store import open_run
from .sums.message import Sums

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
    "Sweep",
    "Task",
    "UsageError",
    "Visits",
    "__version__",
    "check",
    "compare",
    "export",
    "figure",
    "group_figures",
    "keyed",
    "list",
    "open_models",
    "open_run",
    "open_sweep",
    "resume",
    "run",
    "save_data",
    "show",
    "stop",
    "sweep",
    "zeros",
]

__version__: str
