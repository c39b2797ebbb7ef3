"""Other rules and methods on the seconds of a run: ``hpcfl compare --replay``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcfl import store
from hpcfl.config import config as configs
from hpcfl.config.presets import PICKED
from hpcfl.launch import api
from hpcfl.store.status import DONE, read_status


def replayed(run: Path, overlays: Sequence[str], out: Path, data_dir: Path | None) -> list[Path]:
    """Run what a run was with each of some overlays, in simulated time, by the seconds that its visits took.

    Returns
    -------
    list of Path
        The run folders, below `out`, by the names of the overlays: what is there goes on, or is done already.

    Raises
    ------
    UsageError
        If the run cannot be replayed, or an overlay does not go with it.
    """
    was = configs.of_run(store.run_attributes(run), run)
    table = was.model_dump(mode="json", exclude_defaults=True)
    for section, name in was.picked.items():
        table.setdefault(section, {})[PICKED[section].by] = name
    table |= {"clock": "simulated", "clients": was.clients}
    table["speed"] = {"model": "trace", "closing": "rule", "run": str(run)}
    folders = []
    for name in overlays:
        folder = out / Path(name).stem
        begun = folder.exists()
        if not begun or read_status(folder).state not in DONE:
            api.run(table, overlays=name, out=folder, data_dir=data_dir, resume=begun, quiet=True)
        folders.append(folder)
    return folders
