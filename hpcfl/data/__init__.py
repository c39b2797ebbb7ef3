"""Where samples come from: one file per source, named like the value of the key ``data.name``.

A module that defines a named `Source` is a source: digits, mnist, usps, cifar10, cifar100, emnist, femnist, sent140,
hdf5, linear, unit_cube, reduced, and those whose clients have feature spaces of their own: two_digits,
noisy_features, linear_mapping, linear_spaces. The others are what sources are made of: promises and bases (base,
pooled, cifar, gaussians), readers of file formats (idx, pickles, leaf, glove, libsvm, hdf5_file, folder), how samples
are dealt to clients (partition) and which the server keeps (server), how pixels become features (pixels), and how
features of known moments are whitened (whitening).
"""

from hpcfl.base.registry import lookup, registered
from hpcfl.data.base import ClientData, Federation, Header, Source

__all__ = ["ClientData", "Federation", "Header", "Source", "source_class", "sources"]


def sources() -> list[str]:
    """Return the names of the data sources there are, in alphabetical order."""
    return sorted(registered("hpcfl.data", Source))  # type: ignore[type-abstract]


def source_class(name: str) -> type[Source]:
    """Return the data source called `name`; UsageError names the nearest where there is none."""
    return lookup("hpcfl.data", Source, name, "data.name")  # type: ignore[type-abstract]
