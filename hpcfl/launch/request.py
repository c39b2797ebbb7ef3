"""What a run is told to do, judged by rank 0 before anything heavy starts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from hpcfl import config as configs
from hpcfl import store
from hpcfl.base import plugins
from hpcfl.base.config import recorded as recorded_table
from hpcfl.base.errors import RunError, StoppedBefore, UsageError
from hpcfl.base.terminal import say
from hpcfl.base.types import Computing
from hpcfl.config import Config, ConfigLike, Overlay
from hpcfl.config.presets import Settings, flat
from hpcfl.data.base import too_large
from hpcfl.engine import stopping
from hpcfl.results.trained import recorded, recorded_chunk
from hpcfl.store.atomic import number_of


class RunRequest(BaseModel):
    """What rank 0 tells the others to do; it goes over the wire as JSON."""

    folder: Path
    config: str
    data_dir: Path | None
    checkpoint: Path | None = None
    new: bool = True
    quiet: bool = False
    force: bool = False
    overwrite: bool = False
    profile: bool = False
    only: list[str] | None = Field(default_factory=plugins.only)
    """The digests of the files that alone may be imported."""
    computing: Computing | None = None
    """How the clients of a chunk are computed, where the run has decided that."""
    chunk: int | None = None
    """The size of the run's chunks, where that is recorded."""
    mixed: str = ""
    """Which ranks compute by other code, where that is allowed."""
    places: list[Path] = Field(default_factory=plugins.places)
    """Where rank 0 looks for classes from outside the package."""
    modules: dict[str, str] = Field(default_factory=dict)
    """Source, by name, of modules that a script has given."""


def run_request(
    config: ConfigLike,
    settings: Settings,
    out: Path | None,
    data_dir: Path | None,
    resume: bool = False,
    force: bool = False,
    overlays: Overlay | Iterable[Overlay] = (),
    trust: bool = False,
    overwrite: bool = False,
    **shown: bool,
) -> RunRequest | None:
    """Judge a new run: its config, its data's headers, its folder. None where nothing is left to do.

    With `overwrite` it takes the place of one that is there. `shown` are `quiet` and `profile`, as a request has them.
    """
    if overwrite and resume:
        raise UsageError("--overwrite begins anew, --resume goes on: expected one of them")
    loaded = configs.load(config, settings, overlays, tell=True, data_dir=data_dir)
    run_dir = out or default_folder(config)
    if (run_dir / "run.h5").exists() and not overwrite:
        if not resume:
            raise UsageError(f"'{run_dir}' already holds a run: choose another --out, --resume or --overwrite")
        check_same(run_dir, loaded, force, trust)
        return resume_request(run_dir, data_dir, force, trust=trust, **shown)
    header = loaded.check(data_dir)
    if not header.tokens and (text := too_large(header.ranges, f"{loaded.clients} clients", loaded.data)):
        say(f"warning: {text}")
    check_writable(run_dir)
    known: dict[str, Any] = {"data_dir": data_dir.resolve() if data_dir else None, "force": force, **shown}
    return RunRequest(folder=run_dir, config=loaded.text(), overwrite=overwrite, **known)


def default_folder(config: ConfigLike) -> Path:
    """Return ``runs/<name>``: that of the file or preset, or where the config has none that of its method."""
    if isinstance(config, str | Path):
        return Path("runs") / Path(config).stem
    section = config.algorithm.model_dump() if isinstance(config, Config) else config.get("algorithm")
    name = section.get("name") if isinstance(section, Mapping) else None
    return Path("runs") / str(name or "run")


def check_same(run_dir: Path, config: Config, force: bool = False, trust: bool = False) -> None:
    """Raise UsageError where the folder holds a run of another config: it would be gone on with in silence."""
    held = configs.of_run(store.run_attributes(run_dir), run_dir, force, trust)
    there, here = (dict(flat(each.model_dump(mode="json"))) for each in (held, config))
    for key in sorted(there.keys() | here.keys()):
        if there.get(key) != here.get(key):
            differs = f"{key} = {there.get(key)!r}, expected {here.get(key)!r}"
            raise UsageError(f"'{run_dir}' holds a run with {differs}; choose another --out")


def check_writable(run_dir: Path) -> None:
    """Raise UsageError where the folder cannot be made or written, without making it."""
    there = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if os.path.lexists(path))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "cannot be written" if there.is_dir() else "is no folder"
        raise UsageError(f"'{run_dir}' cannot be written: '{there}' {reason}; expected a writable folder")


