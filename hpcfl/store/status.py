"""How a run stands: a text file for people, whose first line is one word.

``running``, ``done``, ``ended`` (done before its last round, by its config), ``stopped``, ``failed`` and ``diverged``
are written; ``killed`` is what a reader on the same host concludes from ``running`` and a process that is no more;
``unknown`` stands for a folder without a status. The reason of ``diverged`` names the round in which it did; the last
checkpoint before it is kept. The second line is a check of all others: what does not fit it is not believed.
"""

from __future__ import annotations

import errno
import os
import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from hpcfl.store.atomic import read_text, write_text

DONE = ("done", "ended")
"""States of a run that has come to its end, from which nothing goes on by itself."""
STATES = ("running", "done", "ended", "stopped", "failed", "diverged")
CHECK = "check: "
DIGITS = 10  # of a process id, at most


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
    text = signed(state, reason) + "".join(f"rank {rank}: {process}\n" for rank, process in enumerate(ranks))
    write_text(run_dir / "status", _checked(text))


def overwrite_status(run_dir: Path, state: str, reason: str) -> None:
    """Write a status into the bytes of the one that is there: a full disk lets nothing but that be changed.

    What they do not hold of the reason is cut off. OSError where that is refused too, or there is no room for any.
    """
    with (run_dir / "status").open("r+b", buffering=0) as file:
        room = os.fstat(file.fileno()).st_size
        spare = room - len(_checked(signed(state)).encode())
        if spare < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
        reason = reason.encode()[:spare].decode(errors="ignore")
        text = signed(state, reason)
        text += "\n" * (room - len(_checked(text).encode()))
        file.write(_checked(text).encode())


def signed(state: str, reason: str = "") -> str:
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
    """Read how the run stands; ``running`` reads as ``killed`` when its process on this host is no more.

    A file that is damaged, or no file, tells nothing but that.
    """
    try:
        text = read_text(run_dir / "status")
    except (FileNotFoundError, NotADirectoryError):
        return Status("unknown")
    except OSError as error:
        return Status("unknown", f"{run_dir / 'status'} cannot be read: {error.strerror}")
    reason = damage(text)
    return Status("unknown", f"{run_dir / 'status'} is damaged: {reason}") if reason else parsed(text)


def damage(text: str) -> str:
    """Return what is wrong with the text of a status, "" where nothing is."""
    word, _, rest = text.partition("\n")
    if word not in STATES:
        return f"it begins with '{word[:40]}'; expected one of {', '.join(STATES)}"
    check, _, fields = rest.partition("\n")
    return "" if check == CHECK + _check(f"{word}\n{fields}") else "its text is not what was written"


def parsed(text: str) -> Status:
    """The status in a text of `signed`."""
    lines = text.splitlines()
    fields = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    state = lines[0].strip() if lines else "unknown"
    number = fields.get("pid", "")
    reason, host, time = (fields.get(key, "") for key in ("reason", "host", "time"))
    status = Status(state, reason, host, int(number) if number.isdecimal() and len(number) <= DIGITS else 0, time)
    if state == "running" and status.here and not _alive(status.pid, fields.get("started", "")):
        return replace(status, state="killed", reason=f"process {status.pid} ended without a word")
    return status


def _checked(text: str) -> str:
    """The content of the file: a text of `signed`, with the check behind its first line."""
    word, _, rest = text.partition("\n")
    return f"{word}\n{CHECK}{_check(text)}\n{rest}"


def _check(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


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
