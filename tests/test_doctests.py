"""The examples in what `import hpcfl` has, as they stand there."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import hpcfl

SAID = [name for name in hpcfl.__all__ if re.search("^ *>>> ", str(getattr(hpcfl, name).__doc__), re.M)]
"""Names whose docstring has an example."""
WITHOUT = {"stop"}
"""Functions that have none: one to stop would have to be running."""


@pytest.mark.parametrize("name", SAID)
def test_the_examples_of_a_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    known: dict[str, Any] = {"hpcfl": hpcfl, "torch": torch}
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(hpcfl, name), name, globs=known)
    assert runner.run(example, out=told.append).failed == 0, "".join(told)


def test_each_function_has_an_example() -> None:
    functions = {name for name in hpcfl.__all__ if type(getattr(hpcfl, name)).__name__ == "function"}
    assert functions - {*SAID} == WITHOUT
