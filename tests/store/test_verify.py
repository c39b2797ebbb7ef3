"""Nothing that is wrong is read: each changed byte of a run folder is found.

``python tests/store/test_verify.py 1000`` changes a thousand seeded bits and lengths; the suite takes a sample of them.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import h5py
import numpy as np
import pytest
import xarray

from hpcfl import store
from hpcfl.base.errors import RunError
from hpcfl.commands.cli import main
from hpcfl.store import growing_file, inside, manifest
from hpcfl.testing import runs

COLUMNS = [
    store.Column("loss", (), "f8", "loss", "1"),
    store.Column("accuracy", ("client",), "f4", "accuracy"),
    store.Column("depth", ("client", "layer"), "i2", "depth"),
]
COORDS: dict[str, Any] = {"client": range(20), "layer": ["a", "b", "c"], "rank": [0]}
ROUNDS, ROWS = 40, 12
KINDS = ("sealed", "killed", "resumed", "twice")
"""Done and sealed; killed in its first segment; killed in its second; sealed with two segments."""


def row(number: int) -> dict[str, Any]:
    draw = np.random.default_rng(number)
    return {"loss": draw.random(), "accuracy": draw.random(20), "depth": draw.integers(0, 4, (20, 3))}


def play(segment: growing_file.Segment, folder: Path, first: int, last: int) -> None:
    """Write rows, events and checkpoints, as a run does."""
    for number in range(first, last):
        segment.event(number, "late", number % 20, f"in round {number}")
        segment.write(number, row(number))
        if number % 4 == 3:
            new = store.draft(folder, number + 1, "1")
            store.write_server(new, store.Checkpoint(number + 1, {"w": np.full(50, number)}), [0, 0])
            store.write_rank(new, 0, [([1], {"v": np.ones((1, 9))})])
            store.publish(new, [0], lambda scores: sorted(scores)[-2:])


def made(folder: Path, kind: str) -> Path:
    facts = [store.Fact("train_samples", np.arange(20), "training samples")]
    store.create(folder, {"config": "{}"}, facts)
    segment = store.begin(folder, COLUMNS, COORDS, 0, ROUNDS)
    play(segment, folder, 0, ROWS)
    segment.close()
    if kind in ("resumed", "twice"):
        segment = store.begin(folder, COLUMNS, COORDS, 8, ROUNDS)
        play(segment, folder, 8, ROWS)
        segment.close()
    store.write_status(folder, "stopped")
    if kind in ("sealed", "twice"):
        store.seal(folder)
    return folder


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.setattr("hpcfl.store.growing_file.EVENTS", 30)  # small files
    lines: set[str] = set()
    monkeypatch.setattr(inside, "told", lines)
    return lines


def place_of(draw: np.random.Generator, path: Path, size: int) -> int:
    """A byte; in a file that is a hole for the most part, one that was written in most cases."""
    with path.open("rb", buffering=0) as file:
        if file.read(len(growing_file.MAGIC)) != growing_file.MAGIC or draw.random() < 0.1:
            return int(draw.integers(size))
        layout = growing_file.read_layout(file)
        header = range(layout.block + 4096)
        rows = range(layout.rows.at, layout.rows.at + (ROWS + 1) * layout.rows.each)
        events = range(layout.events.at, layout.events.at + (ROWS + 1) * layout.events.each)
        return int(draw.choice([*header, *rows, *events]))


def changed(draw: np.random.Generator, path: Path) -> str:
    """Flip a bit of a file, or cut it; return which of the two."""
    size = path.stat().st_size
    if draw.random() < 0.2:
        with path.open("r+b") as file:
            file.truncate(int(draw.integers(size)))
        return "cut"
    place = place_of(draw, path, size)
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << int(draw.integers(8))]))
    return "flip"


def check_one(folder: Path, path: Path, before: xarray.Dataset, log: list[Any]) -> str:
    """A changed file is named, and nothing wrong is read of it."""
    found = store.verify(folder).damaged
    name = "/".join(path.relative_to(folder).parts[:2])  # a checkpoint is named as a whole
    inside.told.clear()
    try:
        after, entries = store.open_run(folder), store.events(folder)
    except RunError:
        assert [name, *found] == ["run.h5", "run.h5"]
        return "refused"
    assert list(found) == [name]
    assert all(entry in log for entry in entries)
    lost = np.zeros(after.sizes["round"], bool)
    for column in COLUMNS:
        missing = np.isnan(after[column.name]) if column.dtype[0] == "f" else after[column.name] == -1
        lost |= missing.all([dim for dim in missing.dims if dim != "round"]).values
    assert not lost.any() or any(name in line for line in inside.told)
    assert len(lost) == before.sizes["round"] or any(name in line for line in inside.told)
    kept = after.isel(round=~lost)
    xarray.testing.assert_equal(kept, before.sel(round=kept["round"]))
    return "rows lost" if lost.any() or len(lost) < before.sizes["round"] else "found"


def strike(place: Path, count: int) -> Counter[str]:
    """Change `count` files in turn, each put back afterwards; return how often what was the outcome."""
    outcomes: Counter[str] = Counter()
    folders = {kind: made(place / kind, kind) for kind in KINDS}
    before = {kind: (store.open_run(folder), store.events(folder)) for kind, folder in folders.items()}
    for seed in range(count):
        draw = np.random.default_rng(seed)
        kind = KINDS[seed % len(KINDS)]
        folder = folders[kind]
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        path = files[int(draw.integers(len(files)))]
        kept = shutil.copy(path, place / "kept")
        try:
            how = changed(draw, path)
            outcomes[
                f"{how} {path.parent.name if path.parent != folder else path.name}: "
                f"{check_one(folder, path, *before[kind])}"
            ] += 1
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {kind}: {path}: {error}") from error
        finally:
            shutil.copy(kept, path)
    return outcomes


def test_every_change_is_found(tmp_path: Path) -> None:
    outcomes = strike(tmp_path, 80)
    assert sum(outcomes.values()) == 80
    assert any(key.endswith("rows lost") for key in outcomes)


@pytest.mark.slow
def test_a_thousand_changes(tmp_path: Path) -> None:
    assert sum(strike(tmp_path, 1000).values()) == 1000


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_left_alone_is_whole(tmp_path: Path, kind: str) -> None:
    found = store.verify(made(tmp_path / "run", kind))
    assert (found.damaged, found.unchecked) == ({}, {})
    assert found.files == 6 + (kind in ("resumed", "twice"))  # run.h5, manifest, status, 2 checkpoints, segments


def test_a_kill_at_any_moment_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the folder before and after each file gets its name."""
    folder, copies, rename = tmp_path / "run", [], Path.replace

    def watched(self: Path, target: Any) -> Path:
        for act in (lambda: None, lambda: rename(self, target)):
            act()
            copies.append(shutil.copytree(folder, tmp_path / f"copy-{len(copies)}"))
        return Path(target)

    monkeypatch.setattr(Path, "replace", watched)
    made(folder, "twice")
    monkeypatch.undo()
    assert len(copies) > 20
    for copy in copies:
        if (copy / "run.h5").exists():
            assert store.verify(copy).damaged == {}, copy
            data = store.open_run(copy)
            for number in data["round"].values.tolist():
                assert data["loss"].sel(round=number) == row(number)["loss"]
            shutil.rmtree(copy / "checkpoints")
            segment = store.begin(copy, COLUMNS, COORDS, 0, ROUNDS)  # and a resumption leaves it so
            segment.close()
            assert store.verify(copy).damaged == {}, copy


