"""Optimizers and learning-rate schedulers of torch as plain data, and back."""
