"""Configs and files of anything at all: one line of a user's error, or what was asked for.

In CI the examples are the same each time; ``HPCFL_FUZZ=60 pytest tests/launch/test_fuzz.py`` draws new ones for 60
seconds of each test.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from hpcfl import config
from hpcfl.base.config import sections
from hpcfl.base.errors import UserError
from hpcfl.config import Config
from hpcfl.config.presets import PICKED, read
from hpcfl.data import femnist, mnist, sent140
from hpcfl.data.formats import hdf5_file
from hpcfl.schedule.speeds.table import Table

SECONDS = float(os.environ.get("HPCFL_FUZZ", 0))


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Run a test of hypothesis with so many examples, always the same; by hand with new ones until time is up."""

    def wrap(test: Any) -> Any:
        common: dict[str, Any] = {"deadline": None, "database": None, "max_examples": examples}
        common["suppress_health_check"] = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
        test = settings(**common, derandomize=not SECONDS)(test)
        if not SECONDS:
            return test

        @functools.wraps(test)
        def by_hand(**given: Any) -> None:
            end = time.monotonic() + SECONDS
            for number in count(time.time_ns()):
                seed(number)(test)(**given)
                if time.monotonic() > end:
                    return

        return by_hand

    return wrap


def judged(call: Callable[[], Any]) -> Any:
    """Return what a call gives, None where it refuses in one line."""
    try:
        return call()
    except UserError as error:
        line = str(error)
    assert line.isprintable(), line
    assert 0 < len(line) <= 1000
    return None


# --- configs

WHOLE = [0, -1, 1, 2, 10**9, 2**31, 2**33, 2**62, 2**63 - 1, -(2**63), 2**64, 10**400]
REAL = [0.0, -0.5, 1.5, 1e-320, 1e308, float("nan"), float("inf")]
ODD = [*WHOLE, *REAL, True, "", "x", "auto", "x" * 5000, "\0", "\ud800", "\n", "a:b", [], {}, [[]]]
LEAVES = st.one_of(st.sampled_from(ODD), st.integers(), st.floats(), st.text(max_size=8), st.booleans())
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


def known_keys() -> list[str]:
    """Every dotted key of a config, of whatever class."""
    keys = [*Config.model_fields]
    for section, cls in sections(Config).items():
        keys += [f"{section}.{key}" for key in cls.model_fields]
    for section, pick in PICKED.items():
        for name in pick.names():
            keys += [f"{section}.{key}" for key in pick.find(name).model_fields]
    return sorted(set(keys))


KEYS = st.sampled_from(known_keys()) | st.text(max_size=8) | st.just(".".join("a" * 50))
PRESETS = st.sampled_from(["fedavg-digits", "salf-digits", "fedrep-digits"])


def load(what: Any, settings: Any = ()) -> None:
    judged(lambda: config.load(what, settings).check(None))


@fuzz(70)
@given(PRESETS, st.dictionaries(KEYS, VALUES, min_size=1, max_size=3))
def test_any_values_of_keys(preset: str, values: dict[str, Any]) -> None:
    load(preset, values)


PICKS = [
    ({f"{section}.{pick.by}": name}, f"{section}.{key}")
    for section, pick in PICKED.items()
    for name in pick.names()
    for key in pick.find(name).model_fields
]


@fuzz(70)
@given(PRESETS, st.sampled_from(PICKS), VALUES, st.dictionaries(KEYS, VALUES, max_size=1))
def test_any_values_of_any_class(preset: str, pick: tuple[dict[str, str], str], value: Any, more: Any) -> None:
    named, key = pick
    load(preset, {**more, **named, key: value})


@fuzz(100)
@given(PRESETS, st.lists(st.builds("{}={}".format, KEYS, LEAVES) | st.text(), min_size=1, max_size=3))
def test_any_settings(preset: str, values: list[str]) -> None:
    load(preset, values)


@fuzz(100)
@given(st.dictionaries(st.sampled_from([*Config.model_fields, "x"]), VALUES, max_size=5), st.booleans())
def test_any_tables(table: dict[str, Any], whole: bool) -> None:
    load({**read("fedavg-digits"), **table} if whole else table)


