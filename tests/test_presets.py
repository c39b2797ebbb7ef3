"""The presets, on small files of the data sets' own formats; and presets that build on others."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from data.test_sources import idx_bytes, refused
from golden import presets as golden
from hpcfl.algorithms import ServerState, algorithms
from hpcfl.commands import check
from hpcfl.commands.check import report
from hpcfl.config import Config, load
from hpcfl.config.presets import about, flat, overlays, presets, read, read_overlay, variants
from hpcfl.data import Federation
from hpcfl.data.shared import attach, shared
from hpcfl.engine.job import Job
from hpcfl.engine.record import Record
from hpcfl.engine.simulated import Simulated
from hpcfl.launch.request import run_request
from hpcfl.launch.run import launch
from hpcfl.mpi.transport import Transport
from hpcfl.store import open_run

NAMES = sorted(presets())
PAPER = [name for name in NAMES if name.startswith("srpfl-fig") and not name.endswith("-small")]
LESS = {  # less data per client; HF-MAML's steps stand for passes over it
    "femnist": ("data.samples=4",),
    "imbalance": ("data.imbalance=4",),
    "sent140": ("data.min_samples=5", "data.length=2"),
    "hf_maml": ("algorithm.steps=1",),
}


def slow(name: str) -> bool:
    """Whether a round takes long, up to half a minute, however little data there is, or is much as another's.

    20 of 100 classes are at least 20 samples, which pass the convolutions up to 55 times in a visit; and HF-MAML's
    first round is all clients', each of which goes through its large network several times per step. Figures 4 to 7
    differ from Figure 3 in who takes part and how fast: on the smaller networks that is seen as well.
    """
    table = read(name)
    many, large = table["data"]["name"] == "cifar100", table["model"]["name"] != "mlp"
    again = name.startswith(("srpfl-fig4", "srpfl-fig5", "srpfl-fig6", "srpfl-fig7", "srpfl-fig8-stragglers"))
    return many or (large and (again or table["algorithm"]["name"] == "hf_maml"))


def images(folder: Path, split: str, part: str, labels: np.ndarray) -> None:
    """Write IDX files as sparse as can be: one pixel per image."""
    pixels = np.zeros((len(labels), 28, 28), dtype=np.uint8)
    pixels[np.arange(len(labels)), labels % 28, labels % 28] = 255
    folder.mkdir(exist_ok=True)
    (folder / f"{split}{part}-images-idx3-ubyte").write_bytes(idx_bytes(pixels))
    (folder / f"{split}{part}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))


def cifar(path: Path, classes: int, count: int) -> None:
    path.parent.mkdir(exist_ok=True)
    records = np.random.default_rng(count).integers(0, 256, (count, 3072 + (2 if classes == 100 else 1)))
    records[:, -3073] = np.arange(count) % classes
    path.write_bytes(records.astype(np.uint8).tobytes())


def leaf(path: Path, users: int, samples: int) -> None:
    path.parent.mkdir(parents=True)
    image = {label: [int(place % 10 == label) for place in range(784)] for label in range(10)}
    labels = [number % 10 for number in range(samples)]
    data = {f"f{user}": {"x": [image[label] for label in labels], "y": labels} for user in range(users)}
    path.write_text(json.dumps({"users": list(data), "num_samples": [samples] * users, "user_data": data}))


def tweets(folder: Path, users: int) -> None:
    folder.mkdir()
    with (folder / "training.1600000.processed.noemoticon.csv").open("w", encoding="latin-1", newline="") as file:
        for number in range(5 * users):
            csv.writer(file).writerow(
                [4 * (number % 2), number, "", "", f"u{number // 5}", ("bad", "good")[number % 2]]
            )
    lines = (" ".join([word, *["0.5"] * 99, sign]) for word, sign in (("good", "1.0"), ("bad", "-1.0")))
    (folder / "glove.6B.100d.txt").write_text("".join(f"{line}\n" for line in lines))


def usps(folder: Path, train: int, test: int) -> None:
    folder.mkdir()
    with h5py.File(folder / "usps.h5", "w") as file:
        for part, count in (("train", train), ("test", test)):
            file[f"{part}/data"] = np.zeros((count, 256), dtype=np.float32)
            file[f"{part}/target"] = np.arange(count) % 10


def embeddings(path: Path, clients: int) -> None:
    with h5py.File(path, "w") as file:
        for client in range(clients):
            for part in ("train", "test"):
                width = 8 if client % 2 else 12
                file[f"clients/{client}/{part}/features"] = np.ones((4, width), dtype=np.float32)
                file[f"clients/{client}/{part}/labels"] = np.arange(4)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files of each format: just enough for 100 clients and their classes."""
    home = tmp_path_factory.mktemp("data")
    images(home / "mnist", "", "train", np.arange(60_000) % 10)
    images(home / "mnist", "", "t10k", np.arange(200) % 10)
    images(home / "emnist", "emnist-balanced-", "train", np.arange(1100) % 11)
    images(home / "emnist", "emnist-balanced-", "test", np.arange(220) % 11)
    for file in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        cifar(home / "cifar-10-batches-bin" / f"{file}.bin", 10, 200)
    cifar(home / "cifar-100-binary" / "train.bin", 100, 2000)
    cifar(home / "cifar-100-binary" / "test.bin", 100, 200)
    for part in ("train", "test"):
        leaf(home / "femnist" / part / "all_data.json", 8, 100)
    tweets(home / "sent140", 83)
    usps(home / "usps", 2000, 200)
    embeddings(home / "textcaps.h5", 100)
    return home


