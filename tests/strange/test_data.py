"""Data as users get them wrong end in one line that names the file; what is odd and right is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcfl.data import dataset
from strange.users import names, refused, right

FAULTY = {
    "NegativeLabels": "training samples of client 0: labels are -1 … 1, expected 0 … 2",
    "LargeLabels": "training samples of client 0: labels are 0 … 7, expected 0 … 2",
    "LargeTestLabels": "test samples of client 0: labels are 0 … 7, expected 0 … 2",
    "RealLabels": "training samples of client 0: labels are real numbers, hence targets",
    "NanLabels": "training samples of client 0: labels are real numbers, hence targets",
    "WordLabels": "TypeError: expected arrays of real numbers or of integers, got <U1",
    "ListLabels": "TypeError: expected arrays of real numbers or of integers, got list",
    "TensorParts": "TypeError: expected arrays of real numbers or of integers, got",
    "NanFeatures": "features are not finite",
    "NanOfOne": "features are not finite",
    "InfiniteFeatures": "features are not finite",
    "WordFeatures": "TypeError: expected arrays of real numbers or of integers, got <U32",
    "ComplexFeatures": "TypeError: expected arrays of real numbers or of integers, got complex64",
    "FewerLabels": "training samples of client 0: 19 labels for features [20, 4], expected",
    "OtherTestShape": "test samples of client 0: 10 labels for features [10, 3], expected [10",
    "NoSamples": "no client has training samples, expected some",
    "NoClients": "IndexError: list index out of range",
    "FewerClients": "clients: expected 2, which data.name = 'user_data:FewerClients' holds",
    "CheckNone": "TypeError: check returned None, expected a Header",
    "FederateNone": "AttributeError: 'NoneType' object has no attribute 'header'",
    "FederateList": "federate returned a list, expected a Federation, such as InMemory",
    "NoFederate": "expected a class that defines federate, which Source leaves open",
    "OtherSignature": "TypeError: OtherSignature.federate() takes 2 positional arguments but 4",
    "RaisesInCheck": "ValueError: no luck",
    "RaisesInFederate": "ValueError: no luck",
    "ExitsInFederate": "SystemExit: 0",
    "RecursesInFederate": "RecursionError: maximum recursion depth exceeded",
    "TooLarge": "MemoryError: Unable to allocate 256. PiB for an array with shape",
    "ReadsWhatIsNotThere": "FileNotFoundError: [Errno 2] No such file or directory",
    "DrawsGenerator": "train_features of client 0 are others when they are made again: random",
    "TooFewClasses": "training samples of client 0: labels are 0 … 2, expected 0 … 1",
    "NoClasses": "training samples of client 0: labels are 0 … 2, expected 0 … -1",
    "Endless": "expected at most 65536 samples, got more",
    "EndlessItems": "expected at most 65536 samples, got more",
    "LongLength": "IndexError: 60",
    "HugeLength": "expected at most 268435456 samples, got 1000000000000000",
    "NegativeLength": "ValueError: __len__() should return >= 0",
    "TextLength": "TypeError: 'str' object cannot be interpreted as an integer",
    "Empty": "it has no samples, expected at least 1",
    "Bare": "expected samples (features, label), got array([-0.13210486, ",
    "Three": "expected samples (features, label), got (array([-0.13210486, ",
    "Nothing": "expected samples (features, label), got None",
    "OtherShapes": "features: sample 1: expected numbers of shape (1,) as the first one's",
    "NegativeClasses": "training samples: labels are -1 … 1, expected 0 … 1",
    "WordClasses": "labels: sample 0: expected numbers of shape () as the first one's, got",
    "NanItems": "features are not finite",
    "RaisesItems": "ValueError: no luck",
    "RaisesInInit": "ValueError: no luck",
    "ExitsItems": "SystemExit: 0",
    "nothing": "TypeError: 'NoneType' object is not iterable",
    "number": "TypeError: 'int' object is not iterable",
}
RIGHT = {
    "Fair": "Fair",
    "UnknownTestLabels": "UnknownTestLabels",
    "NoTests": "NoTests",
    "DrawsNumpy": "DrawsNumpy",
    "DrawsTorch": "DrawsTorch",
    "MoreClasses": "MoreClasses",
    "Points": "Points",
    "ShortLength": "ShortLength",
    "RealClasses": "RealClasses",
    "RandomItems": "RandomItems",
    "CheckLies": "Fair",
    "Alike": "Fair",
    "dataset": "Points",
}


def test_the_tables_are_complete() -> None:
    assert names("data") == FAULTY.keys() | RIGHT.keys()


@pytest.mark.parametrize("name", FAULTY)
def test_faulty(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "MOST", 2**16)  # as many as nobody waits for
    refused("data", name, FAULTY[name], tmp_path, capsys)


@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str, tmp_path: Path) -> None:
    right("data", name, RIGHT[name], tmp_path)
