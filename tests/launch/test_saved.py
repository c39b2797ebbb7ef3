"""Data and speeds that a script gives: as files that the run folder keeps, by clients' names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import xarray
from torch.utils.data import TensorDataset

import hpcfl
from helpers.launcher import job
from hpcfl.base.lazy import torch
from hpcfl.commands.cli import main
from hpcfl.launch import saved
from hpcfl.testing.runs import same

HOSPITALS = ["Bern", "Oslo", "Rome"]
FEW = {"rounds": 3, "model.hidden": [4], "algorithm.lr": 0.1}


def table(n: int = 90) -> pd.DataFrame:
    rng = np.random.default_rng(5)
    made = pd.DataFrame({"age": rng.normal(size=n), "dose": rng.normal(size=n), "smokes": rng.random(n) < 0.5})
    made["hospital"] = rng.choice(HOSPITALS, n)
    made["died"] = np.where(made["age"] + made["dose"] > 0, "yes", "no")
    return made


def arrays(n: int = 12) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(4 * n, dtype=np.float64).reshape(n, 2, 2), np.arange(n) % 3


def content(file: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    found = {}
    with h5py.File(file) as opened:
        opened.visititems(lambda name, item: found.update({name: item}) if name.endswith(("train", "test")) else None)
        return {name: (item["features"][()], item["labels"][()]) for name, item in found.items()}


def test_samples_of_clients_are_all_there_once(tmp_path: Path) -> None:
    x, y = arrays()
    clients = np.array([10, 2, 2, 10, 2, 10, 2, 2, 10, 10, 2, 10])
    assert hpcfl.save_data(tmp_path / "a.h5", (x, y, clients), test_share=0.34) == ["2", "10"]
    parts = content(tmp_path / "a.h5")
    assert {name: len(labels) for name, (_, labels) in parts.items()} == {
        **{"clients/2/train": 4, "clients/2/test": 2, "clients/10/train": 4, "clients/10/test": 2}
    }
    for name in ("2", "10"):
        mine = clients == int(name)
        both = [np.concatenate([parts[f"clients/{name}/{kind}"][i] for kind in ("train", "test")]) for i in (0, 1)]
        order = np.argsort(both[0][:, 0, 0])
        np.testing.assert_array_equal(both[0][order], x[mine])
        np.testing.assert_array_equal(both[1][order], y[mine])
    assert parts["clients/2/train"][0].dtype == np.float32


@pytest.mark.parametrize("kind", ["list", "dict", "datasets"])
def test_a_client_each(kind: str, tmp_path: Path) -> None:
    x, y = arrays()
    pairs: list[Any] = [(x[:8], y[:8]), (x[8:], y[8:])]
    if kind == "datasets":
        pairs = [TensorDataset(torch.tensor(one).float(), torch.tensor(two)) for one, two in pairs]
    given = {"north": pairs[0], "c2": pairs[1]} if kind == "dict" else pairs
    names = ["north", "c2"] if kind == "dict" else ["0", "1"]
    assert hpcfl.save_data(tmp_path / "a.h5", given, test_share=0.0) == sorted(names)  # in the order of their ids
    parts = content(tmp_path / "a.h5")
    for name, pair in zip(names, [(x[:8], y[:8]), (x[8:], y[8:])]):
        for one, other in zip(parts[f"clients/{name}/train"], pair):
            np.testing.assert_array_equal(one, other)


def test_a_pool_is_cut_by_the_configs_keys(tmp_path: Path) -> None:
    x, y = arrays(60)
    keys = {**FEW, "clients": 4, "data.partition": "dirichlet", "data.alpha": 2.0}
    run = hpcfl.run("fedavg-digits", data=(x / 100, y), settings=keys, out=tmp_path / "out")
    assert int(run.data["train_samples"].sum()) == 48
    assert run.data.sizes["client"] == 4
    assert "client_name" not in run.data.coords


def test_a_table_by_a_column_of_names_goes_on_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speeds = {"Rome": 3.0, "Oslo": 1.0, "Bern": 2.0}
    given = {"data": table(), "by": "hospital", "label": "died", "speeds": speeds}
    run = hpcfl.run("fedavg-digits", **given, settings=FEW, out=tmp_path / "out")
    assert run.data["client_name"].values.tolist() == HOSPITALS
    assert run.data["visit_seconds"].values[0].tolist() == [2.0, 1.0, 3.0]
    assert run.data.sizes["client"] == 3
    whole = hpcfl.run("fedavg-digits", **given, settings={**FEW, "rounds": 5}, out=tmp_path / "whole")
    moved = tmp_path / "far" / "run"
    moved.parent.mkdir()
    shutil.move(tmp_path / "out", moved)
    for rounds in (4, 5):  # a second time too
        assert main(["resume", str(moved), "--rounds", str(rounds)]) == 0
    same(moved, whole.folder)
    assert [change["key"] for change in json.loads(hpcfl.open_run(moved).attrs["history"])] == ["rounds", "rounds"]
    assert hpcfl.Run(moved).module()(torch.zeros(1, 3)).shape == (1, 2)
    assert xarray.open_dataset(moved / "run.h5", engine="h5netcdf")["client_name"].values.tolist() == HOSPITALS
    capsys.readouterr()
    assert main(["show", str(moved)]) == 0
    assert "run: clients: Bern, Oslo, Rome" in capsys.readouterr().out
    (axes,) = hpcfl.figure(moved, "participation").axes
    assert [label.get_text() for label in axes.get_xticklabels()] == HOSPITALS


def test_speeds_are_those_of_the_clients_that_are_named(tmp_path: Path) -> None:
    given = {"north": arrays(), "c10": arrays(13), "c2": arrays(14)}
    speeds = {"c10": 3.0, "north": 1.0, "c2": 2.0}
    run = hpcfl.run("fedavg-digits", data=given, test_share=0.0, speeds=speeds, settings=FEW, out=tmp_path / "out")
    assert run.data["client_name"].values.tolist() == ["c2", "c10", "north"]
    assert run.data["train_samples"].values.tolist() == [14, 13, 12]
    assert run.data["visit_seconds"].values[0].tolist() == [2.0, 3.0, 1.0]


def test_data_that_have_changed_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = hpcfl.run("fedavg-digits", data=[arrays(), arrays()], settings=FEW, out=tmp_path / "out")
    (file,) = run.folder.glob("data-*.h5")
    with h5py.File(file, "r+") as opened:
        opened["clients/0/train/labels"][0] = 1 - opened["clients/0/train/labels"][0]
    assert main(["resume", str(run.folder), "--rounds", "5"]) == 2
    assert f"'{file}' has changed since the run began" in capsys.readouterr().err


def test_the_same_data_are_kept_once(tmp_path: Path) -> None:
    for number in range(2):
        hpcfl.run("fedavg-digits", data=[arrays(), arrays()], settings=FEW, out=tmp_path / str(number))
    names = [[file.name for file in (tmp_path / str(number)).glob("data-*.h5")] for number in range(2)]
    assert names[0] == names[1]
    other = hpcfl.run("fedavg-digits", data=[arrays(), arrays(13)], settings=FEW, out=tmp_path / "1", overwrite=True)
    (left,) = other.folder.glob("data-*.h5")
    assert left.name not in names[0]


def test_runs_on_the_same_data_and_speeds_are_one_group(tmp_path: Path) -> None:
    """Each folder keeps its own; other data are another group."""
    for number, data in enumerate(([arrays(), arrays()], [arrays(), arrays()], [arrays(), arrays(13)])):
        keys = {**FEW, "seed": number}
        given = {"data": data, "speeds": {0: 1.0, 1: 2.0}}
        hpcfl.run("fedavg-digits", **given, settings=keys, out=tmp_path / str(number), quiet=True)
    assert sorted(hpcfl.compare(tmp_path)["runs"]) == [1, 2]


@pytest.mark.launch
def test_ranks_read_what_rank_0_has_kept(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, hpcfl\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_saved import FEW, table\n"
        'hpcfl.run("fedavg-digits", data=table(), by="hospital", label="died", settings=FEW, out=sys.argv[1])\n'
    )
    ended = job(
        "openmpi", 3, [str(script), str(tmp_path / "ranks")], env={"PYTHONPATH": str(Path(__file__).parents[1])}
    )
    assert ended.code == 0, ended.err
    alone = hpcfl.run("fedavg-digits", data=table(), by="hospital", label="died", settings=FEW, out=tmp_path / "alone")
    one, other = alone.data, hpcfl.open_run(tmp_path / "ranks")
    for name in ("client_accuracy", "loss", "client_name"):
        np.testing.assert_array_equal(one[name].values, other[name].values)


X, Y = arrays()
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "by": ({"data": table(), "by": "hospitl", "label": "died"}, "no column by = 'hospitl'; did you mean 'hospital'?"),
    "label": (
        {"data": table(), "by": "hospital"},
        "expected label, the column of the labels, one of age, dose, smokes",
    ),
    "text": ({"data": table(), "label": "died"}, "data: column 'hospital' holds str, expected numbers; pandas."),
    "lengths": ({"data": (X, Y[:5])}, "data: expected as many labels as samples, got 5 for 12"),
    "clients": ({"data": (X, Y, [1, 2])}, "expected the client of each of 12 samples, got an array of shape (2,)"),
    "kinds": ({"data": (X, Y, Y / 2)}, "expected clients that are numbers from 0 on or names, got float64"),
    "four": ({"data": (X, Y, Y, Y)}, "data: expected (x, y) or (x, y, client), got 4 of them"),
    "object": ({"data": 3}, "data: expected arrays (x, y), a PyTorch Dataset or a DataFrame, got int"),
    "features": ({"data": (X.astype(str), Y)}, "data: expected features that are numbers, got <U"),
    "none": ({"data": []}, "data: there are no clients, expected at least 1"),
    "name": ({"data": {"a/b": (X, Y)}}, "data: client 'a/b': expected a name without '/'"),
    "share": ({"data": (X, Y), "test_share": 1.0}, "test_share: expected a number from 0 to below 1, got 1.0"),
    "no table": ({"data": (X, Y), "by": "a"}, "data: by and label name columns of a table"),
    "nan": ({"data": [(X * np.nan, Y)]}, "expected finite 32-bit numbers"),
    "speeds": ({"speeds": 3.0}, "speeds: expected a DataFrame, a dict by client, or a path, got float"),
    "columns": ({"speeds": pd.DataFrame({"client": [0], "second": [1.0]})}, "expected columns client,seconds or "),
    "unknown": (
        {"data": table(), "by": "hospital", "label": "died", "speeds": {"Bern": 1.0, "Olso": 2.0}},
        "speeds: there is no client 'Olso'; did you mean 'Oslo'?",
    ),
    "missing": (
        {"data": table(), "by": "hospital", "label": "died", "speeds": {"Bern": 1.0, "Oslo": 2.0}},
        "speeds: expected seconds of each client, got none of 'Rome'",
    ),
    "file": (
        {"data": "patients.csv", "by": "hospital", "label": "died", "speeds": {"Bern": 1.0}},
        "data: 'patients.csv' is a table's file: expected the table, as data=pandas.read_csv('patients.csv') with by",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_is_said_in_a_line_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    given, said = CASES[case]
    with pytest.raises(hpcfl.UsageError) as raised:
        hpcfl.run("fedavg-digits", **given, settings={"rounds": 1}, out=tmp_path / "out")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_column_of_ids_is_warned_of_when_it_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = table()
    ids["patient"] = np.arange(1000, 1000 + len(ids))
    given = {"by": "hospital", "label": "died", "settings": {**FEW, "rounds": 1}}
    hpcfl.run("fedavg-digits", data=ids, **given, out=tmp_path / "ids")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hpcfl: warning: features: client 0 holds 10")
    assert "as in 3 of 3 clients, " in line
    hpcfl.run("fedavg-digits", data=table(), **given, out=tmp_path / "none")
    assert capsys.readouterr().err == ""


def test_large_data_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "MOST", 100)
    with pytest.raises(
        hpcfl.UsageError, match="data: 0 MB, of which a run folder keeps at most 0: write them with hpcfl"
    ):
        hpcfl.run("fedavg-digits", data=[arrays(), arrays()], settings=FEW, out=tmp_path / "out")
    hpcfl.save_data(tmp_path / "mine.h5", [arrays(), arrays()])
    run = hpcfl.run("fedavg-digits", data=tmp_path / "mine.h5", settings={**FEW, "clients": 2}, out=tmp_path / "out")
    assert not list(run.folder.glob("data-*"))
