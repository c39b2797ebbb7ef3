"""Checkpoints beside the rounds, a file from each rank; which of them stay; runs that get more rounds."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import faults
from helpers.runs import after_each_round
from hpcfl import store
from hpcfl.base.errors import RunError, UsageError
from hpcfl.commands.check import report
from hpcfl.commands.cli import main
from hpcfl.config import from_table
from hpcfl.engine import checkpointing
from hpcfl.engine.checkpointing import Saver
from hpcfl.launch.failure import refused
from hpcfl.launch.request import resume_request, run_request
from hpcfl.launch.run import launch
from hpcfl.schedule.cadence import Checkpoints
from hpcfl.store import checkpoints
from hpcfl.testing.runs import cut_back, play, same, table, toml

ROUNDS = 6


def values(**more: Any) -> dict[str, Any]:
    """Seven clients with personal state in four chunks, tested and saved after each second round."""
    return table("salf", "mlp", True, **{"rounds": ROUNDS, **more})


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("mpi") is None:
        for module in ("hpcfl.launch.failure", "hpcfl.mpi.launcher"):
            monkeypatch.setattr(f"{module}.launched", lambda: False)


def ranks_with_files(path: Path) -> list[int]:
    return sorted(int(file.stem.removeprefix("rank-")) for file in path.glob("rank-*.h5"))


def hosting(ranks: int) -> list[int]:
    """The ranks that have clients: where there are several, the server has none."""
    return list(range(1, ranks)) or [0]


# ---- a file from each rank


@pytest.mark.mpi
def test_a_run_goes_on_on_another_number_of_ranks(world: Any, shared_dir: Path) -> None:
    """k ranks write, the others of the world and one of them go on: all end as one process does."""
    single = play(world, values(), shared_dir / "single", None)
    for few in range(1, min(world.size, 3) + 1):
        folder, comms = shared_dir / f"by-{few}", []
        for least, most in ((0, few), (few - 1, world.size)):
            comm = world.comm.Split(0 if least <= world.rank < most else 1, world.rank)
            comms.append(comm if least <= world.rank < most else None)
        first, second = comms
        if world.rank == 0:
            toml(values(), folder.with_suffix(".toml"))
        world.meet()
        if first is not None:
            launch(partial(run_request, str(folder.with_suffix(".toml")), (), folder, None, quiet=True), first)
        world.meet()
        if world.rank == 0:
            for path in store.saved(folder):
                assert ranks_with_files(path) == hosting(few)
                assert not list(path.glob("rank-*.json"))
            cut_back(folder, 2)
        world.meet()
        if second is not None:
            launch(partial(resume_request, folder, None, quiet=True), second)
        world.meet()
        if world.rank == 0:
            same(folder, single)
            assert ranks_with_files(store.saved(folder)[-1]) == hosting(world.size - few + 1)


@pytest.mark.mpi
def test_ranks_that_see_other_folders_send_their_state(
    world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    mark = checkpointing.mark_of
    blind = [rank for rank in range(world.size) if rank > 0]
    monkeypatch.setattr(
        checkpointing, "mark_of", lambda *given: Path("nowhere") if world.rank in blind else mark(*given)
    )
    folder = play(world, values(), shared_dir / "run", world.comm)
    single = play(world, values(), shared_dir / "single", None)
    if world.rank != 0:
        return
    same(folder, single)
    assert {tuple(ranks_with_files(path)) for path in store.saved(folder)} == {(0,)}
    ranks = ", ".join(f"rank {rank}" for rank in blind)
    line = f"hpcfl: {ranks} cannot see '{folder}': personal state is sent to rank 0 for checkpoints"
    assert capfd.readouterr().err.count(line) == (1 if blind else 0)


def test_what_a_kill_leaves_between_two_files_is_passed_over_and_swept_away(solo: Any, tmp_path: Path) -> None:
    whole = play(solo, values(), tmp_path / "whole", None)
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    cut_back(folder, 2)
    two, four = (whole / "checkpoints" / name for name in ("round-000002", "round-000004"))
    torn = folder / "checkpoints" / ".tmp-123-round-000004"
    torn.mkdir()
    shutil.copy(four / "server.h5", torn)
    assert store.latest(folder) == folder / "checkpoints" / two.name
    assert main(["resume", str(folder), "--quiet"]) == 0
    same(folder, whole)
    assert [path.name for path in store.saved(folder)] == [path.name for path in store.saved(whole)]
    assert not list((folder / "checkpoints").glob(".tmp-*"))


# ---- a rank that cannot write


def test_a_file_that_cannot_be_written_ends_the_run_and_the_one_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    toml(values(checkpoint={"every": 2, "keep": 1}), tmp_path / "my.toml")
    write = checkpoints.write_rank

    def refuses(folder: Path, rank: int, personal: Any) -> None:
        if folder.name.endswith("4"):
            raise PermissionError(errno.EACCES, "no", str(folder / "rank-0000.h5"))
        write(folder, rank, personal)

    monkeypatch.setattr(store, "write_rank", refuses)
    assert main(["run", "my.toml", "--out", "run", "--quiet"]) == 1
    file, why = "run/checkpoints/round-000004/rank-0000.h5", os.strerror(errno.EACCES)
    safe = "all rounds reported are safe, and the state after 2 of them: hpcfl resume run goes on"
    assert capsys.readouterr().err == f"hpcfl: '{file}' cannot be written: {why}; {safe}\n"
    assert store.read_status(Path("run")).state == "failed"
    assert [path.name for path in store.saved(Path("run"))] == ["round-000002"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert main(["resume", "run", "--quiet"]) == 0
    assert [path.name for path in store.saved(Path("run"))] == ["round-000006"]


def test_whatever_the_disk_says_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "checkpoints" / ".tmp-77-round-000004" / "rank-0002.h5"
    for kind in (store.WriteError, OSError):
        error = refused(tmp_path, kind(errno.EKEYEXPIRED, "no", str(file)))
        assert isinstance(error, RunError)
        assert str(error).startswith(f"'{tmp_path}/checkpoints/round-000004/rank-0002.h5' cannot be written: ")
    assert refused(tmp_path, OSError(errno.EACCES, "no", "/data/images.h5")) is None


# ---- beside the rounds


def test_rounds_go_on_while_a_checkpoint_is_written(solo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is held up until the next round is told of; it holds the state of before that round."""
    plain = play(solo, values(), tmp_path / "plain", None)
    told, held = threading.Event(), []
    faults.before_personal(lambda: held.append(told.wait(60)), monkeypatch.setattr)
    after_each_round(monkeypatch, lambda done, _: told.set() if done == 3 else None)
    run = play(solo, values(), tmp_path / "run", None)
    assert held == [True] * 3
    same(run, plain)
    for one, other in zip(store.saved(run), store.saved(plain), strict=True):
        mine, theirs = store.load(one), store.load(other)
        assert mine.clock["sim_seconds"] == theirs.clock["sim_seconds"]
        for left, right in ((mine.shared, theirs.shared), *zip(*([p[1] for p in x.personal] for x in (mine, theirs)))):
            assert all(np.array_equal(left[name], right[name]) for name in left)