def resume_request(
    folder: Path,
    data_dir: Path | None,
    force: bool = False,
    rounds: int | None = None,
    trust: bool = False,
    **shown: bool,
) -> RunRequest | None:
    """Judge a resumption; a finished run says so and gives None. `force` passes over an owner on another host.

    `trust` imports the code that the folder names, whoever has sent it.

    `rounds` are those that the run has from now on, finished or not; None: as before. `shown` as of `run_request`.

    With a request this process owns the folder, until `hpcfl.store.release`.
    """
    folder = store.run_folder(folder)
    store.take(folder, force)
    with ExitStack() as owned:
        owned.callback(store.release, folder)
        store.segment_paths(folder)  # a run whose metrics are gone is not done
        status, attributes = store.read_status(folder), store.run_attributes(folder)
        if status.state in store.DONE and rounds in (None, recorded_table(attributes["config"]).get("rounds")):
            if damaged := store.verify(folder).damaged:
                name, reason = next(iter(damaged.items()))
                more = f" (and {len(damaged) - 1} more: hpcfl verify {folder})" if damaged.keys() - {name} else ""
                raise RunError(f"'{folder}' is done, but {name} is not whole: {reason}{more}")
            print(f"'{folder}' is done already" + (f": {status.reason}" if status.reason else ""))
            return None
        if status.state == "diverged":
            kept = "its last finite checkpoint is kept; expected another run, such as one with a smaller step size"
            raise UsageError(f"'{folder}' has diverged: {status.reason}; {kept}")
        if stopping.waits(folder):
            stopping.withdraw(folder)
            store.write_status(folder, "stopped", stopping.ASKED)
            when = "before its job was started again"
            raise StoppedBefore(f"'{folder}' was asked to stop {when}: it has not begun; hpcfl resume {folder} goes on")
        data = store.data_folder(attributes, data_dir)
        config = configs.of_run(attributes, folder, force, trust)
        newest = store.latest(folder)
        text = config.text() if configs.has_moved(attributes, folder) else attributes["config"]
        if rounds not in (None, config.rounds):
            config = extended(folder, config, rounds, newest, json.loads(attributes.get("history", "[]")))
            text = config.text()
        config.check(data)
        known = {"config": text, "data_dir": data, "checkpoint": newest, "force": force, **shown}
        known |= {"computing": recorded(attributes), "chunk": recorded_chunk(attributes)}
        request = RunRequest(folder=folder, **known, new=False)
        owned.pop_all()
    return request


def extended(folder: Path, config: Config, rounds: int, newest: Path | None, history: list[dict[str, Any]]) -> Config:
    """Return a run's config with another number of rounds, some of them being done in its `newest` checkpoint.

    `history` has the changes of that number before, oldest first, beside others, as `run.h5` has them.

    Nothing that is drawn or decided follows from the number of rounds, but for when a run ends, and planned deadlines:
    whether recorded or tabled times cover them is checked with all else, and in which rounds models are evaluated here.

    Raises
    ------
    UsageError
        If so many are done already, some of them would have been evaluated and were not, or deadlines are planned.
    """
    done = 0 if newest is None else number_of(newest)
    if rounds <= done:
        least = f"more than the {done} rounds that are done"
        raise UsageError(f"--rounds {rounds}: '{folder}': expected {least}; did you mean {done + 1}?")
    if config.participation.deadline == "planned":
        why = "its deadlines were planned for that number"
        raise UsageError(f"--rounds {rounds}: '{folder}': expected {config.rounds}: {why}")
    changes = [change for change in reversed(history) if change["key"] == "rounds"]

    def then(number: int) -> int:
        """The rounds that the run was to have when this one was done."""
        later = [change["from"] for change in takewhile(lambda change: number <= change["after_round"], changes)]
        return later[-1] if later else config.rounds

    due = config.evaluate.due
    if missing := next((r for r in range(1, done + 1) if due(r, rounds) and not due(r, then(r))), 0):
        last = config.evaluate.last
        why = f"a run of {rounds} rounds is evaluated after round {missing}, this one was not"
        raise UsageError(f"--rounds {rounds}: evaluate.last = {last}: {why}: expected at least {done + last}")
    return config.model_copy(update={"rounds": rounds})
