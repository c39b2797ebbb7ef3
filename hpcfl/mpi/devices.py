"""Which GPU a rank has: bound by the launcher's environment, before MPI and CUDA start.

An MPI that reads GPU memory opens the first device that it sees while it starts, and CUDA shows a process at most one
MIG instance. So a rank's own device is the only one that ``CUDA_VISIBLE_DEVICES`` leaves it, and there it is
``cuda:0``. The n-th rank of a host takes the n-th device, and begins anew behind the last: with a server beside as many
client ranks as there are devices, these still have one each.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import takewhile
from typing import Literal

from hpcfl.base.errors import listed, refusal
from hpcfl.base.lazy import torch

Device = Literal["auto", "cpu", "cuda"]
VISIBLE = "CUDA_VISIBLE_DEVICES"
LOCAL_RANKS = (  # Slurm's last: inside its jobs other launchers leave it what it was
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "SLURM_LOCALID",
)


def local_rank(environ: Mapping[str, str]) -> int | None:
    """This process's number on its host, as its launcher says; None where none says so."""
    texts = (environ[key] for key in LOCAL_RANKS if key in environ)
    return next((int(text) for text in texts if text.isdecimal()), None)


def shown(environ: Mapping[str, str], listing: Callable[[], str]) -> list[str]:
    """The devices that this process may see: numbers, or UUIDs of GPUs and MIG instances.

    CUDA ignores what stands behind the first that there is not. `listing` says what ``nvidia-smi -L`` does.
    """
    text = environ.get(VISIBLE)
    if text is None:
        return uuids(listing())
    return list(takewhile(_is_device, (part.strip() for part in text.split(","))))


def _is_device(entry: str) -> bool:
    return entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))


def uuids(text: str) -> list[str]:
    """The UUIDs that ``nvidia-smi -L`` lists; of a GPU that is divided those of its MIG instances."""
    found: list[str] = []
    for line in text.splitlines():
        uuid = line.partition("(UUID: ")[2].rstrip(") ")
        if uuid.startswith("MIG-") and found and found[-1].startswith("GPU-"):
            found.pop()
        if _is_device(uuid):
            found.append(uuid)
    return found


def own(environ: Mapping[str, str], listing: Callable[[], str]) -> str | None:
    """The one device that this process is to see; None where it shall see what it sees."""
    number = local_rank(environ)
    if number is None:
        return None
    there = shown(environ, listing)
    return there[number % len(there)] if there else None


def bind(environ: MutableMapping[str, str]) -> None:
    """Leave this process the device of its own alone; to be called before MPI and CUDA start."""
    if (device := own(environ, _listing)) is not None:
        environ[VISIBLE] = device


def _listing() -> str:
    """What ``nvidia-smi -L`` prints; empty where it is not there or does not answer."""
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def chosen(wanted: Device, key: str, number: int) -> str:
    """The device of the rank with this number on its host, as torch calls it; UsageError where `key` asks for none."""
    if wanted == "cpu":
        return "cpu"
    count = torch.cuda.device_count()
    if count:
        return f"cuda:{number % count}"  # several where no launcher has said who is who
    if wanted == "auto":
        return "cpu"
    sees = f"{VISIBLE} = '{os.environ[VISIBLE]}'" if VISIBLE in os.environ else f"{VISIBLE} is not set"
    raise refusal(
        key, f"'auto' or 'cpu' (torch {torch.__version__} sees no GPU here; {sees})", "cuda", f"{key} = 'cpu'"
    )


def described(device: str) -> str:
    """What tells a device from all others: its name and its UUID; ``cpu`` for the CPU."""
    if not device.startswith("cuda"):
        return device
    facts = torch.cuda.get_device_properties(device)
    seen = os.environ.get(VISIBLE, "all")
    if seen.startswith("MIG-"):
        return f"{facts.name} {seen}"  # torch may tell the UUID of the whole GPU
    return f"{facts.name} " + (f"GPU-{facts.uuid}" if hasattr(facts, "uuid") else f"{device} of {seen}")


def check_shared(devices: Sequence[str], hosts: Sequence[str], most: int) -> None:
    """Raise UsageError where more than `most` ranks share a device.

    `devices` [ranks] are as they are described, "" those of ranks that are missing.
    """
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, (host, device) in enumerate(zip(hosts, devices)):
        if device not in ("cpu", ""):
            ranks.setdefault((host, device), []).append(rank)
    for (host, device), those in ranks.items():
        if len(those) > most:
            why = f"ranks {listed(those)} share {device} on host {host}"
            raise refusal("ranks_per_device", f"{len(those)} or more ({why})", most, len(those))
