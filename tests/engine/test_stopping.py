"""Leaving early: whoever asks, the round is finished, a checkpoint is there, and going on gives the same bits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

import hpcfl
from helpers import faults
from helpers.checkpoints import save
from helpers.recorded import restated
from helpers.runs import after_each_round
from hpcfl import store
from hpcfl.base.errors import Interrupted, Stopped, UsageError
from hpcfl.commands.cli import carry_out, main
from hpcfl.engine import loop, stopping
from hpcfl.engine.checkpointing import Saver
from hpcfl.engine.hangs import Moves
from hpcfl.engine.profile import Phases
from hpcfl.engine.record import Record
from hpcfl.launch.request import resume_request, run_request
from hpcfl.launch.run import launch
from hpcfl.store import atomic
from hpcfl.testing.runs import play, same, table, toml

ROUNDS = 6
EVERY = 4  # rounds between checkpoints
SIGNALS = {name: signal.Signals[f"SIG{name}"] for name in stopping.NAMES}


def small(**more: Any) -> dict[str, Any]:
    """A run with personal state, so that a resumed one must find it again."""
    often = {"evaluate": {"every": 1}, "checkpoint": {"every": EVERY, "keep": 9}}
    return table("salf", "mlp", batched=True, rounds=ROUNDS, **often, **more)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Forget what was noted; and do not ignore INT, as what a shell runs in the background does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    stopping.uninstall()
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config to stand in, as a process alone."""
    monkeypatch.chdir(tmp_path)
    for module in ("hpcfl.launch.failure", "hpcfl.mpi.launcher"):
        monkeypatch.setattr(f"{module}.launched", lambda: False)
    monkeypatch.setattr(stopping, "LOOK_SECONDS", 0.0)
    toml(small(), tmp_path / "small.toml")
    return tmp_path


def once_told(monkeypatch: pytest.MonkeyPatch, round_: int, act: Callable[[], Any]) -> None:
    """Do something when a round has been told of: it is over then, so that the next one is the last."""
    after_each_round(monkeypatch, lambda done, _: act() if done == round_ else None)


def run(*more: str) -> int:
    return main(["run", "small.toml", "--out", "one", *more])


def whole(folder: Path) -> Path:
    """The same run when nobody disturbs it."""
    assert main(["run", str(folder / "small.toml"), "--out", "whole", "--quiet"]) == 0
    return folder / "whole"


def checkpoints(folder: Path) -> list[int]:
    return [store.load(path).round for path in store.saved(folder)]


# ---- one process


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_stops_a_run_when_its_round_is_over(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS.values()}
    with monkeypatch.context() as patch:
        once_told(patch, 2, lambda: os.kill(os.getpid(), SIGNALS[name]))
        assert run() == 85
    assert {number: signal.getsignal(number) for number in SIGNALS.values()} == before
    said, complained = capfd.readouterr()
    assert complained == ""
    assert [line.split()[1] for line in said.splitlines()[:-1]] == ["1/6", "2/6", "3/6"]
    assert said.splitlines()[-1] == f"stopped after round 3 (signal {name}); hpcfl resume one goes on"
    status = store.read_status(here / "one")
    assert (status.state, status.reason) == ("stopped", f"signal {name}")
    assert checkpoints(here / "one") == [3]
    with h5py.File("one/run.h5") as file:  # any reader: the segment is sealed
        assert file["round"][:].tolist() == [0, 1, 2]
        assert np.isfinite(file["test_loss"][:]).all()
    assert sorted(path.name for path in (here / "one").iterdir()) == [
        "checkpoints",
        "manifest.json",
        "metrics",
        "run.h5",
        "status",
    ]
    assert main(["resume", "one"]) == 0
    same(here / "one", whole(here))


