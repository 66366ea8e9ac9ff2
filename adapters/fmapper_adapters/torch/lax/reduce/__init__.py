"""Primitives of JAX that combine many elements: reductions, scans, sliding windows."""
