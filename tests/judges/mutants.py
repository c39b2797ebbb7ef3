"""Which wrong signs the judges would not see: ``python tests/judges/mutants.py [MODULE ...] [--sample N]``.

Each operator of a method's lines that reckon is exchanged for its opposite, one at a time: + and −, * and /, ≤ and >, =
and ≠, a minus before a number, ``add`` and ``sub`` of torch. A process of its own then runs the method's judges. What
they do not see is listed, unless `EQUAL` says why nothing can see it. It takes about a second of processor time each.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import random
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
METHODS = {
    "hpcfl.algorithms.local_sgd": ("test_averaging",),
    "hpcfl.algorithms.fedavg": ("test_averaging",),
    "hpcfl.algorithms.fedprox": ("test_averaging",),
    "hpcfl.algorithms.fednova": ("test_averaging",),
    "hpcfl.algorithms.scaffold": ("test_scaffold",),
    "hpcfl.algorithms.heterofl": ("test_submodels",),
    "hpcfl.algorithms.fedrolex": ("test_submodels",),
    "hpcfl.algorithms.local": ("test_doubling",),
    "hpcfl.algorithms.salf": ("test_salf",),
    "hpcfl.algorithms.weighting": ("test_averaging", "test_salf"),
    "hpcfl.algorithms.corrected": ("test_averaging", "test_salf"),
    "hpcfl.algorithms.server_optimizer": ("test_averaging", "test_salf", "test_submodels"),
    "hpcfl.learning.optim": ("test_averaging", "test_scaffold"),
    "hpcfl.schedule.doubling": ("test_doubling",),
}
"""The modules of the methods, and the tests that judge each."""
EQUAL: dict[str, str] = {}
"""Mutants that nothing can see, by what the script prints of them, and why."""
SECONDS = 120
"""Processor time after which a mutant counts as seen: it goes on for ever."""
BROKEN = 99
"""The exit code of a process that could not try its mutant."""

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
}
CALLS = {"add": "sub", "sub": "add", "add_": "sub_", "sub_": "add_", "mul_": "div_", "div_": "mul_", "mul": "div"}


@dataclass(frozen=True)
class Mutant:
    """One place of a module's source, counted as `places` meets them, and what it says otherwise."""

    module: str
    place: int
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.module.removeprefix('hpcfl.')}:{self.line}: {self.before}  ->  {self.after}"


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, Any]]:
    """Yield a node that reckons, and how it is set wrong, of functions that refuse nothing."""
    for node in reckoning(tree):
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in SWAPS:
            yield node, lambda node=node: setattr(node, "op", SWAPS[type(node.op)]())
        elif isinstance(node, ast.Compare):
            for number, op in enumerate(node.ops):
                if type(op) in SWAPS:
                    yield node, lambda node=node, number=number, op=op: node.ops.__setitem__(number, SWAPS[type(op)]())
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield node, lambda node=node: setattr(node, "op", ast.UAdd())
        elif isinstance(node, ast.Attribute) and node.attr in CALLS:
            yield node, lambda node=node: setattr(node, "attr", CALLS[node.attr])


