"""How a run stands: a text file for people, whose first line is one word.

``running``, ``done``, ``stopped``, ``failed`` and ``diverged`` are written; ``killed`` is what a reader on the same
host concludes from ``running`` and a process that is no more; ``unknown`` stands for a folder without a status. The
reason of ``diverged`` names the round in which it did; the last checkpoint before it is kept.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from hpcfl.store.atomic import write_text

STATES = ("running", "done", "stopped", "failed", "diverged")


@dataclass(frozen=True)
class Status:
    """What the file says, or what follows from it; `time` is ISO 8601, in UTC."""

    state: str
    reason: str = ""
    host: str = ""
    pid: int = 0
    time: str = ""

    @property
    def here(self) -> bool:
        return self.host == socket.gethostname()


def write_status(run_dir: Path, state: str, reason: str = "", ranks: Sequence[str] = ()) -> None:
    """Replace the status of a run; host, process and time are those of the caller.

    `state` is one of `STATES`, else ValueError; `ranks` has process and host of each rank, for people who want to look
    at one of them or signal it.
    """
    if state not in STATES:
        raise ValueError(f"a run is one of {', '.join(STATES)}, not '{state}'")
    lines = [f"rank {rank}: {process}\n" for rank, process in enumerate(ranks)]
    write_text(run_dir / "status", signed(state, reason) + "".join(lines))


def signed(state: str, reason: str) -> str:
    """The text of a status, in the name of this process."""
    fields = {
        "reason": " ".join(reason.split()),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    return "\n".join([state, *(f"{key}: {value}" for key, value in fields.items())]) + "\n"


def read_status(run_dir: Path) -> Status:
    """Read how the run stands; ``running`` reads as ``killed`` when its process on this host is no more."""
    try:
        return parsed((run_dir / "status").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return Status("unknown")


def parsed(text: str) -> Status:
    """The status in a text of `signed`."""
    lines = text.splitlines()
    fields = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    state = lines[0].strip() if lines else "unknown"
    number = fields.get("pid", "")
    status = Status(
        state,
        reason=fields.get("reason", ""),
        host=fields.get("host", ""),
        pid=int(number) if number.isdecimal() else 0,
        time=fields.get("time", ""),
    )
    if state == "running" and status.here and not _alive(status.pid, fields.get("started", "")):
        return Status("killed", f"process {status.pid} is no more", status.host, status.pid, status.time)
    return status


def _alive(pid: int, started: str) -> bool:
    """True where process `pid` lives and is the one that started then (numbers are given anew)."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's: it lives
        pass
    return _started(pid) == started


def _started(pid: int) -> str:
    """Return the start time of a process in ticks, "" where the system does not tell, "dead" for a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()  # the name before it may hold blanks
    return "dead" if fields[0] in "ZX" else fields[19]
