"""Data that come with their clients: another number is one line, and one that is left out is theirs."""

from __future__ import annotations

from inspect import getsourcelines
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hpcfl
from data.test_files import TWEETS, femnist, sent140
from helpers import sources
from hpcfl.base.errors import UsageError
from hpcfl.commands.cli import main
from hpcfl.config import load
from hpcfl.testing.runs import toml

PLAIN: dict[str, Any] = {
    "rounds": 1,
    "algorithm": {"name": "fedavg", "batch": 4},
    "model": {"name": "mlp", "hidden": [4]},
}


@pytest.mark.parametrize("source", ["Twelve", "Silent"])
def test_another_number_than_the_datas_is_one_line_from_check_and_run(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = toml({**PLAIN, "clients": 8, "data": {"name": f"helpers.sources:{source}"}}, tmp_path / "own.toml")
    said = f"clients: expected 12, which data.name = 'helpers.sources:{source}' holds, got 8; did you mean 12?"
    said += f" ({sources.__file__}, line {getsourcelines(getattr(sources, source))[1]})"
    for words in (["check", str(file)], ["run", str(file), "--out", str(tmp_path / "run")]):
        assert main(words) == 2
        assert capsys.readouterr().err == f"hpcfl: {said}\n"
    with pytest.raises(UsageError) as caught:
        hpcfl.run(str(file), out=tmp_path / "run")
    assert str(caught.value) == said
    assert not (tmp_path / "run").exists()


def test_the_number_that_is_left_out_is_that_of_the_data(tmp_path: Path) -> None:
    run = hpcfl.run({**PLAIN, "data": {"name": "helpers.sources:Twelve"}}, out=tmp_path / "run")
    assert run.data.sizes["client"] == 12
    assert run.models.config.clients == 12


def test_the_number_is_needed_where_the_data_do_not_say_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("digits", "helpers.sources:Any", "helpers.sources:Silent", "unit_cube"):
        with pytest.raises(UsageError, match=r"^clients: missing$"):
            load({**PLAIN, "data": {"name": name}})


def test_files_of_clients_say_how_many(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "own.h5", "w") as own, h5py.File(tmp_path / "split.h5", "w") as split:
        for client in range(3):
            split[f"clients/{client}/train"] = [client]
            for part in ("train", "test"):
                own[f"clients/{client}/{part}/features"] = np.eye(2)
                own[f"clients/{client}/{part}/labels"] = [0, 1]
    femnist(tmp_path)
    sent140(tmp_path)
    users = {user for _, user, _ in TWEETS}
    for data, clients in (
        ({"name": "hdf5", "file": "own.h5"}, 3),
        ({"name": "digits", "partition": "file", "partition_file": "split.h5"}, 3),
        ({"name": "femnist"}, 5),
        ({"name": "femnist", "first_classes": 10}, 4),
        ({"name": "femnist", "classes": 3}, 2),
        ({"name": "sent140", "min_samples": 1}, len(users)),
    ):
        config = load({**PLAIN, "data": data}, data_dir=tmp_path)
        assert config.clients == clients, data
        config.data.check(config.clients, tmp_path)
    with pytest.raises(UsageError, match=r"^clients: missing$"):
        load({**PLAIN, "data": {"name": "femnist", "merge": True}}, data_dir=tmp_path)
