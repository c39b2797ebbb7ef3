"""Memory that is quick to have: freed memory stays in the process, large tensors lie in large pages."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import MutableMapping
from functools import cache
from pathlib import Path

TRIM, MMAP = -1, -3  # parameters of glibc's mallopt
KEPT_BYTES = 2**30
LARGEST_BYTES = 2**25  # glibc's own upper limit for what it takes from its heap
LEAN_BYTES = 2**25  # models from this size on are run lean in real time
PIECE_BYTES = 2**20  # of those, blocks from this size on are the system's again as soon as they are freed
LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch reads it once


def keep_freed() -> None:
    """Let glibc reuse freed memory instead of giving it back to the system after every batch.

    Gradients of a few MB are freed and wanted again in each step; fresh pages for them cost 10 to 20 % of a round
    of small models.
    """
    _set(KEPT_BYTES, LARGEST_BYTES)


def give_back() -> None:
    """Let glibc give freed memory back at once, so that no more is taken than is in use.

    Gaps in its heaps doubled and tripled what training a model of 50 MB took.
    """
    _set(PIECE_BYTES, PIECE_BYTES)


def let_go() -> None:
    """Give all memory that is free by now back to the system, whatever `keep_freed` has said."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def freeze() -> None:
    """Let Python's collector pass over what is there now: looking through all of torch costs a round milliseconds."""
    gc.collect()
    gc.freeze()


@cache
def last_level_cache(core: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the bytes of a core's last cache, as Linux has them; 0 where it does not say."""
    sizes = {}
    for index in core.glob("index*"):
        try:
            level, size = (int((index / name).read_text().strip().removesuffix("K")) for name in ("level", "size"))
        except (OSError, ValueError):
            continue
        sizes[level] = 1024 * size
    return sizes[max(sizes)] if sizes else 0


def _set(trim: int, mmap: int) -> None:
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(TRIM, trim)
        set_option(MMAP, mmap)


def prefer_large_pages(environ: MutableMapping[str, str]) -> None:
    """Let torch ask Linux for large pages, unless the environment says otherwise; to be called before it is loaded.

    NumPy does so by itself. MPI copies from process to process page by page: 100 MB took 1.5 times as long without.
    """
    environ.setdefault(LARGE_PAGES, "1")
