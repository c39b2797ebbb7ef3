"""Bad input ends in one clear line, from one rank, with exit code 2, and before anything of a run is made.

A case is a command line and the words that its one line must hold. All of them run on any number of ranks.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from helpers.launcher import alone, job, mpis
from hpcfl import config as configs
from hpcfl import store
from hpcfl.base.errors import ErrorOnOtherRank
from hpcfl.commands import cli
from hpcfl.launch.request import RunRequest, run_request
from hpcfl.launch.run import launch
from hpcfl.mpi.launcher import launched
from hpcfl.testing.world import World

HELPERS = Path(__file__).parents[1] / "helpers"
Array = np.ndarray[Any, Any]
Prepare = Callable[[Path], object]


def nothing(_: Any) -> None:
    """Prepare nothing, change nothing."""


@dataclass(frozen=True)
class Case:
    """What is typed, with ``{here}`` for the test's folder, and what must be said.

    `prepare` makes files in the folder; on fewer than `ranks` ranks, or on more than `most`, there is nothing to
    complain of. What `depends` on the launch is judged when torch is there.
    """

    typed: str
    words: tuple[str, ...]
    prepare: Prepare = nothing
    ranks: int = 1
    most: int = 1000
    depends: bool = False

    def argv(self, here: Path) -> list[str]:
        return [word.replace("{here}", str(here)) for word in shlex.split(self.typed)]


def salf(settings: str, *words: str, ranks: int = 1) -> Case:
    """A run with settings that do not go together."""
    return config(SALF, *words, settings=settings, ranks=ranks)


def fedavg(settings: str, *words: str) -> Case:
    return config(FEDAVG, *words, settings=settings)


def config(text: str, *words: str, settings: str = "", ranks: int = 1) -> Case:
    """A run of a TOML file."""
    pairs = "".join(f" --set {shlex.quote(setting)}" for setting in settings.split())
    typed = f"run {{here}}/my.toml{pairs} --out {{here}}/out"
    return Case(typed, words, lambda here: (here / "my.toml").write_text(text), ranks)


def real(settings: str, *words: str, ranks: int = 1, most: int = 1000) -> Case:
    """A run in real time that does not go with its launch."""
    return replace(fedavg(f"clock=wall {settings}", *words), ranks=ranks, most=most, depends=True)


def mnist(change: Prepare, *words: str) -> Case:
    """A run on MNIST files that are not as they should be."""

    def prepare(here: Path) -> None:
        write_mnist(here / "mnist")
        change(here / "mnist")

    typed = "run fedavg-digits --set data.name=mnist --data-dir {here} --out {here}/out"
    return Case(typed, words, prepare)


def own(change: Callable[[h5py.File], object], settings: str, *words: str) -> Case:
    """A run on an HDF5 file of 3 clients that was changed."""

    def prepare(here: Path) -> None:
        with h5py.File(here / "own.h5", "w") as file:
            for client in range(3):
                for part in ("train", "test"):
                    file[f"clients/{client}/{part}/features"] = np.ones((4, 5), np.float32)
                    file[f"clients/{client}/{part}/labels"] = np.arange(4)
            change(file)
        text = 'rounds = 2\nclients = 3\n[algorithm]\nname = "fedavg"\n[data]\nname = "hdf5"\nfile = "own.h5"\n'
        (here / "own.toml").write_text(text + '[model]\nname = "mlp"\n')

    pairs = "".join(f" --set {setting}" for setting in settings.split())
    return Case(f"run {{here}}/own.toml{pairs} --data-dir {{here}} --out {{here}}/out", words, prepare)


def split(parts: dict[str, list[int]], settings: str, *words: str) -> Case:
    """A run whose clients hold these samples of the digits."""

    def prepare(here: Path) -> None:
        with h5py.File(here / "split.h5", "w") as file:
            file.update({f"clients/{name}": part for name, part in parts.items()})

    typed = "run wait-digits --set clients=2 --set data.partition=file --set data.partition_file=split.h5"
    return Case(f"{typed} {settings} --data-dir {{here}} --out {{here}}/out", words, prepare)


def paces(change: tuple[str, str], *words: str) -> Case:
    """A run of 8 clients whose table of paces was changed."""

    def prepare(here: Path) -> None:
        (here / "my.toml").write_text(FEDAVG)
        rows = "".join(f"{client},1.5\n" for client in range(8)).replace(*change)
        (here / "paces.csv").write_text(f"client,seconds\n{rows}")

    typed = "run {here}/my.toml --set speed.model=table --set speed.file=paces.csv"
    return Case(f"{typed} --data-dir {{here}} --out {{here}}/out", words, prepare)


def weights(name: str, values: Array, *words: str, depends: bool = False) -> Case:
    """A run whose initial weights were changed."""

    def prepare(here: Path) -> None:
        (here / "my.toml").write_text(FEDAVG)
        shapes = {"fc1.weight": (16, 64), "fc1.bias": (16,), "fc2.weight": (10, 16), "fc2.bias": (10,)}
        with h5py.File(here / "initial.h5", "w") as file:
            file.update({name: np.zeros(shape) for name, shape in shapes.items()} | {name: values})

    typed = "run {here}/my.toml --set model.hidden=[16] --set model.initial=initial.h5"
    return Case(f"{typed} --data-dir {{here}} --out {{here}}/out", words, prepare, depends=depends)


def idx(array: Array) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


def write_mnist(folder: Path) -> None:
    folder.mkdir(parents=True)
    for part, count in (("train", 60), ("t10k", 20)):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 28, 28))
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(pixels))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.arange(count) % 10))


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def cut(folder: Path) -> None:
    (folder / IMAGES).write_bytes((folder / IMAGES).read_bytes()[:-1000])


def cut_zipped(folder: Path) -> None:
    content = gzip.compress((folder / IMAGES).read_bytes(), mtime=0)
    (folder / IMAGES).unlink()
    (folder / f"{IMAGES}.gz").write_bytes(content[: len(content) // 2])


def held(here: Path) -> None:
    store.create(here / "out", {"config": "{}", "data_dir": ""})


def with_a_row(here: Path) -> None:
    """A run of one round."""
    held(here)
    columns = [store.Column(name, (), "float64", "") for name in ("accuracy", "sim_seconds")]
    columns.append(store.Column("client_accuracy", ("client",), "float64", ""))
    segment = store.begin(here / "out", columns, {"client": range(2)}, 0, 1)
    segment.write(0, {"accuracy": 0.5, "sim_seconds": 1.0, "client_accuracy": [0.5, 0.5]})
    segment.close()


def of_five_clients(here: Path) -> None:
    """Two recorded rounds of 5 clients, and a config of 8."""
    from hpcfl.engine.record import COLUMNS

    (here / "my.toml").write_text(FEDAVG)
    store.create(here / "run", {"config": configs.load(str(here / "my.toml"), ["clients=5"]).text(), "data_dir": ""})
    segment = store.begin(here / "run", COLUMNS, {"client": range(5), "layer": ["a"], "rank": range(1)}, 0, 2)
    for round_ in range(2):
        segment.write(round_, {"cohort": [1] * 5, "fate": [0] * 5})
    segment.close()


def empty(here: Path) -> None:
    (here / "empty").mkdir()


def broken(here: Path) -> None:
    (here / "out").mkdir()
    (here / "out" / "run.h5").write_text("no")


def foreign(here: Path) -> None:
    """An HDF5 file of somebody else that has the same name."""
    (here / "out").mkdir()
    with h5py.File(here / "out" / "run.h5", "w") as file:
        file["x"] = 1


def without(name: str) -> Callable[[h5py.File], object]:
    def change(file: h5py.File) -> None:
        del file[name]

    return change


def wider(file: h5py.File) -> None:
    """Client 2 has features of another length."""
    for part in ("train", "test"):
        del file[f"clients/2/{part}/features"]
        file[f"clients/2/{part}/features"] = np.ones((4, 6), np.float32)


FEDAVG = """
rounds = 2
clients = 8
[algorithm]
name = "fedavg"
[data]
name = "digits"
[model]
name = "mlp"
"""
SALF = """
rounds = 2
clients = 8
[algorithm]
name = "salf"
[participation]
close = "deadline"
[speed]
model = "uniform-depth"
[data]
name = "digits"
[model]
name = "mlp"
"""

CASES = {
    # keys
    "key": salf("algorithm.lrr=1", "algorithm.lrr", "unknown key", "'lr'"),
    "key-of-participation": salf("participation.dedline=1", "participation.dedline", "'deadline'"),
    "key-of-speed": salf("speed.straglers=0.5", "speed.straglers", "'stragglers'"),
    "key-of-data": salf("data.partitions=iid", "data.partitions", "'partition'"),
    "key-of-model": salf("model.hiden=[3]", "model.hiden", "'hidden'"),
    "key-of-evaluate": salf("evaluate.evry=2", "evaluate.evry", "'every'"),
    "key-of-checkpoint": salf("checkpoint.keeps=2", "checkpoint.keeps", "'keep'"),
    "key-of-another-model": salf("model.kernel=3", "model.kernel", "unknown key"),
    "top-level-key": salf("round=3", "round:", "unknown key", "'rounds'"),
    "section": salf("algoritm.lr=3", "algoritm", "unknown key", "'algorithm'"),
    "section-is-a-value": config(FEDAVG.replace("clients = 8", "clients = 8\nevaluate = 3"), "evaluate", "3"),
    "named-section-is-a-value": config("rounds = 2\nclients = 6\nalgorithm = 3", "algorithm", "table", "3"),
    "no-rounds": config(FEDAVG.replace("rounds = 2\n", ""), "rounds", "missing"),
    "no-algorithm": config(FEDAVG.replace('[algorithm]\nname = "fedavg"\n', ""), "algorithm.name"),
    # values
    "no-gpu": replace(
        fedavg("device=cuda server_device=cuda", "device", "'auto' or 'cpu'", "sees no GPU", "device = 'cpu'"),
        depends=True,
    ),
    "text-for-a-number": salf("rounds=many", "rounds", "integer", "'many'"),
    "text-for-a-step": salf("algorithm.lr=fast", "algorithm.lr", "number", "'fast'"),
    "truth-for-a-number": salf("algorithm.lr=true", "algorithm.lr", "number"),
    "half-a-round": salf("rounds=2.5", "rounds", "integer", "2.5"),
    "number-for-a-list": salf("model.hidden=32", "model.hidden"),
    "choice": salf("participation.close=deadlin", "participation.close", "'deadline'"),
    "rule": salf("algorithm.rule=papr", "algorithm.rule", "'paper'"),
    "0-rounds": salf("rounds=0", "rounds", "1", "got 0"),
    "0-clients": salf("clients=0", "clients", "1", "got 0"),
    "1e7-clients": salf("clients=10000000", "clients", "10000000", "1437"),
    "1e8-clients": salf("clients=100000000", "clients", "100000000", "16777216"),
    "evaluate-never": salf("evaluate.every=0", "evaluate.every", "1", "got 0"),
    "keep-none": salf("checkpoint.keep=0", "checkpoint.keep", "1", "got 0"),
    "batch-clients": salf("batch_clients=0", "batch_clients", "1", "got 0"),
    "batch-clients-text": salf("batch_clients=some", "batch_clients", "some"),
    "stragglers": salf("speed.stragglers=1.5", "speed.stragglers", "1.5", "did you mean 1.0"),
    "stragglers-below-0": salf("speed.stragglers=-0.5", "speed.stragglers", "-0.5", "did you mean 0.0"),
    "stragglers-nan": salf("speed.stragglers=nan", "speed.stragglers", "nan"),
    "deadline-0": salf("participation.deadline=0.0", "participation.deadline", "0.0"),
    "deadline-below-0": salf("participation.deadline=-1.0", "participation.deadline", "-1.0"),
    "deadline-nan": salf("participation.deadline=nan", "participation.deadline", "nan"),
    "deadline-word": salf("participation.deadline=adaptiv", "participation.deadline", "'adaptive'", "'adaptiv'"),
    "deadline-from-round-3": salf("participation.deadline=[[3,1.0]]", "participation.deadline", "[0, seconds]", "3"),
    "deadlines-descending": salf("participation.deadline=[[0,1.0],[9,2.0],[4,1.0]]", "ascending", "got 4 after 9"),
    "deadline-0-later": salf("participation.deadline=[[0,1.0],[9,0.0]]", "participation.deadline", "0.0", "round 9"),
    "adaptive-quantile": salf("participation.adaptive_quantile=1.5", "participation.adaptive_quantile", "1.5"),
    "adaptive-window": salf("participation.adaptive_windw=5", "'adaptive_window'"),
    "step-nan": salf("algorithm.lr=nan", "algorithm.lr", "nan"),
    "rate-nan": fedavg("speed.model=exponential speed.rate=nan", "speed.rate", "nan"),
    "alpha-nan": fedavg("data.partition=dirichlet data.alpha=nan", "data.alpha", "nan"),
    "rate-0": fedavg("speed.model=exponential speed.rate=0.0", "speed.rate", "0.0"),
    "width-0": salf("model.hidden=[32,0]", "model.hidden", "greater than or equal to 1, got 0"),
    "dropout-1": salf("model.dropout=1.0", "model.dropout", "1.0"),
    "batch-below-0": salf("algorithm.batch=-1", "algorithm.batch", "-1"),
    # names
    "algorithm": salf("algorithm.name=sal", "algorithm.name", "'sal'", "'salf'"),
    "model": salf("model.name=mpl", "model.name", "'mpl'", "'mlp'"),
    "data": salf("data.name=digit", "data.name", "'digit'", "'digits'"),
    "speed": salf("speed.model=uniform-dept", "speed.model", "'uniform-dept'", "'uniform-depth'"),
    "far-from-any-name": salf("algorithm.name=zzzz", "algorithm.name", "'zzzz'", "fedavg", "salf"),
    "name-is-a-number": salf("algorithm.name=3", "algorithm.name", "3"),
    # what does not go together
    "more-classes": fedavg("data.partition=shards data.classes=11", "data.classes", "11", "did you mean 10"),
    "classes-without-shards": fedavg("data.classes=2", "data.classes", "data.partition", "'shards'"),
    "shards-without-classes": fedavg("data.partition=shards", "data.classes", "1 to 10"),
    "more-samples": fedavg("data.train_samples=2000", "data.train_samples", "2000", "did you mean 1437"),
    "first-beyond-the-cohort": fedavg(
        "participation.invite=uniform participation.size=4 participation.close=first participation.first=5",
        "participation.first",
        "got 5",
        "did you mean 4",
    ),
    "quorum-beyond-the-cohort": fedavg(
        "participation.close=quorum participation.quorum=9", "participation.quorum", "got 9", "did you mean 8"
    ),
    "grace-below-0": fedavg(
        "participation.close=quorum participation.quorum=2 participation.grace=-1.0", "participation.grace", "-1.0"
    ),
    "grace-without-a-quorum": fedavg(
        "participation.grace=0.5", "participation.grace", "set participation.close = 'quorum'"
    ),
    "size-beyond-the-clients": fedavg(
        "participation.invite=uniform participation.size=9", "participation.size", "got 9", "did you mean 8"
    ),
    "min-clients-beyond-the-cohort": salf(
        "participation.min_clients=9", "participation.min_clients", "got 9", "did you mean 8"
    ),
    "partial-word": salf("participation.partial=layer", "participation.partial", "'layer'; did you mean 'layers'"),
    "layers-of-a-method-without": fedavg(
        "participation.partial=layers", "participation.partial", "'fedavg'", "one by one", "did you mean 'steps'"
    ),
    "adaptive-depths": salf("participation.deadline=adaptive", "'adaptive'", "'uniform-depth'", "seconds"),
    "unknown-chances": salf("clock=wall speed={}", "algorithm.missing", "'exact'", "'none'", "'empirical'"),
    "batched-layers-in-real-time": salf(
        "clock=wall algorithm.missing=none batch_clients=4", "batch_clients", "one by one", "got 4", "did you mean 1"
    ),
    "batched-messages-in-real-time": fedavg(
        "clock=wall guard.max_norm=3 batch_clients=4", "batch_clients", "guard.max_norm", "got 4", "did you mean 1"
    ),
    "first-beyond-the-cohort-in-real-time": fedavg(
        "clock=wall participation.close=first participation.first=9", "participation.first", "got 9", "did you mean 8"
    ),
    "lane-width-0": fedavg("clock=wall lane_width=0", "lane_width", "at least 1"),
    "lane-width-word": fedavg("clock=wall lane_width=al", "lane_width", "'al'"),
    "lost-after-0": fedavg("clock=wall lost_after=0.0", "lost_after", "0"),
    "rehost-in-simulated-time": fedavg(
        "lost_clients=rehost", "lost_clients", "clock = 'wall'", "did you mean", "'drop'"
    ),
    "rehost-of-what-the-server-remembers": fedavg(
        "clock=wall lost_clients=rehost weighting.correct=remembered", "lost_clients", "'remembered'", "'drop'"
    ),
    "rehost-without-ulfm": real("lost_clients=rehost", "lost_clients", "does not tell", "--with-ft ulfm", ranks=2),
    "start-within-in-simulated-time": fedavg("start_within=9.0", "start_within", "clock = 'wall'", "'simulated'"),
    "min-ranks-without-a-limit": fedavg("clock=wall min_ranks=3", "min_ranks = 3", "start_within"),
    "min-ranks-1": fedavg("clock=wall start_within=9.0 min_ranks=1", "min_ranks", "2"),
    "min-ranks-beyond-the-ranks": real("start_within=99.0 min_ranks=99", "min_ranks", "at most", "got 99", ranks=2),
    "min-ranks-without-ulfm": real("start_within=99.0 min_ranks=2", "min_ranks = 2", "--with-ft ulfm", ranks=3),
    "fault-tolerance": fedavg("clock=wall fault_tolerance=ulf", "fault_tolerance", "'ulfm'", "'ulf'"),
    "clock": fedavg("clock=wal", "clock", "'wall'", "'wal'"),
    "trace-of-nothing": fedavg("speed.model=trace", "speed.run", "missing"),
    "trace-of-no-run": fedavg("speed.model=trace speed.run={here}/none", "speed.run", "/none", "no run folder"),
    "trace-in-real-time": fedavg("clock=wall speed.model=trace speed.run=x", "speed.model", "'simulated'", "'wall'"),
    "trace-of-other-clients": replace(
        fedavg("speed.model=trace speed.run={here}/run", "speed.run", "5 clients", "got 8", "did you mean clients = 5"),
        prepare=of_five_clients,
    ),
    "size-without-sampling": fedavg("participation.size=4", "participation.size", "'uniform'"),
    "first-is-not-said": fedavg("participation.close=first", "participation.first", "'first'"),
    "depths-without-a-deadline": salf(
        "participation.close=all", "speed.model", "'uniform-depth'", "participation.close", "'deadline'", "'all'"
    ),
    "epochs-and-steps": fedavg("algorithm.epochs=1 algorithm.steps=1", "epochs = 1", "steps = 1"),
    "no-epochs-nor-steps": fedavg("algorithm.epochs=0 algorithm.steps=0", "epochs = 0", "steps = 0"),
    "small-images": salf("model.name=cnn model.hidden=[8]", "model.channels", "8x8"),
    "more-ranks-than-chunks": salf("batch_clients=8", "ranks", "chunks", "batch_clients = ", ranks=3),
    # what does not go with the launch
    "real-time-alone": real("", "clock = 'wall'", "at least 2 ranks", "got 1", "mpirun -n 2", most=1),
    "fan-out-1": fedavg("clock=wall lane_width=two-level fan_out=1", "fan_out", "got 1; did you mean 2?"),
    "fan-out-alone": fedavg("clock=wall fan_out=4", "fan_out = 4 has no meaning", "lane_width = 'two-level'"),
    "leaders-alone": fedavg("clock=wall leaders=2", "leaders = 2 has no meaning", "lane_width = 'two-level'"),
    "two-levels-of-norms": fedavg(
        "clock=wall lane_width=two-level guard.max_norm=5.0",
        "lane_width: guard.max_norm = 5 measures single messages",
        "did you mean 1?",
    ),
    "two-levels-rehost": fedavg(
        "clock=wall lane_width=two-level lost_clients=rehost", "lost_clients = 'rehost' does not go with", "two-level"
    ),
    "leaders-beyond-the-ranks": real("lane_width=two-level leaders=9", "leaders", "got 9", "did you mean ", ranks=2),
    "lane-width-beyond-the-ranks": real("lane_width=9", "lane_width", "got 9", "did you mean ", "'all'", ranks=2),
    "no-ulfm": real("fault_tolerance=ulfm", "fault_tolerance = 'ulfm'", "--with-ft ulfm", "did you mean ", "'auto'"),
    # files
    "no-file": Case("run {here}/none.toml --out {here}/out", ("none.toml", "no such file")),
    "preset": Case("run salf-digit --out {here}/out", ("'salf-digit'", "'salf-digits'")),
    "broken-toml": config("rounds = 2\nclients = = 3\n", "my.toml", "TOML", "line 2"),
    "no-utf-8": Case(
        "run {here}/my.toml --out {here}/out",
        ("my.toml", "TOML"),
        lambda here: (here / "my.toml").write_bytes(b"rounds = '\xff'"),
    ),
    "setting-without-a-value": salf("rounds", "--set rounds", "key=value"),
    "setting-in-a-value": salf("rounds.x=3", "--set rounds.x=3", "rounds"),
    "no-data-dir": fedavg("data.name=mnist", "mnist", "--data-dir", "HPCFL_DATA"),
    "no-idx-folder": Case(
        "run fedavg-digits --set data.name=mnist --data-dir {here}/none --out {here}/out",
        ("/none has no folder mnist/",),
    ),
    "no-idx-file": mnist(lambda folder: (folder / IMAGES).unlink(), IMAGES, "/mnist"),
    "cut-idx-file": mnist(cut, IMAGES, "truncated"),
    "cut-gz-file": mnist(cut_zipped, f"{IMAGES}.gz", "truncated"),
    "59-labels": mnist(lambda folder: (folder / LABELS).write_bytes(idx(np.zeros(59))), LABELS, "59", "60"),
    "label-10": mnist(lambda folder: (folder / LABELS).write_bytes(idx(np.full(60, 10))), LABELS, "10", "0 to 9"),
    "no-hdf5-file": own(nothing, "data.file=owm.h5", "data.file", "owm.h5"),
    "hdf5-without-labels": own(without("clients/1/train/labels"), "", "own.h5", "clients/1/train/labels", "missing"),
    "hdf5-without-test": own(without("clients/2/test"), "", "own.h5", "clients/2/test", "missing"),
    "hdf5-of-3-clients": own(nothing, "clients=4", "clients: expected 3", "own.h5", "got 4; did you mean 3"),
    "hdf5-of-unequal-shapes": own(wider, "", "(6,)", "(5,)"),
    "hdf5-of-two-files": own(
        lambda file: file.update({"clients/3": h5py.ExternalLink("other.h5", "/clients/3")}),
        "clients=4",
        "own.h5: clients/3 is an external link",
        "expected the data themselves",
    ),
    "hdf5-of-no-pixels": own(
        lambda file: file["clients/1/train/features"].write_direct(np.full((4, 5), 256, np.float32)),
        "data.scale=unit",
        "own.h5: clients/1/train/features: sample 0 holds 256.0, expected 0 to 255 as data.scale = 'unit'",
    ),
    "split-twice": split({"0/train": [1, 2], "1/train": [3, 2]}, "", "split.h5: clients/0 and clients/1", "sample 2"),
    "split-too-large": split({"0/train": [1], "1/train": [1437]}, "", "split.h5: clients/1/train", "1437", "0 to 1436"),
    "split-of-2-clients": split({"0/train": [1], "1/train": [2]}, "--set clients=3", "expected 2", "did you mean 2"),
    "hdf5-scale": own(nothing, "data.scale=units", "data.scale", "'unit'", "'units'"),
    "hdf5-is-text": Case(
        "run wait-digits --set data.name=hdf5 --set data.file=own.h5 --data-dir {here} --out {here}/out",
        ("own.h5", "HDF5"),
        lambda here: (here / "own.h5").write_text("no"),
    ),
    "cnn-on-vectors": own(nothing, "model.name=cnn", "model.name", "'cnn'", "(5,)"),
    # folders
    "below-a-file": Case(
        "run salf-digits --out {here}/file/out", ("file/out", "writ"), lambda here: (here / "file").write_text("")
    ),
    "is-a-file": Case(
        "run salf-digits --out {here}/file", ("/file", "writ"), lambda here: (here / "file").write_text("")
    ),
    "holds-a-run": Case("run salf-digits --out {here}/out", ("/out", "already holds a run", "--out", "resume"), held),
    **{
        f"{command}-{name}": Case(f"{command} {{here}}/{name}", (f"/{name}", "no run folder"), empty)
        for command in ("show", "show --json", "seal", "resume", "plot -o {here}/picture.png")
        for name in ("none", "empty")
    },
    "resume-text": Case("resume {here}/out", ("run.h5", "cannot be read"), broken),
    "show-text": Case("show {here}/out", ("run.h5", "cannot be read"), broken),
    "resume-foreign": Case("resume {here}/out", ("run.h5",), foreign),
    "show-foreign": Case("show {here}/out", ("run.h5",), foreign),
    "resume-bad-config": Case("resume {here}/out", ("algorithm.name",), held),
    "picture-of-no-kind": Case("plot {here}/out -o {here}/picture.xyz", ("xyz",), with_a_row),
    "table-without-a-client": paces(("3,1.5\n", ""), "speed.file", "paces.csv", "no row for client 3"),
    "table-with-a-negative-pace": paces(("3,1.5", "3,-1.5"), "speed.file", "paces.csv", "line 5", "-1.5", "above 0"),
    "no-weights": salf("model.initial=none.h5", "model.initial", "none.h5", "no such file"),
    "weights-not-finite": weights("fc2.bias", np.full(10, np.nan), "initial.h5", "fc2.bias", "finite"),
    "weights-of-another-shape": weights(
        "fc1.weight", np.zeros((64, 16)), "initial.h5", "fc1.weight", "[64, 16]", "[16, 64]", depends=True
    ),
    # the command line
    "option": Case("run salf-digits --outt {here}/out", ("hpcfl run", "--outt", "--out")),
    "command": Case("rum salf-digits", ("hpcfl", "rum")),
    "no-config": Case("run --out {here}/out", ("hpcfl run", "CONFIG")),
    "option-without-a-value": Case("run salf-digits --out", ("--out", "argument")),
    "one-config-too-many": Case("run salf-digits drop-digits --out {here}/out", ("hpcfl run", "drop-digits")),
    "ranks-of-check": Case("check salf-digits --ranks few", ("--ranks", "few")),
    "check": Case("check salf-digits --set algorithm.lrr=1", ("algorithm.lrr", "'lr'")),
    "check-0-ranks": Case("check salf-digits --ranks 0", ("--ranks", "0")),
}


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def brought_together(world: World, counts: list[int]) -> Array:
    """Return every rank's counts, int64 [ranks, n], on every rank."""
    own = np.zeros((world.size, len(counts)), dtype=np.int64)
    own[world.rank] = counts
    if world.comm is None:
        return own
    from mpi4py import MPI

    from hpcfl.mpi.waiting import wait

    whole = np.empty_like(own)
    wait([world.comm.Iallreduce(own, whole, MPI.SUM)])
    return whole


