"""Who reads the data of a job: the first rank of each host, whatever the others' numbers are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpcfl import config as configs
from hpcfl.base.errors import ErrorOnOtherRank, RunError, UsageError
from hpcfl.data.bundled import Digits
from hpcfl.launch import host
from hpcfl.launch.host import read_once
from hpcfl.testing.runs import table

pytestmark = pytest.mark.mpi

HOSTS = {
    "one": lambda size: ["a"] * size,
    "two": lambda size: ["a"] + ["b"] * (size - 1),
    "in turns": lambda size: ["ab"[rank % 2] for rank in range(size)],
    "each": lambda size: [str(rank) for rank in range(size)],
}


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients' data this rank has read, each time that it did."""
    read, federate = list[int](), Digits.federate

    def counted(self: Digits, clients: int, *rest: Any) -> Any:
        read.append(clients)
        return federate(self, clients, *rest)

    monkeypatch.setattr(Digits, "federate", counted)
    return read


@pytest.mark.parametrize("kind", HOSTS)
def test_the_first_rank_of_a_host_reads(world: Any, kind: str, readers: list[int]) -> None:
    hosts, checked = HOSTS[kind](world.size), list[str]()
    config = configs.from_table(table("fedavg", "mlp", False))
    with read_once(config, None, world.comm, hosts, lambda: checked.append("")) as federation:
        world.meet()  # as the job's ranks do
    alone = hosts.count(hosts[world.rank]) == 1
    leads = world.rank == hosts.index(hosts[world.rank])
    assert checked == [""]
    assert readers == ([] if alone or not leads else [7])
    assert (federation is None) == alone
    if federation is not None:
        own = config.data.federate(7, config.seed, None)
        for client in range(7):
            for one, other in zip(vars(own.client(client)).values(), vars(federation.client(client)).values()):
                assert np.array_equal(one, other)


def test_an_error_is_told_once(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Digits, *rest: Any) -> None:
        raise UsageError("no such file")

    monkeypatch.setattr(Digits, "federate", missing)
    config = configs.from_table(table("fedavg", "mlp", False))
    if world.size > 1:
        hosts = ["a"] * world.size
        with (
            pytest.raises((UsageError, ErrorOnOtherRank)) as caught,
            read_once(config, None, world.comm, hosts, lambda: None),
        ):
            pass
        assert isinstance(caught.value, UsageError) == (world.rank == 0)


def test_who_cannot_reach_the_data_reads_them(
    world: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in containers of their own, where processes do not see each other."""
    config = configs.from_table(table("fedavg", "mlp", False))

    def unseen(*args: Any) -> None:
        raise RunError("memory of process 9 cannot be opened: No such file or directory")

    if world.rank:
        monkeypatch.setattr(host, "attach", unseen)
    with read_once(config, None, world.comm, ["a"] * world.size, lambda: None) as federation:
        world.meet()
    assert (federation is None) == (world.rank > 0 or world.size == 1)
    said = capsys.readouterr().err
    line = "hpcfl: each rank of this host reads the data by itself: memory of process "
    assert said.startswith(line) == (world.rank == 1)


def test_where_the_first_rank_is_missing_the_others_read(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a job starts without it: of a rank that is absent there is no word."""
    config = configs.from_table(table("fedavg", "mlp", False))
    monkeypatch.setattr(host, "texts", lambda comm, text: [""] * world.size)
    with read_once(config, None, world.comm, ["a"] * world.size, lambda: None) as federation:
        world.meet()
    assert federation is None
