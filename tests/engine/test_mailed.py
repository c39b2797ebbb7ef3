"""A run folder on another machine: its models need neither data nor code, and a user's class is found by its digest."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import xarray

import hpcfl
from helpers import sources
from hpcfl import store
from hpcfl.base import plugins
from hpcfl.base.errors import RunError, UsageError
from hpcfl.commands.cli import main
from hpcfl.data.absent import about_samples
from hpcfl.store import reading, run_file

OWN = {
    "mailed_code": """
        from hpcfl import FedAvg, Speed
        from helpers.sources import Shaped

        class Mine(FedAvg):
            pass

        class Slow(Speed):
            def paces(self, seed, clients):
                import numpy as np
                return np.arange(1.0, clients + 1)

        class Points(Shaped):
            pass

        def loss(outputs, labels):
            import torch
            return torch.nn.functional.cross_entropy(outputs, labels, reduction="none")

        def sureness(outputs, labels):
            return outputs.softmax(-1).amax(-1)
        """,
    "mailed_net": """
        from torch import nn

        class Net(nn.Module):
            def __init__(self, shape, classes):
                super().__init__()
                self.body = nn.Sequential(nn.Linear(shape[0], 4), nn.BatchNorm1d(4), nn.ReLU())
                self.head = nn.Linear(4, classes)
                self.fixed = nn.Parameter(self.head.bias.detach().clone(), requires_grad=False)

            def forward(self, x):
                return self.head(self.body(x)) + 0 * self.fixed
        """,
}
PLAIN: dict[str, Any] = {
    "rounds": 2,
    "clients": 3,
    "algorithm": {"name": "fedavg", "batch": 3, "lr": 0.1},
    "speed": {"model": "mailed_code:Slow"},
    "data": {"name": "mailed_code:Points"},
    "task": {"loss": "mailed_code:loss", "metrics": ["mailed_code:sureness"]},
    "model": {"name": "mlp", "hidden": [4]},
}
LOCAL = {"name": "local", "batch": 3, "lr": 0.1}
HEADS = {"name": "fedrep", "batch": 3, "head_epochs": 1}
X = np.linspace(-1, 2, 10, dtype=np.float32).reshape(5, 2)


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave no module behind, and nowhere to look for it."""
    monkeypatch.setattr(plugins, "_folders", [])
    monkeypatch.setattr(plugins, "_before", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    forget()


def forget() -> None:
    for name in OWN:
        sys.modules.pop(name, None)


@pytest.fixture
def mail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[hpcfl.Run, Path]]:
    """What carries out a run and returns it, and its copy where working directory, data folder and code are no more."""

    def sent(**values: Any) -> tuple[hpcfl.Run, Path]:
        users = tmp_path / "users"
        (users / "data").mkdir(parents=True)
        for name, text in OWN.items():
            (users / f"{name}.py").write_text("\n".join(line[8:] for line in text.splitlines()))
        monkeypatch.chdir(users)
        run = hpcfl.run({**PLAIN, **values}, out="run", data_dir=users / "data", quiet=True)
        assert run.models.federation.client(0)  # read while all is here
        folder = tmp_path / "elsewhere" / "run"
        shutil.copytree(users / "run", folder)
        monkeypatch.chdir(folder.parent)
        users.rename(tmp_path / "gone")
        monkeypatch.setattr(plugins, "_folders", [])
        monkeypatch.setattr(plugins, "_before", [])
        forget()
        return run, folder

    return sent


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        assert value.dtype == other[name].dtype
        torch.testing.assert_close(other[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("algorithm", [PLAIN["algorithm"], HEADS, LOCAL], ids=["fedavg", "fedrep", "local"])
def test_a_mailed_runs_models_need_neither_data_nor_code(algorithm: dict[str, Any], mail: Any) -> None:
    run, folder = mail(algorithm=algorithm)
    mailed = hpcfl.Run(folder)
    assert set(mailed.models.absent) == {"task", "speed", "data"}
    for here, there in zip(run.models, mailed.models):
        same(here.params, there.params)
        np.testing.assert_array_equal(here.predict(X), there.predict(X))
        same(run.state_dict(here.client), mailed.state_dict(here.client))
        with pytest.raises(UsageError, match=r"^'.*mailed_code\.py', where the run found mailed_code:Points, is not "):
            _ = there.data
    if algorithm is PLAIN["algorithm"]:
        same(run.state_dict(), mailed.state_dict())
        np.testing.assert_array_equal(mailed.module()(torch.from_numpy(X)).argmax(1), next(iter(run.models)).predict(X))


@pytest.mark.parametrize(
    "model",
    [
        {"name": "cnn", "channels": [2], "kernel": 3, "padding": "same", "hidden": []},
        {"name": "vgg", "width": 1},
        {"name": "bilstm", "layers": 1, "hidden": 2, "bottleneck": 0},
    ],
    ids=lambda model: model["name"],
)
def test_models_of_any_kind_are_made_without_data(model: dict[str, Any], mail: Any) -> None:
    shape = {"cnn": (1, 4, 4), "vgg": (1, 32, 32), "bilstm": (3, 2)}[model["name"]]
    run, folder = mail(model=model, data={"name": "mailed_code:Points", "shape": list(shape)}, rounds=1)
    mailed = hpcfl.Run(folder)
    same(run.state_dict(), mailed.state_dict())
    x = np.linspace(-1, 1, 2 * int(np.prod(shape)), dtype=np.float32).reshape(2, *shape)
    np.testing.assert_array_equal(next(iter(run.models)).predict(x), next(iter(mailed.models)).predict(x))


def test_a_method_of_ones_own_is_needed_for_the_clients_models_alone(mail: Any) -> None:
    run, folder = mail(algorithm={**PLAIN["algorithm"], "name": "mailed_code:Mine"})
    mailed = hpcfl.Run(folder)
    same(run.state_dict(), mailed.state_dict())
    assert (mailed.models.algorithm.name, mailed.models.round, len(mailed.models)) == ("mailed_code:Mine", 2, 3)
    said = (
        r"^'.*mailed_code.py', where the run found mailed_code:Mine, is not there; .*module\(\) gives the shared model"
    )
    for ask in (lambda: next(iter(mailed.models)), lambda: mailed.module(0)):
        with pytest.raises(UsageError, match=said):
            ask()


def test_what_learns_before_a_test_says_that_it_needs_data(mail: Any) -> None:
    _, folder = mail(algorithm={**HEADS, "evaluation": "fine-tune", "tune_epochs": 1})
    with pytest.raises(UsageError, match=r"^'.*', where the run found mailed_code:loss, is not there"):
        next(iter(hpcfl.open_models(folder)))
    assert len([*hpcfl.open_models(folder, stored=True)]) == 3


def test_a_module_of_ones_own_leaves_its_weights_without_its_code(mail: Any, caplog: pytest.LogCaptureFixture) -> None:
    run, folder = mail(model={"name": "mailed_net:Net"})
    weights = hpcfl.Run(folder).state_dict()
    whole = run.state_dict()
    assert whole.keys() - weights.keys() == {"fixed"}
    same({name: whole[name] for name in weights}, weights)
    assert len(caplog.messages) == 1
    assert f"'{folder}': the model's own tensors alone" in caplog.messages[0]
    with pytest.raises(UsageError, match=r"^'.*mailed_net.py', where the run found mailed_net:Net, is not there"):
        hpcfl.open_models(folder)


@pytest.mark.parametrize("place", ["code", "working directory", "where it was"])
def test_a_users_class_is_found_by_its_digest_wherever_it_lies(place: str, mail: Any, tmp_path: Path) -> None:
    run, folder = mail(model={"name": "mailed_net:Net"}, algorithm={**PLAIN["algorithm"], "name": "mailed_code:Mine"})
    home = {"code": folder / "code", "working directory": folder.parent, "where it was": tmp_path / "users"}[place]
    home.mkdir(exist_ok=True)
    for name in OWN:
        shutil.copy(tmp_path / "gone" / f"{name}.py", home)
        if place != "working directory":  # one of its name, but another: passed over
            (folder.parent / f"{name}.py").write_text("raise ArithmeticError")
    mailed = hpcfl.Run(folder)
    assert mailed.models.absent == {}
    same(run.state_dict(), mailed.state_dict())
    for here, there in zip(run.models, mailed.models):
        same(here.params, there.params)
    for name in OWN:
        assert sys.modules[name].__file__ == str(home / f"{name}.py")


def test_a_module_of_ones_own_is_made_where_its_code_is_and_the_data_are_not(mail: Any, tmp_path: Path) -> None:
    run, folder = mail(model={"name": "mailed_net:Net"})
    shutil.copy(tmp_path / "gone" / "mailed_net.py", folder.parent)
    mailed = hpcfl.Run(folder)
    assert set(mailed.models.absent) == {"task", "speed", "data"}
    same(run.state_dict(), mailed.state_dict())


def test_changed_code_is_taken_with_force_in_python_too(mail: Any, tmp_path: Path) -> None:
    run, folder = mail(algorithm={**PLAIN["algorithm"], "name": "mailed_code:Mine"})
    edited = folder.parent / "mailed_code.py"
    edited.write_text((tmp_path / "gone" / "mailed_code.py").read_text() + "\n# edited\n")
    said = (
        rf"^'{edited}' has changed since the run began, which found mailed_code:Mine in '.*': expected the file of then"
    )
    with pytest.raises(UsageError, match=said):
        next(iter(hpcfl.open_models(folder)))
    table = json.loads(store.run_attributes(folder)["config"])
    with pytest.raises(UsageError, match=said):
        hpcfl.run(table, out=folder, resume=True)
    assert hpcfl.run(table, out=folder, resume=True, force=True).folder == folder
    for models in (hpcfl.open_models(folder, force=True), hpcfl.Run(folder, force=True).models):
        for here, there in zip(run.models, models):
            same(here.params, there.params)


def test_initial_values_that_are_gone_are_missed_where_they_are_asked_for(mail: Any, tmp_path: Path) -> None:
    initial = tmp_path / "initial.h5"
    with h5py.File(initial, "w") as file:
        for name, shape in {"fc1.weight": (4, 2), "fc1.bias": 4, "fc2.weight": (3, 4), "fc2.bias": 3}.items():
            file[name] = np.ones(shape, np.float32)
    run, folder = mail(model={**PLAIN["model"], "initial": str(initial)})
    initial.unlink()
    mailed = hpcfl.Run(folder)
    same(run.state_dict(), mailed.state_dict())
    model = next(iter(mailed.models))
    same(next(iter(run.models)).params, model.params)
    with pytest.raises(UsageError, match=rf"^'{initial}', where the run found model.initial, is not there"):
        _ = model.untrained


def test_run_h5_alone_has_its_rows(mail: Any, tmp_path: Path, capsys: Any, caplog: Any) -> None:
    _, folder = mail()
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("run.h5", "two.h5"):
        shutil.copy(folder / "run.h5", alone / name)
    whole = hpcfl.open_run(folder)
    for path in (alone, alone / "run.h5", alone / "two.h5"):
        found = hpcfl.open_run(path)
        assert found.attrs.pop("status") == "unknown"
        xarray.testing.assert_identical(found.assign_attrs(status="done"), whole)
    with h5py.File(alone / "two.h5") as file:
        np.testing.assert_array_equal(file["depth"][:], whole["depth"])
    plain = xarray.open_dataset(alone / "two.h5", engine="h5netcdf")
    np.testing.assert_array_equal(plain["sim_seconds"], whole["sim_seconds"])
    assert main(["show", str(alone / "two.h5")]) == 0
    assert not caplog.messages
    assert "two" in capsys.readouterr().out
    assert main(["resume", str(alone / "two.h5")]) == 2
    assert "nothing can be written" in capsys.readouterr().err


def test_rounds_that_are_lost_are_so_in_run_h5_alone(mail: Any, tmp_path: Path) -> None:
    _, folder = mail()
    with h5py.File(folder / "metrics" / "segment-000.h5", "r+") as file:
        file.attrs["lost"] = "[[1, 2]]"
    (folder / "manifest.json").unlink()
    store.rebuild(folder)
    shutil.copy(folder / "run.h5", tmp_path / "alone.h5")
    for found in (hpcfl.open_run(tmp_path / "alone.h5"), hpcfl.open_run(folder, chunks={})):
        assert found.attrs["lost"].tolist() == [1]


@pytest.mark.parametrize("most", [run_file.MOST_ROWS, 0])
def test_rows_are_read_when_they_are_asked_for(most: int, mail: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_file, "MOST_ROWS", most)
    _, folder = mail()
    lazy = hpcfl.open_run(folder, chunks={})
    assert lazy["depth"].chunks is not None
    xarray.testing.assert_identical(lazy.load(), hpcfl.open_run(folder))


def test_chunks_need_a_sealed_run_and_dask(mail: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = mail()
    monkeypatch.setattr(reading, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="expected dask, which is not installed"):
        hpcfl.open_run(folder, chunks="auto")
    rows = [store.Column("loss", (), "float64", "loss")]
    store.begin(folder, rows, {}, 9, 10).close()
    with pytest.raises(UsageError, match="is not sealed, so that its rows are read at once: expected no chunks"):
        hpcfl.open_run(folder, chunks="auto")


def test_run_h5_of_many_rows_says_that_they_lie_elsewhere(
    mail: Any, tmp_path: Path, capsys: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_file, "MOST_ROWS", 100)
    _, folder = mail()
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(folder / "run.h5", alone)
    with h5py.File(alone / "run.h5") as file:
        assert file.attrs["rows"].startswith("in metrics/ beside this file")
        assert (file["depth"][:] == -1).all()  # in silence
    assert "rows" not in hpcfl.open_run(folder).attrs
    line = f"'{alone / 'run.h5'}' is a table of rows that lie elsewhere: expected metrics/segment-000.h5 beside it; "
    for path in (alone, alone / "run.h5"):
        with pytest.raises(RunError) as caught:
            hpcfl.open_run(path)
        assert str(caught.value) == line + "copy the whole run folder"
    assert not caplog.messages
    assert main(["show", str(alone)]) == 1
    assert capsys.readouterr().err == f"hpcfl: {line}copy the whole run folder\n"


def test_a_file_that_is_no_runs_is_refused_in_a_line(tmp_path: Path, capsys: Any) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = 1
    (tmp_path / "text.h5").write_text("no HDF5")
    for name, said in (("data.h5", "is no run's table"), ("text.h5", "cannot be read as a run: ")):
        assert main(["show", str(tmp_path / name)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"hpcfl: '{tmp_path / name}' {said}")


def test_shapes_of_any_integers_are_recorded() -> None:
    plain = sources.federation(0, 3)
    odd = replace(plain, shapes=[(np.int64(2),)] * 3, classes=np.int64(3))
    assert json.loads(json.dumps(about_samples(odd))) == json.loads(json.dumps(about_samples(plain)))
