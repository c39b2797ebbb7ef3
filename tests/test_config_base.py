"""How keys and values of the config are refused."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest

from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError, check_within, refusal
from hpcfl.config import config as configs


class Pace(ConfigBase):
    rate: float = 1.0
    kind: str = "static"
    renamed: ClassVar[dict[str, str]] = {"speed": "rate"}


def test_a_renamed_key_is_refused_with_its_new_name():
    with pytest.raises(UsageError, match=r"^speed\.speed is now called speed\.rate$"):
        Pace.from_table({"speed": 2.0}, "speed")


def test_a_renamed_key_is_understood_where_a_run_recorded_it():
    assert Pace.from_table({"speed": 2.0}, "speed", recorded=True) == Pace(rate=2.0)
    with pytest.raises(UsageError, match=r"^speed\.sped: unknown key"):
        Pace.from_table({"sped": 2.0}, "speed", recorded=True)


def test_renamed_keys_of_every_level_are_refused_and_understood(monkeypatch):
    monkeypatch.setattr(configs.Config, "renamed", {"turns": "rounds"})
    monkeypatch.setattr(configs.Evaluate, "renamed", {"often": "every"})
    monkeypatch.setattr(configs.algorithm_class("fedavg"), "renamed", {"step": "lr"})
    parts = {"data": {"name": "digits"}, "model": {"name": "mlp"}, "clients": 4}
    old = parts | {"turns": 3, "evaluate": {"often": 2}, "algorithm": {"name": "fedavg", "step": 0.5}}
    found = configs.from_text(json.dumps(old))
    assert (found.rounds, found.evaluate.every, found.algorithm.model_dump()["lr"]) == (3, 2, 0.5)
    for table, line in (
        (old, "turns is now called rounds"),
        (
            parts | {"rounds": 3, "algorithm": {"name": "fedavg", "step": 0.5}},
            "algorithm.step is now called algorithm.lr",
        ),
        (
            parts | {"rounds": 3, "evaluate": {"often": 2}, "algorithm": {"name": "fedavg"}},
            "evaluate.often is now called evaluate.every",
        ),
    ):
        with pytest.raises(UsageError) as caught:
            configs.from_table(table)
        assert str(caught.value) == line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (refusal("model.rank", "at most 6", 7, nearest=6), "model.rank: expected at most 6, got 7; did you mean 6?"),
        (refusal("data.deal", "samples", True), "data.deal: expected samples, got true"),
        (refusal("a.b", "a name", None), "a.b: expected a name, got nothing"),
        (refusal("a.b", "no 'x'", ("x", 2), nearest=["y"]), "a.b: expected no 'x', got ['x', 2]; did you mean ['y']?"),
        (
            refusal("when", "'never'", "theory", nearest="by = 1"),
            "when: expected 'never', got 'theory'; did you mean by = 1?",
        ),
    ],
)
def test_every_refusal_reads_alike(error, line):
    assert str(error) == line


@pytest.mark.parametrize(("value", "near"), [(0, 1), (9, 8)])
def test_a_number_out_of_its_range_names_the_nearest(value, near):
    with pytest.raises(UsageError, match=rf"^size: expected 1 … 8 clients, got {value}; did you mean {near}\?$"):
        check_within("size", value, 1, 8, " clients")
    check_within("size", near, 1, 8)
