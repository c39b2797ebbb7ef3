"""Play command lines in one process: ``python player.py TREE FILE``, on one rank or several; `against` starts it.

It takes nothing for granted but the command ``hpcfl``: it plays an older package too. Beside each run folder rank 0
writes the exit code and what was said, and what was recorded, as this package reads it: another's format may differ.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import numpy as np

import hpcfl

ROOMS = ("hpcfl.commands.cli", "hpcfl.cli")  # now, and before
RANK = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or "0"


def main(tree: str, file: str) -> None:
    assert Path(hpcfl.__file__).is_relative_to(tree), f"expected hpcfl of {tree}, got {hpcfl.__file__}"
    room = next(name for name in ROOMS if find_spec(name))
    command = __import__(room, fromlist=["main"]).main
    for folder, words in json.loads(Path(file).read_text()).items():
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
            try:
                code = command([*words, "--out", folder])
            except Exception:
                code = 1
                traceback.print_exc()
        if RANK == "0":
            last = [line for line in said.getvalue().splitlines() if line.strip()][-1:]
            Path(f"{folder}.json").write_text(json.dumps([code, "".join(last)]))
            if code == 0:
                data = hpcfl.open_run(folder)
                columns = {str(name): data[name].values for name in [*data.data_vars, *data.coords]}
                texts = {name: value.astype(str) for name, value in columns.items() if value.dtype.kind == "O"}
                np.savez(f"{folder}.npz", **columns | texts)  # an object would be pickled


if __name__ == "__main__":
    main(*sys.argv[1:])
