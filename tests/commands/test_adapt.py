"""Clients that never took part adapt: against plain torch loops, against the evaluation of runs, and on the disk."""

from __future__ import annotations

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
from helpers.launcher import alone
from helpers.toys import load, mlp_task, plain, same_bits, visits_of
from hpcfl import store
from hpcfl.algorithms.fedrep import FedRep
from hpcfl.algorithms.lg_fedavg import LgFedAvg
from hpcfl.cli import main
from hpcfl.comm.launcher import launched
from hpcfl.commands.adapt import adapt_request, adapted
from hpcfl.commands.show import summary
from hpcfl.config import from_table
from hpcfl.engine.record import COLUMNS
from hpcfl.learning.optim import FINE_TUNING
from hpcfl.learning.task import Task
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
    store.save(folder, ROUNDS, shared, [], {"sim_seconds": 1.0}, 1)
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
        chosen: adapted(adapt_request(tmp_path / "run", chosen, 3, None, tmp_path / f"{chosen}.h5"))
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
        assert set(file["clients/1"].attrs) == {"client", "train_samples", "test_samples"}
    assert main(["adapt", str(tmp_path / "run"), "--client", "1"]) == 0
    assert "-" in capsys.readouterr().out.splitlines()[-2]


def own_data(path: Path, features: int, tested: list[int]) -> None:
    """Write an HDF5 data set of 3 clients, of which only some have a test part."""
    with h5py.File(path, "w") as file:
        for client in range(3):
            for part in ("train", "test"):
                count = 6 if part == "train" or client in tested else 0
                x = np.random.default_rng(client).normal(size=(count, features))
                file[f"clients/{client}/{part}/features"] = x.astype(np.float32)
                file[f"clients/{client}/{part}/labels"] = np.arange(count) % 3


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


CASES = {
    "none": ("none", "'none' is no run folder"),
    "empty": ("empty", "'empty' is no run folder"),
    "no-checkpoint": ("begun", "'begun' has no checkpoint: expected a run that has finished or was stopped"),
    "salf": (
        "salf",
        "'salf' has no layers that a client could adapt; expected a run of fedavg, fedprox, fedrep, flic, hf_maml",
    ),
    "local": ("local", "algorithm.name = 'local' has no layers"),
    "client-7": ("run --client 7", "--client 7: expected ids 0 … 6, got 7; did you mean 6"),
    "client-below-0": ("run --client=2,-3", "expected ids 0 … 6, got -3; did you mean 0"),
    "client-word": ("run --client 1,al", "--client 1,al: expected ids with commas between them, or 'all'; got 'al'"),
    "client-nothing": ("run --client 1,,2", "got ''"),
    "epochs-0": ("run --epochs 0", "hpcfl adapt: Invalid value for '--epochs': 0"),
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
from hpcfl.cli import main

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
