"""A process that has imported everything once, and forks a command in no time: what makes 20 kills affordable.

``python warm.py`` reads JSON lines, ``{"args": […], "out": path}`` to start ``hpcfl args`` with its output in
``path`` (stdout) and ``path.err`` (stderr), and ``{"wait": pid}`` for its exit code, negative for a signal. A start may
have a further key ``env``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Warm:
    """The process, as the tests see it."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )

    def ask(self, order: Mapping[str, Any]) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, args: Sequence[str], out: Path, env: Mapping[str, str] | None = None) -> Started:
        """Start ``hpcfl args``; it is the leader of a process group of its own."""
        order = {"args": list(args), "out": str(out), "env": dict(env or {})}
        return Started(self, self.ask(order), out)

    def end(self) -> None:
        """End the process; none of its children is left by then, or it ends them."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(timeout=60) == 0, "a command was still running"


@dataclass(frozen=True)
class Started:
    """A command that was started, and what it has said so far."""

    warm: Warm
    pid: int
    path: Path

    @property
    def out(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        return self.path.with_name(self.path.name + ".err").read_text(encoding="utf-8")

    def over(self) -> bool:
        """Whether it has ended, without waiting for it: its parent has not been told to take its exit code."""
        text = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[0] in "ZX"

    def kill(self) -> None:
        """Kill the whole group, as ``kill -9`` does; one that is over already does not mind."""
        os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return self.warm.ask({"wait": self.pid})


def serve() -> int:
    """Fork what standard input asks for, until it ends; return how many children had to be killed."""
    import h5netcdf  # noqa: F401
    import torch
    import xarray  # noqa: F401

    import hpcfl.commands.cli
    import hpcfl.commands.show
    import hpcfl.engine.loop
    import hpcfl.engine.record
    import hpcfl.launch.run  # noqa: F401
    from hpcfl.algorithms import algorithms
    from hpcfl.data import sources
    from hpcfl.models import models

    torch.set_num_threads(1)
    assert all((algorithms(), sources(), models()))  # all of them imported
    running: set[int] = set()
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            running.remove(order["wait"])
            answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
        else:
            answer = fork(order)
            running.add(answer)
        print(answer, flush=True)
    for pid in running:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return len(running)


def fork(order: Mapping[str, Any]) -> int:
    """Return the process id of a child that carries out a command."""
    started, ready = os.pipe()
    pid = os.fork()
    if pid:
        os.close(ready)
        os.read(started, 1)  # its group and its files are there
        os.close(started)
        return pid
    code = 70
    try:
        os.setpgid(0, 0)
        for number, name in ((0, os.devnull), (1, order["out"]), (2, order["out"] + ".err")):
            file = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(file, number)
            os.close(file)
        os.write(ready, b".")
        os.close(ready)
        os.close(started)
        os.environ.update(order["env"])
        code = command(order)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)
    raise AssertionError


def command(order: Mapping[str, Any]) -> int:
    import faults

    from hpcfl.commands.cli import main

    faults.install(os.environ.get(faults.VARIABLE, ""))
    if "CHAOS_FOLDER" in order["env"]:
        return with_disk(order["args"])
    return main(order["args"])


def with_disk(args: Sequence[str]) -> int:
    """Carry out a command, as its own process would, on the preloaded disk that its environment describes."""
    from hpcfl.__main__ import main

    ctypes.CDLL(None).chaos_begin()
    sys.argv[1:] = args
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(serve())
