"""Runs brought together by what they were told to do: those that differ in nothing but the seed are one group.

Only the configs that the runs have recorded are read, as JSON: the classes that they name need not be there. A sweep
is one labelled data set: what was recorded, with the swept keys and the seed as dimensions. Scores are what a run came
to at its evaluated rounds.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Column, Table

from hpcfl import store
from hpcfl.base.config import recorded
from hpcfl.base.errors import UsageError, count_of, listed
from hpcfl.base.lazy import pandas, xarray
from hpcfl.base.plugins import digests
from hpcfl.base.terminal import say
from hpcfl.base.types import Ints
from hpcfl.config.presets import PICKED, flat
from hpcfl.store.inside import tell

ACCURACY = "accuracy"
THIRDS = "slow-third", "middle-third", "fast-third"
DECILE = "worst-decile"
CLIENTS = {
    DECILE: "of the worst tenth of the clients",
    "slow-third": "of the slowest third of the clients",
    "middle-third": "of the middle third of the clients by speed",
    "fast-third": "of the fastest third of the clients",
}
FIRST = tuple(f"{section}.{pick.by}" for section, pick in PICKED.items())
"""Keys that labels begin with, where they differ: each picks the class of a section."""
KEPT = re.compile(r".*/((?:data|speeds)-[0-9a-f]{8}\.\w+)")
"""What a script has given is kept in the run's own folder, under a name by its digest."""
MARKS = ("run.h5", "status", "metrics/*", "checkpoints/round-*")
"""What a folder in another one has, of these at least one, if a run has begun there."""
Values = dict[str, list["Recorded"]]
Runs = Any
"""A run folder or a folder of runs, a `Run`, a `Sweep`, or several of these."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """What a run has recorded of its config: `keys` are its values as text by dotted key, all but the seed.

    A class from outside the package adds how the SHA-256 of its code begins, by ``code.module:Class``.
    """

    folder: Path
    keys: dict[str, str]
    seed: str

    @classmethod
    def of(cls, folder: Path) -> Recorded:
        """Read a run folder; UsageError where it is none. A config that is not JSON has no keys."""
        attributes = store.run_attributes(folder)
        code = {}
        for name, modules in digests(json.loads(attributes.get("code", "{}"))).items():
            alone = next(iter(modules.values())) if len(modules) == 1 else ""  # else of all that it has imported too
            code[name] = (alone or sha256(json.dumps(modules, sort_keys=True).encode()).hexdigest())[:12]
        try:
            table = recorded(attributes["config"])
        except UsageError as error:
            tell(f"'{folder}': {error}; it is shown without keys")
            table = {}
        values = flat({**table, "code": code})
        keys = {key: KEPT.sub(r"\1", value) if isinstance(value, str) else json.dumps(value) for key, value in values}
        return cls(folder, keys, keys.pop("seed", ""))

    @property
    def name(self) -> str:
        return self.folder.resolve().name


@dataclass(frozen=True)
class Group:
    """Runs of one config and different seeds; `label` says in the fewest `keys` what tells them from other groups."""

    label: str
    keys: tuple[str, ...]
    runs: tuple[Recorded, ...]


def run_folders(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the run folders; of one that is no run, those in it: a sweep's, by name.

    A run in a sweep that has lost its run.h5 cannot be read: it is told of and left out. UsageError for a folder that
    neither is a run nor holds one that can be read.
    """
    for folder in folders:
        within = runs_within(folder)
        lost = [run for run in within if not (run / "run.h5").is_file()]
        if lost and len(lost) == len(within):
            raise UsageError(f"'{folder}' holds no run that can be read: expected a run.h5 in '{lost[0]}'")
        for run in lost:
            tell(f"'{run}' lacks run.h5: left out")
        yield from [run for run in within if run not in lost] or [store.run_folder(folder)]


def chosen(runs: Runs) -> list[Recorded]:
    """Return what runs have recorded of their configs; a line on stderr says how many have not come to their end."""
    several = [runs] if isinstance(runs, str | Path) or hasattr(runs, "folder") else list(runs)
    found = list(run_folders(Path(getattr(each, "folder", each)) for each in several))
    planned = sum(len(each.planned) for each in several if hasattr(each, "planned")) or len(found)
    ended = sum(store.read_status(folder).state in (*store.DONE, "diverged", "unknown") for folder in found)
    if ended < planned:
        say(f"not finished: {planned - ended} of {count_of(planned, 'run')}")
    return [Recorded.of(folder) for folder in found]


