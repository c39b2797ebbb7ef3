"""What there is to choose from: presets, and the sections of the config with their keys."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from hpcfl.algorithms import algorithm_class, algorithms
from hpcfl.base.config import ConfigBase
from hpcfl.comm.guard import Guard
from hpcfl.data import source_class, sources
from hpcfl.models import model_class, models
from hpcfl.presets import presets, read
from hpcfl.schedule.complexity import Oracle
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.speeds import speed_class, speeds


def lines() -> Iterator[str]:
    """Yield the catalogue as text."""
    yield "presets (hpcfl run NAME)"
    for name, path in presets().items():
        table = read(str(path))
        yield f"  {name}: {table['algorithm']['name']} on {table['data']['name']}, {table['rounds']} rounds"
    chosen: dict[str, list[type[ConfigBase]]] = {
        "algorithm": [algorithm_class(name) for name in algorithms()],
        "data": [source_class(name) for name in sources()],
        "model": [model_class(name) for name in models()],
        "speed": [speed_class(name) for name in speeds()],
        "participation": [Participation],
        "guard": [Guard],
        "oracle": [Oracle],
    }
    for section, classes in chosen.items():
        yield f"\n[{section}]"
        for cls in classes:
            yield from described(cls)


def described(cls: type[ConfigBase]) -> Iterator[str]:
    """Yield a section's name, what it is, and its keys with defaults and meaning."""
    head = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
    keys = {key: field for key, field in cls.model_fields.items() if key not in ("name", "model")}
    name = next((str(field.default) for key, field in cls.model_fields.items() if key not in keys), "")
    yield f"  {name}: {head}" if name else f"  {head}"
    for key, field in keys.items():
        default = "required" if field.is_required() else repr(field.default)
        yield f"    {key} = {default}  {' '.join((field.description or '').split())}".rstrip()
