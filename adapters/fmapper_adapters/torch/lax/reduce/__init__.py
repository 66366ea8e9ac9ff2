"""Primitives of JAX that combine many elements: reductions, cumulative ones, sliding windows."""
