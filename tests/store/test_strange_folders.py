"""Folders that no run leaves: files of other runs, pipes, copies, lost parts. Nothing wrong is read of them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcfl import store
from hpcfl.base.errors import RunError, UsageError, UserError
from hpcfl.commands.cli import main
from hpcfl.store import growing_file, inside, manifest
from hpcfl.testing.runs import play, table, toml
from store.test_verify import COLUMNS, COORDS, ROUNDS, ROWS, flip, made, row, segment_of, told  # noqa: F401


def lose(path: Path, first: int, last: int) -> None:
    """Let some rows of a growing segment be zeros, as after a loss of power."""
    with path.open("r+b", buffering=0) as file:
        area = growing_file.read_layout(file).rows
        file.seek(area.at + first * area.each)
        file.write(bytes((last - first) * area.each))


# ---- what has been done is on record, or named


def test_rows_that_a_checkpoint_has_seen_are_missed(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "killed")
    lose(segment_of(folder), 9, ROWS)
    assert store.open_run(folder).attrs["lost"].tolist() == [9, 10, 11]
    damaged = store.verify(folder).damaged
    assert damaged == {"metrics/segment-000.h5": "rounds 9 to 11 read as not recorded, though they were done"}
    segment = store.begin(folder, COLUMNS, COORDS, ROWS, ROUNDS)
    segment.write(ROWS, row(ROWS))
    segment.close()
    store.seal(folder)
    data = store.open_run(folder)
    assert data["round"].values.tolist() == list(range(ROWS + 1))
    assert np.flatnonzero(np.isnan(data["loss"])).tolist() == [9, 10, 11]
    assert list(store.verify(folder).damaged) == ["metrics/segment-000.h5"]


def test_rows_are_on_disk_before_the_checkpoint_of_their_round(
    solo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[tuple[str, str]] = []

    def watch(kind: str, call: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        def watched(*given: Any) -> Any:
            happened.append((kind, name(*given)))
            return call(*given)

        return watched

    synced = lambda handle: Path(f"/proc/self/fd/{handle}").readlink().name  # noqa: E731
    monkeypatch.setattr(os, "fsync", watch("sync", os.fsync, synced))
    monkeypatch.setattr(Path, "rename", watch("rename", Path.rename, lambda _, target: Path(target).name))
    play(solo, table("fedavg", "mlp", True, rounds=2, checkpoint={"every": 1}), tmp_path / "run", None)
    for number in (1, 2):
        place = happened.index(("rename", f"round-{number:06d}"))
        assert ("sync", "segment-000.h5") in happened[:place]
        assert {("sync", name) for name in ("server.h5", "beside.json")} <= {*happened[:place]}
        assert happened[place + 1] == ("sync", "checkpoints")
        del happened[: place + 1]


def test_checkpoints_that_are_gone_are_missed(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "sealed")
    shutil.rmtree(folder / "checkpoints" / "round-000008")
    assert store.verify(folder).damaged == {"checkpoints/round-000008": "it is missing"}
    store.write_status(folder, "done")  # which it is not: 12 of 40 rounds are there
    damaged = store.verify(folder).damaged
    assert damaged["checkpoints/round-000040"] == "it is missing"
    assert damaged["metrics/segment-000.h5"].startswith("rounds 12 to 39 read as not recorded")


def test_a_run_that_goes_on_to_its_next_checkpoint_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was the newest a moment ago knows of one that is gone since, or is gone itself."""
    verifying = sys.modules["hpcfl.store.findings"]  # the package has a function of this name
    folder, lacking = made(tmp_path / "run", "killed"), verifying.lacking

    def meanwhile(path: Path) -> list[str]:
        for number in (16, 20):
            new = store.draft(folder, number, "1")
            store.write_server(new, store.Checkpoint(number, {}))
            store.publish(new, (), lambda scores: sorted(scores)[-2:])
            assert lacking(path) == []
        return lacking(path)

    monkeypatch.setattr(verifying, "lacking", meanwhile)
    assert store.verify(folder).damaged == {}


