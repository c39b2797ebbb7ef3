"""Clients that never took part adapt: against plain torch loops, against the evaluation of runs, and on the disk."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.nn import functional

from algorithms.test_personal import Plain, assert_close
from helpers.checkpoints import save
from helpers.launcher import alone
from helpers.toys import load, mlp_task, plain, same_bits, visits_of
from hpcfl import store
from hpcfl.algorithms.fedrep import FedRep
from hpcfl.algorithms.lg_fedavg import LgFedAvg
from hpcfl.commands.adapt import adapt_request, adapted
from hpcfl.commands.cli import main
from hpcfl.commands.show import summary
from hpcfl.config import from_table
from hpcfl.engine.record import COLUMNS
from hpcfl.learning.optim import FINE_TUNING
from hpcfl.learning.task import Task
from hpcfl.mpi.launcher import launched
from hpcfl.testing.runs import play, resume, table

ROUNDS = 3
ABSENT = [1, 4]
KEYS = {"lr": 0.1, "batch": 8, "tune_epochs": 2}
HEAD = ["fc3.weight", "fc3.bias"]
FEDREP = {"name": "fedrep", **KEYS, "momentum": 0.5, "weight_decay": 0.01}
METHODS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "fedrep": (FEDREP, HEAD),
    "fedrep, heads sent": ({**FEDREP, "evaluation": "fine-tune"}, HEAD),
    "lg_fedavg": ({"name": "lg_fedavg", **KEYS}, ["fc1.weight", "fc1.bias"]),
    "fedavg": ({"name": "fedavg", **KEYS, "momentum": 0.5, "tune_layers": 2}, ["fc2.weight", "fc2.bias", *HEAD]),
    "hf_maml": ({"name": "hf_maml", **KEYS}, HEAD),
}


def made(folder: Path, algorithm: dict[str, Any], dropout: float = 0.0, **more: Any) -> Task:
    """Make a run folder of 7 clients of unequal sizes whose shared state is arbitrary; `ABSENT` come too late.

    After the checkpoint all clients took part, in a round that was given up.
    """
    model = {"name": "mlp", "hidden": [16, 8], "dropout": dropout}
    config = from_table({**table("fedavg", "mlp", True), "algorithm": algorithm, "model": model, **more})
    store.create(folder, {"config": config.text(), "data_dir": ""})
    labels = {"client": range(config.clients), "layer": ["a"], "rank": range(1)}
    segment = store.begin(folder, COLUMNS, labels, 0, ROUNDS + 1)
    for round_ in range(ROUNDS + 1):
        late = ABSENT if round_ < ROUNDS else []
        segment.write(round_, {"arrived": [c not in late and c % 3 >= round_ % 2 for c in range(config.clients)]})
    segment.close()
    task = Task(config.model, config.data.federate(config.clients, config.seed, None), config.seed)
    rng = np.random.default_rng(1)
    start = config.algorithm.init_server(task)
    shared = {name: value.numpy() + rng.normal(0, 0.2, value.shape).astype("f4") for name, value in start.items()}
    save(folder, ROUNDS, shared, [], {"sim_seconds": 1.0}, 1)
    return task


def shared_of(folder: Path) -> dict[str, torch.Tensor]:
    found = store.latest(folder)
    assert found is not None
    return {name: torch.from_numpy(value) for name, value in store.load(found).shared.items()}


def tensors(path: Path) -> dict[int, dict[str, torch.Tensor]]:
    with h5py.File(path) as file:
        return {int(c): {n: torch.from_numpy(x[()]) for n, x in own.items()} for c, own in file["clients"].items()}


def scored(task: Task, state: dict[str, torch.Tensor], client: int) -> tuple[float, float]:
    """Accuracy and mean loss of an ordinary network on a client's own test part."""
    own, net = task.federation.client(client), plain(task)
    load(net, {name: state[name] for name in task.initial()})
    outputs, y = net(torch.from_numpy(own.test_features)).detach(), torch.from_numpy(own.test_labels)
    right = (outputs.argmax(1) == y).double().mean()
    return float(right), float(functional.cross_entropy(outputs, y))