def test_the_command_stops_a_run(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with monkeypatch.context() as patch:
        once_told(patch, 1, lambda: carry_out(["stop", "one"]))
        assert run("--quiet") == 85
    assert capsys.readouterr().out == "stopped after round 2 (hpcfl stop); hpcfl resume one goes on\n"
    assert store.read_status(here / "one").reason == "hpcfl stop"
    assert not (here / "one" / "stop").exists()
    assert main(["run", "small.toml", "--out", "one", "--resume"]) == 0
    same(here / "one", whole(here))


def test_stopped_again_and_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start does one round, whatever else happens to be due after it."""
    monkeypatch.setattr(stopping.Stop, "requested", lambda self: "signal TERM")
    assert run() == 85
    codes = [main(["resume", "one"]) for _ in range(ROUNDS - 1)]
    assert codes == [85] * (ROUNDS - 2) + [0]
    assert checkpoints(here / "one") == [1, 2, 3, 4, 5, 6]
    monkeypatch.undo()
    monkeypatch.chdir(here)
    same(here / "one", whole(here))


def test_a_checkpoint_that_is_due_anyway_is_written_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = Saver.save
    monkeypatch.setattr(Saver, "save", lambda self, now, *a: [written.append(now.round), write(self, now, *a)])
    once_told(monkeypatch, EVERY - 1, lambda: signal.raise_signal(signal.SIGUSR1))
    assert run() == 85
    assert written == [EVERY]


def test_a_signal_before_the_rounds_is_not_lost(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from hpcfl.engine.job import Job

    put_together = Job.of

    def signalled(*given: Any) -> Job:
        signal.raise_signal(signal.SIGUSR1)
        return put_together(*given)

    monkeypatch.setattr(Job, "of", signalled)
    assert run() == 85
    assert "stopped after round 1 (signal USR1)" in capsys.readouterr().out


def test_who_asks_in_the_last_round_gets_a_finished_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> None:
        stopping.request(Path("one"))
        signal.raise_signal(signal.SIGTERM)

    once_told(monkeypatch, ROUNDS - 1, ask)
    assert run() == 0
    assert store.read_status(here / "one").state == "done"
    assert not (here / "one" / "stop").exists()


@pytest.mark.parametrize("start", ["run", "resume"])
def test_what_was_asked_of_an_earlier_start_does_not_stop_a_new_one(
    here: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    if start == "resume":
        with monkeypatch.context() as patch:
            once_told(patch, 1, lambda: signal.raise_signal(signal.SIGINT))
            assert run() == 85
    (here / "one").mkdir(exist_ok=True)
    stopping.request(here / "one")
    assert (run() if start == "run" else main(["resume", "one"])) == 0
    assert not (here / "one" / "stop").exists()


# ---- the command


@pytest.fixture
def one(here: Path) -> Path:
    """The folder of a run that is over."""
    assert run("--set", "rounds=1", "--quiet") == 0
    return here / "one"


def as_if_killed(folder: Path) -> None:
    store.write_status(folder, "running")
    restated(folder, f"pid: {os.getpid()}", "pid: 0")


@pytest.mark.parametrize("state", ["done", "failed", "diverged"])
def test_what_does_not_run_cannot_be_stopped(one: Path, capsys: Any, state: str) -> None:
    store.write_status(one, state)
    store.create(one.with_name("other"), {"config": "{}"})
    store.write_status(one.with_name("other"), "running")
    assert main(["stop", "other", "one"]) == 2
    said, complained = capsys.readouterr()
    assert said == ""
    assert complained == f"hpcfl: 'one' cannot be stopped: expected a running run, this one is {state}\n"
    assert not (one / "stop").exists()
    assert not one.with_name("other").joinpath("stop").exists()  # nobody is asked where not everybody can be


@pytest.mark.parametrize("state", ["stopped", "killed"])
def test_a_job_that_is_queued_again_ends_when_it_starts(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, state: str
) -> None:
    """Not for ever: the next one goes on, by whomever it is started."""
    once_told(monkeypatch, 2, lambda: stopping.request(here / "one"))
    assert run() == 85
    if state == "killed":
        as_if_killed(here / "one")
    capsys.readouterr()
    assert main(["stop", "--wait", "one"]) == 0
    told = f"hpcfl: 'one' is {state}: if its batch job is queued again, that ends when it starts\n"
    assert capsys.readouterr() == ("", told)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert run("--resume") == 85
    told = "'one' was asked to stop before its job was started again: it has not begun; hpcfl resume one goes on"
    assert capsys.readouterr() == ("", f"hpcfl: {told}\n")
    assert store.read_status(here / "one").state == "stopped"
    assert not (here / "one" / "stop").exists()
    assert store.open_run(here / "one").sizes["round"] == 3
    assert main(["resume", "one"]) == 0


@pytest.mark.parametrize(("restarts", "reason"), [("0", "hpcfl stop"), ("1", "signal USR1")])
def test_what_is_not_meant_for_a_job_that_was_queued_again_is_forgotten(
    one: Path, monkeypatch: pytest.MonkeyPatch, restarts: str, reason: str
) -> None:
    """A start of its own, and what a rank has written that was signalled when its job ended."""
    store.write_status(one, "stopped")
    stopping.request(one, reason)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    assert main(["resume", "one", "--rounds", "2", "--quiet"]) == 0
    assert not (one / "stop").exists()


def test_a_script_hears_that_its_run_was_stopped_before(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write_status(one, "stopped")
    stopping.request(one)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.raises(hpcfl.Stopped, match="asked to stop before its job"):
        hpcfl.resume(one, rounds=2)


def test_there_must_be_a_run(here: Path, capsys: Any) -> None:
    assert main(["stop", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("hpcfl: 'nowhere' is no run folder")
    assert main(["stop"]) == 2


@pytest.mark.parametrize(("ends", "code"), [("stopped", 0), ("done", 1), ("failed", 1)])
def test_waiting_for_the_end(one: Path, capsys: Any, ends: str, code: int) -> None:
    store.write_status(one, "running")

    def end() -> None:
        while not (one / "stop").exists():
            pass
        store.write_status(one, ends)

    other = threading.Thread(target=end)
    other.start()
    assert main(["stop", "--wait", "one"]) == code
    other.join()
    told = f"hpcfl: 'one' did not stop: expected it to be stopped, it is {ends}\n" if code else ""
    assert capsys.readouterr().err == told


# ---- the wish


def test_the_file_is_looked_at_now_and_then_and_by_the_server_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("hpcfl.engine.stopping.time.monotonic", lambda: now)
    server, client = stopping.Stop(tmp_path, True), stopping.Stop(tmp_path, False)
    assert server.requested() == ""
    stopping.request(tmp_path, "signal USR1")
    now = 100.19
    assert server.requested() == ""
    now = 100.21
    assert server.requested() == "signal USR1"
    assert client.requested() == ""
    stopping.withdraw(tmp_path)
    assert server.requested() == "signal USR1"  # a wish stays one
    (tmp_path / "stop").touch()
    assert stopping.Stop(tmp_path, True).requested() == "hpcfl stop"


def test_a_folder_that_cannot_be_asked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be asked to stop: stop cannot be written: No such file"):
        stopping.request(tmp_path / "nowhere")


def test_a_run_that_begins_may_clear_a_request_away_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = atomic.sync

    def cleared(path: Path) -> None:
        monkeypatch.setattr(atomic, "sync", sync)
        atomic.clean(tmp_path)
        sync(path)

    monkeypatch.setattr(atomic, "sync", cleared)
    stopping.request(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["stop"]


def test_a_rank_hands_its_signal_on_once(tmp_path: Path) -> None:
    stopping.install()
    stop = stopping.Stop(tmp_path, False)
    stopping.forward(stop, tmp_path)
    assert not (tmp_path / "stop").exists()
    signal.raise_signal(signal.SIGTERM)
    stopping.forward(stop, tmp_path)
    assert (tmp_path / "stop").read_text() == "signal TERM\n"
    stopping.withdraw(tmp_path)
    stopping.forward(stop, tmp_path)
    assert not (tmp_path / "stop").exists()


def test_a_signal_is_handed_on_when_the_disk_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    stop, path = stopping.Stop(tmp_path / "run", False), tmp_path / "run" / "stop"
    monkeypatch.setattr(stopping, "_signal", "USR1")
    monkeypatch.setattr(stopping, "LOOK_SECONDS", 0.0)
    for _ in range(3):
        stopping.forward(stop, tmp_path / "run")
    line = f"'{path.parent}' cannot be asked to stop: stop cannot be written: No such file or directory; trying again"
    assert capsys.readouterr().err == f"hpcfl: warning: {line}\n"
    path.parent.mkdir()
    stopping.forward(stop, tmp_path / "run")
    assert (path.read_text(), stop.forwarded) == ("signal USR1\n", True)


def test_wishes_as_numbers_and_back() -> None:
    assert [stopping.encode(wish) for wish in ("", "signal USR1", "hpcfl stop", "whatever")] == [0, 10, -1, -1]
    assert stopping.decode(np.zeros(3)) == ""
    assert stopping.decode(np.array([0.0, 0.0, 15.0])) == "signal TERM on rank 2"
    assert stopping.decode(np.array([-1.0, 2.0])) == "hpcfl stop"


def test_the_first_signal_counts_and_an_impatient_user_is_heard(tmp_path: Path, monkeypatch: Any) -> None:
    stop = stopping.Stop(tmp_path, True)
    stopping.install()
    for name in ("USR1", "INT", "TERM", "TERM"):  # schedulers say it several times at once
        signal.raise_signal(SIGNALS[name])
        assert stop.requested() == "signal USR1"
    monkeypatch.setattr(stopping, "REPEAT_SECONDS", -1.0)
    signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    again: list[int] = []
    monkeypatch.setattr("hpcfl.engine.stopping.signal.raise_signal", again.append)
    os.kill(os.getpid(), signal.SIGTERM)
    assert again == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    stopping.uninstall()
    assert stop.requested() == ""


def test_whoever_has_reacted_is_not_ended_a_second_later(monkeypatch: Any) -> None:
    """A thread listens for a main thread that does not react; when it gets Python's lock, that one may have."""
    ended: list[int] = []
    for name, value in {"REPEAT_SECONDS": -1.0, "REACT_SECONDS": 0.2, "os._exit": ended.append}.items():
        monkeypatch.setattr(f"hpcfl.engine.stopping.{name}", value)
    stopping.install()
    for _ in range(3):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.signal(signal.SIGINT, stopping._note)
        time.sleep(0.1)  # the thread reads them one by one
    time.sleep(0.4)
    assert not ended
    signal.signal(signal.SIGINT, lambda *_: None)  # as if the main thread did not come back to Python
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.1)
    time.sleep(0.4)
    stopping.uninstall()
    assert ended[:1] == [128 + signal.SIGINT]


