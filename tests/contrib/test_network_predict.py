"""What `hpcfl check --like` predicts, from measurements made by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.networks import COSTS, FOUND, written
from hpcfl.base.errors import UsageError
from hpcfl.commands.cli import main
from hpcfl.contrib.network.measure import Network, document
from hpcfl.mpi import placement

WALL = ["--set", "clock=wall"]
Checked = Callable[..., dict[str, str]]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("hpcfl.launch.failure", "hpcfl.mpi.launcher"):
        monkeypatch.setattr(f"{name}.launched", lambda: False)


@pytest.fixture
def checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Checked:
    """Checks salf-digits, eight clients, with these words; returns what each line says, or the error under "error"."""

    def check(*words: str, network: Network = FOUND) -> dict[str, str]:
        file = written(tmp_path, document(network))
        code = main(["check", "salf-digits", "--like", str(file), *words])
        told = capsys.readouterr()
        if code:
            return {"error": told.err, "code": str(code)}
        return {line[:14].strip(): line[14:] for line in told.out.splitlines()}

    return check


def parts(line: str) -> dict[str, float]:
    """Return the seconds of a round's parts, and of all."""
    found = {
        name: float(seconds) for name, seconds in re.findall(r"(state down|frames up|sums|looks) ([\d.e-]+)", line)
    }
    return found | {"total": float(line.split(" s: ")[0])}


def test_a_round_is_predicted_for_each_layout(checked: Checked) -> None:
    told = checked("--ranks", "9", *WALL)
    assert told["like"].endswith("measured 2026-11-24 on 6 ranks, 2 hosts; for 9 ranks, 3 hosts of 3")
    frame = int(re.search(r"and (\d+) up", told["a round"])[1])
    by_rank, by_node, one, levels = (parts(told[name]) for name in ("per rank", "per node", "one lane", "two levels"))
    for each in (by_rank, by_node, one, levels):
        assert each["total"] == pytest.approx(sum(each.values()) - each["total"], rel=0.01)
    assert by_rank["sums"] == pytest.approx(8 * frame / 1e9, rel=0.01)
    assert by_node["sums"] == pytest.approx(3 * frame / 1e9, rel=0.05)  # each rank signs frames that all share
    assert one["sums"] == pytest.approx(frame / 1e9, rel=0.1)
    assert 1e-3 < by_rank["state down"] < 2e-3 < by_node["state down"] < 4e-3 < one["state down"]  # 1, 2 and 4 levels
    best = min((by_rank, "1"), (levels, "'two-level'"), key=lambda pair: pair[0]["total"])[1]
    assert told["choose"].startswith(f"lane_width = {best}: rounds close before the last visit")
    assert told["lanes"] == "8 on 9 ranks with 3 on each host"


def test_who_is_not_invited_sends_nothing(checked: Checked) -> None:
    few = checked("--ranks", "9", *WALL, "--set", "participation.invite=uniform", "--set", "participation.size=2")
    frame = int(re.search(r"and (\d+) up", few["a round"])[1])
    assert few["a round"].startswith("2 visits")
    assert parts(few["per rank"])["sums"] == pytest.approx(2 * frame / 1e9, rel=0.01)


def test_a_rank_with_several_clients_sends_turn_after_turn(checked: Checked) -> None:
    told = checked("--ranks", "3", *WALL)
    frame = int(re.search(r"and (\d+) up", told["a round"])[1])
    assert parts(told["per rank"])["sums"] == pytest.approx(8 * frame / 1e9, rel=0.01)  # four turns of two lanes
    assert "two levels" not in told


def test_the_fastest_is_chosen_where_all_are_waited_for(checked: Checked) -> None:
    slow = replace(COSTS, sums=1e5)  # so that lanes that share a sum win
    words = ("--ranks", "9", *WALL, "--set", "participation.close=all")
    told = checked(*words, network=replace(FOUND, costs=slow))
    assert told["choose"].startswith("lane_width = 'all': the narrowest lanes")
    assert told["one lane"].endswith("most: sums")


def test_what_the_mpi_forbids_is_named(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "COMMUNICATORS", {"MPICH": 4})
    told = checked("--ranks", "9", *WALL)
    assert "3 lanes take 6 communicators of the server, which can make 4, for 2 lanes" in told["per node"]
    assert parts(told["lanes of 4"])["total"] > 0
    assert checked("--ranks", "9", *WALL, network=replace(FOUND, mpi="Open MPI 5.0.11")).keys() == told.keys() - {
        "lanes of 4"
    }


def test_lanes_that_the_mpi_forbids_are_refused() -> None:
    hosts = [str(rank // 2) for rank in range(2201)]
    line = r"^lane_width = 2: 1100 lanes .* 2200 communicators, and MPICH 5.0.2 has 2046 .* did you mean 3\?$"
    with pytest.raises(UsageError, match=line):
        placement.check_communicators("MPICH 5.0.2", 2, hosts)
    placement.check_communicators("MPICH 5.0.2", 3, hosts)
    placement.check_communicators("MPICH 5.0.2", "two-level", hosts)
    placement.check_communicators("Open MPI 5.0.11", "node", hosts)


def test_methods_that_look_at_single_messages_share_no_lane(checked: Checked) -> None:
    told = checked("--ranks", "9", *WALL, "--set", "guard.max_norm=1.0")
    assert told["per node"].startswith("refused: guard.max_norm = 1 measures single messages")
    assert told["choose"].startswith("lane_width = 1")


def test_a_deadline_that_messages_alone_outlast(checked: Checked) -> None:
    told = checked("--ranks", "9", *WALL, "--set", "participation.deadline=0.001")
    assert told["warning"].startswith("deadline: messages alone take ")


def test_a_measurement_on_a_busy_machine_is_doubted(checked: Checked) -> None:
    told = checked("--ranks", "9", *WALL, network=replace(FOUND, load=1.5))
    assert told["warning"].startswith("busy: load 1.5 per core")
    assert "warning" not in checked("--ranks", "9", *WALL)


def test_rounds_that_arrivals_end_are_not_predicted(checked: Checked) -> None:
    words = ["--set", "participation.close=arrivals", "--set", "participation.buffer=2"]
    told = checked("--ranks", "9", *WALL, "--set", "algorithm.name=fedavg", *words)
    assert told["a round"].startswith("not predicted")
    assert "choose" not in told


ONE_HOST = replace(FOUND, costs=replace(COSTS, between=None), hosts={"n1": 6})
ALONE = replace(FOUND, costs=replace(COSTS, within=None), hosts={"n1": 1, "n2": 1})
WRONG: dict[str, tuple[list[str], Network, str]] = {
    "no ranks": (WALL, FOUND, "expected --ranks N with it"),
    "one rank": (["--ranks", "1", *WALL], FOUND, "--ranks: expected at least 2 with --like"),
    "simulated": (["--ranks", "9"], FOUND, "clock: expected 'wall', got 'simulated'; did you mean --set clock=wall?"),
    "one host": (
        ["--ranks", "9", *WALL],
        ONE_HOST,
        "9 ranks are on 2 hosts with 6 on each; did you mean --per-host 9?",
    ),
    "apart": (["--ranks", "4", "--per-host", "2", *WALL], ALONE, "did you mean --per-host 1?"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_predicted_is_refused_in_one_line(name: str, checked: Checked) -> None:
    words, network, expected = WRONG[name]
    told = checked(*words, network=network)
    assert told["code"] == "2"
    assert expected in told["error"]
    assert told["error"].count("\n") == 1


def test_hosts_without_a_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "salf-digits", "--per-host", "2"]) == 2
    assert "expected --like FILE with it" in capsys.readouterr().err
