"""Primitives of JAX that create, move, select and scatter elements."""