@pytest.mark.parametrize("method", METHODS)
def test_it_is_the_plain_loop(method: str, tmp_path: Path) -> None:
    keys, own = METHODS[method]
    task = made(tmp_path / "run", keys)
    found = adapted(adapt_request(tmp_path / "run", None, None, None, tmp_path / "own.h5"))
    shared, initial = shared_of(tmp_path / "run"), task.initial()
    personal = {} if keys["name"] in ("fedavg", "hf_maml") else {name: initial[name] for name in own}
    start = shared | personal
    optimizer = {key: keys[key] for key in ("lr", "batch", "momentum", "weight_decay") if key in keys}
    loop = Plain(LgFedAvg(**optimizer), task, set(own))
    assert found["layers"] == own
    assert [row["client"] for row in found["clients"]] == ABSENT
    for row in found["clients"]:
        client = row["client"]
        wanted = loop.trained(client, start, [(True, False, 2, FINE_TUNING)], ROUNDS)
        there = tensors(tmp_path / "own.h5")[client]
        assert_close(there, {name: wanted[name] for name in own})
        before = row["accuracy_before"], row["loss_before"]
        after = row["accuracy_after"], row["loss_after"]
        assert before == pytest.approx(scored(task, start, client), abs=1e-5)
        assert after == pytest.approx(scored(task, shared | there, client), abs=1e-5)
        assert row["loss_after"] < row["loss_before"]
        sizes = task.federation.train_sizes[client], task.federation.test_sizes[client]
        assert (row["train_samples"], row["test_samples"]) == sizes


@pytest.mark.parametrize("method", METHODS)
def test_only_what_is_personal_learns(method: str, tmp_path: Path) -> None:
    keys, own = METHODS[method]
    task = made(tmp_path / "run", keys)
    shared, algorithm = (
        shared_of(tmp_path / "run"),
        adapt_request(tmp_path / "run", "all", None, None, None).config.algorithm,
    )
    fresh, learned = (algorithm.adapted(task, shared, visits_of(task, [2, 5]), epochs) for epochs in (0, 2))
    for name in task.initial():
        for client in range(2):
            assert torch.equal(learned[name][client], fresh[name][client]) == (name not in own), name
            if name not in own:
                assert torch.equal(learned[name][client], shared[name])


def test_where_nothing_is_personal_new_clients_are_tested_with_the_shared_model() -> None:
    task, algorithm = mlp_task([3, 8]), FedRep(head_layers=0, evaluation="new-client")
    found = algorithm.model(task, task.initial(), {}, visits_of(task, [0, 1]))
    assert same_bits({name: value[1] for name, value in found.items()}, task.initial())


@pytest.mark.parametrize("clock", ["simulated", "wall"])
def test_who_adapts_together_does_not_matter(clock: str, tmp_path: Path) -> None:
    wall = {"clock": "wall", "batch_clients": "auto", "lane_width": 3, "speed": {"model": "none"}}
    made(tmp_path / "run", FEDREP, dropout=0.2, **(wall if clock == "wall" else {"batch_clients": 4}))
    found = {
        chosen: adapted(adapt_request(tmp_path / "run", chosen, "3", None, tmp_path / f"{chosen}.h5"))
        for chosen in ("3", "6,3,3,1", "all")
    }
    (one,) = found["3"]["clients"]
    (among,) = (row for row in found["6,3,3,1"]["clients"] if row["client"] == 3)
    assert [row["client"] for row in found["6,3,3,1"]["clients"]] == [1, 3, 6]
    assert one == pytest.approx(among, abs=1e-6)
    assert one == pytest.approx(found["all"]["clients"][3], abs=1e-6)
    alone_, whole = tensors(tmp_path / "3.h5")[3], tensors(tmp_path / "all.h5")
    assert whole.keys() == set(range(7))
    for name in HEAD:
        torch.testing.assert_close(alone_[name], whole[3][name], atol=1e-6, rtol=0)
        assert not torch.allclose(whole[2][name], whole[3][name], atol=1e-3)


