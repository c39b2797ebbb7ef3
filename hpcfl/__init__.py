"""Federated learning as an ordinary MPI batch job."""

from hpcfl.store import open_run
from hpcfl.trained import open_models

__all__ = ["open_models", "open_run"]
