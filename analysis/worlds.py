"""The figures of the worlds (``--with world/NAME``), fitted anew to the measurements that they are from.

``python analysis/worlds.py --data-dir DIR``, where ``DIR/speeds`` has the tables, prints each key as it is fitted and
as the world has it, and one JSON line last. What the tables are: docs/reference/worlds.md.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from math import cos, hypot, log, pi, sin
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from hpcfl.config.presets import flat, overlays, read_toml
from hpcfl.contrib.speeds import fit
from hpcfl.data.formats.csv_file import read_seconds

Figures = dict[str, float]
DAY = 86_400.0
PERSISTING = 0.05
"""A lag-1 autocorrelation below this is none."""
NEAR = 0.02
"""How far a world may be from what is fitted, as a share of it: its keys are rounded."""


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Print all figures; return what the last line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    folder = parser.parse_args(words).data_dir / "speeds"
    worlds = {
        "phones-diurnal": phones(folder),
        **{f"pai-{job}": speed(folder / f"pai_job{job}.csv", "seconds", "client") for job in range(1, 5)},
        "llm-se": workers(folder / "cluster_se.csv"),
        "llm-ar": workers(folder / "cluster_ar.csv"),
        "spot": spot(folder / "spot.csv"),
    }
    far = []
    for name, figures in worlds.items():
        there = dict(flat(read_toml(overlays()[f"world/{name}"])))
        for key, fitted in figures.items():
            print(f"{name:15} {key:24} fitted {fitted:10.4g}   has {there.get(key)}")
            if not abs(float(there.get(key, 0.0)) - fitted) <= NEAR * abs(fitted):
                far.append(f"{name}: {key}")
    found = {"worlds": worlds, "far": far}
    print(json.dumps(found))
    return found


def rows(file: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV file by column."""
    with file.open(encoding="utf-8") as text:
        yield from csv.DictReader(text)


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation of the logarithm."""
    return pstdev([log(value) for value in values])


def speed(file: Path, column: str, *by: str) -> Figures:
    """Return mean seconds, spreads of the logarithm between and within clients, and persistence if there is any."""
    found = fit(file, column, by)
    figures = {"speed.mean": found["laws"]["lognormal"]["mean"], "speed.between": found["between"]}
    if found["within"]:
        figures["speed.within"] = found["within"]
    if (found["persistence"] or 0.0) > PERSISTING:
        figures["speed.persistence"] = found["persistence"]
    return figures


def workers(file: Path) -> Figures:
    """Return the same of data-parallel workers, whose stages do other work, and who is slow throughout."""
    by, figures = ["stage", "dp_rank"], Figures()
    found, (_, seconds) = fit(file, "compute_s", by), read_seconds("--column", "--by", file, "compute_s", by)
    slow = found["slow"]
    means = {client: fmean(map(log, each)) for client, each in seconds.items() if client not in slow}
    ordered = sorted(means.items(), key=lambda pair: pair[0].partition("/"))
    stages = [[mean for _, mean in each] for _, each in groupby(ordered, key=lambda pair: pair[0].partition("/")[0])]
    figures["speed.mean"] = fmean(fmean(each) for client, each in seconds.items() if client not in slow)
    figures["speed.between"] = fmean(pstdev(each) ** 2 for each in stages) ** 0.5
    figures["speed.within"] = found["within"]
    if found["persistence"] > PERSISTING:
        figures["speed.persistence"] = found["persistence"]
    if slow:
        figures |= {"speed.slow": median(slow.values()), "speed.slow_share": len(slow) / len(seconds)}
    return figures


def phones(folder: Path) -> Figures:
    """Return how fast phones are, and how long they are there."""
    known = [row for row in rows(folder / "phones.csv") if row["resnet_ms"] and row["resnet_sd_ms"]]
    there: dict[str, list[tuple[float, float]]] = {}
    watched: dict[str, float] = {}
    for row in rows(folder / "availability.csv"):
        there.setdefault(row["user"], []).append((float(row["on_s"]), float(row["off_s"])))
        watched[row["user"]] = float(row["observed_to_s"]) - float(row["observed_from_s"])
    on = [end - start for each in there.values() for start, end in each if end > start]
    off = [then - end for each in there.values() for (_, end), (then, _) in pairwise(sorted(each)) if then > end]
    share = fmean(sum(end - start for start, end in each) / watched[user] for user, each in there.items())
    hours = [0.0] * 24
    for each in there.values():
        for start, end in each:
            for second in range(int(start) // 600 * 600 + 600, int(end) + 1, 600):
                hours[second // 3600 % 24] += 1
    print("there by hour of day, 1 on average:", *(f"{24 * hour / sum(hours):.2f}" for hour in hours))
    return {
        **speed(folder / "phones.csv", "resnet_ms"),
        "speed.within": median(float(row["resnet_sd_ms"]) / float(row["resnet_ms"]) for row in known),
        "availability.on": fmean(on),
        "availability.off": fmean(on) * (1 - share) / share,
        "availability.on_spread": spread(on),
        "availability.off_spread": spread(off),
        "availability.rhythm": swing(hours),
    }


def swing(hours: Sequence[float]) -> float:
    """Return the amplitude of a cosine of 24 hours about a mean of 1, by least squares."""
    mean = fmean(hours)
    turns = [(hour / mean, 2 * pi * (place + 0.5) / 24) for place, hour in enumerate(hours)]
    return hypot(sum(hour * cos(turn) for hour, turn in turns), sum(hour * sin(turn) for hour, turn in turns)) / 12


def spot(file: Path) -> Figures:
    """Return for how long zones had spot GPUs, and had none, in the records of availability."""
    on, off = list[float](), list[float]()
    kept = [row for row in rows(file) if row["kind"] == "availability"]
    for _, zone in groupby(kept, key=lambda row: (row["campaign"], row["zone"])):
        for some, several in groupby(zone, key=lambda row: int(row["count"]) > 0):
            each = list(several)
            (on if some else off).append(float(each[-1]["end"]) - float(each[0]["start"]))
    return {
        "availability.on": fmean(on),
        "availability.off": fmean(off),
        "availability.on_spread": spread(on),
        "availability.off_spread": spread(off),
    }


if __name__ == "__main__":
    main()
