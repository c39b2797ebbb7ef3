"""Whether all ranks compute by the same code: ranks of other code would give other results, without a word."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpcfl.base.errors import UsageError
from hpcfl.base.plugins import digests
from hpcfl.launch.failure import raise_together

if TYPE_CHECKING:
    from hpcfl.config import Config

Code = Mapping[str, Mapping[str, Any]]
DIGITS = 12
"""Of a digest, in what is told."""


def check_code(config: Config, ranks: Any) -> None:
    """Raise UsageError, on one rank, where a rank has loaded other files of the user's than rank 0.

    What only one of them has loaded, such as what makes the data, is not compared.
    """
    code = raise_together(ranks, lambda: config.code)
    if ranks is None or not code:
        return
    from hpcfl.comm.mpi import tell

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
                here, there = (
                    str(about[spec].get("modules", {}).get(name, about[spec])["file"]) for about in (code, expected)
                )
                return (
                    f"{who} has loaded '{here}' (SHA-256 {digest[:DIGITS]}…) for {spec}, {whose} '{there}' "
                    f"({wanted[:DIGITS]}…): expected the same file"
                )
    return ""