WHERE = [
    *(pytest.param(name, "alone", id=f"{name}-alone") for name, case in CASES.items() if case.ranks == 1),
    *(pytest.param(name, "ranks", id=f"{name}-ranks", marks=pytest.mark.mpi) for name in CASES),
]


@pytest.mark.parametrize(("name", "where"), WHERE)
def test_one_line_from_one_rank(
    name: str,
    where: str,
    world: World,
    shared_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = CASES[name]
    if where == "alone" and launched():
        pytest.skip("runs on the ranks")
    if not case.ranks <= world.size <= case.most:
        pytest.skip(f"needs {case.ranks} ranks, or at most {case.most}")
    monkeypatch.delenv("HPCFL_DATA", raising=False)
    monkeypatch.chdir(shared_dir)  # where runs/ would be made
    before = {}
    if world.rank == 0:
        case.prepare(shared_dir)
        before = content(shared_dir)
    world.meet()
    capsys.readouterr()
    code = cli.main(case.argv(shared_dir))
    said = capsys.readouterr()
    told = [code, len(said.err.splitlines()), len(said.out.splitlines())]
    codes, errors, lines = brought_together(world, told).T.tolist()
    text = world.told(said.err)
    assert text.startswith("hpcfl: ")
    assert codes == [2] * world.size
    assert errors == [1] + [0] * (world.size - 1), text
    assert lines == [0] * world.size
    for word in case.words:
        assert word in text
    assert len(text) < 300 + 2 * len(str(shared_dir))
    assert world.rank > 0 or content(shared_dir) == before
    world.meet()


SEVERAL = """
import json, sys
from hpcfl.commands.cli import main

codes = {name: main(argv) for name, argv in json.loads(sys.argv[1]).items()}
print(json.dumps({"codes": codes, "torch": "torch" in sys.modules, "mpi": "mpi4py.MPI" in sys.modules}))
"""


@pytest.mark.launch
def test_all_is_judged_before_torch_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCFL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    argvs = {}
    for name, case in CASES.items():
        if case.ranks == 1 and not case.depends:
            here = tmp_path / str(len(argvs))
            here.mkdir()
            case.prepare(here)
            argvs[name] = case.argv(here)
    ended = alone([sys.executable, "-c", SEVERAL, json.dumps(argvs)])
    found = json.loads(ended.out.splitlines()[-1])
    assert found == {"codes": dict.fromkeys(argvs, 2), "torch": False, "mpi": False}
    assert len(ended.err.splitlines()) == len(argvs)
    assert "Traceback" not in ended.err


@pytest.mark.launch
def test_one_line_from_a_job(tmp_path: Path) -> None:
    command = ["-m", "hpcfl", "run", "salf-digits", "--set", "algorithm.lrr=1", "--out", str(tmp_path / "out")]
    ended = job("openmpi", 4, command)  # the launcher that is particular about exit codes
    assert ended.code == 2
    assert ended.said == ["hpcfl: algorithm.lrr: unknown key; did you mean 'lr'?"]
    assert "Traceback" not in ended.err
    assert not (tmp_path / "out").exists()


@pytest.mark.launch
@pytest.mark.parametrize(("mpi", "clock"), [("openmpi", "simulated"), ("mpich", "wall")])
def test_an_error_on_one_rank_ends_the_job(mpi: str, clock: str, tmp_path: Path) -> None:
    """An error of the user's code is told of once, also where it comes from a thread that computes."""
    if mpi not in mpis():
        pytest.skip(f"{mpi} is not installed")
    text = SALF.replace('"salf"', '"helpers.strange.trouble:Trouble"').replace(
        "rounds = 2", f'rounds = 9\nclock = "{clock}"'
    )
    text = text.replace("uniform-depth", "none").replace('close = "deadline"', 'close = "all"')
    (tmp_path / "my.toml").write_text(text + "[evaluate]\nevery = 1\n")
    command = [HELPERS / "driver.py", "run", tmp_path / "my.toml", "--out", tmp_path / "out"]
    ended = job(mpi, 4, [str(word) for word in command])
    assert ended.code != 0
    assert "Traceback" not in ended.err
    assert (tmp_path / "out" / "error.txt").read_text().count("ArithmeticError: no luck\n") == 1
    assert len(ended.said) == 1, ended.err
    said = r"algorithm\.name = 'helpers\.strange\.trouble:Trouble': ArithmeticError: no luck in round 2"
    assert re.fullmatch(rf"hpcfl: rank \d of 4: {said} \(\S*trouble\.py, line \d+\)", ended.said[0])
    data = store.open_run(tmp_path / "out")
    assert data.attrs["status"] == "failed"
    assert f"hpcfl: {data.attrs['reason']}\n" in ended.err
    assert data["round"].values.tolist() == [0, 1]
    assert [line.split()[1] for line in ended.out.splitlines() if line.startswith("round ")] == ["1/9", "2/9"]


@pytest.mark.mpi
def test_an_error_on_all_ranks_is_told_by_one(world: World, shared_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcfl.engine.job import Job

    def unlucky(*_: Any) -> Job:
        raise ArithmeticError("no luck")

    def fail(comm: Any, folder: Path | None, error: BaseException) -> None:
        assert (str(error), folder) == ("no luck", shared_dir / "out")
        raise SystemExit(1)

    monkeypatch.setattr(Job, "of", unlucky)
    monkeypatch.setattr("hpcfl.launch.run.fail", fail)
    (shared_dir / f"{world.rank}.toml").write_text(FEDAVG)
    with pytest.raises((SystemExit, ErrorOnOtherRank)) as caught:
        launch(lambda: run_request(str(shared_dir / "0.toml"), (), shared_dir / "out", None), world.comm)
    assert isinstance(caught.value, SystemExit) == (world.rank == 0)
    assert caught.value.code == 1
    assert not (shared_dir / "out").exists()


@pytest.mark.mpi
def test_any_path_reaches_all_ranks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[RunRequest] = []
    monkeypatch.setattr("hpcfl.launch.run.carry_out", lambda request, *_: found.append(request))
    folder = Path(os.fsdecode(b"Universit\xe4t"))  # Latin-1, which is no UTF-8
    request = RunRequest(folder=folder, config="{}", data_dir=None, checkpoint=folder / "7", new=False, quiet=True)
    launch(lambda: request, world.comm)
    launch(lambda: None, world.comm)
    assert found == [request]
