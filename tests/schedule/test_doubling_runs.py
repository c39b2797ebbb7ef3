"""Doubling participant sets in whole runs: who is waited for, round by round, and what time that takes."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.toys import full_batch, plain
from hpcfl import store
from hpcfl.base.errors import UsageError
from hpcfl.commands.check import report
from hpcfl.commands.show import summary
from hpcfl.config import from_table
from hpcfl.engine.job import Job
from hpcfl.engine.record import Record
from hpcfl.engine.simulated import Simulated
from hpcfl.mpi.transport import Transport
from hpcfl.schedule.doubling import Doubling, Stage, Theory
from hpcfl.sums.message import ExactSums
from hpcfl.testing.runs import play, recorded, resume, same, table
from realtime.test_rounds import is_exact

FIRST = {"close": "first", "first": 1}
POOL = {**FIRST, "invite": "uniform", "size": 5}
WHEN: dict[str, dict[str, Any]] = {
    "rounds": {"when": "rounds", "rounds": 2},
    "theory": {"when": "theory", "contraction": 0.25, "distance": 3.0},
    "skips": {"when": "theory", "contraction": 0.25, "distance": 3.0, "skip": True},
    "plateau": {"when": "plateau", "patience": 1, "tolerance": 0.05},
    "gradient": {"when": "gradient", "threshold": 40.0},
}


def staged(when: str, **more: Any) -> dict[str, Any]:
    """Return a run of 7 clients, the first one alone at first."""
    plain = {"participation": FIRST, "doubling": WHEN[when], "rounds": 10, "evaluate": {"every": 5}}
    return table("fedavg", "mlp", False, **{**plain, **more})


def counted(run: Path) -> list[int]:
    return [int(count) for count in (store.open_run(run)["blocks"].values > 0).sum(1)]


def job_of(values: dict[str, Any]) -> Job:
    config = from_table(values)
    config.check(None)
    return Job.of(config, None, 1)


# ---- time


@pytest.mark.parametrize("communication", [0.0, 10.0])
@pytest.mark.parametrize(
    ("rules", "sizes"), [(FIRST, [1, 1, 2, 2, 4, 4, 7, 7, 7, 7]), (POOL, [1, 1, 2, 2, 4, 4, 5, 5, 5, 5])]
)
def test_time_is_the_sum_of_the_slowest_of_the_first_ones(
    solo: Any, tmp_path: Path, rules: dict[str, Any], sizes: list[int], communication: float
) -> None:
    speed = {"model": "exponential", "communication": communication}
    values = staged("rounds", participation=rules, speed=speed)
    data = store.open_run(play(solo, values, tmp_path / "run", None))
    paces = from_table(values).speed.paces(3, 7)
    total = 0.0
    for round_, size in enumerate(sizes):
        pool = np.flatnonzero(data["cohort"].values[round_])
        fastest = pool[np.argsort(paces[pool])[:size]]
        assert set(np.flatnonzero(data["blocks"].values[round_])) == set(fastest)
        total += paces[fastest].max() + communication
        assert data["sim_seconds"].values[round_] == total
    assert data["stage"].values.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3]


UNEQUAL = {"name": "digits", "sizes": "log-normal", "spread": 1.0}


def first_by_samples(paces: np.ndarray, sizes: np.ndarray, pool: np.ndarray, stage: int) -> set[int]:
    """Return the fastest of the pool that hold 2^r mean clients' samples together."""
    chosen: set[int] = set()
    for client in pool[np.argsort(paces[pool])]:
        if sum(sizes[list(chosen)]) >= 2**stage * sizes.mean():
            break
        chosen.add(int(client))
    return chosen


@pytest.mark.parametrize("rules", [FIRST, POOL])
def test_samples_double_where_clients_are_unequal(solo: Any, tmp_path: Path, rules: dict[str, Any]) -> None:
    values = staged("rounds", participation=rules, data=UNEQUAL, speed={"model": "exponential"})
    values["doubling"] = {**WHEN["rounds"], "by": "samples"}
    job = job_of(values)
    sizes, paces = job.task.federation.train_sizes, job.config.speed.paces(3, 7)
    assert sizes.max() > 3 * sizes.min()
    data = store.open_run(play(solo, values, tmp_path / "run", None))
    for round_, stage in enumerate([0, 0, 1, 1, 2, 2, 3, 3, 3, 3]):
        pool = np.flatnonzero(data["cohort"].values[round_])
        wanted = first_by_samples(paces, sizes, pool, stage) if stage < 3 else set(pool.tolist())
        assert set(np.flatnonzero(data["blocks"].values[round_])) == wanted


# ---- what ends a stage


