"""What nobody would notice: ``python tests/mutants.py MODULE ... [--count N] [--first K] [--seed S] [--record FILE]``.

Modules of `hpcfl.realtime`, by name (``lane leader``), are changed in one place each: a comparison or an `and` is
turned round, a condition negated, which swaps its branches, a small number made larger by 1, a statement left out. What
messages and errors say is left alone. Each such mutant is written to a copy of the package, against which schedules are
played whose traces are frozen (`golden.schedules`), until something fails or takes too long. Those that nothing has
noticed are tried by the tests of real time that need no MPI, first by those that take less than half a second, and then
by those of three ranks of Open MPI (but for those of 8 processor-seconds and more). The draw depends on the seed alone,
so that a job may be cut into shards by ``--first`` and ``--count``. Prints a JSON line per try, and one on all last;
survivors are told by file and line.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from costs import COSTS
from golden.schedules import unlike

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "analysis"))
import study_lines  # noqa: E402

BESIDE = "tests", "benchmarks", "analysis", "docs", "jobs", "examples", "pyproject.toml", "README.md", "CHANGELOG.md"
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add},
}
PLAYED = """
import sys, torch
sys.path.insert(0, "tests")
from golden.schedules import frozen, short
from hpcfl.testing.schedules import drawn, play
torch.set_num_threads(1)
known = frozen()
for seed in map(int, sys.argv[1:]):
    found = play(drawn(seed))
    if found.broken or short(found) != known[seed]:
        sys.exit(f"seed {seed}: {found.broken or 'another trace'}")
"""
FIRST = """
import faulthandler
from mpi4py import MPI

def pytest_runtest_setup(item):
    faulthandler.dump_traceback_later(90, exit=True)

def pytest_runtest_logreport(report):
    if report.failed:
        print("\\nFAILED", report.nodeid, flush=True)
        MPI.COMM_WORLD.Abort(1)
