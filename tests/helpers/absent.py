"""Ranks that are missing from the start: ``HPCFL_ABSENT=kill:3,stop:4`` kills rank 3, and suspends rank 4, at a point.

That point is where they import torch, which takes long on a slow file system; of ``last:4`` it is the last one: rank 4
is suspended where all is ready and its lanes are about to be used.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.abc import MetaPathFinder
from typing import Any

from hpcfl.mpi.launcher import launched_rank

VARIABLE = "HPCFL_ABSENT"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Fatal(MetaPathFinder):
    """What torch's import does to this process."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def find_spec(self, name: str, *rest: Any) -> None:
        if name == "torch":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), self.number)


def install(setting: str) -> None:
    """Do to this process what a setting says of its rank, "" for nothing."""
    for word in setting.split(",") if setting else ():
        kind, _, rank = word.partition(":")
        if int(rank) == launched_rank(os.environ):
            if kind == "last":
                from hpcfl.realtime import start

                start.serve = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
            else:
                sys.meta_path.insert(0, Fatal(SIGNALS[kind]))
