"""How operations of ATen are written in JAX: the code that a person would write."""
