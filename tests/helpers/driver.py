"""``python tests/helpers/driver.py FOLDER …``: hpcfl with the algorithms in a folder of the test's own."""

from __future__ import annotations

import os
import sys

import faults

import hpcfl.algorithms
from hpcfl.__main__ import main

faults.install(os.environ.get(faults.VARIABLE, ""))
hpcfl.algorithms.__path__.append(sys.argv.pop(1))
main()
