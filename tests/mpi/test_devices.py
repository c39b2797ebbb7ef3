"""Which GPU a rank is bound to, by tables of environments; who shares one; what is told where there is none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.launcher import job, mpis
from hpcfl.base.errors import ErrorOnOtherRank, UsageError
from hpcfl.commands import cli
from hpcfl.config import Config, from_table
from hpcfl.launch.host import other_device, placed
from hpcfl.mpi import devices

OMPI, HYDRA, SLURM = "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"
TWO = "GPU 0: NVIDIA H200 (UUID: GPU-aa)\nGPU 1: NVIDIA H200 (UUID: GPU-bb)\n"
DIVIDED = (
    "GPU 0: NVIDIA H200 (UUID: GPU-aa)\n"
    "  MIG 3g.71gb     Device  0: (UUID: MIG-11)\n"
    "  MIG 3g.71gb     Device  1: (UUID: MIG-22)\n"
    "GPU 1: NVIDIA H200 (UUID: GPU-bb)\n"
)


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        ({}, None),
        ({OMPI: "3"}, 3),
        ({HYDRA: "1", SLURM: "0"}, 1),  # hydra's proxies are what Slurm counts
        ({OMPI: "2", SLURM: "0"}, 2),
        ({SLURM: "5"}, 5),
        ({"MV2_COMM_WORLD_LOCAL_RANK": "4"}, 4),
        ({"PALS_LOCAL_RANKID": "6"}, 6),
        ({OMPI: ""}, None),
    ],
)
def test_the_number_on_the_host(environ: dict[str, str], number: int | None) -> None:
    assert devices.local_rank(environ) == number


@pytest.mark.parametrize(
    ("visible", "listing", "found"),
    [
        (None, "", []),
        (None, TWO, ["GPU-aa", "GPU-bb"]),
        (None, DIVIDED, ["MIG-11", "MIG-22", "GPU-bb"]),
        ("", TWO, []),
        ("-1", TWO, []),
        ("NoDevFiles", TWO, []),
        ("0,1", TWO, ["0", "1"]),
        (" 3 , 1", TWO, ["3", "1"]),
        ("2,-1,0", TWO, ["2"]),  # as CUDA has it
        ("GPU-bb,GPU-aa", TWO, ["GPU-bb", "GPU-aa"]),
        ("MIG-11,MIG-22", DIVIDED, ["MIG-11", "MIG-22"]),
        ("MIG-GPU-aa/7/0", DIVIDED, ["MIG-GPU-aa/7/0"]),
    ],
)
def test_what_a_process_sees(visible: str | None, listing: str, found: list[str]) -> None:
    environ = {} if visible is None else {devices.VISIBLE: visible}
    assert devices.shown(environ, lambda: listing) == found


@pytest.mark.parametrize(
    ("environ", "own"),
    [
        ({devices.VISIBLE: "0,1"}, None),  # no launcher: a process alone is left as it is
        ({OMPI: "1"}, "GPU-bb"),
        ({OMPI: "2"}, "GPU-aa"),
        ({OMPI: "0", devices.VISIBLE: "4,5"}, "4"),
        ({HYDRA: "3", devices.VISIBLE: "4,5"}, "5"),
        ({SLURM: "1", devices.VISIBLE: "7"}, "7"),  # the launcher shows each rank its own
        ({SLURM: "1", devices.VISIBLE: "MIG-11,MIG-22"}, "MIG-22"),
        ({SLURM: "1", devices.VISIBLE: ""}, None),
    ],
)
def test_a_rank_sees_its_own_device_alone(environ: dict[str, str], own: str | None) -> None:
    assert devices.own(environ, lambda: TWO) == own


def test_client_ranks_beside_the_server_have_one_each() -> None:
    mine = [devices.own({OMPI: str(number), devices.VISIBLE: "0,1,2,3"}, str) for number in range(5)]
    assert sorted(mine[1:], key=str) == ["0", "1", "2", "3"]


def test_the_listing_is_asked_for_where_the_environment_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nprintf '{DIVIDED}'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    environ = {OMPI: "1"}
    devices.bind(environ)
    assert environ[devices.VISIBLE] == "MIG-22"
    smi.write_text("#!/bin/sh\nexit 9\n")
    environ = {OMPI: "1"}
    devices.bind(environ)
    assert devices.VISIBLE not in environ


SCRIPT = r"""
import os
from hpcfl.mpi import launcher
MPI = launcher._loaded()
start = MPI.Init_thread
def looked_at(*words):
    os.write(1, f"bound {os.environ['CUDA_VISIBLE_DEVICES']}\n".encode())
    return start(*words)
