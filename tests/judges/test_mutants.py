"""The script that tries wrong signs sets them wrong, and the judges see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from judges.mutants import mutants, patched
from judges.test_averaging import test_local_steps as local_steps


def test_a_wrong_sign_is_seen(tmp_path: Path) -> None:
    wrong = [mutant for mutant in mutants("hpcfl.algorithms.fedprox") if "params[name] + start" in mutant.wrong]
    function, code = patched(wrong[0])
    right, function.__code__ = function.__code__, code
    try:
        with pytest.raises(AssertionError):
            local_steps(tmp_path, "fedprox", 4)
    finally:
        function.__code__ = right
