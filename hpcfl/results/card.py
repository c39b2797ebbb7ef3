"""A run as a notebook shows it: what it came to, and a small curve."""

from __future__ import annotations

import io
from html import escape
from typing import TYPE_CHECKING, Any

from hpcfl.results.run_table import recorded_metrics

if TYPE_CHECKING:
    import xarray


def card(name: str, data: xarray.Dataset) -> str:
    """Return HTML of what `hpcfl.open_run` has returned."""
    told = str(data.attrs["status"]) + (f": {data.attrs['reason']}" if data.attrs["reason"] else "")
    rows = {"status": told, "rounds": str(data.sizes["round"])}
    curves = {}
    for key in recorded_metrics(data) if "cohort" in data else []:
        for column in (key, f"mean_client_{key}"):
            if column in data and len(known := data[column].dropna("round")):
                curves[column] = known
                rows[column] = f"{float(known[-1]):.4f}"
                break
    if "cohort" in data and (invited := int((data["cohort"] == 1).sum())):
        rows["arrived"] = f"{int((data['arrived'] == 1).sum())} of {invited} visits"
    for key, text in (("sim_seconds", "simulated seconds"), ("wall_seconds", "seconds")):
        if key in data.coords and data.sizes["round"]:
            rows[text] = f"{float(data[key][-1]):.1f}"
    cells = "".join(f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in rows.items())
    table = f"<table><caption>{escape(name)}</caption>{cells}</table>"
    column = next(iter(curves), "")
    picture = _drawn(curves[column], column) if column else ""
    return f'<div style="display: flex; gap: 2em">{table}{picture}</div>'


def _drawn(values: xarray.DataArray, column: str) -> str:
    """Return a curve over the rounds as SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.3, 1.8), layout="constrained")
    axes = figure.add_subplot(xlabel="round", ylabel=column.replace("_", " "))
    axes.plot(values["round"].values + 1, values.values)
    return svg(figure)


def svg(figure: Any) -> str:
    """Return a figure as a part of HTML."""
    figure.savefig(picture := io.StringIO(), format="svg")
    return "<svg" + picture.getvalue().partition("<svg")[2]
