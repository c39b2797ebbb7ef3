"""What ranks have in common: the code that they compute by; on one host devices, and samples that one of them reads.

Ranks of other code would give other results without a word, or wait for each other for ever. By the package counts what
it stands on too, and what is the user's. And what torch is told so that a GPU gives the same bits each time.
"""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from hashlib import sha256
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hpcfl.base.errors import RunError, UsageError, listed
from hpcfl.base.lazy import torch
from hpcfl.base.loaded import OURS
from hpcfl.base.plugins import digests
from hpcfl.base.terminal import say
from hpcfl.config import Config
from hpcfl.data import Federation
from hpcfl.data.shared import attach, shared
from hpcfl.launch.failure import raise_together
from hpcfl.mpi.devices import check_shared, chosen, described
from hpcfl.mpi.waiting import tell, texts

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS reads it when it is first used
FIXED = ":4096:8"  # one of the two settings with which cuBLAS promises the same bits
Code = Mapping[str, Mapping[str, Any]]
Build = Mapping[str, str]
PACKAGE = Path(__file__).parents[1]
DIGITS = 12
"""Of a digest, in what is told."""


def placed(config: Config, comm: Any, hosts: Sequence[str]) -> tuple[str, list[str]]:
    """Return the device on which this rank computes, and what all ranks have; `hosts` [ranks] are theirs.

    Raises
    ------
    UsageError
        Where a GPU is asked for and there is none, or more ranks share one than the config allows; on one rank, as by
        `raise_together`.
    """
    rank = 0 if comm is None else comm.Get_rank()
    key = "server_device" if rank == 0 and len(hosts) > 1 else "device"
    own = raise_together(comm, lambda: chosen(getattr(config, key), key, hosts[:rank].count(hosts[rank])))
    devices = texts(comm, described(own))
    raise_together(comm, lambda: check_shared(devices, hosts, config.ranks_per_device))
    return own, devices


def other_device(recorded: Mapping[str, str], devices: Sequence[str]) -> str:
    """Return in words that clients' computing goes on with another kind of device than it began with, "" if not."""
    began = json.loads(recorded.get("devices", "[]"))
    then, now = (
        ["cpu", *filter(None, each)][-1].partition(" GPU-")[0].partition(" MIG-")[0] for each in (began, devices)
    )
    return "" if then == now else f"began on {then} and goes on with {now}: last bits will differ from one whole run's"


@contextmanager
def fixed_arithmetic(wanted: bool) -> Iterator[None]:
    """Let a GPU use only algorithms that give the same bits each time, and no TF32, within the block, where `wanted`.

    Afterwards torch's flags and the environment are as they were.
    """
    if not wanted:
        yield
        return
    backends: Any = torch.backends
    deterministic: Any = torch.utils.deterministic
    cudnn, matmul = backends.cudnn, backends.cuda.matmul
    places: list[tuple[Any, str]] = [(cudnn, "benchmark"), (cudnn, "deterministic")]
    places += [(deterministic, "fill_uninitialized_memory"), (matmul, "allow_tf32"), (cudnn, "allow_tf32")]
    places += [(part, "fp32_precision") for part in (matmul, getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None))]
    before = [(place, name, value) for place, name in places if (value := _flag(place, name)) is not None]
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(WORKSPACE)
    try:
        os.environ.setdefault(WORKSPACE, FIXED)
        torch.use_deterministic_algorithms(True)
        deterministic.fill_uninitialized_memory = False  # a guard against reading it, which costs a pass over it
        cudnn.benchmark, cudnn.deterministic = False, True
        matmul.allow_tf32 = cudnn.allow_tf32 = False
        yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warns)
        for place, name, value in before:
            if _flag(place, name) != value:  # setting some of these by both of their names makes one unreadable
                setattr(place, name, value)
        if workspace is None:
            os.environ.pop(WORKSPACE, None)


def _flag(place: Any, name: str) -> Any:
    """Return a flag of torch; None where this version has none, or none by this name since it was set by another."""
    try:
        return getattr(place, name, None)
    except RuntimeError:
        return None