"""
PYTEST = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts="]
ROOM = ["-m", "not mpi and not launch and not slow and not slurm", "-k", "not million"]
OPENMPI = ROOT / ".mpi" / "openmpi"
RANKS = [str(OPENMPI / "bin" / "mpiexec"), "--oversubscribe", "-n", "3", sys.executable, "-m", "mpi4py"]


@dataclass(frozen=True)
class Mutant:
    """A change of a module: its line and column, what it was and what it is, and the whole source."""

    module: str
    line: int
    column: int
    was: str
    now: str
    source: str

    @property
    def told(self) -> str:
        return f"hpcfl/realtime/{self.module}.py:{self.line}:{self.column}: {self.was} -> {self.now}"


def changes(node: ast.AST) -> Iterator[ast.AST | None]:
    """Yield what a node may be changed into; None: it is left out."""
    new = copy.deepcopy(node)
    if isinstance(new, (ast.BoolOp, ast.BinOp)) and type(new.op) in SWAPS:
        new.op = SWAPS[type(new.op)]()  # type: ignore[assignment]
        yield new
    elif isinstance(new, ast.Compare) and type(new.ops[0]) in SWAPS:
        new.ops[0] = SWAPS[type(new.ops[0])]()  # type: ignore[assignment]
        yield new
    elif isinstance(new, (ast.If, ast.While, ast.IfExp)):
        new.test = ast.UnaryOp(ast.Not(), new.test)
        yield new
    elif isinstance(new, ast.Constant) and type(new.value) is int and 0 <= new.value <= 3:
        new.value += 1
        yield new
    elif isinstance(new, (ast.Expr, ast.Assign, ast.AugAssign)) and not isinstance(new.value, ast.Constant):
        yield None


def mutants(module: str) -> list[Mutant]:
    """Return all mutants of a module, within its functions."""
    tree = ast.parse((ROOT / "hpcfl" / "realtime" / f"{module}.py").read_text(encoding="utf-8"))
    inside = [each for within in ast.walk(tree) if isinstance(within, ast.FunctionDef) for each in within.body]
    texts = {
        id(node) for text in ast.walk(tree) if isinstance(text, (ast.JoinedStr, ast.Raise)) for node in ast.walk(text)
    }
    places = [
        (node, field, index)
        for top in dict.fromkeys(inside)
        for node in ast.walk(top)
        if id(node) not in texts
        for field, value in ast.iter_fields(node)
        for index in range(len(value) if isinstance(value, list) else 1)
    ]
    found = {}
    for node, field, index in places:
        held = getattr(node, field)
        old = held[index] if isinstance(held, list) else held
        for new in changes(old) if isinstance(old, ast.AST) else ():
            put(node, field, index, ast.Pass() if new is None else new)
            source = ast.unparse(tree)
            put(node, field, index, old)
            was, now = (ast.unparse(each).partition("\n")[0] if each else "nothing" for each in (old, new))
            found[source] = Mutant(module, old.lineno, old.col_offset, was, now, source)  # type: ignore[attr-defined]
    return list(found.values())


def put(node: ast.AST, field: str, index: int, new: ast.AST) -> None:
    """Set a field of a node, or a place in it."""
    held = getattr(node, field)
    if isinstance(held, list):
        held[index] = new
    else:
        setattr(node, field, new)


def noticed(mutant: Mutant | None, folder: Path, command: list[str], seconds: float) -> str:
    """Return how a command has noticed a mutant, "" if it has not. None: no mutant at all."""
    place = folder / "hpcfl" / "realtime" / f"{mutant.module}.py" if mutant else None
    kept = place.read_text(encoding="utf-8") if place else ""
    if place and mutant:
        place.write_text(mutant.source, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder)}
    environment["MPI4PY_LIBMPI"] = str(OPENMPI / "lib" / "libmpi.so.40")
    limited = ["timeout", "--kill-after=10", str(seconds), *command]
    run = subprocess.run(limited, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if place:
        place.write_text(kept, encoding="utf-8")
    if run.returncode in (124, 137):
        return "no end"
    lines = [line for line in (run.stdout + run.stderr).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines[-1:]
    return (told[0][:160] if told else str(run.returncode)) if run.returncode else ""


def main() -> int:
    """Try mutants; return 1 if one has survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--first", type=int, default=0, help="where in the draw to begin")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--schedules", type=int, default=40, help="how many of those that are frozen")
    parser.add_argument("--tests", nargs="*", default=["tests/realtime"])
    parser.add_argument("--patience", type=float, default=5.0, help="what takes so many times as long has no end")
    parser.add_argument(
        "--record", type=Path, default=Path(os.devnull), help="a line per try; what is there is left out"
    )
    asked = parser.parse_args()
    every = [mutant for module in asked.modules for mutant in mutants(module)]
    random.Random(asked.seed).shuffle(every)
    drawn = [*enumerate(every)][asked.first : asked.first + asked.count]
    played = [sys.executable, "-c", PLAYED, *map(str, unlike(asked.schedules))]
    tests = [sys.executable, *PYTEST, *ROOM, *asked.tests]
    costs = json.loads(COSTS.read_text(encoding="utf-8"))  # only tests of half a second and more are there
    short, swift = ([f"--deselect={test}" for test in costs if costs[test] >= least] for least in (0.0, 8.0))
    ranks = [*RANKS, *PYTEST, "--with-mpi", "-m", "mpi and not slow", "-p", "first", *swift, *asked.tests]
    tries = {"schedules": played, "short tests": [*tests, *short], "tests": tests, "tests of three ranks": ranks}
    rows = study_lines.read(asked.record)
    known = {(row["by"], row["change"]): row["noticed"] for row in rows}
    left, commit, began = drawn, study_lines.commit(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folder = Path(temporary)
        shutil.copytree(ROOT / "hpcfl", folder / "hpcfl", ignore=shutil.ignore_patterns("__pycache__"))
        for each in BESIDE:
            (folder / each).symlink_to(ROOT / each)
        (folder / "first.py").write_text(FIRST, encoding="utf-8")
        for by, command in tries.items():
            new = [(number, mutant) for number, mutant in left if (by, mutant.told) not in known]
            since = time.monotonic()
            if new and (failed := noticed(None, folder, command, 3600.0)):
                sys.exit(f"the package as it is does not pass: {failed}")
            limit = asked.patience * (time.monotonic() - since)
            for number, mutant in new:
                since = time.monotonic()
                how = known[by, mutant.told] = noticed(mutant, folder, command, limit)
                row = {"by": by, "mutant": number, "change": mutant.told, "noticed": how}
                row |= {"seconds": round(time.monotonic() - since, 1), "commit": commit}
                print(json.dumps(row), flush=True)
                study_lines.append(asked.record, row)
            left = [(number, mutant) for number, mutant in left if not known[by, mutant.told]]
    line = {
        **{"modules": asked.modules, "seed": asked.seed, "first": asked.first, "of": len(every)},
        **{"drawn": len(drawn), "killed": len(drawn) - len(left), "survivors": [mutant.told for _, mutant in left]},
        **{"seconds": round(time.monotonic() - began, 1)},
    }
    print(json.dumps(line))
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