def runs_within(folder: Path) -> list[Path]:
    """Return the runs in a folder that is none itself, by name, also those that have lost some of their files."""
    if (folder / "run.h5").is_file() or not folder.is_dir():
        return []
    runs = (each for each in folder.iterdir() if any(any(each.glob(mark)) for mark in MARKS))
    parts = {run: re.split(r"(\d+(?:\.\d+)?)", run.name) for run in runs}  # text and numbers in turn: 8 before 16
    return sorted(parts, key=lambda run: [float(part) if at % 2 else part for at, part in enumerate(parts[run])])


def differing(runs: Sequence[Recorded]) -> dict[str, Values]:
    """The keys for which runs have recorded more than one value, each with the runs by value.

    A key that some runs lack tells nothing by that: it belongs to another class, which another key names, or to a
    later version.
    """
    order = dict.fromkeys([*FIRST, *(key for run in runs for key in run.keys)])
    by_key = {key: _by_value(key, [run for run in runs if key in run.keys]) for key in order}
    return {key: values for key, values in by_key.items() if len(values) > 1}


def _by_value(key: str, runs: Sequence[Recorded]) -> Values:
    values: Values = {}
    for run in runs:
        values.setdefault(run.keys.get(key, ""), []).append(run)
    return values


def groups(runs: Sequence[Recorded]) -> list[Group]:
    """The groups in the order in which they first occur.

    Where two runs have the config and the seed in common they are no sample of seeds: each run of that config is then
    a group of its own, labelled with its folder's name as well. A run from which none differs has that alone.
    """
    found = []
    known = {key for run in runs for key in run.keys}
    called = Counter(name for key in known for name in {key.partition(".")[0], key.rpartition(".")[2]})
    last = {key: key.rpartition(".")[2] for key in known}
    short = {key: name if called[name] == 1 else key for key, name in last.items()}  # no other is called so
    for alike, keys in _told_apart(runs, list(differing(runs))):
        label = ", ".join(f"{short[key]}={alike[0].keys[key]}" for key in keys)
        if len({run.seed for run in alike}) < len(alike):
            found += [Group(f"{label} {run.name}".lstrip(), keys, (run,)) for run in alike]
            continue
        name = alike[0].name if len(alike) == 1 else f"algorithm.name={alike[0].keys.get('algorithm.name', '?')}"
        found.append(Group(label or name, keys, tuple(alike)))
    return sorted(found, key=lambda group: runs.index(group.runs[0]))


def _told_apart(
    runs: Sequence[Recorded], keys: Sequence[str], used: tuple[str, ...] = ()
) -> Iterator[tuple[Sequence[Recorded], tuple[str, ...]]]:
    """Yield runs that are equal in all keys, with the keys that tell them from the others, each time the first."""
    for place, key in enumerate(keys):
        values = _by_value(key, runs)
        if len(values) > 1:
            for alike in values.values():
                also = (key,) if key in alike[0].keys else ()
                yield from _told_apart(alike, keys[place + 1 :], (*used, *also))
            return
    if runs:
        yield runs, used


FIGURES = {
    "accuracy": "accuracy on own test parts",
    "participation": "share of invitations that counted so far",
    "depth": "share of layers that counted so far",
}
Figures = Mapping[str, Mapping[str, float | None]]


def group_figures(run: Path | str) -> xarray.Dataset:
    """Return what groups of a run's clients came to, round by round.

    Parameters
    ----------
    run : Path or str
        The run folder, or the run.h5 in it.

    Returns
    -------
    Dataset
        By ``group`` and ``round``: ``accuracy``, the mean over the group's clients on their own test parts (NaN where
        they were not tested); ``participation`` and ``depth``, the share of the group's invitations so far that counted
        at all, and of the layers that they could have brought. By ``group`` and ``client``: ``member``.

    Raises
    ------
    UsageError
        If there is no run, or no client is slower than another.

    Notes
    -----
    The thirds are of the clients that were ever invited, by the mean of what their visits took: the same in all rounds.
    The accuracy of the worst tenth is that of each round's worst; its other figures are of those that were worst when
    last tested.

    Examples
    --------
    >>> run = hpcfl.run("salf-digits", settings={"rounds": 3}, out="runs/salf", quiet=True)
    >>> hpcfl.group_figures("runs/salf")["group"].values.tolist()
    ['slow-third', 'middle-third', 'fast-third', 'worst-decile']
    """
    data = store.open_run(run)
    if not data.sizes.get("round"):
        raise UsageError(f"'{run}' has recorded no round: expected one at least")
    own, invited = data["client_accuracy"].dropna("client", how="all"), data["cohort"] == 1
    members = {name: data.client.isin(ids) for name, ids in thirds(data["visit_seconds"], f"'{run}'").items()}
    accuracy = [data["client_accuracy"].where(these).mean("client") for these in members.values()]
    tested = own.dropna("round", how="all")
    last = tested.isel(round=-1).dropna("client") if tested.size else own.client[:0]  # when last tested
    worst = last.client.values[np.argsort(last.values, kind="stable")[: tenth(last.size)]]
    members[DECILE] = data.client.isin(worst)
    accuracy.append(worst_decile(own) if own.size else accuracy[0])
    shares = {"participation": data["arrived"] == 1, "depth": data["blocks"].where(invited, 0) / data.sizes["layer"]}

    def so_far(came: xarray.DataArray, these: xarray.DataArray) -> xarray.DataArray:
        asked = invited.where(these, 0).sum("client").cumsum("round")
        share: xarray.DataArray = came.where(these, 0).sum("client").cumsum("round") / asked.where(asked > 0)
        return share

    by_figure = {"accuracy": accuracy, "member": list(members.values())}
    by_figure |= {name: [so_far(came, these) for these in members.values()] for name, came in shares.items()}
    figures = {name: xarray.concat(each, "group") for name, each in by_figure.items()}
    return xarray.Dataset(figures).assign_coords(group=list(members))