@contextmanager
def read_once(
    config: Config, data_dir: Path | None, comm: Any, hosts: Sequence[str], first: Callable[[], None]
) -> Iterator[Federation | None]:
    """Yield what this rank maps of the data that the first rank of its host has read; None: it reads them itself.

    `hosts` [ranks] are those of all ranks, which enter together; until they have all entered what follows, no rank
    leaves the block. Each calls `first` before anything is read. A rank reads by itself where no other is on its host,
    or the first one is missing, or the data cannot be shared.

    Raises
    ------
    UsageError
        If the data cannot be read; on one rank, as by `raise_together`.
    """
    rank = 0 if comm is None else comm.Get_rank()
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    with ExitStack() as stack:

        def offered() -> str:
            first()
            if len(here) == 1 or rank != here[0]:
                return ""
            return stack.enter_context(shared(config.federation(data_dir), config.data))

        own = raise_together(comm, offered)
        if len({*hosts}) == len(hosts):
            yield None
            return
        text = texts(comm, own)[here[0]]
        federation = None
        try:
            federation = attach(text, config.data) if text else None
        except RunError as error:
            if rank == here[min(1, len(here) - 1)]:  # one of those that map
                say(f"each rank of this host reads the data by itself: {error}")
        yield federation


# the code that ranks compute by


def build() -> dict[str, str]:
    """Return what this rank computes by: versions by name, with digests, and its host.

    Of the package every module counts; of numpy and torch the file that says which build it is, since reading all of
    them takes longer than many a run. Nothing is imported.
    """
    known = {"Python": platform.python_version()}
    for name in OURS:
        try:
            number = version(name)
        except PackageNotFoundError:
            number = "without a version"
        if name == "hpcfl":
            digest = package_digest()
        else:
            spec = PathFinder.find_spec(name)
            file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
            digest = sha256(file.read_bytes()).hexdigest() if file and file.is_file() else "unknown"
        known[name] = f"{number} ({digest[:DIGITS]})"
    return known | {"host": socket.gethostname()}


@cache
def package_digest(package: Path = PACKAGE) -> str:
    """Return the SHA-256 of the package's modules, whatever is compiled or installed beside them.

    As they are when a process asks first: it computes by what it has loaded.
    """
    digest = sha256()
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        if place.parts[0] != "presets":  # which a checkout has elsewhere
            source = path.read_bytes()
            digest.update(f"{place.as_posix()} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def builds(comm: Any) -> list[dict[str, str]]:
    """Return what each rank computes by.

    Ranks say this to each other before all else, and in all versions alike: what they say later may differ.
    """
    return [] if comm is None else [json.loads(text) for text in texts(comm, json.dumps(build()))]


def check_builds(found: Sequence[Build], allow_mixed: bool) -> str:
    """Return in one line which ranks compute by other code than rank 0, "" if none does.

    It is told if that is allowed; else it is a UsageError.
    """
    if line := differing(found):
        if not allow_mixed:
            raise UsageError(f"{line}: expected the same on all ranks; --allow-mixed runs with them as they are")
        say(f"{line}: another number of ranks may give another result")
    return line


def differing(found: Sequence[Build]) -> str:
    """Return in one line which ranks compute by other code than rank 0, and where; "" if none does."""
    first = found[0] if found else {}
    names = [name for name in first if name != "host" and any(each.get(name) != first[name] for each in found)]
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, each in enumerate(found):
        ranks.setdefault(tuple(f"{name} {each.get(name, 'unknown')}" for name in names), []).append(rank)
    if len(ranks) < 2:
        return ""
    return "; ".join(
        f"{'rank' if len(those) == 1 else 'ranks'} {listed(those)} on "
        f"{listed(dict.fromkeys(found[rank]['host'] for rank in those))} {'has' if len(those) == 1 else 'have'} "
        f"{', '.join(texts)}"
        for texts, those in ranks.items()
    )


def check_code(config: Config, ranks: Any) -> None:
    """Raise UsageError, on one rank, where a rank has loaded other files of the user's than rank 0.

    What only one of them has loaded, such as what makes the data, is not compared.
    """
    code = raise_together(ranks, lambda: config.code)
    if ranks is None or not code:
        return
    who = f"rank {ranks.Get_rank()} on {socket.gethostname()}"
    first = json.loads(tell(ranks, json.dumps(code)))

    def check() -> None:
        if line := other_code(code, first, who, "rank 0"):
            raise UsageError(line)

    raise_together(ranks, check)


def other_code(code: Code, expected: Code, who: str, whose: str) -> str:
    """Return in one line which file of the user's differs from what is expected; "" if none does.

    Both are as `hpcfl.base.plugins.origins` has them; `who` has loaded `code`, and is compared with `whose`.
    """
    before = digests(expected)
    for spec, modules in digests(code).items():
        for name, digest in modules.items():
            wanted = before.get(spec, {}).get(name, digest)
            if digest != wanted:
                both = (about[spec].get("modules", {}).get(name, about[spec])["file"] for about in (code, expected))
                here, there = map(str, both)
                loaded = f"{who} has loaded '{here}' (SHA-256 {digest[:DIGITS]}…) for {spec}"
                return f"{loaded}, {whose} '{there}' ({wanted[:DIGITS]}…): expected the same file"
    return ""
