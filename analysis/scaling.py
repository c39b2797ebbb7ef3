"""What a round in real time would cost with 10^3 … 10^5 ranks, predicted from measured runs with fewer.

    python benchmarks/puppets.py --ranks 32 64 128 256 --kilobytes 64 1024 > lanes.log
    python benchmarks/puppets.py --ranks 32 64 128 --width 16 all > trees.log
    python analysis/scaling.py lanes.log trees.log -o scaling.png

Reads the last line of each file. Fits the costs of `hpcfl.contrib.network.model`, which has the formulae, to the
rounds in which nobody sleeps: latency, bandwidth between the server and lanes of one rank, bandwidth per level of a
tree, and seconds per lane, by least squares of logarithms; a look over lanes, and the sums, to what was measured of
them. Prints what was measured beside the fit, then predictions for each layout. Two levels, with leaders in a tree of
fan-out 32, are what hpcfl cannot do yet, and were not measured. Beside them, of the server: bytes of commands per round
(each names the cohort, a bit per client), memory for frames, and seconds to make the lanes; late: its median lateness
in rounds with a deadline, fitted as a straight line over lanes.

Measured ranks share one machine: its cores do the work of all of them, so what is fitted is slower than a server whose
ranks have cores of their own, while a network is slower than its memory. Hosts apart are taken to be reached as ranks
of this one, but for `--latency` and `--bandwidth`. Left out: that ranks that share a lane wait for the slowest of them.
Costs a second. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, log
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares, nnls

from hpcfl.base.types import Floats
from hpcfl.contrib.network.model import Costs, Layout, Link, Load, Prediction, Rates, layouts, predict, two_levels
from hpcfl.realtime.orders import Command
from hpcfl.sums.frames import frame_formats
from hpcfl.sums.message import Block

RANKS = (1_000, 10_000, 100_000)
PARAMETERS = ("latency", "bandwidth", "tree", "lane")
FIRST = (1e-5, 1e9, 1e9, 1e-4)
"""Where the fit begins: s, bytes per second, bytes per second, s."""


class ReadError(Exception):
    """What is wrong with a file, in one line."""


@dataclass(frozen=True)
class Run:
    """What `benchmarks/puppets.py` has measured of one job."""

    GIVEN: ClassVar = ("mpi", "ranks", "width", "lanes", "per_host", "kilobytes", "layers")
    mpi: str
    ranks: int
    width: int | str
    lanes: int
    per_host: int
    kilobytes: float
    layers: int
    seconds: float
    """Of a round: the median over those without sleep."""
    sums: float
    look: float | None
    late: float
    made: float
    grown: float
    """Bytes by which the server has grown since it had no lanes."""

    @classmethod
    def read(cls, found: dict[str, Any]) -> Run:
        swift = found["swift_ms"]
        rounds = [down + up for down, up in zip(swift["down"], swift["up"])]
        look = found["look"]["cpu_ms"]
        return cls(
            **{name: found[name] for name in cls.GIVEN},
            seconds=median(rounds) / 1000,
            sums=median(swift["sums"]) / 1000,
            look=None if look is None else look / 1000,
            late=found["late_ms"]["median"] / 1000,
            made=found["made_s"],
            grown=1e6 * (found["memory_mb"][1] - found["memory_mb"][0]),
        )

    @property
    def layout(self) -> Layout:
        """Its lanes, all of them on the server's host."""
        return Layout(self.width, -(-(self.ranks - 1) // self.lanes), self.lanes, 0, 0)

    @property
    def load(self) -> Load:
        return load(self.kilobytes, self.layers, self.layout.ranks, self.ranks - 1)


def runs(files: Sequence[Path]) -> list[Run]:
    """Return the runs that files tell of in their last lines."""
    found: list[Run] = []
    for file in files:
        try:
            last = file.read_text(encoding="utf-8").rstrip().rpartition("\n")[2]
            found += [Run.read(each) for each in json.loads(last)["puppets"]]
        except OSError as error:
            raise ReadError(f"{file}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise ReadError(f"{file}: expected the output of benchmarks/puppets.py, whose last line is JSON") from None
    if len(names := {run.mpi for run in found}) > 1:
        raise ReadError(f"expected runs with one MPI, got {' and '.join(sorted(names))}")
    if len({(run.ranks, run.width, run.kilobytes) for run in found}) <= len(PARAMETERS):
        raise ReadError(f"expected more than {len(PARAMETERS)} different runs for {len(PARAMETERS)} costs")
    if len({run.layout.ranks > 1 for run in found}) == 1:
        raise ReadError("expected runs with lanes of one rank (--width 1) and runs with lanes of several (--width all)")
    if all(run.look is None for run in found):
        raise ReadError("expected a run that has looked at lanes whose ranks sleep: try a longer --deadline")
    return found


def load(kilobytes: float, layers: int, ranks: int, clients: int) -> Load:
    """Return what one lane of so many client ranks carries in a round, one client on each rank."""
    entries = max(1, round(kilobytes * 250 / layers))
    layout = tuple({f"layer {number}": Block((entries,))} for number in range(layers))
    parts = [part for group in frame_formats(layout, ranks) for part in group.sizes()]
    frame = sum(size * torch.empty(0, dtype=dtype).element_size() for size, dtype in parts)
    summed = sum(8 * block.bins * block.size for group in layout for block in group.values())
    command = Command.empty(ranks, clients).nbytes
    return Load(4 * entries * layers + command, frame, up=len(parts), summed=summed)


def with_links(costs: Costs, parameters: Floats) -> Costs:
    """Return costs with these `PARAMETERS`, the same to all hosts."""
    latency, bandwidth, tree, lane = parameters.tolist()
    one = Rates(bandwidth, bandwidth)
    link = Link(latency, one, Rates(inf, inf), one, Rates(tree, tree))
    return replace(costs, within=link, between=link, lane=lane)


def line(xs: Sequence[Sequence[float]], ys: Sequence[float]) -> tuple[float, ...]:
    """Return the coefficients, at least 0, with which sums of ``xs`` [n, k] are nearest to ``ys`` [n]."""
    scale = np.array(xs).max(0)
    return tuple((nnls(np.array(xs) / scale, np.array(ys))[0] / scale).tolist())


def fitted(measured: Sequence[Run]) -> tuple[Costs, float]:
    """Return the costs, and by how much measured rounds are off, as a part: the root of the mean square."""
    looks = [(run.layout.lanes * run.load.up, run.look) for run in measured if run.look is not None]
    look, request = (
        line([(1.0, requests) for requests, _ in looks], [seconds for _, seconds in looks]) if looks else (0.0, 0.0)
    )
    (per_byte,) = line([(run.lanes * run.load.frame,) for run in measured], [run.sums for run in measured])
    beside = Costs(None, None, 0.0, 0.0, look, request, 1 / per_byte)

    def off(logs: Floats) -> Floats:
        costs = with_links(beside, np.exp(logs))
        return np.array([log(messages(costs, run) / run.seconds) for run in measured])

    found = least_squares(off, np.log(FIRST), bounds=np.log([(1e-9, 1e5, 1e5, 1e-9), (1.0, 1e12, 1e12, 1.0)]))
    return with_links(beside, np.exp(found.x)), float(np.sqrt(np.mean(found.fun**2)))


def messages(costs: Costs, run: Run) -> float:
    """Return the seconds of a measured round's messages, sums left out, by the model."""
    expected = predict(costs, run.layout, run.load)
    return expected.total - expected.sums


@dataclass(frozen=True)
class Server:
    """What a server takes beside a round's seconds, fitted as sums of parts that grow with its lanes."""

    late: tuple[float, ...]
    """Seconds of lateness, and more for each lane."""
    made: tuple[float, ...]
    """Seconds to make no lanes, and more for each."""
    grown: tuple[float, ...]
    """Bytes per lane, and per byte of a lane's frames."""

    @classmethod
    def of(cls, measured: Sequence[Run]) -> Server:
        lanes = [(1.0, run.lanes) for run in measured]
        frames = [(run.lanes, run.lanes * run.load.frame) for run in measured]
        return cls(
            line(lanes, [run.late for run in measured]),
            line(lanes, [run.made for run in measured]),
            line(frames, [run.grown for run in measured]),
        )

    def at(self, layout: Layout, load: Load) -> dict[str, float]:
        """Return lateness and seconds to make the lanes, and the bytes of their frames."""
        return {
            "late": self.late[0] + self.late[1] * layout.lanes,
            "made": self.made[0] + self.made[1] * layout.lanes,
            "memory": layout.lanes * (self.grown[0] + self.grown[1] * load.frame),
        }


def predicted(
    costs: Costs, server: Server, mpi: str, ranks: int, per_host: int, size: Callable[[int, int], Load]
) -> list[dict[str, Any]]:
    """Return a row for each layout; `size` returns what a lane of so many ranks carries with so many clients."""
    rows = []
    for layout in layouts(ranks, per_host, mpi):
        carried = size(layout.ranks, ranks - 1)
        commands = layout.lanes * Command.empty(layout.ranks, ranks - 1).nbytes
        rows.append(
            row(f"width {layout.width}", predict(costs, layout, carried), ranks, lanes=layout.lanes, commands=commands)
        )
        rows[-1] |= server.at(layout, carried)
    inside = size(1, ranks - 1)
    return [*rows, row("two levels", two_levels(costs, ranks, per_host, inside), ranks)]


def row(layout: str, prediction: Prediction, ranks: int, **more: float) -> dict[str, Any]:
    parts = prediction.parts | {"total": prediction.total}
    return {"ranks": ranks, "layout": layout, **parts, "bottleneck": prediction.bottleneck, **more}


def tables(measured: Sequence[Run], costs: Costs, off: float, rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Return what is printed: measured beside fitted, and the predictions."""
    title = f"Messages of a round, measured and fitted: off by {off:.0%}"
    beside = Table("ranks", "lanes", "kB", "measured ms", "fitted ms", "sums ms", "fitted ms", "late ms", title=title)
    for run in measured:
        sums = predict(costs, run.layout, run.load).sums
        numbers = run.seconds, messages(costs, run), run.sums, sums, run.late
        beside.add_row(
            str(run.ranks), str(run.lanes), f"{run.kilobytes:g}", *(f"{1000 * each:.1f}" for each in numbers)
        )
    table = Table("ranks", "layout", "lanes", title="Predicted, not measured")
    for name in ("state down", "frames up", "sums", "looks", "total, s", "bottleneck"):
        table.add_column(name)
    for name in ("commands, MB", "memory, MB", "made, s", "late, ms"):
        table.add_column(name)
    for each in rows:
        seconds = [f"{each[name]:.3g}" for name in ("state down", "frames up", "sums", "looks", "total")]
        scales = {"commands": 1e-6, "memory": 1e-6, "made": 1.0, "late": 1e3}
        server = [f"{scale * each[name]:.3g}" if name in each else "-" for name, scale in scales.items()]
        lanes = str(each.get("lanes", "-"))
        table.add_row(str(each["ranks"]), each["layout"], lanes, *seconds, each["bottleneck"], *server)
    return [beside, table]


def draw(measured: Sequence[Run], rows: Sequence[dict[str, Any]], kilobytes: float, picture: Path) -> None:
    """Draw a round's seconds over ranks: predictions as lines, what was measured as points."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    image, panel = plt.subplots(figsize=(6.5, 4.5), layout="constrained")
    for name in dict.fromkeys(each["layout"] for each in rows):
        points = [(each["ranks"], each["total"]) for each in rows if each["layout"] == name]
        panel.plot(*zip(*points), "-", linewidth=1, label=f"{name}, predicted")
    for width in dict.fromkeys(run.width for run in measured):
        some = [run for run in measured if run.width == width and run.kilobytes == kilobytes]
        if some:
            label = f"lanes of {width}, measured"
            panel.plot(
                [run.ranks for run in some], [run.seconds + run.sums for run in some], "o", markersize=4, label=label
            )
    panel.set(xlabel="ranks", ylabel="seconds of a round's messages and sums", xscale="log", yscale="log")
    panel.set_title(f"model of {kilobytes:g} kB")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="x-small")
    image.savefig(picture, dpi=120)


def main() -> None:
    """Print the tables and the JSON line, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="where to draw the picture")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--per-host", type=int, help="ranks on a host (default: as measured)")
    parser.add_argument("--kilobytes", type=float, help="size of the model (default: the largest measured)")
    parser.add_argument("--latency", type=float, help="seconds between two hosts (default: as within one)")
    parser.add_argument("--bandwidth", type=float, help="bytes per second of a host (default: as within one)")
    options = parser.parse_args()
    try:
        measured = runs(options.files)
    except ReadError as error:
        raise SystemExit(str(error)) from None
    costs, off = fitted(measured)
    first, server = measured[0], Server.of(measured)
    costs = replace(costs, between=between(costs, options.latency, options.bandwidth))
    kilobytes = options.kilobytes or max(run.kilobytes for run in measured)
    per_host = options.per_host or first.per_host

    def size(ranks: int, clients: int) -> Load:
        return load(kilobytes, first.layers, ranks, clients)

    rows = [each for ranks in options.ranks for each in predicted(costs, server, first.mpi, ranks, per_host, size)]
    near = sorted({run.ranks for run in measured} | {*options.ranks})
    drawn = [each for ranks in near for each in predicted(costs, server, first.mpi, ranks, per_host, size)]
    for table in tables(measured, costs, off, rows):
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    if options.output:
        draw(measured, drawn, kilobytes, options.output)
    found = {"mpi": first.mpi, "kilobytes": kilobytes, "per_host": per_host, "off": off, "costs": finite(asdict(costs))}
    print(json.dumps(found | {"server": asdict(server), "predicted": rows}, allow_nan=False))


def between(costs: Costs, latency: float | None, bandwidth: float | None) -> Link | None:
    """Return the link to other hosts: that within one, with what is given of the network."""
    within = costs.within
    assert within is not None
    if latency is not None:
        within = replace(within, latency=latency)
    if bandwidth is not None:
        alone, server, tree = (
            Rates(min(rates.down, bandwidth), min(rates.up, bandwidth))
            for rates in (within.alone, within.server, within.tree)
        )
        within = Link(within.latency, alone, Rates(bandwidth, bandwidth), server, tree)
    return within


def finite(value: Any) -> Any:
    """Return a nested value with None for what has no limit."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    return None if value == inf else value


if __name__ == "__main__":
    main()