def last_figures(run: Path) -> dict[str, dict[str, float | None]]:
    """Return each group's last known figures and its number of clients; none where no client is slower than others."""
    try:
        found = group_figures(run)
    except UsageError:
        return {}
    return {
        str(name): {"clients": int(found["member"].sel(group=name).sum())}
        | {figure: (found[figure].sel(group=name).dropna("round").values.tolist() or [None])[-1] for figure in FIGURES}
        for name in found.group.values
    }


def table(folders: Sequence[Path], figures: Sequence[Figures]) -> Any:
    """Return the `last_figures` of runs as a `rich` table: means over the seeds of each config."""
    runs, names = [Recorded.of(folder) for folder in folders], ("clients", *FIGURES)
    shown = Table("run", "group", *(Column(name, justify="right") for name in names))
    for config in groups(runs):
        own = [figures[runs.index(run)] for run in config.runs]
        for group in dict.fromkeys(group for each in own for group in each):
            values = ([each[group][name] for each in own if group in each] for name in names)
            known = [[value for value in some if value is not None] for some in values]
            shown.add_row(config.label, group, *(f"{np.mean(some):.4g}" if some else "–" for some in known))
    return shown


def open_sweep(folder: Path | str) -> xarray.Dataset:
    """Return what all runs of a sweep have recorded, as one data set.

    Parameters
    ----------
    folder : Path or str
        The folder that ``hpcfl sweep --out`` was given: each run is a folder in it.

    Returns
    -------
    xarray.Dataset
        The variables of `hpcfl.open_run`, with a dimension for the seed and for each key in which the runs differ, by
        its dotted name, as in ``sel({"algorithm.lr": 0.1})``. A key that follows from others (an overlay sets many)
        is no dimension; where some runs lack a key its labels are text. Where a combination was not run, or a run has
        fewer rounds, values are missing (NaN).

    Raises
    ------
    UsageError
        If the folder holds no run, or two runs with the same keys and seed.

    Examples
    --------
    >>> few = {"rounds": 2, "evaluate.every": 1}
    >>> runs = hpcfl.sweep("fedavg-digits", {"algorithm.lr": [0.05, 0.2]}, settings=few, out="runs/lr", jobs=1)
    >>> hpcfl.open_sweep("runs/lr")["accuracy"].sel({"algorithm.lr": 0.2}).sizes["round"]
    2
    """
    folders = list(run_folders([Path(folder)]))
    configs = [dict(flat(recorded(store.run_attributes(each)["config"]))) for each in folders]
    known = dict.fromkeys(key for config in configs for key in config if key != "seed")
    telling, kinds = list[str](), 1  # the fewest keys that tell all configs apart, and how many they tell apart
    for key in sorted(known, key=lambda key: (key not in FIRST, "." not in key)):  # names of classes, then sections
        told = {json.dumps([config.get(each) for each in (*telling, key)]) for config in configs}
        if len(told) > kinds:
            telling.append(key)
            kinds = len(told)
    keys = [*telling, "seed"]
    places = [tuple(config.get(key) for key in keys) for config in configs]
    for number, place in enumerate(places):
        if place in places[:number]:
            twin = folders[places.index(place)]
            raise UsageError(f"'{twin}' and '{folders[number]}' have the same config and seed: expected each run once")
    labels = []
    for values in zip(*places):
        plain = any(all(isinstance(value, kind) for value in values) for kind in ((int, float), str))
        # as text where some runs lack the key, or have lists
        labels.append([*values] if plain else ["" if value is None else json.dumps(value) for value in values])
    index = pandas.MultiIndex.from_arrays(labels, names=keys)
    parts = [store.open_run(each) for each in folders]
    how: dict[str, Any] = {"join": "outer", "coords": "different", "compat": "equals", "data_vars": "all"}
    whole = xarray.concat(parts, pandas.RangeIndex(len(parts), name="run"), combine_attrs="drop_conflicts", **how)
    return whole.assign_coords(xarray.Coordinates.from_pandas_multiindex(index, "run")).unstack("run")


