"""Where samples come from: a source per value of the key ``data.name``, each a class that some module here defines.

Images cut from one pool (`pooled`, `partition`): mnist, emnist (`mnist`), cifar10, cifar100 (`cifar`), usps, digits,
reduced (`bundled`). Clients who come with their data: femnist, sent140. Either: hdf5. Synthetic: unit_cube, linear,
linear_spaces (`linear`), noisy_features, linear_mapping (`gaussians`). Two domains: two_digits. `formats` reads files.
"""

from hpcfl.base.plugins import lookup, outside, registered
from hpcfl.data import dataset
from hpcfl.data.base import ClientData, Federation, Header, InMemory, Source

__all__ = ["ClientData", "Federation", "Header", "InMemory", "Source", "source_class", "sources"]


def sources() -> list[str]:
    """Return the names of the data sources there are, in alphabetical order."""
    return sorted(registered("hpcfl.data", Source))  # type: ignore[type-abstract]


def source_class(name: str) -> type[Source]:
    """Return the data source called `name`, a class of the user's own, or the section of a PyTorch dataset."""
    if ":" in name:
        found = outside(name, "data.name")
        if not (isinstance(found, type) and issubclass(found, Source)):
            return dataset.section(name, found)
    return lookup("hpcfl.data", Source, name, "data.name")  # type: ignore[type-abstract]
