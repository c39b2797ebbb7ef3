"""What is measured between ranks, and its document."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.networks import FOUND, LINK, written
from hpcfl.base.errors import UsageError
from hpcfl.commands.cli import main
from hpcfl.contrib.network import measure as network
from hpcfl.contrib.network.measure import document, measure, read


def test_a_document_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read(written(tmp_path, document(FOUND))) == FOUND
    alone = replace(FOUND, costs=replace(FOUND.costs, between=None), hosts={"n1": 2})
    assert read(written(tmp_path, document(alone))) == alone
    assert (FOUND.ranks, FOUND.per_host) == (6, 3)


WRONG: dict[str, tuple[Any, str]] = {
    "a list": ([1], "got other JSON"),
    "of doctor's own": ({"world": 3}, "got other JSON"),
    "another version": (document(FOUND) | {"version": 2}, "got version 2, this hpcfl reads version 1"),
    "one rank": (document(FOUND) | {"hosts": {"n1": 1}}, "got one that is damaged"),
    "a host without ranks": (document(FOUND) | {"hosts": {"n1": 0, "n2": 4}}, "got one that is damaged"),
    "no costs": ({key: value for key, value in document(FOUND).items() if key != "costs"}, "got one that is damaged"),
    "no speed": (document(FOUND) | {"costs": asdict(replace(FOUND.costs, sums=0.0))}, "got one that is damaged"),
    "text": (document(FOUND) | {"costs": asdict(FOUND.costs) | {"sent": "fast"}}, "got one that is damaged"),
    "10^400": (document(FOUND) | {"load": 10**400}, "got one that is damaged"),
    "no links": (
        document(FOUND) | {"costs": asdict(replace(FOUND.costs, within=None, between=None))},
        "got one that is damaged",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_files_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    found, words = WRONG[name]
    with pytest.raises(UsageError, match=r"^--like '.*network.json': expected what hpcfl doctor --network") as caught:
        read(written(tmp_path, found))
    assert words in str(caught.value)


def test_what_is_no_file_or_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--like .*none.json: no such file$"):
        read(tmp_path / "none.json")
    (tmp_path / "text").write_text("latency 3 us")
    with pytest.raises(UsageError, match="got what is no JSON"):
        read(tmp_path / "text")


def test_no_file_takes_forever_or_all_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep").write_text("[" * 200_000)
    (tmp_path / "long").write_bytes(b" " * (network.MOST + 1))
    (tmp_path / "latin").write_bytes(b'{"kind": "\xe9"}')
    written = "expected what hpcfl doctor --network --json FILE has written"
    for file, said in {
        tmp_path / "pipe": f"{tmp_path / 'pipe'}: is a device or pipe, {written}",
        Path("/dev/zero"): f"/dev/zero: is a device or pipe, {written}",
        tmp_path: f"{tmp_path}: is a folder, {written}",
        tmp_path / "deep": f"'{tmp_path / 'deep'}': {written}, got what is no JSON",
        tmp_path / "long": f"'{tmp_path / 'long'}': {written}, got more than 1048576 bytes",
        tmp_path / "latin": f"'{tmp_path / 'latin'}': {written}, got what is no JSON",
    }.items():
        assert main(["check", "salf-digits", "--ranks", "7", "--like", str(file)]) == 2
        assert capsys.readouterr().err == f"hpcfl: --like {said}\n"


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aa", []),
        ("aaaa", [(1, 2, 3)]),
        ("abc", [(1, 2)]),
        ("aaabbc", [(1, 2, 3, 4, 5), (1, 2), (3, 4)]),
        ("abbccddeeff", [tuple(range(1, 11)), (1, 2), (3, 4), (5, 6), (9, 10)]),
    ],
)
def test_lanes_that_are_measured(hosts: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def tree(ranks: Any) -> tuple[int, Any]:
        found.append(tuple(ranks))
        return len(ranks), LINK.tree

    measurement = network._Measurement(SimpleNamespace(Get_rank=lambda: 1), hosts, 0.0)
    monkeypatch.setattr(measurement, "_tree", tree)
    for name in ("_link", "_small", "_wake"):
        monkeypatch.setattr(measurement, name, lambda *_, **__: 1.0)
    assert measurement.network() is None
    assert found == expected


def test_ranks_are_picked_from_first_to_last() -> None:
    assert network._spread([1, 2, 3], 4) == [1, 2, 3]
    assert network._spread(list(range(1, 101)), 4) == [1, 34, 67, 100]
    assert network._spread([1], 4) == [1]
    assert network._spread([], 4) == []


def test_alone_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hpcfl.mpi.launcher.launched", lambda: False)
    monkeypatch.setattr("hpcfl.launch.failure.launched", lambda: False)
    assert main(["doctor", "--network"]) == 2
    assert "expected at least 2 ranks, got 1; did you mean mpirun -n 2" in capsys.readouterr().err
    assert main(["doctor", "--network", "--launcher"]) == 2
    assert "expected one" in capsys.readouterr().err


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("hosts", ["aaaaaaaa", "abbbbbbb", "aabbbbbb", "abcdefgh", "abcbcbcb"])
def test_ranks_measure_together(world: Any, hosts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "LARGEST", 2**17)
    monkeypatch.setattr(network, "NUMBERS", 2**18)
    found = measure(world.comm, hosts[: world.size], 0.5)
    assert (found is None) == (world.rank > 0)
    if found is None:
        return
    assert found.ranks == world.size
    assert found.hosts == {host: hosts[: world.size].count(host) for host in dict.fromkeys(hosts[: world.size])}
    here = hosts[: world.size].count("a")
    assert (found.costs.within is None) == (here == 1)
    assert (found.costs.between is None) == (here == world.size)
    clients = [hosts[1 : world.size].count(host) for host in found.hosts]
    lanes = {"within": here > 2, "between": max(clients[1:], default=0) > 1, "all": len(clients) - (here == 1) > 1}
    assert found.trees.keys() == {name for name, there in lanes.items() if there}
    assert read(written(tmp_path, document(found))) == found  # which takes no speed of 0


@pytest.mark.mpi(min_size=2)
def test_the_command_writes_from_one_rank(
    world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(network, "SECONDS", 0.5)
    file = shared_dir / "network.json"
    assert main(["doctor", "--network", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert ("sums of frames, GB/s" in out) == (world.rank == 0)
    world.meet()
    assert read(file).ranks == world.size
    assert main(["doctor", "--network", "--json", str(shared_dir / "none" / "network.json")]) == 2