# scores of a metric


def scores(
    runs: Mapping[Path, xarray.Dataset], clients: str | None, mixed: bool, metric: str = ACCURACY
) -> tuple[str, dict[Path, xarray.DataArray]]:
    """Return what is drawn, one thing for all runs, and each run's scores [round] at its evaluated rounds.

    That is the metric on the global test set if each run recorded it, else the mean over the clients of that on their
    own test parts, or that of some `clients`. `mixed`: where runs have no such thing in common, each its own.

    Raises
    ------
    UsageError
        If the runs have nothing in common, or did not record what the clients in question are chosen by.
    """
    named = metric.replace("_", " ").removeprefix("test ")
    if clients:
        chosen = dict[Path, xarray.DataArray]()
        for name, data in runs.items():
            known, where = data.get(f"client_{metric}"), f"clients {clients}: '{name}'"
            if known is None or not (known := known.dropna("client", how="all")).size:
                raise UsageError(f"{where} recorded no {metric} of clients: they have no own test parts")
            if clients in THIRDS:
                third = thirds(data["visit_seconds"], where)[clients]
                score = known.sel(client=known.client.isin(third)).mean("client")
            else:
                score = -worst_decile(-known) if metric == "test_loss" else worst_decile(known)
            chosen[name] = score.dropna("round")
        return f"{named} {CLIENTS[clients]}", chosen
    shared = {name: data[metric].dropna("round") for name, data in runs.items()}
    if not any(f"client_{metric}" in data for data in runs.values()):  # no test measures it
        texts = {str(each.attrs.get("long_name", named)) for each in shared.values()}
        return " or ".join(sorted(texts)), shared
    own = {name: data[f"client_{metric}"].mean("client").dropna("round") for name, data in runs.items()}
    whole = f"test {named}"
    for what, each in ((whole, shared), (f"mean {whole} over the clients", own)):
        if all(score.size for score in each.values()):
            return what, each
    if mixed:
        return whole, {name: score if score.size else own[name] for name, score in shared.items()}
    bare, lonely = (listed([f"'{name}'" for name in runs if not each[name].size], 4) for each in (shared, own))
    said = f"{bare} none on the global test set, {lonely} none of clients; expected one that all have, or any-data"
    raise UsageError(f"the runs recorded no {metric} in common: {said}")


def has_any(data: xarray.Dataset, metric: str = ACCURACY) -> bool:
    """Whether a run has recorded a metric; one that was killed early has none, one that learns numbers no accuracy."""
    return any(bool(data[name].notnull().any()) for name in (metric, f"client_{metric}") if name in data)


def recorded_metrics(data: xarray.Dataset) -> list[str]:
    """The names of what a run's tests measure, the loss last."""
    return sorted((str(name) for name in data.data_vars if f"client_{name}" in data), key="test_loss".__eq__)


def worst_decile(accuracy: xarray.DataArray) -> xarray.DataArray:
    """The mean over the worst tenth, rounded up, of the clients with a test part: the worst of each round anew."""
    over = [["client"]]
    ascending: xarray.DataArray = xarray.apply_ufunc(np.sort, accuracy, input_core_dims=over, output_core_dims=over)
    return ascending.isel(client=slice(tenth(accuracy.sizes["client"]))).mean("client")


def thirds(seconds: xarray.DataArray, whose: str) -> dict[str, Ints]:
    """The ids of the slowest, the middle and the fastest third of the clients that were invited, in all rounds alike.

    By the mean of what their visits took; one that did not end counts as the run's longest that did. What is left over
    goes to the slower ones. UsageError, which begins with `whose`, where no client is slower than another.
    """
    ended = seconds.where(np.isfinite(seconds))
    means = ended.where(seconds != np.inf, ended.max()).mean("round").dropna("client")
    if not means.size or means.max() == means.min():
        raise UsageError(f"{whose} recorded no client that is slower than another")
    order = means.client.values[np.argsort(-means.values, kind="stable")]
    return dict(zip(THIRDS, np.array_split(order, 3)))


def tenth(count: int) -> int:
    """A tenth of so many, rounded up."""
    return -(-count // 10)
