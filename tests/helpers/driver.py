"""``python tests/helpers/driver.py …``: hpcfl with the faults that the environment asks for."""

from __future__ import annotations

import os

import faults

from hpcfl.__main__ import main

faults.install(os.environ.get(faults.VARIABLE, ""))
main()
