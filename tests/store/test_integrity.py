"""A checkpoint is whole or passed over, whatever has happened to its bytes; going on from the one before ends alike."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hpcfl
from helpers.checkpoints import save
from helpers.launcher import alone
from hpcfl import store
from hpcfl.base.errors import RunError
from hpcfl.commands.cli import main
from hpcfl.commands.show import digest, summary
from hpcfl.launch.request import resume_request
from hpcfl.launch.run import launch
from hpcfl.store.checkpoints import damage
from hpcfl.testing.runs import cut_back, play, table

KINDS = ("flipped", "truncated", "zeroed")
BEFORE, NEWEST, ROUNDS = "round-000002", "round-000004", 6
FILES = ("server.h5", "rank-0000.h5", "beside.json", "manifest.json")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("mpi") is not None:
        return
    for module in ("hpcfl.launch.failure", "hpcfl.mpi.launcher"):
        monkeypatch.setattr(f"{module}.launched", lambda: False)


@pytest.fixture(scope="module")
def run(solo: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with personal state that nobody disturbed."""
    values = table("salf", "mlp", batched=True, rounds=ROUNDS)
    return play(solo, values, tmp_path_factory.mktemp("integrity") / "whole", None)


@pytest.fixture
def stopped(run: Path, tmp_path: Path) -> Path:
    """The same run, stopped after its second checkpoint."""
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    cut_back(folder, 4)
    return folder


def damaged(content: bytes, seed: int) -> bytes:
    """Flip some bits, cut the end off, or write zeros over a piece; something is always another."""
    draw, found = np.random.default_rng(seed), bytearray(content)
    kind = KINDS[seed % 3]
    if kind == "truncated":
        return content[: draw.integers(len(content))]
    while bytes(found) == content:
        if kind == "flipped":
            for place in draw.integers(len(content), size=draw.integers(1, 9)):
                found[place] ^= 1 << int(draw.integers(8))
        else:
            place, size = int(draw.integers(len(content))), int(draw.integers(1, 4097))
            found[place : place + size] = bytes(len(found[place : place + size]))
    return bytes(found)


def test_a_damaged_newest_checkpoint_is_passed_over(stopped: Path, caplog: pytest.LogCaptureFixture) -> None:
    newest = stopped / "checkpoints" / NEWEST
    contents = {name: (newest / name).read_bytes() for name in FILES}
    assert store.latest(stopped) == newest
    assert not caplog.messages
    for seed in range(120):
        name = FILES[seed % 7 % 3]
        (newest / name).write_bytes(damaged(contents[name], seed))
        check_passed_over(stopped, newest, caplog)
        (newest / name).write_bytes(contents[name])
    for name in FILES:
        (newest / name).unlink()
        check_passed_over(stopped, newest, caplog)
        (newest / name).write_bytes(contents[name])
    assert store.latest(stopped) == newest


