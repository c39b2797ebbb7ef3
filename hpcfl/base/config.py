"""The base of every section of the config, and how its keys are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, WrapValidator

from hpcfl.base.errors import VALUE, UsageError, cut, did_you_mean, no_meaning, toml

C = TypeVar("C", bound="ConfigBase")
UNFIT = re.compile(r"[\0\ud800-\udfff]")  # zero bytes, and what UTF-8 cannot encode
DEPTH = 20
"""Tables and lists within one another that a config may have."""


class ConfigBase(BaseModel):
    """A part of the config: immutable, no unknown keys, no conversions, no infinities.

    The string below a field is its key's meaning. Keys in `paths` name files, in the data folder or the working
    directory; a run records where they are and their digests.
    """

    # validators are made when they are first asked for: of the classes that are loaded, a config uses few
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)
    paths: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_table(cls: type[C], table: Any, where: str) -> C:
        """Return the section in a table; UsageError names the key under `where`."""
        # through JSON, so that a list may stand for a tuple while all else stays strict
        return checked(lambda: cls.model_validate_json(json.dumps(table, default=str)), cls, where)

    def check_only_for(self, prefix: str, choice: str, only_for: Mapping[str, Any]) -> None:
        """Raise UsageError where a key is set that means something beside certain values of the key `choice` alone.

        `only_for` has these values, one or a tuple, by key; the `prefix` is that of the section, as ``"server."``.
        """
        for key, given in only_for.items():
            value, there = getattr(self, key), getattr(self, choice)
            values = given if isinstance(given, tuple) else (given,)
            if there not in values and value != type(self).model_fields[key].default:
                beside, other = (f"{prefix}{choice} = {toml(each)}" for each in (there, values[0]))
                raise no_meaning(f"{prefix}{key}", value, beside, other)


def checked(make: Callable[[], C], cls: type[C], where: str) -> C:
    """Return what `make` makes; UsageError says in one line what is wrong first."""
    try:
        return make()
    except ValidationError as error:
        first = error.errors()[0]
    value, context = first["input"], first.get("ctx", {})
    key = ".".join(str(part) for part in (where, *first["loc"][:1]) if part != "")
    if first["type"] == "extra_forbidden":
        raise UsageError(unknown(cls, str(first["loc"][-1]), where))
    if first["type"] == "missing":
        raise UsageError(f"{key}: missing")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] != "value_error":
        message = message.replace("Input should be", "expected").replace(" a valid ", " ").lower()
    choice = context.get("expected", "")
    choices = choice.replace("'", "").replace(" or ", ", ").split(", ")
    hint = did_you_mean(value, choices) if isinstance(value, str) and choice else ""
    bounds = [context[side] for side in ("ge", "le") if side in context]
    nearest = f"; did you mean {toml(bounds[0])}?" if bounds else hint if "did you" in hint else ""
    raise UsageError(f"{key}: {message}, got {cut(repr(value), VALUE)}{nearest}")


def worded(expected: str) -> WrapValidator:
    """Return what says in these words what is expected of a value that may be of several types, tuples among them."""

    def in_tuples(value: Any) -> Any:
        return tuple(map(in_tuples, value)) if isinstance(value, list) else value

    def validated(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(in_tuples(value))
        except ValidationError as error:
            if error.errors()[0]["type"] == "finite_number" and not isinstance(value, list):
                raise
            raise ValueError(f"expected {expected}") from None

    return WrapValidator(validated)


def check_plain(table: Any, where: str) -> None:
    """Raise UsageError where a nested table holds what no key can: it is looked at before anything walks through it.

    That is an integer beyond 64 bits, text that no file and no file's name can be, or nesting deeper than `DEPTH`.
    """
    level = [table]
    for _ in range(DEPTH + 2):
        for value in level:
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise UsageError(f"{where}: expected integers of 64 bits, got one of {value.bit_length()} bits")
            if isinstance(value, str) and UNFIT.search(value):
                raise UsageError(f"{where}: expected text in UTF-8 without zero bytes, got {cut(repr(value), VALUE)}")
        several = [value for value in level if isinstance(value, Mapping | list | tuple)]
        nested = [[*value, *value.values()] if isinstance(value, Mapping) else value for value in several]
        level = [entry for entries in nested for entry in entries]
    if level:
        raise UsageError(f"{where}: expected tables and lists at most {DEPTH} deep in one another")


def recorded(text: str) -> dict[str, Any]:
    """Return the table, in JSON, that a run has recorded as its config; UsageError where it is none."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise UsageError(f"config: expected what a run has recorded, a table in JSON, got {toml(text)}")
    check_plain(table, "config")
    return table


def sections(cls: type[ConfigBase]) -> dict[str, type[ConfigBase]]:
    """Return which keys are sections, not values, and their classes."""
    classes = {key: field.annotation for key, field in cls.model_fields.items()}
    return {key: each for key, each in classes.items() if isinstance(each, type) and issubclass(each, ConfigBase)}


def unknown(cls: type[ConfigBase], key: str, where: str = "") -> str:
    """Return the line that refuses a key that a section does not have."""
    path = f"{where}.{key}" if where else key
    return f"{path}: unknown key{did_you_mean(key, cls.model_fields)}"