def fewer(name: str) -> list[str]:
    table = read(name)
    found = (table["data"]["name"], table["algorithm"]["name"], *table["data"])
    return [setting for word in found for setting in LESS.get(word, ())]


def test_every_name_means_what_it_meant() -> None:
    """What is meant to change: python tests/golden/presets.py."""
    was = json.loads(golden.FILE.read_text())
    assert {name: golden.digest(name) for name in NAMES} == was


def test_all_say_in_a_line_what_they_are() -> None:
    lines = {name: about(name) for name in (*NAMES, *overlays())}
    assert {name: line for name, line in lines.items() if not (20 < len(line) < 120 and line.endswith("."))} == {}
    assert lines["fedrep-mnist-small"].startswith("Figure 3 of SRPFL, small: FedRep, ")
    assert lines["salf-digits"].startswith("SALF on the bundled digits")
    assert lines["wait"].startswith("FedAvg that waits for everybody")


def test_variants_say_no_more_than_is_understood_and_use_every_overlay() -> None:
    entries = [entry for _, entry in variants().values()]
    assert {key for entry in entries for key in entry} == {"about", "base", "with", "set"}
    assert {name for entry in entries for name in entry.get("with", ())} == set(overlays())
    assert not overlays().keys() & presets().keys()


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_is_valid(name: str, folder: Path) -> None:
    config = load(name, fewer(name))
    ranks = 1 + config.clients if config.clock == "wall" else 1
    lines = list(report(config, config.check(folder), folder, ranks))
    assert lines[0].startswith(f"config        valid: {config.algorithm.name}, ")


@pytest.fixture(scope="module")
def federations(folder: Path) -> list[tuple[Config, Federation]]:
    """A config and its data, of all kinds that presets have."""
    configs = {(config.data, config.clients): config for config in (load(name, fewer(name)) for name in NAMES)}
    return [(config, config.data.federate(config.clients, 0, folder)) for config in configs.values()]


def test_no_preset_has_features_that_a_check_warns_of(
    folder: Path, federations: list[tuple[Config, Federation]]
) -> None:
    for config, federation in federations:
        header = config.data.check(config.clients, folder)
        assert header.tokens or list(check.features(config, header.ranges, federation)) == []


def test_the_ranks_of_a_host_can_share_the_data_of_all_presets(federations: list[tuple[Config, Federation]]) -> None:
    for config, federation in federations:
        with shared(federation, config.data) as text:
            mapped = attach(text, config.data)
        assert [*mapped.shapes] == [*federation.shapes]
        assert bits((mapped.train_sizes, mapped.test_sizes)) == bits((federation.train_sizes, federation.test_sizes))
        for client in (0, config.clients - 1):
            found, given = (vars(each.client(client)).values() for each in (mapped, federation))
            assert bits(found) == bits(given)
        assert bits(mapped.server_test()) == bits(federation.server_test())
        assert bits(mapped.server_train()) == bits(federation.server_train())


def bits(arrays: Iterable[np.ndarray] | None) -> list[Any]:
    """Return what is in arrays and in which order; gaps between rows, as those of overlapping windows, say nothing."""
    return [(array.dtype, array.shape, array.flags.f_contiguous, array.tobytes()) for array in arrays or ()]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * slow(n)) for n in PAPER])
