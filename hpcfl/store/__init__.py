"""The run folder: what a run records, its checkpoints and its status, and how all of it is read again.

Written by one process only, but for the ranks' parts of checkpoints; readable while it is written, and after a kill. A
row is written by `Segment.write` (segment.py), a checkpoint by `write_rank`, `write_server` and `publish`
(checkpoints.py); `open_run` (reading.py) reads a run.
"""

from hpcfl.store.checkpoints import (
    Checkpoint,
    WriteError,
    check_personal,
    check_shared,
    draft,
    drafted,
    latest,
    load,
    load_personal,
    personal_rounds,
    publish,
    saved,
    write_rank,
    write_server,
)
from hpcfl.store.columns import Column, Fact
from hpcfl.store.owner import release, take
from hpcfl.store.reading import (
    data_folder,
    events,
    last_written,
    open_run,
    read_facts,
    run_attributes,
    run_folder,
    segment_paths,
)
from hpcfl.store.run_file import begin, create, rebuild, seal
from hpcfl.store.segment import Segment
from hpcfl.store.status import Status, overwrite_status, read_status, write_status
from hpcfl.store.verify import Findings, verify

__all__ = [
    "Checkpoint",
    "Column",
    "Fact",
    "Findings",
    "Segment",
    "Status",
    "WriteError",
    "begin",
    "check_personal",
    "check_shared",
    "create",
    "data_folder",
    "draft",
    "drafted",
    "events",
    "last_written",
    "latest",
    "load",
    "load_personal",
    "open_run",
    "overwrite_status",
    "personal_rounds",
    "publish",
    "read_facts",
    "read_status",
    "rebuild",
    "release",
    "run_attributes",
    "run_folder",
    "saved",
    "seal",
    "segment_paths",
    "take",
    "verify",
    "write_rank",
    "write_server",
    "write_status",
]
