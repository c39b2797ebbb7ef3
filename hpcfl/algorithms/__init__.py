"""Federated learning algorithms: one paper, one file. A new file is found by itself."""

from hpcfl.algorithms.base import Algorithm, IteratedReduction, ServerState
from hpcfl.base.plugins import lookup, registered

__all__ = ["TITLES", "Algorithm", "IteratedReduction", "ServerState", "algorithm_class", "algorithms"]

TITLES = {
    "decoupled_diloco": "Decoupled DiLoCo",
    "ditto": "Ditto",
    "fedasync": "FedAsync",
    "fedavg": "FedAvg",
    "feddyn": "FedDyn",
    "fedhenn": "FedHeNN",
    "fedlrgd": "FedLRGD",
    "fednova": "FedNova",
    "fedprox": "FedProx",
    "fedrep": "FedRep",
    "fedrolex": "FedRolex",
    "flic": "FLIC",
    "focus": "FOCUS",
    "heterofl": "HeteroFL",
    "hf_maml": "HF-MAML",
    "lg_fedavg": "LG-FedAvg",
    "linear_fedrep": "FedRep (linear)",
    "local": "Local",
    "pfedme": "pFedMe",
    "ringleader": "Ringleader ASGD",
    "ringmaster": "Ringmaster ASGD",
    "salf": "SALF",
    "scaffold": "SCAFFOLD",
}
"""What papers call the algorithms, by their names."""


def algorithms() -> dict[str, str]:
    """Return ``{name: module}`` of the algorithms there are."""
    return registered("hpcfl.algorithms", Algorithm)


def algorithm_class(name: str) -> type[Algorithm]:
    """Return the algorithm called `name`; UsageError names the nearest where there is none."""
    return lookup("hpcfl.algorithms", Algorithm, name, "algorithm.name")
