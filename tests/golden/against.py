"""What a commit and the working tree (HEAD) give here, to the bit: ``python tests/golden/against.py COMMIT``.

Frozen digests hold for a few kinds of processor; here both sides are played, so it holds on any. The runs are those of
`freeze`, the replay of a run in real time among them, alone and on 3 ranks; ``COMMIT RUN ...`` plays some of them only.
They are given to either side as command lines: one that COMMIT refuses for its usage is "not in COMMIT", and counts as
nothing. Of each run the last checkpoint's state is compared, and every column that both sides have recorded, but for
those of real time. What presets say is frozen for all machines, see `presets`.

Prints a line per run that differs, a summary, and JSON. Exit code 0: all that was compared is equal; 1: it is not, or
nothing was compared; 2: bad usage.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from golden.freeze import ALWAYS, RUNS, digest, has_data, state
from helpers.launcher import ROOT, job, mpis
from hpcfl.testing.runs import PER_RANK, WALL

PLAYER = Path(__file__).with_name("player.py")
SIDES = "COMMIT", "HEAD"
LIMIT = 3600.0  # seconds after which a job hangs, on a busy machine too
Row = dict[str, Any]
"""A run's `name`, `ranks`, and `outcome`: equal, differs, failed (both), not in COMMIT or not compared, and `why`."""


def main() -> int:
    began, parser = time.monotonic(), argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="of tests/golden/freeze.py (default: all)")
    asked = parser.parse_args()
    if unknown := [name for name in asked.runs if name not in RUNS]:
        parser.error(f"expected runs of tests/golden/freeze.py, got {unknown[0]}")
    commit = git("rev-parse", "--verify", "--quiet", f"{asked.commit}^{{commit}}")
    if not commit:
        parser.error(f"expected a commit, got {asked.commit}")
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        git("worktree", "add", "--detach", "--quiet", str(tree), commit)
        try:
            rows = compared((tree, ROOT), asked.runs or list(RUNS), Path(scratch))
        finally:
            git("worktree", "remove", "--force", str(tree))
    counts = Counter(row["outcome"] for row in rows)
    for row in rows:
        if row["outcome"] != "equal":
            print(f"{row['name']} on {row['ranks'] or 'any'} rank(s): {row['outcome']}: {row['why']}")
    others = "".join(
        f", {number} {outcome}" for outcome, number in counts.items() if outcome not in ("equal", "differs")
    )
    print(f"{counts['equal'] + counts['differs']} compared to the bit: {counts['differs']} differ{others}")
    rows = [row for row in rows if row["outcome"] != "equal"]
    print(json.dumps({"commit": commit, **counts, "seconds": round(time.monotonic() - began), "rows": rows}))
    return 0 if counts["equal"] and not counts["differs"] and not counts["failed"] else 1


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], stdout=subprocess.PIPE, text=True).stdout.strip()


def compared(trees: Sequence[Path], names: Sequence[str], scratch: Path, ranks: Sequence[int] = (1, 3)) -> list[Row]:
    """Play the runs under both trees at once, for each number of ranks, and compare them."""
    there = [name for name in names if has_data(name)]
    rows = [outcome(name, 0, "not compared", "needs MNIST in HPCFL_DATA") for name in names if name not in there]
    for count in ranks:
        mpi = next(iter(mpis()), None) if count > 1 else ""
        if mpi is None:
            rows += [outcome(name, count, "not compared", "no MPI is installed") for name in there]
            continue
        folders = [scratch / f"{side}-{count}" for side in SIDES]
        with ThreadPoolExecutor() as pool:
            ends = [*pool.map(partial(play, mpi, count, there), trees, folders)]
        rows += [judged(name, count, folders, ends) for name in there]
    return rows


def play(mpi: str, ranks: int, names: Sequence[str], tree: Path, folder: Path) -> str:
    """Play runs on ranks of one job; return the last line of what went to stderr."""
    folder.mkdir()
    sets = {name: [word for setting in (*ALWAYS, *RUNS[name]) for word in ("--set", setting)] for name in names}
    runs = {str(folder / name): ["run", name, *words, "--quiet"] for name, words in sets.items()}
    file = folder / "runs.json"
    file.write_text(json.dumps(runs))
    words = [*(["-m", "mpi4py"] if mpi else []), str(PLAYER), str(tree), str(file)]
    ended = job(mpi, ranks, words, LIMIT, env={"PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ""})
    return (ended.err.strip().splitlines() or [""])[-1]


def outcome(name: str, ranks: int, found: str, why: str = "") -> Row:
    return {"name": name, "ranks": ranks, "outcome": found, "why": why}


def judged(name: str, ranks: int, folders: Sequence[Path], ends: Sequence[str]) -> Row:
    """Compare a run of both sides, or how it ended where it has not ended well on both."""
    told = [folder / f"{name}.json" for folder in folders]
    said = [json.loads(file.read_text()) if file.exists() else [None, end] for file, end in zip(told, ends)]
    (old, why), (new, _) = said
    if old == 2 and new == 0:
        return outcome(name, ranks, "not in COMMIT", why)
    if old != 0 or new != 0:
        why = "; ".join(f"{side} ended with {code}: {line}" for side, (code, line) in zip(SIDES, said))
        return outcome(name, ranks, "failed" if old == new else "differs", why)
    found = "; ".join(differences(*(folder / name for folder in folders)))
    return outcome(name, ranks, "differs" if found else "equal", found)


def differences(old: Path, new: Path) -> Iterator[str]:
    """Yield what differs between two runs."""
    before, after = tensors(old), tensors(new)
    if {name: value.shape for name, value in before.items()} != {name: value.shape for name, value in after.items()}:
        yield "the state has other tensors"
    elif digest(sorted(before.items())) != digest(sorted(after.items())):
        scale = max(float(np.abs(value).max(initial=0)) for value in before.values())
        gap = max(float(np.abs(np.subtract(before[name], after[name], dtype=float)).max(initial=0)) for name in before)
        yield f"the state by {gap:.2g}, where its largest number is {scale:.2g}"
    one, other = (recorded(run.with_name(f"{run.name}.npz")) for run in (old, new))
    if unlike := [name for name in sorted(one.keys() & other.keys()) if not same(one[name], other[name])]:
        yield f"recorded are other {', '.join(unlike)}"


def tensors(run: Path) -> dict[str, Any]:
    shared, personal = state(run)
    return shared | {f"{name} of client {client}": value for client, name, value in personal}


def recorded(file: Path) -> dict[str, Any]:
    """Return what a side has read of its own run, but for the columns of real time and of single ranks."""
    with np.load(file) as columns:
        return {name: columns[name] for name in columns.files if name not in {*WALL, *PER_RANK, "rank"}}


def same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == other.dtype.kind == "f"))


if __name__ == "__main__":
    sys.exit(main())
