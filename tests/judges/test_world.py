"""The clients are as unequal as they are to be, and judges know nothing of hpcfl."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import numpy as np

from judges import world

JUDGES = [path for path in Path(__file__).parent.glob("*.py") if path.stem not in {"world", "mutants"}]
MODULES = [path for path in JUDGES if not path.stem.startswith("test_")]
ALLOWED = {"torch", "numpy", "judges", *sys.stdlib_module_names}
SHARED = {f"judges.{path.stem}" for path in MODULES}


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, path
            found |= {node.module or ""} if node.module != "judges" else {f"judges.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found


def test_judges_import_torch_and_numpy_alone() -> None:
    assert MODULES
    for path in MODULES:
        for module in imported(path):
            assert module.split(".")[0] in ALLOWED, f"{path.name} imports {module}"
            assert not module.startswith("judges") or module in SHARED, f"{path.name} imports {module}"


def test_clients_are_unequal_and_absent(tmp_path: Path) -> None:
    last = [len(world.batches(0, client, epochs=1)) for client in range(len(world.SIZES))]
    assert last[4] == last[2] - 1
    found = world.play(tmp_path, algorithm={"name": "fedavg"}, participation=world.SOME)
    there = np.array([[client in round_ for client in range(len(world.SIZES))] for round_ in found.who("cohort")])
    assert not there[:, world.NEVER].any()
    others = np.delete(there, world.NEVER, 1).sum(0)
    assert (others >= 2).all()
    assert (others < world.ROUNDS).all()


def test_rounds_in_memory_are_those_of_a_run(tmp_path: Path) -> None:
    keys = {"algorithm": {"name": "scaffold", "epochs": 2, "batch": world.BATCH}, "participation": world.SOME}
    keys |= {"rounds": 2, "server": {"optimizer": "adam"}}
    memory, run = world.play(tmp_path, **keys), world.run(tmp_path, **keys)
    assert run is not None
    for one, other in [(memory.shared, run.shared), (memory.extras, run.extras), *zip(memory.personal, run.personal)]:
        assert {*one} == {*other}
        for name, value in one.items():
            np.testing.assert_array_equal(np.asarray(value), np.asarray(other[name]), err_msg=name)
    for name in ("cohort", "arrived", "depth", "loss"):
        np.testing.assert_array_equal(memory.rows[name], run.rows[name], err_msg=name)
