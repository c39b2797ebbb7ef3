"""Rounds per stage: what the paper says, and what its contraction says when it is simply carried out."""

from __future__ import annotations

from math import log, sqrt

import numpy as np
import pytest

from hpcfl.schedule.doubling import Stage, Theory, stages, wanted


def harmonic(clients: int) -> np.ndarray:
    """``E[T_(n)]`` of exponential times with rate 1: ``H_N − H_{N−n}``."""
    return np.cumsum(1 / np.arange(clients, 0, -1.0))


def contracted(theory: Theory, stage: int, distance: float) -> float:
    """One round of eq. 199."""
    return distance * sqrt(1 - theory.a) + theory.a / sqrt(2**stage * (1 - theory.a))


@pytest.mark.parametrize(
    ("first", "clients", "sizes"),
    [(10, 100, [10, 20, 40, 80, 100]), (2, 16, [2, 4, 8, 16]), (5, 5, [5]), (3, 4, [3, 4]), (1, 3, [1, 2, 3])],
)
def test_stages_double_up_to_everybody(first, clients, sizes):
    assert [wanted(first, clients, stage) for stage in range(stages(first, clients))] == sizes
    assert wanted(first, clients, 40) == clients


def test_a_stage_comes_back_from_its_numbers():
    stage = Stage(3, 7, 0.123456789, 2)
    assert Stage.of(stage.numbers()) == stage
    assert Stage.of({"sim_seconds": 4.0}) == Stage()


def test_distances_are_those_worked_out_by_hand():
    theory = Theory(harmonic(512), 2, 0.2)
    found = [theory.leaves_at(stage) for stage in range(5)]
    assert found == pytest.approx([2.7, 1.9, 1.4, 0.96, 0.67], rel=0.03)


@pytest.mark.parametrize("communication", [0.0, 1.0])
@pytest.mark.parametrize(
    ("clients", "first", "a", "distance"), [(512, 2, 0.2, 1.0), (64, 4, 0.05, 30.0), (100, 10, 0.25, 5.0)]
)
def test_followed_distances_end_each_stage_in_time(clients, first, a, distance, communication):
    theory = Theory(harmonic(clients), first, a, communication, distance)
    for stage, rounds in enumerate(theory.rounds_with_skips()):
        for _ in range(rounds):
            assert distance > theory.leaves_at(stage)
            distance = contracted(theory, stage, distance)
        assert distance <= theory.leaves_at(stage) * (1 + 1e-12)


def test_twice_as_many_are_worth_it_exactly_where_a_stage_is_left():
    theory = Theory(harmonic(64), 4, 0.1, 0.5)
    for stage in range(3):
        distance = theory.leaves_at(stage)
        speeds = [
            (distance - contracted(theory, number, distance)) / (theory.times[wanted(4, 64, number) - 1] + 0.5)
            for number in (stage, stage + 1)
        ]
        assert speeds[0] == pytest.approx(speeds[1], rel=1e-9)


def test_printed_rounds_are_equation_203():
    theory, times = Theory(harmonic(512), 2, 0.2), harmonic(512)
    found = theory.rounds()
    assert len(found) == stages(2, 512) - 1
    for stage in range(1, len(found)):
        before, now, then = (times[2 * 2**number - 1] for number in (stage - 1, stage, stage + 1))
        exact = 2 * log(sqrt(2) * (then - now) / (now - before)) / log(1 / 0.8)
        assert exact <= found[stage] < exact + 1


def test_times_that_are_all_alike_need_no_doubling():
    theory = Theory(np.ones(8), 2, 0.2)
    assert theory.rounds() == theory.rounds_with_skips() == [0, 0]
