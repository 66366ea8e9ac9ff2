"""ATen operations in JAX: one function per operation, in files by kind."""
