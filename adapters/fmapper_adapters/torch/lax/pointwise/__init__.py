"""Primitives of JAX that compute element by element."""
