"""What `hpcfl run --profile` prints at the end: where each rank's time went."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcfl.base.tables import print_table
from hpcfl.base.types import Floats
from hpcfl.engine.profile import PHASES, Phases

COLUMNS = ("total", *PHASES)


def gathered(phases: Phases, comm: Any) -> dict[int, Floats]:
    """Return all ranks' figures at rank 0, none elsewhere; all ranks call it."""
    own = phases.figures()
    if comm is None:
        return {0: own}
    from hpcfl.mpi.waiting import rows

    ranks = dict(enumerate(rows(comm, own)))
    return ranks if comm.Get_rank() == 0 else {}


def report(ranks: Mapping[int, Floats]) -> None:
    """Print the ranks' figures, see `Phases.figures`, as a table and one JSON line last; nothing if there are none."""
    if ranks:
        print_table(table(ranks))
        print(json.dumps({"profile": facts(ranks)}), flush=True)


def table(ranks: Mapping[int, Floats]) -> Any:
    """The figures as a `rich` table, a row for each rank."""
    from rich.table import Column, Table

    shown = Table(*(Column(name, justify="right") for name in ("rank", "", *COLUMNS)), show_lines=True)
    for rank, figures in sorted(ranks.items()):
        seconds, shares, medians = _parts(figures)
        lines = zip(seconds, 100 * shares, 1000 * medians)
        cells = (f"{second:.2f}\n{share:.1f}\n{median:.3g}" for second, share, median in lines)
        shown.add_row(str(rank), "s\n%\nms per round", *cells)
    return shown


def facts(ranks: Mapping[int, Floats]) -> list[dict[str, Any]]:
    """For each rank seconds, shares of them and medians over rounds in seconds, of all phases and of each."""
    names = "seconds", "shares", "medians"
    return [
        {"rank": rank, "rounds": int(figures[0])}
        | {name: dict(zip(COLUMNS, np.round(part, 6).tolist())) for name, part in zip(names, _parts(figures))}
        for rank, figures in sorted(ranks.items())
    ]


def _parts(figures: Floats) -> tuple[Floats, Floats, Floats]:
    seconds, medians = np.split(figures[1:], 2)
    return seconds, seconds / (seconds[0] or 1.0), medians