def test_what_was_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        stopping.install()
        signal.raise_signal(signal.SIGUSR1)
        assert stopping.Stop(tmp_path, False).requested() == ""
        stopping.uninstall()
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_nothing_is_installed_twice_nor_elsewhere_than_in_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    elsewhere = threading.Thread(target=stopping.install)
    elsewhere.start()
    elsewhere.join()
    assert signal.getsignal(signal.SIGUSR1) == before
    stopping.install()
    stopping.install()
    assert signal.getsignal(signal.SIGUSR1) != before
    stopping.disregard()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    stopping.uninstall()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_slow_checkpoint_is_not_visible_while_it_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    slept: list[tuple[float, list[int]]] = []
    faults.install("checkpoint-seconds:0.25", monkeypatch.setattr)
    monkeypatch.setattr("helpers.faults.time.sleep", lambda seconds: slept.append((seconds, checkpoints(tmp_path))))
    personal = [([0], {"m": np.ones((1, 2))})]
    for round_ in (1, 2):
        save(tmp_path, round_, {"w": np.ones(2)}, personal, {}, keep=5)
    store.write_status(tmp_path, "running")
    assert slept == [(0.25, []), (0.25, [1])]
    assert checkpoints(tmp_path) == [1, 2]


# ---- any number of ranks


