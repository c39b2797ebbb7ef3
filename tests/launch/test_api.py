"""Runs from Python: the same as from the command line, alone and on ranks, and nothing of the process is changed."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpcfl
from helpers.launcher import alone, job, mpis
from helpers.runs import after_each_round
from hpcfl import config as configs
from hpcfl import store
from hpcfl.engine import stopping
from hpcfl.engine.job import Job
from hpcfl.launch.host import fixed_arithmetic
from hpcfl.testing.runs import play, same, table, toml

VALUES = table("salf", "mlp", False)


def test_it_is_the_same_run(tmp_path: Path, solo: Any) -> None:
    told = play(solo, VALUES, tmp_path / "command", None)
    run = hpcfl.run(VALUES, out=tmp_path / "python")
    assert run.folder == tmp_path / "python"
    same(told, run.folder)
    assert run.data.sizes["round"] == VALUES["rounds"]
    assert json.loads(run.data.attrs["devices"]) == ["cpu"]
    assert json.loads(run.data.attrs["threads"]) == [1]


@pytest.mark.parametrize("kind", ["path", "file", "table", "config"])
def test_a_config_of_any_kind_with_settings(kind: str, tmp_path: Path) -> None:
    file = toml(VALUES, tmp_path / "mine.toml")
    given: Any = {"path": file, "file": str(file), "table": VALUES, "config": configs.from_table(VALUES)}[kind]
    run = hpcfl.run(given, out=tmp_path / "out", settings={"rounds": 2, "algorithm.lr": 0.25, "evaluate.every": 1})
    recorded = configs.from_text(run.data.attrs["config"])
    assert (recorded.rounds, recorded.algorithm.model_dump()["lr"], recorded.evaluate.every) == (2, 0.25, 1)
    assert VALUES["rounds"] != 2


def test_where_runs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    few = {"rounds": 1}
    assert hpcfl.run(toml(VALUES, tmp_path / "mine.toml"), settings=few).folder == Path("runs/mine")
    assert hpcfl.run(VALUES, settings=few).folder == Path("runs/salf")
    with pytest.raises(hpcfl.UsageError, match=r"^'runs/salf' already holds a run: "):
        hpcfl.run(VALUES, settings=few)


def test_it_goes_on_where_it_was(tmp_path: Path, solo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {**VALUES, "checkpoint": {"every": 2}}
    whole = play(solo, values, tmp_path / "whole", None)
    with monkeypatch.context() as patch:
        patch.setattr(stopping, "LOOK_SECONDS", 0.0)
        after_each_round(patch, lambda done, _: stopping.request(tmp_path / "out") if done == 2 else None)
        with pytest.raises(hpcfl.Stopped):
            hpcfl.run(values, out=tmp_path / "out")
    with pytest.raises(hpcfl.UsageError, match="already holds a run"):
        hpcfl.run(values, out=tmp_path / "out")
    run = hpcfl.run(values, out=tmp_path / "out", resume=True)
    same(whole, run.folder)
    again = hpcfl.run(values, out=tmp_path / "out", resume=True)  # done already
    assert again.data.equals(run.data)


def test_the_process_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # it seeds GPUs as well, whose random state nobody here could look at
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("torch.manual_seed was called"))

    def state() -> list[Any]:
        handlers = [signal.getsignal(getattr(signal, f"SIG{name}")) for name in ("TERM", "INT", "USR1")]
        set_for = "OMP_NUM_THREADS", "THP_MEM_ALLOC_ENABLE", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG"
        settings = {name: os.environ.get(name) for name in set_for}
        drawn = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
        return [handlers, settings, torch.get_num_threads(), gc.get_freeze_count(), sys.excepthook, drawn, flags()]

    before = state()
    hpcfl.run({**VALUES, "threads": 2}, out=tmp_path / "out")
    assert state() == before
    with pytest.raises(hpcfl.UsageError):
        hpcfl.run({**VALUES, "rounds": 0}, out=tmp_path / "other")
    assert state() == before


def test_a_run_leaves_nothing_of_itself_behind(tmp_path: Path) -> None:
    """Its data lie in cycles, and Python's own collector seldom comes by: runs in a loop held ever more memory."""

    def jobs() -> list[Job]:
        return [each for each in gc.get_objects() if type(each) is Job]

    gc.disable()
    try:
        others = {id(each) for each in jobs()}  # of tests before this one
        hpcfl.run({**VALUES, "threads": 2}, out=tmp_path / "out")
        assert [each for each in jobs() if id(each) not in others] == []
    finally:
        gc.enable()


def flags() -> list[Any]:
    """What torch is told of arithmetic on a GPU."""
    backends: Any = torch.backends
    cudnn, matmul, strict = backends.cudnn, backends.cuda.matmul, torch.are_deterministic_algorithms_enabled()
    return [strict, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32]


