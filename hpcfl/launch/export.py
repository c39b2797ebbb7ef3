"""What leaves the house: a run as one file, or the weights of its model alone."""

from __future__ import annotations

from pathlib import Path

from hpcfl import store
from hpcfl.base.errors import UsageError
from hpcfl.launch.api import Run
from hpcfl.store import archive
from hpcfl.store.atomic import replace

SUFFIXES = ".zip", ".safetensors"


def export(run: Path | str, to: Path | str, *, client: int | None = None) -> Path:
    """Write a run, or its model, to one file, and return its path.

    Parameters
    ----------
    run : Path or str
        The run folder.
    to : Path or str
        ``….zip``: rows, checkpoints and code, no data; `hpcfl.open_run` and all that reads runs open it, and
        unzipped it is a run folder. ``….safetensors``: the model's tensors by their PyTorch names.
    client : int, optional
        Whose model; None: the shared one.

    Raises
    ------
    UsageError
        If the file's name ends otherwise, or the run has no such model.

    Examples
    --------
    >>> run = hpcfl.run("fedavg-digits", settings={"rounds": 2, "evaluate.every": 1}, out="runs/two", quiet=True)
    >>> hpcfl.export("runs/two", "two.zip").name
    'two.zip'
    >>> hpcfl.open_run("two.zip").sizes["round"]
    2
    """
    path = Path(to)
    if path.suffix not in SUFFIXES:
        raise UsageError(f"'{path}': expected a name that ends in {' or '.join(SUFFIXES)}")
    if path.suffix == ".zip":
        if client is not None:
            raise UsageError(
                f"'{path}' is to hold the whole run: expected no client, or a name that ends in .safetensors"
            )
        archive.write(store.run_folder(run), path)
        return path
    from safetensors.torch import save_file

    tensors = {
        name: value.contiguous().clone() for name, value in Run(store.run_folder(run)).state_dict(client).items()
    }
    with replace(path) as new:
        save_file(tensors, new, {"format": "pt"})
    return path