def reckoning(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree but for annotations, decorators and functions that refuse a config."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            if names & {"refusal", "UsageError"}:
                continue
            for part in node.body if isinstance(node, ast.FunctionDef) else [node.body]:
                yield part
                yield from reckoning(part)
        elif not isinstance(node, ast.AnnAssign):
            yield node
            yield from reckoning(node)


def mutants(name: str) -> list[Mutant]:
    """Return all mutants of a module."""
    source = Path(importlib.import_module(name).__file__ or "").read_text(encoding="utf-8")
    found = []
    for place in range(len([*places(ast.parse(source))])):
        node, spoil = [*places(ast.parse(source))][place]
        before = ast.unparse(node)
        spoil()
        found.append(Mutant(name, place, node.lineno, before, ast.unparse(node)))
    return found


def patch(mutant: Mutant) -> None:
    """Give the module's functions the mutant's code."""
    module = importlib.import_module(mutant.module)
    file = module.__file__ or ""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    [*places(tree)][mutant.place][1]()
    codes, live = dict(coded(compile(tree, file, "exec"))), dict(functions(module, module))
    changed = [name for name, function in live.items() if codes[name] != function.__code__]
    assert len(changed) == 1, f"{mutant} is in {changed or 'no function'}"
    live[changed[0]].__code__ = codes[changed[0]]


def coded(code: CodeType, within: str = "") -> Iterator[tuple[str, CodeType]]:
    """Yield the code of a module's functions, and of its classes' methods, by their qualified names."""
    for each in code.co_consts:
        if isinstance(each, CodeType) and not each.co_name.startswith("<"):
            yield within + each.co_name, each
            yield from coded(each, f"{within}{each.co_name}.")


def functions(module: ModuleType, owner: Any, within: str = "") -> Iterator[tuple[str, FunctionType]]:
    """Yield a module's functions, and its classes' methods, by their qualified names."""
    for name, value in [*vars(owner).items()]:
        for attribute in ("__func__", "fget", "func"):  # of a class method, a property, a cached property
            value = getattr(value, attribute, value)
        if (
            isinstance(value, FunctionType)
            and value.__module__ == module.__name__
            and value.__qualname__ == within + name
        ):
            yield within + name, value
        elif isinstance(value, type) and value.__module__ == module.__name__ and not within:
            yield from functions(module, value, f"{name}.")


class Trial:
    """What pytest does in place of the tests: all mutants, each in a process of its own, by those that judge it."""

    def __init__(self, tried: list[Mutant]) -> None:
        self.tried, self.unseen = tried, list[Mutant]()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if not all(self.passes(session, None, stem) for stem in {item.path.stem for item in session.items}):
            raise pytest.UsageError("the judges find what is not changed to be wrong")
        for mutant in self.tried:
            if self.passes(session, mutant, *METHODS[mutant.module]):
                self.unseen.append(mutant)
                print(f"not seen: {mutant}", file=sys.__stderr__, flush=True)
        return True

    def passes(self, session: pytest.Session, mutant: Mutant | None, *stems: str) -> bool:
        """Run some files' tests up to the first that fails, in a process of its own; return whether none did."""
        child = os.fork()
        if not child:
            try:
                if mutant is not None:
                    patch(mutant)
                os._exit(self.judged([item for item in session.items if item.path.stem in stems]))
            except BaseException as error:
                print(f"{mutant}: {error!r}", file=sys.__stderr__, flush=True)
            os._exit(BROKEN)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == BROKEN:
            raise pytest.UsageError(f"{mutant}: it could not be tried")
        return code == 0

    def judged(self, items: list[pytest.Item]) -> int:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        for item, following in zip(items, [*items[1:], None]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if item.session.testsfailed:
                return 1
        return 0


def main(words: list[str]) -> int:
    """Try the mutants of some modules; return 1 if one is not seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=[*METHODS], metavar="MODULE")
    parser.add_argument("--sample", type=int, help="try so many, drawn anew each day")
    parser.add_argument("--list", action="store_true", help="list them and try none")
    asked = parser.parse_args(words)
    every = [mutant for name in asked.modules for mutant in mutants(name)]
    tried = [mutant for mutant in every if str(mutant) not in EQUAL]
    if asked.sample is not None:
        tried = random.sample(tried, asked.sample)
    if asked.list:
        print(*tried, sep="\n")
        return 0
    files = sorted({f"{HERE / stem}.py" for name in asked.modules for stem in METHODS[name]})
    trial = Trial(tried)
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files], plugins=[trial])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return int(code)
    print(
        f"{len(tried) - len(trial.unseen)} of {len(tried)} wrong signs are seen; {len(every) - len(tried)} are left out"
    )
    return int(bool(trial.unseen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
