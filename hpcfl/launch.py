"""From a command to a running job: rank 0 decides, everybody agrees, then the order is carried out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcfl import store
from hpcfl.agreement import told
from hpcfl.errors import Elsewhere, Stopped, Told
from hpcfl.execute import carry_out
from hpcfl.failure import fail
from hpcfl.orders import Order


def launch(judge: Callable[[], Order | None], comm: Any) -> None:
    """Carry out what rank 0's `judge` says, on all ranks of `comm` (None: on this process alone).

    Raises
    ------
    UsageError, RunError
        On one rank; on the others `hpcfl.errors.Elsewhere`. Any other error ends the job.
    Stopped
        On every rank, if the run was asked to stop.
    """
    order = None
    try:
        order = told(comm, judge)
        if order is not None:
            carry_out(order, comm)
    except (Told, Elsewhere, Stopped):
        raise
    except BaseException as error:
        fail(comm, Path(order.run_dir) if order else None, error)
    finally:
        if order is not None:
            store.release(Path(order.run_dir))
