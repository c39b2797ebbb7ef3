"""What run.h5 says of a run in its attributes: most of it JSON, checked where it is read, as anybody may write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from hpcfl.base.errors import VALUE, UsageError, cut
from hpcfl.base.types import Computing

RUN_FORMAT = 1
"""The number that a run folder has of its format; it rises with each change that keeps others from being read."""


class FormatError(UsageError):
    """A run folder has another format than this version reads, or does not say which."""


class _File(BaseModel):
    file: str
    sha256: str


class _Code(_File):
    modules: dict[str, _File] = {}


class _Rows(BaseModel):
    first: NonNegativeInt
    rounds: NonNegativeInt
    rows: list[tuple[NonNegativeInt, NonNegativeInt]]


class _Samples(BaseModel):
    classes: NonNegativeInt
    shapes: list[list[NonNegativeInt]]
    pieces: list[tuple[list[NonNegativeInt], bool]]
    tokens: bool
    label_shape: list[NonNegativeInt]
    targets: bool


class _Tensors(BaseModel):
    names: list[str]
    buffers: dict[str, bool]
    frozen: list[str] = []


class _How(BaseModel):
    how: Computing


class _Rounds(BaseModel):
    key: Literal["rounds"]
    before: PositiveInt = Field(alias="from")
    after_round: NonNegativeInt


class _Other(BaseModel):
    key: Literal["code"]
    after_round: NonNegativeInt


TEXTS = ("config", "data_dir", "run_id", "git_commit", "package_sha256", "mixed")
JSON: dict[str, TypeAdapter[Any]] = {
    "segments": TypeAdapter(list[str]),
    "parts": TypeAdapter(dict[str, _Rows]),
    "hosts": TypeAdapter(list[str]),
    "devices": TypeAdapter(list[str]),
    "threads": TypeAdapter(list[int]),
    "chunk": TypeAdapter(PositiveInt),
    "code": TypeAdapter(dict[str, _Code]),
    "files": TypeAdapter(dict[str, _File]),
    "samples": TypeAdapter(_Samples),
    "tensors": TypeAdapter(_Tensors),
    "computing": TypeAdapter(_How),
    "history": TypeAdapter(list[_Rounds | _Other]),
    "versions": TypeAdapter(dict[str, str]),
}


def attributes_of(file: h5py.File) -> dict[str, Any]:
    """Return the attributes of run.h5, those that are JSON as text; UsageError for one that is missing or odd.

    `FormatError` where the folder has another format.
    """
    found = {name: file.attrs[name] for name in file.attrs}
    number = found.get("format")
    if "config" in found and (not isinstance(number, np.integer) or number != RUN_FORMAT):
        has = "no format number" if number is None else f"format {cut(str(number), VALUE)}"
        folder = Path(file.filename).parent
        raise FormatError(f"run folder '{folder}' has {has}, this version of hpcfl reads format {RUN_FORMAT}")
    if lacks := [name for name in ("config", "segments") if name not in found]:
        raise UsageError(f"{file.filename} cannot be read: it is no run's table: expected an attribute {lacks[0]}")
    for name, value in found.items():
        where = f"{file.filename}: attribute {name}: "
        if name in (*TEXTS, *JSON) and not isinstance(value, str):
            raise UsageError(f"{where}expected text, got {cut(repr(value), VALUE)}")
        if name == "sealed" and not isinstance(value, np.integer):
            raise UsageError(f"{where}expected 0 or 1, got {cut(repr(value), VALUE)}")
        try:
            if name in JSON:
                JSON[name].validate_json(value.encode(errors="replace"), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            place = "".join(f"[{part!r}]" for part in first["loc"])
            said = f"{place}{': ' * bool(place)}{first['msg']}, got {cut(repr(first['input']), VALUE)}"
            raise UsageError(f"{where}{said}") from None
    return found
