"""Any ``torch.nn.Module`` as a model: what a class or function from outside the package makes.

The parameters of this factory are the keys of the section, but for `shape` and `classes`, which the data give.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from inspect import Parameter
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, create_model

from hpcfl.base.errors import UsageError
from hpcfl.base.lazy import torch
from hpcfl.base.plugins import callable_of, reason
from hpcfl.base.types import Shape
from hpcfl.models.base import Model, ModuleModel

if TYPE_CHECKING:
    from typing_extensions import Self

GIVEN = ("shape", "classes")
TYPES = {each.__name__: each for each in (bool, int, float, str)}


class Foreign(ModuleModel):
    """A module that a factory makes: ``factory(shape=…, classes=…, **keys)``, shape being that of one sample.

    Of these two it is given what it takes. What the factory raises becomes a UsageError in one line.
    """

    model_config = ConfigDict(protected_namespaces=())
    _factory: ClassVar[Callable[..., Any]]
    """The factory as it was when the config was judged: its file may since have been loaded anew."""

    @classmethod
    def from_table(cls, table: Any, where: str) -> Self:
        for name, field in cls.model_fields.items():
            if field.is_required() and name not in table:
                spec, instead = cls.model_fields["name"].default, " or ".join(GIVEN)
                raise UsageError(
                    f"model.name = '{spec}': it takes '{name}': expected {where}.{name}, or {instead} instead"
                )
        return super().from_table(table, where)

    def module(self, shape: Shape | tuple[Shape, ...], classes: int) -> torch.nn.Module:
        where, fields = f"model.name = '{self.name}'", type(self).model_fields
        keys = {key: value for key, value in self if key not in Model.model_fields}
        # a default is the factory's own object, which a config may be unable to hold
        own = {key: value for key, value in keys.items() if key not in fields or value != fields[key].default}
        takes = inspect.signature(type(self)._factory).parameters
        open_ended = any(each.kind is Parameter.VAR_KEYWORD for each in takes.values())
        own |= {key: value for key, value in zip(GIVEN, (shape, classes)) if open_ended or key in takes}
        try:
            made = type(self)._factory(**own)
        except Exception as error:
            raise UsageError(f"{where}: {reason(error)}") from error
        if not isinstance(made, torch.nn.Module):
            raise UsageError(f"{where}: expected a factory of a torch.nn.Module, got one of {made!r:.80}")
        return made


class _OpenEnded(Foreign):
    """One whose factory takes any keys, ``**keys``."""

    model_config = ConfigDict(extra="allow")


def section(spec: str, factory: object) -> type[Foreign]:
    """Return the section of a factory; UsageError where it is none, or cannot be called with `GIVEN` and keys."""
    may = callable_of(spec, "model.name", factory, "a class or function that makes a torch.nn.Module", torch.nn.Module)
    made = _section(spec, may, f"model.name = '{spec}'")
    made._factory = may
    return made


@functools.cache
def _section(spec: str, factory: Callable[..., Any], where: str) -> type[Foreign]:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where}: {reason(error)}") from error
    parameters = {key: each for key, each in signature.parameters.items() if each.kind is not Parameter.VAR_POSITIONAL}
    open_ended = any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())
    fields: dict[str, Any] = {"name": (Literal[spec], spec)}
    for name, each in parameters.items():
        if name in GIVEN or each.kind is Parameter.VAR_KEYWORD:
            continue
        required = each.default is Parameter.empty
        if name.startswith("_") or hasattr(Foreign, name) or name in Foreign.model_fields:
            if required:
                raise UsageError(f"{where}: '{name}' cannot be a key of a section: expected another name, or a default")
            continue
        annotation = getattr(each.annotation, "__name__", each.annotation)
        kind = TYPES.get(annotation, Any) if isinstance(annotation, str) else Any
        text = f"The factory's parameter `{name}`."
        fields[name] = kind, Field(... if required else _plain(each.default), description=text)
    doc = (inspect.getdoc(factory) or f"What {spec} makes.").partition("\n\n")[0]
    base = _OpenEnded if open_ended else Foreign
    return create_model("Foreign", __base__=base, __module__=__name__, __doc__=doc, **fields)


def _plain(default: Any) -> Any:
    """Return a default as JSON holds it; None for one that JSON cannot hold."""
    try:
        return json.loads(json.dumps(default, allow_nan=False))
    except (TypeError, ValueError):
        return None