FIXED = [True, False, True, False, False]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("tf32", [False, True])
def test_fixed_arithmetic_is_undone(strict: bool, tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Any = torch.utils.deterministic
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    backends: Any = torch.backends
    before = torch.are_deterministic_algorithms_enabled(), backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
    try:
        torch.use_deterministic_algorithms(strict, warn_only=strict)
        backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = tf32
        there = flags()
        with fixed_arithmetic(True):
            assert flags() == FIXED
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
            assert not asked.fill_uninitialized_memory
        assert flags() == there
        assert torch.is_deterministic_algorithms_warn_only_enabled() is strict
        assert asked.fill_uninitialized_memory
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        with fixed_arithmetic(False):
            assert flags() == there
    finally:
        torch.use_deterministic_algorithms(before[0])
        backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = before[1:]


def test_what_the_user_has_told_cublas_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with fixed_arithmetic(True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_threads_that_cannot_be_set_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = torch.get_num_threads()
    monkeypatch.setattr("hpcfl.launch.run.torch.set_num_threads", lambda count: None)
    hpcfl.run({**VALUES, "threads": there + 1}, out=tmp_path / "out")
    line = f"hpcfl: threads = {there + 1}: torch was loaded before, and keeps {there}"
    assert capsys.readouterr().err.splitlines() == [line]


def test_the_shared_model_as_a_plain_module(tmp_path: Path) -> None:
    run = hpcfl.run({**VALUES, "evaluate": {"every": 1}}, out=tmp_path / "out")
    module = run.module()
    assert list(run.state_dict()) == [name for name, _ in module.named_parameters()]
    federation = run.models.federation
    held = federation.server_test()
    x, y = (held[0], held[1]) if held is not None else (np.empty(0), np.empty(0))
    correct = (module(torch.from_numpy(x)).argmax(1).numpy() == y).mean()
    assert correct == run.data["accuracy"].values[-1]


def test_a_clients_model_as_a_plain_module(tmp_path: Path) -> None:
    run = hpcfl.run(table("fedavg", "mlp", False, algorithm={"name": "fedrep", "head_epochs": 1}), out=tmp_path / "out")
    with pytest.raises(hpcfl.UsageError, match=r"^algorithm.name = 'fedrep' does not share '.*': expected module\("):
        run.state_dict()
    with pytest.raises(hpcfl.UsageError, match=r"^client: expected 0 … 6, got 7; did you mean 6\?$"):
        run.module(7)
    for model in run.models:
        data, module = model.data, run.module(model.client)
        predicted = module(torch.from_numpy(data.test_features)).argmax(1).numpy()
        np.testing.assert_array_equal(predicted, model.predict(data.test_features))


def test_an_error_of_a_visit_is_raised_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcfl.algorithms.salf import Salf

    def unlucky(*_: Any) -> Any:
        raise ArithmeticError("no luck")

    monkeypatch.setattr(Salf, "client", unlucky)
    with pytest.raises(ArithmeticError, match="no luck"):
        hpcfl.run(VALUES, out=tmp_path / "out")
    status = store.read_status(tmp_path / "out")
    assert (status.state, status.reason) == ("failed", "ArithmeticError: no luck")


SCRIPT = """
import json, os, sys
import hpcfl
assert not {"torch", "mpi4py"} & sys.modules.keys()
values, out = json.loads(sys.argv[1]), sys.argv[2]
runs = [hpcfl.run(values, out=f"{out}/{seed}", settings={"seed": seed}) for seed in (1, 2)]
digests = [sorted((name, value.double().sum().item()) for name, value in run.state_dict().items()) for run in runs]
errors = []
for wrong in ({"rounds": 0}, {}):
    try:
        hpcfl.run(values, out=f"{out}/1", settings={"seed": 1, **wrong})
    except hpcfl.UsageError as error:
        errors.append(str(error))
with open(f"{out}-{os.getpid()}.json", "w") as file:
    json.dump([digests, errors], file)
"""


@pytest.mark.launch
@pytest.mark.parametrize("clock", ["simulated", "wall"])
def test_several_runs_in_one_script_on_ranks(clock: str, tmp_path: Path) -> None:
    plain = {"speed": {"model": "none"}, "participation": {"close": "all"}, "threads": 1}
    values = {**VALUES, **plain, "clock": clock} if clock == "wall" else VALUES
    values = {**values, "algorithm": {"name": "salf", "missing": "none"}} if clock == "wall" else values
    (tmp_path / "script.py").write_text(SCRIPT)
    used = mpis()[-1:] if clock == "wall" else mpis()[:1]
    for mpi in [*used, *([] if clock == "wall" else [""])]:
        words = [str(tmp_path / "script.py"), json.dumps(values), str(tmp_path / (mpi or "alone"))]
        ended = job(mpi, 3, words) if mpi else alone([sys.executable, *words])
        assert ended.code == 0, ended.err
        found = {file.read_text() for file in tmp_path.glob(f"{mpi or 'alone'}-*.json")}
        assert len(list(tmp_path.glob(f"{mpi or 'alone'}-*.json"))) == (3 if mpi else 1)
        assert len(found) == 1
        digests, errors = json.loads(found.pop())
        assert digests[0] != digests[1]
        assert [error.partition(":")[0] for error in errors] == [
            "rounds",
            f"'{tmp_path / (mpi or 'alone')}/1' already holds a run",
        ]
    for seed in ("1", "2"):
        if clock == "simulated":
            for mpi in used:
                same(tmp_path / "alone" / seed, tmp_path / mpi / seed)
