"""Primitives of JAX for linear algebra, convolutions and Fourier transforms."""