@pytest.mark.parametrize("when", WHEN)
def test_participants_double_and_never_become_fewer(solo: Any, tmp_path: Path, when: str) -> None:
    found = counted(play(solo, staged(when, rounds=14), tmp_path / "run", None))
    assert set(found) <= {1, 2, 4, 7}
    assert found == sorted(found)
    assert len(set(found)) > 1


def test_theory_gives_every_stage_its_rounds(solo: Any, tmp_path: Path) -> None:
    values = staged("theory", rounds=30, speed={"model": "exponential", "communication": 0.5})
    times = np.cumsum(1 / np.arange(7, 0, -1.0))
    rounds = Theory(times, 1, 0.25, 0.5, 3.0).rounds()
    assert job_of(values).planner.stage_limits == rounds
    found = counted(play(solo, values, tmp_path / "run", None))
    sizes = [size for size, count in zip([1, 2, 4], rounds) for _ in range(count)]
    assert found == (sizes + [7] * 30)[:30]


def test_a_plateau_ends_after_so_many_rounds_without_a_fall() -> None:
    rule, stage, seen = Doubling(when="plateau", patience=2, tolerance=0.1), Stage(), []
    for signal in (1.0, 0.8, 0.75, -1.0, 0.74, 0.9, 0.85, 0.5, 0.6, 0.5):
        stage = rule.after(stage, [inf, inf], signal)
        seen.append((stage.number, stage.since))
    # 0.75 and 0.74 are no falls of a tenth below 0.8, an unknown loss says nothing; then a stage begins anew
    assert seen == [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0), (1, 1), (1, 0), (1, 1), (2, 0)]


def test_flanp_ends_a_stage_when_the_averaged_gradient_is_small() -> None:
    rule, stage, seen = Doubling(when="gradient", threshold=0.4), Stage(), []
    for signal in (0.5, 0.41, 0.4, 0.3, 0.2, 0.11, 0.05, 0.0):
        stage = rule.after(stage, [inf, inf, inf], signal)
        seen.append(stage.number)
    assert seen == [0, 0, 1, 1, 2, 2, 3, 3]  # 0.4, then a half and a quarter of it; the last stage does not end


def test_the_gradient_is_the_update_over_the_learning_rate() -> None:
    job = job_of(staged("gradient", algorithm={"name": "fedavg", "lr": 0.5}))
    before = job.algorithm.init_server(job.task)
    after = {name: value - 0.5 * 2.0 for name, value in before.items()}
    count = sum(value.numel() for value in before.values())
    sums = ExactSums(job.layout)
    assert job.config.doubling.signal(before, after, sums, 0.5) == -1  # nobody has sent anything
    for name in before:
        sums.add({name: (torch.zeros(1, before[name].numel()), torch.ones(1))})
    assert job.config.doubling.signal(before, after, sums, 0.5) == pytest.approx(4.0 * count, rel=1e-5)


def test_the_gradient_of_one_full_step_is_the_mean_of_all(solo: Any) -> None:
    step = {"name": "fedavg", "epochs": 0, "steps": 1, "batch": 0, "weights": "uniform"}
    values = staged("gradient", algorithm=step, participation={"close": "first", "first": 7})
    job = job_of(values | {"model": {"name": "mlp", "hidden": [8]}})  # without dropout
    now = job.begin(0)
    _, sums = Simulated(job, Transport(), 0).exchange(now, Record.open())
    after = job.algorithm.server(job.task, now.shared, sums)
    net = plain(job.task, now.shared)
    losses = [torch.nn.functional.cross_entropy(net(x), y) for x, y in (full_batch(job.task, i) for i in range(7))]
    gradients = torch.autograd.grad(torch.stack(losses).mean(), list(net.parameters()))
    wanted = sum(float(gradient.double().square().sum()) for gradient in gradients)
    signal = job.config.doubling.signal(now.shared, after, sums, job.algorithm.learning_rate(0))
    assert signal == pytest.approx(wanted, rel=1e-4)


# ---- equalities


def test_with_one_stage_it_is_the_algorithm_itself(solo: Any, tmp_path: Path) -> None:
    """From n0 = N on everybody takes part, as without doubling."""
    staged_ = staged("rounds", participation={"close": "first", "first": 7})
    plain = staged("rounds", participation={"close": "all"}, doubling={"when": "never"})
    same(play(solo, staged_, tmp_path / "staged", None), play(solo, plain, tmp_path / "plain", None))


