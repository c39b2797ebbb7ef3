"""How groups of clients fare: thirds by what their visits took, and the worst tenth by accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcfl import store
from hpcfl.base.errors import UsageError
from hpcfl.commands.curves import DECILE, tenth, thirds, worst_decile
from hpcfl.commands.groups import Recorded, groups

if TYPE_CHECKING:
    from xarray import DataArray, Dataset

FIGURES = {
    "accuracy": "accuracy on own test parts",
    "participation": "share of invitations that counted so far",
    "depth": "share of layers that counted so far",
}
Figures = Mapping[str, Mapping[str, float | None]]


def group_figures(run: Path | str) -> Dataset:
    """Return what groups of a run's clients came to, round by round.

    Parameters
    ----------
    run : Path or str
        The run folder, or the run.h5 in it.

    Returns
    -------
    Dataset
        By ``group`` and ``round``: ``accuracy``, the mean over the group's clients on their own test parts (NaN where
        they were not tested); ``participation`` and ``depth``, the share of the group's invitations so far that counted
        at all, and of the layers that they could have brought. By ``group`` and ``client``: ``member``.

    Raises
    ------
    UsageError
        If there is no run, or no client is slower than another.

    Notes
    -----
    The thirds are of the clients that were ever invited, by the mean of what their visits took: the same in all rounds.
    The accuracy of the worst tenth is that of each round's worst; its other figures are of those that were worst when
    last tested.
    """
    import xarray

    data = store.open_run(run)
    if not data.sizes.get("round"):
        raise UsageError(f"'{run}' has recorded no round: expected one at least")
    own, invited = data["client_accuracy"].dropna("client", how="all"), data["cohort"] == 1
    members = {name: data.client.isin(ids) for name, ids in thirds(data["visit_seconds"], f"'{run}'").items()}
    accuracy = [data["client_accuracy"].where(these).mean("client") for these in members.values()]
    members[DECILE] = data.client.isin(_worst(own))
    accuracy.append(worst_decile(own) if own.size else accuracy[0])
    shares = {"participation": data["arrived"] == 1, "depth": data["blocks"].where(invited, 0) / data.sizes["layer"]}

    def so_far(came: DataArray, these: DataArray) -> DataArray:
        asked = invited.where(these, 0).sum("client").cumsum("round")
        share: DataArray = came.where(these, 0).sum("client").cumsum("round") / asked.where(asked > 0)
        return share

    by_figure = {"accuracy": accuracy, "member": list(members.values())}
    by_figure |= {name: [so_far(came, these) for these in members.values()] for name, came in shares.items()}
    figures = {name: xarray.concat(each, "group") for name, each in by_figure.items()}
    return xarray.Dataset(figures).assign_coords(group=list(members))


def _worst(own: DataArray) -> Any:
    """Return who was in the worst tenth when last tested."""
    tested = own.dropna("round", how="all")
    if not tested.size:
        return []
    last = tested.isel(round=-1).dropna("client")
    return last.client.values[np.argsort(last.values, kind="stable")[: tenth(last.size)]]


def last_figures(run: Path) -> dict[str, dict[str, float | None]]:
    """Return each group's last known figures and its number of clients; none where no client is slower than others."""
    try:
        found = group_figures(run)
    except UsageError:
        return {}
    return {
        str(name): {"clients": int(found["member"].sel(group=name).sum())}
        | {figure: _last(found[figure].sel(group=name)) for figure in FIGURES}
        for name in found.group.values
    }


def _last(values: DataArray) -> float | None:
    known = values.dropna("round").values
    return float(known[-1]) if len(known) else None


def table(folders: Sequence[Path], figures: Sequence[Figures]) -> Any:
    """Return the `last_figures` of runs as a `rich` table: means over the seeds of each config."""
    from rich.table import Column, Table

    runs, names = [Recorded.of(folder) for folder in folders], ("clients", *FIGURES)
    shown = Table("run", "group", *(Column(name, justify="right") for name in names))
    for config in groups(runs):
        own = [figures[runs.index(run)] for run in config.runs]
        for group in dict.fromkeys(group for each in own for group in each):
            values = ([each[group][name] for each in own if group in each] for name in names)
            known = [[value for value in some if value is not None] for some in values]
            shown.add_row(config.label, group, *(f"{np.mean(some):.4g}" if some else "–" for some in known))
    return shown
