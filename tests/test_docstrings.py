"""What is said of the public face: its docstrings, and one explanation for each key of a config."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Literal, get_origin

import pytest

import hpcfl
from hpcfl.algorithms import algorithms
from hpcfl.algorithms.base import Algorithm
from hpcfl.algorithms.hooks import Hooks
from hpcfl.base.config import ConfigBase
from hpcfl.commands.list import field_texts
from hpcfl.config import Config
from hpcfl.data import sources
from hpcfl.models import models
from hpcfl.schedule.speeds import Speed, speeds
from hpcfl.schedule.tape import Recorded


def sections(cls: type[ConfigBase]) -> Iterator[type[ConfigBase]]:
    """Yield a section and all that are derived from it in the package."""
    yield cls
    for each in cls.__subclasses__():
        if each.__module__.startswith("hpcfl."):
            yield from sections(each)


def unexplained() -> Iterator[str]:
    """Yield the keys that neither a section nor one that it is derived from explains; names explain themselves."""
    assert all((algorithms(), sources(), models(), speeds(), Config))  # all of them imported
    for cls in set(sections(ConfigBase)) - {Recorded}:  # that is a part of what others explain
        texts = field_texts(cls)
        for key in cls.__annotations__.keys() & cls.model_fields.keys() - {"name"} - (
            {"model"} if cls is Speed else set()
        ):
            field = cls.model_fields[key]
            said = bool(texts[key])
            if isinstance(field.annotation, type) and issubclass(field.annotation, ConfigBase):
                said = bool(field.annotation.__doc__)
            if not said and get_origin(field.annotation) is not Literal:
                yield f"{cls.__module__.removeprefix('hpcfl.')}.{cls.__name__}.{key}"


def test_every_key_is_explained() -> None:
    assert not list(unexplained())


@pytest.mark.parametrize("name", hpcfl.__all__)
def test_the_package_is_explained(name: str) -> None:
    assert inspect.getdoc(getattr(hpcfl, name))


def test_the_protocol_of_algorithms_is_explained() -> None:
    hooks = vars(Hooks) | vars(Algorithm)
    methods = {name: value for name, value in hooks.items() if not name.startswith("_") and callable(value)}
    properties = {name: value for name, value in hooks.items() if isinstance(value, property)}
    assert methods.keys() >= {"client", "server", "init_server", "init_client", "invites"}
    assert [name for name, value in (methods | properties).items() if not value.__doc__] == []
