"""What stands around a method, whichever it is: a class before the method's own, which hands on what is not its affair.

A wrapper overrides functions of the protocol and calls ``super()`` for the method's; wrappers may stand around one
another. `Config.method` says which stand around a run's method, and in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from hpcfl.algorithms.base import Algorithm, Client, Message, State

if TYPE_CHECKING:
    Wrapper = Algorithm
else:
    Wrapper = object  # the method comes after it among the bases


def wrapped(algorithm: Algorithm, wrapper: type, **held: Any) -> Algorithm:
    """Return the method with a wrapper around it, which has what is `held`, hashable values, as attributes."""
    kept = {key: getattr(algorithm, key) for key in type(algorithm).model_fields}
    cls = _class(wrapper, type(algorithm), tuple(held.items()))
    return cls.model_construct(algorithm.model_fields_set, **kept)


@cache
def _class(wrapper: type, method: type[Algorithm], held: tuple[tuple[str, Any], ...]) -> type[Algorithm]:
    made: type[Algorithm] = type(method.__name__, (wrapper, method), {"__module__": method.__module__})
    for name, value in held:
        setattr(made, name, value)
    return made


def without(state: Mapping[str, Any], names: Container[str]) -> dict[str, Any]:
    """Return a state without what has some names."""
    return {name: value for name, value in state.items() if name not in names}


def changed(work: Client, change: Callable[[Message], Message]) -> Client:
    """Yield what a change makes of each message of some visits, and return what these return."""
    while True:
        try:
            message = next(work)
        except StopIteration as end:
            state: State = end.value
            return state
        yield change(message)
