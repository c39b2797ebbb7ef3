"""Models as users get them wrong end in one line that names the file; what is odd and right is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from strange.users import names, refused, right

FAULTY = {
    "NoParameters": "expected parameters that learn (requires_grad), got none",
    "Frozen": "expected parameters that learn (requires_grad), got none",
    "Idle": "idle.weight, idle.bias: the outputs do not depend on it; expected that",
    "TooWide": "expected outputs of shape [3, 3] for 3 samples, got [3, 6]",
    "TooNarrow": "expected outputs of shape [3, 3] for 3 samples, got [3, 1]",
    "OneNumber": "expected outputs of shape [3, …] for 3 samples, got []",
    "OneRow": "expected outputs of shape [3, …] for 3 samples, got [1, 3]",
    "Pair": "expected outputs of shape [3, …] for 3 samples, got tuple",
    "Named": "expected outputs of shape [3, …] for 3 samples, got dict",
    "Nothing": "expected outputs of shape [3, …] for 3 samples, got NoneType",
    "Array": "expected outputs of shape [3, …] for 3 samples, got ndarray",
    "Detached": "first.weight, first.bias, last.weight, last.bias: the outputs do not",
    "WithoutGraph": "first.weight, first.bias, last.weight, last.bias: the outputs do not",
    "Nan": "outputs are not finite",
    "Infinite": "outputs are not finite",
    "NanInTraining": "outputs are not finite",
    "NanFromTheStart": "outputs are not finite",
    "Zeros": "all gradients are 0: the loss does not depend on the parameters",
    "CastsToDouble": "features of shape (4,): RuntimeError: mat1 and mat2 must have the same",
    "Complex": "features of shape (4,): RuntimeError: expected m1 and m2 to have the",
    "SparseWeight": "NotImplementedError: Could not run 'aten::as_strided' with arguments",
    "InPlace": "RuntimeError: one of the variables needed for gradient computation has",
    "InPlaceAfterwards": "changes features, which it is given, in place: expected a clone to be",
    "ChangesWeights": "changes the parameter first.weight, which it is given, in place",
    "BufferInTests": "RuntimeError: one of the variables needed for gradient computation has",
    "DrawsOwn": "gradients of the same batch differ when computed again: expected random",
    "Counts": "gradients of the same batch differ when computed again: expected random",
    "FixedBatch": "RuntimeError: shape '[3, -1]' is invalid for input of size 80",
    "FailsLater": "ValueError: too many samples",
    "WideLater": "expected outputs of shape [20, 3] for 20 samples, got [20, 6]",
    "Lazy": "ValueError: Attempted to use an uninitialized parameter in <method",
    "HeldInList": "expected parameters that learn (requires_grad), got none",
    "WithoutInit": "AttributeError: cannot assign module before Module.__init__() call",
    "WithoutForward": "features of shape (4,): NotImplementedError: Module [WithoutForward] is",
    "OtherParameters": "expected a factory that takes shape and classes by name, got one",
    "RaisesInInit": "ValueError: no luck",
    "Raises": "features of shape (4,): ValueError: no luck",
    "RaisesInTests": "ValueError: no luck",
    "RaisesBackward": "ZeroDivisionError: division by zero",
    "Exits": "SystemExit: 0",
    "ExitsForward": "SystemExit: 0",
    "ExitsLater": "SystemExit: 0",
    "Recurses": "features of shape (4,): RecursionError: maximum recursion depth exceeded",
    "TooLarge": "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0.",
    "TooLargeForward": "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0.",
    "nothing": "expected a factory of a torch.nn.Module, got one of None",
    "aclass": "expected a factory of a torch.nn.Module, got one of <class",
    "function": "expected a factory of a torch.nn.Module, got one of <function",
}
RIGHT = {
    "Fair": "Fair",
    "HalfFrozen": "HalfFrozen",
    "OutputsDouble": "OutputsDouble",
    "BatchNorm": "BatchNorm",
    "Buffered": "Buffered",
    "Tied": "Tied",
    "Drops": "Drops",
    "Draws": "Draws",
    "DrawsNumpy": "DrawsNumpy",
    "DrawsInTests": "DrawsInTests",
    "OfBatch": "OfBatch",
    "OfBatchSize": "OfBatchSize",
    "Held": "Held",
    "WeightNorm": "WeightNorm",
    "made": "made",
    "Doubles": "Fair",
}


def test_the_tables_are_complete() -> None:
    assert names("models") == FAULTY.keys() | RIGHT.keys()


@pytest.mark.parametrize("name", FAULTY)
def test_faulty(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused("models", name, FAULTY[name], tmp_path, capsys)


@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str, tmp_path: Path) -> None:
    right("models", name, RIGHT[name], tmp_path)
