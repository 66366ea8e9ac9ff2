"""Primitives of JAX from linear algebra, convolutions and Fourier transforms among them."""
