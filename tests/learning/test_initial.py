"""Runs that begin from a file: whose values are whose, on any ranks, resumed, and which files are refused."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import hpcfl
from hpcfl import store
from hpcfl.base.errors import UsageError
from hpcfl.commands.cli import main
from hpcfl.config import from_table, load
from hpcfl.engine.job import Job
from hpcfl.launch.request import resume_request
from hpcfl.learning.batches import Visits
from hpcfl.testing.runs import cut_back, play, resume, same, table

SHAPES = {"fc1.weight": (5, 64), "fc1.bias": (5,), "fc2.weight": (10, 5), "fc2.bias": (10,)}
Change = Callable[[h5py.File], object]


def written(path: Path, shapes: Mapping[str, tuple[int, ...]] = SHAPES, kind: str = "f8", seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        for name, shape in shapes.items():
            file[name] = rng.normal(size=shape).astype(kind)
    return path


def values(file: Path | str, method: str = "fedavg", **algorithm: Any) -> dict[str, Any]:
    chosen = {"name": method, "batch": 0, **algorithm}
    return {
        **table("salf", "mlp", True, algorithm=chosen, speed={"model": "none"}, precision="double"),
        "model": {"name": "mlp", "hidden": [5], "initial": str(file)},
    }


def begun(what: dict[str, Any], ranks: int = 1) -> tuple[Job, dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """The job, its first shared state and each client's first personal state."""
    config = load(what)
    config.check(None)
    job = Job.of(config, None, ranks)
    own = [job.algorithm.init_client(job.task, client) for client in range(config.clients)]
    return job, job.begin(0).shared, own


def test_all_begin_with_what_stands_at_the_root(tmp_path: Path) -> None:
    file = written(tmp_path / "initial.h5")
    job, shared, _ = begun(values(file))
    with h5py.File(file) as held:
        for name in SHAPES:
            assert shared[name].dtype == torch.float64
            np.testing.assert_array_equal(shared[name], held[name][()])
            np.testing.assert_array_equal(job.task.initial(3)[name], held[name][()])


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_run_goes_on_from_what_another_has_exported(suffix: str, tmp_path: Path) -> None:
    few = {**table("fedavg", "mlp", True), "model": {"name": "mlp", "hidden": [5]}}
    first = hpcfl.run(few, out=tmp_path / "first")
    file = tmp_path / f"model.{suffix}"
    if suffix == "pt":
        torch.save(first.state_dict(), file)
    else:
        hpcfl.export(first.folder, file)
    ended = store.load(store.latest(first.folder), personal=False).shared
    _, shared, _ = begun({**few, "model": {**few["model"], "initial": str(file)}})
    assert shared.keys() == ended.keys()
    for name, value in shared.items():
        np.testing.assert_array_equal(value, ended[name])
    assert hpcfl.run(few, settings={"model.initial": str(file)}, out=tmp_path / "second").data.sizes["round"] == 4


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("odd", ["text", "pickle", "shape"])
def test_odd_tensors_are_one_line(suffix: str, odd: str, tmp_path: Path) -> None:
    file, kind = tmp_path / f"model.{suffix}", "a file of safetensors" if suffix == "safetensors" else "a state dict"
    if odd == "shape":
        tensors = {name: torch.ones(shape) for name, shape in SHAPES.items()} | {"fc2.bias": torch.ones(9)}
        save_file(tensors, file) if suffix == "safetensors" else torch.save(tensors, file)
        said = r"fc2\.bias has shape \[9\], expected \[10\]$"
    else:
        file.write_bytes(b"no tensors" if odd == "text" else pickle.dumps(Path("/")))
        said = rf"model\.{suffix}: truncated or damaged, expected {kind}"
    with pytest.raises(UsageError, match=said) as raised:
        begun(values(file))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["f4", "f8", ">f8"])
@pytest.mark.parametrize("precision", ["single", "double"])
def test_numbers_are_brought_to_the_precision_of_the_run(tmp_path: Path, kind: str, precision: str) -> None:
    file = written(tmp_path / "initial.h5", kind=kind)
    _, shared, _ = begun({**values(file), "precision": precision})
    with h5py.File(file) as held:
        wanted = held["fc1.weight"][()].astype("f4" if precision == "single" else "f8")
    np.testing.assert_array_equal(shared["fc1.weight"], wanted)