@pytest.mark.parametrize("name", ["fedrep", "lg_fedavg"])
def test_it_is_how_new_clients_are_evaluated(name: str, solo: Any, tmp_path: Path) -> None:
    is_as_evaluated(play(solo, run_of(name), tmp_path / "run", None))


@pytest.mark.mpi
def test_it_is_so_for_runs_resumed_on_any_number_of_ranks(world: Any, shared_dir: Path) -> None:
    folder = play(world, run_of("fedrep"), shared_dir / "run", world.comm)
    resume(world, folder, 2, world.comm)
    if world.rank == 0:
        is_as_evaluated(folder)
    world.meet()


def run_of(name: str) -> dict[str, Any]:
    """A run's config that tests new clients, and does not reach all."""
    algorithm = {**KEYS, "name": name, "evaluation": "new-client"}
    model = {"name": "mlp", "hidden": [16, 8]}
    few = {"invite": "uniform", "size": 2}
    return {**table("fedavg", "mlp", True), "algorithm": algorithm, "model": model, "participation": few}


def is_as_evaluated(folder: Path) -> None:
    """The figures of a run's last evaluation come from the state of its last checkpoint."""
    found = adapted(adapt_request(folder, "all", None, None, None))
    data = store.open_run(folder)
    last = data.sel(round=3)
    for score, column in (("accuracy_after", "client_accuracy"), ("loss_after", "client_test_loss")):
        assert [row[score] for row in found["clients"]] == pytest.approx(last[column].values.tolist(), abs=1e-6)
        assert found["mean"][score] == pytest.approx(float(last[column].mean()), abs=1e-6)
    never = [client for client in range(7) if not (data["blocks"].values[:, client] > 0).any()]
    assert adapt_request(folder, None, None, None, None).clients.tolist() == never != []
    assert (found["round"], found["state_sha256"]) == (4, summary(folder)["state_sha256"])


