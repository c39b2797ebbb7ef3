"""Runs in one file: opened elsewhere without data and code, and refused where they are none."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import xarray
from safetensors.torch import load_file

import hpcfl
from hpcfl.base.lazy import torch
from hpcfl.commands.cli import main
from hpcfl.store import archive
from hpcfl.testing.runs import same, table

OWN = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x):
        return self.layers(x)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> hpcfl.Run:
    """A run with a model and data of the user's, whose folder holds the code."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine_exported.py").write_text(OWN)
    (folder / "run").mkdir()
    values = {**table("fedavg", "mlp", True), "model": {"name": "mine_exported:Net"}}
    values["data"] = {"name": "hdf5", "file": str(folder / "data.h5")}
    rng = np.random.default_rng(3)
    hpcfl.save_data(folder / "data.h5", [(rng.normal(size=(20, 64)), rng.integers(10, size=20)) for _ in range(7)])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        made = hpcfl.run(values, out=folder / "run")
        made.models  # noqa: B018  # while the code is here
    (folder / "data.h5").unlink()
    return made


def test_an_archive_is_read_like_the_folder(run: hpcfl.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = hpcfl.export(run.folder, tmp_path / "sent.zip")
    assert hpcfl.open_run(file).identical(run.data)
    assert {name.partition("/")[0] for name in zipfile.ZipFile(file).namelist()} == {
        *("run.h5", "status", "manifest.json", "metrics", "checkpoints")
    }
    capsys.readouterr()
    for command in (["show", str(file)], ["verify", str(file)], ["plot", str(file), "-o", str(tmp_path / "a.png")]):
        assert main(command) == 0
    out = capsys.readouterr().out
    assert "sent" in out
    assert "none is damaged" in out
    with zipfile.ZipFile(file) as opened:
        opened.extractall(tmp_path / "by hand")
    same(tmp_path / "by hand", run.folder)
    assert xarray.open_dataset(tmp_path / "by hand" / "run.h5", engine="h5netcdf")["loss"].notnull().all()


def test_weights_need_neither_code_nor_data(
    run: hpcfl.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = run.state_dict()
    file = hpcfl.export(run.folder, tmp_path / "sent.zip")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "nobody"))  # here nothing of it has run
    (run.folder.parent / "mine_exported.py").unlink()
    found = hpcfl.Run(file).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(hpcfl.UsageError, match="mine_exported:Net"):
        hpcfl.Run(file).module()
    assert len(hpcfl.figure(hpcfl.Run(file)).axes) == 2
    assert hpcfl.compare(file)["runs"].tolist() == [1]
    assert main(["export", str(file), "--to", str(tmp_path / "model.safetensors")]) == 0
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: value.tolist() for name, value in stored.items()} == {k: v.tolist() for k, v in wanted.items()}


def test_an_archive_with_a_folder_around_it(run: hpcfl.Run, tmp_path: Path) -> None:
    file = tmp_path / "wrapped.zip"
    with zipfile.ZipFile(file, "w") as made:
        for each in run.folder.rglob("*"):
            made.write(each, Path("some") / "folder" / each.relative_to(run.folder))
        made.writestr("some/folder/../../evil.txt", "no")
    assert hpcfl.open_run(file).sizes == run.data.sizes


def test_nothing_is_written_to_an_archive(run: hpcfl.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = hpcfl.export(run.folder, tmp_path / "sent.zip")
    for command in (["resume", str(file)], ["seal", str(file)], ["resume", str(file), "--rounds", "9"]):
        assert main(command) == 2
        line = f"'{file}' is an archive, to which nothing can be written: expected a folder; unzip it first"
        assert capsys.readouterr().err == f"hpcfl: {line}\n"


def test_odd_archives_are_one_line(run: hpcfl.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.zip").write_text("no archive")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as made:
        made.writestr("readme.txt", "hello")
    whole = hpcfl.export(run.folder, tmp_path / "sent.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[: len(whole) // 2])
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("run.h5", b"\0" * (1 << 20))
    monkeypatch.setattr(archive, "SMALL", 1000)
    said = {
        "text": "cannot be read as a run: File is not a zip file",
        "other": "is no run's archive: there is no run.h5 in it",
        "cut": "cannot be read as a run: ",
        "bomb": "claims 1048576 bytes of ",
    }
    for name, text in said.items():
        with pytest.raises(hpcfl.UsageError) as raised:
            hpcfl.open_run(tmp_path / f"{name}.zip")
        assert text in str(raised.value)
        assert "\n" not in str(raised.value)


def test_what_cannot_be_exported(run: hpcfl.Run, tmp_path: Path) -> None:
    with pytest.raises(hpcfl.UsageError, match=r"expected a name that ends in \.zip or \.safetensors"):
        hpcfl.export(run.folder, tmp_path / "model.pt")
    with pytest.raises(hpcfl.UsageError, match="expected no client"):
        hpcfl.export(run.folder, tmp_path / "run.zip", client=1)
    with pytest.raises(hpcfl.UsageError, match="is no run folder"):
        hpcfl.export(tmp_path / "nowhere", tmp_path / "run.zip")
    assert not list(tmp_path.iterdir())
