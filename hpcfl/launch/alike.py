"""Whether all ranks compute by the same code: the package with what it stands on, and what is the user's.

Ranks of other code would give other results without a word, or wait for each other for ever.
"""

from __future__ import annotations

import json
import platform
import socket
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hpcfl.base.errors import UsageError, listed
from hpcfl.base.loaded import OURS
from hpcfl.base.plugins import digests
from hpcfl.base.terminal import say
from hpcfl.config import Config
from hpcfl.launch.failure import raise_together
from hpcfl.mpi.waiting import tell, texts

Code = Mapping[str, Mapping[str, Any]]
Build = Mapping[str, str]
PACKAGE = Path(__file__).parents[1]
DIGITS = 12
"""Of a digest, in what is told."""


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
    if comm is None:
        return []
    return [json.loads(text) for text in texts(comm, json.dumps(build()))]


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