def test_a_run_that_is_done_is_looked_at_before_it_is_called_so(
    solo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = play(solo, table("fedavg", "mlp", True, rounds=2), tmp_path / "run", None)
    assert main(["resume", str(run)]) == 0
    flip(segment_of(run), 3000)
    capsys.readouterr()
    assert main(["resume", str(run)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"hpcfl: '{run}' is done, but metrics/segment-000.h5 is not whole: its bytes are not those")
    assert said.count("\n") == 1


# ---- files of another run, or of another round


def test_what_another_run_has_written_is_not_read(tmp_path: Path) -> None:
    folder, other = made(tmp_path / "run", "killed"), made(tmp_path / "other", "killed")
    shutil.copytree(other / "checkpoints" / "round-000012", tmp_path / "taken")
    shutil.rmtree(folder / "checkpoints" / "round-000012")
    shutil.copytree(tmp_path / "taken", folder / "checkpoints" / "round-000012")
    shutil.copy(segment_of(other), segment_of(folder, 1))
    damaged = store.verify(folder).damaged
    assert sorted(damaged) == ["checkpoints/round-000012", "metrics/segment-001.h5"]
    assert all(reason.startswith("it belongs to another run (") for reason in damaged.values())
    assert store.latest(folder) == folder / "checkpoints" / "round-000008"
    assert store.open_run(folder).sizes["round"] == ROWS
    assert any("segment-001.h5 is damaged: it belongs to another run" in line for line in inside.told)


def test_a_checkpoint_under_another_ones_name_is_not_read(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "sealed")
    shutil.copytree(folder / "checkpoints" / "round-000008", folder / "checkpoints" / "round-000020")
    assert store.verify(folder).damaged == {"checkpoints/round-000020": "it is the state after round 8"}
    assert store.latest(folder) == folder / "checkpoints" / "round-000012"


def test_no_run_begins_where_parts_of_another_lie(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "sealed")
    (folder / "run.h5").unlink()
    with pytest.raises(UsageError, match=r"has no run.h5, but .*segment-000.h5 of an earlier run: expected an empty"):
        store.create(folder, {"config": "{}"})


def test_copies_beside_are_passed_over(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "sealed")
    shutil.copy(segment_of(folder), folder / "metrics" / "segment-000-copy.h5")
    for name in ("round-000012-copy", "round-5 copy", "round-000012.old"):
        shutil.copytree(folder / "checkpoints" / "round-000012", folder / "checkpoints" / name)
    assert store.verify(folder).damaged == {}
    assert store.latest(folder) == folder / "checkpoints" / "round-000012"
    assert store.open_run(folder).sizes["round"] == ROWS


# ---- what is no file, or cannot be read


FILES = (
    *("manifest.json", "run.h5", "status", "metrics/segment-000.h5"),
    *("checkpoints/round-000012/manifest.json", "checkpoints/round-000012/server.h5"),
)


def pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [pipe, Path.mkdir])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["sealed", "killed"])
def test_what_is_no_file_is_named(kind: str, name: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    """Nobody waits for a pipe; links, as to devices, are refused (tests/strange)."""
    folder = made(tmp_path / "run", kind)
    (folder / name).unlink()
    make(folder / name)
    place = "/".join(name.split("/")[:2])
    assert "no regular file" in store.verify(folder).damaged[place]
    if name == "run.h5":
        with pytest.raises(UserError, match=r"run\.h5"):
            store.open_run(folder)
    else:
        assert store.open_run(folder).sizes["round"] == ROWS  # lost or not
        store.events(folder)
    if not name.startswith("checkpoints"):
        return
    assert store.latest(folder) == folder / "checkpoints" / "round-000008"


def test_a_manifest_that_cannot_be_read_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not damaged: its digests are not given up."""
    folder = made(tmp_path / "run", "sealed")
    before = (folder / "manifest.json").read_bytes()

    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(manifest, "read_text", refuse)
    with pytest.raises(RunError, match=r"manifest.json cannot be read: Permission denied"):
        store.begin(folder, COLUMNS, COORDS, ROWS, ROUNDS)
    assert (folder / "manifest.json").read_bytes() == before


def test_a_damaged_manifest_is_made_anew_before_anything_else(solo: Any, tmp_path: Path) -> None:
    run = play(solo, table("fedavg", "mlp", True, rounds=2), tmp_path / "run", None)
    with (run / "manifest.json").open("a") as file:
        file.write("x")
    assert main(["resume", str(run), "--rounds", "4", "--quiet"]) == 0
    assert store.verify(run).damaged == {}


def test_without_digests_damage_is_still_no_traceback(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "sealed")
    (folder / "manifest.json").write_text("x")
    content = segment_of(folder).read_bytes()
    for place in range(0, len(content), 97):
        segment_of(folder).write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        try:
            store.open_run(folder)
            store.events(folder)
        except UserError:
            pass
        inside.told.clear()


# ---- the status


@pytest.mark.parametrize("kind", ["done", "running"])
def test_a_status_that_was_changed_is_not_believed(kind: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "killed")
    store.write_status(folder, kind, "why not", ranks=["process 1 on here"])
    content = (folder / "status").read_bytes()
    for place in range(len(content)):
        (folder / "status").write_bytes(content[:place] + bytes([content[place] ^ 0x80]) + content[place + 1 :])
        assert store.read_status(folder).state == "unknown"
        assert list(store.verify(folder).damaged) == ["status"]
    for size in range(len(content)):
        (folder / "status").write_bytes(content[:size])
        assert store.read_status(folder).state == "unknown"
    (folder / "status").write_bytes(content.replace(b"pid: ", b"pid: " + b"9" * 5000))
    assert store.read_status(folder).state == "unknown"


# ---- where nothing can be written


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_told_of_in_a_line(
    solo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = table("fedavg", "mlp", True, rounds=2)
    run = play(solo, values, tmp_path / "run", None)
    (run / "checkpoints").chmod(0o500)
    try:
        assert main(["resume", str(run), "--rounds", "4", "--quiet"]) == 2
    finally:
        (run / "checkpoints").chmod(0o700)
    assert "cannot be written: Permission denied" in capsys.readouterr().err


def test_it_is_told_of_in_a_line_what_cannot_be_made(
    solo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = play(solo, table("fedavg", "mlp", True, rounds=2), tmp_path / "run", None)
    touch = Path.touch

    def refuse(self: Path, *given: Any, **more: Any) -> None:
        if self.parent.name == "checkpoints":
            raise PermissionError(13, "Permission denied", str(self))
        touch(self, *given, **more)

    monkeypatch.setattr(Path, "touch", refuse)
    capsys.readouterr()
    assert main(["resume", str(run), "--rounds", "4", "--quiet"]) == 2
    said = capsys.readouterr().err
    assert said.endswith("cannot be written: Permission denied\n")
    assert said.count("\n") == 1


def test_a_config_that_is_run_goes_on_in_its_folder(solo: Any, tmp_path: Path) -> None:
    """The files of a start are of its run, also after a resumption from a checkpoint."""
    file = toml(table("fedavg", "mlp", True, rounds=3, checkpoint={"every": 1}), tmp_path / "my.toml")
    assert main(["run", str(file), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    assert main(["resume", str(tmp_path / "run"), "--rounds", "5", "--quiet"]) == 0
    found = store.verify(tmp_path / "run")
    assert (found.damaged, found.unchecked) == ({}, {})