def test_what_checkpoints_cost_is_recorded(solo: Any, tmp_path: Path) -> None:
    run = play(solo, values(rounds=5, checkpoint={"every": 2, "keep": 9}), tmp_path / "run", None)
    data = store.open_run(run)
    listed = [path.iterdir() for path in store.saved(run)]
    sizes = [sum(file.stat().st_size for file in files if file.name != "manifest.json") for files in listed]
    assert len(sizes) == 3
    found = data["checkpoint_bytes"].values
    told = found[found > 0].tolist()  # the first is there before the second is begun; the end comes after the last row
    assert told in (sizes[:1], sizes[:2], [sum(sizes[:2])])
    assert np.array_equal(data["checkpoint_seconds"].values > 0, found > 0)
    assert (data["checkpoint_wait_seconds"].values > 0).sum() >= 2


def test_a_row_tells_of_all_checkpoints_since_the_last(
    solo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ends while the second waits for it to begin, which is done before the next row."""
    finish, look, free = Saver.finish, Saver.look, threading.Event()

    def finished(self: Saver) -> None:
        free.set()
        finish(self)

    def looked(self: Saver) -> dict[str, float]:
        if self.saved == 4 and self.under_way is not None:
            wait([self.under_way])
        return look(self)

    faults.before_personal(lambda: free.wait(60), monkeypatch.setattr)
    after_each_round(monkeypatch, lambda done, _: monkeypatch.setattr(Saver, "finish", finished) if done == 4 else None)
    monkeypatch.setattr(Saver, "look", looked)
    run = play(solo, values(rounds=5, checkpoint={"every": 2, "keep": 9}), tmp_path / "run", None)
    first, second, _ = (sum(file.stat().st_size for file in path.glob("*.h5")) for path in store.saved(run))
    notes = sum((path / checkpoints.BESIDE).stat().st_size for path in store.saved(run)[:2])
    assert store.open_run(run)["checkpoint_bytes"].values.tolist() == [0, 0, 0, 0, first + second + notes]


def test_a_check_counts_the_copies() -> None:
    config = from_table(values())
    lines = dict(line.split(maxsplit=1) for line in report(config, config.check(None), None, 1) if "memory" in line)
    assert " of them copies for checkpoints" in lines["memory"]


# ---- which of them stay


@pytest.mark.parametrize(
    ("keys", "stay"),
    [
        ({"keep": 2}, [8, 10]),
        ({"keep": 1, "keep_every": 4}, [4, 8, 10]),
        ({"keep": 1, "keep_best": "accuracy"}, [6, 10]),
        ({"keep": 1, "keep_best": "accuracy", "best": "smallest"}, [2, 10]),
        ({"keep": 1, "keep_best": "test_loss"}, [2, 10]),
        ({"keep": 3, "keep_every": 6, "keep_best": "accuracy"}, [6, 8, 10]),
    ],
)
def test_the_newest_the_milestones_and_the_best_stay(keys: dict[str, Any], stay: list[int]) -> None:
    """Each time all that are there are judged; the figures of 4 and 10 are not known, those of 6 and 8 are equal."""
    rule = Checkpoints(every=2, **keys)
    figures = {2: 0.25, 4: None, 6: 0.5, 8: 0.5, 10: None}
    name, there = rule.keep_best or "accuracy", {}
    for done, value in figures.items():
        there[done] = rule.score({} if value is None else {name: value - (0.125 if done == 8 else 0)})
        there = {each: there[each] for each in rule.kept(there)}
    assert sorted(there) == stay


def test_where_there_is_no_global_test_set_the_mean_of_the_clients_decides() -> None:
    rule = Checkpoints(keep_best="accuracy")
    assert rule.score({"client_accuracy": np.array([0.5, np.nan, 0.25])}) == 0.375
    assert np.isnan(rule.score({"client_accuracy": np.array([np.nan])}))
    assert Checkpoints(keep_best="test_loss").score({"test_loss": 2.0, "client_test_loss": np.zeros(1)}) == -2.0


def test_none_goes_before_the_newer_one_is_there(solo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, remove = [], checkpoints._remove

    def watched(path: Path) -> None:
        newest = store.latest(path.parents[1])
        gone.append((path.name[-1], newest.name[-1] if newest else None))
        remove(path)

    monkeypatch.setattr(checkpoints, "_remove", watched)
    keys = {"every": 1, "keep": 1, "keep_every": 3, "keep_best": "test_loss"}
    run = play(solo, values(evaluate={"every": 1}, checkpoint=keys), tmp_path / "run", None)
    losses = store.open_run(run)["test_loss"].values
    stay = {3, 6, 1 + int(np.argmin(losses))}
    assert {int(path.name[-1]) for path in store.saved(run)} == stay
    assert len(gone) == ROUNDS - len(stay)
    assert all(int(newest) > int(old) for old, newest in gone)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"keep_every": 3},
            "checkpoint.keep_every: expected a multiple of checkpoint.every = 2, got 3; did you mean",
        ),
        ({"keep_best": "acuracy"}, "checkpoint.keep_best: no test gives 'acuracy'; did you mean 'accuracy'?"),
        ({"keep_best": "objective"}, "checkpoint.keep_best: no test gives 'objective'"),
        ({"every": 3, "keep_best": "accuracy"}, "checkpoint.every: expected a multiple of evaluate.every = 2, as "),
        ({"best": "largest"}, "checkpoint.best = 'largest' has no meaning without checkpoint.keep_best"),
    ],
)
def test_keys_that_do_not_go_together(more: dict[str, Any], said: str) -> None:
    config = from_table(values(checkpoint={"every": 2, **more}))
    with pytest.raises(UsageError) as caught:
        config.check_values()
    assert str(caught.value).startswith(said)


# ---- more rounds


@pytest.mark.mpi
@pytest.mark.parametrize("finished", [True, False])
def test_more_rounds_are_those_of_a_longer_run(world: Any, shared_dir: Path, finished: bool) -> None:
    """Alone and on ranks, a finished run and one that was stopped; on ranks it is extended by them, then alone."""
    often = {"evaluate": {"every": 1}, "checkpoint": {"every": 3, "keep": 9}}
    whole = play(world, values(rounds=7, **often), shared_dir / "whole", None)
    run = play(world, values(rounds=4, **often), shared_dir / "run", world.comm)
    if world.rank == 0 and not finished:
        cut_back(run, 3)
    world.meet()
    launch(lambda: resume_request(run, None, quiet=True, rounds=6), world.comm)
    world.meet()
    if world.rank != 0:
        return
    launch(lambda: resume_request(run, None, quiet=True, rounds=7), None)
    same(run, whole)
    attributes = store.run_attributes(run)
    assert json.loads(attributes["config"])["rounds"] == 7
    changes = [(each["from"], each["to"], each["after_round"]) for each in json.loads(attributes["history"])]
    assert changes == [(4, 6, 4 if finished else 3), (6, 7, 6)]
    assert store.open_run(run).attrs["status"] == "done"


def test_but_for_evaluations_at_what_was_the_end(solo: Any, tmp_path: Path) -> None:
    whole = play(solo, values(rounds=7, evaluate={"every": 7, "last": 1}), tmp_path / "whole", None)
    run = play(solo, values(rounds=3, evaluate={"every": 7, "last": 1}), tmp_path / "run", None)
    assert main(["resume", str(run), "--rounds", "7", "--quiet"]) == 0
    left, right = store.open_run(run), store.open_run(whole)
    assert np.flatnonzero(~np.isnan(left["accuracy"].values)).tolist() == [2, 6]
    assert np.flatnonzero(~np.isnan(right["accuracy"].values)).tolist() == [6]
    for name in ("loss", "depth", "sim_seconds", "layer_weight"):
        np.testing.assert_array_equal(left[name].values, right[name].values)
    one, other = (store.load(store.saved(folder)[-1]).shared for folder in (run, whole))
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_rounds_that_cannot_be(solo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = play(solo, values(rounds=4, evaluate={"every": 4, "last": 2}), tmp_path / "run", None)
    before = store.run_attributes(run)
    capsys.readouterr()

    def said(rounds: int, code: int = 2) -> str:
        assert main(["resume", str(run), "--rounds", str(rounds), "--quiet"]) == code
        heard = capsys.readouterr()
        return heard.err + heard.out

    assert said(3) == f"hpcfl: --rounds 3: '{run}': expected more than the 4 rounds that are done; did you mean 5?\n"
    assert said(4, 0) == f"'{run}' is done already\n"
    replay = {"speed": {"model": "trace", "run": str(run)}, "rounds": 3, "participation": {}}
    run = play(solo, values(**replay), tmp_path / "replay", None)
    capsys.readouterr()
    assert "did you mean rounds = 4?" in said(5)
    run = play(solo, values(rounds=9, evaluate={"every": 9, "last": 2}), tmp_path / "longer", None)
    cut_back(run, 4)
    assert said(5) == (
        "hpcfl: --rounds 5: evaluate.last = 2: a run of 5 rounds is evaluated after round 4, this one was not: "
        "expected at least 6\n"
    )
    assert main(["resume", str(run), "--rounds", "6", "--quiet"]) == 0
    assert store.open_run(run).sizes["round"] == 6
    cut_back(run, 4)
    assert main(["resume", str(run), "--rounds", "9", "--quiet"]) == 0
    cut_back(run, 6)  # the fifth and the sixth were done in a run of 9 rounds
    assert "is evaluated after round 6, this one was not" in said(7)
    assert main(["resume", str(run), "--rounds", "8", "--quiet"]) == 0
    assert store.run_attributes(tmp_path / "run") == before
