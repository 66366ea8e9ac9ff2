"""Arrays of JAX: their devices, what they share with host memory, and random keys."""
