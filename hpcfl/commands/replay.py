"""Other rules and methods on the seconds of a run: ``hpcfl compare --replay``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcfl import store
from hpcfl.base.errors import UsageError
from hpcfl.config import config as configs
from hpcfl.config import from_text, load
from hpcfl.config.presets import PICKED
from hpcfl.launch import api
from hpcfl.store.status import DONE, read_status

REAL_TIME = (
    *("lane_width", "leaders", "fan_out", "lost_after", "fault_tolerance", "lost_clients"),
    *("start_within", "min_ranks", "batch_clients"),
)
"""Keys that have no meaning, or another one, in simulated time."""


def replayed(run: Path, overlays: Sequence[str], out: Path, data_dir: Path | None) -> list[Path]:
    """Run what a run was with each of some overlays, in simulated time, by the seconds that its visits took.

    Returns
    -------
    list of Path
        The run folders, below `out`, by the names of the overlays: what is there goes on, or is done already.

    Raises
    ------
    UsageError
        If the run cannot be replayed, an overlay does not go with it or sets other speeds, two overlays have one name,
        or a folder holds another run.
    """
    was = configs.of_run(store.run_attributes(run), run)
    table = was.model_dump(mode="json", exclude_defaults=True, exclude={*REAL_TIME})
    for section, name in was.picked.items():
        table.setdefault(section, {})[PICKED[section].by] = name
    speed: dict[str, Any] = {"model": "trace", "closing": "rule", "run": str(run.resolve())}
    if was.clock == "simulated":  # else the seconds are those of whole visits, as they were
        speed |= was.speed.model_dump(mode="json", exclude_defaults=True, include={"per", "scale", "communication"})
    table |= {"clock": "simulated", "clients": was.clients, "speed": speed}
    folders = [out / Path(name).stem for name in overlays]
    for name, folder in zip(overlays, folders):
        config = load(table, overlays=name, data_dir=data_dir)
        there = config.speed.model_dump(mode="json", exclude_defaults=True) | {"model": "trace", "closing": "rule"}
        if there != speed or config.picked["speed"] != "trace":
            raise UsageError(f"--with {name}: [speed]: expected an overlay without it: seconds are those of '{run}'")
        if folders.count(folder) > 1:
            raise UsageError(f"--with {name}: expected overlays of different names, got '{folder.name}' twice")
        if folder.exists() and from_text(store.run_attributes(folder)["config"]) != config:
            raise UsageError(f"'{folder}' holds a run of another config: expected another --out")
        if read_status(folder).state not in DONE:
            api.run(config, out=folder, data_dir=data_dir, resume=folder.exists(), quiet=True)
    return folders