@fuzz(60)
@given(st.binary(max_size=60) | st.text(alphabet="[]{}\".=,\n'\\#x10-_ ", max_size=60).map(str.encode))
def test_any_file_of_a_config(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.toml"
    path.write_bytes(content)
    load(path)


DEEP = {
    "lists": "x = " + "[" * 100_000,
    "tables": "x = " + "{a = " * 100_000,
    "keys": ".".join("a" * 100_000) + " = 1",
    "digits": "rounds = " + "9" * 5000,
    "sixteens": "rounds = 0x" + "f" * 5000,
    "a name": f"[algorithm]\nname = '{'x' * 5000}'",
    "a key": f"{'x' * 5000} = 1",
    "zero": '[data]\nname = "hdf5"\nfile = "\\u0000"',
    "a base": f'base = "{"x" * 5000}"',
}


@pytest.mark.parametrize("case", DEEP)
def test_configs_without_end_are_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(DEEP[case])
    with pytest.raises(UserError) as caught:
        config.load(path)
    assert len(str(caught.value)) <= 1000
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["x" * 5000, "\0", "\ud800", "x\n" * 9, "x" * 5000 + ".toml", "\0.toml"])
def test_names_of_any_kind_are_refused(name: str) -> None:
    for what, overlays in ((name, ()), ("fedavg-digits", name)):
        with pytest.raises(UserError) as caught:
            config.load(what, overlays=overlays)
        assert len(str(caught.value)) <= 1000
        assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "value", ["9" * 5000, "0x" + "f" * 5000, "[" * 5000, "x" * 5000, "1\nclients = 2", "1\n[data]", "\0"]
)
def test_settings_of_any_kind_are_refused(value: str) -> None:
    with pytest.raises(UserError) as caught:
        config.load("fedavg-digits", [f"rounds={value}"])
    assert "rounds" in str(caught.value)
    assert len(str(caught.value)) <= 1000


# --- files: anything behind a sound beginning


def hdf5_bytes(folder: Path) -> bytes:
    with h5py.File(folder / "sound.h5", "w") as file:
        file["clients/a/train/features"], file["clients/a/train/labels"] = np.ones((2, 2)), np.arange(2)
        file["clients/a/test/features"], file["clients/a/test/labels"] = np.ones((1, 2)), np.zeros(1, int)
    return (folder / "sound.h5").read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


USERS = b'{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": ['
FORMATS: dict[str, tuple[str, bytes, Callable[[Path], Any]]] = {
    "idx": ("x", b"\0\0\x08\x01\0\0\0\x05", lambda path: mnist.read_idx(path, 1)),
    "idx.gz": ("x", b"\x1f\x8b\x08\0\0\0\0\0\0\xff", lambda path: mnist.read_idx(path, 1)),
    "leaf": ("x.json", USERS, lambda path: femnist.read_leaf(path.parent)),
    "glove": ("x", b"good 1.0 2.0\n", lambda path: sent140.read_glove(path, {"good"})),
    "speeds": ("x.csv", b"client,seconds\n", lambda path: Table(file=str(path)).values),
    "hdf5": ("x.h5", b"", hdf5_file.survey),
}
SIGNS = st.text(alphabet='[]{}":,.0123456789-e \nq()h\x85\x86tRbsu', max_size=80).map(str.encode)


@pytest.mark.parametrize("kind", FORMATS)
@fuzz(50)
@given(content=st.binary(max_size=80) | SIGNS, place=st.integers(0, 2000))
def test_any_bytes_of_a_file(kind: str, folder: Path, content: bytes, place: int) -> None:
    name, head, reader = FORMATS[kind]
    path = folder / kind / name
    path.parent.mkdir(exist_ok=True)
    if kind == "hdf5":
        whole = hdf5_bytes(folder)
        head, tail = whole[:place], whole[place + len(content) :]
        path.write_bytes(head + content + tail)
    else:
        path.write_bytes(head + content)
    judged(lambda: reader(path))
