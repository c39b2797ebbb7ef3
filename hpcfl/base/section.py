"""The base of every section of the config."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the config: immutable, no unknown keys, no conversions, no infinities.

    The string below a field is its key's meaning.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
