"""``python tests/helpers/driver.py …``: hpcfl with the tests' strange algorithms, and the faults that are asked for."""

from __future__ import annotations

import os
from pathlib import Path

import absent
import faults

from hpcfl.__main__ import main
from hpcfl.base.plugins import look_in

look_in(Path(__file__).parents[1])
faults.install(os.environ.get(faults.VARIABLE, ""))
absent.install(os.environ.get(absent.VARIABLE, ""))
main()