MPI.Init_thread = looked_at
launcher.world()
"""


@pytest.mark.launch
@pytest.mark.parametrize("mpi", mpis())
def test_ranks_are_bound_before_mpi_starts(mpi: str) -> None:
    ended = job(mpi, 3, ["-c", SCRIPT], env={devices.VISIBLE: "4,MIG-5"})
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["bound 4", "bound 4", "bound MIG-5"]


# which device, and who shares it


def see(monkeypatch: pytest.MonkeyPatch, count: int, **facts: Any) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="H200", **facts))


def test_devices_by_number_and_by_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, found in ((1, ["cuda:0"] * 3), (4, ["cuda:0", "cuda:3", "cuda:1"]), (0, ["cpu"] * 3)):
        see(monkeypatch, count)
        assert [devices.chosen("auto", "device", number) for number in (0, 3, 5)] == found
        assert devices.chosen("cpu", "device", 0) == "cpu"


def test_none_where_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 0)
    monkeypatch.setenv(devices.VISIBLE, "-1")
    line = r"^server_device: expected 'auto' or 'cpu' \(torch .* sees no GPU here; CUDA_VISIBLE_DEVICES = '-1'\), got "
    with pytest.raises(UsageError, match=line + r"'cuda'; did you mean server_device = 'cpu'\?$"):
        devices.chosen("cuda", "server_device", 0)


def test_what_tells_a_device_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    assert devices.described("cpu") == "cpu"
    see(monkeypatch, 1, uuid="aa")
    assert devices.described("cuda:0") == "H200 GPU-aa"
    monkeypatch.setenv(devices.VISIBLE, "MIG-11")
    assert devices.described("cuda:0") == "H200 MIG-11"
    see(monkeypatch, 1)  # an older torch
    monkeypatch.setenv(devices.VISIBLE, "3")
    assert devices.described("cuda:0") == "H200 cuda:0 of 3"


def test_who_shares_a_device() -> None:
    names, hosts = ["cpu", "H GPU-a", "H GPU-b", "H GPU-a", "cpu"], ["n1", "n1", "n1", "n1", "n1"]
    with pytest.raises(UsageError) as caught:
        devices.check_shared(names, hosts, 1)
    line = "expected 2 or more (ranks 1, 3 share H GPU-a on host n1), got 1; did you mean 2?"
    assert str(caught.value) == f"ranks_per_device: {line}"
    devices.check_shared(names, hosts, 2)
    devices.check_shared(names, ["n1", "n1", "n1", "n2", "n2"], 1)  # of the same name on another host


def config(**keys: Any) -> Config:
    parts = {"data": {"name": "digits"}, "model": {"name": "mlp"}, "clients": 4, "rounds": 1}
    return from_table({**parts, "algorithm": {"name": "fedavg"}, **keys})


def test_the_words_of_the_keys() -> None:
    assert [config(clock=clock).reproducible for clock in ("simulated", "wall")] == [True, False]
    assert [config(deterministic=word).reproducible for word in (True, False, "auto")] == [True, False, True]
    for key, word in (("device", "gpu"), ("ranks_per_device", 0), ("deterministic", "yes")):
        with pytest.raises(UsageError, match=rf"^{key}: expected "):
            config(**{key: word})
    with pytest.raises(UsageError, match="did you mean 'cpu'"):
        config(device="cput")


def test_a_run_that_goes_on_with_another_device() -> None:
    one = {"devices": json.dumps(["cpu", "NVIDIA H200 GPU-aa"])}
    assert other_device(one, ["NVIDIA H200 GPU-bb"]) == ""
    assert other_device({}, ["cpu"]) == other_device({"devices": '["cpu", "cpu"]'}, ["cpu"]) == ""
    line = "began on NVIDIA H200 and goes on with cpu: last bits will differ from one whole run's"
    assert other_device(one, ["NVIDIA H200 GPU-aa", "cpu"]) == line
    assert other_device({}, ["NVIDIA A100 MIG-11"]).startswith("began on cpu and goes on with NVIDIA A100:")


@pytest.mark.parametrize(
    ("count", "settings", "line"),
    [
        (0, [], rf"cpu: torch {re.escape(torch.__version__)} sees no GPU on this host"),
        (0, ["device=cuda"], r"cpu: .* on this host; device = 'cuda' is refused here"),
        (0, ["device=cpu"], None),
        (1, [], "H200 GPU-aa, the same bits each time; at most 1 per GPU; a server by itself: the CPU"),
        (
            1,
            ["deterministic=false", "server_device=auto", "ranks_per_device=3"],
            "H200 GPU-aa; at most 3 per GPU; a server by itself: H200 GPU-aa",
        ),
        (1, ["device=cpu"], None),
    ],
)
def test_check_says_what_would_compute(
    count: int,
    settings: list[str],
    line: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    see(monkeypatch, count, uuid="aa")
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    words = [word for setting in settings for word in ("--set", setting)]
    assert cli.main(["check", "fedavg-digits", *words]) == 0
    found = [
        text.partition("device")[2].strip() for text in capsys.readouterr().out.splitlines() if text.startswith("dev")
    ]
    assert len(found) == (line is not None)
    assert line is None or re.fullmatch(line, found[0])


@pytest.mark.mpi
def test_a_device_that_ranks_share_unasked_is_refused(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 1, uuid="aa")
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    hosts = ["here"] * world.size
    own, every = placed(config(ranks_per_device=max(1, world.size - 1)), world.comm, hosts)
    alone = world.size == 1
    assert own == ("cpu" if world.rank == 0 and not alone else "cuda:0")
    assert every == ["H200 GPU-aa"] * world.size if alone else every == ["cpu"] + ["H200 GPU-aa"] * (world.size - 1)
    if world.size == 1:
        return
    with pytest.raises((UsageError, ErrorOnOtherRank)) as caught:
        placed(config(server_device="auto"), world.comm, hosts)
    ranks = ", ".join(map(str, range(world.size)))
    assert f"ranks {ranks} share H200 GPU-aa on host here" in getattr(caught.value, "line", str(caught.value))
    assert placed(config(device="cpu"), world.comm, hosts) == ("cpu", ["cpu"] * world.size)
