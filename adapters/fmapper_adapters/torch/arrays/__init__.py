"""Tensors: devices, transfers, exchange with other libraries, gradients and attributes."""
