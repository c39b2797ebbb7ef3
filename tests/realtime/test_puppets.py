"""Client ranks without torch speak the protocol, so that the benchmark of many ranks does not rot.

The benchmark itself compares every sum with what the ranks have sent.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from helpers.launcher import ROOT, alone, under

BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.mpi
@pytest.mark.parametrize("width", ["1", "all"])
def test_puppets_among_ranks(world: Any, width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is so slow that each round closes without it, and is there where everybody is waited for."""
    if world.size == 1:
        pytest.skip("needs a server and a client")
    from hpcfl.mpi.waiting import Patience

    monkeypatch.setattr(Patience, "crowd", 1.0)
    monkeypatch.syspath_prepend(BENCHMARKS)
    import puppet
    import puppets

    for name, value in {"VISIT": 0.0, "SLOW": 1e6, "IDLE_SECONDS": 0.01, "LOOKING_SECONDS": 0.1}.items():
        monkeypatch.setattr(puppets, name, value)
    if world.rank:
        puppet.serve(world.comm)
        return
    words = ["--rounds", "2", "--deadline", "0.2", "--slow", "0.1", "--width", width, "--swift", "2"]
    found = puppets.serve(world.comm, puppets.parsed(words))
    assert found["lanes"] == (1 if width == "all" else world.size - 1)
    assert found["layers_counted"]["slow"] == 0
    assert found["layers_counted"]["swift"] == puppets.LAYERS
    assert found["lost"] == []


@pytest.mark.launch
def test_a_puppet_dies_on_a_lane_with_others() -> None:
    """The lane falls apart into lanes of one rank, on which the others go on."""
    words = ["--ranks", "4", "--rounds", "4", "--slow", "0.3", "--killed", "0.3", "--swift", "1", "--kilobytes", "4"]
    words += ["--width", "all"]
    ended = alone([sys.executable, str(BENCHMARKS / "puppets.py"), *words], 200.0)
    assert ended.code == 0, ended.err
    (found,) = json.loads(ended.out.splitlines()[-1])["puppets"]
    (lost,) = found["lost"]
    assert f"rank {lost} is lost" in ended.err
    assert found["faults"] == {"slow": 1, "stopped": 0, "killed": 1}
    assert found["layers_counted"]["swift"] == pytest.approx(4 * 2 / 3, abs=0.01)  # two puppets are left


@pytest.mark.launch
def test_a_puppet_needs_no_torch() -> None:
    """Nor anything that loads it: some hundred of them are to fit into one machine."""
    code = "import mpi4py, sys; mpi4py.rc(initialize=False); import puppets, puppet; print('torch' in sys.modules)"
    _, settings = under("openmpi", 1, [])
    ended = alone([sys.executable, "-c", code], 100.0, {**settings, "PYTHONPATH": f"{BENCHMARKS}:{ROOT}"})
    assert ended.out.split() == ["False"]
