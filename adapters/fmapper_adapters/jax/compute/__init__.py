"""Computes with arrays of JAX: transformations of functions, layers and random numbers."""
