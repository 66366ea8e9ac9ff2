"""Computes with tensors: transformations of functions, layers, random numbers as JAX draws them."""