def test_personal_layers_begin_with_a_clients_own(tmp_path: Path) -> None:
    file = written(tmp_path / "initial.h5")
    with h5py.File(file, "a") as held:
        held["clients/3/fc2.bias"] = np.arange(10.0)
        root = held["fc2.bias"][()]
    job, shared, own = begun(values(file, "fedrep"))
    assert shared.keys() == {"fc1.weight", "fc1.bias"}
    np.testing.assert_array_equal(own[3]["fc2.bias"], np.arange(10.0))
    np.testing.assert_array_equal(own[2]["fc2.bias"], root)
    assert torch.equal(own[3]["fc2.weight"], own[2]["fc2.weight"])
    np.testing.assert_array_equal(job.task.initial()["fc2.bias"], root)  # that of nobody in particular
    _, shared, own = begun(values(file, "fedrep", evaluation="fine-tune"))
    np.testing.assert_array_equal(shared["fc2.bias"], root)  # the mean of all heads, before there is any
    np.testing.assert_array_equal(own[3]["fc2.bias"], np.arange(10.0))


def test_newcomers_begin_with_their_own_too(tmp_path: Path) -> None:
    with h5py.File(written(tmp_path / "initial.h5"), "a") as held:
        held["clients/3/fc2.bias"] = np.arange(10.0)
    job, shared, own = begun(values(tmp_path / "initial.h5", "fedrep", evaluation="new-client"))
    found = job.algorithm.adapted(job.task, shared, Visits.for_test(0, np.array([2, 3])), 0)
    assert torch.equal(found["fc2.bias"], torch.stack([own[2]["fc2.bias"], own[3]["fc2.bias"]]))
    assert not torch.equal(*found["fc2.bias"])


LATENT = "embed1.bias", "head.weight", "head.bias"


def latents(file: Path | str | None) -> dict[str, Any]:
    """FLIC on clients of two widths."""
    data = {"name": "linear_mapping", "labels": 3, "informative": 3, "least": 4, "most": 5, "samples_per_class": 20}
    model = {"name": "latent", "widths": [], "dimension": 2} | ({} if file is None else {"initial": str(file)})
    algorithm = {"name": "flic", "epochs": 1, "batch": 0, "draws": 3, "pretrain": 1}
    plain = {"rounds": 2, "clients": 5, "seed": 3}
    return {**plain, "algorithm": algorithm, "data": {**data, "thinning": False}, "model": model}


def test_embeddings_of_any_width_and_anchors_begin_as_given(tmp_path: Path) -> None:
    drawn, _, _ = begun(latents(None))
    shapes = drawn.task.federation.shapes
    assert len(set(shapes)) == 2
    file, rng = tmp_path / "initial.h5", np.random.default_rng(0)
    with h5py.File(file, "w") as held:
        held["anchor.means"] = np.arange(6, dtype="f8").reshape(3, 2)
        for name in LATENT:
            held[name] = rng.normal(size=tuple(drawn.task.initial()[name].shape))
        for client, (width,) in enumerate(shapes):
            held[f"clients/{client}/embed1.weight"] = rng.normal(size=(2, width))
    job, shared, own = begun(latents(file))
    means = np.arange(6).reshape(3, 2)
    np.testing.assert_array_equal(shared["anchor.means"], means)
    np.testing.assert_array_equal(
        job.algorithm.first_anchors(job.task)["anchor.means"], means
    )  # embeddings align to it
    with h5py.File(file) as held:
        for client in range(5):
            np.testing.assert_array_equal(
                own[client]["embed1.weight"], held[f"clients/{client}/embed1.weight"][()].astype("f4")
            )
            np.testing.assert_array_equal(own[client]["head.bias"], held["head.bias"][()].astype("f4"))


