"""What the commands do, for scripts and notebooks: results in the place of printed lines."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from hpcfl.algorithms import Algorithm
from hpcfl.base.errors import RunError, UsageError, count_of, listed
from hpcfl.base.lazy import pandas, xarray
from hpcfl.base.terminal import say
from hpcfl.commands import check as checks
from hpcfl.commands import list as catalogue
from hpcfl.commands import sweep as sweeps
from hpcfl.commands.show import summaries
from hpcfl.config import Config, Overlay, load
from hpcfl.config.presets import flat, on_top, read
from hpcfl.engine import stopping
from hpcfl.launch.api import written_down
from hpcfl.launch.saved import keeping
from hpcfl.results.card import svg
from hpcfl.results.run_table import open_sweep, run_folders
from hpcfl.results.targets import compare
from hpcfl.store.atomic import write_text

Folders = Path | str | Iterable[Path | str]
COLUMNS = ("status", "rounds", "accuracy", "client_accuracy", "arrived", "sim_seconds", "wall_seconds")


def show(folders: Folders) -> pandas.DataFrame:
    """Return what runs came to, a row for each, as ``hpcfl show`` has it.

    Parameters
    ----------
    folders : Path, str or several
        Runs, or folders of runs, such as a sweep's.

    Raises
    ------
    UsageError, RunError
        If none of them can be read; of others a line on stderr says why.

    Examples
    --------
    >>> run = hpcfl.run("fedavg-digits", settings={"rounds": 2, "evaluate.every": 1}, out="runs/two", quiet=True)
    >>> hpcfl.show("runs/two")["status"].to_dict()
    {'runs/two': 'done'}
    """
    several = [folders] if isinstance(folders, str | Path) else [*folders]
    rows, odd = summaries(run_folders(map(Path, several)))
    for line in odd:
        say(line)
    return pandas.DataFrame(rows).set_index("run")


def list(name: str = "") -> pandas.DataFrame:  # noqa: A001
    """Return what there is to run, a row for each, as ``hpcfl list`` has it.

    Parameters
    ----------
    name : str
        ``methods``, ``models``, ``data``, ``speeds``, ``presets`` or ``overlays``: what each of them is, in ``about``.
        ``keys``: ``default``, ``values`` and ``about`` of each key of a config. "": all of them but the keys, by kind.

    Raises
    ------
    UsageError
        If there is no such kind.

    Examples
    --------
    >>> "salf" in hpcfl.list("methods").index
    True
    >>> hpcfl.list("keys").loc["rounds", "default"]
    'required'
    """
    return catalogue.frame(name)


def check(
    config: str | Path | Mapping[str, Any] | Config,
    *,
    settings: Mapping[str, Any] | None = None,
    overlays: Overlay | Iterable[Overlay] = (),
    data_dir: Path | str | None = None,
    ranks: int = 1,
) -> dict[str, str]:
    """Return what a config would do, a fact by each name that ``hpcfl check`` prints; nothing runs.

    UsageError where it cannot be run.

    Examples
    --------
    >>> hpcfl.check("salf-digits")["closes"]
    'after 0.3 s; of visits under way layers count'
    """
    place = None if data_dir is None else Path(data_dir)
    loaded = load(config, settings or {}, overlays, tell=True, data_dir=place)
    lines = checks.report(loaded, loaded.check(place), place, ranks)
    return {name: text.strip() for name, _, text in (line.partition(" ") for line in lines)}


def stop(folder: Path | str, *, wait: bool = False, patience: float = 600.0) -> None:
    """Ask a running run to stop after the round that it is in, as ``hpcfl stop`` does.

    One whose batch job is queued again ends when that starts.

    Parameters
    ----------
    wait : bool
        Return when it has stopped; RunError where it ends otherwise, or writes nothing for `patience` seconds.
    """
    stopping.stop([Path(folder)], patience if wait else None)


@dataclass(eq=False, repr=False)
class Sweep:
    """The runs of a sweep, some of which may still be going on.

    Attributes
    ----------
    folder : Path
        Where the runs lie.
    planned : list of hpcfl.commands.sweep.Run
        All of them, in their order, with the `folder` of each.
    """

    folder: Path
    planned: Sequence[sweeps.Run]
    _process: subprocess.Popen[str] | None = None

    @property
    def missing(self) -> int:
        """How many runs are not finished."""
        return sum(run.state not in sweeps.FINISHED for run in self.planned)

    @property
    def data(self) -> xarray.Dataset:
        """What the runs have recorded, as `hpcfl.open_sweep` returns it."""
        return open_sweep(self.folder)

    @property
    def table(self) -> pandas.DataFrame:
        """What each of them has come to, as `show` returns it."""
        return show([run.folder for run in self.planned if run.state != "new"])

    def time_to(self, **target: float) -> pandas.DataFrame:
        """When the runs reached a target, as in ``time_to(accuracy=0.9)``: those columns of `hpcfl.compare`."""
        if len(target) != 1:
            raise UsageError(
                f"time_to: expected one metric, as in time_to(accuracy=0.9), got {listed(target) or 'none'}"
            )
        ((metric, value),) = target.items()
        return compare(self, value, metric=metric).loc[:, "runs":"seconds_high"]

    def wait(self) -> Sweep:
        """Return when no run is going on any more; RunError where some have failed."""
        if self._process is not None:
            said, _ = self._process.communicate()
            code, self._process = self._process.returncode, None
            if code:
                last = said.strip().splitlines()[-1:] or [f"exit code {code}"]
                raise RunError(f"'{self.folder}': {last[0].removeprefix('hpcfl: ')}")
        return self

    def stop(self) -> Sweep:
        """Let the runs that are going on stop after the rounds that they are in; `sweep` again goes on with them."""
        if self._process is not None:
            self._process.terminate()
            self._process.communicate()
            self._process = None
        return self

    def __repr__(self) -> str:
        said = ", ".join(f"{number} {state}" for state, number in Counter(run.state for run in self.planned).items())
        return f"{count_of(len(self.planned), 'run')}: {said}, in {self.folder}"

    def _repr_html_(self) -> str:
        from hpcfl.results.figures import figure

        told = f"<p>{count_of(len(self.planned), 'run')}, {self.missing} of them not finished</p>"
        if all(run.state == "new" for run in self.planned):
            return told
        table, picture = self.table, ""
        with suppress(UsageError):  # nothing that all have recorded
            picture = svg(figure(self, x="rounds", width="column")) if not self.missing else ""
        return told + str(table[[name for name in COLUMNS if name in table]].to_html()) + picture


def _kept(folder: Path, what: str | Path | Mapping[str, Any], name: str, keys: Mapping[str, Any] | None = None) -> str:
    """Return what a config or overlay is called; a nested table, and one with keys on top, is a file in `folder`."""
    if keys is None and not isinstance(what, Mapping):
        return str(what)
    name, table = (name, dict(what)) if isinstance(what, Mapping) else (Path(what).stem, read(str(what)))
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"{key} = {json.dumps(value)}\n" for key, value in flat(on_top(table, [], keys or {})[0]))  # as in TOML
    write_text(folder / f"{name}.toml", "".join(lines))
    return str(folder / f"{name}.toml")


def sweep(
    config: str | Path | Mapping[str, Any] | Sequence[str | Path | Mapping[str, Any]],
    grid: Mapping[str, Sequence[Any]] | None = None,
    *,
    seeds: int | Sequence[int] = (),
    out: Path | str,
    algorithm: str | type[Algorithm] | None = None,
    model: str | Callable[..., Any] | None = None,
    loss: str | Callable[..., Any] | None = None,
    data: Any = None,
    by: str | None = None,
    label: str | None = None,
    test_share: float = 0.2,
    speeds: Any = None,
    settings: Mapping[str, Any] | None = None,
    overlays: Overlay | Iterable[Overlay | Sequence[Overlay]] = (),
    data_dir: Path | str | None = None,
    jobs: int | None = None,
    launcher: str = "",
    wait: bool = True,
) -> Sweep:
    """Run configs with each combination of values, as ``hpcfl sweep`` does: finished runs are skipped, others gone on.

    Parameters
    ----------
    config : str, Path or mapping, or several
        Presets' names, TOML files, or nested tables, which are kept in `out` as ``config``, of several ``config-1`` …
    grid : mapping of str to list
        Values by dotted key: a run for each combination.
    seeds : int or list of int
        Seeds, or how many of them from 1 on.
    out : Path or str
        Folder of the run folders and their logs.
    algorithm, model, loss, data, by, label, test_share, speeds
        As `hpcfl.run` takes them. The folder `out` keeps one copy for all runs, and configs that name it.
    overlays : str, Path or mapping, or several
        Partial configs that all runs have, as `hpcfl.run` takes them. A list among them is an axis, as
        ``[["wait", "drop"]]``: a run for each, as of ``--with wait,drop``.
    jobs : int, optional
        Runs at a time; None: 1, under Slurm as many as have room.
    launcher : str
        What starts each run, as in ``mpirun -n 4``. ``slurm`` or ``slurm -n 4``: each a step of this allocation, on
        one rank or so many, as by ``--pack``.
    wait : bool
        Return when all have ended; else at once, and `Sweep.wait` waits.

    Raises
    ------
    UsageError
        If a config or value cannot be; nothing is started.
    RunError
        If some runs have failed, once all have ended.

    Examples
    --------
    >>> few = {"rounds": 2, "evaluate.every": 1}
    >>> hpcfl.sweep("fedavg-digits", {"algorithm.lr": [0.05, 0.2]}, settings=few, out="runs/lr", jobs=1)
    2 runs: 2 done, in runs/lr
    """
    folder = Path(out)
    several = [config] if isinstance(config, str | Path | Mapping) else config
    own = {"algorithm.name": algorithm, "model.name": model, "task.loss": loss}
    objects = any(each is not None for each in (*own.values(), data, speeds))
    sets = [f"{key}={json.dumps(value)}" for key, value in (settings or {}).items()]
    grids = [f"{key}={','.join(map(json.dumps, values))}" for key, values in (grid or {}).items()]
    numbers = range(1, seeds + 1) if isinstance(seeds, int) else seeds
    all_seeds = ",".join(map(str, numbers)) or None
    place = None if data_dir is None else Path(data_dir)
    one = str, Path, Mapping
    lists = [overlays] if isinstance(overlays, one) else overlays
    with keeping(folder):
        keys, modules = dict[str, Any](), dict[str, str]()
        if objects:  # the processes of the runs take them from the sweep's folder
            keys, modules = written_down(folder, own, settings, data, by, label, test_share, speeds)
            sets = []
        names = (f"config-{number}" if len(several) > 1 else "config" for number in count(1))
        configs = [_kept(folder, each, next(names), keys if objects else None) for each in several]
        names = (f"overlay-{number}" for number in count(1))
        axes = [
            [_kept(folder, each, next(names)) for each in ([axis] if isinstance(axis, one) else axis)] for axis in lists
        ]
        for name, source in modules.items():
            write_text(folder / f"{name}.py", source)
        known = sweeps.runs(configs, folder, sets, grids, all_seeds, place, axes)
        sweeps.check(known, place)
    slurm = re.fullmatch(r"slurm(?: -n (\d+))?", launcher)
    pack, launcher = (slurm[1] or "1", "") if slurm else ("", launcher)
    words = [*configs, "--out", str(folder)]
    for option, values in (("--set", sets), ("--grid", grids), ("--with", map(",".join, axes))):
        words += [word for value in values for word in (option, str(value))]
    once = {"seeds": all_seeds, "jobs": jobs, "launcher": launcher, "pack": pack, "data-dir": place}
    words += [word for option, value in once.items() if value for word in (f"--{option}", str(value))]
    process = subprocess.Popen(
        [*sweeps.PROGRAM, "sweep", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    started = Sweep(folder, known, process)
    return started.wait() if wait else started
