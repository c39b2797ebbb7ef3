"""What methods, keys and groups of runs are called on figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.recorded import config
from hpcfl.algorithms import TITLES, algorithms
from hpcfl.config import load
from hpcfl.config.presets import flat
from hpcfl.results.naming import Names, in_order, method
from hpcfl.results.run_table import Recorded, groups


def recorded(name: str, **sections: Any) -> Recorded:
    """A run of a config as it is recorded."""
    table = {**config(), **sections}
    keys = {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat(table)}
    return Recorded(Path(name), keys, keys.pop("seed"))


def of_preset(name: str, *settings: str) -> tuple[str, str]:
    table = load(name, settings, ()).model_dump(mode="json")
    return method({key: value if isinstance(value, str) else json.dumps(value) for key, value in flat(table)})


def test_every_algorithm_has_a_title() -> None:
    assert TITLES.keys() == algorithms().keys()


@pytest.mark.parametrize(
    ("preset", "title", "stragglers"),
    [
        ("salf-digits", "SALF", ""),
        ("drop-digits", "FedAvg", "drop stragglers"),
        ("table2-mlp-drop", "FedAvg", "drop stragglers"),
        ("fedavg-digits", "FedAvg", "wait for all"),
        ("fedbuff-digits", "FedBuff", ""),
        ("fedasync-digits", "FedAsync", ""),
        ("ca2fl-digits", "CA2FL", ""),
        ("rennala-digits", "Rennala SGD", ""),
        ("malenia-digits", "Malenia SGD", ""),
        ("ringmaster-digits", "Ringmaster ASGD", ""),
        ("async-digits", "AsyncFL", ""),
        ("diloco-digits", "DiLoCo", "wait for all"),
        ("async-diloco-digits", "Async DiLoCo", ""),
        ("fedprox-digits", "FedProx", "wait for all"),
        ("fedadam-digits", "FedAdam", "wait for all"),
        ("scaffold-digits", "SCAFFOLD", "wait for all"),
        ("fedau-digits", "FedAU", "drop stragglers"),
        ("srpfl-fedrep-digits", "FedRep-SRPFL", ""),
        ("flanp-ft-mnist-small", "FLANP-FT", ""),
        ("flic-toy", "FLIC", "wait for all"),
        ("fedlrgd-rough", "FedLRGD", "wait for all"),
        ("heterofl-digits", "HeteroFL", "wait for all"),
    ],
)
def test_presets_are_called_as_papers_call_their_methods(preset: str, title: str, stragglers: str) -> None:
    assert of_preset(preset) == (title, stragglers)


def test_what_a_config_changes_beside_a_method_is_said() -> None:
    assert of_preset("salf-digits", "server.optimizer=adam", "server.lr=0.1") == ("SALF + server Adam", "")
    first = "participation.close=first", "participation.first=3", "participation.partial=discard"
    assert of_preset("salf-digits", *first, "participation.deadline=0.5") == ("FedAvg", "fastest 3")
    mine = recorded("a", algorithm={"name": "mine:FedX"}, participation={"close": "deadline"})
    assert method(mine.keys) == ("FedX", "deadline")
    replayed = recorded("b", algorithm={"name": "fedavg"}, speed={"model": "trace"})
    assert method(replayed.keys) == ("FedAvg", "replayed rounds")


FEDAVG = {"name": "fedavg", "lr": 0.1}
DROP = {"close": "deadline", "deadline": 0.5, "partial": "discard"}


def test_drop_stragglers_is_never_fedavg_alone() -> None:
    drop, wait = recorded("a", algorithm=FEDAVG, participation=DROP), recorded("b", algorithm=FEDAVG)
    assert Names([drop], {}).methods == {Path("a"): "FedAvg (drop stragglers)"}
    assert Names([wait], {}).methods == {Path("b"): "FedAvg"}
    both = Names([drop, wait], {"fedavg": "FA", "FA (wait for all)": "patient"})
    assert both.methods == {Path("a"): "FA (drop stragglers)", Path("b"): "patient"}


def labels(*runs: Recorded, words: dict[str, str] | None = None, without: tuple[str, ...] = ()) -> list[str]:
    return Names(runs, words or {}).groups(groups(runs), without)


def test_groups_are_told_apart_by_method_then_by_other_keys() -> None:
    salf, drop = recorded("a"), recorded("b", algorithm=FEDAVG, participation=DROP)
    assert labels(salf) == ["SALF"]
    assert labels(salf, drop) == ["SALF", "FedAvg (drop stragglers)"]
    later = recorded("c", algorithm=FEDAVG, participation={**DROP, "deadline": 2.0})
    either = ["FedAvg (drop stragglers), deadline 0.5 s", "FedAvg (drop stragglers), deadline 2.0 s"]
    assert labels(salf, drop, later) == ["SALF", *either]
    assert labels(drop, later) == ["deadline 0.5 s", "deadline 2.0 s"]
    assert labels(drop, later, without=("participation.deadline",)) == ["FedAvg (drop stragglers)"] * 2
    fast = recorded("d", algorithm={"name": "salf", "lr": 0.3, "missing": "exact"})
    assert labels(salf, fast) == ["learning rate 0.1", "learning rate 0.3"]
    assert labels(salf, fast, words={"algorithm.lr": "η (1/s)", "0.3": "fast"}) == ["η 0.1 1/s", "fast"]
    assert labels(salf, recorded("e")) == ["SALF, a", "SALF, e"]  # one config and seed


def test_values_come_in_the_order_that_is_asked_for() -> None:
    values = [("0.1", "rate 0.1"), ("0.2", "rate 0.2"), ("0.1", "rate 0.1"), ("x", "X")]
    assert in_order(values, []) == ["rate 0.1", "rate 0.2", "X"]
    assert in_order(values, ["X", "0.2"]) == ["X", "rate 0.2", "rate 0.1"]
