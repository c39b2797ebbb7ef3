"""The run folder: what a run records, its checkpoints and its status, and how all of it is read again.

Written by one process only, but for the ranks' parts of checkpoints; readable while it is written, and after a kill. A
row is written by `Segment.write` (growing_file.py), a checkpoint by `write_rank`, `write_server` and `publish`
(checkpoints.py); `open_run` (reading.py) reads a run.
"""

from hpcfl.store.checkpoints import Checkpoint as Checkpoint
from hpcfl.store.checkpoints import WriteError as WriteError
from hpcfl.store.checkpoints import check_personal as check_personal
from hpcfl.store.checkpoints import check_shared as check_shared
from hpcfl.store.checkpoints import draft as draft
from hpcfl.store.checkpoints import drafted as drafted
from hpcfl.store.checkpoints import latest as latest
from hpcfl.store.checkpoints import load as load
from hpcfl.store.checkpoints import load_personal as load_personal
from hpcfl.store.checkpoints import personal_rounds as personal_rounds
from hpcfl.store.checkpoints import publish as publish
from hpcfl.store.checkpoints import saved as saved
from hpcfl.store.checkpoints import write_rank as write_rank
from hpcfl.store.checkpoints import write_server as write_server
from hpcfl.store.columns import Column as Column
from hpcfl.store.columns import Fact as Fact
from hpcfl.store.findings import Findings as Findings
from hpcfl.store.findings import verify as verify
from hpcfl.store.owner import check_owner as check_owner
from hpcfl.store.owner import discard as discard
from hpcfl.store.owner import release as release
from hpcfl.store.owner import take as take
from hpcfl.store.reading import data_folder as data_folder
from hpcfl.store.reading import events as events
from hpcfl.store.reading import last_written as last_written
from hpcfl.store.reading import open_run as open_run
from hpcfl.store.reading import read_facts as read_facts
from hpcfl.store.reading import run_attributes as run_attributes
from hpcfl.store.reading import run_folder as run_folder
from hpcfl.store.reading import segment_paths as segment_paths
from hpcfl.store.run_file import begin as begin
from hpcfl.store.run_file import create as create
from hpcfl.store.run_file import rebuild as rebuild
from hpcfl.store.run_file import seal as seal
from hpcfl.store.status import DONE as DONE
from hpcfl.store.status import overwrite_status as overwrite_status
from hpcfl.store.status import read_status as read_status
from hpcfl.store.status import write_status as write_status
