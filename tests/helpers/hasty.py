"""``python tests/helpers/hasty.py SECONDS …``: hpcfl whose server waits only so long for ranks that are to leave."""

from __future__ import annotations

import sys

from hpcfl.__main__ import main
from hpcfl.engine import watchdog

watchdog.LEAVE_SECONDS = float(sys.argv.pop(1))
main()