def segment_of(folder: Path, number: int = 0) -> Path:
    return folder / "metrics" / f"segment-{number:03d}.h5"


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_lost_rows_are_marked_and_stay_so(tmp_path: Path, told: set[str]) -> None:
    folder = made(tmp_path / "run", "killed")
    with segment_of(folder).open("rb", buffering=0) as file:
        rows = growing_file.read_layout(file).rows
    for number in (3, 4, 7, ROWS - 1):
        flip(segment_of(folder), rows.at + number * rows.each + 20)
    line = f"{segment_of(folder)} is damaged: rounds 3 to 4, 7, {ROWS - 1} read as not recorded"
    for sealed in (False, True):
        if sealed:
            store.seal(folder)
        told.clear()
        data = store.open_run(folder)
        assert told == {line}
        assert data["round"].values.tolist() == list(range(ROWS))
        assert np.flatnonzero(np.isnan(data["loss"])).tolist() == [3, 4, 7, ROWS - 1]
        assert (data["depth"].values[[3, 4, 7]] == -1).all()
        reason = store.verify(folder).damaged[f"metrics/{segment_of(folder).name}"]
        assert reason.startswith("rounds 3 to 4, 7" if sealed else "rounds 3, 4, 7")
    plain = xarray.load_dataset(folder / "run.h5", engine="h5netcdf")
    np.testing.assert_array_equal(plain["loss"], data["loss"])
    store.begin(folder, COLUMNS, COORDS, 0, ROUNDS).close()
    segment = store.begin(folder, COLUMNS, COORDS, 0, ROUNDS)
    play(segment, folder, 0, ROWS)
    segment.close()
    assert store.verify(folder).damaged == {}  # all of it was computed anew
    assert not np.isnan(store.open_run(folder)["loss"]).any()


