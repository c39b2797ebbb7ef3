"""The model of what a round costs: cases computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcfl.contrib.network.model import (
    Costs,
    Layout,
    Link,
    Load,
    Prediction,
    Rates,
    fits,
    layout,
    layouts,
    levels,
    look_seconds,
    one_way,
    predict,
    two_levels,
)

HERE = Link(1e-5, Rates(4e9, 2e9), Rates(5e9, 3e9), Rates(5e9, 3e9), Rates(2e9, 1e9))
THERE = Link(1e-4, Rates(1e9, 5e8), Rates(1e9, 8e8), Rates(2e9, 1e9), Rates(5e8, 2.5e8))
COSTS = Costs(HERE, THERE, sent=1e-6, received=2e-6, look=1e-5, request=1e-7, sums=1e9)


@pytest.mark.parametrize(("ranks", "deep"), [(1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4)])
def test_levels_are_those_of_a_binomial_tree(ranks: int, deep: int) -> None:
    assert levels(ranks) == deep  # after k levels 2^k ranks have it, the server one of them


def test_layouts_of_ten_ranks_on_hosts_of_four() -> None:
    # ranks 0-3 on the server's host, 4-7 on another, 8 and 9 on a third
    assert layout(10, 4, 1) == Layout(1, 1, 3, 6, 4)
    assert layout(10, 4, "node") == Layout("node", 4, 1, 2, 3)
    assert layout(10, 4, "all") == Layout("all", 9, 0, 1, 1)
    assert layout(10, 4, 3) == Layout(3, 3, 1, 2, 4)
    assert layout(4, 4, "node") == Layout("node", 3, 1, 0, 0)
    assert layout(3, 1, "node") == Layout("node", 1, 0, 2, 1)
    assert layout(6, 8, 2) == Layout(2, 2, 3, 0, 0)


def test_one_way_to_lanes_of_one_rank() -> None:
    # 2 lanes within: latency 1e-5, 2 · 3 messages of 1e-6, and the larger of 8e6 / 4e9 and 2 · 8e6 / 5e9
    within = layout(3, 3, 1)
    assert one_way(COSTS, within, 8e6, 3, up=False) == pytest.approx(1e-5 + 6e-6 + 3.2e-3)
    # alone a rank's own bandwidth decides
    assert one_way(COSTS, layout(2, 2, 1), 8e6, 3, up=True) == pytest.approx(1e-5 + 6e-6 + 4e-3)
    # 1 within, 4 on each of two hosts, up: server 8e6 / 3e9 + 8 · 8e6 / 1e9 is more than a host's 4 · 8e6 / 8e8
    both = Layout(1, 1, 1, 8, 4)
    assert one_way(COSTS, both, 8e6, 1, up=True) == pytest.approx(1e-4 + 9 * 2e-6 + 8e-3 / 3 + 64e-3)
    slow_hosts = replace(COSTS, between=replace(THERE, host=Rates(1e8, 1e8)))
    assert one_way(slow_hosts, both, 8e6, 1, up=True) == pytest.approx(1e-4 + 9 * 2e-6 + 320e-3)


def test_one_way_to_lanes_of_several_ranks() -> None:
    # two lanes of 3 ranks on other hosts: two levels, each of 8e6 / 5e8 s, which is what 2 · 2 · 8e6 / 2e9 is not
    lanes = Layout("node", 3, 0, 2, 2)
    assert one_way(COSTS, lanes, 8e6, 2, up=False) == pytest.approx(2e-4 + 2 * 2 * 2 * 1e-6 + 32e-3)
    many = replace(lanes, between=20)
    assert one_way(COSTS, many, 8e6, 2, up=False) == pytest.approx(2e-4 + 20 * 2 * 2 * 1e-6 + 160e-3)


def test_a_round() -> None:
    load = Load(state=8_000_000, frame=4_000_000, down=3, up=2, turns=5)
    found = predict(replace(COSTS, lane=1e-5, wake=2e-3), layout(3, 3, 1), load)
    assert found.down == pytest.approx(1e-5 + 6e-6 + 3.2e-3 + 2 * 5 * 1e-5 + 2e-3)
    assert found.up == pytest.approx(5 * (1e-5 + 2 * 2 * 2e-6 + 8e6 / 3e9))
    assert found.sums == pytest.approx(5 * 2 * 4e-3)
    assert found.looks == pytest.approx(3 * 6 * (1e-5 + 4e-7))
    assert found.total == pytest.approx(found.down + found.up + found.sums + found.looks)
    assert found.bottleneck == "sums"
    assert look_seconds(COSTS, 1000) == pytest.approx(1.1e-4)


def test_a_bottleneck_is_what_takes_longest() -> None:
    slow, fast = Prediction(1.0, 2.0, 0.5, 0.1), Prediction(2.0, 1.0, 0.1, 0.1)
    assert (slow.bottleneck, fast.bottleneck) == ("frames up", "state down")


def test_communicators_bound_what_mpich_can_do() -> None:
    assert fits("MPICH 5.0.2", layout(10_000, 10, 1))
    assert fits("MPICH 5.0.2", layout(10_230, 10, "node"))
    assert not fits("MPICH 5.0.2", layout(10_231, 10, "node"))  # 1024 hosts, two for each
    assert fits("Open MPI 5.0.11", layout(10_231, 10, "node"))
    assert [each.width for each in layouts(10_231, 10, "MPICH 5.0.2")] == [1, "node", 10, "all"]
    assert layouts(10_231, 10, "MPICH 5.0.2")[2].lanes == 1023
    assert len(layouts(10_231, 10, "Open MPI 5.0.11")) == 3


def test_two_levels() -> None:
    # 3 hosts of 2 ranks: the server and two leaders below it, each with one more rank
    load = Load(state=8_000_000, frame=4_000_000, down=2, up=1, summed=8_000_000)
    found = two_levels(COSTS, 6, 2, load, fan_out=2)
    inside_down, above_down = 1e-5 + 2e-6 + 2e-3, 1e-4 + 4e-6 + 8e-3
    assert found.down == pytest.approx(inside_down + above_down)
    inside_up, above_up = 1e-5 + 2e-6 + 2e-3, 1e-4 + 4e-6 + 16e-3
    assert found.up == pytest.approx(inside_up + above_up)
    assert found.sums == pytest.approx(2 * 4e-3 + 2 * 8e-3)
    deeper = two_levels(COSTS, 8, 2, load, fan_out=2)  # a fourth host does not fit below the server
    assert deeper.down == pytest.approx(inside_down + 2 * above_down)


def test_a_place_that_was_not_measured_is_not_made_up() -> None:
    with pytest.raises(AssertionError, match="not measured"):
        predict(replace(COSTS, between=None), layout(4, 2, 1), Load(1, 1))
