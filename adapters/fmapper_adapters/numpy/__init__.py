"""NumPy: arrays and scalars on the host."""

from fmapper_adapters.numpy.adapter import NumpyAdapter

__all__ = ["NumpyAdapter", "adapter"]

adapter = NumpyAdapter()
