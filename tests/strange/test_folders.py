"""Run folders from somebody else whose parts lead out of them: nothing there is read, written or deleted."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hpcfl
from hpcfl.base.errors import UsageError
from hpcfl.commands.cli import main
from hpcfl.store import manifest
from hpcfl.testing.runs import table

COMMANDS = {
    "show": ["show"],
    "verify": ["verify"],
    "seal": ["seal"],
    "plot": ["plot"],
    "resume": ["resume", "--rounds", "5", "--quiet"],
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("played") / "run"
    values = table("fedavg", "mlp", False, rounds=3, checkpoint={"every": 1, "keep": 2})
    hpcfl.run(values, out=folder, quiet=True)
    return folder


@pytest.fixture
def folder(played: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(played, tmp_path / "run"))


def link(name: str) -> Callable[[Path, Path], None]:
    """Move a part of the run out of it, and leave a link."""

    def act(run: Path, decoy: Path) -> None:
        place = next(run.glob(name), run / name)
        target = decoy / place.name
        if place.exists():
            shutil.move(place, target)
        else:
            target.write_text("precious")
        place.symlink_to(target)

    return act


TAMPERED: dict[str, Callable[[Path, Path], None]] = {
    **{name: link(name) for name in ("lock", "status", "run.h5", "manifest.json", "metrics", "checkpoints")},
    **{
        name: link(name)
        for name in ("metrics/segment-000.h5", "checkpoints/round-*3*", "checkpoints/round-*3*/server.h5")
    },
}


def device(run: Path, decoy: Path) -> None:
    (run / "status").unlink()
    (run / "status").symlink_to("/dev/zero")


TAMPERED["a device"] = device


def content(place: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(place)): (path.lstat().st_mtime_ns, path.read_bytes())
        for path in sorted(place.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("part", TAMPERED)
def test_a_part_that_is_a_link_is_refused(
    part: str, command: str, folder: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoy = tmp_path / "decoy"
    decoy.mkdir()
    TAMPERED[part](folder, decoy)
    before = content(decoy)
    monkeypatch.chdir(tmp_path)
    word, *more = COMMANDS[command]
    assert main([word, str(folder), *more]) in (1, 2)
    said = "".join(capfd.readouterr()).splitlines()
    assert any("is a link: expected what it points at" in line for line in said), said
    assert not any("Traceback" in line for line in said)
    assert content(decoy) == before


def test_the_folder_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").symlink_to(folder)
    assert main(["resume", str(tmp_path / "scratch"), "--rounds", "5", "--quiet"]) == 0
    assert hpcfl.open_run(tmp_path / "scratch").sizes["round"] == 5


def listed_anew(folder: Path) -> None:
    """Whoever changes files can write their digests too."""
    for place in (folder, *(folder / "checkpoints").iterdir()):
        if (place / manifest.NAME).exists():
            names = [*json.loads((place / manifest.NAME).read_text())["files"]]
            manifest.write(place, names)


def swapped(file: h5py.File, name: str, **how: Any) -> None:
    shape, dtype = file[name].shape, file[name].dtype
    attributes = dict(file[name].attrs)
    del file[name]
    made = file.create_dataset(name, shape, dtype, **how)
    made.attrs.update(
        {key: value for key, value in attributes.items() if key not in ("REFERENCE_LIST", "DIMENSION_LIST")}
    )


def external(file: h5py.File, name: str, secret: Path) -> None:
    swapped(file, name, external=[(str(secret), 0, h5py.h5f.UNLIMITED)])


def mapped(file: h5py.File, name: str, secret: Path) -> None:
    layout = h5py.VirtualLayout(file[name].shape, file[name].dtype)
    layout[...] = h5py.VirtualSource(str(secret), "x", file[name].shape)
    del file[name]
    file.create_virtual_dataset(name, layout)


def pointed(file: h5py.File, name: str, secret: Path) -> None:
    del file[name]
    file[name] = h5py.ExternalLink(str(secret), "x")


FILES = {"run.h5": "loss", "metrics/segment-000.h5": "loss", "checkpoints/{}/server.h5": "shared/fc1.weight"}


@pytest.mark.parametrize("how", [external, mapped, pointed])
@pytest.mark.parametrize("name", FILES)
def test_numbers_of_other_files_are_not_read(name: str, how: Callable[..., None], folder: Path, tmp_path: Path) -> None:
    newest = max((folder / "checkpoints").iterdir()).name
    secret = tmp_path / "secret"
    os.mkfifo(secret)  # to open it would hang
    with h5py.File(folder / name.format(newest), "r+") as file:
        how(file, FILES[name], secret)
    listed_anew(folder)
    if name.startswith("checkpoints"):  # an older one is whole
        assert hpcfl.open_models(folder).round == 2
    elif name == "run.h5":
        with pytest.raises(UsageError, match=r"expected the numbers themselves"):
            hpcfl.open_run(folder)
    else:  # a segment that is damaged reads as not recorded
        assert np.isnan(hpcfl.open_run(folder)["loss"].values).all()
    assert main(["verify", str(folder)]) == 1


def test_a_manifest_lists_nothing_outside(folder: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "secret").write_text("precious")
    entry = {"bytes": 8, "sha256": sha256(b"precious").hexdigest()}
    listed = json.loads((folder / manifest.NAME).read_text())["files"] | {"../secret": entry}
    manifest.write_entries(folder, listed)
    assert main(["verify", str(folder)]) == 1
    assert "lists '../secret', which is not in its folder" in capsys.readouterr().out
