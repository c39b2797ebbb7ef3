"""Federated learning as an ordinary MPI batch job."""

from hpcfl.store import open_run

__all__ = ["open_run"]