def check_passed_over(folder: Path, newest: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    assert store.latest(folder) == newest.with_name(BEFORE)
    (line,) = caplog.messages
    assert line.startswith(f"checkpoint {newest} cannot be read whole and is passed over: ")
    assert "\n" not in line
    caplog.clear()


@pytest.mark.parametrize("seed", range(6), ids=lambda seed: f"{KINDS[seed % 3]}-{seed}")
def test_a_resumed_run_ends_as_if_nothing_had_happened(run: Path, stopped: Path, seed: int) -> None:
    newest = stopped / "checkpoints" / NEWEST
    file = newest / FILES[seed % 3]
    file.write_bytes(damaged(file.read_bytes(), seed))
    assert main(["resume", str(stopped), "--quiet"]) == 0
    found = summary(stopped)
    assert (found["status"], found["rounds"]) == ("done", ROUNDS)
    assert found["state_sha256"] == summary(run)["state_sha256"]
    assert damage(newest) == ""  # written anew on the way


@pytest.mark.launch
def test_the_damaged_one_is_named_in_one_line(stopped: Path) -> None:
    newest = stopped / "checkpoints" / NEWEST
    file = newest / "server.h5"
    size = cut(file)
    why = f"server.h5: it has {size - 1} bytes instead of {size}"
    line = f"hpcfl: checkpoint {newest} cannot be read whole and is passed over: {why}"
    for words in (["show", str(stopped)], ["resume", str(stopped), "--quiet"]):
        ended = alone([sys.executable, "-m", "hpcfl", *words])
        assert (ended.code, ended.err) == (0, line + "\n")


def cut(file: Path) -> int:
    """Cut the last byte off; return how many there were."""
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    return len(content)


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_where_no_checkpoint_is_whole_nothing_is_done(stopped: Path, capsys: Any, caplog: Any) -> None:
    for path in (stopped / "checkpoints").iterdir():
        cut(path / "server.h5")
    before = files(stopped)
    capsys.readouterr()
    assert main(["resume", str(stopped)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(rf"hpcfl: '{stopped}': none of its checkpoints .*{NEWEST} .* put a copy .*\n", said.err)
    assert main(["adapt", str(stopped)]) in (1, 2)  # this method has nothing to adapt, which is found first
    with pytest.raises(RunError, match=NEWEST):
        hpcfl.open_models(stopped)
    capsys.readouterr()
    assert summary(stopped)["state_sha256"] is None  # what was recorded is shown all the same
    assert capsys.readouterr().err.count("hpcfl: ") == 1
    assert not [line for line in caplog.messages if "passed over" in line]  # the newest alone has a line
    assert files(stopped) == before


def test_without_any_checkpoint_a_run_begins_anew(run: Path, stopped: Path) -> None:
    cut_back(stopped, 0)
    assert store.latest(stopped) is None
    assert main(["resume", str(stopped), "--quiet"]) == 0
    assert summary(stopped)["state_sha256"] == summary(run)["state_sha256"]


def test_models_are_those_of_the_newest_whole_one(stopped: Path, caplog: Any) -> None:
    newest = stopped / "checkpoints" / NEWEST
    cut(newest / "rank-0000.h5")
    assert hpcfl.open_models(stopped).round == 2
    assert caplog.messages[0].startswith(f"checkpoint {newest} cannot be read whole")


def test_one_that_goes_while_it_is_read_is_no_damage(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The run goes on, writes another and deletes the old ones."""
    checkpoints = stopped / "checkpoints"
    for path in checkpoints.iterdir():
        path.rename(path.with_name(f"kept-{path.name}"))
    (checkpoints / BEFORE).mkdir()

    def gone(path: Path) -> str:
        if path.name == BEFORE:
            path.rmdir()
            (checkpoints / f"kept-{NEWEST}").rename(checkpoints / NEWEST)
        return damage(path)

    monkeypatch.setattr("hpcfl.store.checkpoints.damage", gone)
    assert store.latest(stopped) == checkpoints / NEWEST
    assert not caplog.messages


@pytest.mark.mpi
@pytest.mark.parametrize("silent_from", [4, 6])
def test_of_clients_that_do_not_answer_the_last_checkpoint_is_repeated(
    world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch, silent_from: int
) -> None:
    """In real time: that from which the run goes on, not the damaged one, then the one that it has written."""
    if world.size == 1:
        pytest.skip("needs a server and a client")
    from hpcfl.realtime.server import Server

    real = {"clock": "wall", "speed": {"model": "none"}, "participation": {"close": "all"}}
    folder = play(world, table("salf", "mlp", False, rounds=ROUNDS, **real), shared_dir / "run", world.comm)
    two, four, six = (folder / "checkpoints" / name for name in (BEFORE, NEWEST, "round-000006"))
    if world.rank == 0:
        cut(four / "server.h5")
        shutil.rmtree(six)
        store.write_status(folder, "stopped")
    asked, personal = [2], Server.personal

    def answered(self: Server, now: Any) -> Iterator[Any]:
        asked.append(asked[-1] + 2)
        with monkeypatch.context() as silent:
            if asked[-1] >= silent_from:
                silent.setattr(self.lanes, "ask", lambda *_, **__: {})
            yield from personal(self, now)

    monkeypatch.setattr(Server, "personal", answered)
    world.meet()
    launch(lambda: resume_request(folder, None, quiet=True), world.comm)
    if world.rank == 0:
        found = [store.load_personal(path, range(7)) for path in (two, four, six)]
        first, second, third = ({client: digest(state) for client, state in each.items()} for each in found)
        assert len(first) == 7
        assert third == second
        assert (second == first) == (silent_from == 4)


# ---- the file


def test_any_reader_opens_its_files_and_the_manifest_is_that_of_their_bytes(tmp_path: Path) -> None:
    path = save(tmp_path, 7, {"w": np.arange(2.0)}, [([1, 4], {"v": np.ones((2, 3))})], {"s": 1.5}, keep=1)
    with h5py.File(path / "server.h5") as file:
        assert file["shared/w"][:].tolist() == [0.0, 1.0]
    with h5py.File(path / "rank-0000.h5") as file:
        assert file["personal/000/ids"][:].tolist() == [1, 4]
    assert sorted(each.name for each in path.iterdir()) == sorted(FILES)
    listed = json.loads((path / "manifest.json").read_text())["files"]
    for name, entry in listed.items():
        content = (path / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert sorted(listed) == sorted(FILES[:3])
