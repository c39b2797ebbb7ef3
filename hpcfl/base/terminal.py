"""What is printed reaches a terminal as text: names, reasons and labels may come from somebody else's files.

A terminal obeys control characters: they can clear it, retitle it, hide or forge lines, and some can be told to type.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but line feed and tab, those that turn the direction of text, and what is no character at all."""


def plain(text: str) -> str:
    """Return a text whose control characters are written out, each by its number."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class _Stderr(logging.Handler):
    """What tells on stderr, whatever that is by then."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"hpcfl: {record.getMessage()}", file=sys.stderr, flush=True)


LOGGER = logging.getLogger("hpcfl")
LOGGER.addHandler(_Stderr())


def say(line: str) -> None:
    """Tell a line on stderr, at once, as a warning of the logger ``hpcfl``."""
    LOGGER.warning(line)


class Plain:
    """A stream of text to which control characters are written out; `raw` is the stream itself."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        self.raw.write(plain(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def install() -> None:
    """Print plain text alone from now on, whoever prints; bars, which move the cursor, go to `raw`."""
    sys.stdout, sys.stderr = Plain(sys.stdout), Plain(sys.stderr)


def raw(stream: Any) -> Any:
    """Return the stream behind one that is plain, for what moves the cursor itself; its texts are to be `plain`."""
    return stream.raw if isinstance(stream, Plain) else stream


@contextmanager
def installed() -> Iterator[None]:
    """Print plain text alone within the block."""
    before = sys.stdout, sys.stderr
    install()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
