"""How fast the server adds up what it has received in real time, on several threads, beside plain additions by NumPy.

    python benchmarks/received_sums.py [--messages 32] [--mb 100] [--threads 2] [--repeats 3]

GB/s of float32 numbers that come in, all ways in turns; medians, by the clock on the wall and by the seconds that all
threads have computed, times the threads (which says what they would reach alone on a machine that others use too):

- ``add32``, ``add64``: ``numpy.add(total, message, out=total)``, message after message, in as many threads, each with
  its part of the entries; with a float32 total, and with a float64 one, which is what a program needs that does not
  round after each message;
- ``held``: the sums of a round whose messages are all there, piece by piece: one visit of each lane, weighted by
  3, 4, … samples; ``step``: the same with the server's step, the new state included;
- ``early``: messages that are summed up as they come, one by one: lanes of several visits; rounds that arrivals end.

Messages are windows of one buffer of 8 times their size (at least 800 MB), so far apart that none finds in a cache what
another has brought there. ``to_add64`` and ``to_add32`` are ratios of medians. 1 minute with 2 cores. Prints one JSON
line last.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hpcfl.engine.received import ReceivedSums, add_all
from hpcfl.mpi.cores import cores
from hpcfl.sums.frames import FrameFormat, frame_formats
from hpcfl.sums.message import Block, ExactSums

LEAST_BYTES = 800_000_000
MODEL = "model"


def main() -> None:
    """Measure all ways."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=32)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--threads", type=int, default=len(cores()))
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    entries = asked.mb * 250_000
    visits = received(windows(asked.messages, entries))
    with ThreadPoolExecutor(asked.threads) as pool:
        ways = ways_of(visits, entries, pool, asked.threads)
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for repeat in range(1 + asked.repeats):
            for name, do in ways.items():
                start = time.perf_counter(), time.process_time()
                do()
                if repeat:
                    seconds[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    found = {}
    for number, clock in enumerate(("wall", "computing")):
        taken = {name: float(np.median([each[number] for each in rows])) for name, rows in seconds.items()}
        rates = {name: 4e-9 * entries * asked.messages / each for name, each in taken.items()}
        if clock == "computing":
            rates = {name: asked.threads * rate for name, rate in rates.items()}
        ratios = {
            f"{name}_to_{add}": rates[name] / rates[add]
            for name in ("held", "step", "early")
            for add in ("add64", "add32")
        }
        found[clock] = {name: round(rate, 3) for name, rate in {**rates, **ratios}.items()}
        print(clock, *(f"{name} {rate}" for name, rate in found[clock].items()), sep="  ", flush=True)
    print(json.dumps({**vars(asked), "load": os.getloadavg()[0], **found}))


def windows(messages: int, entries: int) -> list[torch.Tensor]:
    """Return so many messages: windows of one buffer of normal numbers of variance 10⁻⁴, evenly apart."""
    ring = torch.empty(max(8 * entries, LEAST_BYTES // 4))
    drawn = torch.from_numpy(np.random.default_rng(0).normal(0, 0.01, 5_000_003).astype(np.float32))
    for part in torch.split(ring, len(drawn)):
        part.copy_(drawn[: len(part)])
    starts = np.linspace(0, len(ring) - entries, messages).astype(int).tolist()
    return [ring[start : start + entries] for start in starts]


def received(messages: list[torch.Tensor]) -> list[Any]:
    """Return pending receives of one visit each that have arrived."""
    (group,) = frame_formats(({MODEL: Block((len(messages[0]),))},), 1)
    return [pending(group, number, message) for number, message in enumerate(messages)]


def pending(group: FrameFormat, number: int, message: torch.Tensor) -> Any:
    """Return one of them, of ``3 + number`` samples."""
    frame = [group.head(), message]
    group.sign(frame, 0, 0.5)
    group.weigh(frame, 0, MODEL, 3.0 + number)
    return SimpleNamespace(formats=[group], frames=[frame])


def ways_of(visits: list[Any], entries: int, pool: ThreadPoolExecutor, threads: int) -> dict[str, Callable[[], Any]]:
    """Return what is measured."""
    layout = ({MODEL: Block((entries,))},)
    single, double = np.zeros(entries, np.float32), np.zeros(entries)
    sums = ReceivedSums(layout, len(visits), np.zeros(1), [(one, 1) for one in visits])
    early, state = ExactSums(layout), torch.zeros(entries)
    shares = [slice(entries * each // threads, entries * (each + 1) // threads) for each in range(threads)]

    def add(total: np.ndarray[Any, np.dtype[np.floating]], share: slice) -> None:
        for one in visits:
            np.add(total[share], one.frames[0][1].numpy()[share], out=total[share])

    def add_early() -> None:
        for one in visits:
            add_all(one, early)

    return {
        "add32": lambda: list(pool.map(lambda share: add(single, share), shares)),
        "add64": lambda: list(pool.map(lambda share: add(double, share), shares)),
        "held": lambda: sums.total(MODEL),
        "step": lambda: sums.moved(MODEL, state),
        "early": add_early,
    }


if __name__ == "__main__":
    main()
