"""The runs of a sweep: every config with every value of every key, each with a folder and a command of its own."""

from __future__ import annotations

import hashlib
import itertools
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcfl import store
from hpcfl.base.errors import RunError, UsageError, refusal
from hpcfl.config import load
from hpcfl.data import Header
from hpcfl.launch.request import check_same

FINISHED = {"done": "skipped", "diverged": "diverged"}
"""States of a run that is not started again, and how it is counted."""
LONGEST = 200  # characters of a run's name; file systems take 255 bytes, and a log's name is longer


@dataclass(frozen=True)
class Run:
    """One run of a sweep: what follows ``hpcfl run`` on its command line, and where it lives."""

    index: int
    config: str
    settings: tuple[str, ...]
    folder: Path
    options: tuple[str, ...] = ()
    overlays: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def log(self) -> Path:
        """The file of what the run says."""
        return self.folder.with_name(f"{self.name}.log")

    @property
    def state(self) -> str:
        """``new``, or what the run's status says; a finished run may have lost its run.h5."""
        state = store.read_status(self.folder).state
        return state if state in FINISHED or (self.folder / "run.h5").exists() else "new"

    @property
    def words(self) -> list[str]:
        """The command line after ``hpcfl``; it begins the run, goes on with it, or finds that it is done."""
        return ["run", *self.what, "--out", str(self.folder), "--resume", *self.options]

    @property
    def what(self) -> list[str]:
        """The part of `words` that says what is run."""
        overlays = [word for overlay in self.overlays for word in ("--with", overlay)]
        return [self.config, *overlays, *(word for setting in self.settings for word in ("--set", setting))]

    def line(self, launcher: Sequence[str] = ()) -> str:
        """Index, state, folder and command, separated by tabs."""
        command = shlex.join([*launcher, "hpcfl", *self.words])
        return "\t".join([str(self.index), self.state, str(self.folder), command])


def runs(
    configs: Sequence[str],
    out: Path,
    settings: Sequence[str] = (),
    grid: Sequence[str] = (),
    seeds: str | None = None,
    data_dir: Path | None = None,
    force: bool = False,
    trust: bool = False,
    allow_mixed: bool = False,
    overlays: Sequence[Sequence[str]] = (),
) -> list[Run]:
    """List the runs of a sweep, in an order that follows from the arguments alone; the last key changes fastest.

    `settings` are ``key=value`` for all runs, `grid` ``key=v1,v2,…`` for as many as there are values, and `seeds`
    ``1,2,5-7`` is another axis of the grid. Each list among `overlays` is an axis too: a run has one overlay of each.

    Raises
    ------
    UsageError
        If a list cannot be read, a key is set twice, or two runs would share a folder.
    """
    given, product = axes(settings, grid, seeds), itertools.product
    flags = {"--force": force, "--trust": trust, "--allow-mixed": allow_mixed}
    place = ("--data-dir", str(data_dir)) if data_dir else ()
    options = (*place, *(flag for flag, wanted in flags.items() if wanted))
    by_name: dict[str, Run] = {}
    for config, each, values in product(configs, product(*overlays), product(*given.values())):
        varied = tuple(f"{key}={value}" for key, value in zip(given, values))
        folder = out / name_of(config, [*(Path(overlay).stem for overlay in each), *varied])
        run = Run(len(by_name), config, (*settings, *varied), folder, options, each)
        if (other := by_name.setdefault(run.name, run)) is not run:
            both = " and ".join(f"'{shlex.join(one.what)}'" for one in (other, run))
            raise UsageError(f"two runs would share the folder '{run.folder}': {both}; expected each once")
    return list(by_name.values())


def axes(settings: Sequence[str], grid: Sequence[str], seeds: str | None) -> dict[str, list[str]]:
    """The values of each key that varies."""
    once = {setting.partition("=")[0].strip() for setting in settings}
    lists = [_axis(text) for text in grid] + ([("seed", seed_list(seeds))] if seeds is not None else [])
    for key, _ in lists:
        if key in once:
            raise UsageError(f"{key}: set twice; expected each key in one of --set, --grid and --seeds")
        once.add(key)
    return dict(lists)


def _axis(text: str) -> tuple[str, list[str]]:
    """Key and values of ``key=v1,v2,…``; commas within brackets or quotes are part of a value."""
    key, _, rest = text.partition("=")
    values, held = [], ""
    for part in rest.split(","):
        held += part
        closed = all(held.count(left) == held.count(right) for left, right in ("[]", "{}"))
        if closed and not any(held.count(quote) % 2 for quote in "\"'"):
            values.append(held.strip())
            held = ""
        else:
            held += ","
    if not key.strip() or held or not all(values):
        raise UsageError(f"--grid {text}: expected KEY=V1,V2,...")
    return key.strip(), values


def seed_list(text: str) -> list[str]:
    """The seeds of ``1,2,5-7``."""
    seeds: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise UsageError(f"--seeds {text}: expected numbers as in 1,2,3 or 1-3, got '{part.strip()}'")
        seeds += [str(seed) for seed in range(first, last + 1)]
    return seeds


def name_of(config: str, varied: Sequence[str]) -> str:
    """A name that tells what the run differs in, of characters that any file system takes."""
    bare = [re.sub(r"[\[\]{}\"'\s]", "", text) for text in (Path(config).stem, *varied)]
    name = "_".join(re.sub(r"[^A-Za-z0-9_.=+-]+", "-", text) for text in bare)
    if len(name) <= LONGEST:
        return name
    mark = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: LONGEST - 1 - len(mark)]}-{mark}"


def picked(sweep: list[Run], only: int | None) -> list[Run]:
    """The one run that is asked for, or all; UsageError where there is no such index."""
    if only is None:
        return sweep
    if not 0 <= only < len(sweep):
        raise refusal("--only", f"0 to {len(sweep) - 1}", only, min(max(only, 0), len(sweep) - 1))
    return [sweep[only]]


def check(chosen: Sequence[Run], data_dir: Path | None) -> None:
    """Raise UsageError for the first run whose config is wrong, or whose folder holds a run of another config.

    A run.h5 that is damaged says nothing of its config: that run fails when its turn comes.
    """
    headers: dict[tuple[str, int], Header] = {}  # data that several runs share are read only once
    for run in chosen:
        try:
            config = load(run.config, run.settings, run.overlays, data_dir=data_dir)
            config.check_values()
            key = config.data.model_dump_json(), config.clients
            headers[key] = headers.get(key) or config.data.check(config.clients, data_dir)
            config.check_shapes(headers[key])
            if (run.folder / "run.h5").exists():
                with suppress(RunError):
                    check_same(run.folder, config)
        except UsageError as error:
            raise UsageError(f"run {run.index} ({run.name}): {error}") from None
