"""The run folder: what a run records, its checkpoints and its status, and how all of it is read again.

Written by one process only; readable while it is written, and after a kill. See `begin` for writing and
`open_run` for reading.
"""

from hpcfl.store.checkpoints import Checkpoint, latest, load, load_personal, personal_rounds, personal_shapes, save
from hpcfl.store.columns import Column, Fact
from hpcfl.store.metrics import Segment
from hpcfl.store.owner import release, take
from hpcfl.store.reading import events, open_run
from hpcfl.store.seal import begin, seal
from hpcfl.store.segments import data_folder, read_facts, run_attributes, run_folder
from hpcfl.store.status import Status, read_status, write_status
from hpcfl.store.table import create, rebuild

__all__ = [
    "Checkpoint",
    "Column",
    "Fact",
    "Segment",
    "Status",
    "begin",
    "create",
    "data_folder",
    "events",
    "latest",
    "load",
    "load_personal",
    "open_run",
    "personal_rounds",
    "personal_shapes",
    "read_facts",
    "read_status",
    "rebuild",
    "release",
    "run_attributes",
    "run_folder",
    "save",
    "seal",
    "take",
    "write_status",
]
