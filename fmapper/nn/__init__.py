"""What neural networks need beyond the array API standard: `fmapper.nn.functional`."""

from fmapper.nn import functional

__all__ = ["functional"]
