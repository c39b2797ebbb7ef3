"""The clients' models after a run: what they predict is what the run recorded, and whose data are not its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import hpcfl
from hpcfl import store
from hpcfl.base.errors import UsageError
from hpcfl.engine.checkpointing import restored
from hpcfl.testing.runs import alone, table, toml

CHEAP = {"epochs": 1, "batch": 50}
SOME = {"invite": "uniform", "size": 4}
SPACES = {"name": "linear_mapping", "samples_per_class": 60, "labels": 5}
LATENT = {"rounds": 3, "clients": 8, "participation": SOME, "data": SPACES, "model": {"name": "latent", "dimension": 6}}
TUNED = {"name": "fedrep", "batch": 32, "evaluation": "fine-tune", "tune_epochs": 1}
METHODS: dict[str, dict[str, Any]] = {
    "flic": {"algorithm": {"name": "flic", **CHEAP}, **LATENT},
    "flic, l2gd": {"algorithm": {"name": "flic", **CHEAP, "inside": "l2gd", "pretrain": 1}, **LATENT},
    "flic, learns before a test": {"algorithm": {"name": "flic", **CHEAP, "evaluation": "head"}, **LATENT},
    "local": {"algorithm": {"name": "local"}, **LATENT},
    "fedavg": table("fedavg", "mlp", True, rounds=2, batch_clients=3),
    "fedavg, double": table("fedavg", "mlp", True, rounds=1, precision="double"),
    "fedrep": table("fedavg", "mlp", True, rounds=1, algorithm=TUNED),
}


def made(folder: Path, method: str = "flic", **more: Any) -> Path:
    values = METHODS[method] | more
    alone(values, toml(values, folder.with_suffix(".toml")), folder)
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_predictions_are_those_that_the_run_was_tested_with(method: str, tmp_path: Path) -> None:
    data = hpcfl.open_run(made(tmp_path / "run", method))
    models = hpcfl.open_models(tmp_path / "run")
    assert models.folder == tmp_path / "run"
    found = {}
    for model in models:
        own = model.data
        right = model.predict(own.test_features) == own.test_labels
        found[model.client] = right.mean(), len(own.train_labels), len(right), own.train_features[0].size
        assert model.shape == own.train_features.shape[1:]
    assert len(models) == len(found) == data.sizes["client"]
    assert models.round == data.sizes["round"]
    columns = np.array([found[client] for client in data["client"].values]).T
    np.testing.assert_array_equal(columns[0], data["client_accuracy"][-1])
    for name, values in zip(("train_samples", "test_samples", "features"), columns[1:]):
        assert (data[name].dims, data[name].dtype) == (("client",), np.int64)
        np.testing.assert_array_equal(data[name], values, err_msg=name)


def test_embeddings_are_what_the_layers_below_the_latent_space_make(tmp_path: Path) -> None:
    models = list(hpcfl.open_models(made(tmp_path / "run")))
    assert len({model.shape for model in models}) > 1
    for model in models:
        x = model.data.train_features[:7]
        for own in (model, model.untrained):
            hidden = torch.from_numpy(x)
            for number in (1, 2, 3):
                hidden = hidden @ own.params[f"embed{number}.weight"].T + own.params[f"embed{number}.bias"]
                hidden = hidden.relu() if number < 3 else hidden
            np.testing.assert_allclose(own.embed(x), hidden, atol=1e-5)
            assert own.embed(x).shape == (len(x), 6)


def test_what_is_stored_and_what_is_shared(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "flic, learns before a test")
    models = hpcfl.open_models(folder, stored=True)
    saved = store.load(folder / "checkpoints" / "round-000003")
    personal = {int(c): {n: v[i] for n, v in own.items()} for ids, own in saved.personal for i, c in enumerate(ids)}
    for model in models:
        for name, value in model.params.items():
            np.testing.assert_array_equal(value, personal[model.client][name], err_msg=name)
    np.testing.assert_array_equal(models.shared["anchor.means"], saved.shared["anchor.means"])
    learned = {model.client: model.params["head.weight"] for model in hpcfl.open_models(folder)}
    assert all(not np.array_equal(learned[client], personal[client]["head.weight"]) for client in learned)


def write_data(file: Path, count: int, features: int) -> None:
    file.parent.mkdir(exist_ok=True)
    with h5py.File(file, "w") as data:
        for client in range(8):
            for part in ("train", "test"):
                rng = np.random.default_rng(client)
                data[f"clients/{client}/{part}/features"] = rng.normal(size=(count, features)).astype("f4")
                data[f"clients/{client}/{part}/labels"] = np.arange(count) % 5


def test_one_line_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place, shape in (("one", (20, 5)), ("fewer", (15, 5)), ("wider", (20, 6))):
        write_data(Path(place, "own.h5"), *shape)
    values = METHODS["flic"] | {"data": {"name": "hdf5", "file": "own.h5"}}
    folder = Path("run")
    shutil.copy("one/own.h5", "own.h5")
    alone(values, toml(values, Path("run.toml")), folder)
    Path("own.h5").unlink()
    assert len(list(hpcfl.open_models(folder, "one"))) == 8
    model = next(iter(hpcfl.open_models(folder, "one")))
    with pytest.raises(UsageError, match=r"^x: client \d has features of shape \(5,\), got \(4,\)$"):
        model.predict(np.zeros((3, 4), np.float32))
    gone, others = "expected where the run's data are: .*own.h5", "client 0 has 15 as .*, in the run 20"
    for said in (gone, others):  # the models are those of the run all the same
        if said is others:
            shutil.copy("fewer/own.h5", "own.h5")
        found = next(iter(hpcfl.open_models(folder)))
        np.testing.assert_array_equal(found.predict(model.data.test_features), model.predict(model.data.test_features))
        with pytest.raises(UsageError, match=rf"^data_dir = 'None': {said}"):
            _ = found.data
    wrong: dict[str, tuple[Any, ...]] = {
        r"^'none' is no run folder": ("none",),
        r"^data_dir = 'fewer': client 0 has 15 as \w+, in the run 20: expected the data of the run$": ("run", "fewer"),
        r"^data_dir = 'wider': client 0 has 6 as features, in the run 5: expected the data of the": ("run", "wider"),
    }
    for said, given in wrong.items():
        with pytest.raises(UsageError, match=said):
            hpcfl.open_models(*given)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(UsageError, match=r"^'run' has no checkpoint: expected a run that has finished or was stopped$"):
        hpcfl.open_models(folder, "one")


def test_a_model_without_a_latent_space_embeds_nothing(tmp_path: Path) -> None:
    model = next(iter(hpcfl.open_models(made(tmp_path / "run", "fedavg"))))
    with pytest.raises(UsageError, match=r"^model: its first layer is 'fc1': expected an embedding, name = "):
        model.embed(model.data.test_features)


def test_numbers_come_back_as_numbers() -> None:
    extras = {"empty": torch.zeros(2), "rounds": 0.0, "phase": ""}
    found = restored(extras, {"empty": np.ones(2), "rounds": np.array(5.0), "phase": "descent", "gone": 1.0})
    assert found.pop("empty").tolist() == [1.0, 1.0]
    assert found == {"rounds": 5.0, "phase": "descent"}
    assert type(found["rounds"]) is float


@pytest.mark.launch
def test_importing_it_imports_no_torch() -> None:
    code = "import sys, hpcfl; hpcfl.open_models; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["False"]
