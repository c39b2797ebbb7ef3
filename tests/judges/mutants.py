"""Which wrong signs the judges would not see: ``python tests/judges/mutants.py [MODULE ...] [--sample N]``.

Each operator of a method's lines that reckon is exchanged for its opposite, one at a time: + and −, * and /, ≤ and >, =
and ≠, a minus before a number, ``add`` and ``sub`` of torch. A process of its own then runs the method's judges. What
they do not see is listed, unless `EQUAL` says why nothing can see it. It takes about a second of processor time each.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
METHODS = (
    "hpcfl.algorithms.local_sgd",
    "hpcfl.algorithms.fedavg",
    "hpcfl.algorithms.fedprox",
    "hpcfl.algorithms.fednova",
    "hpcfl.algorithms.scaffold",
    "hpcfl.algorithms.heterofl",
    "hpcfl.algorithms.fedrolex",
    "hpcfl.algorithms.local",
    "hpcfl.algorithms.last_step",
    "hpcfl.algorithms.salf",
    "hpcfl.algorithms.weighting",
    "hpcfl.algorithms.server_optimizer",
    "hpcfl.learning.optim",
    "hpcfl.schedule.doubling",
    "hpcfl.algorithms.fedrep",
    "hpcfl.algorithms.lg_fedavg",
    "hpcfl.algorithms.hf_maml",
    "hpcfl.learning.derivatives",
    "hpcfl.algorithms.linear_fedrep",
    "hpcfl.algorithms.fedhenn",
    "hpcfl.algorithms.flic.algorithm",
    "hpcfl.algorithms.flic.anchors",
    "hpcfl.algorithms.flic.barycenters",
    "hpcfl.algorithms.flic.phases",
    "hpcfl.algorithms.fedlrgd.algorithm",
    "hpcfl.algorithms.fedlrgd.low_rank",
    "hpcfl.algorithms.fedasync",
    "hpcfl.algorithms.ringmaster",
    "hpcfl.schedule.participation",
)
"""The modules of the methods that are judged."""
CANCELS = "a factor of all lengths goes out of the direction again by the effective number of steps"
TESTED = "it is of tests of the models"
WARNING = "it decides about a warning"
RESUMED = "it is asked where a rank did not answer for a checkpoint (tests/algorithms/test_corrected.py)"
OUTSIDE = "it is of buffers of modules from outside"
MEMORY = "it says how much is held at a time, which no result depends on (tests/algorithms/test_fedlrgd.py)"
EQUAL = {
    "algorithms.fednova": {"(1 - rho)) * (1 - rho)": CANCELS, "(1 - rho)) / (1 + rho)": CANCELS},
    "algorithms.local_sgd": {"self.evaluation != 'new-client'": TESTED, "self.newcomer != 'initial'": TESTED},
    "algorithms.weighting": {
        **{"self.correct != 'known'": WARNING, "arrival != 0": WARNING},
        **{"share = _weight(self, task, [client]) * over": RESUMED, "mean[name] - share": RESUMED},
        **{"share / value": RESUMED, "0.0 / value": RESUMED},
        "learning_rate(round) * method": "what is remembered may have any unit",
    },
    "algorithms.server_optimizer": {
        "square / (second - square).sign()": "but where v is the square of a change, exactly"
    },
    "schedule.doubling": {"replace(stage, rounds=stage.rounds - 1)": "no number of rounds ends such a stage"},
    "algorithms.heterofl": {
        "- (task.penalties(held)": "models that have a penalty have no hidden layers",
        **{"[-1] / value.dim()": OUTSIDE, "[+1] * value.dim()": OUTSIDE},
    },
    "algorithms.fedasync": {
        "/ (1.0 if aged else factor)": "it is 1 but for a module's buffers, of which no paper speaks"
    },
    "algorithms.fedrep": {"layers + 1": "it says which config is refused"},
    "algorithms.last_step": {
        "own and level[name] != 1": "it is the order of messages, which nobody sees but in real time "
        "(tests/algorithms/test_last_step.py)"
    },
    "algorithms.linear_fedrep": {
        "@ scaled * count": "eigenvectors do not depend on the scale, and all clients have as many",
        "q / torch.sign": "1 and -1 are their own inverses",
    },
    "algorithms.flic.anchors": {"mask.sum(-1).amax(+1)": "counts [c, h] have two axes"},
    "algorithms.flic.barycenters": {
        "2 / self.tolerance": "a first change above the tolerance",
        "rest.shape[+1]": "rest [C, k, k] has as many rows as columns",
    },
    "algorithms.flic.phases": {"self.offset - SHARED": "SHARED is 0"},
    "algorithms.fedlrgd.algorithm": {
        "<= (self.solve_at == 'client')": "it says when ranks are released; nobody is invited then in any case"
    },
    "algorithms.fedlrgd.low_rank": {
        **{"nbytes": MEMORY, "matrices * (8 * r * r)": MEMORY, "most * PARTS": MEMORY},
        "s[:, +1] > 0": "a quotient by 0 is inf too",
    },
}
"""Mutants that no judge can see, by module and what only they say, and why."""
SECONDS = 120
"""Processor time after which a mutant counts as seen: it goes on for ever."""

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
}
CALLS = {"add": "sub", "sub": "add", "add_": "sub_", "sub_": "add_", "mul_": "div_", "div_": "mul_", "mul": "div"}


@dataclass(frozen=True)
class Mutant:
    """One place of a module's source, counted as `places` meets them, and its statement's first line, set wrong."""

    module: str
    place: int
    line: int
    wrong: str

    @property
    def name(self) -> str:
        return f"{self.module.removeprefix('hpcfl.')}: {self.wrong}"

    @property
    def reasons(self) -> list[str]:
        """Why no judge can see it."""
        known = EQUAL.get(self.module.removeprefix("hpcfl."), {})
        return [why for part, why in known.items() if part in self.wrong]


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, Any, Any, Any]]:
    """Yield each node that reckons, but of functions that refuse; what of it is set wrong, at which key, and how."""
    for node in reckoning(tree):
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in SWAPS:
            yield node, vars(node), "op", SWAPS[type(node.op)]()
        elif isinstance(node, ast.Compare):
            for number, op in enumerate(node.ops):
                if type(op) in SWAPS:
                    yield node, node.ops, number, SWAPS[type(op)]()
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield node, vars(node), "op", ast.UAdd()
        elif isinstance(node, ast.Attribute) and node.attr in CALLS:
            yield node, vars(node), "attr", CALLS[node.attr]


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
    tree = ast.parse(Path(importlib.import_module(name).__file__ or "").read_text(encoding="utf-8"))
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    within = {node: statement for statement in statements for node in ast.walk(statement)}  # the innermost comes last
    found = []
    for place, (node, held, key, wrong) in enumerate([*places(tree)]):
        held[key], right = wrong, held[key]
        found.append(Mutant(name, place, node.lineno, ast.unparse(within[node]).partition("\n")[0]))
        held[key] = right
    return found


def patched(mutant: Mutant) -> tuple[FunctionType, CodeType]:
    """Return the function that a mutant is in, and its code with the mutant."""
    module = importlib.import_module(mutant.module)
    file = module.__file__ or ""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    _, held, key, wrong = [*places(tree)][mutant.place]
    held[key] = wrong
    codes, live = dict(coded(compile(tree, file, "exec"))), dict(functions(module, module))
    changed = [name for name, function in live.items() if codes.get(name, function.__code__) != function.__code__]
    assert len(changed) == 1, f"{mutant.name} is in {changed or 'no function'}"
    return live[changed[0]], codes[changed[0]]


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
    """What pytest does in place of the tests: all mutants, each in a process of its own.

    A mutant is judged by the tests that call its function, those first that have seen another one last.
    """

    def __init__(self, tried: list[Mutant]) -> None:
        self.tried, self.unseen = tried, list[Mutant]()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        tests = {item.nodeid: item for item in session.items}
        calls = self.apart(partial(self.calls, session.items))
        for mutant in self.tried:
            function, code = patched(mutant)
            place = [function.__code__.co_filename, function.__code__.co_firstlineno]
            judges = [tests[name] for name in tests if place in calls[name]]
            seen = self.apart(partial(self.judged, judges, function, code))
            if seen is None:
                self.unseen.append(mutant)
                print(f"not seen{'' if judges else ', nor reached'}, line {mutant.line}: {mutant.name}", flush=True)
            else:
                tests = {seen: tests[seen], **tests}
        return True

    def apart(self, act: Callable[[], Any]) -> Any:
        """Let a process of its own do something; return what it returns, "" if it took too long."""
        source, sink = os.pipe()
        child = os.fork()
        if not child:
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            os.write(sink, json.dumps(act()).encode())
            os._exit(0)
        os.close(sink)
        with os.fdopen(source) as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        return json.loads(said or '""')

    def calls(self, items: list[pytest.Item]) -> dict[str, list[Any]]:
        """Run the tests on what is not changed; return the functions of the methods that each one calls."""
        files, found = {importlib.import_module(name).__file__ for name in METHODS}, {}
        for item in items:
            called = set[tuple[str, int]]()

            def note(frame: Any, event: str, value: Any, called: set[tuple[str, int]] = called) -> None:
                if event == "call" and frame.f_code.co_filename in files:
                    called.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

            threading.setprofile(note)
            sys.setprofile(note)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            sys.setprofile(None)
            assert not item.session.testsfailed, f"{item.nodeid} fails without any mutant"
            found[item.nodeid] = sorted(called)
        return found

    def judged(self, items: list[pytest.Item], function: FunctionType, code: CodeType) -> str | None:
        """Run tests up to the first that fails, whose name is returned."""
        function.__code__ = code
        for item in items:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if item.session.testsfailed:
                return item.nodeid
        return None


def main(words: list[str]) -> int:
    """Try the mutants of some modules; return 1 if one is not seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=[*METHODS], metavar="MODULE")
    parser.add_argument("--sample", type=int, help="try so many, drawn anew each day")
    parser.add_argument("--list", action="store_true", help="list them and try none")
    asked = parser.parse_args(words)
    every = [mutant for name in asked.modules for mutant in mutants(name)]
    tried = [mutant for mutant in every if not mutant.reasons]
    if asked.sample is not None:
        tried = random.sample(tried, asked.sample)
    if asked.list:
        print(*(mutant.name for mutant in tried), sep="\n")
        return 0
    trial = Trial(tried)
    code = pytest.main(
        ["-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:terminal", "-m", "not mpi", str(HERE)],
        plugins=[trial],
    )
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return int(code)
    print(
        f"{len(tried) - len(trial.unseen)} of {len(tried)} wrong signs are seen; {len(every) - len(tried)} are left out"
    )
    return int(bool(trial.unseen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