def test_the_file_and_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task = made(Path("run"), FEDREP)
    before = {path: path.read_bytes() for path in Path("run").rglob("*.h5")}
    assert main(["adapt", "run", "--epochs", "1", "--json", "--out", "new/own.h5"]) == 0
    found = json.loads(capsys.readouterr().out)
    facts = {"run": "run", "round": ROUNDS, "algorithm": "fedrep", "epochs": 1}
    assert found.items() >= facts.items()
    assert found["state_sha256"] == store_digest(Path("run"))
    for score, mean in found["mean"].items():
        assert mean == pytest.approx(np.mean([row[score] for row in found["clients"]]))
    with h5py.File("new/own.h5") as file:
        assert dict(file.attrs) == {**facts, "state_sha256": found["state_sha256"]}
        assert [int(name) for name in file["clients"]] == ABSENT
        for row in found["clients"]:
            group = file[f"clients/{row['client']}"]
            assert dict(group.attrs) == row
            assert {name: item.shape for name, item in group.items()} == {
                name: tuple(task.initial()[name].shape) for name in HEAD
            }
    assert [path.name for path in Path("new").iterdir()] == ["own.h5"]
    assert {path: path.read_bytes() for path in Path("run").rglob("*.h5")} == before
    assert main(["adapt", "run", "--epochs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"run: fedrep after 3 rounds, state {found['state_sha256'][:12]}; fc3.weight, fc3.bias")
    for row, first in [*((row, str(row["client"])) for row in found["clients"]), (found["mean"], "mean")]:
        (line,) = (line for line in lines if line.strip("│ ").split(" ")[0] == first)
        assert all(f"{row[score]:.4f}" in line for score in found["mean"])


def store_digest(folder: Path) -> str:
    import hashlib

    shared = shared_of(folder)
    return hashlib.sha256(b"".join(shared[name].numpy().tobytes() for name in sorted(shared))).hexdigest()


def test_a_client_without_a_test_part_has_no_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own_data(tmp_path / "own.h5", 5, tested=[0, 2])
    data = {"name": "hdf5", "file": str(tmp_path / "own.h5")}
    made(tmp_path / "run", FEDREP, clients=3, data=data)
    assert main(["adapt", str(tmp_path / "run"), "--client", "0,1", "--json", "--out", str(tmp_path / "a.h5")]) == 0
    found = json.loads(capsys.readouterr().out)
    kept, lacking = found["clients"]
    assert lacking["accuracy_after"] is None
    assert lacking["loss_before"] is None
    assert found["mean"]["loss_after"] == kept["loss_after"]
    with h5py.File(tmp_path / "a.h5") as file:
        assert set(file["clients/1"].attrs) == {"client", "train_samples", "test_samples", "gradients"}
    assert main(["adapt", str(tmp_path / "run"), "--client", "1"]) == 0
    assert "-" in capsys.readouterr().out.splitlines()[-2]


def own_data(path: Path, features: int, tested: list[int], pixels: bool = False, targets: bool = False) -> None:
    """Write an HDF5 data set of 3 clients, of which only some have a test part."""
    with h5py.File(path, "w") as file:
        for client in range(3):
            for part in ("train", "test"):
                count = 6 if part == "train" or client in tested else 0
                x = np.random.default_rng(client).normal(size=(count, features))
                file[f"clients/{client}/{part}/features"] = np.uint8(90 + 30 * x) if pixels else x.astype(np.float32)
                y = np.arange(count) % 3
                file[f"clients/{client}/{part}/labels"] = y / 2 if targets else y


def test_a_curve_has_what_each_number_of_epochs_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "run", FEDREP, dropout=0.2)
    each = {n: adapted(adapt_request(tmp_path / "run", None, str(n), None, None)) for n in (1, 3)}
    found = adapted(adapt_request(tmp_path / "run", None, "0,1,3", None, tmp_path / "own.h5"))
    assert [point["epochs"] for point in found["curve"]] == [0, 1, 3]
    for point in found["curve"][1:]:
        wanted = each[point["epochs"]]
        assert point["accuracy"] == wanted["mean"]["accuracy_after"]
        assert point["loss"] == wanted["mean"]["loss_after"]
        assert point["gradients"] == np.mean([row["gradients"] for row in wanted["clients"]])
    for row in found["clients"]:
        assert row["gradients"] == 3 * row["train_samples"]
        assert row["curve"][0] | {"gradients": 0, "loss": row["loss_before"]} == row["curve"][0]
        assert row["curve"][-1]["accuracy"] == row["accuracy_after"]
    assert main(["adapt", str(tmp_path / "run"), "--epochs", "1,3"]) == 0
    last = capsys.readouterr().out.splitlines()[-2]
    assert all(f"{point['accuracy']:.4f}" in last for point in found["curve"])


# ---- clients in a file of their own


def same_as_in(task: Task, clients: list[int], path: Path, ids: list[str]) -> Path:
    """Write what some clients of a run hold to a file, under other names."""
    with h5py.File(path, "w") as file:
        for client, name in zip(clients, ids, strict=True):
            held = task.federation.client(client)
            for part in ("train", "test"):
                for kind in ("features", "labels"):
                    file[f"clients/{name}/{part}/{kind}"] = getattr(held, f"{part}_{kind}")
    return path


@pytest.mark.parametrize("batch", [0, 8])
def test_a_file_gives_what_the_samples_give_with_random_numbers_of_its_own(batch: int, tmp_path: Path) -> None:
    """Steps on all samples draw nothing; those on batches draw by another key than any client of the run."""
    task = made(tmp_path / "run", {**FEDREP, "batch": batch})
    path = same_as_in(task, [5, 2, 3], tmp_path / "new.h5", ["w10", "w2", "x"])
    known = adapted(adapt_request(tmp_path / "run", "2,3,5", None, None, None))
    found = adapted(adapt_request(tmp_path / "run", None, None, None, tmp_path / "out.h5", path))
    assert found["data_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    rows = {row["client"]: row for row in found["clients"]}
    assert list(rows) == ["w2", "w10", "x"]  # in natural order, by which they are numbered
    for row, name in zip(known["clients"], ["w2", "x", "w10"]):
        assert rows[name]["loss_before"] == pytest.approx(row["loss_before"], abs=1e-6)
        assert (rows[name]["loss_after"] == pytest.approx(row["loss_after"], abs=1e-6)) == (batch == 0)
    some = adapted(adapt_request(tmp_path / "run", "x, w2", None, None, None, path))
    assert [row["client"] for row in some["clients"]] == ["w2", "x"]
    assert some["clients"][1] == pytest.approx(rows["x"], abs=1e-6)
    with h5py.File(tmp_path / "out.h5") as file:
        assert set(file["clients"]) == {"w2", "w10", "x"}
        assert file.attrs["data_sha256"] == found["data_sha256"]
        assert file["clients/w10"].attrs["client"] == "w10"


def test_a_file_is_scaled_as_that_of_the_run(tmp_path: Path) -> None:
    own_data(tmp_path / "pixels.h5", 5, [0, 1, 2], pixels=True)
    data = {"name": "hdf5", "file": str(tmp_path / "pixels.h5"), "scale": "centred"}
    made(tmp_path / "run", {**FEDREP, "batch": 0}, clients=3, data=data)
    known, found = (
        adapted(adapt_request(tmp_path / "run", "all", None, None, None, path))["clients"]
        for path in (None, tmp_path / "pixels.h5")
    )
    assert [row["client"] for row in found] == ["0", "1", "2"]
    for one, other in zip(known, found):
        assert other == pytest.approx(one | {"client": other["client"]}, abs=1e-6)


def test_targets_adapt_without_an_accuracy(tmp_path: Path) -> None:
    own_data(tmp_path / "own.h5", 5, [0, 1, 2], targets=True)
    made(tmp_path / "run", FEDREP, clients=3, data={"name": "hdf5", "file": str(tmp_path / "own.h5")})
    found = adapted(adapt_request(tmp_path / "run", "1", None, None, None, tmp_path / "own.h5"))
    (row,) = found["clients"]
    assert row["accuracy_after"] is None
    assert row["loss_after"] < row["loss_before"]


FLIC = {"name": "flic", "lr": 0.01, "lambda1": 0.0, "lambda2": 0.0, "pretrain": 80, "pretrain_batch": 0, "batch": 0}


def test_newcomers_of_other_shapes_align_to_the_anchors_that_are_served_last(tmp_path: Path) -> None:
    """They end where the anchors of the checkpoint are, not where those of round 0 were."""
    data = {"name": "linear_mapping", "labels": 3, "samples_per_class": 40}
    model = {"name": "latent", "widths": [8], "dimension": 2}
    keys = {**table("fedavg", "mlp", True), "algorithm": FLIC, "data": data, "model": model, "speed": {"model": "none"}}
    config = from_table({**keys, "participation": {}})
    store.create(tmp_path / "run", {"config": config.text(), "data_dir": ""})
    task = Task(config.model, config.data.federate(config.clients, config.seed, None), config.seed)
    first = config.algorithm.init_server(task)["anchor.means"].numpy()
    served = first + np.array([6.0, -6.0], dtype=np.float32)
    save(tmp_path / "run", ROUNDS, {"anchor.means": served}, [], {"sim_seconds": 1.0}, 1)
    with h5py.File(tmp_path / "new.h5", "w") as file:
        for name, shape in {"wide": (60,), "image": (2, 5)}.items():
            y = np.arange(30) % 3
            x = np.eye(3, np.prod(shape), dtype=np.float32)[y] * 3
            for part in ("train", "test"):
                file[f"clients/{name}/{part}/features"], file[f"clients/{name}/{part}/labels"] = (
                    x.reshape(-1, *shape),
                    y,
                )
    found = adapted(adapt_request(tmp_path / "run", None, "1", None, tmp_path / "out.h5", tmp_path / "new.h5"))
    assert [row["client"] for row in found["clients"]] == ["image", "wide"]
    assert [row["gradients"] for row in found["clients"]] == [30 * (80 + 2)] * 2
    for name in ("image", "wide"):
        with h5py.File(tmp_path / "new.h5") as file:
            x = file[f"clients/{name}/train/features"][()].reshape(30, -1)[:3]
        with h5py.File(tmp_path / "out.h5") as file:
            own = {key: value[()] for key, value in file[f"clients/{name}"].items()}
        hidden = np.maximum(x @ own["embed1.weight"].T + own["embed1.bias"], 0)
        embedded = hidden @ own["embed2.weight"].T + own["embed2.bias"]
        apart = [np.linalg.norm(embedded - means, axis=1).mean() for means in (served, first)]
        assert apart[0] < 0.5 * apart[1]


# ---- bad input


def prepare() -> None:
    """Make what the cases are about, in the working folder."""
    made(Path("run"), FEDREP)
    made(Path("all-shared"), {**FEDREP, "head_layers": 0})
    for name in ("salf", "local"):
        config = from_table({**table("salf", "mlp", True), "algorithm": {"name": name}})
        store.create(Path(name), {"config": config.text(), "data_dir": ""})
    store.create(Path("begun"), {"config": from_table(table("fedavg", "mlp", True)).text(), "data_dir": ""})
    Path("empty").mkdir()
    Path("file").write_text("")
    own_data(Path("own.h5"), 5, [0])
    made(Path("wider"), FEDREP, clients=3, data={"name": "hdf5", "file": "own.h5"})
    Path("other").mkdir()
    own_data(Path("other/own.h5"), 6, [0])
    made(Path("everybody"), FEDREP, clients=1)
    for name in ("classes", "targets", "nan"):
        own_data(Path(f"{name}.h5"), 5, [0, 1, 2], targets=name == "targets")
    with h5py.File("classes.h5", "a") as file:
        file["clients/1/test/labels"][3] = 7
    with h5py.File("nan.h5", "a") as file:
        file["clients/2/train/features"][1, 2] = np.nan
    with h5py.File("pool.h5", "w") as file:
        file["train/features"], file["train/labels"] = np.zeros((6, 5)), np.arange(6) % 3
    made(Path("regression"), FEDREP, clients=3, data={"name": "hdf5", "file": "targets.h5"})


CASES = {
    "none": ("none", "'none' is no run folder"),
    "empty": ("empty", "'empty' is no run folder"),
    "no-checkpoint": ("begun", "'begun' has no checkpoint: expected a run that has finished or was stopped"),
    "salf": (
        "salf",
        "'salf' has no layers that a client could adapt; expected a run of "
        "decoupled_diloco, fedasync, fedavg, feddyn, fednova, fedprox, fedrep",
    ),
    "local": ("local", "algorithm.name = 'local' has no layers"),
    "client-7": ("run --client 7", "--client 7: expected ids 0 … 6, got 7; did you mean 6"),
    "client-below-0": ("run --client=2,-3", "expected ids 0 … 6, got -3; did you mean 0"),
    "client-word": ("run --client 1,al", "--client 1,al: expected ids with commas between them, or 'all'; got 'al'"),
    "client-nothing": ("run --client 1,,2", "got ''"),
    "epochs-0": ("run --epochs 0", "--epochs 0: expected a number of at least 1, or ascending ones"),
    "epochs-descend": ("run --epochs 1,5,2", "--epochs 1,5,2: expected a number of at least 1, or ascending ones"),
    "epochs-twice": ("run --epochs 2,2", "--epochs 2,2: expected a number of at least 1"),
    "epochs-words": ("run --epochs few", "--epochs few: expected a number of at least 1"),
    "file-missing": ("run --data none.h5", "none.h5: no such file"),
    "file-of-text": ("run --data file", "file: truncated or damaged, expected an HDF5 file"),
    "file-of-a-pool": ("wider --data pool.h5", "pool.h5: no clients, expected groups clients/<id>/train"),
    "file-of-no-id": ("wider --data own.h5 --client 1,x", "--client 1,x: expected ids in own.h5 (0, 1, 2), got 'x'"),
    "file-of-other-shape": (
        "run --data own.h5",
        "own.h5: client '0' has 5 features, the run's have the shape (1, 8, 8): algorithm 'fedrep' shares one model; "
        "expected the same, or a run of flic",
    ),
    "file-of-more-classes": (
        "wider --data classes.h5",
        "classes.h5: clients/1/test/labels hold class 7, expected classes of the run: 0 … 2",
    ),
    "file-of-targets": (
        "wider --data targets.h5",
        "targets.h5: clients/0/train/labels are real targets, those of the run classes",
    ),
    "file-of-classes": (
        "regression --data own.h5",
        "clients/0/train/labels are classes, those of the run real targets",
    ),
    "file-with-nan": ("wider --data nan.h5", "nan.h5: clients/2/train/features: sample 1 holds nan"),
    "out-is-there": ("run --out file", "--out file already exists: expected a new file"),
    "out-below-a-file": ("run --out file/own.h5", "'file/own.h5' cannot be written"),
    "everybody": (
        "everybody",
        "all clients of 'everybody' have taken part: expected --client ID[,ID...] or --client a",
    ),
    "no-command-line": ("", "hpcfl adapt: Missing argument 'FOLDER'"),
}
LATER = {
    "out-has-a-long-name": (f"run --out {'x' * 300}", "cannot be written: File name too long"),
    "nothing-personal": ("all-shared", "'fedrep' shares all layers here: none is left to adapt"),
    "other-data": ("wider --data-dir other", "'fc1.weight' has shape [16, 6] on these data, in the checkpoint [16, 5]"),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        prepare()
    return folder


@pytest.mark.parametrize("name", [*CASES, *LATER])
def test_one_line(
    name: str, prepared: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed, words = {**CASES, **LATER}[name]
    monkeypatch.chdir(prepared)
    monkeypatch.delenv("HPCFL_DATA", raising=False)
    before = sorted(Path().rglob("*"))
    assert main(["adapt", *typed.split()]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("hpcfl: ")
    assert words in line
    assert sorted(Path().rglob("*")) == before


SEVERAL = """
import json, sys
from hpcfl.commands.cli import main

codes = [main(["adapt", *words.split()]) for words in json.loads(sys.argv[1])]
print(json.dumps({"codes": codes, "torch": "torch" in sys.modules}))
"""


@pytest.mark.launch
def test_all_that_can_be_is_judged_before_torch_is_imported(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(prepared)
    ended = alone([sys.executable, "-c", SEVERAL, json.dumps([typed for typed, _ in CASES.values()])])
    assert json.loads(ended.out) == {"codes": [2] * len(CASES), "torch": False}


@pytest.mark.mpi
def test_under_a_launcher_nothing_adapts(world: Any, shared_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not launched():
        pytest.skip("needs a launcher")
    assert main(["adapt", str(shared_dir)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (world.rank == 0)
    assert world.rank or "expected it without mpirun" in lines[0]
    world.meet()
