"""Reader of pickled NumPy arrays and plain values that runs no code of the file's choosing."""

from __future__ import annotations

import _codecs
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from hpcfl.errors import UsageError

REBUILD = np.zeros(0).__reduce__()[0]  # whatever this NumPy calls it, old files say numpy.core.multiarray
ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): REBUILD,
    ("numpy._core.multiarray", "_reconstruct"): REBUILD,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _codecs.encode,
}


class Restricted(pickle.Unpickler):
    """An unpickler that knows what arrays are made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an admitted global; any other could be made to run anything."""
        if (module, name) not in ADMITTED:
            raise UsageError(f"refers to {module}.{name}, expected nothing but numpy arrays and plain values: not read")
        return ADMITTED[module, name]


def read(path: Path) -> Any:
    """Return what was pickled, by Python 2 or 3; strings of Python 2 come as bytes.

    Raises
    ------
    UsageError
        If the file is missing, truncated or damaged, or refers to anything but arrays.
    """
    try:
        with path.open("rb") as file:
            return Restricted(file, encoding="bytes").load()
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except Exception as error:  # a damaged pickle raises anything
        raise UsageError(f"{path}: truncated or damaged, expected a pickle ({type(error).__name__})") from None
