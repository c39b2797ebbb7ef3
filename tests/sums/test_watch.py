"""A run that learns nothing ends as diverged, with the reason; what may become of one that does is told of once."""

from __future__ import annotations

from math import inf, log, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcfl import store
from hpcfl.base.errors import Diverged
from hpcfl.commands.show import remarks, summary
from hpcfl.sums.guard import VOID_ROUNDS, Watch
from hpcfl.testing.runs import play, table

CHANCE = log(10)
OFTEN = {"every": 1, "last": 1}
WALL = {"clock": "wall", "speed": {"model": "none"}, "participation": {"close": "all"}, "batch_clients": False}


def small(**more: Any) -> dict[str, Any]:
    return table("fedavg", "mlp", True, **{"rounds": 6, "evaluate": OFTEN, **more})


def ended(run: Path) -> str:
    data = store.open_run(run)
    assert data.attrs["status"] == "diverged"
    return str(data.attrs["reason"])


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let losses run that would be refused before round 0: what they do may come later too."""
    monkeypatch.setattr("hpcfl.launch.run.tried", lambda *_: None)


# ---- runs


@pytest.mark.mpi
@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(("clock", "method"), [({}, "fedavg"), ({}, "local"), (WALL, "fedavg")])
def test_no_gradient_over_three_evaluations_ends_a_run(
    world: Any, shared_dir: Path, clock: dict[str, Any], method: str
) -> None:
    """Of `local` nothing is shared: its tests show that nothing has moved, from the second one on."""
    if clock and world.size == 1:
        pytest.skip("real time needs two ranks")
    values = small(algorithm={"name": method}, task={"loss": "helpers.losses:blind"}, **clock)
    with pytest.raises(Diverged) as caught:
        play(world, values, shared_dir / "run", world.comm)
    assert caught.value.code == 1
    if world.rank == 0:
        last = 2 + (method == "local")
        assert ended(shared_dir / "run").startswith(f"round {last}: nothing has moved over 3 evaluations, as where all")
        assert store.open_run(shared_dir / "run").sizes["round"] == last + 1


@pytest.mark.mpi
def test_rounds_that_are_all_void_end_a_run(world: Any, shared_dir: Path) -> None:
    late = {"participation": {"close": "deadline", "deadline": 1e-9}, "speed": {"model": "exponential"}}
    with pytest.raises(Diverged):
        play(world, small(**late, rounds=3), shared_dir / "run", world.comm)
    if world.rank == 0:
        seconds = store.open_run(shared_dir / "run")["visit_seconds"][-1].min().item()
        late = f"; this one closed after 1e-09 s, and its fastest visit takes {seconds:.3g} s"
        assert ended(shared_dir / "run") == f"round 2: no visit counted in any round{late}"


@pytest.mark.usefixtures("untried")
def test_a_loss_that_is_never_known_ends_a_run(solo: Any, tmp_path: Path) -> None:
    """All visits are rejected, in each round, which does not end a run by itself where `guard.most` is 1."""
    poor = small(task={"loss": "helpers.losses:unknown"}, guard={"most": 1.0}, rounds=3)
    with pytest.raises(Diverged, match="no visit counted in any round"):
        play(solo, poor, tmp_path / "run", None)
    assert np.isnan(store.open_run(tmp_path / "run")["loss"].values).all()


def test_outputs_that_are_never_finite_end_a_run(solo: Any, tmp_path: Path) -> None:
    """Losses are finite in training, and so are all parameters."""
    with pytest.raises(Diverged, match="round 0: no output of any model is finite"):
        play(solo, small() | {"model": {"name": "helpers.modules:Mute"}}, tmp_path / "run", None)
    assert np.isfinite(store.open_run(tmp_path / "run")["loss"].values).all()


def test_a_test_loss_that_is_not_finite_is_told_of_once(
    solo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Quiet or not; the outputs are finite, so the run goes on."""
    run = play(solo, small(task={"loss": "helpers.losses:endless"}, rounds=3), tmp_path / "run", None)
    warned = [line for line in capsys.readouterr().err.splitlines() if "test losses are not finite" in line]
    row = summary(run)
    assert (len(warned), row["status"]) == (1, "done")
    assert list(remarks([row])) == ["run: visits: 12 counted, 3 late", f"run: {warned[0].removeprefix('hpcfl: ')}"]


def test_void_rounds_in_a_row_are_told_of_once(solo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = {"close": "deadline", "deadline": [[0, 1e9], [1, 1e-9]]}
    rare = small(rounds=VOID_ROUNDS + 4, evaluate={"every": 7}, participation=rules, speed={"model": "exponential"})
    run = play(solo, rare, tmp_path / "run", None)
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hpcfl: warning: void")]
    assert warned == ["hpcfl: warning: void: no visit counted in 10 rounds in a row, 1 … 10"]
    assert summary(run)["warnings"] == {"void": "no visit counted in 10 rounds in a row, 1 … 10"}


# ---- what is made of the numbers


def seen(watch: Watch, losses: list[float], tests: list[float] | None = None, moved: bool = True) -> list[str]:
    """Let it see a round and a test for each loss; return what it says of them."""
    said = []
    for number, (loss, test) in enumerate(zip(losses, tests or losses)):
        watch.saw(number, True, True, loss, moved)
        tested = np.array([test, test, nan])
        fault, told = watch.tested(tested, test, np.array([1.0, 1.0, nan]), True, CHANCE, number == len(losses) - 1)
        said.append(fault or " ".join(told))
    return said


def test_a_loss_that_is_back_at_chance_is_told_of() -> None:
    assert seen(Watch(), [2.3, 1.0, 0.5, 2.31, 2.3, 2.3]) == ["", "", "", "", "", "guessing"]
    assert seen(Watch(), [2.3, 1.0, 2.31, 2.3, 2.0]) == [""] * 5  # one that recovers
    assert seen(Watch(), [2.3, 2.31, 2.29, 2.3, 2.3]) == [""] * 5  # one that has not begun to learn
    assert seen(Watch(), [1.0, 2.4])[-1] == "guessing"  # at the end nothing more will come
    assert seen(Watch(), [1.0, 2.4, 2.4, 2.4], [1.0, 1.1, 1.2, 1.1]) == [""] * 4  # visits of one label each
    assert seen(Watch(), [1.0, 0.4, 0.1, 0.1], [1.0, 2.4, 2.9, 3.5]) == [""] * 4  # it fits the training data too well


def test_what_rests_because_it_fits_goes_on() -> None:
    fit, dead = Watch(), Watch()
    for watch in (fit, dead):
        seen(watch, [2.35, 1.0])
    assert seen(fit, [1e-9] * 6, moved=False) == [""] * 6
    assert seen(dead, [CHANCE] * 4, moved=False)[-1].startswith("nothing has moved over 3 evaluations")


def test_a_watch_outlives_a_checkpoint() -> None:
    watch = Watch()
    seen(watch, [2.3, 1.0])
    watch.saw(2, True, False, None, False)
    again = Watch.restored(watch.saved())
    assert repr(again) == repr(watch)
    assert seen(again, [2.3] * 4) == seen(watch, [2.3] * 4)


def test_rounds_that_invite_nobody_are_not_void() -> None:
    watch = Watch(counted=True)
    assert not any(watch.saw(number, False, False, None, True) for number in range(3 * VOID_ROUNDS))
    assert Watch().ended() == ""
    assert Watch(least=inf).saw(0, True, False, None, False) == {}
