"""What `hpcfl check` says of the range of the clients' features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpcfl.commands import check
from hpcfl.commands.check import report
from hpcfl.commands.cli import main
from hpcfl.config import from_table
from hpcfl.data import hdf5
from hpcfl.data.formats import hdf5_file
from hpcfl.testing.runs import toml

CLIENTS, ROWS, WIDTH = 20, 4, 3
STANDARDISED = "features standardised to mean 0 and deviation 1 (a column of ids is no feature)"
UNIT = "data.scale = 'unit'"


def values(**data: Any) -> dict[str, Any]:
    named = {"algorithm": {"name": "local"}, "model": {"name": "mlp", "hidden": []}}
    return {"rounds": 1, "clients": CLIENTS, **named, "data": {"name": "hdf5", "file": "own.h5", **data}}


def write(folder: Path, changes: dict[int, float]) -> Path:
    """A file of 20 clients with features of 0 and 1; of some clients one number is another one."""
    with h5py.File(folder / "own.h5", "w") as file:
        for client in range(CLIENTS):
            features = np.tile(np.float32([0, 1, 0.5]), (ROWS, 1))
            features[-1, 1] = changes.get(client, 1)
            file[f"clients/{client}/train/features"], file[f"clients/{client}/train/labels"] = features, np.arange(ROWS)
            file[f"clients/{client}/test/features"], file[f"clients/{client}/test/labels"] = features[:1], [0]
    return folder


def said(folder: Path, **data: Any) -> list[str]:
    config = from_table(values(**data))
    return [line for line in report(config, config.check(folder), folder, 1) if "features:" in line]


FOUND = [  # what one number of these clients is; first client, its number, how many they are, and the remedy
    ({7: 3e38}, (7, "3e+38", 1, STANDARDISED), {}),
    ({5: -101.0, 6: 1000.0}, (5, "-101", 2, STANDARDISED), {}),
    (dict.fromkeys(range(CLIENTS), 255.0), (0, "255", 20, UNIT), {}),
    ({3: 255.0, 4: 256.0}, (3, "255", 2, STANDARDISED), {}),
    ({3: 100.0, 4: -100.0}, None, {}),
    ({3: 255.0}, None, {"scale": "centred"}),
]


@pytest.mark.parametrize(("changes", "expected", "data"), FOUND)
def test_clients_with_features_too_large_are_named(changes, expected, data, tmp_path):
    lines = said(write(tmp_path, changes), **data)
    if expected is None:
        assert lines == []
        return
    client, value, count, remedy = expected
    assert lines == [
        f"warning       features: client {client} holds {value}: beyond ±100, as in {count} of 20 clients, "
        f"training by gradients may diverge: expected {remedy}"
    ]


def test_features_that_are_pruned_do_not_count(tmp_path):
    write(tmp_path, dict.fromkeys(range(CLIENTS), 255.0))
    federation = from_table(values(prune=0.4)).data.federate(CLIENTS, 0, tmp_path)
    holders = [client for client in range(CLIENTS) if 255 in federation.client(client).train_features]
    assert 0 < len(holders) < CLIENTS
    (line,) = said(tmp_path, prune=0.4)
    assert f"client {holders[0]} holds 255: " in line
    assert f"as in {len(holders)} of 20 clients, " in line
    assert line.endswith(UNIT)


@pytest.mark.parametrize("own", [True, False])
def test_no_more_bytes_are_looked_at_than_may_be(own, tmp_path, monkeypatch):
    write(tmp_path, {2: 300.0, 11: 300.0, 12: 300.0} if own else {12: 300.0})
    each = 4 * (ROWS + 1) * WIDTH
    monkeypatch.setattr(hdf5, "VERIFIED", 0)
    monkeypatch.setattr(check, "LOOKED_AT", 13 * each - 1)
    (line,) = said(tmp_path)
    if own:
        assert line.startswith("warning       features: client 2 holds 300: ")
        assert "as in 2 of the first 12 of 20 clients, " in line
    else:
        assert line == "note          features: those of the first 12 of 20 clients were looked at"
    monkeypatch.setattr(check, "LOOKED_AT", 13 * each)
    assert "features: client" in said(tmp_path)[0]


def test_what_was_read_to_be_verified_is_not_read_again(tmp_path, monkeypatch):
    read, features_of = [], hdf5_file.features_of

    def noted(features, scale=None):
        read.append(features.name)
        return features_of(features, scale)

    monkeypatch.setattr(hdf5_file, "features_of", noted)
    assert len(said(write(tmp_path, {3: 200.0}))) == 1
    assert len(read) == len(set(read)) == 2 * CLIENTS


def test_any_source_is_looked_at(tmp_path, capsys):
    toml(values() | {"data": {"name": "linear_mapping", "spread": 500.0}}, tmp_path / "my.toml")
    assert main(["check", str(tmp_path / "my.toml")]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "features:" in line)
    assert line.startswith("warning       features: client 0 holds ")
    assert "as in 20 of 20 clients, " in line
    assert line.endswith(STANDARDISED)


def test_a_source_is_not_told_of_a_key_that_it_does_not_have():
    config = from_table(values() | {"data": {"name": "unit_cube"}})
    federation = config.data.federate(CLIENTS, 0, None)
    ((_, line),) = check.features(config, ((0.0, 255.0),) * CLIENTS, federation)
    assert line.endswith(STANDARDISED)
