"""Every column of run.h5, as the code that records it describes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcfl.algorithms import algorithm_class, algorithms
from hpcfl.engine.record import COLUMNS, FACTS, FATES, SOMETIMES
from hpcfl.store import Column

PAGE = f"""# Columns

Made from the code by `hpcfl list columns --markdown`; `hpcfl list columns` prints the same. A column has a row per
round, and the axes that stand beside it. What is not known is NaN, -1, or the largest unsigned number. Each metric of
`[task] metrics` has three columns, as accuracy does: `NAME`, `client_NAME` and `mean_client_NAME`.
`fate` counts from 0: {", ".join(FATES).replace("_", " ")}."""
HEAD = "| column | axes | unit | what it holds |\n|---|---|---|---|"


def groups() -> Iterator[tuple[str, Sequence[Column]]]:
    """Yield what asks for columns, and these; last what is recorded once of each client."""
    yield "Always", COLUMNS
    for keys, columns in SOMETIMES.items():
        yield f"With {keys}", columns
    for name in algorithms():
        if texts := algorithm_class(name).metric_columns:
            yield f"With `{name}`", [Column(each, (), "float64", text) for each, text in texts.items()]
    yield "Once per client, without a round", [Column(name, ("client",), "int64", text) for name, text in FACTS.items()]


def lines() -> Iterator[str]:
    """Yield them as text."""
    for title, columns in groups():
        yield from ("", title.replace("`", ""))
        for each in columns:
            about = ", ".join([*each.dims, *([each.units] if each.units else [])])
            yield f"    {each.name}{about and f' ({about})'}  {each.long_name}"


def markdown() -> Iterator[str]:
    """Yield them as a page."""
    yield PAGE
    for title, columns in groups():
        yield f"\n## {title}\n\n{HEAD}"
        yield from (f"| `{each.name}` | {', '.join(each.dims)} | {each.units} | {each.long_name} |" for each in columns)
