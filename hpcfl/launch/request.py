"""What a run is told to do, judged by rank 0 before anything heavy starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hpcfl import config as configs
from hpcfl import store
from hpcfl.base.errors import UsageError
from hpcfl.config import Config
from hpcfl.presets import flat


@dataclass(frozen=True)
class Order:
    """What rank 0 tells the others to do."""

    run_dir: str
    config: str
    data_dir: str | None
    checkpoint: str | None = None
    new: bool = True
    quiet: bool = False
    force: bool = False

    @property
    def data(self) -> Path | None:
        """The folder of the data sets."""
        return Path(self.data_dir) if self.data_dir else None


def ordered_run(
    name: str,
    settings: Sequence[str],
    out: Path | None,
    data_dir: Path | None,
    resume: bool = False,
    quiet: bool = False,
    force: bool = False,
) -> Order | None:
    """Judge a new run: its config, its data's headers, its folder. Return None where nothing is left to do."""
    config = configs.load(name, settings)
    run_dir = out or Path("runs") / Path(name).stem
    if (run_dir / "run.h5").exists():
        if not resume:
            raise UsageError(f"'{run_dir}' already holds a run: choose another --out, or hpcfl resume {run_dir}")
        check_same(run_dir, config)
        return ordered_resume(run_dir, data_dir, quiet, force)
    config.check(data_dir)
    check_writable(run_dir)
    place = str(data_dir.resolve()) if data_dir else None
    return Order(str(run_dir), config.text(), place, quiet=quiet, force=force)


def check_same(run_dir: Path, config: Config) -> None:
    """Raise UsageError where the folder holds a run of another config: it would be gone on with in silence."""
    held = configs.from_text(store.run_attributes(run_dir)["config"])
    there, here = (dict(flat(each.model_dump(mode="json"))) for each in (held, config))
    for key in sorted(there.keys() | here.keys()):
        if there.get(key) != here.get(key):
            raise UsageError(
                f"'{run_dir}' holds a run with {key} = {there.get(key)!r}, expected {here.get(key)!r}; "
                "choose another --out"
            )


def check_writable(run_dir: Path) -> None:
    """Raise UsageError where the folder cannot be made or written, without making it."""
    there = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if os.path.lexists(path))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "cannot be written" if there.is_dir() else "is no folder"
        raise UsageError(f"'{run_dir}' cannot be written: '{there}' {reason}; expected a writable folder")


def ordered_resume(run_dir: Path, data_dir: Path | None, quiet: bool = False, force: bool = False) -> Order | None:
    """Judge a resumption; a finished run says so and gives None. `force` passes over an owner on another host.

    With an order this process owns the folder, until `hpcfl.store.release`.
    """
    folder = store.run_folder(run_dir)
    store.take(folder, force)
    with ExitStack() as stack:
        stack.callback(store.release, folder)
        order = _resumption(folder, data_dir, quiet)
        if order is not None:
            stack.pop_all()
        return order


def _resumption(folder: Path, data_dir: Path | None, quiet: bool) -> Order | None:
    """Judge the resumption of a run whose folder is owned."""
    status = store.read_status(folder)
    if status.state == "done":
        print(f"'{folder}' is done already")
        return None
    if status.state == "diverged":
        raise UsageError(
            f"'{folder}' has diverged: {status.reason}; its last finite checkpoint is kept; expected another run, "
            "such as one with a smaller step size"
        )
    attributes = store.run_attributes(folder)
    data = store.data_folder(attributes, data_dir)
    configs.from_text(attributes["config"]).check(data)
    found = store.latest(folder)
    place = str(data) if data else None
    return Order(str(folder), attributes["config"], place, str(found) if found else None, new=False, quiet=quiet)
