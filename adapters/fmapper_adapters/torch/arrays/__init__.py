"""Tensors: where they live, how they reach other devices and libraries, and what hangs on them."""
