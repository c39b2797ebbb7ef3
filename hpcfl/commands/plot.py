"""``hpcfl plot``: what `hpcfl.figure` draws, into a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcfl.base.errors import UsageError, UserError, did_you_mean, listed
from hpcfl.commands.show import unforeseen
from hpcfl.results.drawing import Picture, Width
from hpcfl.results.figures import figure


def plot(
    folders: Sequence[Path], picture: Path, width: Width | None, labels: Sequence[str], order: str | None, **how: Any
) -> None:
    """Draw runs, or folders of runs, into `picture` (format by its suffix).

    UsageError for a suffix that stands for no format, and as `hpcfl.figure`.
    """
    check_kind(picture)
    if odd := [label for label in labels if not all(label.partition("="))]:
        raise UsageError(f"label: expected VALUE=WORDS, got '{odd[0]}'")
    words = dict(label.partition("=")[::2] for label in labels)
    width = width or ("column" if picture.suffix == ".pdf" else "page")
    try:
        drawn = figure(folders, width=width, labels=words, order=order.split(",") if order else (), **how)
        save(drawn, picture)
    except UserError:
        raise
    except Exception as error:  # what an odd table makes xarray and h5py raise is not foreseen
        raise unforeseen(listed([f"'{folder}'" for folder in folders]), error) from error


def check_kind(picture: Path) -> None:
    """Raise UsageError for a suffix that stands for no format."""
    kinds = Picture().canvas.get_supported_filetypes()
    if picture.suffix.removeprefix(".") not in kinds:
        raise UsageError(f"'{picture}': no picture of that kind{did_you_mean(picture.suffix.removeprefix('.'), kinds)}")


def save(drawn: Picture, picture: Path) -> None:
    """Write what is drawn into a file."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(picture, dpi=200)
