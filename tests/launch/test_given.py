"""Objects that a script or notebook gives: what it defined is kept as source, and taken from there elsewhere."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import hpcfl
from helpers import modules
from helpers.cells import run_cell
from helpers.launcher import alone, job
from hpcfl.launch import given
from hpcfl.testing.runs import same

CELLS = """
    import torch.nn.functional as F
    from pydantic import Field
    from torch import nn

    import hpcfl
    from hpcfl import FedAvg as Base

    SCALE = 0.5

    def far(value, other):
        return (value - other).square().sum() * SCALE

    class Prox(Base):
        mu: float = Field(0.1, ge=0)

        def objective(self, params, batch, shared, personal):
            return batch.loss(params) + self.mu * sum(far(value, shared[name]) for name, value in params.items())

    class Net(nn.Module):
        def __init__(self, width=16):
            super().__init__()
            self.flat, self.a, self.b = nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10)

        def forward(self, x):
            return self.b(F.relu(self.a(self.flat(x))))

    def focal(outputs, labels):
        each = F.cross_entropy(outputs, labels, reduction="none")
        return (1 - (-each).exp()) ** 2 * each
"""
RUN = """
    keys = {"rounds": 3, "clients": 4, "model.width": 6, "algorithm.mu": 0.2}
    given = {"algorithm": Prox, "model": Net, "loss": focal}
    import os
    run = hpcfl.run("fedavg-digits", **given, settings=keys, out=os.environ["OUT"], quiet=True)
    print(run.data["accuracy"].values.tolist())
"""
AS_CELLS = """
import sys

from helpers.cells import run_cell

for text in sys.argv[1:]:
    run_cell(text, sys.modules["__main__"])
"""


def dedented(text: str) -> str:
    return textwrap.dedent(text).lstrip()


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """What runs a text as a cell of a main module of its own, which it returns."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)

    def run(text: str) -> ModuleType:
        run_cell(text, main)
        return main

    return run


def environment(out: Path) -> dict[str, str]:
    tests = Path(__file__).parents[1]
    return {"OUT": str(out), "PYTHONPATH": f"{tests}:{tests.parent}"}


def python(out: Path, *words: object) -> None:
    ended = alone([sys.executable, *map(str, words)], env=environment(out))
    assert ended.code == 0, ended.err


@pytest.mark.launch
def test_a_script_gives_what_it_has_defined_and_others_go_on_with_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(dedented(CELLS + RUN))
    python(tmp_path / "out", script)
    kept = sorted(path.read_text() for path in (tmp_path / "out" / "code").iterdir())
    assert sorted(text.count("class ") for text in kept) == [0, 1, 1]
    moved = Path(shutil.copytree(tmp_path / "out", tmp_path / "elsewhere" / "run"))
    shutil.rmtree(tmp_path / "out")
    script.write_text(script.read_text().replace('"rounds": 3', '"rounds": 5'))
    python(tmp_path / "whole", script)
    script.unlink()
    python(tmp_path, "-m", "hpcfl", "resume", moved, "--rounds", 5)
    one, other = (hpcfl.open_run(folder)["accuracy"].values for folder in (moved, tmp_path / "whole"))
    np.testing.assert_array_equal(one, other)


@pytest.mark.launch
def test_classes_of_cells_run_on_ranks_with_the_same_bits(tmp_path: Path) -> None:
    script, cells = tmp_path / "cells.py", [dedented(CELLS), dedented(RUN)]
    script.write_text(AS_CELLS)
    python(tmp_path / "alone", script, *cells)
    several = job("openmpi", 3, [str(script), *cells], 300, environment(tmp_path / "ranks"))
    assert several.code == 0, several.err
    same(tmp_path / "alone", tmp_path / "ranks")


SWEEP = """
    import os
    from pathlib import Path

    import numpy as np

    rng = np.random.default_rng(0)
    x, who = rng.normal(size=(60, 64)).astype("float32"), np.repeat(["Bern", "Oslo"], 30)
    given = {"algorithm": Prox, "model": Net, "loss": focal, "data": (x, (x[:, 0] > 0).astype(int), who)}
    given["speeds"] = {"Oslo": 1.0, "Bern": 2.0}
    few = {"rounds": 2, "evaluate.every": 1, "algorithm.epochs": 2, "algorithm.steps": 0, "model.width": 4}
    out = Path(os.environ["OUT"])
    run = hpcfl.run("fedavg-digits", **given, settings={**few, "algorithm.mu": 0.9}, out=out / "alone")
    swept = hpcfl.sweep("fedavg-digits", {"algorithm.mu": [0.9]}, **given, settings=few, out=out / "s")
    assert swept.table["state_sha256"].tolist() == hpcfl.show(run.folder)["state_sha256"].tolist()
    try:
        hpcfl.sweep("fedavg-digits", {"algorithm.mu": [0.1, -1.0]}, **given, settings=few, out=out / "bad")
    except hpcfl.UsageError as error:
        assert "algorithm.mu" in str(error)
    assert not (out / "bad").exists()
"""


