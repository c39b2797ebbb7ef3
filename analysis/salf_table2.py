"""Table II of the SALF paper from run folders: published, by the authors' released rule, and as the text has it.

    make table2
    python analysis/salf_table2.py -o fig3-4.png runs/table2/*/

What a run is, it takes from the run's config: model, method, share of stragglers, and whose settings. ``text`` has no
momentum and means over those in time, by eq. 9 for SALF; ``released`` has momentum and means over all; runs with one of
the two are ``mixed``. Per case: the mean over seeds of each run's mean test accuracy over its last 10 rounds, and the
lowest and highest seed. With `-o` also a picture of Figures 3 and 4: accuracy against rounds at 90 % stragglers, the
mean over seeds. Costs seconds. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from finished import finished
from rich.console import Console
from rich.table import Table

# Lang, Cohen & Shlezinger, Table II
SHARES = (0.3, 0.5, 0.7, 0.9)
PUBLISHED = {
    ("mlp", "drop"): (0.87, 0.84, 0.77, 0.49),
    ("mlp", "salf"): (0.88, 0.85, 0.85, 0.81),
    ("mlp", "async"): (0.86, 0.84, 0.82, 0.73),
    ("cnn", "drop"): (0.93, 0.90, 0.83, 0.28),
    ("cnn", "salf"): (0.94, 0.93, 0.92, 0.90),
    ("cnn", "heterofl"): (0.88, 0.84, 0.61, 0.43),
    ("cnn", "async"): (0.94, 0.92, 0.91, 0.86),
}
WITHOUT_STRAGGLERS = {"mlp": 0.90, "cnn": 0.95}
METHODS = {"vanilla": "vanilla", "drop": "drop", "salf": "SALF", "heterofl": "HeteroFL", "async": "AsyncFL"}
COLUMNS = ("released", "text", "mixed")
LAST = 10


class Case(NamedTuple):
    """A cell of the table."""

    model: str
    method: str
    stragglers: float

    @property
    def published(self) -> float | None:
        """Return the paper's accuracy; None where it has none."""
        if self.method == "vanilla":
            return WITHOUT_STRAGGLERS.get(self.model)
        row = PUBLISHED.get((self.model, self.method))
        return row[SHARES.index(self.stragglers)] if row and self.stragglers in SHARES else None


class Run(NamedTuple):
    """What is needed of one run."""

    case: Case
    settings: str
    accuracy: float
    curve: dict[int, float]
    """Test accuracy after so many rounds."""


def read(folder: Path) -> Run | None:
    """Return one run; None, and say so, where it is not done."""
    if (found := finished(folder)) is None:
        return None
    data, config = found
    algorithm, rules, speed = (config[section] for section in ("algorithm", "participation", "speed"))
    tested = data["accuracy"].dropna("round")
    method, share = algorithm["name"], speed.get("stragglers", 0.0)
    if method == "heterofl":
        share = round(algorithm["shares"][1] / sum(algorithm["shares"]), 6)
    elif rules["close"] == "all":
        method = "vanilla"
    elif rules["close"] == "arrivals":
        method = "async"
    elif rules["partial"] == "discard":
        method = "drop"
    case = Case(config["model"]["name"], method, share)
    curve = dict(zip((tested["round"].values + 1).tolist(), tested.values.tolist()))
    return Run(case, settings(algorithm), float(tested[-LAST:].mean()), curve)


def settings(algorithm: dict[str, Any]) -> str:
    """Return whose settings a run has."""
    plain, released = not algorithm["momentum"], algorithm.get("rule")
    if released is None:
        return "text" if plain else "released"
    return {(True, "paper"): "text", (False, "released"): "released"}.get((plain, released), "mixed")


def figures(runs: list[Run]) -> dict[str, Any]:
    """Return the mean over seeds, the lowest and the highest one."""
    values = [run.accuracy for run in runs]
    return {"seeds": len(values), "accuracy": statistics.fmean(values), "min": min(values), "max": max(values)}


def picture(runs: list[Run], path: Path) -> None:
    """Draw Figures 3 and 4: a panel per model and whose settings, a line per method, at 90 % stragglers or none."""
    from matplotlib import pyplot

    own = [run for run in runs if run.case.stragglers in (0.0, 0.9) and run.settings in COLUMNS[:2]]
    panels = sorted({(run.case.model, run.settings) for run in own}, reverse=True)
    columns = max(1, (len(panels) + 1) // 2)
    figure, axes = pyplot.subplots(2, columns, figsize=(4.5 * columns, 6), squeeze=False, layout="constrained")
    for axis, panel in zip(axes.T.flatten(), panels):
        for number, (method, name) in enumerate(METHODS.items()):
            curves = [run.curve for run in own if (run.case.model, run.settings) == panel and run.case.method == method]
            rounds = sorted(set.intersection(*map(set, curves))) if curves else []
            if rounds:
                means = [statistics.fmean(curve[round_] for curve in curves) for round_ in rounds]
                axis.plot(rounds, means, color=f"C{number}", label=name)
        axis.set(title=f"{panel[0].upper()}, {panel[1]}", xlabel="rounds", ylabel="test accuracy", ylim=(0, 1))
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=100)


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="draw Figures 3 and 4 into this file")
    given = parser.parse_args()
    runs = [run for run in map(read, sorted(given.runs)) if run]
    found: dict[Case, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        found[run.case][run.settings].append(run)
    names = [name for name in COLUMNS if any(name in cells for cells in found.values())]
    table, rows = Table("model", "method", "stragglers", "published", *names), []
    for case in sorted(found, key=lambda case: (case.model, [*METHODS].index(case.method), case.stragglers)):
        cells = {name: figures(found[case][name]) for name in names if name in found[case]}
        rows.append({**case._asdict(), "published": case.published, **cells})
        shown = (
            f"{f['accuracy']:.3f} ({f['min']:.3f} – {f['max']:.3f})" if (f := cells.get(n)) else "–" for n in names
        )
        published = "–" if case.published is None else f"{case.published:.2f}"
        table.add_row(case.model, METHODS[case.method], f"{case.stragglers:g}", published, *shown)
    Console(width=120).print(table)
    if given.output:
        picture(runs, given.output)
    print(json.dumps({"table2": rows}))


if __name__ == "__main__":
    main()
