"""Federated learning as an ordinary MPI batch job.

What ``__init__.pyi`` names is public; all else may change. It is imported when it is first asked for: commands note
signals before NumPy and HDF5 are loaded.
"""

from importlib.metadata import version

from lazy_loader import attach_stub

__version__ = version("hpcfl")
__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
__all__.append("__version__")
