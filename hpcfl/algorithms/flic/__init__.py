"""FLIC: federated learning in a common latent space (Rakotomamonjy et al.), from its keys to its barycenters."""

from hpcfl.algorithms.flic.algorithm import Flic

__all__ = ["Flic"]