def test_rounds_of_a_segment_that_is_wholly_lost(tmp_path: Path, told: set[str]) -> None:
    """Sealed ones are known to run.h5; of one that was not, those before what was recorded afterwards."""
    for kind, lost in (("twice", 8), ("resumed", 8)):
        folder = made(tmp_path / kind, kind)
        flip(segment_of(folder), 600)
        told.clear()
        data = store.open_run(folder)
        assert data["round"].values.tolist() == list(range(ROWS))
        assert np.flatnonzero(np.isnan(data["loss"])).tolist() == list(range(lost))
        assert [line.partition("; ")[2] for line in told] == [f"rounds 0 to {lost - 1} read as not recorded"]
    folder = made(tmp_path / "killed", "killed")
    flip(segment_of(folder), 200)
    assert store.open_run(folder).attrs["lost"].tolist() == list(range(12))  # of which there is a checkpoint
    segment = store.begin(folder, COLUMNS, COORDS, 8, ROUNDS)
    play(segment, folder, 8, ROWS)
    segment.close()
    store.seal(folder)
    for data in (store.open_run(folder), xarray.load_dataset(folder / "run.h5", engine="h5netcdf")):
        assert np.flatnonzero(np.isnan(data["loss"])).tolist() == list(range(8))
        assert data["loss"].values[8:].tolist() == [row(number)["loss"] for number in range(8, ROWS)]
    assert list(store.verify(folder).damaged) == ["metrics/segment-000.h5"]


