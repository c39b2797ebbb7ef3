"""FedLRGD: low-rank gradient descent at the server (Jadbabaie, Makur & Shah), and what it is made of."""

from hpcfl.algorithms.fedlrgd.algorithm import FedLrgd

__all__ = ["FedLrgd"]