@pytest.mark.launch
def test_a_sweep_keeps_what_it_is_given_once(
    tmp_path: Path, cell: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runs are those of `hpcfl.run`, and go on without the script."""
    monkeypatch.setenv("OUT", str(tmp_path))
    cell(dedented(CELLS))
    cell(dedented(SWEEP))
    kept = [path.name.partition("-")[0] for path in (tmp_path / "s").glob("*.*") if path.is_file()]
    assert sorted(kept)[:2] == ["data", "fedavg"]
    assert len(list((tmp_path / "s").glob("main_*.py"))) == 3
    assert not list((tmp_path / "s").glob("*/data-*.h5"))
    run = tmp_path / "s" / "fedavg-digits_algorithm.mu=0.9"
    assert hpcfl.resume(run, rounds=3).data["client_name"].values.tolist() == ["Bern", "Oslo"]


def test_the_source_is_whole_and_no_more(cell: Callable[[str], ModuleType]) -> None:
    main = cell("""
        from __future__ import annotations
        import math
        import numpy as np
        from statistics import mean as average
        WEIGHTS, OTHER = {"a": (1, 2.5)}, object()
        def unused(): return OTHER
        def even(n): return n == 0 or odd(n - 1)
        def odd(n): return n > 0 and even(n - 1)
        def marked(function): return function
        @marked
        def given(x: np.ndarray, OTHER=3):
            total = [math.sqrt(each) for each in x if even(len(x))]
            return average(total) * WEIGHTS["a"][1] * OTHER
    """)
    name, written = given.named(main.given, "task.loss")
    ((module, source),) = written.items()
    assert name == f"{module}:given"
    there: dict[str, Any] = {}
    exec(source, there)
    assert there["given"]([1.0, 4.0]) == main.given([1.0, 4.0]) == 1.5 * 2.5 * 3
    assert {"unused", "OTHER"}.isdisjoint(there)
    assert given.named(main.given, "task.loss") == (name, written)
    assert "from __future__ import annotations" in source


def test_the_newest_cell_counts(cell: Callable[[str], ModuleType]) -> None:
    names = set()
    for rate in (0.1, 0.2):
        main = cell(f"""
            from hpcfl import FedAvg
            class Mine(FedAvg):
                lr: float = {rate}
        """)
        name, written = given.named(main.Mine, "algorithm.name")
        names.add(name)
        assert f"lr: float = {rate}" in next(iter(written.values()))
    assert len(names) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "Given = lambda outputs, labels: outputs",
            "a lambda cannot be saved with the run: expected one at the top of",
        ),
        ("def outer():\n    def Given(): pass\n    return Given\nGiven = outer()", "'outer.<locals>.Given' cannot be"),
        (
            "import numpy\nTABLE = numpy.ones(3)\ndef Given(): return TABLE",
            "'Given' uses 'TABLE', an object of numpy.nd",
        ),
        ("Given = 3.0", "expected a name, a class or a function, got an object of float"),
    ],
)
def test_what_cannot_be_saved_is_said_in_a_line(text: str, said: str, cell: Callable[[str], ModuleType]) -> None:
    main = cell(text)
    with pytest.raises(hpcfl.UsageError, match=r"^task\.loss: ") as raised:
        given.named(main.Given, "task.loss")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_was_typed_has_no_source(cell: Callable[[str], ModuleType]) -> None:
    main = cell("")
    exec("def typed(): pass", vars(main))
    with pytest.raises(
        hpcfl.UsageError, match="no source of 'typed' is kept where it was typed: expected it in a file"
    ):
        given.named(main.typed, "task.loss")


def test_what_is_in_a_module_is_named() -> None:
    assert given.named(modules.Residual, "model.name") == ("helpers.modules:Residual", {})
    assert given.named(hpcfl.FedAvg, "algorithm.name") == ("fedavg", {})
    assert given.named("salf", "algorithm.name") == ("salf", {})


def test_a_run_takes_the_place_of_another_if_it_can_begin(tmp_path: Path) -> None:
    few = {"rounds": 1, "clients": 3}
    first = hpcfl.run("fedavg-digits", settings=few, out=tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(hpcfl.UsageError, match="already holds a run: choose another --out, --resume or --overwrite"):
        hpcfl.run("fedavg-digits", settings=few, out=tmp_path / "out")
    with pytest.raises(hpcfl.UsageError, match=r"algorithm\.lr"):
        hpcfl.run("fedavg-digits", settings={**few, "algorithm.lr": -1.0}, out=tmp_path / "out", overwrite=True)
    assert first.data.sizes["round"] == 1
    with pytest.raises(hpcfl.UsageError, match="begins anew"):
        hpcfl.run("fedavg-digits", settings=few, out=tmp_path / "out", overwrite=True, resume=True)
    second = hpcfl.run("fedavg-digits", settings={**few, "rounds": 2}, out=tmp_path / "out", overwrite=True)
    assert second.data.sizes["round"] == 2
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert hpcfl.open_run(tmp_path / "out").sizes["round"] == 2