def test_a_row_that_comes_while_one_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that saw a half of it looks again."""
    folder, pieces = tmp_path / "run", growing_file._pieces
    store.create(folder, {"config": "{}"})
    segment = store.begin(folder, COLUMNS, COORDS, 0, ROUNDS)
    segment.write(0, row(0))

    def early(*given: Any) -> Iterator[Any]:
        for start, records in pieces(*given):
            if len(records) == ROUNDS:
                segment.write(1, row(1))
                records[1, -8:] = 255  # its end was there, its beginning not yet
            yield start, records

    monkeypatch.setattr(growing_file, "_pieces", early)
    data = store.open_run(folder)
    assert data["loss"].values.tolist() == [row(number)["loss"] for number in range(data.sizes["round"])]
    assert not inside.told
    segment.close()


def test_a_changed_bit_of_space_to_come_is_found(tmp_path: Path) -> None:
    """Of the next record only a whole beginning can be there, of those after it nothing."""
    folder = made(tmp_path / "run", "killed")
    with segment_of(folder).open("r+b", buffering=0) as file:
        layout = growing_file.read_layout(file)
        for area, what in ((layout.rows, "round"), (layout.events, "event")):
            first = area.at + ROWS * area.each
            for place in [*range(first, first + 16), first + 100, first + area.each - 1, first + 3 * area.each + 50]:
                for bit in range(8):
                    os.pwrite(file.fileno(), bytes([1 << bit]), place)
                    number = ROWS + (place - first) // area.each
                    assert growing_file.damage(file) == f"{what} {number}: not as written"
                    os.pwrite(file.fileno(), b"\0", place)
        assert growing_file.damage(file) == ""


def test_sealing_makes_no_file_larger(tmp_path: Path) -> None:
    for rounds in (1, 5, 100):
        folder = tmp_path / str(rounds)
        store.create(folder, {"config": "{}"})
        segment = store.begin(folder, COLUMNS, COORDS, 0, rounds)
        for number in range(rounds):
            segment.write(number, row(number))
        segment.close()
        before = 512 * segment_of(folder).stat().st_blocks
        store.seal(folder)
        assert 512 * segment_of(folder).stat().st_blocks <= before
        with h5py.File(segment_of(folder)) as file:
            kept = [file[name] for name in ("round", "log/events", *(column.name for column in COLUMNS))]
            assert all(item.fletcher32 and item.compression == "gzip" for item in kept if item.size)


def test_a_manifest_that_is_gone_or_damaged_is_told_of(tmp_path: Path, told: set[str]) -> None:
    folder = made(tmp_path / "run", "sealed")
    before = store.open_run(folder)
    path = folder / manifest.NAME
    flip(path, 40)
    for line in ("digest", "missing"):
        told.clear()
        xarray.testing.assert_identical(store.open_run(folder), before)
        assert len(told) == 1
        assert line in next(iter(told))
        assert list(store.verify(folder).damaged) == [manifest.NAME]
        path.unlink(missing_ok=True)
    store.seal(folder)
    assert store.verify(folder).damaged == {}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, hurt = made(tmp_path / "whole", "sealed"), made(tmp_path / "hurt", "sealed")
    flip(segment_of(hurt), 3000)
    flip(hurt / "run.h5", 3000)
    assert main(["verify", str(whole)]) == 0
    assert capsys.readouterr().out == f"{whole}: 6 files, none is damaged\n"
    assert main(["verify", str(whole), str(hurt)]) == 1
    reason = "damaged: its bytes are not those that were written"
    assert capsys.readouterr().out.splitlines() == [
        f"{whole}: 6 files, none is damaged",
        f"{hurt}: 2 of 6 files are damaged",
        *(f"{hurt}/{name}: {reason}" for name in ("run.h5", "metrics/segment-000.h5")),
    ]
    assert main(["verify", str(tmp_path), "--json"]) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["run"], each["whole"], sorted(each["damaged"])) for each in found] == [
        (str(hurt), False, ["metrics/segment-000.h5", "run.h5"]),
        (str(whole), True, []),
    ]
    assert main(["verify", str(tmp_path / "none")]) == 2
    (hurt / "run.h5").unlink()
    assert main(["verify", str(hurt)]) == 1


@pytest.fixture(scope="module")
def stopped(solo: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints, as if it had been stopped after the first."""
    folder = runs.play(solo, runs.table("salf", "mlp", batched=True), tmp_path_factory.mktemp("verify") / "run", None)
    runs.cut_back(folder, 2)
    return folder


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("hpcfl.launch.failure", "hpcfl.mpi.launcher"):
        monkeypatch.setattr(f"{module}.launched", lambda: False)


def test_a_run_whose_metrics_are_damaged_goes_on(stopped: Path, tmp_path: Path, alone: None, capsys: Any) -> None:
    folder = Path(shutil.copytree(stopped, tmp_path / "run"))
    flip(segment_of(folder), 3000)
    assert main(["resume", str(folder), "--quiet"]) == 0
    data = store.open_run(folder)
    assert data["round"].values.tolist() == [0, 1, 2, 3]
    assert np.isnan(data["round_seconds"]).values.tolist() == [True, True, False, False]
    capsys.readouterr()
    assert main(["show", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 4
    assert main(["verify", str(folder)]) == 1


@pytest.mark.parametrize("state", ["done", "stopped"])
def test_a_run_whose_metrics_are_gone_is_not_done(
    stopped: Path, tmp_path: Path, alone: None, capsys: Any, state: str
) -> None:
    folder = Path(shutil.copytree(stopped, tmp_path / "run"))
    store.write_status(folder, state)
    shutil.rmtree(folder / "metrics")
    assert main(["resume", str(folder)]) == 1
    said = capsys.readouterr()
    line = f"hpcfl: run folder '{folder}' lacks metrics/segment-000.h5: expected a copy there\n"
    assert (said.out, said.err) == ("", line)


if __name__ == "__main__":
    logging.disable()
    with TemporaryDirectory() as where:
        for outcome, times in sorted(strike(Path(where), int(sys.argv[1])).items()):
            print(f"{times:5d}  {outcome}")
