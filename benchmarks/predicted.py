"""How far rounds predicted by `hpcfl check --like` are from rounds that are then measured.

    python benchmarks/predicted.py [--mpi openmpi] [--ranks 4 8] [--kilobytes 64 4000] [--width 1 all] [--measured 4]

`hpcfl doctor --network` measures on `--measured` ranks, then `puppets.py` carries out rounds in which nobody computes
on `--ranks`, all on this machine, one after the other. Milliseconds of the messages (state down, frames up, looks),
the best of ten rounds as a measurement has the best of its repetitions, and of the sums; predicted, measured, and the
one over the other. On a busy machine neither says anything: the load is printed. Prints a line per job, and one JSON
line last.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import launching
import torch

from hpcfl.contrib.network.measure import Network, read
from hpcfl.contrib.network.model import Layout, Load, layout, predict
from hpcfl.realtime.orders import Command
from hpcfl.sums.frames import frame_formats
from hpcfl.sums.message import Block

LIMIT = 300.0
HERE = Path(__file__).parent
ROUNDS = 10


def main() -> None:
    """Measure, predict, measure again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mpi", choices=tuple(launching.LIBRARIES), default="openmpi")
    parser.add_argument("--measured", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--kilobytes", type=float, nargs="+", default=[64.0, 4000.0])
    parser.add_argument("--width", nargs="+", default=["1", "all"])
    asked = parser.parse_args()
    print(f"{asked.mpi}, load {launching.load():.1f}")
    found = launching.run(asked.mpi, asked.measured, ["-m", "hpcfl", "doctor", "--network", "--json"], LIMIT)
    with TemporaryDirectory() as folder:
        file = Path(folder, "network.json")
        file.write_text(json.dumps(found), encoding="utf-8")
        network = read(file)
    rows = []
    for ranks, width, kilobytes in product(asked.ranks, asked.width, asked.kilobytes):
        case = ["--ranks", str(ranks), "--width", width, "--kilobytes", str(kilobytes), "--per-host", str(ranks)]
        args = [str(HERE / "puppets.py"), "--mpi", asked.mpi, "--rounds", "1", "--swift", str(ROUNDS), *case]
        rows.append(beside(network, launching.run(asked.mpi, ranks, args, LIMIT)))
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    print(json.dumps({"network": found, "rounds": rows, "load": launching.load()}))


def beside(network: Network, run: dict[str, Any]) -> dict[str, Any]:
    """Return what was predicted of a job's rounds beside what was measured, in milliseconds."""
    lanes = layout(run["ranks"], run["ranks"], run["width"])
    expected, swift = predict(network.costs, lanes, carried(run, lanes)), run["swift_ms"]
    predicted = {"messages": 1000 * (expected.total - expected.sums), "sums": 1000 * expected.sums}
    measured = {"messages": min(map(sum, zip(swift["down"], swift["up"]))), "sums": min(swift["sums"])}
    row = {name: run[name] for name in ("ranks", "width", "kilobytes")}
    for name, seconds in measured.items():
        row |= {f"{name} predicted": round(predicted[name], 2), "measured": round(seconds, 2)}
        row |= {f"{name} measured": row.pop("measured"), f"{name} ratio": round(predicted[name] / seconds, 2)}
    return row


def carried(run: dict[str, Any], lanes: Layout) -> Load:
    """Return what a lane of a job of puppets carries: its layers, each in a frame of its own."""
    entries = round(run["kilobytes"] * 250 / run["layers"])
    groups = tuple({f"layer {number}": Block((entries,))} for number in range(run["layers"]))
    parts = [part for group in frame_formats(groups, lanes.ranks) for part in group.sizes()]
    frame = sum(size * torch.empty(0, dtype=dtype).element_size() for size, dtype in parts)
    command = Command.empty(lanes.ranks, run["ranks"] - 1).nbytes
    return Load(4 * entries * run["layers"] + command, frame, up=len(parts))


if __name__ == "__main__":
    main()
