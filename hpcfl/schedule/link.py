"""What connects clients to the server: latency and bandwidth, and an uplink at the server that uploads share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import AfterValidator, Field

from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError, no_meaning
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats
from hpcfl.data.formats.csv_file import Columns, read_csv

UNLIMITED = "unlimited"
_RATE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:e([+-]?\d+))? ?([kMGT]?)(bit|B)/s")
_FACTORS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
COLUMNS = ("client", "down", "up", "latency")


def rate(text: str) -> float:
    """Return the bytes per second that a rate with its unit says; ValueError where it is none, or 0."""
    if text == UNLIMITED:
        return inf
    found = _RATE.fullmatch(text)
    if found is None:
        raise ValueError(f"expected a rate with its unit such as '20 Mbit/s' or '1.5 MB/s', or '{UNLIMITED}'")
    value = float(f"{found[1]}e{found[2] or 0}") * _FACTORS[found[3]] / (8 if found[4] == "bit" else 1)
    if not 0 < value < inf:
        raise ValueError("expected a rate above 0")
    return value


def _checked(text: str) -> str:
    rate(text)
    return text


Rate = Annotated[str, AfterValidator(_checked)]


@dataclass(frozen=True)
class Lines:
    """Every client's own line, float64 [clients]: bytes per second down and up, seconds of each way."""

    down: Floats
    up: Floats
    latency: Floats


class Link(ConfigBase):
    """What a visit's messages take beside its computing. By default nothing."""

    down: Rate = UNLIMITED
    """Bandwidth from the server to each client, in bit/s or B/s (bytes) with k, M, G or T: ``"20 Mbit/s"``, ``"1.5
    MB/s"``. A visit begins only after so long."""
    up: Rate = UNLIMITED
    """Bandwidth from each client to the server; layers follow one another."""
    latency: float = Field(0.0, ge=0)
    """Seconds of each way: 50 ms are 0.05."""
    between: float = Field(0.0, ge=0)
    """Spread between clients: of the logarithm of their bandwidths, drawn once per run; the mean stays."""
    file: str | None = None
    """Instead of the four keys above a CSV file with columns ``client,down,up,latency`` in bytes per second and
    seconds."""
    server: Rate = UNLIMITED
    """Bandwidth of the server that all uploads of a round share, by max-min fairness."""
    paths: ClassVar[tuple[str, ...]] = ("file",)

    def check(self, clients: int) -> None:
        """Raise UsageError where keys do not go together, or the file is not that of so many clients."""
        if self.file is None:
            if self.between and self.down == self.up == UNLIMITED:
                raise no_meaning("link.between", self.between, f"link.down and link.up = '{UNLIMITED}'")
            return
        self.check_only_for("link.", "file", dict.fromkeys(("down", "up", "latency", "between")))
        for name, values in self.columns.items():
            least = (values >= 0) if name in ("client", "latency") else (values > 0)
            right = least & np.isfinite(values) if name != "client" else least & (values == np.rint(values))
            for row in np.flatnonzero(~right)[:1]:
                expected = {"client": "a client's number", "latency": "seconds"}.get(name, "bytes per second above 0")
                raise UsageError(f"{self._row(row)}: {name} is {values[row]:g}, expected {expected}")
        there = self.columns["client"]
        order = np.sort(there)
        for row in np.flatnonzero(there >= clients)[:1]:
            raise UsageError(
                f"{self._row(row)}: client is {there[row]:g}, expected 0 … {clients - 1} (clients = {clients})"
            )
        for client in order[1:][np.diff(order) == 0][:1]:
            raise UsageError(f"{self._row(np.flatnonzero(there == client)[1])}: client {client:g} is there twice")
        for client in np.setdiff1d(np.arange(clients), there)[:1]:
            raise UsageError(f"link.file: {self.file}: no row for client {client} (clients = {clients})")

    def _row(self, row: int) -> str:
        return f"link.file: {self.file}: line {row + 2}"

    @cached_property
    def columns(self) -> Columns:
        """What the file holds, float64 [clients] each."""
        return read_csv("link.file", Path(str(self.file)), [COLUMNS])

    def lines(self, seed: int, clients: int) -> Lines:
        """Return every client's line: drawn once per run, or as the file has it."""
        if self.file is not None:
            order = np.argsort(self.columns["client"])
            return Lines(*(self.columns[name][order] for name in COLUMNS[1:]))
        factor = np.ones(clients)
        if self.between:
            factor = np.exp(self.between * keyed(seed, "link").standard_normal(clients) - self.between**2 / 2)
        return Lines(rate(self.down) * factor, rate(self.up) * factor, np.full(clients, self.latency))


def shared(ready: Floats, sizes: Floats, rates: Floats, capacity: float) -> Floats:
    """Return when uploads that share a line of so many bytes per second are there, float64 [n, L].

    At each moment it is shared fairly (max-min): who has a smaller rate of its own leaves the rest to the others.

    Parameters
    ----------
    ready : float64 [n, L]
        When each part may leave at the earliest; a client's parts leave one after the other, the last one first.
    sizes : float64 [n, L]
        Their bytes.
    rates : float64 [n]
        Each client's own bytes per second.
    """
    clients, parts = ready.shape
    there, left = np.empty_like(ready), sizes[:, -1].copy()
    part, free = np.full(clients, parts - 1), ready[:, -1].copy()  # which part is next, and when it may leave
    now = 0.0
    while (part >= 0).any():
        waits = np.where(part >= 0, free, inf)
        sends = np.flatnonzero(waits <= now)
        speed = _fair(rates[sends], capacity)
        with np.errstate(invalid="ignore"):
            ends = np.where(left[sends] > 0, now + left[sends] / speed, now)
        then = min(float(ends.min(initial=inf)), float(waits[waits > now].min(initial=inf)))
        if then == inf:
            raise ValueError("uploads that never end")
        left[sends] = np.where(ends <= then, 0.0, left[sends] - speed * (then - now))
        now = then
        for client in sends[ends <= then]:
            there[client, part[client]] = now
            part[client] -= 1
            if part[client] >= 0:
                left[client] = sizes[client, part[client]]
                free[client] = max(now, ready[client, part[client]])
    return there


def _fair(rates: Floats, capacity: float) -> Floats:
    """Return the max-min fair shares of a line's capacity, none above its client's own rate, float64 [n]."""
    order, given, rest = np.argsort(rates), np.empty(len(rates)), capacity
    for place, client in enumerate(order):
        given[client] = min(rates[client], rest / (len(rates) - place))
        rest -= given[client]
    return given
