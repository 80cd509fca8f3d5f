"""What handlers import: the same names as in TorchServe, `ts._runtime` apart."""

from ts.version import __version__

__all__ = ["__version__"]
