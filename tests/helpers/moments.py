"""A process that dies, or stands still, at a moment that was chosen: ``python moments.py words…`` is ``hpcfl words…``.

The package knows nothing of this. What its disk does is watched by ``disk.c``, which is preloaded; what it computes and
sends, here, by wrapping functions as their modules are imported. Both read ``CHAOS_RANK`` and ``CHAOS_MARK``, see
``disk.c``, and

- ``CHAOS_MOMENT``, ``action:site:number``: act when the site is reached for the number-th time (from 1), on the rank
  that is meant. Action ``kill`` kills the process, ``stop`` suspends it. Sites: ``import NAME``, before a module is
  executed, and the names in `SITES`.
- ``CHAOS_COUNTS``: a file (``.<rank>`` is added to its name) for how often each site was reached, as JSON.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.abc
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

SITES = {
    "compute": ("hpcfl.engine.simulated", "drained"),  # before the visits of some clients
    "message": ("hpcfl.engine.simulated", "ExactSums.add"),  # one of their messages is there, in the midst of a visit
    "step": ("hpcfl.engine.loop", "step"),  # before the server's step
    "evaluation": ("hpcfl.engine.loop", "evaluate"),
    "reduction": ("hpcfl.mpi.collective", "wait"),  # requests are posted, of a broadcast, a sum, or states to be saved
    "leaving": ("hpcfl.mpi.collective", "Collective.leave"),
    "sealing": ("hpcfl.store", "seal"),  # also tells the disk of it
}
"""Where each site is: a module and a function of it, or a method."""
IMPORTS = ("h5py", "mpi4py", "torch", "hpcfl.engine.job", "hpcfl.engine.simulated")
"""Modules before whose execution a process may die; MPI has begun before torch is imported."""

PHASE = getattr(ctypes.CDLL(None), "chaos_phase", None)


def rank() -> int:
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))


class Moments(importlib.abc.MetaPathFinder):
    """Counts the sites that are reached, and acts at the one that is meant."""

    def __init__(self) -> None:
        self.action, self.site, number = (os.environ.get("CHAOS_MOMENT") or "::0").split(":")
        self.number = int(number) if os.environ.get("CHAOS_RANK", "") in ("", str(rank())) else 0
        self.reached: Counter[str] = Counter()

    def reach(self, site: str) -> None:
        self.reached[site] += 1
        if site != self.site or self.reached[site] != self.number:
            return
        with Path(os.environ["CHAOS_MARK"]).open("a") as mark:
            mark.write(f"{time.monotonic():.9f} {rank()} {os.getpid()} {site} {self.number}\n")
        os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Let a module be found as ever; when it is executed, that is a site, and then its functions are wrapped."""
        places = {site: place for site, (module, place) in SITES.items() if module == name}
        if not places and name not in IMPORTS:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            self.reach(f"import {name}")
            execute(module)
            for site, place in places.items():
                self.wrap(module, place, site)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec

    def wrap(self, module: ModuleType, place: str, site: str) -> None:
        """Let a site be reached whenever a function of the module is called."""
        *owners, name = place.split(".")
        owner: Any = module
        for each in owners:
            owner = getattr(owner, each)
        function: Callable[..., Any] = getattr(owner, name)

        @wraps(function)
        def watched(*args: Any, **how: Any) -> Any:
            if site == "sealing":
                tell_disk(site)
            self.reach(site)
            return function(*args, **how)

        setattr(owner, name, watched)

    def write_counts(self, file: str) -> None:
        Path(f"{file}.{rank()}").write_text(json.dumps(self.reached))


def tell_disk(phase: str) -> None:
    """Tell the preloaded disk, if there is one, where the run is."""
    if PHASE is not None:
        PHASE(phase.encode())


def main() -> None:
    moments = Moments()
    sys.meta_path.insert(0, moments)
    if file := os.environ.get("CHAOS_COUNTS"):
        atexit.register(moments.write_counts, file)
    from hpcfl.__main__ import main as command

    command()


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of helpers: its modules must not hide others
    main()