def test_every_experiment_runs_a_round_at_its_size(name: str, folder: Path) -> None:
    config = load(name, fewer(name))
    job = Job.of(config, folder, 1)
    now = job.begin(0)
    plan, sums = Simulated(job, Transport(), 0).exchange(now, Record.open())
    assert plan.counted.sum() == (config.participation.first or config.clients)
    after = job.algorithm.step(job.task, ServerState(now.shared, now.extras), sums).shared
    assert all(value.isfinite().all() for value in after.values())
    assert any((value != now.shared[key]).any() for key, value in after.items())
    chunk = job.chunks[0]  # testing all clients would take most of the time
    losses, correct, _ = job.scored(1, after, [(chunk.clients, now.personal[chunk.number])])[0]
    assert np.isfinite(losses).all()
    assert (correct <= job.task.federation.test_sizes[chunk.clients]).all()


ALL = ("participation.first=100", "doubling.when=never")
PARTIAL = ("participation.invite=uniform", "participation.size=20")
GROUPS = ("speed.model=groups", "speed.shares_of=[0.7,0.3]")
OTHERS = [  # how headers say that other methods and variants are had
    *[(f"srpfl-fig3{method}-emnist", ALL) for method in ("", "-lg", "-flanp")],
    *[(f"srpfl-fig3{method}-emnist", PARTIAL) for method in ("", "-lg", "-flanp", "-hf-maml")],
    *[(f"srpfl-fig3{method}-emnist", ("speed.kind=dynamic-scale",)) for method in ("-lg", "-hf-maml")],
    ("srpfl-fig3-lg-emnist", (*PARTIAL, "participation.first=20", "doubling.when=never")),
    ("srpfl-fig4-partial-mnist-small", ("participation.first=20", "doubling.when=never")),
    ("srpfl-fig3-flanp-emnist", ("algorithm.evaluation=shared", "speed.communication=100")),
    ("srpfl-fig3-lg-emnist", ("data.classes=10",)),
    ("srpfl-fig3-lg-femnist", ("data.samples=4", "data.imbalance=4")),
    ("srpfl-fig3-flanp-cifar10", ("data.classes=3", "data.label_groups=3", "speed.sorted=true")),
    ("srpfl-fig8-imbalanced-lg-sent140", (*GROUPS, "participation.first=83", "doubling.when=never")),
    ("srpfl-fig8-stragglers-mnist-small", GROUPS[1:]),
    ("srpfl-fig8-imbalanced-mnist-small", ("data.sizes=uniform", "data.spread=0.33")),
    ("srpfl-fedrep-digits", ("participation.first=20", "doubling.when=never")),
    ("fedbuff-digits", ("participation.close=all", "staleness.weight=constant")),
    ("ringmaster-digits", ("participation.stop_stale=true",)),
    ("ringmaster-digits", ("participation.max_staleness=0",)),
    *[
        (f"{preset}-digits", (setting,))
        for preset in ("fedprox", "fednova", "scaffold", "fedadam")
        for setting in (
            *(f"algorithm.name={name}" for name in ("fedavg", "fedprox", "fednova", "scaffold", "heterofl")),
            *(f"server.optimizer={name}" for name in ("none", "momentum", "nesterov", "adam", "yogi", "adagrad")),
        )
    ],
]


@pytest.mark.parametrize(("name", "settings"), OTHERS, ids=[f"{name} {' '.join(more)}" for name, more in OTHERS])
def test_what_the_headers_say_to_set_is_valid(name: str, settings: tuple[str, ...], folder: Path) -> None:
    load(name, [*fewer(name), *settings]).check(folder)


WITH = [  # and by overlays
    *[(f"srpfl-fig3{method}-emnist", ("srpfl-everybody",)) for method in ("", "-lg", "-flanp")],
    *[(f"srpfl-fig3{method}-emnist", ("srpfl-partial",)) for method in ("", "-lg", "-flanp")],
    *[(f"srpfl-fig3{method}-cifar10", ("srpfl-correlated",)) for method in ("-lg", "-hf-maml")],
    ("srpfl-fig3-flanp-emnist", ("srpfl-partial", "srpfl-dynamic")),
    ("srpfl-fig8-imbalanced-lg-sent140", ("srpfl-stragglers",)),
    ("srpfl-fedrep-digits", ("srpfl-everybody",)),
    ("salf-digits", ("wait",)),
    ("salf-digits", ("drop",)),
]


