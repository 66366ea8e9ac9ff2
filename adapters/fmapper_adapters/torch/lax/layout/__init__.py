"""Primitives of JAX that make, move, pick and place elements."""