def test_newcomers_need_no_values_of_their_own(solo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn, _, _ = begun(latents(None))
    with h5py.File(tmp_path / "initial.h5", "w") as held:
        held.update({name: np.ones(tuple(drawn.task.initial()[name].shape)) for name in LATENT})
        held.update({f"clients/{client}/embed1.weight": np.ones((2, 4)) for client in range(5)})
    narrow = latents(tmp_path / "initial.h5")
    narrow["data"] |= {"least": 4, "most": 4}
    run = play(solo, narrow, tmp_path / "run", None)
    with h5py.File(tmp_path / "wider.h5", "w") as file:
        for part in ("train", "test"):
            file[f"clients/0/{part}/features"], file[f"clients/0/{part}/labels"] = np.ones((3, 6)), np.arange(3)
    words = ["adapt", str(run), "--data", str(tmp_path / "wider.h5"), "--client", "all", "--json"]
    assert main([*words, "--out", str(tmp_path / "out.h5")]) == 0, capsys.readouterr()
    with h5py.File(tmp_path / "out.h5") as out:
        assert out["clients/0/embed1.weight"].shape == (2, 6)


@pytest.mark.mpi
def test_one_rank_equals_n(world: Any, shared_dir: Path) -> None:
    file = shared_dir / "initial.h5"
    if world.rank == 0:
        written(file)
        with h5py.File(file, "a") as held:
            held["clients/3/fc2.bias"] = np.arange(10.0)
    world.meet()
    runs = [
        play(world, values(file, "fedrep"), shared_dir / name, comm) for name, comm in (("n", world.comm), ("1", None))
    ]
    if world.rank == 0:
        same(*runs)
    world.meet()


def test_a_run_goes_on_from_elsewhere(solo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    file = written(tmp_path / "data/initial.h5")
    monkeypatch.chdir(tmp_path / "data")
    run = play(solo, values("initial.h5"), tmp_path / "run", None)
    whole = shutil.copytree(run, tmp_path / "whole")
    monkeypatch.chdir(tmp_path)
    assert json.loads(store.run_attributes(run)["config"])["model"]["initial"] == str(file)
    assert json.loads(store.run_attributes(run)["files"]).keys() == {"model.initial"}
    resume(solo, run, 2, None)
    same(run, whole)
    untrained = next(iter(hpcfl.open_models(run))).untrained.params
    with h5py.File(file) as held:
        np.testing.assert_array_equal(untrained["fc1.bias"], held["fc1.bias"][()])


def test_the_data_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    written(tmp_path / "here/initial.h5")
    assert load(values("initial.h5"), data_dir=tmp_path / "data").model.initial == str(tmp_path / "here/initial.h5")
    written(tmp_path / "data/initial.h5")
    assert load(values("initial.h5"), data_dir=tmp_path / "data").model.initial == str(tmp_path / "data/initial.h5")
    with pytest.raises(UsageError, match=r"^model\.initial = 'none\.h5': no such file in .*data or \.$"):
        load(values("none.h5"), data_dir=tmp_path / "data")


def test_a_file_that_has_changed_is_refused_unless_forced(solo: Any, tmp_path: Path) -> None:
    file = written(tmp_path / "initial.h5")
    run = play(solo, values(file, "fedrep"), tmp_path / "run", None)
    cut_back(run, 2)
    written(file, seed=1)
    changed = r"^'.*initial\.h5' has changed since the run began, which found model\.initial there: .*--force"
    with pytest.raises(UsageError, match=changed):
        resume_request(run, None)
    with pytest.raises(UsageError, match=changed):
        hpcfl.open_models(run)
    assert resume_request(run, None, force=True) is not None
    store.release(run)
    file.unlink()
    with pytest.raises(UsageError, match=r"initial\.h5', where the run found model\.initial, is not there"):
        resume_request(run, None)


def put(name: str, what: Any) -> Change:
    return lambda file: (file.pop(name, None), file.__setitem__(name, what))


BAD: dict[str, tuple[Change, dict[str, Any], str]] = {
    "missing": (lambda file: file.pop("fc2.bias"), {}, r"there is no fc2\.bias; expected one of shape \[10\]$"),
    "shape": (put("fc1.weight", np.ones((5, 63))), {}, r"fc1\.weight has shape \[5, 63\], expected \[5, 64\]$"),
    "transposed": (put("fc2.weight", np.ones((5, 10))), {}, r"fc2\.weight has shape \[5, 10\], expected \[10, 5\]$"),
    "unknown": (put("fc1.wieght", np.ones(3)), {}, r"fc1\.wieght: no such tensor; did you mean 'fc1\.weight'\?$"),
    "nan": (put("fc1.bias", np.full(5, np.nan)), {}, r"fc1\.bias holds what is not finite in float64"),
    "too large": (put("fc1.bias", np.full(5, 1e39)), {"precision": "single"}, r"fc1\.bias .* not finite in float32"),
    "integers": (put("fc1.bias", np.ones(5, int)), {}, r"fc1\.bias is of int64, expected float32 or float64$"),
    "text": (put("fc1.bias", "0 0 0 0 0"), {}, r"fc1\.bias is of object, expected float32 or float64$"),
    "group": (put("fc1/bias", np.ones(5)), {}, r"fc1 is missing$"),
    "client": (put("clients/7/fc2.bias", np.ones(10)), {}, r"clients/7: expected one of clients/0 … clients/6$"),
    "own shape": (put("clients/1/fc2.bias", np.ones(9)), {}, r"clients/1/fc2\.bias has shape \[9\], expected \[10\]$"),
    "own name": (put("clients/1/fc2.bia", np.ones(9)), {}, r"clients/1/fc2\.bia: .* did you mean 'fc2\.bias'\?$"),
    "not its own": (
        put("clients/1/fc1.bias", np.ones(5)),
        {},
        r"clients/1/fc1\.bias: algorithm\.name = 'fedrep' has no fc1\.bias of a client's own$",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_do_not_fit_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    change, more, words = BAD[name]
    with h5py.File(written(tmp_path / "initial.h5"), "a") as file:
        change(file)
    with pytest.raises(UsageError, match=words) as caught:
        begun({**values(tmp_path / "initial.h5", "fedrep"), **more})
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "initial.h5") in str(caught.value)


def test_shared_layers_and_momentum_have_no_value_of_one_client(tmp_path: Path) -> None:
    with h5py.File(written(tmp_path / "initial.h5"), "a") as file:
        file["clients/1/fc2.bias"] = np.ones(10)
    kept = values(tmp_path / "initial.h5", momentum=0.5, persist_optimizer=True)
    with pytest.raises(UsageError, match=r"algorithm\.name = 'fedavg' has no fc2\.bias of a client's own$"):
        begun(kept)


def test_every_client_needs_a_value_and_shared_ones_stand_at_the_root(tmp_path: Path) -> None:
    with h5py.File(written(tmp_path / "initial.h5"), "a") as file:
        bias = file.pop("fc2.bias")
        for client in range(6):
            file[f"clients/{client}/fc2.bias"] = np.ones(10)
    del bias
    fedrep = values(tmp_path / "initial.h5", "fedrep")
    with pytest.raises(UsageError, match=r"there is no fc2\.bias, nor clients/6/fc2\.bias; expected one of shape"):
        begun(fedrep)
    with h5py.File(tmp_path / "initial.h5", "a") as file:
        file["clients/6/fc2.bias"] = np.ones(10)
    begun(fedrep)
    tuned = values(tmp_path / "initial.h5", "fedrep", evaluation="fine-tune")
    with pytest.raises(UsageError, match=r"there is no fc2\.bias, which clients share; expected \[10\]$"):
        begun(tuned)


def test_bad_files_end_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "initial.h5").write_text("no HDF5")
    words = ["--set", f"model.initial='{tmp_path / 'initial.h5'}'", "--out", str(tmp_path / "out")]
    assert main(["run", "salf-digits", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "initial.h5: truncated or damaged, expected an HDF5 file" in line
    assert not (tmp_path / "out").exists()


def test_moments_leave_nothing_to_begin_with() -> None:
    linear = {"name": "linear", "dimension": 6, "rank": 2, "samples": 9}
    what = {
        **{"rounds": 1, "clients": 2, "algorithm": {"name": "linear_fedrep"}, "data": linear},
        "model": {"name": "linear", "initial": "any.h5"},
    }
    with pytest.raises(UsageError, match=r"^model\.initial = 'any\.h5' has no meaning with .*initial = 'moments'"):
        from_table(what).check(None)