@pytest.mark.parametrize(("name", "more"), WITH, ids=[f"{name} {' '.join(more)}" for name, more in WITH])
def test_overlays_go_with_what_the_headers_say(name: str, more: tuple[str, ...], folder: Path) -> None:
    config = load(name, fewer(name), more)
    config.check(folder)
    told = {key: value for each in more for key, value in flat(read_overlay(each))}
    found = dict(flat(config.model_dump(mode="json")))
    assert {key: found[key] for key in told} == told


def test_the_digits_presets_learn(tmp_path: Path) -> None:
    for name in ("srpfl-fedrep-digits", "srpfl-lg-digits"):
        launch(lambda name=name: run_request(name, ["rounds=16"], tmp_path / name, None, quiet=True), None)
        accuracy = open_run(tmp_path / name)["client_accuracy"].mean("client").dropna("round")
        assert accuracy[-1] > 0.8 > accuracy[0]
        assert (np.diff(accuracy) > 0).all()


# --- presets that build on others ---------------------------------------------------------------------------


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    return folder


def test_a_section_replaces_the_whole_section_of_the_base(tmp_path: Path) -> None:
    write(
        tmp_path,
        one="rounds = 3\nclients = 7\n[speed]\nmodel = 'exponential'\nrate = 2.0\n[data]\nname = 'digits'\n",
        two="base = 'one'\nrounds = 4\n[speed]\nkind = 'dynamic'\n",
    )
    data = {"name": "digits"}
    assert read(str(tmp_path / "two.toml")) == {"rounds": 4, "clients": 7, "speed": {"kind": "dynamic"}, "data": data}


def test_a_base_may_have_a_base_and_be_a_preset(tmp_path: Path) -> None:
    write(tmp_path, one="base = 'salf-digits'\nseed = 5", two="base = 'one.toml'\nrounds = 4", three="base = 'two'")
    assert read(str(tmp_path / "three.toml")) == {**read("salf-digits"), "seed": 5, "rounds": 4}
    (tmp_path / "below").mkdir()
    write(tmp_path / "below", four="base = '../two'\nseed = 6")
    assert read(str(tmp_path / "below" / "four.toml")) == {**read("salf-digits"), "seed": 6, "rounds": 4}


def test_a_base_may_be_a_preset_with_overlays(tmp_path: Path) -> None:
    write(tmp_path, one="base = 'wait-digits'\nrounds = 4\n[participation]\nclose = 'deadline'")
    found = read(str(tmp_path / "one.toml"))
    assert found == {**read("wait-digits"), "rounds": 4, "participation": {"close": "deadline"}}
    assert found["algorithm"] == {"name": "fedavg", "lr": 0.2, "batch": 64, "epochs": 0, "steps": 1}


def test_a_file_beside_goes_before_a_preset_of_its_name(tmp_path: Path) -> None:
    write(tmp_path, **{"salf-digits": "rounds = 2", "one": "base = 'salf-digits'"})
    assert read(str(tmp_path / "one.toml")) == {"rounds": 2}


def test_bases_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    write(
        tmp_path,
        itself="base = 'itself'",
        one="base = 'two'",
        two="base = 'three'",
        three="base = 'two'",
        lost="base = 'salf-digit'",
        file="base = 'elsewhere.toml'",
        number="base = 3",
        above="base = 'broken'",
        broken="base = ",
    )

    def line(name: str) -> str:
        return refused(read, str(tmp_path / f"{name}.toml"))

    assert line("itself") == f"{tmp_path}/itself.toml: base = 'itself' leads back to where it began"
    assert line("one") == f"{tmp_path}/three.toml: base = 'two' leads back to where it began"
    assert line("lost").startswith(f"{tmp_path}/lost.toml: base: no preset or file 'salf-digit'; did you mean 'salf-")
    assert (
        line("file")
        == f"{tmp_path}/file.toml: base: no preset or file 'elsewhere.toml'; hpcfl list presets names them all"
    )
    assert line("number") == f"{tmp_path}/number.toml: base: expected the name of a preset or file, got 3"
    assert line("above").startswith(f"{tmp_path}/broken.toml: not valid TOML")


def test_the_page_of_methods_has_every_method_and_presets_that_are() -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "methods.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(algorithms())
    named = set(re.findall(r"`([\w-]+-(?:digits|cancer))`", page))
    assert len(named) > 10
    assert named <= set(NAMES)
