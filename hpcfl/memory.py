"""Keeping freed memory in the process."""

from __future__ import annotations

import ctypes

TRIM, MMAP = -1, -3  # parameters of glibc's mallopt
KEPT_BYTES = 2**30
LARGEST_BYTES = 2**25  # glibc's own upper limit for what it takes from its heap


def keep_freed() -> None:
    """Let glibc reuse freed memory instead of giving it back to the system after every batch.

    Gradients of a few MB are freed and wanted again in each step; fresh pages for them cost 10 to 20 % of a round
    of small models. Other C libraries are left as they are.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(TRIM, KEPT_BYTES)
        set_option(MMAP, LARGEST_BYTES)