def stopped(world: Any, folder: Path) -> Stopped:
    """Run on all ranks, one of which wishes to stop: all leave after the same round, whose state is saved."""
    if world.rank == 0:
        toml(small(), folder / "small.toml")
    world.meet()
    with pytest.raises(Stopped) as caught:
        launch(lambda: run_request(str(folder / "small.toml"), (), folder / "run", None, quiet=True), world.comm)
    world.meet()
    assert checkpoints(folder / "run") == [caught.value.round]
    status = store.read_status(folder / "run")
    assert status.state == "stopped"
    if world.rank == 0:
        assert status.reason == caught.value.reason
    world.meet()
    return caught.value


@pytest.mark.mpi
def test_one_rank_is_signalled_and_all_stop(world: Any, shared_dir: Path) -> None:
    whose = world.size - 1
    if world.rank == whose:
        stopping.install()
        signal.raise_signal(signal.SIGUSR1)
    early = stopped(world, shared_dir)
    assert early.round == 1
    assert early.reason == ("signal USR1" if world.rank == whose else f"signal USR1 on rank {whose}")


@pytest.mark.mpi
def test_a_file_stops_all_ranks(world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "LOOK_SECONDS", 0.0)
    once_told(monkeypatch, 1, lambda: stopping.request(shared_dir / "run"))
    early = stopped(world, shared_dir)
    assert (early.round, early.reason) == (2, "hpcfl stop")


