"""Writes operations of ATen in JAX, as a person would."""
