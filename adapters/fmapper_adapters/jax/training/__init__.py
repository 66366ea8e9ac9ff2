"""Optimizers of optax as plain data, and back."""
