"""Methods in real time with a client that is slow, one that gets stuck and one that dies, each within a visit.

In simulated time nothing happens to them.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import ClassVar

from hpcfl.algorithms.base import Algorithm
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.heterofl import HeteroFl
from hpcfl.algorithms.salf import Salf

PATIENCE = 60.0  # seconds after which nobody waits for another one any more
ASLEEP = 4
PAUSE = 0.4  # seconds that each step of the slow client of `Weary` takes


class Marked(Algorithm):
    """What stands before a method of either kind.

    Attributes
    ----------
    stuck_in, dies_in, free_in : int
        The round in which client 2 gets stuck, that in which client 3 dies, and that whose visits set client 2 free.
    marks : str
        Folder in which they leave files for each other.
    """

    stuck_in: int = 0
    dies_in: int = 0
    free_in: int = 0
    marks: str = ""

    def mark(self, name: str) -> Path:
        return Path(self.marks) / name

    def wait_for(self, name: str) -> None:
        end = time.monotonic() + PATIENCE
        while not self.mark(name).exists() and time.monotonic() < end:
            time.sleep(0.005)


class Falls(Marked):
    """A method whose client 1 gets no further than `before` messages, as clients 2 and 3 in one visit."""

    before: ClassVar[int] = 0

    def client(self, task, shared, personal, visits):
        work = super().client(task, shared, personal, visits)
        if visits.closed is not None:
            (client,), round_ = visits.clients.tolist(), visits.round
            if client == 0:
                self.lead(round_)
            else:
                for _ in range(self.before):
                    yield next(work)
                self.fall_behind(client, round_, visits.closed)
        return (yield from work)

    def lead(self, round_: int) -> None:
        """Complete no visit before the slow client is half through its own; set the stuck one free."""
        if round_ == self.free_in:
            self.mark("free").touch()
        self.wait_for(f"slow-{round_}")

    def fall_behind(self, client: int, round_: int, closed) -> None:
        if client == 1:
            self.mark(f"slow-{round_}").touch()
            closed.wait(PATIENCE)
        if client == 2 and round_ == self.stuck_in:
            self.wait_for("free")
        if client == 3 and round_ >= self.dies_in:
            os.kill(os.getpid(), signal.SIGKILL)


class Faulty(Falls, Salf):
    """SALF: they fall behind with the loss, the last layer's weight and its bias sent."""

    before: ClassVar[int] = 3


class FaultyFedAvg(Falls, FedAvg):
    """FedAvg."""


class FaultyHeteroFl(Falls, HeteroFl):
    """HeteroFL."""


class Unawaited(Marked, FedAvg):
    """FedAvg where arrivals end rounds; `dies_in` and `free_in` are versions.

    Client 1 is slow: it goes on when client 0 has begun two versions later. Client 2 is stuck in its first visit until
    client 0 frees it, which then waits until client 2 has reported and client 3 is dead. In its next visit client 2
    suspends its process, which client 0 wakes `ASLEEP` versions later.
    """

    def client(self, task, shared, personal, visits):
        if visits.closed is not None:
            (client,), version = visits.clients.tolist(), visits.round
            (self.lead, self.be_slow, self.be_stuck, self.die)[client](version, visits.closed)
        return (yield from super().client(task, shared, personal, visits))

    def lead(self, version: int, closed) -> None:
        self.mark(f"begun-{version}").touch()
        if version >= self.free_in:
            self.mark("free").touch()
        if version > self.free_in:
            self.wait_for("back")
            self.wait_for("dead")
        if version > self.free_in + ASLEEP:
            self.wake(int(self.mark("back").read_text()))

    def wake(self, process: int) -> None:
        end = time.monotonic() + PATIENCE
        while not self.mark("awake").exists() and time.monotonic() < end:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                self.mark("awake").touch()
                os.kill(process, signal.SIGCONT)
            time.sleep(0.005)

    def be_slow(self, version: int, closed) -> None:
        end = time.monotonic() + PATIENCE
        while not closed.wait(0.005) and time.monotonic() < end:
            if max((int(mark.name[6:]) for mark in Path(self.marks).glob("begun-*")), default=-1) >= version + 2:
                return

    def be_stuck(self, version: int, closed) -> None:
        if not self.mark("free").exists():
            self.wait_for("free")
        elif not self.mark("back").exists():
            self.mark("pid").write_text(str(os.getpid()))
            self.mark("pid").rename(self.mark("back"))
            os.kill(os.getpid(), signal.SIGSTOP)
            self.wait_for("awake")

    def die(self, version: int, closed) -> None:
        if version >= self.dies_in:
            self.mark("dead").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Weary(Marked, FedAvg):
    """FedAvg whose client 1 is slow, and whose clients 2 and 3 get stuck and die in the third step of a visit."""

    def local_steps(self, task, visits, phase=0):
        for number, batch in enumerate(super().local_steps(task, visits, phase)):
            if visits.closed is not None:
                self.fall_behind(int(visits.clients[0]), visits.round, number)
            yield batch

    def fall_behind(self, client: int, round_: int, number: int) -> None:
        if client == 0 and round_ == self.free_in:
            self.mark("free").touch()
        if client == 1:
            time.sleep(PAUSE)
        if client == 2 and (round_, number) == (self.stuck_in, 2):
            self.wait_for("free")
        if client == 3 and round_ >= self.dies_in and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
