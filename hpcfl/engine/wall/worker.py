"""Computing in a second thread, so that finished layers leave while a long operation goes on.

torch gives up Python's global lock inside its operations, so the main thread can talk MPI meanwhile. Work that holds
the lock delays this rank only.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

SWITCH_SECONDS = 0.0001  # how long the main thread waits for Python's lock: by itself Python lets it wait for 5 ms


class Worker:
    """One thread that does one piece of work at a time and hands over results as they become ready."""

    def __init__(self) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        self.busy = False
        self._work: queue.SimpleQueue[Callable[[Callable[[Any], None]], None]] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # a daemon: a rank that leaves with an error does not wait for an operation that may take for ever
        threading.Thread(target=self._loop, name="hpcfl worker", daemon=True).start()

    def start(self, work: Callable[[Callable[[Any], None]], None]) -> None:
        """Begin ``work(put)``; what it puts comes out of `take`."""
        self.busy = True
        self._work.put(work)

    def take(self, timeout: float) -> Any:
        """Return the next result, or None when there is none within `timeout` seconds or the work has ended.

        Raises
        ------
        Exception
            What the work raised.
        """
        try:
            kind, found = self._found.get(timeout=timeout) if timeout > 0 else self._found.get_nowait()
        except queue.Empty:
            return None
        if kind == "put":
            return found
        self.busy = False
        if found is not None:
            raise found
        return None

    def _loop(self) -> None:
        while True:
            work = self._work.get()
            error = None
            try:
                work(lambda item: self._found.put(("put", item)))
            except BaseException as raised:  # whatever it is, the main thread must know
                error = raised
            self._found.put(("end", error))