@pytest.mark.mpi
def test_ranks_that_wish_at_different_times_stop_at_the_first_and_go_on(world: Any, shared_dir: Path) -> None:
    """The last rank wishes from round 3 on, the one before it from round 4 on, and so forth."""
    rounds = 0

    def requested(self: stopping.Stop) -> str:
        nonlocal rounds
        rounds += 1
        return "signal TERM" if rounds >= 2 + world.size - world.rank else ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stopping.Stop, "requested", requested)
        early = stopped(world, shared_dir)
    whose = world.size - 1
    assert early.round == 3
    assert early.reason == ("signal TERM" if world.rank == whose else f"signal TERM on rank {whose}")
    launch(lambda: resume_request(shared_dir / "run", None, quiet=True), world.comm)
    single = play(world, small(), shared_dir / "single", None)
    if world.rank == 0:
        same(shared_dir / "run", single)


@pytest.mark.mpi
def test_what_ranks_agree_on_is_the_same_everywhere(world: Any) -> None:
    from hpcfl.mpi.transport import Transport

    if world.comm is None:
        transport: Any = Transport()
    else:
        from hpcfl.mpi.collective import Collective

        transport = Collective(world.comm)
    own = np.zeros((2, world.size))
    own[:, world.rank] = world.rank + 1, 10.5
    expected = [[rank + 1 for rank in range(world.size)], [10.5] * world.size]
    np.testing.assert_array_equal(transport.agree(own), expected)
    transport.leave()


def test_what_happened_in_a_round_that_came_to_no_end_is_on_record() -> None:
    """Whose state went back to an earlier one there begins with that after the stop."""
    went = [("rehosted", 5, "at rank 2 in place of rank 1, with the state after round 3")]
    logged: list[Any] = []

    class Waiting:
        phases, serves = Phases(), True

        def release(self, *_: Any) -> bool:
            return False

        def exchange(self, *_: Any) -> Any:
            raise Interrupted("hpcfl stop")

        def together(self, record: Record, reason: str) -> str:
            record.events += went
            return reason

    config = SimpleNamespace(rounds=9)
    job: Any = SimpleNamespace(config=config, moves=Moves(), task=SimpleNamespace(oracle_calls=np.zeros(1)))
    recorder: Any = SimpleNamespace(log=lambda round_, events: logged.append((round_, events)))
    saver: Any = SimpleNamespace(saved=4, save=lambda now, scores: logged.append("saved"))
    with pytest.raises(Stopped):
        loop.run(job, Waiting(), recorder, SimpleNamespace(round=5), SimpleNamespace(), saver)  # type: ignore[arg-type]
    assert logged == [(5, went), "saved"]


@pytest.mark.parametrize("restarts", ["SLURM_RESTART_COUNT", "HPCFL_RESTARTED"])
def test_a_job_that_waited_to_start_again_was_asked(
    restarts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping.request(tmp_path)
    assert not stopping.waits(tmp_path)  # the first start of a job goes on with what another one left
    monkeypatch.setenv(restarts, "1")
    assert stopping.waits(tmp_path)
