"""``python tests/helpers/lacking.py RANKS WHAT …``: hpcfl, some of whose ranks (``3,4``) lack what others have.

That is a module by its name, or the right MPI: WHAT is the path of another one's library.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from hpcfl.__main__ import main
from hpcfl.mpi.launcher import launched_rank


class Lacking(MetaPathFinder):
    """Finds nothing, and lets nobody else find it."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == what:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


ranks, what = sys.argv.pop(1).split(","), sys.argv.pop(1)
if str(launched_rank(os.environ)) in ranks:
    if Path(what).is_absolute():
        os.environ["MPI4PY_LIBMPI"] = what
    else:
        sys.meta_path.insert(0, Lacking())
main()
