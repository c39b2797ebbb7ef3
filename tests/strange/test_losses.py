"""Losses as users get them wrong end in one line that names the file; what is odd and right is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from strange.users import names, refused, right

FAULTY = {
    "without_reduction": "outputs [3, 3] and labels [3]: expected a value per sample, a tensor",
    "summed": "outputs [3, 3] and labels [3]: expected a value per sample, a tensor",
    "of_classes": "outputs [3, 3] and labels [3]: expected a value per sample, a tensor",
    "column": "outputs [3, 3] and labels [3]: expected a value per sample, a tensor",
    "number": "outputs [3, 3] and labels [3]: expected a value per sample, a tensor",
    "array": "outputs [3, 3] and labels [3]: expected a value per sample, a tensor",
    "nothing": "outputs [3, 3] and labels [3]: expected a value per sample, a tensor",
    "pair": "outputs [3, 3] and labels [3]: expected a value per sample, a tensor",
    "detached": "outputs [20, 3] and labels [20]: expected real values that depend on",
    "without_graph": "outputs [20, 3] and labels [20]: expected real values that depend on",
    "constant": "outputs [20, 3] and labels [20]: expected real values that depend on",
    "of_labels": "all gradients are 0: the loss does not depend on the parameters",
    "accuracy": "outputs [20, 3] and labels [20]: expected real values that depend on",
    "integers": "outputs [20, 3] and labels [20]: expected real values that depend on",
    "complex_numbers": "outputs [3, 3] and labels [3]: expected real values that depend on the",
    "not_numbers": "the loss is nan, expected a finite one",
    "infinite": "the loss is inf, expected a finite one",
    "nan_gradient": "gradients are not finite",
    "nan_later": "the loss is nan, expected a finite one",
    "alters_labels": "outputs [3, 3] and labels [3]: it changes the labels, which it is",
    "alters_labels_later": "outputs [20, 3] and labels [20]: it changes the labels, which it is",
    "alters_labels_behind": "changes labels, which it is given, in place: expected a clone to be",
    "alters_outputs": "outputs [3, 3] and labels [3]: it changes the outputs, which it is",
    "wide_later": "outputs [20, 3] and labels [20]: expected a value per sample, a tensor",
    "short_later": "outputs [20, 3] and labels [20]: expected a value per sample, a tensor",
    "raises": "outputs [3, 3] and labels [3]: ValueError: no luck",
    "raises_later": "outputs [20, 3] and labels [20]: ValueError: no luck",
    "exits": "SystemExit: 0",
    "exits_later": "SystemExit: 0",
    "recurses": "outputs [3, 3] and labels [3]: RecursionError: maximum recursion depth",
    "one_parameter": "outputs [3, 3] and labels [3]: TypeError: one_parameter() takes 1",
    "counts": "gradients of the same batch differ when computed again: expected random",
    "Loss": "outputs [3, 3] and labels [3]: TypeError: Loss.__init__() takes 1",
}
RIGHT = {
    "fair": "fair",
    "rising": "rising",
    "doubles": "doubles",
    "draws": "draws",
    "draws_python": "draws_python",
    "negative": "fair",
}


def test_the_tables_are_complete() -> None:
    assert names("losses") == FAULTY.keys() | RIGHT.keys()


@pytest.mark.parametrize("name", FAULTY)
def test_faulty(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused("losses", name, FAULTY[name], tmp_path, capsys)


@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str, tmp_path: Path) -> None:
    right("losses", name, RIGHT[name], tmp_path)
