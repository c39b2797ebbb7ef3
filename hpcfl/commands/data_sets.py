"""Which files a data source reads, where they are published, and whether they are here; nothing is fetched."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from hpcfl.commands.list import texts
from hpcfl.data import Source, source_class, sources


def places(source: type[Source], data_dir: Path) -> list[tuple[str, Path | None]]:
    """Return each file that a source needs, and where it is; one of several that will do is enough."""
    needed = source.published.files if source.published else ()
    found = [[path for pattern in file.split(" or ") for path in sorted(data_dir.glob(pattern))] for file in needed]
    return [(file, next(iter(paths), None)) for file, paths in zip(needed, found)]


def overview(data_dir: Path | None) -> Table:
    """Return a table of all sources: whether their files are here, and what they are."""
    table = Table("data.name", "files", "what it is")
    for name, text in texts("data").items():
        found = places(source_class(name), data_dir or Path())
        here = data_dir and all(path for _, path in found)
        table.add_row(name, "none needed" if not found else "there" if here else "lacking", text)
    return table


def report(name: str, data_dir: Path | None) -> tuple[list[str], bool]:
    """Return what there is to say of a source, and whether all of its files are here; UsageError for another name."""
    source = source_class(name)
    about = [f"{name}: {texts('data')[name]}"] if name in sources() else [name]
    if source.published is None:
        return [*about, "  needs no files that others publish"], True
    found = places(source, data_dir or Path())
    lines = [*(f"  from     {page}" for page in source.published.pages), f"  licence  {source.published.licence}"]
    for file, path in found:
        here = data_dir and path
        lines.append(f"  there    {here}" if here else f"  lacking  {file} in {data_dir or '--data-dir or HPCFL_DATA'}")
    return [*about, *lines], bool(data_dir) and all(path for _, path in found)
