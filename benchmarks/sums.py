"""What exact sums cost, beside an addition of float32 arrays of the same size by NumPy.

    python benchmarks/sums.py [--megabytes 1 10 100] [--repeats 9]

GB/s of float32 numbers that come in, on one thread, by process time, all in turns; medians:

- ``add``: ``a += b``;
- ``received``: sums over the visits of two clients, as the server forms them in real time;
- ``exact``: one visit more in the sums of simulated time; ``double``: the same of a float64 block;
- ``carried``: bytes of a reduction over those of the block.

Smaller sizes are repeated more often. 20 seconds. Prints a table and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hpcfl.engine.received import ReceivedSums
from hpcfl.sums.frames import frame_formats
from hpcfl.sums.message import Block, ExactSums

WEIGHT = 3.0
VISITS = 2


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", nargs="+", type=int, default=[1, 10, 100])
    parser.add_argument("--repeats", type=int, default=9)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    sizes = []
    for megabytes in asked.megabytes:
        sizes.append(
            {"megabytes": megabytes, **measured(megabytes * 1_000_000 // 4, max(1, asked.repeats * 100 // megabytes))}
        )
        print("  ".join(f"{name} {value}" for name, value in sizes[-1].items()), flush=True)
    print(json.dumps({"load": os.getloadavg()[0], "sizes": sizes}))


def measured(entries: int, repeats: int) -> dict[str, float]:
    """Return GB/s of each, and each over what the addition does."""
    rng = np.random.default_rng(0)
    value = torch.from_numpy(rng.normal(0, 0.01, entries).astype(np.float32))
    own = np.zeros(entries, np.float32)
    exact, double = (ExactSums(({"a": Block((entries,), dtype)},)) for dtype in (torch.float32, torch.float64))
    weight, wide = torch.tensor([WEIGHT], dtype=torch.float64), value.double()[None]
    received, other = received_sums(value), value.numpy()
    ways: dict[str, tuple[float, Callable[[], Any]]] = {
        "add": (1, lambda: np.add(own, other, out=own)),
        "received": (VISITS, lambda: received.total("a")),
        "exact": (1, lambda: exact.add({"a": (value[None], weight)})),
        "double": (2, lambda: double.add({"a": (wide, weight)})),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(1 + repeats):
        for name, (_, do) in ways.items():
            start = time.process_time()
            do()
            if repeat:
                seconds[name].append(time.process_time() - start)
    rates = {name: 4e-9 * entries * ways[name][0] / np.median(each) for name, each in seconds.items()}
    shares = {f"{name}_to_add": rates[name] / rates["add"] for name in ways if name != "add"}
    carried = sum(buffer.nbytes for buffer in exact.buffers) / value.nbytes
    return {name: round(float(each), 3) for name, each in {**rates, **shares, "carried": carried}.items()}


def received_sums(value: torch.Tensor) -> ReceivedSums:
    """Return sums over visits that have arrived."""
    layout, visits = ({"a": Block((len(value),))},), []
    for _ in range(VISITS):
        (group,) = frame_formats(layout, 1)
        frame = group.zeros()
        group.sign(frame, 0, 0.5)
        group.weigh(frame, 0, "a", WEIGHT)
        group.value(frame, "a").copy_(value)
        visits.append((SimpleNamespace(formats=[group], frames=[frame]), 1))
    return ReceivedSums(layout, VISITS, np.zeros(1), visits)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