@pytest.mark.parametrize("when", WHEN)
def test_a_run_goes_on_in_its_stage(solo: Any, tmp_path: Path, when: str) -> None:
    """In the middle of it: how many rounds it has had, and what its loss was, matter for when it ends."""
    values = staged(when, rounds=12, checkpoint={"every": 1, "keep": 12})
    if when == "plateau":
        values["doubling"] = {"when": "plateau", "patience": 3, "tolerance": 0.3}
    run = play(solo, values, tmp_path / "run", None)
    stages = store.open_run(run)["stage"].values
    begun, ends = stages[1:-1] == stages[:-2], stages[1:-1] != stages[2:]
    last = int(np.flatnonzero(begun & ends)[0]) + 1  # the last of several rounds of a stage
    whole = recorded(run), summary(run)["state_sha256"]
    resume(solo, run, last, None)
    again = recorded(run)
    for name, values_ in whole[0].items():
        np.testing.assert_array_equal(again[name], values_, err_msg=name)
    assert summary(run)["state_sha256"] == whole[1]


@pytest.mark.mpi
@pytest.mark.parametrize("when", ["plateau"])
def test_stages_are_the_same_on_any_number_of_ranks(world: Any, shared_dir: Path, when: str) -> None:
    together = play(world, staged(when), shared_dir / "ranks", world.comm)
    single = play(world, staged(when), shared_dir / "single", None)
    if world.rank == 0:
        same(together, single)


@pytest.mark.mpi
@pytest.mark.parametrize(("width", "by"), [(1, "clients"), ("all", "samples")])
def test_in_real_time_a_round_waits_for_so_many(world: Any, shared_dir: Path, width: Any, by: str) -> None:
    if world.size == 1:
        pytest.skip("needs a server and clients")
    values = staged("rounds", clock="wall", speed={"model": "none"}, threads=1, lane_width=width, rounds=8)
    values |= {"data": UNEQUAL, "doubling": {**WHEN["rounds"], "by": by}}
    run = play(world, values, shared_dir / "run", world.comm)
    again = play(
        world,
        {**values, "speed": {"model": "trace", "run": str(run)}, "clock": "simulated"},
        shared_dir / "again",
        None,
    )
    if world.rank == 0:
        data = store.open_run(run)
        assert data["stage"].values.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        sizes = np.ones(7) if by == "clients" else job_of(values | {"clock": "simulated"}).task.federation.train_sizes
        invited, there = ((data[name].values > 0) @ sizes for name in ("cohort", "blocks"))
        wanted = np.ceil(np.array([1, 1, 2, 2, 4, 4, np.inf, np.inf]) * sizes.mean())
        assert (there >= np.minimum(wanted, invited)).all()
        if is_exact(world, width) and by == "clients":
            np.testing.assert_array_equal(there, np.minimum(wanted, invited))
        assert counted(again) == counted(run)


@pytest.mark.parametrize(
    ("when", "line"),
    [
        ("rounds", "1, 2, 4, 7 visits; all but the last take 2, 2, 2 rounds"),
        ("plateau", "1, 2, 4, 7 visits; all but the last take as long as plateau says"),
    ],
)
def test_a_check_says_how_participants_double(when: str, line: str) -> None:
    config = from_table(staged(when))
    lines = list(report(config, config.check(None), None, 1))
    assert f"stages        {line}" in lines
    counts = {"rounds": (2 * (1 + 2 + 4) + 4 * 7) / 10, "plateau": 1}
    assert any(f"{counts[when]:.1f} counted on average" in text for text in lines)


# ---- bad input


@pytest.mark.parametrize(
    ("rules", "line"),
    [
        ({"close": "all"}, r"doubling\.when = 'rounds': expected participation\.close = 'first'"),
        ({"close": "first", "first": 8}, r"participation\.first: expected 1 … 7, got 8; did you mean 7"),
    ],
)
def test_stages_that_cannot_be(rules: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        from_table(staged("rounds", participation=rules)).check(None)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"doubling": {"wen": "rounds"}}, r"doubling\.wen: unknown key; did you mean 'when'"),
        ({"doubling": {"rounds": 0}}, r"doubling\.rounds: expected greater than or equal to 1, got 0"),
        ({"doubling": WHEN["theory"], "speed": {"model": "none"}}, r"doubling\.when = 'theory' needs to know how long"),
        (
            {"doubling": {**WHEN["rounds"], "by": "samples"}, "participation": {**FIRST, "first": 2, "min_clients": 2}},
            r"participation\.min_clients counts visits.* did you mean 1",
        ),
        *[
            ({"algorithm": {"name": name}, "doubling": WHEN["gradient"]}, f"algorithm\\.name = '{name}' shares nothing")
            for name in ("local", "fedhenn")
        ],
    ],
)
def test_keys_that_do_not_go_together(more: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        job_of(staged("rounds", **more))
